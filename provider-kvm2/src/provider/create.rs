//! Create: from a request to a running domain, mark first.
//!
//! The order of things is what makes a crash harmless: the domain is defined with
//! its mark (`phase: creating`) before any volume exists, so whatever is left can be
//! listed, completed by the next Create and removed by Delete. Two daemons that
//! create one instance at once meet at the overlay: libvirt makes a volume of a name
//! once, and who does not get it steps back.

use std::num::{NonZeroU32, NonZeroU64};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use secrecy::{ExposeSecret, SecretSlice};
use tokio::time::Instant;
use tracing::Instrument;

use super::get::{bad_name, read_instance, require_mark};
use super::jobs::{Entered, Job, JobKey, Progress, Step, Terms};
use super::placement::Resolved;
use super::sites::Site;
use super::{CreateOutcome, CreateRequest, Created, Expected, Instance, InstanceImage, Key, Provider, placement, preflight, sites};
use crate::config::{NetworkConfig, VirtType};
use crate::domain::document::Document;
use crate::domain::mark::{self, Mark, Phase};
use crate::domain::names;
use crate::domain::state::{self, State, StateReason};
use crate::domain::volume::VolumeSpec;
use crate::domain::{InstanceId, VmName};
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{DomainRef, UploadPart, VolumeRef, code};
use crate::image::{Base, Found, Wanted, space};
use crate::seed;

