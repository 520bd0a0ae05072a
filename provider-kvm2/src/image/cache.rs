//! The cache of this process: finds bases, pulls each missing one once.
//!
//! A pull belongs to the cache, not to who asked for it: callers join it and may
//! leave it, it ends by itself. A pull that failed is tried again by the next
//! caller; only a Permanent failure is answered from memory for a few seconds, so
//! that a wrong digest does not download an image in a loop.
//!
//! Nothing here locks out other processes. An upload of another process is waited
//! for while it moves; one that stands still is debris, and the image is simply
//! stored once more.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bases::{self, Candidate, Facts, MARKER_MAX_BYTES, Naming};
use super::http::Source;
use super::origin::{self, Origin, url_sha256};
use super::publish::{Progress, Publish};
use super::{Base, Found, ImageRef, ImageState, ImageStatus, STALL, Wanted};
use tracing::Instrument;

use crate::config::{Entry, ImageFormat, ImageUrl, Sha256Hex};
use crate::error::{Class, ProviderError, Reason, Result, unless_it_panics};
use crate::hypervisor::{CallError, Connect, HostId, Hypervisor, PoolRef, VolumeRef, code};
use crate::telemetry::metrics::Metrics;

/// How long the outcome of a pull is shown after its end.
const KEEP: Duration = Duration::from_secs(600);

/// How long a Permanent failure is answered without another try.
const REMEMBER_FAILURE: Duration = Duration::from_secs(10);

/// How uploads of other processes are waited for.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// How often one is looked at.
    pub poll: Duration,
    /// One that was not written to for so long is debris.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        // an upload of ours may stand still for its source's stall and for the start of a next attempt
        Self { poll: Duration::from_secs(2), stall: 2 * STALL }
    }
}

/// A file not written to for so long is debris at first sight, unless the clocks are that far apart;
/// then the image is stored once more.
const SURELY_OLD: Duration = Duration::from_secs(900);

/// How long a shutdown waits for pulls to remove what they made.
const SHUTDOWN: Duration = Duration::from_secs(10);

pub struct ImageCache {
    connect: Arc<dyn Connect>,
    metrics: Metrics,
    source: Source,
    patience: Patience,
    /// Begins the id of every upload of this daemon, before and after a restart.
    signature: Option<u16>,
    pulls: Mutex<HashMap<PullKey, Running>>,
    /// What lies beside bases of ours, by host and volume key: immutable, so read once.
    facts: Mutex<HashMap<(HostId, String), Facts>>,
    /// Other processes' uploads as last seen.
    foreign: Mutex<HashMap<(HostId, String), Sight>>,
    /// Volumes that this process is filling.
    own: Mutex<HashSet<(HostId, String)>>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// One image on one host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PullKey {
    host: HostId,
    key: String,
    url_sha256: String,
    sha256: Option<Sha256Hex>,
    format: &'static str,
}

struct Running {
    pull: Pull,
    task: AbortHandle,
}

/// A pull that runs or has ended. Dropping it changes nothing.
#[derive(Clone)]
pub struct Pull {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
}

#[derive(Debug)]
struct Shared {
    wanted: Wanted,
    since: SystemTime,
    progress: Progress,
}

#[derive(Debug, Clone)]
enum Phase {
    Looking,
    Elsewhere,
    Pulling { volume: String },
    Ended { result: Result<Base>, at: Instant },
}

/// What an upload of another process looked like, and since when.
#[derive(Debug)]
struct Sight {
    looks: String,
    since: Instant,
}

impl fmt::Debug for ImageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageCache").field("pulls", &lock(&self.pulls).len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Pull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pull of {} to {}", self.shared.wanted.image.key, self.shared.wanted.host.name)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn host_id(wanted: &Wanted) -> HostId {
    HostId { entry: wanted.entry.name.clone(), host: wanted.host.name.clone() }
}

