//! Delete: everything of an instance goes, its domain last, so that whatever a
//! crash leaves still carries the mark.

use std::sync::Arc;

use futures::future::join_all;
use tracing::Instrument;

use super::create::answers;
use super::get::{Target, require_mark};
use super::jobs::JobKey;
use super::sites::Site;
use super::{DeleteOutcome, DeleteRequest, Deleted, Provider, Removed, RemovedKind, UnknownHost, placement};
use crate::config::Entry;
use crate::domain::mark::{self, Mark, Phase};
use crate::domain::{InstanceId, VmName};
use crate::error::{ProviderError, Reason, Result, defect};
use crate::hypervisor::{DomainRef, HostId, code};

impl Provider {
    pub(super) async fn delete_instance(&self, request: DeleteRequest) -> Result<Deleted> {
        let entry = placement::entry(&self.config.current(), &request.entry)?;
        let targets = match self.targets(&entry, &request.selector) {
            Err(e) if e.reason() == Reason::HostNotConfigured && request.unknown_host == UnknownHost::Abandon => {
                tracing::warn!(provider = %entry.name, error = %e, "an instance was abandoned on a host that is not configured");
                return Ok(Deleted { outcome: DeleteOutcome::Abandoned, removed: Vec::new(), create_cancelled: false });
            }
            other => other?,
        };
        let single = targets.len() == 1;
        // the work belongs to the daemon: a caller that leaves does not stop it half way
        let works = targets.into_iter().map(|target| {
            let (this, entry) = (self.clone(), entry.clone());
            let work = async move { this.delete_at(&entry, &target).await };
            self.tasks.spawn(work.in_current_span())
        });
        let mut all = Deleted { outcome: DeleteOutcome::AlreadyAbsent, removed: Vec::new(), create_cancelled: false };
        let mut foreign = None;
        for done in join_all(works.collect::<Vec<_>>()).await {
            let done = done.unwrap_or_else(|e| Err(defect("deleting the instance").with_source(e)));
            match done {
                Ok(done) => {
                    all.create_cancelled |= done.create_cancelled;
                    if done.outcome == DeleteOutcome::Deleted {
                        all.outcome = DeleteOutcome::Deleted;
                    }
                    all.removed.extend(done.removed);
                }
                // a key without a zone means the instance of that uid, wherever it is
                Err(e) if !single && matches!(e.reason(), Reason::NotManaged | Reason::UidMismatch) => foreign = Some(e),
                Err(e) => return Err(e),
            }
        }
        match foreign {
            // only somebody else's was found: "already absent" would hide a mistyped uid
            Some(e) if all.outcome == DeleteOutcome::AlreadyAbsent => Err(e),
            _ => Ok(all),
        }
    }

    async fn delete_at(&self, entry: &Arc<Entry>, target: &Target) -> Result<Deleted> {
        let id = InstanceId { host: target.host.name.clone(), name: target.name.clone() };
        let host_id = HostId { entry: entry.name.clone(), host: target.host.name.clone() };
        let at = |e: ProviderError| e.on_host(&id.host).on_instance(&id).during("delete");
        let create_cancelled = self.cancel_create(entry, target);
        let _name = self.locks.lock((host_id, target.name.clone())).await;
        let site = self.sites.open(entry, &target.host).await.map_err(at)?;
        let domain = match site.hv.lookup_domain(target.name.as_str()).await {
            Ok(domain) => domain,
            Err(e) if e.is(code::NO_DOMAIN) => {
                // only who names the very instance asks for what is left of it
                let removed = if target.by_id { self.remove_leftovers(&site, &target.name).await.map_err(at)? } else { Vec::new() };
                let outcome = if removed.is_empty() { DeleteOutcome::AlreadyAbsent } else { DeleteOutcome::Deleted };
                return Ok(Deleted { outcome, removed, create_cancelled });
            }
            Err(e) => return Err(at(e.into())),
        };
        let element = match site.hv.domain_metadata(&domain, mark::NAMESPACE).await {
            Err(e) if e.is(code::NO_DOMAIN) => {
                return Ok(Deleted { outcome: DeleteOutcome::AlreadyAbsent, removed: Vec::new(), create_cancelled });
            }
            other => other.map_err(|e| at(e.into()))?,
        };
        let mark = require_mark(element.as_deref(), &id).map_err(at)?;
        target.expected.check(&mark, &id).map_err(at)?;
        let removed = self.remove(&site, &target.name, &domain, &mark).await.map_err(at)?;
        tracing::info!(provider = %entry.name, host = %id.host, name = %id.name, uid = %mark.uid, "kvm2 domain deleted");
        Ok(Deleted { outcome: DeleteOutcome::Deleted, removed, create_cancelled })
    }

    /// Ends a running Create of the same key at its next step.
    fn cancel_create(&self, entry: &Entry, target: &Target) -> bool {
        let key = JobKey { entry: entry.name.clone(), name: target.name.clone() };
        let Some(job) = self.jobs.get(&key) else { return false };
        let terms = &job.terms;
        let same = terms.host.host == target.host.name
            && mark::same(&terms.key.uid, &target.expected.uid)
            && mark::same(&terms.key.installation_id, &target.expected.installation_id);
        if same {
            tracing::info!(provider = %entry.name, host = %target.host.name, name = %target.name, "a Delete ends the running Create");
            job.cancel.cancel();
        }
        same
    }

