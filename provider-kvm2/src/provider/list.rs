//! ListByTag: every domain that carries our mark, host by host.
//!
//! A link that dies in the middle fails its host's listing: a short list would make
//! a collector remove what it did not see.

use std::collections::HashSet;
use std::sync::Arc;

use futures::{StreamExt, stream};

use super::get::require_mark;
use super::{
    Completeness, InstanceImage, ListPage, ListRequest, ListedInstance, OrphanKind, OrphanVolume, Provider, UnreadableInstance, placement,
};
use crate::config::{Entry, Host};
use crate::domain::mark::{self, Mark};
use crate::domain::names::VolumeRole;
use crate::domain::volume::VolumeXml;
use crate::domain::{InstanceId, VmName};
use crate::error::{ProviderError, Reason, Result, bounded_to};
use crate::hypervisor::{CallResult, DomainRef, Hypervisor, VolumeRef, code};

pub(super) const DEFAULT_PAGE: u32 = 500;
pub(super) const MAX_PAGE: u32 = 1000;
/// Hosts listed at a time.
const FAN_OUT: usize = 8;
/// Marks read in one go: handing a read to a thread and back costs more than the read. Not more of
/// them, because a batch holds one of the link's places until it is through.
const BATCH: usize = 8;
/// Batches under way on one link; the link itself bounds what libvirtd sees.
const READS: usize = 4;

/// What one host has, sorted by name.
#[derive(Debug, Default)]
struct HostListing {
    instances: Vec<ListedInstance>,
    unreadable: Vec<UnreadableInstance>,
    orphans: Vec<OrphanVolume>,
}

impl Provider {
    pub(super) async fn list_instances(&self, request: ListRequest) -> Result<ListPage> {
        let config = self.config.current();
        let entry = placement::entry(&config, &request.entry)?;
        let after = Cursor::parse(&request.page_token, &entry)?;
        let size = match request.page_size {
            0 => DEFAULT_PAGE,
            n => n.min(MAX_PAGE),
        } as usize;
        let first_page = after.is_none();
        let first_host = after.as_ref().map_or(0, |c| c.host);
        let hosts: Vec<Host> = entry.hosts.iter().skip(first_host).cloned().collect();
        let listings: Vec<_> = stream::iter(hosts)
            .map(|host| {
                let entry = &entry;
                async move {
                    let listing = self.list_host(entry, &host).await;
                    (host, listing)
                }
            })
            .buffered(FAN_OUT)
            .collect()
            .await;

        let mut page = ListPage::default();
        let mut last = None;
        let mut more = false;
        for (index, (host, listing)) in (first_host..).zip(listings) {
            let listing = match listing {
                Ok(listing) => listing,
                Err(e) => {
                    let e = e.on_host(&host.name).during("list");
                    if request.completeness == Completeness::Required {
                        return Err(ProviderError::new(
                            Reason::ListingIncomplete,
                            format!("host {} could not be listed, and the caller asked for a complete list", host.name),
                        )
                        .with_source(e)
                        .on_host(&host.name));
                    }
                    page.unreachable.push(e);
                    continue;
                }
            };
            for instance in listing.instances {
                if after.as_ref().is_some_and(|c| c.host == index && *instance.id.name.as_str() <= *c.name) {
                    continue;
                }
                // two entries may share a host; what an entry that was renamed has left belongs to all of them
                let others = |e: &Arc<Entry>| e.name == instance.entry && e.name != entry.name;
                if config.entries.iter().any(others) {
                    continue;
                }
                if !request.installation_id.is_empty() && instance.installation_id != request.installation_id {
                    continue;
                }
                if page.instances.len() == size {
                    more = true;
                    break;
                }
                last = Some(Cursor { host: index, name: instance.id.name.to_string() });
                page.instances.push(instance);
            }
            if first_page {
                page.unreadable.extend(listing.unreadable);
                page.orphan_volumes.extend(listing.orphans);
            }
        }
        if more && let Some(last) = last {
            page.next_page_token = last.token();
        }
        tracing::debug!(provider = %entry.name, instances = page.instances.len(), unreachable = page.unreachable.len(), orphans = page.orphan_volumes.len(), more, "kvm2 domains listed");
        Ok(page)
    }

    async fn list_host(&self, entry: &Arc<Entry>, host: &Host) -> Result<HostListing> {
        let site = self.sites.open(entry, host).await?;
        let hv = &*site.hv;
        let (domains, volumes) = tokio::join!(hv.list_domains(), hv.list_volumes(&site.pool));
        let domains = domains?;
        let mut listing = HostListing::default();
        let batches: Vec<Vec<DomainRef>> = domains.chunks(BATCH).map(<[DomainRef]>::to_vec).collect();
        let mut reads = stream::iter(batches).map(|batch| read_marks(hv, host, batch)).buffer_unordered(READS);
        while let Some(batch) = reads.next().await {
            for marked in batch? {
                match marked {
                    Marked::Ours(instance) => listing.instances.push(*instance),
                    Marked::Unreadable(unreadable) => listing.unreadable.push(unreadable),
                    Marked::NotOurs => {}
                }
            }
        }
        drop(reads);
        listing.instances.sort_unstable_by(|a, b| a.id.name.cmp(&b.id.name));
        listing.unreadable.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let volumes = volumes?;
        let debris = self.images.incomplete(hv, &site.id, &volumes, &entry.name).await?;
        let debris = debris.into_iter().map(|v| v.name.as_str()).collect();
        listing.orphans = orphans(hv, entry, host, &domains, &volumes, &debris).await?;
        Ok(listing)
    }
}

