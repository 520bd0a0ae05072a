//! Volumes of an instance whose domain is gone: undefined by hand, or left by a
//! daemon that made volumes first.
//!
//! They carry no mark. So they are removed only for a caller that names the very
//! instance, or where a Create and a Delete of it have just met; only if their content
//! says that a provider made them, and only if no domain of the host uses them: a
//! domain that was renamed keeps its files' names.

use std::time::Duration;

use futures::future::join_all;
use futures::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;

use super::sites::Site;
use super::{Provider, Removed, RemovedKind};
use crate::domain::volume::VolumeXml;
use crate::domain::{VmName, host_xml};
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{CallResult, Hypervisor, VolumeRef, code};

/// Domain documents read at a time; the link bounds what libvirtd sees.
const READS: usize = 4;
/// Where an ISO image names itself: sector 16, the volume id 40 bytes into it.
const ISO_HEADER: u64 = 16 * 2048;
const ISO_LABEL: std::ops::Range<usize> = 40..46;

impl Provider {
    pub(super) async fn remove_leftovers(&self, site: &Site, name: &VmName) -> Result<Vec<Removed>> {
        let hv = &*site.hv;
        let mut removed = Vec::new();
        for (kind, volume) in leftovers(site, name).await? {
            match hv.delete_volume(&volume).await {
                Ok(()) => removed.push(Removed { kind, host: site.host.name.clone(), pool: site.host.pool.clone(), name: volume.name }),
                Err(e) if e.is(code::NO_STORAGE_VOL) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(removed)
    }

    /// Whether volumes without a domain may be somebody's who is still at work: a Create of another daemon, whose domain
    /// a Delete took from under it, goes on to its next look at the domain and then removes them. By the host's clock; one
    /// that is off by more than `patience` only makes the answer the other one.
    pub(super) async fn is_being_left(&self, site: &Site, name: &VmName, patience: Duration) -> Result<bool> {
        let found = match leftovers(site, name).await {
            Err(e) if e.reason() == Reason::VolumeConflict => return Ok(false),
            other => other?,
        };
        let now = Timestamp::now();
        for (_, volume) in found {
            let xml = match site.hv.volume_xml(&volume).await {
                Ok(xml) => xml,
                Err(e) if e.is(code::NO_STORAGE_VOL) => continue,
                Err(e) => return Err(e.into()),
            };
            let modified = VolumeXml::parse(&xml).ok().and_then(|shape| shape.modified);
            if modified.is_none_or(|at| now.duration_since(at).unsigned_abs() >= patience) {
                return Ok(false);
            }
        }
        // or all of them are gone by now
        Ok(true)
    }
}

/// What a provider made under the name and no domain uses; an error names what is not that.
async fn leftovers(site: &Site, name: &VmName) -> Result<Vec<(RemovedKind, VolumeRef)>> {
    let hv = &*site.hv;
    let names = [(RemovedKind::Overlay, name.overlay_volume()), (RemovedKind::Seed, name.seed_volume())];
    let there = join_all(names.iter().map(|(_, volume)| hv.lookup_volume(&site.pool, volume))).await;
    let mut found = Vec::new();
    for ((kind, _), volume) in names.into_iter().zip(there) {
        let volume = match volume {
            Ok(volume) => volume,
            Err(e) if e.is(code::NO_STORAGE_VOL) => continue,
            Err(e) => return Err(e.into()),
        };
        let ours = match kind {
            RemovedKind::Overlay => backs_onto_a_base(hv, &site.entry.name, &volume).await,
            RemovedKind::Seed | RemovedKind::Domain => is_a_seed(hv, &volume).await,
        };
        match ours {
            Ok(true) => found.push((kind, volume)),
            Ok(false) => return Err(conflict(site, &volume, "its content is not what this provider makes")),
            Err(e) if e.is(code::NO_STORAGE_VOL) => {}
            Err(e) => return Err(e.into()),
        }
    }
    if found.is_empty() {
        return Ok(found);
    }
    let paths: Vec<&str> = found.iter().map(|(_, v)| v.key.as_str()).collect();
    if let Some(user) = user_of(hv, &paths).await? {
        return Err(conflict(site, &found[0].1, &format!("domain {user} uses it")));
    }
    Ok(found)
}

async fn backs_onto_a_base(hv: &dyn Hypervisor, entry: &str, volume: &VolumeRef) -> CallResult<bool> {
    let xml = hv.volume_xml(volume).await?;
    let backing = VolumeXml::parse(&xml).ok().and_then(|shape| shape.backing_path);
    Ok(backing.as_deref().and_then(|path| path.rsplit('/').next()).is_some_and(|base| base.starts_with(&format!("base-{entry}-"))))
}

async fn is_a_seed(hv: &dyn Hypervisor, volume: &VolumeRef) -> CallResult<bool> {
    let head = hv.download(volume, ISO_HEADER + 64).await?;
    // one that was cut off before its header was written is ours as well: nothing else is born of this name and zero
    let header = head.get(ISO_HEADER as usize..).unwrap_or_default();
    let label = header.get(ISO_LABEL).unwrap_or_default();
    Ok(label.eq_ignore_ascii_case(b"cidata") || head.iter().all(|b| *b == 0))
}

/// A domain that has one of the paths among its disks or their backing files.
async fn user_of(hv: &dyn Hypervisor, paths: &[&str]) -> Result<Option<String>> {
    let domains = hv.list_domains().await?;
    let users = stream::iter(domains).map(|domain| async move {
        match hv.domain_xml(&domain, false).await {
            Ok(xml) => {
                // a document that cannot be read may use anything
                let uses =
                    host_xml::disks(&xml).map_or(true, |disks| disks.iter().any(|disk| paths.iter().any(|path| disk.uses_path(path))));
                Ok::<_, ProviderError>(uses.then_some(domain.name))
            }
            Err(e) if e.is(code::NO_DOMAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    });
    users.buffer_unordered(READS).try_filter_map(|user| async move { Ok(user) }).boxed().try_next().await
}

fn conflict(site: &Site, volume: &VolumeRef, why: &str) -> ProviderError {
    let (pool, host) = (&site.host.pool, &site.host.name);
    let message = format!(
        "volume {} in pool {pool} on host {host} has no domain of its name and was left alone: {why}; look what it is, then remove it there (virsh vol-delete {} --pool {pool})",
        volume.name, volume.name
    );
    ProviderError::new(Reason::VolumeConflict, message).with_meta("volume", &volume.name)
}
