//! Base images on the hosts: fetched once, verified, immutable, never replaced.
//!
//! A base is the volume `base-<entry>-<key>-<id>.<format>`. Beside it lie
//! `<base>.origin` (JSON, says where it came from) and, written last,
//! `<base>.sha256` (64 hex digits: the digest of the verified upload). A base with
//! its marker is complete; one without is an upload in progress or debris. Nobody
//! writes to or deletes a volume that it did not create, so two daemons that meet
//! on a cold cache at worst store an image twice.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::config::{Entry, Firmware, Host, ImageFormat, ImageUrl, Sha256Hex};
use crate::error::ProviderError;
use crate::hypervisor::{Connect, Hypervisor, PoolRef, VolumeRef};

pub mod bases;
pub mod cache;
mod feed;
pub mod http;
pub mod mounted;
pub mod origin;
pub mod publish;
pub mod qcow2;
pub mod space;
#[cfg(test)]
pub(crate) mod tests;
pub mod unpack;

pub use cache::ImageCache;

/// Where an image comes from and what it has to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRef {
    /// Catalogue key, or `url-` and 32 hex digits of the URL's sha256.
    pub key: String,
    pub url: ImageUrl,
    pub sha256: Option<Sha256Hex>,
    pub format: ImageFormat,
    pub firmware: Firmware,
    pub trust: UrlTrust,
}

/// Who named the URL, and so whether the URL policy applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlTrust {
    /// The catalogue of the providers file: its author may name any address.
    Configured,
    /// The author of a request: only what the policy allows.
    Requested,
}

/// A complete base on one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub volume: String,
    /// Absolute path on the host.
    pub path: String,
    pub format: ImageFormat,
    /// What the guest sees as its disk, in bytes.
    pub virtual_size: u64,
    pub digest: Sha256Hex,
}

/// A pull as others see it.
#[derive(Debug, Clone)]
pub struct ImageStatus {
    pub entry: String,
    pub host: String,
    pub key: String,
    pub url: ImageUrl,
    pub state: ImageState,
    pub bytes_done: u64,
    /// None while the length is not known.
    pub bytes_total: Option<u64>,
    pub volume: Option<String>,
    pub digest: Option<Sha256Hex>,
    pub virtual_size: Option<u64>,
    pub format: ImageFormat,
    pub since: SystemTime,
    pub last_error: Option<ProviderError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageState {
    Pulling,
    /// Another process uploads it; waited for.
    PulledElsewhere,
    Ready,
    Failed,
}

/// What a Create asks of the cache.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub entry: Arc<Entry>,
    pub host: Host,
    pub image: ImageRef,
}

/// What a look at a pool's listing says about a wanted image.
#[derive(Debug, Clone)]
pub enum Found {
    Complete(Base),
    /// Nothing that may be used; a pull is needed.
    Missing,
}

/// How long a body or a foreign upload may stand still before it is given up.
pub const STALL: Duration = Duration::from_secs(60);

// the shapes of the calls that `provider` makes, kept here as the module's map:
//
// ImageCache::new(connect, metrics) -> Arc<Self>
// cache.find(&*hv, &pool, &volumes, &wanted) -> Result<Found>        no round trip when the answer is remembered
// cache.pull(wanted) -> Pull                                         joins a running pull of (host, image)
// pull.wait().await -> Result<Base>                                  dropping the Pull does not end the work
// pull.status() -> ImageStatus
// cache.statuses() -> Vec<ImageStatus>
// cache.shutdown().await                                             aborts pulls, joins their tasks
const _: fn(&dyn Hypervisor, &PoolRef, &VolumeRef, &dyn Connect) = |_, _, _, _| {};
