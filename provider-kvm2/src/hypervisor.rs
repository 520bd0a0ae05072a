//! The hypervisor seam: exactly the libvirt calls that the provider needs.
//!
//! One real implementation over libvirt ([`libvirt`]), one decorator that gives
//! every call its span, log line and metric ([`observed`]), one function that
//! gives every failure its class ([`classify`]). Nothing above this module sees a
//! libvirt type; nothing in it knows what an instance, an image or a mark is.
//!
//! A call runs on a blocking thread and has a budget. A caller that goes away
//! does not end its call: the call finishes within its budget and its result is
//! dropped. A budget overrun marks the whole link dead, because nothing else
//! frees a thread that sits in libvirt's C library.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;
use uuid::Uuid;

use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::error::ProviderError;

pub mod classify;
pub mod libvirt;
#[cfg(test)]
pub mod memory;
pub mod observed;

/// A domain as one connection knows it. The handle keeps libvirt from being asked
/// again for what it has already said; it dies with its connection.
#[derive(Clone)]
pub struct DomainRef {
    pub name: String,
    pub uuid: Uuid,
    pub(crate) handle: Handle,
}

/// A storage pool as one connection knows it.
#[derive(Clone)]
pub struct PoolRef {
    pub name: String,
    pub(crate) handle: Handle,
}

/// A volume as one connection knows it. `key` is libvirt's volume key, for a dir
/// pool the absolute path of the file.
#[derive(Clone)]
pub struct VolumeRef {
    pub name: String,
    pub key: String,
    pub(crate) handle: Handle,
}

/// What an implementation keeps of its own behind a reference.
pub(crate) type Handle = Option<Arc<dyn Any + Send + Sync>>;

impl fmt::Debug for DomainRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "domain {} ({})", self.name, self.uuid)
    }
}

impl fmt::Debug for PoolRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.name)
    }
}

impl fmt::Debug for VolumeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {}", self.name)
    }
}

/// `virStoragePoolInfo`: state and sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolInfo {
    /// `virStoragePoolState`; 2 is running.
    pub state: i32,
    pub capacity: u64,
    pub allocation: u64,
    pub available: u64,
}

impl PoolInfo {
    pub const RUNNING: i32 = 2;
}

/// `virStorageVolInfo`: sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeInfo {
    pub capacity: u64,
    pub allocation: u64,
}

/// What goes into an upload stream. A sender that is dropped without
/// [`UploadPart::Finish`] aborts the stream, and so does [`UploadPart::Abort`].
#[derive(Debug)]
pub enum UploadPart {
    Data(Bytes),
    Finish,
    Abort,
}

/// How much time a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgets {
    /// TCP connect, SSH handshake, socket channel and libvirt open together.
    pub dial: Duration,
    /// Any call that is not named here.
    pub call: Duration,
    /// Starting a domain.
    pub start: Duration,
    /// Creating a fully allocated volume, where the host may have to write zeros.
    pub allocate: Duration,
    /// Uploading a seed or a marker.
    pub upload_small: Duration,
    /// Fetching and uploading one image.
    pub upload_image: Duration,
    /// Waiting for a started domain to be running.
    pub settle: Duration,
}

impl Default for Budgets {
    fn default() -> Self {
        Self {
            dial: Duration::from_secs(10),
            call: Duration::from_secs(30),
            start: Duration::from_secs(90),
            allocate: Duration::from_secs(20 * 60),
            upload_small: Duration::from_secs(60),
            upload_image: Duration::from_secs(20 * 60),
            settle: Duration::from_secs(15),
        }
    }
}

/// Why a call failed. [`classify`] turns it into a `ProviderError`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call} failed on host {host}")]
pub struct CallError {
    pub host: String,
    pub call: &'static str,
    #[source]
    pub kind: CallFailure,
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum CallFailure {
    /// libvirt answered with an error; `message` is bounded and escaped.
    #[error("libvirt error {code} (domain {domain}): {message}")]
    Libvirt { code: i32, domain: i32, message: String },
    /// The link died before or during the call.
    #[error("the link is down: {cause}")]
    LinkDead { cause: String },
    /// The call did not end within its budget; the link was dropped for it.
    #[error("no answer within {budget:?}")]
    Timeout { budget: Duration },
    /// The sending side of an upload ended it; its own error tells why.
    #[error("the upload was aborted by its source")]
    SourceAborted,
    /// Nothing was asked of the host, for a reason of this side's.
    #[error("not asked: {why}")]
    NotAsked { why: String },
    /// The answer broke a bound or a format; `what` says which.
    #[error("the host's answer is not usable: {what}")]
    BadAnswer { what: String },
}

impl CallError {
    /// libvirt's `virErrorNumber`, if libvirt answered at all.
    pub fn code(&self) -> Option<i32> {
        match &self.kind {
            CallFailure::Libvirt { code, .. } => Some(*code),
            CallFailure::LinkDead { .. }
            | CallFailure::Timeout { .. }
            | CallFailure::SourceAborted
            | CallFailure::NotAsked { .. }
            | CallFailure::BadAnswer { .. } => None,
        }
    }

