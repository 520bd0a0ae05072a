//! The providers file: what a person configures, checked once, then trusted.
//!
//! [`load()`] reads the predecessor's `providers:` file (entries of type `kvm2`;
//! other types are skipped with one line), applies environment overrides and
//! reports all faults together, each with file, path and value. [`watch`](mod@watch) keeps a
//! [`ConfigHandle`] current; a broken new file is refused whole.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::hypervisor::Budgets;

pub mod describe;
mod entry;
pub mod load;
mod overrides;
mod raw;
mod reader;
pub mod report;
mod schema;
pub mod url_policy;
mod values;
pub mod vendor_header;
pub mod watch;

pub use describe::describe;
pub use load::load;
pub use report::ConfigReport;
pub use url_policy::UrlPolicy;

/// Everything one daemon serves, in file order.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub entries: Vec<Arc<Entry>>,
}

/// One `type: kvm2` entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Matches [`is_identifier`]; part of the names of base volumes.
    pub name: String,
    pub ssh_key_file: PathBuf,
    pub host_keys: HostKeys,
    /// Capacity of every VM's overlay, in GiB.
    pub disk_size_gib: u64,
    pub vendor_data: Option<String>,
    pub guest_agent: GuestAgent,
    pub network_config: NetworkConfig,
    pub images: BTreeMap<String, CatalogueImage>,
    pub machine_types: BTreeMap<String, MachineType>,
    pub hosts: Vec<Host>,
    pub virt_type: VirtType,
    /// `host-passthrough`, `host-model`, `maximum` or a model name.
    pub cpu_mode: String,
    /// libvirt's machine, `q35` unless configured.
    pub machine: String,
    pub pool_reserve: PoolReserve,
    /// Largest image, compressed or not, in bytes.
    pub max_image_bytes: u64,
    pub url_policy: UrlPolicy,
    pub digests: DigestPolicy,
    pub budgets: Budgets,
    /// Things that work but that a person should know of; shown at load and by Check.
    pub warnings: Vec<String>,
}

impl Entry {
    pub fn host(&self, name: &str) -> Option<&Host> {
        self.hosts.iter().find(|h| h.name == name)
    }

    pub fn disk_bytes(&self) -> u64 {
        self.disk_size_gib << 30
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostKeys {
    KnownHosts(PathBuf),
    /// `insecureIgnoreHostKey: true`
    Ignored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestAgent {
    /// The vendor-data script installs and starts it where it is missing.
    Install,
    Leave,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkConfig {
    /// The seed carries a network-config that matches the NIC by its MAC.
    Written,
    /// The image's own network configuration applies.
    Omitted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtType {
    Kvm,
    Qemu,
}

impl VirtType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Qemu => "qemu",
        }
    }
}

/// Space of a pool that Create leaves free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolReserve {
    /// 5 % of the capacity: what ext4 keeps for root by default, and so what a
    /// non-root QEMU cannot use although libvirt reports it as available.
    FivePercent,
    Bytes(u64),
}

impl PoolReserve {
    pub fn bytes(self, capacity: u64) -> u64 {
        match self {
            Self::FivePercent => capacity / 20,
            Self::Bytes(n) => n,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestPolicy {
    Optional,
    /// `requireDigest: true`: an image without a sha256 is refused.
    Required,
}

/// An image of the catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogueImage {
    pub url: ImageUrl,
    pub sha256: Option<Sha256Hex>,
    pub format: ImageFormat,
    pub firmware: Firmware,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    Qcow2,
    Raw,
}

impl ImageFormat {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    Uefi,
    Bios,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineType {
    pub vcpus: u32,
    pub memory_mib: u64,
}

/// A hypervisor host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    /// Host name or address without brackets.
    pub address: String,
    pub port: u16,
    pub user: String,
    pub socket: String,
    pub pool: String,
    pub bridge: String,
}

impl Host {
    /// `host:port`, an IPv6 address in brackets.
    pub fn endpoint(&self) -> String {
        if self.address.contains(':') { format!("[{}]:{}", self.address, self.port) } else { format!("{}:{}", self.address, self.port) }
    }
}

/// 64 lower-case hex digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sha256Hex(String);

impl Sha256Hex {
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_lowercase();
        (text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())).then_some(Self(text))
    }

    pub fn of(digest: &[u8; 32]) -> Self {
        Self(hex::encode(digest))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Sha256Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An absolute http(s) URL. Shown without user-info and query, which may be secret.
#[derive(Clone, PartialEq, Eq)]
pub struct ImageUrl(reqwest::Url);

impl ImageUrl {
    /// None unless the text is an absolute http or https URL with a host.
    pub fn parse(text: &str) -> Option<Self> {
        let url = reqwest::Url::parse(text).ok()?;
        (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(Self(url))
    }

    pub fn url(&self) -> &reqwest::Url {
        &self.0
    }

    /// The exact text, for comparing and for the request; never for showing.
    pub fn as_secret_str(&self) -> &str {
        self.0.as_str()
    }

    pub fn redacted(&self) -> String {
        let mut url = self.0.clone();
        // both fail only for URLs without a host, which parse() refuses
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_fragment(None);
        if url.query().is_some() {
            url.set_query(Some("redacted"));
        }
        url.into()
    }
}

impl fmt::Display for ImageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

impl fmt::Debug for ImageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageUrl({self})")
    }
}

/// The predecessor's identifier rule: letters, digits, dots, dashes, underscores;
/// no more than 64 characters and no leading dot or dash.
pub fn is_identifier(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && !text.starts_with(['.', '-'])
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
}

/// The current configuration; cheap to read, replaced whole.
#[derive(Debug, Clone)]
pub struct ConfigHandle(tokio::sync::watch::Receiver<Arc<Config>>);

impl ConfigHandle {
    pub fn new(receiver: tokio::sync::watch::Receiver<Arc<Config>>) -> Self {
        Self(receiver)
    }

    /// A configuration that never changes.
    pub fn fixed(config: Config) -> Self {
        let (_, receiver) = tokio::sync::watch::channel(Arc::new(config));
        Self(receiver)
    }

    pub fn current(&self) -> Arc<Config> {
        self.0.borrow().clone()
    }

    /// Resolves once the configuration was replaced; never again after the watcher ended.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// How often the files are looked at: cheap (one stat), and soon enough for a person.
pub const WATCH_INTERVAL: Duration = Duration::from_secs(2);
