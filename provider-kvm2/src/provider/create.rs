//! Create: from a request to a running domain, mark first.
//!
//! The order of things is what makes a crash harmless: the domain is defined with
//! its mark (`phase: creating`) before any volume exists, so whatever is left can be
//! listed, completed by the next Create and removed by Delete. Two daemons that
//! create one instance at once meet at the overlay: libvirt makes a volume of a name
//! once, and who does not get it steps back.

use std::sync::Arc;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretSlice};
use tracing::Instrument;

pub(super) mod answers;
mod steps;

use answers::{busy, changed, fits, may_join, owned_by_caller, paused, refuse_foreign_volumes, shutting_down, still_at};

use super::get::{bad_name, read_instance, require_mark};
use super::jobs::{Entered, Job, JobKey, Progress, Step, Terms};
use super::placement::Resolved;
use super::sites::Site;
use super::{CreateOutcome, CreateRequest, Created, Expected, Instance, Key, Provider, placement, sites};
use crate::domain::mark::{self, Mark, Phase};
use crate::domain::state::{self, State, StateReason};
use crate::domain::{InstanceId, VmName};
use crate::error::{ProviderError, Reason, Result, unless_it_panics};
use crate::hypervisor::{DomainRef, VolumeRef, code};
use crate::image::{Found, Wanted, mounted, space};

/// Space counted for a seed beside the disk, in bytes.
const SEED_ROOM: u64 = 16 << 20;
/// A Create or a Delete of another daemon that has been at work for less than this is let alone: longer
/// than its volumes and its start may take within their budgets.
const OTHERS_PATIENCE: Duration = Duration::from_secs(240);
/// A checked request.
#[derive(Debug)]
struct Order {
    at: Resolved,
    name: VmName,
    key: Key,
    user_data: Arc<SecretSlice<u8>>,
    spec_hash: String,
}

impl Order {
    fn id(&self) -> InstanceId {
        InstanceId { host: self.at.host.name.clone(), name: self.name.clone() }
    }

    fn wanted(&self) -> Wanted {
        Wanted { entry: self.at.entry.clone(), host: self.at.host.clone(), image: self.at.image.clone() }
    }
}

/// What a look at the host found under the name.
enum Prior {
    None,
    /// Complete and running, or about to: nothing to make.
    Finished(Box<Instance>),
    /// Unfinished and not running: to be made again under the same identity.
    Unfinished(Box<Mark>, DomainRef),
    /// Complete and shut off.
    Stopped(Box<Mark>, DomainRef),
}

impl Provider {
    pub(super) async fn create_instance(&self, request: CreateRequest) -> Result<Created> {
        if self.stop.is_cancelled() {
            return Err(shutting_down());
        }
        let config = self.config.current();
        let entry = placement::entry(&config, &request.entry)?;
        let name = VmName::parse_new(&request.key.name).map_err(|fault| bad_name(&fault))?;
        let at = placement::resolve(&entry, &request.placement)?;
        let order = Order { at, name, key: request.key, user_data: request.user_data, spec_hash: request.spec_hash };
        let key = JobKey { entry: entry.name.clone(), name: order.name.clone() };
        let terms = Terms { key: order.key.clone(), spec_hash: order.spec_hash.clone(), host: order.at.host_id() };
        let id = order.id();
        match self.jobs.enter(&key, terms.clone(), &self.stop) {
            Entered::Running(job) => {
                may_join(&job, &terms, &id)?;
                let created = wait(&job, request.max_wait, &id).await?;
                Ok(Created { outcome: CreateOutcome::Joined, ..created })
            }
            Entered::New(job) => {
                let this = self.clone();
                let running = job.clone();
                let work = async move {
                    // a job that panicked has to be forgotten like any other, or its name is taken for ever
                    let result = unless_it_panics("creating the instance", this.run_create(&running, &order)).await;
                    let id = order.id();
                    let result = result.map_err(|e| e.on_host(&id.host).on_instance(&id).during("create"));
                    match &result {
                        Ok(done) => {
                            tracing::info!(provider = %order.at.entry.name, host = %id.host, name = %id.name, outcome = ?done.outcome, cloud_init_bytes = order.user_data.expose_secret().len(), "kvm2 domain ensured running")
                        }
                        Err(e) => {
                            tracing::warn!(provider = %order.at.entry.name, host = %id.host, name = %id.name, reason = e.reason().wire_name(), error = %e.chain(), "kvm2 domain not created")
                        }
                    }
                    this.remember(&key, result.as_ref().err());
                    this.jobs.finish(&key, &running, result);
                };
                self.tasks.spawn(work.in_current_span());
                wait(&job, request.max_wait, &id).await
            }
        }
    }