    pub fn is(&self, code: i32) -> bool {
        self.code() == Some(code)
    }
}

pub type CallResult<T> = Result<T, CallError>;

/// One connection to one host's libvirt.
///
/// Every method is one round trip (uploads and downloads: one per direction
/// change) unless it says otherwise.
#[async_trait]
pub trait Hypervisor: Send + Sync + fmt::Debug {
    /// The configured name of the host.
    fn host(&self) -> &str;
    /// False once the link is known to be dead; true proves nothing.
    fn is_alive(&self) -> bool;

    async fn lib_version(&self) -> CallResult<u64>;
    async fn hypervisor_version(&self) -> CallResult<u64>;
    async fn hostname(&self) -> CallResult<String>;
    /// Model, memory in KiB and number of processors.
    async fn node_info(&self) -> CallResult<NodeInfo>;
    /// `virConnectGetDomainCapabilities` for x86_64 and this machine and type.
    async fn domain_capabilities(&self, machine: &str, virt_type: &str) -> CallResult<String>;
    /// Names of the host's network interfaces that libvirt can see as bridges; None where the
    /// host's libvirt has no interface driver, so that nothing can be said.
    async fn has_interface(&self, name: &str) -> CallResult<Option<bool>>;

    async fn lookup_domain(&self, name: &str) -> CallResult<DomainRef>;
    async fn list_domains(&self) -> CallResult<Vec<DomainRef>>;
    async fn define_domain(&self, xml: &str) -> CallResult<DomainRef>;
    /// Fails with code 55 for a domain that is active already.
    async fn start_domain(&self, domain: &DomainRef) -> CallResult<()>;
    /// Fails with code 55 for a domain that is not active.
    async fn destroy_domain(&self, domain: &DomainRef) -> CallResult<()>;
    /// With NVRAM, managed save, snapshot and checkpoint metadata and TPM state.
    async fn undefine_domain(&self, domain: &DomainRef) -> CallResult<()>;
    async fn domain_state(&self, domain: &DomainRef) -> CallResult<RawState>;
    /// The inactive document if `inactive`, else the live one.
    async fn domain_xml(&self, domain: &DomainRef, inactive: bool) -> CallResult<String>;
    /// The metadata element of namespace `uri`; None if the domain has none (code 80).
    async fn domain_metadata(&self, domain: &DomainRef, uri: &str) -> CallResult<Option<String>>;
    /// [`Self::domain_metadata`] of several domains, one after the other, within one budget; each has an
    /// outcome of its own, and an error of the whole is the link's.
    async fn domains_metadata(&self, domains: &[DomainRef], uri: &str) -> CallResult<Vec<CallResult<Option<String>>>> {
        let mut all = Vec::with_capacity(domains.len());
        for domain in domains {
            all.push(self.domain_metadata(domain, uri).await);
        }
        Ok(all)
    }
    /// Replaces the metadata element of namespace `uri` in the persistent configuration, and in
    /// the running domain if there is one.
    async fn set_domain_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()>;
    /// Sets a metadata element of the running guest alone: it is gone when the guest stops. Fails with
    /// code 55 for a domain that is not active.
    async fn set_live_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()>;
    async fn domain_interfaces(&self, domain: &DomainRef, source: AddressSource) -> CallResult<Vec<GuestInterface>>;