enum Marked {
    Ours(Box<ListedInstance>),
    Unreadable(UnreadableInstance),
    NotOurs,
}

async fn read_marks(hv: &dyn Hypervisor, host: &Host, batch: Vec<DomainRef>) -> Result<Vec<Marked>> {
    let elements = hv.domains_metadata(&batch, mark::NAMESPACE).await?;
    batch.iter().zip(elements).map(|(domain, element)| judge(host, domain, element)).collect()
}

fn judge(host: &Host, domain: &DomainRef, element: CallResult<Option<String>>) -> Result<Marked> {
    let element = match element {
        Ok(Some(element)) => element,
        Ok(None) => return Ok(Marked::NotOurs),
        // in the middle of its teardown
        Err(e) if e.is(code::NO_DOMAIN) => return Ok(Marked::NotOurs),
        Err(e) => return Err(e.into()),
    };
    let shown = bounded_to(&domain.name, 255);
    let unreadable = |error: ProviderError| {
        tracing::warn!(host = %host.name, name = %shown, error = %error.chain(), "a domain of ours cannot be listed");
        Marked::Unreadable(UnreadableInstance { host: host.name.clone(), name: shown.clone(), error })
    };
    let Ok(name) = VmName::parse(&domain.name) else {
        return Ok(unreadable(ProviderError::new(
            Reason::MarkCorrupt,
            format!("domain {shown} carries our mark under a name that this provider cannot have given; rename it back"),
        )));
    };
    let id = InstanceId { host: host.name.clone(), name };
    match require_mark(Some(&element), &id) {
        Ok(mark) => Ok(Marked::Ours(Box::new(listed(id, mark)))),
        Err(e) if e.reason() == Reason::NotManaged => Ok(Marked::NotOurs),
        Err(e) => Ok(unreadable(e)),
    }
}

fn listed(id: InstanceId, mark: Mark) -> ListedInstance {
    ListedInstance {
        id,
        entry: mark.entry,
        uid: mark.uid,
        installation_id: mark.installation_id,
        spec_hash: mark.spec_hash,
        created_at: mark.created_at,
        phase: mark.phase,
        image: InstanceImage { key: mark.image_key, digest: mark.base_digest, base_volume: mark.base },
    }
}

/// Volumes of our names without a domain. They carry no mark, so a name is believed
/// only as far as it goes: a seed by its name, an overlay by what it backs onto.
async fn orphans(
    hv: &dyn Hypervisor,
    entry: &Entry,
    host: &Host,
    domains: &[DomainRef],
    volumes: &[VolumeRef],
    debris: &HashSet<&str>,
) -> Result<Vec<OrphanVolume>> {
    let domains: HashSet<&str> = domains.iter().map(|d| d.name.as_str()).collect();
    let mut found = Vec::new();
    for volume in volumes {
        let kind = if debris.contains(volume.name.as_str()) {
            OrphanKind::IncompleteBase
        } else {
            match VmName::of_volume(&volume.name) {
                Some((owner, _)) if domains.contains(owner.as_str()) => continue,
                Some((_, VolumeRole::Seed)) => OrphanKind::Seed,
                Some((_, VolumeRole::Overlay)) => OrphanKind::Overlay,
                None => continue,
            }
        };
        let xml = match hv.volume_xml(volume).await {
            Ok(xml) => xml,
            Err(e) if e.is(code::NO_STORAGE_VOL) => continue,
            Err(e) => return Err(e.into()),
        };
        let Ok(shape) = VolumeXml::parse(&xml) else { continue };
        let ours = match kind {
            OrphanKind::Overlay => shape
                .backing_path
                .as_deref()
                .and_then(|p| p.rsplit('/').next())
                .is_some_and(|base| base.starts_with(&format!("base-{}-", entry.name))),
            OrphanKind::Seed | OrphanKind::IncompleteBase => true,
        };
        if ours {
            found.push(OrphanVolume {
                host: host.name.clone(),
                pool: host.pool.clone(),
                name: bounded_to(&volume.name, 255),
                kind,
                capacity_bytes: shape.capacity,
                allocation_bytes: shape.allocation,
            });
        }
    }
    Ok(found)
}

/// Where the next page begins: behind this name on this host.
#[derive(Debug, PartialEq, Eq)]
struct Cursor {
    host: usize,
    name: String,
}

impl Cursor {
    fn token(&self) -> String {
        format!("{}/{}", self.host, self.name)
    }

    fn parse(token: &str, entry: &Entry) -> Result<Option<Self>> {
        if token.is_empty() {
            return Ok(None);
        }
        let parsed = token
            .split_once('/')
            .and_then(|(host, name)| Some(Self { host: host.parse().ok()?, name: VmName::parse(name).ok()?.to_string() }));
        parsed.filter(|c| c.host < entry.hosts.len()).map(Some).ok_or_else(|| {
            ProviderError::invalid(
                Reason::PageTokenInvalid,
                "page_token",
                "the page token is not one that this daemon gave for these hosts; start again without one",
            )
        })
    }
}