impl PullKey {
    fn of(wanted: &Wanted) -> Self {
        let image = &wanted.image;
        Self {
            host: host_id(wanted),
            key: image.key.clone(),
            url_sha256: url_sha256(&image.url),
            sha256: image.sha256.clone(),
            format: image.format.as_str(),
        }
    }
}

impl ImageCache {
    pub fn new(connect: Arc<dyn Connect>, metrics: Metrics) -> Arc<Self> {
        Self::with(connect, metrics, Source::default(), Patience::default())
    }

    /// As [`ImageCache::new`], for a daemon that knows its own uploads again after a restart: what it
    /// was killed at is not waited for. Another daemon of the same signature at worst stores an image
    /// twice.
    pub fn of_replica(connect: Arc<dyn Connect>, metrics: Metrics, replica: &str) -> Arc<Self> {
        let digest: [u8; 32] = Sha256::digest(replica).into();
        let signature = Some(u16::from_be_bytes([digest[0], digest[1]]));
        Arc::new(Self { signature, ..Self::build(connect, metrics, Source::default(), Patience::default()) })
    }

    pub fn with(connect: Arc<dyn Connect>, metrics: Metrics, source: Source, patience: Patience) -> Arc<Self> {
        Arc::new(Self::build(connect, metrics, source, patience))
    }

