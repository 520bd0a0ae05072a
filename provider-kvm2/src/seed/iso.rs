//! The ISO image itself: files in, bytes out, no disk touched.
//!
//! The same files give the same bytes. Rock Ridge and Joliet both carry the long
//! lower-case names that cloud-init looks for.

use std::fmt;

use hadris_fs::{Content, Node, Tree};
use hadris_iso::sync::write;
use hadris_iso::{IsoId, IsoOptions, plan};
use hadris_storage::{BlockSize, MemDevice};

/// Largest user-data, in bytes. Also the contract's limit.
pub const MAX_USER_DATA: usize = 1 << 20;
/// Largest image: the largest user-data, as much again for the vendor-data, and what ISO 9660 itself
/// needs (some 400 KiB).
pub const MAX_SEED: usize = 4 << 20;

/// The label by which cloud-init finds the seed.
const LABEL: &str = "cidata";
/// Sector size of ISO 9660.
const SECTOR: u32 = 2048;

/// The files of a seed.
#[derive(Clone)]
pub struct SeedFiles<'a> {
    /// The caller's bytes, opaque and secret.
    pub user_data: &'a [u8],
    pub meta_data: &'a [u8],
    pub vendor_data: &'a [u8],
    /// None: the image's own network configuration applies.
    pub network_config: Option<&'a [u8]>,
}

impl fmt::Debug for SeedFiles<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SeedFiles({} bytes of user-data)", self.user_data.len())
    }
}

/// Why a seed cannot be built; never holds any of its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SeedFault {
    #[error("user-data of {len} bytes is longer than {MAX_USER_DATA}")]
    UserDataTooLarge { len: usize },
    #[error("the seed of {len} bytes is longer than {MAX_SEED}")]
    TooLarge { len: u64 },
    #[error("the ISO image could not be laid out")]
    Layout,
}

/// The image. Its length is a multiple of the sector size.
pub fn build(files: &SeedFiles<'_>) -> Result<Vec<u8>, SeedFault> {
    if files.user_data.len() > MAX_USER_DATA {
        return Err(SeedFault::UserDataTooLarge { len: files.user_data.len() });
    }
    let mut tree = Tree::new();
    let mut add = |name: &str, bytes: &[u8]| {
        // the causes are about names, sizes and sectors that are all ours; none helps a caller
        tree.insert(name, Node::file(Content::bytes(bytes))).map_err(|_| SeedFault::Layout)
    };
    add("meta-data", files.meta_data)?;
    add("user-data", files.user_data)?;
    add("vendor-data", files.vendor_data)?;
    if let Some(network_config) = files.network_config {
        add("network-config", network_config)?;
    }
    let options = IsoOptions::default().with_id(IsoId::Volume, LABEL).with_joliet().with_rock_ridge();
    let len = plan(&tree, &options).map_err(|_| SeedFault::Layout)?.size();
    let space = usize::try_from(len).ok().filter(|len| *len <= MAX_SEED).ok_or(SeedFault::TooLarge { len })?;
    let sector = BlockSize::new(SECTOR).ok_or(SeedFault::Layout)?;
    let mut device = MemDevice::new(vec![0; space], sector);
    write(&mut device, &tree, &options).map_err(|_| SeedFault::Layout)?;
    Ok(device.into_inner())
}