/// Space counted for a seed beside the disk, in bytes.
const SEED_ROOM: u64 = 16 << 20;
/// A Create of another daemon that has been at work for less than this is let alone: longer
/// than its volumes and its start may take within their budgets.
const OTHERS_PATIENCE: Duration = Duration::from_secs(240);
/// Nothing else is known of when a busy name will be free.
const BUSY_RETRY: Duration = Duration::from_secs(2);
/// A pull reports progress in seconds, not in milliseconds.
const PULL_RETRY: Duration = Duration::from_secs(5);

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
                    let result = AssertUnwindSafe(this.run_create(&running, &order)).catch_unwind().await.unwrap_or_else(|_| {
                        Err(ProviderError::new(
                            Reason::Internal,
                            "creating the instance failed on a defect of this daemon; its log has the place",
                        ))
                    });
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
        if prior.is_none() {
            refuse_foreign_volumes(order, site, &volumes)?;
        }
        let wanted = order.wanted();
        let found = self.images.find(&*site.hv, &site.pool, &volumes, &wanted).await?;
        if let Found::Complete(base) = &found {
            fits(order, base)?;
        }

        cancelled(job)?;
        job.step(Step::Defining);
        let mark = self.mark(order, prior.as_ref().map(|(mark, _)| &**mark), None);
        failpoint!("create.before_define");
        let uuid = prior.as_ref().map(|(_, domain)| domain.uuid);
        let domain = self.define(order, site, &mark, uuid).await?;
        let made = self.fill(job, order, site, &domain, mark, found, &volumes).await;
        if let Err(e) = &made
            && !e.is_transient()
        {
            // nobody will come back to complete what cannot be completed
            self.undo(order, site, &domain).await;
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
        let instance = instance_of(order, mark, state, state_reason);
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
            // an unfinished Delete is finished first; what comes then is a new instance
            (Phase::Deleting, _) => {
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
                Ok(instance_of(order, mark, State::Provisioning, StateReason::AddressUnreadable))
            }
            Err(e) if e.reason() == Reason::InstanceNotFound => Err(changed(&id)),
            other => other,
        }
    }

    /// A complete instance that is shut off: its disks are checked, then it is started.
    async fn restart(&self, job: &Job, order: &Order, site: &Site, mark: &Mark, domain: &DomainRef) -> Result<Created> {
        let id = order.id();
        match site.hv.lookup_volume(&site.pool, &order.name.overlay_volume()).await {
            Ok(_) => {}
            Err(e) if e.is(code::NO_STORAGE_VOL) => {
                let message = format!(
                    "instance {id} ran before and its disk {} is gone from pool {}; restore it, or delete the instance to have it made anew",
                    order.name.overlay_volume(),
                    site.host.pool
                );
                return Err(ProviderError::new(Reason::DiskLost, message));
            }
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
        Ok(Created { instance: instance_of(order, mark.clone(), state, reason), outcome: CreateOutcome::Existing })
    }

    fn mark(&self, order: &Order, prior: Option<&Mark>, base: Option<&Base>) -> Mark {
        let now = jiff::Timestamp::now();
        Mark {
            claim: mark::Claim::Managed,
            uid: order.key.uid.clone(),
            created_at: prior.and_then(|m| m.created_at).or(Some(now)),
            phase: Phase::Creating,
            installation_id: order.key.installation_id.clone(),
            spec_hash: order.spec_hash.clone(),
            entry: order.at.entry.name.clone(),
            image_key: order.at.image.key.clone(),
            base: base.map(|b| b.volume.clone()).unwrap_or_default(),
            base_digest: base.map(|b| b.digest.to_string()).unwrap_or_default(),
            owner: self.replica.clone(),
            attempt_at: Some(now),
        }
    }

    async fn define(&self, order: &Order, site: &Site, mark: &Mark, uuid: Option<uuid::Uuid>) -> Result<DomainRef> {
        let Order { at, name, key, .. } = order;
        let document = Document {
            name: name.clone(),
            uuid: uuid.unwrap_or_else(|| names::domain_uuid(&at.entry.name, &at.host.name, &key.installation_id, name, &key.uid)),
            vcpus: at.machine.vcpus.try_into().unwrap_or(NonZeroU32::MIN),
            memory_mib: at.machine.memory_mib.try_into().unwrap_or(NonZeroU64::MIN),
            virt_type: at.entry.virt_type,
            cpu_mode: at.entry.cpu_mode.clone(),
            machine: at.entry.machine.clone(),
            firmware: at.image.firmware,
            overlay_path: site.path_of(&name.overlay_volume()),
            seed_path: site.path_of(&name.seed_volume()),
            bridge: at.host.bridge.clone(),
            mac: names::mac_for(&key.installation_id, name, &key.uid),
            mark: mark.clone(),
        };
        let xml = document.to_xml();
        site.hv.define_domain(&xml).await.map_err(|e| {
            // the name was free a moment ago
            if e.is(code::OPERATION_FAILED) { changed(&order.id()).with_source(e) } else { e.into() }
        })
    }

    /// Refreshes the mark's attempt, unless another daemon has taken the name.
    async fn claim(&self, order: &Order, site: &Site, domain: &DomainRef, mark: &Mark) -> Result<()> {
        let id = order.id();
        let element = site
            .hv
            .domain_metadata(domain, mark::NAMESPACE)
            .await
            .map_err(|e| if e.is(code::NO_DOMAIN) { changed(&id) } else { e.into() })?;
        let current = require_mark(element.as_deref(), &id)?;
        if current.owner != mark.owner || current.phase != Phase::Creating {
            return Err(busy(&id));
        }
        self.write_mark(site, domain, &Mark { attempt_at: Some(jiff::Timestamp::now()), ..mark.clone() }).await
    }

    pub(super) async fn write_mark(&self, site: &Site, domain: &DomainRef, mark: &Mark) -> Result<()> {
        Ok(site.hv.set_domain_metadata(domain, mark::NAMESPACE, mark::PREFIX, &mark.to_metadata()).await?)
    }

    async fn make_overlay(&self, order: &Order, site: &Site, base: &Base, volumes: &[VolumeRef]) -> Result<()> {
        let name = order.name.overlay_volume();
        if let Some(old) = volumes.iter().find(|v| v.name == name) {
            // from an attempt that never got to start the domain: nothing of the guest's is in it
            ignore_missing(site.hv.delete_volume(old).await)?;
        }
        let spec = VolumeSpec::Overlay {
            name: &name,
            capacity: order.at.entry.disk_bytes(),
            backing_path: &base.path,
            backing_format: base.format,
        };
        match site.hv.create_volume(&site.pool, &spec.to_xml()).await {
            Ok(_) => Ok(()),
            Err(e) if e.is(code::STORAGE_VOL_EXIST) => Err(busy(&order.id()).with_source(e)),
            Err(e) => Err(vanished_base(e.into())),
        }
    }

    async fn make_seed(&self, order: &Order, site: &Site, volumes: &[VolumeRef]) -> Result<()> {
        let name = order.name.seed_volume();
        let entry = &order.at.entry;
        let mac = names::mac_for(&order.key.installation_id, &order.name, &order.key.uid);
        let meta_data = seed::network::meta_data(&order.name);
        let vendor_data = seed::vendor::vendor_data(entry.vendor_data.as_deref(), entry.guest_agent);
        let network_config = (entry.network_config == NetworkConfig::Written).then(|| seed::network::config(&mac));
        let files = seed::iso::SeedFiles {
            user_data: order.user_data.expose_secret(),
            meta_data: meta_data.as_bytes(),
            vendor_data: &vendor_data,
            network_config: network_config.as_deref().map(str::as_bytes),
        };
        let image = seed::iso::build(&files)
            .map_err(|fault| ProviderError::new(Reason::Internal, "the seed image cannot be built").with_source(fault))?;
        if let Some(old) = volumes.iter().find(|v| v.name == name) {
            // it may have been cut off in the middle
            ignore_missing(site.hv.delete_volume(old).await)?;
        }
        failpoint!("create.before_seed");
        let length = image.len() as u64;
        let spec = VolumeSpec::Bytes { name: &name, length };
        let volume = match site.hv.create_volume(&site.pool, &spec.to_xml()).await {
            Ok(volume) => volume,
            Err(e) if e.is(code::STORAGE_VOL_EXIST) => return Err(busy(&order.id()).with_source(e)),
            Err(e) => return Err(e.into()),
        };
        failpoint!("create.after_seed_volume");
        let (parts, receiver) = tokio::sync::mpsc::channel(1);
        let feed = async move {
            // neither waits for long: an upload that has ended drops the receiver, and says why
            let _ = parts.send(UploadPart::Data(image.into())).await;
            let Ok(finish) = parts.reserve().await else { return Ok(()) };
            failpoint!("create.in_seed_upload");
            finish.send(UploadPart::Finish);
            Ok::<_, ProviderError>(())
        };
        let (fed, sent) = tokio::join!(feed, site.hv.upload(&volume, length, receiver, entry.budgets.upload_small));
        fed?;
        sent?;
        Ok(())
    }

    /// Starts the domain and, if all is well, writes `ready` at the same time as it asks how it went.
    async fn start(&self, order: &Order, site: &Site, domain: &DomainRef, ready: Option<&Mark>) -> Result<state::RawState> {
        let id = order.id();
        match site.hv.start_domain(domain).await {
            Ok(()) => {}
            // active already
            Err(e) if e.is(code::OPERATION_INVALID) => {}
            Err(e) => return Err(self.why_not_started(site, &id, e).await),
        }
        failpoint!("create.after_start");
        let (state, marked) = tokio::join!(site.hv.domain_state(domain), async {
            match ready {
                Some(mark) => {
                    failpoint!("create.before_ready");
                    self.write_mark(site, domain, mark).await?;
                    failpoint!("create.after_ready");
                    Ok(())
                }
                None => Ok::<_, ProviderError>(()),
            }
        });
        marked?;
        let deadline = Instant::now() + order.at.entry.budgets.settle;
        let mut raw = state?;
        loop {
            match state::map(raw, Phase::Ready) {
                (State::Running, _) => return Ok(raw),
                (State::Provisioning, _) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    raw = site.hv.domain_state(domain).await?;
                }
                (_, reason) => {
                    return Err(ProviderError::new(
                        Reason::StartFailed,
                        format!(
                            "domain {} was started on host {} and did not stay up ({}); see its log under /var/log/libvirt/qemu there",
                            id.name,
                            id.host,
                            state::describe(State::Stopped, reason)
                        ),
                    ));
                }
            }
        }
    }

    /// libvirt answers most start failures with one code; what it could not find is looked for.
    async fn why_not_started(&self, site: &Site, id: &InstanceId, error: crate::hypervisor::CallError) -> ProviderError {
        if error.is(code::NO_DOMAIN) {
            return changed(id).with_source(error);
        }
        // QEMU's own words, which no locale changes; domain capabilities say KVM is there when only its device file is
        if site.entry.virt_type == VirtType::Kvm && error.kind.to_string().to_ascii_lowercase().contains("kvm") {
            return preflight::kvm_unavailable(&site.entry, &site.host).with_source(error);
        }
        let original = ProviderError::from(error);
        if matches!(original.reason(), Reason::StartFailed | Reason::LibvirtError | Reason::HostRejected)
            && let Err(cause) = preflight::require_bridge(&*site.hv, &site.host).await
            && cause.reason() == Reason::BridgeMissing
        {
            return cause.with_source(original);
        }
        original
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

/// The caller's wait is over; the work goes on.
fn still_at(step: &Step, id: &InstanceId) -> ProviderError {
    let error = match step {
        Step::PullingImage(pull) => {
            let status = pull.status();
            let total = status.bytes_total.map_or_else(|| "an unannounced number of".to_owned(), |t| t.to_string());
            let error = ProviderError::new(
                Reason::ImagePullInProgress,
                format!(
                    "image {} is being fetched to host {}: {} of {total} bytes; the work goes on, call Create again with the same key",
                    status.key, id.host, status.bytes_done
                ),
            )
            .retry_after(PULL_RETRY)
            .with_meta("bytes_done", status.bytes_done);
            match status.bytes_total {
                Some(total) => error.with_meta("bytes_total", total),
                None => error,
            }
        }
        step => ProviderError::new(
            Reason::CallTimeout,
            format!(
                "creating instance {id} takes longer than max_wait; the work goes on (now: {}), call Create again with the same key",
                step.label()
            ),
        )
        .retry_after(BUSY_RETRY),
    };
    error.with_meta("step", step.label()).on_host(&id.host).on_instance(id)
}

fn may_join(job: &Job, terms: &Terms, id: &InstanceId) -> Result<()> {
    let running = &job.terms;
    if !mark::same(&running.key.uid, &terms.key.uid) || !mark::same(&running.key.installation_id, &terms.key.installation_id) {
        return Err(owned_by_other(id, &running.key.uid, &terms.key.uid));
    }
    if !mark::same(&running.spec_hash, &terms.spec_hash) || running.host != terms.host {
        return Err(spec_conflict(id, &running.spec_hash, &terms.spec_hash));
    }
    if job.cancel.is_cancelled() {
        return Err(busy(id));
    }
    Ok(())
}

fn owned_by_caller(order: &Order, mark: &Mark, id: &InstanceId) -> Result<()> {
    if !mark::same(&order.key.uid, &mark.uid) {
        return Err(owned_by_other(id, &mark.uid, &order.key.uid));
    }
    if !mark::same(&order.key.installation_id, &mark.installation_id) {
        let message = format!(
            "instance {id} belongs to installation {}, this request comes from {}; choose another name",
            mark.installation_id, order.key.installation_id
        );
        return Err(ProviderError::new(Reason::NameOwnedByOtherUid, message).with_meta("owner_installation_id", &mark.installation_id));
    }
    if !mark::same(&order.spec_hash, &mark.spec_hash) {
        return Err(spec_conflict(id, &mark.spec_hash, &order.spec_hash));
    }
    Ok(())
}

fn owned_by_other(id: &InstanceId, owner: &str, caller: &str) -> ProviderError {
    ProviderError::new(
        Reason::NameOwnedByOtherUid,
        format!(
            "instance {id} belongs to uid {owner}, this request is for uid {caller}; choose another name, or delete the other one first"
        ),
    )
    .with_meta("owner_uid", owner)
}

fn spec_conflict(id: &InstanceId, existing: &str, asked: &str) -> ProviderError {
    ProviderError::new(
        Reason::SpecConflict,
        format!(
            "instance {id} exists with another spec (hash {existing}, asked for {asked}); delete it before it is created with the new one"
        ),
    )
    .with_meta("existing_spec_hash", existing)
}

fn paused(id: &InstanceId, reason: StateReason) -> ProviderError {
    ProviderError::new(
        Reason::PausedByAdmin,
        format!(
            "instance {id} exists and is paused ({}); resume it on the host (virsh resume {}) or delete it",
            state::describe(State::Paused, reason),
            id.name
        ),
    )
    .with_meta("state_reason", reason.as_str_name())
}

fn busy(id: &InstanceId) -> ProviderError {
    ProviderError::new(Reason::OperationInProgress, format!("another operation is at work on {id}; ask again in a moment"))
        .retry_after(BUSY_RETRY)
}

fn changed(id: &InstanceId) -> ProviderError {
    ProviderError::new(Reason::StateChanged, format!("{id} was changed by someone else in the middle of the call; call again"))
        .retry_after(BUSY_RETRY)
}

fn shutting_down() -> ProviderError {
    ProviderError::new(Reason::ShuttingDown, "this daemon is shutting down; call again when its successor serves").retry_after(BUSY_RETRY)
}

/// Volumes of the VM's names without a domain: not ours to overwrite.
fn refuse_foreign_volumes(order: &Order, site: &Site, volumes: &[VolumeRef]) -> Result<()> {
    let names = [order.name.overlay_volume(), order.name.seed_volume()];
    match volumes.iter().find(|v| names.contains(&v.name)) {
        None => Ok(()),
        Some(volume) => Err(ProviderError::new(
            Reason::VolumeConflict,
            format!(
                "pool {} on host {} holds a volume {} that no domain of that name uses; look what it is, then remove it there (virsh vol-delete {} --pool {})",
                site.host.pool, site.host.name, volume.name, volume.name, site.host.pool
            ),
        )
        .with_meta("volume", &volume.name)),
    }
}

fn fits(order: &Order, base: &Base) -> Result<()> {
    let disk = order.at.entry.disk_bytes();
    if base.virtual_size <= disk {
        return Ok(());
    }
    Err(ProviderError::invalid(
        Reason::DiskTooSmall,
        "placement.image",
        format!(
            "image {} is a disk of {} bytes and VMs of entry {} get {disk} bytes; raise diskSizeGb to at least {}, or use a smaller image",
            order.at.image.key,
            base.virtual_size,
            order.at.entry.name,
            base.virtual_size.div_ceil(1 << 30)
        ),
    )
    .with_meta("image_bytes", base.virtual_size)
    .with_meta("disk_bytes", disk))
}

/// A base that vanished under the overlay's creation is found missing by the next attempt.
fn vanished_base(error: ProviderError) -> ProviderError {
    if error.reason() == Reason::InstanceNotFound {
        return ProviderError::new(Reason::StateChanged, "a volume vanished while the instance was created; call again").with_source(error);
    }
    error
}

fn ignore_missing(result: crate::hypervisor::CallResult<()>) -> Result<()> {
    match result {
        Err(e) if !e.is(code::NO_STORAGE_VOL) => Err(e.into()),
        _ => Ok(()),
    }
}

/// What a domain that has just been started is to its caller: on its way.
fn starting(raw: state::RawState, phase: Phase) -> (State, StateReason) {
    match state::map(raw, phase) {
        (State::Running, _) => (State::Provisioning, StateReason::WaitingForAgent),
        other => other,
    }
}

fn instance_of(order: &Order, mark: Mark, state: State, state_reason: StateReason) -> Instance {
    Instance {
        entry: order.at.entry.name.clone(),
        id: order.id(),
        uid: mark.uid,
        installation_id: mark.installation_id,
        spec_hash: mark.spec_hash,
        phase: mark.phase,
        image: InstanceImage { key: mark.image_key, digest: mark.base_digest, base_volume: mark.base },
        last_error: None,
        created_at: mark.created_at,
        state,
        state_reason,
        state_message: state::describe(state, state_reason).to_owned(),
        addresses: Vec::new(),
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