    async fn lookup_pool(&self, name: &str) -> CallResult<PoolRef>;
    async fn pool_xml(&self, pool: &PoolRef) -> CallResult<String>;
    async fn pool_info(&self, pool: &PoolRef) -> CallResult<PoolInfo>;
    async fn refresh_pool(&self, pool: &PoolRef) -> CallResult<()>;
    async fn list_volumes(&self, pool: &PoolRef) -> CallResult<Vec<VolumeRef>>;
    async fn lookup_volume(&self, pool: &PoolRef, name: &str) -> CallResult<VolumeRef>;
    async fn volume_info(&self, volume: &VolumeRef) -> CallResult<VolumeInfo>;
    async fn volume_xml(&self, volume: &VolumeRef) -> CallResult<String>;
    /// `budget` is the allocate budget where `xml` asks for full allocation.
    async fn create_volume(&self, pool: &PoolRef, xml: &str) -> CallResult<VolumeRef>;
    async fn delete_volume(&self, volume: &VolumeRef) -> CallResult<()>;
    /// Sends at most `length` bytes into the volume. Data past `length` is never written (libvirtd
    /// 11.3 dies of it): it ends the upload with [`CallFailure::BadAnswer`] and an aborted stream.
    async fn upload(&self, volume: &VolumeRef, length: u64, parts: mpsc::Receiver<UploadPart>, budget: Duration) -> CallResult<u64>;
    /// The first `limit` bytes of the volume at most.
    async fn download(&self, volume: &VolumeRef, limit: u64) -> CallResult<Bytes>;

    /// Closes the link without waiting for the peer.
    fn close(&self);
}

/// `virNodeInfo`, the part that is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    pub model: String,
    pub memory_kib: u64,
    pub cpus: u32,
}

/// A host of an entry; two entries may use one name for different machines.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId {
    pub entry: String,
    pub host: String,
}

/// Where links come from. The real one is the host table in `link`.
#[async_trait]
pub trait Connect: Send + Sync + fmt::Debug {
    /// The shared control link of the host: dialled on first use, redialled once it is dead.
    async fn control(&self, host: &HostId) -> Result<Arc<dyn Hypervisor>, ProviderError>;
    /// A link of one's own, for one transfer or one check; close it when done.
    async fn dedicated(&self, host: &HostId) -> Result<Arc<dyn Hypervisor>, ProviderError>;
    /// The same for someone who waits no longer than `deadline`; the error tells how far the dial came.
    async fn dedicated_by(&self, host: &HostId, deadline: Instant) -> Result<Arc<dyn Hypervisor>, ProviderError>;
}

/// `virErrorNumber` values that the provider tells apart.
pub mod code {
    pub const INTERNAL_ERROR: i32 = 1;
    pub const NO_MEMORY: i32 = 2;
    pub const NO_SUPPORT: i32 = 3;
    pub const INVALID_ARG: i32 = 8;
    pub const OPERATION_FAILED: i32 = 9;
    pub const XML_ERROR: i32 = 27;
    pub const OPERATION_DENIED: i32 = 29;
    pub const XML_DETAIL: i32 = 35;
    pub const SYSTEM_ERROR: i32 = 38;
    pub const RPC: i32 = 39;
    pub const NO_DOMAIN: i32 = 42;
    pub const NO_NETWORK: i32 = 43;
    pub const AUTH_FAILED: i32 = 45;
    pub const NO_STORAGE_POOL: i32 = 49;
    pub const NO_STORAGE_VOL: i32 = 50;
    pub const OPERATION_INVALID: i32 = 55;
    pub const NO_INTERFACE: i32 = 57;
    pub const CONFIG_UNSUPPORTED: i32 = 67;
    pub const OPERATION_TIMEOUT: i32 = 68;
    pub const OPERATION_ABORTED: i32 = 78;
    pub const AUTH_CANCELLED: i32 = 79;
    pub const NO_DOMAIN_METADATA: i32 = 80;
    pub const OPERATION_UNSUPPORTED: i32 = 84;
    pub const AGENT_UNRESPONSIVE: i32 = 86;
    pub const RESOURCE_BUSY: i32 = 87;
    pub const ACCESS_DENIED: i32 = 88;
    pub const STORAGE_VOL_EXIST: i32 = 90;
    pub const CPU_INCOMPATIBLE: i32 = 91;
    pub const XML_INVALID_SCHEMA: i32 = 92;
    pub const AUTH_UNAVAILABLE: i32 = 94;
    pub const AGENT_UNSYNCED: i32 = 97;
    pub const AGENT_COMMAND_TIMEOUT: i32 = 112;
    pub const AGENT_COMMAND_FAILED: i32 = 113;
}
