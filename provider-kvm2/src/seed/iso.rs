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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use hadris_fs::sync::Volume;
    use hadris_fs::{MountOptions, OpenOptions};
    use hadris_iso::sync::IsoFs;
    use rstest::rstest;

    use super::*;

    fn files<'a>(user_data: &'a [u8]) -> SeedFiles<'a> {
        SeedFiles { user_data, meta_data: b"instance-id: \"a\"\n", vendor_data: b"", network_config: Some(b"version: 2\n") }
    }

    fn read(image: &[u8], name: &str) -> Option<Vec<u8>> {
        use std::io::Read as _;
        let device = MemDevice::new(image.to_vec(), BlockSize::new(SECTOR).expect("a power of two"));
        let volume = Volume::new(IsoFs::mount(device, MountOptions::new()).expect("an ISO image"));
        let mut bytes = Vec::new();
        volume.open(format!("/{name}"), OpenOptions::new().read()).ok()?.read_to_end(&mut bytes).expect("readable");
        Some(bytes)
    }

    fn awkward() -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("empty", vec![]),
            ("crlf", b"#cloud-config\r\nhostname: x\r\n".to_vec()),
            ("nul", b"a\0b\0".to_vec()),
            ("invalid_utf8", vec![0xff, 0xfe, 0xc3, 0x28]),
            ("one_sector", vec![b'x'; 2048]),
            ("largest", (0..MAX_USER_DATA).map(|n| (n % 251) as u8).collect()),
        ]
    }

    #[test]
    fn user_data_arrives_byte_for_byte() {
        for (name, bytes) in awkward() {
            let image = build(&files(&bytes)).expect(name);
            assert!(read(&image, "user-data") == Some(bytes), "{name}");
            assert_eq!(read(&image, "meta-data").as_deref(), Some(&b"instance-id: \"a\"\n"[..]), "{name}");
            assert_eq!(read(&image, "vendor-data").as_deref(), Some(&b""[..]), "{name}");
            assert_eq!(read(&image, "network-config").as_deref(), Some(&b"version: 2\n"[..]), "{name}");
        }
    }

    /// What another implementation reads, where it is installed.
    #[test]
    fn xorriso_reads_the_same_bytes() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (name, bytes) in awkward() {
            let (iso, out) = (dir.path().join("seed.iso"), dir.path().join(name));
            std::fs::write(&iso, build(&files(&bytes)).expect(name)).expect("written");
            let run =
                Command::new("xorriso").args(["-osirrox", "on", "-indev"]).arg(&iso).args(["-extract", "/user-data"]).arg(&out).output();
            let Ok(output) = run else {
                eprintln!("skipped: xorriso is not installed");
                return;
            };
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(String::from_utf8_lossy(&output.stderr).contains("'cidata'"), "the label");
            assert!(std::fs::read(&out).expect("extracted") == bytes, "{name}");
        }
    }

    /// The label is what cloud-init looks for, and blkid is how it looks.
    #[test]
    fn blkid_finds_the_label() {
        let mut iso = tempfile::NamedTempFile::new().expect("a temporary file");
        std::io::Write::write_all(&mut iso, &build(&files(b"x")).expect("built")).expect("written");
        let Ok(output) = Command::new("/usr/sbin/blkid").args(["-p", "-o", "export"]).arg(iso.path()).output() else {
            eprintln!("skipped: blkid is not installed");
            return;
        };
        let found = String::from_utf8_lossy(&output.stdout);
        assert!(found.contains("LABEL=cidata\n") && found.contains("TYPE=iso9660\n"), "{found}");
    }

    #[test]
    fn the_same_files_give_the_same_image() {
        assert!(build(&files(b"#!/bin/sh\n")) == build(&files(b"#!/bin/sh\n")));
    }

    #[test]
    fn without_a_network_configuration_there_is_no_such_file() {
        let image = build(&SeedFiles { network_config: None, ..files(b"") }).expect("built");
        assert_eq!(read(&image, "network-config"), None);
    }

    #[rstest]
    #[case::user_data(MAX_USER_DATA + 1, 0, SeedFault::UserDataTooLarge { len: MAX_USER_DATA + 1 })]
    fn too_much_is_refused(#[case] user: usize, #[case] vendor: usize, #[case] fault: SeedFault) {
        let (user_data, vendor_data) = (vec![0; user], vec![0; vendor]);
        assert_eq!(build(&SeedFiles { vendor_data: &vendor_data, ..files(&user_data) }), Err(fault));
    }

    #[test]
    fn a_seed_that_outgrows_its_limit_is_refused() {
        let vendor_data = vec![0; MAX_SEED];
        let fault = build(&SeedFiles { vendor_data: &vendor_data, ..files(b"") });
        assert!(matches!(fault, Err(SeedFault::TooLarge { .. })), "{:?}", fault.map(|image| image.len()));
    }

    #[test]
    fn debug_shows_no_user_data() {
        assert_eq!(format!("{:?}", files(b"SENTINEL")), "SeedFiles(8 bytes of user-data)");
    }
}