    fn build(connect: Arc<dyn Connect>, metrics: Metrics, source: Source, patience: Patience) -> Self {
        Self {
            signature: None,
            connect,
            metrics,
            source,
            patience,
            pulls: Mutex::default(),
            facts: Mutex::default(),
            foreign: Mutex::default(),
            own: Mutex::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }

    /// The base that a VM is to use, told from a listing of the whole pool. Asks the host nothing
    /// where it has seen the bases before; the predecessor's are read each time.
    pub async fn find(&self, hv: &dyn Hypervisor, _pool: &PoolRef, volumes: &[VolumeRef], wanted: &Wanted) -> Result<Found> {
        let found = self.look(hv, volumes, wanted).await?;
        let result = if matches!(found, Found::Complete(_)) { "hit" } else { "miss" };
        self.metrics.image_cache(&wanted.entry.name, result);
        Ok(found)
    }

    /// Joins the running pull of this image to this host, or starts one.
    pub fn pull(self: &Arc<Self>, wanted: Wanted) -> Pull {
        let key = PullKey::of(&wanted);
        let mut pulls = lock(&self.pulls);
        pulls.retain(|_, running| running.pull.is_worth_keeping());
        if let Some(running) = pulls.get(&key)
            && running.pull.answers_for_another()
        {
            self.metrics.image_cache(&wanted.entry.name, "joined");
            return running.pull.clone();
        }
        let shared = Arc::new(Shared { wanted, since: SystemTime::now(), progress: Progress::default() });
        let (phase, seen) = watch::channel(Phase::Looking);
        let pull = Pull { shared: shared.clone(), phase: seen };
        let cache = self.clone();
        // under the span of the caller that was first
        let span = tracing::info_span!(
            "kvm2.download",
            kvm2.host = %shared.wanted.host.name,
            kvm2.image = %shared.wanted.image.key,
            server.address = shared.wanted.image.url.url().host_str().unwrap_or_default(),
            kvm2.sha256_configured = shared.wanted.image.sha256.is_some(),
        );
        let work = async move {
            let result = unless_it_panics("the pull of an image", cache.obtain(&shared, &phase)).await;
            if let Err(e) = &result {
                tracing::warn!(host = %shared.wanted.host.name, image = %shared.wanted.image.key, reason = ?e.reason(), error = %e.chain(), "image pull failed");
            }
            phase.send_replace(Phase::Ended { result, at: Instant::now() });
        };
        let task = self.tasks.spawn(work.instrument(span));
        pulls.insert(key, Running { pull: pull.clone(), task: task.abort_handle() });
        pull
    }

    /// Pulls that run, and those that ended not long ago.
    pub fn statuses(&self) -> Vec<ImageStatus> {
        let mut pulls = lock(&self.pulls);
        pulls.retain(|_, running| running.pull.is_worth_keeping());
        pulls.values().map(|running| running.pull.status()).collect()
    }

    /// The complete bases of an entry in a pool, those of ours and those of catalogue images under
    /// the predecessor's names.
    pub async fn list_on_host(&self, hv: &dyn Hypervisor, pool: &PoolRef, entry: &Entry) -> Result<Vec<ImageStatus>> {
        let volumes = hv.list_volumes(pool).await?;
        let id = HostId { entry: entry.name.clone(), host: hv.host().to_owned() };
        self.forget_absent(&id, &volumes);
        let mut out = Vec::new();
        for candidate in bases::all_ours(&volumes, &entry.name) {
            if let Some(facts) = self.facts_of(hv, &id, &candidate).await?
                && let Some(origin) = facts.origin.as_ref().filter(|o| bases::is_of(&candidate, o, &entry.name))
                && let Some(url) = ImageUrl::parse(&origin.url)
            {
                let format = if origin.format == "raw" { ImageFormat::Raw } else { ImageFormat::Qcow2 };
                let image = ListedImage { key: &origin.key, url, format, size: origin.virtual_size, since: origin.time.into() };
                out.push(image.status(&id, &candidate, &facts));
            }
        }
        for (key, image) in &entry.images {
            let image = ImageRef {
                key: key.clone(),
                url: image.url.clone(),
                sha256: None,
                format: image.format,
                firmware: image.firmware,
                trust: super::UrlTrust::Configured,
            };
            for candidate in bases::candidates(&volumes, &entry.name, &image).iter().filter(|c| c.naming == Naming::Legacy) {
                if let Some(facts) = self.facts_of(hv, &id, candidate).await?
                    && bases::usable(Naming::Legacy, &facts, &entry.name, &image)
                {
                    let size = hv.volume_info(candidate.base).await?.capacity;
                    let listed = ListedImage { key, url: image.url.clone(), format: image.format, size, since: SystemTime::UNIX_EPOCH };
                    out.push(listed.status(&id, candidate, &facts));
                }
            }
        }
        Ok(out)
    }

    /// Ends all pulls; they remove what they made if the host answers in time.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(SHUTDOWN, self.tasks.wait()).await.is_err() {
            lock(&self.pulls).values().for_each(|running| running.task.abort());
            self.tasks.wait().await;
        }
    }

    /// The bases of an entry that are not complete: uploads in progress, or debris.
    pub async fn incomplete<'a>(
        &self,
        hv: &dyn Hypervisor,
        id: &HostId,
        volumes: &'a [VolumeRef],
        entry: &str,
    ) -> Result<Vec<&'a VolumeRef>> {
        let mut incomplete = bases::without_marker(volumes, entry);
        for candidate in bases::all_ours(volumes, entry) {
            // the marker is made before it is filled
            if candidate.marker.is_some() && self.facts_of(hv, id, &candidate).await?.is_none() {
                incomplete.push(candidate.base);
            }
        }
        Ok(incomplete)
    }

    async fn look(&self, hv: &dyn Hypervisor, volumes: &[VolumeRef], wanted: &Wanted) -> Result<Found> {
        let id = host_id(wanted);
        self.forget_absent(&id, volumes);
        let (entry, image) = (&wanted.entry.name, &wanted.image);
        let mut complete = Vec::new();
        for candidate in bases::candidates(volumes, entry, image) {
            if let Some(facts) = self.facts_of(hv, &id, &candidate).await?
                && bases::usable(candidate.naming, &facts, entry, image)
            {
                complete.push((candidate, facts));
            }
        }
        let Some((candidate, facts)) = bases::oldest(complete.iter().map(|c| (c.0.base.name.as_str(), &c.1, c))) else {
            return Ok(Found::Missing);
        };
        let virtual_size = match &facts.origin {
            Some(origin) => origin.virtual_size,
            None => hv.volume_info(candidate.base).await?.capacity,
        };
        Ok(Found::Complete(Base {
            volume: candidate.base.name.clone(),
            path: candidate.base.key.clone(),
            format: image.format,
            virtual_size,
            digest: facts.digest.clone(),
        }))
    }

    /// None for a base that is not complete.
    async fn facts_of(&self, hv: &dyn Hypervisor, id: &HostId, candidate: &Candidate<'_>) -> Result<Option<Facts>> {
        let Some(marker) = candidate.marker else { return Ok(None) };
        let remembered = (id.clone(), candidate.base.key.clone());
        if let Some(facts) = lock(&self.facts).get(&remembered) {
            return Ok(Some(facts.clone()));
        }
        let origin = match candidate.origin {
            Some(volume) => match small(hv, volume, origin::MAX_BYTES + 1).await? {
                Some(bytes) => match Origin::parse(&bytes) {
                    Some(origin) => Some(origin),
                    None => return Ok(None),
                },
                None => return Ok(None),
            },
            None if candidate.naming == Naming::Ours => return Ok(None),
            None => None,
        };
        let Some(text) = small(hv, marker, MARKER_MAX_BYTES + 1).await? else { return Ok(None) };
        let digest = std::str::from_utf8(&text).ok().filter(|_| text.len() as u64 <= MARKER_MAX_BYTES).and_then(Sha256Hex::parse);
        let Some(digest) = digest else { return Ok(None) };
        let facts = Facts { digest, origin };
        // the predecessor replaces a base of its own under the same name
        if candidate.naming == Naming::Ours {
            lock(&self.facts).insert(remembered, facts.clone());
        }
        Ok(Some(facts))
    }

    fn forget_absent(&self, id: &HostId, volumes: &[VolumeRef]) {
        let listed: HashSet<&str> = volumes.iter().map(|v| v.key.as_str()).collect();
        let keep = |(host, key): &(HostId, String)| host != id || listed.contains(key.as_str());
        lock(&self.facts).retain(|k, _| keep(k));
        lock(&self.foreign).retain(|k, _| keep(k));
    }

    async fn obtain(&self, shared: &Shared, phase: &watch::Sender<Phase>) -> Result<Base> {
        let wanted = &shared.wanted;
        let id = host_id(wanted);
        let give_up = Instant::now() + wanted.entry.budgets.upload_image;
        loop {
            let hv = self.connect.control(&id).await?;
            let pool = hv.lookup_pool(&wanted.host.pool).await?;
            let volumes = hv.list_volumes(&pool).await?;
            if let Found::Complete(base) = self.look(&*hv, &volumes, wanted).await? {
                return Ok(base);
            }
            if Instant::now() >= give_up || !self.foreign_upload_moves(&*hv, &id, &volumes, wanted).await? {
                break;
            }
            phase.send_replace(Phase::Elsewhere);
            tokio::select! {
                () = tokio::time::sleep(self.patience.poll) => {}
                () = self.stop.cancelled() => return Err(stopping(wanted)),
            }
        }
        if self.stop.is_cancelled() {
            return Err(stopping(wanted));
        }
        self.publish(shared, phase, &id).await
    }

    async fn publish(&self, shared: &Shared, phase: &watch::Sender<Phase>, id: &HostId) -> Result<Base> {
        let wanted = &shared.wanted;
        let random = match self.signature {
            Some(signature) => u32::from(signature) << 16 | u32::from(rand::random::<u16>()),
            None => rand::random(),
        };
        let volume = bases::base_name(&wanted.entry.name, &wanted.image.key, random, wanted.image.format);
        let _own = Own::new(&self.own, (id.clone(), volume.clone()));
        phase.send_replace(Phase::Pulling { volume });
        let job = Publish {
            connect: &*self.connect,
            host: id,
            wanted,
            source: &self.source,
            metrics: &self.metrics,
            progress: &shared.progress,
            id: random,
            stop: &self.stop,
            made: AtomicBool::new(false),
        };
        let (base, origin) = job.run().await?;
        let facts = Facts { digest: base.digest.clone(), origin: Some(origin) };
        lock(&self.facts).insert((id.clone(), base.path.clone()), facts);
        Ok(base)
    }

    /// Whether another process is at work on a base of this image.
    async fn foreign_upload_moves(&self, hv: &dyn Hypervisor, id: &HostId, volumes: &[VolumeRef], wanted: &Wanted) -> Result<bool> {
        let mut moves = false;
        for candidate in bases::candidates(volumes, &wanted.entry.name, &wanted.image) {
            let base = candidate.base;
            if candidate.marker.is_some() && candidate.naming == Naming::Legacy
                || lock(&self.own).contains(&(id.clone(), base.name.clone()))
                || self.signature.is_some() && bases::signature(&base.name) == self.signature
            {
                // complete, being filled here, or left by this daemon before it was restarted
                continue;
            }
            if candidate.marker.is_some() && self.facts_of(hv, id, &candidate).await?.is_some() {
                // complete, and not what is wanted
                continue;
            }
            let xml = match hv.volume_xml(base).await {
                Ok(xml) => xml,
                Err(e) if e.is(code::NO_STORAGE_VOL) => continue,
                Err(e) => return Err(e.into()),
            };
            moves |= self.sight((id.clone(), base.key.clone()), &xml);
        }
        Ok(moves)
    }

    /// Takes note of an upload's looks; false once they have not changed for too long.
    fn sight(&self, upload: (HostId, String), xml: &str) -> bool {
        let written = between(xml, "<mtime>", "</mtime>");
        if written.and_then(age).is_some_and(|age| age > SURELY_OLD) {
            return false;
        }
        let looks = format!("{} {}", written.unwrap_or_default(), between(xml, "<allocation", "</allocation>").unwrap_or_default());
        let now = Instant::now();
        let mut foreign = lock(&self.foreign);
        let sight = foreign.entry(upload).or_insert_with(|| Sight { looks: looks.clone(), since: now });
        if sight.looks != looks {
            *sight = Sight { looks, since: now };
        }
        now.duration_since(sight.since) < self.patience.stall
    }
}