    async fn run_create(&self, job: &Job, order: &Order) -> Result<Created> {
        let lock_key = (order.at.host_id(), order.name.clone());
        let _name = unless_cancelled(job, self.locks.lock(lock_key)).await?;
        job.step(Step::Connecting);
        let site = self.sites.open(&order.at.entry, &order.at.host).await?;
        let result = self.create_at(job, order, &site).await;
        if result.as_ref().is_err_and(|e| e.reason() == Reason::PoolNotFound) {
            self.sites.forget(&site.id);
        }
        result.map_err(|e| sites::pool_error(e, &site.host))
    }

    async fn create_at(&self, job: &Job, order: &Order, site: &Site) -> Result<Created> {
        job.step(Step::Inspecting);
        let (found, refreshed, able) = tokio::join!(
            site.hv.lookup_domain(order.name.as_str()),
            site.hv.refresh_pool(&site.pool),
            site.require_able(order.at.image.firmware)
        );
        let prior = match found {
            Ok(domain) => self.inspect(order, site, domain).await?,
            Err(e) if e.is(code::NO_DOMAIN) => Prior::None,
            Err(e) => return Err(e.into()),
        };
        failpoint!("create.after_lookup");
        cancelled(job)?;
        let prior = match prior {
            Prior::Finished(instance) => return Ok(Created { instance: *instance, outcome: CreateOutcome::Existing }),
            Prior::Stopped(mark, domain) => return self.restart(job, order, site, &mark, &domain).await,
            Prior::Unfinished(mark, domain) => Some((mark, domain)),
            Prior::None => None,
        };
        able?;
        // a pool that is busy with an upload keeps the numbers of a moment ago
        match refreshed.map_err(ProviderError::from) {
            Err(e) if e.reason() != Reason::LibvirtBusy => return Err(e),
            _ => {}
        }
        let (info, volumes) = tokio::try_join!(site.hv.pool_info(&site.pool), site.hv.list_volumes(&site.pool))?;
        let entry = &order.at.entry;
        space::check(&site.host.name, &site.host.pool, &info, entry.pool_reserve, entry.disk_bytes().saturating_add(SEED_ROOM))?;
        if prior.is_none()
            && let Err(conflict) = refuse_foreign_volumes(order, site, &volumes)
        {
            // the domain was looked for before the volumes were listed: another daemon may have made all of them meanwhile
            return match site.hv.lookup_domain(order.name.as_str()).await {
                Ok(_) => Err(busy(&order.id())),
                Err(e) if e.is(code::NO_DOMAIN) => match self.is_being_left(site, &order.name, OTHERS_PATIENCE).await {
                    Ok(true) => Err(busy(&order.id())),
                    Ok(false) => Err(conflict),
                    Err(e) => Err(e),
                },
                Err(e) => Err(e.into()),
            };
        }
        let wanted = order.wanted();
        let found = self.images.find(&*site.hv, &site.pool, &volumes, &wanted).await?;
        match &found {
            Found::Complete(base) => fits(order, base)?,
            // nothing is fetched into the directory that a mount has left
            Found::Missing => mounted::require(&*site.hv, &site.host, &site.pool, &volumes).await?,
        }

        cancelled(job)?;
        job.step(Step::Defining);
        let mark = self.mark(order, prior.as_ref().map(|(mark, _)| &**mark));
        failpoint!("create.before_define");
        let uuid = prior.as_ref().map(|(_, domain)| domain.uuid);
        let domain = self.define(order, site, &mark, uuid).await?;
        let made = self.fill(job, order, site, &domain, mark, found, &volumes).await;
        match &made {
            Ok(_) => {}
            // the next Create completes it, or a Delete removes it, both by its domain
            Err(e) if e.is_transient() => self.follow_domain(order, site).await,
            // nobody will come back to complete what cannot be completed
            Err(_) => self.undo(order, site, &domain).await,
        }
        made
    }