    /// Removes a domain of ours with its volumes; the caller holds the name and has checked the mark.
    pub(super) async fn remove(&self, site: &Site, name: &VmName, domain: &DomainRef, mark: &Mark) -> Result<Vec<Removed>> {
        let now = jiff::Timestamp::now();
        let deleting = Mark { phase: Phase::Deleting, owner: self.replica.clone(), attempt_at: Some(now), ..mark.clone() };
        let marked = match self.write_mark(site, domain, &deleting).await {
            Ok(()) => true,
            Err(e) if e.libvirt().is_none() => return Err(e),
            Err(e) if e.libvirt().is_some_and(|e| e.code == code::NO_DOMAIN) => return Ok(Vec::new()),
            // transient, and so without a configuration to mark: it is gone once it is destroyed
            Err(_) => false,
        };
        failpoint!("delete.after_mark");
        self.stop(site, domain).await?;
        failpoint!("delete.after_destroy");
        let host = &site.host.name;
        let id = InstanceId { host: host.clone(), name: name.clone() };
        let mut removed = Vec::new();
        // another daemon may have ended this Delete and made the instance anew: its volumes have the same names
        if marked {
            let Some(now) = self.mark_now(site, &id, domain).await? else { return Ok(removed) };
            if now.phase != Phase::Deleting {
                return Err(answers::changed(&id));
            }
        }
        let volumes = [(RemovedKind::Overlay, name.overlay_volume()), (RemovedKind::Seed, name.seed_volume())];
        let gone = join_all(volumes.iter().map(|(_, volume)| self.remove_volume(site, volume))).await;
        for ((kind, volume), gone) in volumes.into_iter().zip(gone) {
            if gone? {
                removed.push(Removed { kind, host: host.clone(), pool: site.host.pool.clone(), name: volume });
            }
        }
        failpoint!("delete.before_undefine");
        if marked {
            let Some(now) = self.mark_now(site, &id, domain).await? else { return Ok(removed) };
            if now.phase == Phase::Ready && now.uid == mark.uid && !self.has_overlay(site, name).await? {
                // the last word of a Create that this Delete has overtaken: its disk went a moment ago, and left to itself
                // the domain could be neither started nor made anew
                tracing::info!(host = %id.host, name = %id.name, "a Create of another daemon ended while its instance was being deleted");
                self.stop(site, domain).await?;
            } else if now.phase != Phase::Deleting {
                return Err(answers::changed(&id));
            }
        }
        match site.hv.undefine_domain(domain).await {
            Ok(()) => {
                removed.insert(0, Removed { kind: RemovedKind::Domain, host: host.clone(), pool: String::new(), name: name.to_string() })
            }
            Err(e) if e.is(code::NO_DOMAIN) => {}
            Err(e) => return Err(e.into()),
        }
        failpoint!("delete.after_undefine");
        removed.extend(self.remove_latecomers(site, name).await);
        Ok(removed)
    }

    /// A Create of another daemon that was between two steps when the mark came may have made a volume after this Delete had
    /// removed it. Not worth an error: the instance is gone, and what is left that Create removes, or a Delete by id.
    async fn remove_latecomers(&self, site: &Site, name: &VmName) -> Vec<Removed> {
        match self.remove_leftovers(site, name).await {
            Ok(removed) => removed,
            // the name was free for a moment: its next instance uses them
            Err(e) if e.reason() == Reason::VolumeConflict => Vec::new(),
            Err(e) => {
                tracing::warn!(host = %site.host.name, name = %name, error = %e.chain(), "whether volumes came after the Delete could not be read");
                Vec::new()
            }
        }
    }

    /// The mark that a domain has after its Delete has begun; None once it is gone, an error if it is not ours any more.
    pub(super) async fn mark_now(&self, site: &Site, id: &InstanceId, domain: &DomainRef) -> Result<Option<Mark>> {
        match site.hv.domain_metadata(domain, mark::NAMESPACE).await {
            Err(e) if e.is(code::NO_DOMAIN) => Ok(None),
            element => require_mark(element?.as_deref(), id).map(Some),
        }
    }

    async fn has_overlay(&self, site: &Site, name: &VmName) -> Result<bool> {
        match site.hv.lookup_volume(&site.pool, &name.overlay_volume()).await {
            Ok(_) => Ok(true),
            Err(e) if e.is(code::NO_STORAGE_VOL) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    async fn stop(&self, site: &Site, domain: &DomainRef) -> Result<()> {
        match site.hv.destroy_domain(domain).await {
            Err(e) if !e.is(code::OPERATION_INVALID) && !e.is(code::NO_DOMAIN) => Err(e.into()),
            _ => Ok(()),
        }
    }

    async fn remove_volume(&self, site: &Site, name: &str) -> Result<bool> {
        let volume = match site.hv.lookup_volume(&site.pool, name).await {
            Ok(volume) => volume,
            Err(e) if e.is(code::NO_STORAGE_VOL) || e.is(code::NO_STORAGE_POOL) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        match site.hv.delete_volume(&volume).await {
            Ok(()) => {
                failpoint!("delete.between_volumes");
                Ok(true)
            }
            Err(e) if e.is(code::NO_STORAGE_VOL) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}