/// A base as a listing shows it.
struct ListedImage<'a> {
    key: &'a str,
    url: ImageUrl,
    format: ImageFormat,
    size: u64,
    since: SystemTime,
}

impl ListedImage<'_> {
    fn status(self, id: &HostId, candidate: &Candidate<'_>, facts: &Facts) -> ImageStatus {
        let length = facts.origin.as_ref().map(|o| o.length);
        ImageStatus {
            entry: id.entry.clone(),
            host: id.host.clone(),
            key: self.key.to_owned(),
            url: self.url,
            state: ImageState::Ready,
            bytes_done: length.unwrap_or(0),
            bytes_total: length,
            volume: Some(candidate.base.name.clone()),
            digest: Some(facts.digest.clone()),
            virtual_size: Some(self.size),
            format: self.format,
            since: self.since,
            last_error: None,
        }
    }
}

impl Pull {
    /// The base, once it is there. Stopping to wait does not end the pull.
    pub async fn wait(&self) -> Result<Base> {
        let mut phase = self.phase.clone();
        match phase.wait_for(|p| matches!(p, Phase::Ended { .. })).await.as_deref() {
            Ok(Phase::Ended { result, .. }) => result.clone(),
            // the task is gone without a word: aborted by a shutdown
            Ok(_) | Err(_) => Err(stopping(&self.shared.wanted)),
        }
    }