    /// From the defined domain on: base, overlay, seed, start.
    #[expect(clippy::too_many_arguments, reason = "the steps of one operation share its state; a struct would only rename it")]
    async fn fill(
        &self,
        job: &Job,
        order: &Order,
        site: &Site,
        domain: &DomainRef,
        mark: Mark,
        found: Found,
        volumes: &[VolumeRef],
    ) -> Result<Created> {
        failpoint!("create.after_define");
        let base = match found {
            Found::Complete(base) => base,
            Found::Missing => {
                let pull = self.images.pull(order.wanted());
                job.step(Step::PullingImage(pull.clone()));
                let base = unless_cancelled(job, pull.wait()).await??;
                fits(order, &base)?;
                // a pull takes minutes: the name may have been given to another daemon meanwhile
                self.claim(order, site, domain, &mark).await?;
                base
            }
        };
        cancelled(job)?;
        job.step(Step::CreatingVolumes);
        failpoint!("create.before_overlay");
        self.make_overlay(order, site, &base, volumes).await?;
        failpoint!("create.after_overlay");
        cancelled(job)?;
        self.make_seed(order, site, volumes).await?;
        failpoint!("create.after_seed");
        cancelled(job)?;
        job.step(Step::Starting);
        failpoint!("create.before_start");
        let mark = Mark { phase: Phase::Ready, base: base.volume.clone(), base_digest: base.digest.to_string(), ..mark };
        let raw = self.start(order, site, domain, Some(&mark)).await?;
        let (state, state_reason) = starting(raw, mark.phase);
        let instance = Instance::of(&order.at.entry.name, order.id(), mark, state, state_reason);
        Ok(Created { instance, outcome: CreateOutcome::Created })
    }

    async fn inspect(&self, order: &Order, site: &Site, domain: DomainRef) -> Result<Prior> {
        let id = order.id();
        let (element, raw) = tokio::join!(site.hv.domain_metadata(&domain, mark::NAMESPACE), site.hv.domain_state(&domain));
        let gone = |e: crate::hypervisor::CallError| if e.is(code::NO_DOMAIN) { changed(&id) } else { e.into() };
        let mark = require_mark(element.map_err(gone)?.as_deref(), &id).map_err(|e| match e.reason() {
            Reason::NotManaged => ProviderError::new(
                Reason::NameNotManaged,
                format!(
                    "host {} has a domain {} that was not created by this provider; choose another name, or remove that domain there",
                    id.host, id.name
                ),
            ),
            _ => e,
        })?;
        owned_by_caller(order, &mark, &id)?;
        let raw = raw.map_err(gone)?;
        let (state, reason) = state::map(raw, mark.phase);
        match (mark.phase, state) {
            (Phase::Deleting, _) => {
                // somebody is at it: what was made now would go as well
                if mark.owner != self.replica && mark.is_fresh(jiff::Timestamp::now(), OTHERS_PATIENCE) {
                    return Err(busy(&id));
                }
                // an unfinished Delete is finished first; what comes then is a new instance
                self.remove(site, &order.name, &domain, &mark).await?;
                Ok(Prior::None)
            }
            (_, State::Paused) => Err(paused(&id, reason)),
            (Phase::Creating, State::Running) => {
                // started, and then the daemon died before it could say so
                let ready = Mark { phase: Phase::Ready, ..mark };
                self.write_mark(site, &domain, &ready).await?;
                Ok(Prior::Finished(Box::new(self.as_it_is(order, site, &domain).await?)))
            }
            (Phase::Creating, _) => {
                if mark.owner != self.replica && mark.is_fresh(jiff::Timestamp::now(), OTHERS_PATIENCE) {
                    return Err(busy(&id));
                }
                Ok(Prior::Unfinished(Box::new(mark), domain))
            }
            (Phase::Ready, State::Stopped) => Ok(Prior::Stopped(Box::new(mark), domain)),
            (Phase::Ready, _) => Ok(Prior::Finished(Box::new(self.as_it_is(order, site, &domain).await?))),
        }
    }

    async fn as_it_is(&self, order: &Order, site: &Site, domain: &DomainRef) -> Result<Instance> {
        let id = order.id();
        match read_instance(&*site.hv, &order.at.entry, &id, domain, &Expected::default()).await {
            // it exists and runs, which is all that Create promises
            Err(e) if e.reason() == Reason::AddressUnreadable => {
                let element = site.hv.domain_metadata(domain, mark::NAMESPACE).await?;
                let mark = require_mark(element.as_deref(), &id)?;
                Ok(Instance::of(&order.at.entry.name, order.id(), mark, State::Provisioning, StateReason::AddressUnreadable))
            }
            Err(e) if e.reason() == Reason::InstanceNotFound => Err(changed(&id)),
            other => other,
        }
    }

    /// A complete instance that is shut off: its disks are checked, then it is started.
    async fn restart(&self, job: &Job, order: &Order, site: &Site, mark: &Mark, domain: &DomainRef) -> Result<Created> {
        match site.hv.lookup_volume(&site.pool, &order.name.overlay_volume()).await {
            Ok(_) => {}
            Err(e) if e.is(code::NO_STORAGE_VOL) => return Err(self.without_disk(order, site, domain).await?),
            Err(e) => return Err(e.into()),
        }
        match site.hv.lookup_volume(&site.pool, &order.name.seed_volume()).await {
            Ok(_) => {}
            Err(e) if e.is(code::NO_STORAGE_VOL) => self.make_seed(order, site, &[]).await?,
            Err(e) => return Err(e.into()),
        }
        cancelled(job)?;
        job.step(Step::Starting);
        let raw = self.start(order, site, domain, None).await?;
        let (state, reason) = starting(raw, mark.phase);
        Ok(Created {
            instance: Instance::of(&order.at.entry.name, order.id(), mark.clone(), state, reason),
            outcome: CreateOutcome::Existing,
        })
    }

