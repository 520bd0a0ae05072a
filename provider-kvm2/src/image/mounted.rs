//! A pool whose file system is not mounted.
//!
//! To libvirt it is a pool like any other, with an empty directory and the room of the file system
//! below. Who made images and disks there would fill the host's own disk, and hide them once
//! the mount is back. It is told by the instances: one of ours that has run has its disk there.

use futures::{StreamExt, stream};

use crate::config::Host;
use crate::domain::host_xml;
use crate::domain::mark::{self, Mark, Phase};
use crate::domain::volume::StoragePoolXml;
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{DomainRef, Hypervisor, PoolRef, VolumeRef, code};

/// Domains read at a time; the link bounds what libvirtd sees.
const READS: usize = 4;

/// Fails where the pool, whose volumes are given, is empty and cannot be. Asks the host only if it is empty.
pub async fn require(hv: &dyn Hypervisor, host: &Host, pool: &PoolRef, volumes: &[VolumeRef]) -> Result<()> {
    if !volumes.is_empty() {
        return Ok(());
    }
    let Ok(StoragePoolXml { target_path, .. }) = StoragePoolXml::parse(&hv.pool_xml(pool).await?) else { return Ok(()) };
    let target = target_path.as_str();
    let domains = hv.list_domains().await?;
    let mut owners = stream::iter(domains)
        .map(|domain| async move {
            let has = has_run_from(hv, &domain, target).await?;
            Ok::<_, ProviderError>(has.then_some(domain.name))
        })
        .buffer_unordered(READS);
    while let Some(owner) = owners.next().await {
        if let Some(name) = owner? {
            return Err(empty(host, target, &name));
        }
    }
    Ok(())
}

/// An instance of ours that is complete, with a disk in the directory. One that is being created has none yet.
async fn has_run_from(hv: &dyn Hypervisor, domain: &DomainRef, target: &str) -> Result<bool> {
    let element = match hv.domain_metadata(domain, mark::NAMESPACE).await {
        Ok(element) => element,
        Err(e) if e.is(code::NO_DOMAIN) => return Ok(false),
        Err(e) => return Err(e.into()),
    };
    let mark = element.and_then(|e| Mark::parse(&e, jiff::Timestamp::now()).ok());
    if !mark.is_some_and(|m| m.is_managed() && m.phase == Phase::Ready) {
        return Ok(false);
    }
    let xml = match hv.domain_xml(domain, true).await {
        Ok(xml) => xml,
        Err(e) if e.is(code::NO_DOMAIN) => return Ok(false),
        Err(e) => return Err(e.into()),
    };
    let inside = |path: &str| path.strip_prefix(target).is_some_and(|rest| rest.starts_with('/'));
    Ok(host_xml::disks(&xml).is_ok_and(|disks| disks.iter().any(|disk| disk.path.as_deref().is_some_and(inside))))
}

fn empty(host: &Host, target: &str, instance: &str) -> ProviderError {
    let (pool, name) = (&host.pool, &host.name);
    ProviderError::new(
        Reason::PoolNotActive,
        format!(
            "pool {pool} on host {name} is empty, and the disk of instance {instance} was in it: the file system of {target} seems not to be \
             mounted; mount it and run virsh pool-refresh {pool}, or delete the instances there if their disks are gone for good"
        ),
    )
    .on_host(name)
    .with_meta("pool", pool)
}