    /// The outcome, if there is one yet.
    pub fn outcome(&self) -> Option<Result<Base>> {
        match &*self.phase.borrow() {
            Phase::Ended { result, .. } => Some(result.clone()),
            Phase::Looking | Phase::Elsewhere | Phase::Pulling { .. } => None,
        }
    }

    pub fn status(&self) -> ImageStatus {
        let Shared { wanted, since, progress } = &*self.shared;
        let mut status = ImageStatus {
            entry: wanted.entry.name.clone(),
            host: wanted.host.name.clone(),
            key: wanted.image.key.clone(),
            url: wanted.image.url.clone(),
            state: ImageState::Pulling,
            bytes_done: progress.done(),
            bytes_total: progress.total(),
            volume: None,
            digest: None,
            virtual_size: None,
            format: wanted.image.format,
            since: *since,
            last_error: None,
        };
        match &*self.phase.borrow() {
            Phase::Looking => {}
            Phase::Elsewhere => status.state = ImageState::PulledElsewhere,
            Phase::Pulling { volume } => status.volume = Some(volume.clone()),
            Phase::Ended { result: Ok(base), .. } => {
                status.state = ImageState::Ready;
                status.volume = Some(base.volume.clone());
                status.digest = Some(base.digest.clone());
                status.virtual_size = Some(base.virtual_size);
            }
            Phase::Ended { result: Err(e), .. } => {
                status.state = ImageState::Failed;
                status.last_error = Some(e.clone());
            }
        }
        status
    }