    /// What a complete instance is whose disk is gone.
    async fn without_disk(&self, order: &Order, site: &Site, domain: &DomainRef) -> Result<ProviderError> {
        let id = order.id();
        let volumes = site.hv.list_volumes(&site.pool).await?;
        mounted::require(&*site.hv, &site.host, &site.pool, &volumes).await?;
        let (disk, pool) = (order.name.overlay_volume(), &site.host.pool);
        Ok(match self.mark_now(site, &id, domain).await? {
            None => changed(&id),
            Some(now) if now.phase != Phase::Ready => busy(&id),
            // the end of a Create overwrites the mark of a Delete that is at work, which takes the domain next
            Some(now) if now.is_fresh(jiff::Timestamp::now(), OTHERS_PATIENCE) => ProviderError::new(
                Reason::StateChanged,
                format!(
                    "the disk {disk} of instance {id} is gone from pool {pool} within minutes of its Create: another daemon may be deleting the instance; call again"
                ),
            )
            .retry_after(answers::BUSY_RETRY),
            Some(_) => ProviderError::new(
                Reason::DiskLost,
                format!(
                    "instance {id} ran before and its disk {disk} is gone from pool {pool}; restore it, or delete the instance to have it made anew"
                ),
            ),
        })
    }

    /// Another daemon may have deleted the instance meanwhile. Volumes that were made here after that are nobody's, and
    /// would be in the way of the next Create.
    async fn follow_domain(&self, order: &Order, site: &Site) {
        let gone = site.hv.is_alive() && site.hv.lookup_domain(order.name.as_str()).await.is_err_and(|e| e.is(code::NO_DOMAIN));
        if gone && let Err(e) = self.remove_leftovers(site, &order.name).await {
            tracing::warn!(host = %site.host.name, name = %order.name, error = %e.chain(), "volumes of an instance that was deleted meanwhile could not be removed; a Delete by id will");
        }
    }

    /// Takes back what this Create made, after a failure that no retry mends.
    async fn undo(&self, order: &Order, site: &Site, domain: &DomainRef) {
        let element = site.hv.domain_metadata(domain, mark::NAMESPACE).await.ok().flatten();
        let ours = element
            .and_then(|e| Mark::parse(&e, jiff::Timestamp::now()).ok())
            .filter(|m| m.phase == Phase::Creating && m.owner == self.replica);
        let Some(mark) = ours else { return };
        if let Err(e) = self.remove(site, &order.name, domain, &mark).await {
            tracing::warn!(host = %site.host.name, name = %order.name, error = %e.chain(), "an unfinished domain could not be removed; Delete or the next Create will");
        }
    }
}

async fn wait(job: &Job, max_wait: Duration, id: &InstanceId) -> Result<Created> {
    let mut progress = job.watch();
    let deadline = tokio::time::sleep(max_wait);
    tokio::pin!(deadline);
    let mut expired = false;
    loop {
        {
            let now = progress.borrow_and_update();
            match &*now {
                Progress::Done(result) => return (**result).clone(),
                Progress::At(step) if expired => return Err(still_at(step, id)),
                Progress::At(_) => {}
            }
        }
        tokio::select! {
            changed = progress.changed() => {
                if changed.is_err() {
                    return Err(ProviderError::new(Reason::Internal, "the work on this instance ended without an answer"));
                }
            }
            () = &mut deadline, if !expired => expired = true,
        }
    }
}

/// What a domain that has just been started is to its caller: on its way.
fn starting(raw: state::RawState, phase: Phase) -> (State, StateReason) {
    match state::map(raw, phase) {
        (State::Running, _) => (State::Provisioning, StateReason::WaitingForAgent),
        other => other,
    }
}

fn cancelled(job: &Job) -> Result<()> {
    if !job.cancel.is_cancelled() {
        return Ok(());
    }
    Err(ProviderError::new(Reason::CreateCancelled, "the Create was ended by a Delete of the same instance, or by the daemon's end"))
}

async fn unless_cancelled<T>(job: &Job, work: impl Future<Output = T>) -> Result<T> {
    tokio::select! {
        () = job.cancel.cancelled() => cancelled(job).and_then(|()| Err(ProviderError::new(Reason::CreateCancelled, "the Create was ended"))),
        done = work => Ok(done),
    }
}