    fn is_worth_keeping(&self) -> bool {
        match &*self.phase.borrow() {
            Phase::Ended { at, .. } => at.elapsed() < KEEP,
            Phase::Looking | Phase::Elsewhere | Phase::Pulling { .. } => self.runs(),
        }
    }

    /// Whether a new caller gets this pull's answer rather than a pull of its own.
    fn answers_for_another(&self) -> bool {
        match &*self.phase.borrow() {
            // the base may have been evicted since
            Phase::Ended { result: Ok(_), .. } => false,
            Phase::Ended { result: Err(e), at } => e.class() == Class::Permanent && at.elapsed() < REMEMBER_FAILURE,
            Phase::Looking | Phase::Elsewhere | Phase::Pulling { .. } => self.runs(),
        }
    }

    fn runs(&self) -> bool {
        self.phase.has_changed().is_ok()
    }
}

/// Keeps a name in a set for as long as it lives.
struct Own<'a, T: Eq + Hash> {
    set: &'a Mutex<HashSet<T>>,
    item: T,
}

impl<'a, T: Eq + Hash + Clone> Own<'a, T> {
    fn new(set: &'a Mutex<HashSet<T>>, item: T) -> Self {
        lock(set).insert(item.clone());
        Self { set, item }
    }
}

impl<T: Eq + Hash> Drop for Own<'_, T> {
    fn drop(&mut self) {
        lock(self.set).remove(&self.item);
    }
}

fn stopping(wanted: &Wanted) -> ProviderError {
    let text = format!("the pull of image {} to host {} was ended by a shutdown; ask again", wanted.image.key, wanted.host.name);
    ProviderError::new(Reason::ShuttingDown, text)
}

/// A small volume's content; None if it has vanished since it was listed.
async fn small(hv: &dyn Hypervisor, volume: &VolumeRef, limit: u64) -> Result<Option<bytes::Bytes>, CallError> {
    match hv.download(volume, limit).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.is(code::NO_STORAGE_VOL) => Ok(None),
        Err(e) => Err(e),
    }
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let rest = &text[text.find(from)? + from.len()..];
    Some(&rest[..rest.find(to)?])
}

/// How long ago a time in seconds since 1970 (with a fraction) was; None in the future.
fn age(seconds: &str) -> Option<Duration> {
    let whole = seconds.split('.').next()?.trim().parse::<u64>().ok()?;
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + Duration::from_secs(whole)).ok()
}

#[cfg(test)]
mod tests;
