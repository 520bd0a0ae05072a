//! A host in memory: a test double of [`Hypervisor`] and [`Connect`] with state.
//!
//! It refuses what libvirt refuses, with libvirt's codes: taken and missing names,
//! a second start, a volume that does not fit. Worse, it dies like libvirtd 11.3
//! does: a stream write that finds no room takes the whole daemon down, and every
//! link with it ([`MemoryHost::crashes`]). What it cannot do is surprise; tests of
//! libvirt's own behaviour belong in the lab.
//!
//! Every call and every part of an upload is one *step*. A test can fail a call
//! ([`MemoryHost::fail_next`]), stop the host from answering at a given step
//! ([`MemoryHost::freeze_at`]: what a caller killed at that step leaves behind can
//! then be looked at), and read which calls were made ([`MemoryHost::calls`]).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::xml::Document;
use super::classify::{with_errno, with_inactive_pool};
use super::{
    CallError, CallFailure, CallResult, Connect, DomainRef, HostId, Hypervisor, NodeInfo, PoolInfo, PoolRef, UploadPart, VolumeInfo,
    VolumeRef, code,
};
use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::error::{ProviderError, Reason};

mod xml;

/// A raw volume up to this size is born full of zeros, as on a real host.
const MAX_ZEROS: usize = 64 << 20;
const DOMAIN_RUNNING: i32 = 1;
const DOMAIN_SHUTOFF: i32 = 5;

/// One machine with libvirt on it. Links to it share its state.
pub struct MemoryHost {
    name: String,
    state: Mutex<State>,
    steps: AtomicU64,
    freeze_at: AtomicU64,
    frozen: Notify,
    crashes: AtomicU64,
    open_streams: AtomicU64,
    links: Mutex<Vec<CancellationToken>>,
    closing_takes: Mutex<Duration>,
}

#[derive(Default)]
struct State {
    domains: BTreeMap<String, Domain>,
    pools: BTreeMap<String, Pool>,
    bridges: Option<Vec<String>>,
    /// None: this call succeeds.
    failures: HashMap<&'static str, VecDeque<Option<CallFailure>>>,
    calls: Vec<&'static str>,
    crossing: Option<Crossing>,
}

/// What another daemon writes between two calls.
struct Crossing {
    call: &'static str,
    /// Calls of this name that come first.
    after: usize,
    domain: String,
    uri: String,
    element: String,
}

struct Domain {
    uuid: Uuid,
    xml: String,
    metadata: Vec<(String, String)>,
    /// Of the running guest alone.
    live: Vec<(String, String)>,
    state: RawState,
    persistent: bool,
    interfaces: HashMap<AddressSource, CallResultKind<Vec<GuestInterface>>>,
}

type CallResultKind<T> = Result<T, CallFailure>;

struct Pool {
    info: PoolInfo,
    /// Bytes used behind libvirt's back; seen at the next refresh.
    hidden: u64,
    volumes: BTreeMap<String, Volume>,
    /// Files in the directory that the pool has not seen yet.
    unseen: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone)]
struct Volume {
    format: String,
    capacity: u64,
    allocation: u64,
    backing: Option<String>,
    /// The file: an open stream keeps writing into it after the volume is gone.
    file: Arc<Mutex<Vec<u8>>>,
    /// As libvirt shows it: seconds since 1970.
    mtime: f64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |t| t.as_secs_f64())
}

fn refused(code: i32, domain: i32, message: impl Into<String>) -> CallFailure {
    CallFailure::Libvirt { code, domain, message: message.into() }
}

// virErrorDomain of the qemu driver and of the storage driver
const FROM_QEMU: i32 = 10;
const FROM_STORAGE: i32 = 18;

impl fmt::Debug for MemoryHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory host {}", self.name)
    }
}

impl MemoryHost {
    /// A host with the pool `default` of 100 GiB and any bridge.
    pub fn new(name: &str) -> Arc<Self> {
        let host = Arc::new(Self {
            name: name.to_owned(),
            state: Mutex::default(),
            steps: AtomicU64::new(0),
            freeze_at: AtomicU64::new(u64::MAX),
            frozen: Notify::new(),
            crashes: AtomicU64::new(0),
            open_streams: AtomicU64::new(0),
            links: Mutex::default(),
            closing_takes: Mutex::default(),
        });
        host.add_pool("default", 100 << 30);
        host
    }

    /// A new link to the host.
    pub fn link(self: &Arc<Self>) -> Arc<MemoryLink> {
        let dead = CancellationToken::new();
        lock(&self.links).push(dead.clone());
        Arc::new(MemoryLink { host: self.clone(), dead })
    }

    pub fn add_pool(&self, name: &str, capacity: u64) {
        let info = PoolInfo { state: PoolInfo::RUNNING, capacity, allocation: 0, available: capacity };
        lock(&self.state).pools.insert(name.to_owned(), Pool { info, hidden: 0, volumes: BTreeMap::new(), unseen: BTreeMap::new() });
    }

    pub fn stop_pool(&self, name: &str) {
        if let Some(pool) = lock(&self.state).pools.get_mut(name) {
            pool.info.state = 0;
        }
    }

    /// Files grow in the pool's file system outside libvirt: seen after a refresh.
    pub fn grow_behind_the_back(&self, pool: &str, bytes: u64) {
        if let Some(pool) = lock(&self.state).pools.get_mut(pool) {
            pool.hidden += bytes;
        }
    }

    /// A volume that another program made.
    pub fn put_volume(&self, pool: &str, name: &str, content: &[u8]) {
        if let Some(pool) = lock(&self.state).pools.get_mut(pool) {
            pool.volumes.insert(name.to_owned(), Volume::probed(content.to_vec()));
        }
    }

    /// A file in the pool's directory that libvirt has not noticed.
    pub fn put_unseen_file(&self, pool: &str, name: &str, content: &[u8]) {
        if let Some(pool) = lock(&self.state).pools.get_mut(pool) {
            pool.unseen.insert(name.to_owned(), content.to_vec());
        }
    }

    /// Another program writes to a volume of its own, or did so that long ago.
    pub fn touch_volume(&self, pool: &str, name: &str, ago: Duration) {
        if let Some(volume) = lock(&self.state).pools.get_mut(pool).and_then(|p| p.volumes.get_mut(name)) {
            volume.mtime = now() - ago.as_secs_f64();
        }
    }

    /// Removes a volume as an admin with `rm` and a refresh would.
    pub fn remove_volume(&self, pool: &str, name: &str) {
        if let Some(pool) = lock(&self.state).pools.get_mut(pool) {
            pool.volumes.remove(name);
        }
    }

    pub fn volume_names(&self, pool: &str) -> Vec<String> {
        lock(&self.state).pools.get(pool).map(|p| p.volumes.keys().cloned().collect()).unwrap_or_default()
    }

    pub fn volume_content(&self, pool: &str, name: &str) -> Option<Vec<u8>> {
        let file = lock(&self.state).pools.get(pool)?.volumes.get(name)?.file.clone();
        let content = lock(&file).clone();
        Some(content)
    }

    pub fn domain_names(&self) -> Vec<String> {
        lock(&self.state).domains.keys().cloned().collect()
    }

    /// What libvirt would say a domain's state is.
    pub fn set_domain_state(&self, name: &str, state: RawState) {
        if let Some(domain) = lock(&self.state).domains.get_mut(name) {
            domain.state = state;
            domain.forget_if_stopped();
        }
    }

    pub fn domain_raw_state(&self, name: &str) -> Option<RawState> {
        lock(&self.state).domains.get(name).map(|d| d.state)
    }

    /// Without this call every source answers with an empty list.
    pub fn set_interfaces(&self, domain: &str, source: AddressSource, answer: Result<Vec<GuestInterface>, CallFailure>) {
        if let Some(domain) = lock(&self.state).domains.get_mut(domain) {
            domain.interfaces.insert(source, answer);
        }
    }

    /// From here on only these bridges exist; before, any does.
    pub fn set_bridges(&self, names: &[&str]) {
        lock(&self.state).bridges = Some(names.iter().map(|&n| n.to_owned()).collect());
    }

    /// The next call of this name fails so; several are used in order.
    pub fn fail_next(&self, call: &'static str, failure: CallFailure) {
        self.fail_after(call, 0, failure);
    }

    /// As [`Self::fail_next`], after so many calls of this name that succeed.
    pub fn fail_after(&self, call: &'static str, successes: usize, failure: CallFailure) {
        let mut state = lock(&self.state);
        let queue = state.failures.entry(call).or_default();
        queue.extend(std::iter::repeat_n(None, successes));
        queue.push_back(Some(failure));
    }

    /// After so many calls of this name, and before the next one, somebody else writes this into the metadata of a domain.
    pub fn write_before(&self, call: &'static str, after: usize, domain: &str, uri: &str, element: &str) {
        let crossing = Crossing { call, after, domain: domain.to_owned(), uri: uri.to_owned(), element: element.to_owned() };
        lock(&self.state).crossing = Some(crossing);
    }

    /// The names of all calls since the last look, in order.
    pub fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut lock(&self.state).calls)
    }

    /// Steps taken so far: calls and parts of uploads.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    /// From this step (counted from now, 0 is the next) on nothing has an effect or gets an answer.
    pub fn freeze_at(&self, step: u64) {
        self.freeze_at.store(self.steps().saturating_add(step), Ordering::SeqCst);
    }

    /// Waits until someone has run into the freeze.
    pub async fn frozen(&self) {
        self.frozen.notified().await;
    }

    pub fn thaw(&self) {
        self.freeze_at.store(u64::MAX, Ordering::SeqCst);
    }

    /// Every open link is lost, as in a restart of libvirtd.
    pub fn drop_links(&self) {
        lock(&self.links).drain(..).for_each(|link| link.cancel());
    }

    /// Closing a link takes so long, on a clock that is paused.
    pub fn closing_takes(&self, time: Duration) {
        *lock(&self.closing_takes) = time;
    }

    /// How often something was done that kills a libvirtd 11.3. Must stay 0.
    pub fn crashes(&self) -> u64 {
        self.crashes.load(Ordering::SeqCst)
    }

    /// Uploads that have neither ended nor been aborted.
    pub fn open_streams(&self) -> u64 {
        self.open_streams.load(Ordering::SeqCst)
    }

    fn crash(&self) -> CallFailure {
        self.crashes.fetch_add(1, Ordering::SeqCst);
        self.drop_links();
        CallFailure::LinkDead { cause: "libvirtd has crashed".to_owned() }
    }
}

impl Domain {
    fn set_metadata(&mut self, uri: &str, element: &str) {
        self.metadata.retain(|(u, _)| u != uri);
        self.metadata.push((uri.to_owned(), element.to_owned()));
    }

    fn forget_if_stopped(&mut self) {
        if self.state.state == DOMAIN_SHUTOFF {
            self.live.clear();
        }
    }
}

impl Volume {
    /// As a refresh finds a file: format and virtual size from its header.
    fn probed(content: Vec<u8>) -> Self {
        let allocation = content.len() as u64;
        let mut volume = Self {
            format: "raw".to_owned(),
            capacity: allocation,
            allocation,
            backing: None,
            file: Arc::new(Mutex::new(content)),
            mtime: now(),
        };
        volume.probe();
        volume
    }

    fn probe(&mut self) {
        let content = lock(&self.file);
        if content.starts_with(b"QFI\xfb")
            && let Some(size) = content.get(24..32).and_then(|b| b.try_into().ok())
        {
            self.format = "qcow2".to_owned();
            self.capacity = u64::from_be_bytes(size);
        }
    }
}

/// One link to a [`MemoryHost`].
pub struct MemoryLink {
    host: Arc<MemoryHost>,
    dead: CancellationToken,
}

impl fmt::Debug for MemoryLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link to {:?}", self.host)
    }
}

impl MemoryLink {
    /// Takes a step; `act` runs at most once, and only on a host that lives and answers.
    async fn call<T>(&self, call: &'static str, act: impl FnOnce(&mut State) -> CallResultKind<T> + Send) -> CallResult<T> {
        let answer = match self.step().await {
            Err(e) => Err(e),
            Ok(()) => {
                let mut state = lock(&self.host.state);
                state.calls.push(call);
                state.cross(call);
                match state.next_failure(call) {
                    Some(failure) => Err(failure),
                    None => act(&mut state),
                }
            }
        };
        if let Err(CallFailure::LinkDead { .. } | CallFailure::Timeout { .. }) = &answer {
            self.dead.cancel();
        }
        answer.map_err(|kind| CallError { host: self.host.name.clone(), call, kind })
    }

    async fn step(&self) -> CallResultKind<()> {
        let lost = || CallFailure::LinkDead { cause: "client socket is closed".to_owned() };
        if self.dead.is_cancelled() {
            return Err(lost());
        }
        if self.host.steps.fetch_add(1, Ordering::SeqCst) >= self.host.freeze_at.load(Ordering::SeqCst) {
            self.host.frozen.notify_one();
            self.dead.cancelled().await;
            return Err(lost());
        }
        // a real call gives other tasks their turn
        tokio::task::yield_now().await;
        Ok(())
    }

    async fn send(&self, volume: &VolumeRef, length: u64, mut parts: mpsc::Receiver<UploadPart>) -> CallResultKind<u64> {
        let file = {
            let mut state = lock(&self.host.state);
            state.calls.push("upload");
            if let Some(failure) = state.next_failure("upload") {
                return Err(failure);
            }
            state.volume(&volume.key)?.file.clone()
        };
        let _open = OpenStream::new(&self.host);
        let mut sent = 0u64;
        loop {
            let part = tokio::select! {
                part = parts.recv() => part,
                () = self.dead.cancelled() => return Err(CallFailure::LinkDead { cause: "End of file while reading data".to_owned() }),
            };
            let data = match part {
                Some(UploadPart::Data(data)) => data,
                Some(UploadPart::Finish) => return Ok(sent),
                Some(UploadPart::Abort) | None => return Err(CallFailure::SourceAborted),
            };
            if sent + data.len() as u64 > length {
                return Err(CallFailure::BadAnswer { what: format!("more than the declared {length} bytes") });
            }
            self.step().await?;
            let mut state = lock(&self.host.state);
            if let Some(failure) = state.next_failure("upload part") {
                return Err(failure);
            }
            // writing past what was allocated takes room from the pool; libvirtd dies where there is none
            let end = sent + data.len() as u64;
            if let Ok(pool) = state.pool_of(&volume.key) {
                let room = pool.info.available;
                if let Some(v) = pool.volumes.get_mut(&volume.name)
                    && end > v.allocation
                {
                    let more = end - v.allocation;
                    if more > room {
                        drop(state);
                        return Err(self.host.crash());
                    }
                    v.allocation = end;
                    pool.info.available -= more;
                    pool.info.allocation += more;
                }
            }
            if let Ok(v) = state.volume(&volume.key) {
                v.mtime = now();
            }
            let mut content = lock(&file);
            let at = usize::try_from(sent).expect("test volumes fit in memory");
            if content.len() < at + data.len() {
                content.resize(at + data.len(), 0);
            }
            content[at..at + data.len()].copy_from_slice(&data);
            sent = end;
        }
    }
}

struct OpenStream<'a>(&'a MemoryHost);

impl<'a> OpenStream<'a> {
    fn new(host: &'a MemoryHost) -> Self {
        host.open_streams.fetch_add(1, Ordering::SeqCst);
        Self(host)
    }
}

impl Drop for OpenStream<'_> {
    fn drop(&mut self) {
        self.0.open_streams.fetch_sub(1, Ordering::SeqCst);
    }
}

impl State {
    fn cross(&mut self, call: &str) {
        let Some(crossing) = self.crossing.as_mut().filter(|c| c.call == call) else { return };
        if crossing.after > 0 {
            crossing.after -= 1;
            return;
        }
        let Some(Crossing { domain, uri, element, .. }) = self.crossing.take() else { return };
        if let Some(domain) = self.domains.get_mut(&domain) {
            domain.set_metadata(&uri, &element);
        }
    }

    fn next_failure(&mut self, call: &str) -> Option<CallFailure> {
        self.failures.get_mut(call)?.pop_front()?
    }

    fn pool(&mut self, name: &str) -> CallResultKind<&mut Pool> {
        self.pools.get_mut(name).ok_or_else(|| refused(code::NO_STORAGE_POOL, FROM_STORAGE, format!("no storage pool '{name}'")))
    }

    fn active_pool(&mut self, name: &str) -> CallResultKind<&mut Pool> {
        let pool = self.pool(name)?;
        if pool.info.state != PoolInfo::RUNNING {
            return Err(refused(code::OPERATION_INVALID, FROM_STORAGE, with_inactive_pool(format!("storage pool '{name}' is not active"))));
        }
        Ok(pool)
    }

    fn pool_of(&mut self, key: &str) -> CallResultKind<&mut Pool> {
        let name = key.strip_prefix("/pools/").and_then(|rest| rest.split('/').next()).unwrap_or_default().to_owned();
        self.pool(&name)
    }

    fn volume(&mut self, key: &str) -> CallResultKind<&mut Volume> {
        let name = key.rsplit('/').next().unwrap_or_default().to_owned();
        self.pool_of(key)?
            .volumes
            .get_mut(&name)
            .ok_or_else(|| refused(code::NO_STORAGE_VOL, FROM_STORAGE, format!("no storage vol with matching key {key}")))
    }

    fn domain(&mut self, domain: &DomainRef) -> CallResultKind<&mut Domain> {
        self.domains
            .get_mut(&domain.name)
            .filter(|d| d.uuid == domain.uuid)
            .ok_or_else(|| refused(code::NO_DOMAIN, FROM_QEMU, format!("no domain with matching uuid '{}'", domain.uuid)))
    }

    fn create_volume(&mut self, pool_name: &str, xml: &str) -> CallResultKind<VolumeRef> {
        let doc = Document::parse(xml)?;
        let name = doc.text("volume/name").filter(|n| !n.is_empty() && !n.contains('/'));
        let name = name.ok_or_else(|| refused(code::XML_ERROR, FROM_STORAGE, "missing or bad volume name"))?;
        let format = doc.attribute("volume/target/format", "type").unwrap_or_else(|| "raw".to_owned());
        let backing = doc.text("volume/backingStore/path");
        let mut capacity = doc.bytes("volume/capacity")?.unwrap_or(0);
        if let Some(path) = &backing {
            let base =
                self.volume(path).map_err(|_| refused(code::SYSTEM_ERROR, FROM_STORAGE, format!("Cannot access backing file '{path}'")))?;
            if capacity == 0 {
                capacity = base.capacity;
            }
        }
        // libvirt takes a missing allocation for full allocation of a raw volume
        let allocation = match doc.bytes("volume/allocation")? {
            Some(n) => n,
            None if format == "raw" => capacity,
            None => 0,
        };
        let pool = self.active_pool(pool_name)?;
        if pool.volumes.contains_key(&name) {
            return Err(refused(code::STORAGE_VOL_EXIST, FROM_STORAGE, format!("storage volume name '{name}' already in use.")));
        }
        if pool.unseen.contains_key(&name) {
            return Err(refused(code::OPERATION_INVALID, FROM_STORAGE, "target file exists".to_owned()));
        }
        let really_free = pool.info.available.saturating_sub(pool.hidden);
        if allocation > really_free {
            return Err(refused(
                code::SYSTEM_ERROR,
                FROM_STORAGE,
                with_errno(format!("cannot allocate {allocation} bytes in file: No space left on device"), libc::ENOSPC),
            ));
        }
        pool.info.available -= allocation;
        pool.info.allocation += allocation;
        let mut content = Vec::new();
        if format == "qcow2" {
            content.extend_from_slice(b"QFI\xfb\0\0\0\x03");
            content.resize(24, 0);
            content.extend_from_slice(&capacity.to_be_bytes());
        } else if let Ok(size @ ..=MAX_ZEROS) = usize::try_from(capacity) {
            content.resize(size, 0);
        }
        let key = format!("/pools/{pool_name}/{name}");
        pool.volumes
            .insert(name.clone(), Volume { format, capacity, allocation, backing, file: Arc::new(Mutex::new(content)), mtime: now() });
        Ok(VolumeRef { name, key, handle: None })
    }

    fn define(&mut self, xml: &str) -> CallResultKind<DomainRef> {
        let doc = Document::parse(xml)?;
        let name = doc.text("domain/name").filter(|n| !n.is_empty()).ok_or_else(|| refused(code::XML_ERROR, FROM_QEMU, "missing name"))?;
        let uuid = doc.text("domain/uuid").map(|u| Uuid::parse_str(&u));
        let uuid = match uuid {
            Some(Ok(u)) => Some(u),
            Some(Err(_)) => return Err(refused(code::XML_ERROR, FROM_QEMU, "malformed uuid")),
            None => None,
        };
        let metadata = doc.metadata();
        let existing = self.domains.get(&name);
        if let (Some(old), Some(new)) = (existing, uuid)
            && old.uuid != new
        {
            let text = format!("domain '{name}' already exists with uuid {}", old.uuid);
            return Err(refused(code::OPERATION_FAILED, FROM_QEMU, text));
        }
        if existing.is_none()
            && let Some(u) = uuid
            && let Some((other, _)) = self.domains.iter().find(|(_, d)| d.uuid == u)
        {
            return Err(refused(code::OPERATION_FAILED, FROM_QEMU, format!("domain '{other}' is already defined with uuid {u}")));
        }
        let (uuid, state, interfaces) = match self.domains.remove(&name) {
            Some(old) => (old.uuid, old.state, old.interfaces),
            None => (uuid.unwrap_or_else(Uuid::new_v4), RawState { state: DOMAIN_SHUTOFF, reason: 0 }, HashMap::new()),
        };
        self.domains
            .insert(name.clone(), Domain { uuid, xml: xml.to_owned(), metadata, live: Vec::new(), state, persistent: true, interfaces });
        Ok(DomainRef { name, uuid, handle: None })
    }

    fn start(&mut self, domain: &DomainRef) -> CallResultKind<()> {
        let found = self.domain(domain)?;
        if found.state.state != DOMAIN_SHUTOFF {
            return Err(refused(code::OPERATION_INVALID, FROM_QEMU, "domain is already running"));
        }
        let doc = Document::parse(&found.xml)?;
        for file in doc.attributes("domain/devices/disk/source", "file") {
            if self.volume(&file).is_err() {
                return Err(refused(
                    code::SYSTEM_ERROR,
                    FROM_QEMU,
                    format!("Cannot access storage file '{file}': No such file or directory"),
                ));
            }
        }
        if let Some(bridges) = &self.bridges {
            for bridge in doc.attributes("domain/devices/interface/source", "bridge") {
                if !bridges.contains(&bridge) {
                    return Err(refused(code::SYSTEM_ERROR, FROM_QEMU, format!("Cannot get interface MTU on '{bridge}': No such device")));
                }
            }
        }
        self.domain(domain)?.state = RawState { state: DOMAIN_RUNNING, reason: 1 };
        Ok(())
    }
}

#[async_trait]
impl Hypervisor for MemoryLink {
    fn host(&self) -> &str {
        &self.host.name
    }

    fn is_alive(&self) -> bool {
        !self.dead.is_cancelled()
    }

    async fn lib_version(&self) -> CallResult<u64> {
        self.call("lib_version", |_| Ok(11_003_000)).await
    }

    async fn hypervisor_version(&self) -> CallResult<u64> {
        self.call("hypervisor_version", |_| Ok(10_000_002)).await
    }

    async fn hostname(&self) -> CallResult<String> {
        let name = self.host.name.clone();
        self.call("hostname", |_| Ok(name)).await
    }

    async fn node_info(&self) -> CallResult<NodeInfo> {
        self.call("node_info", |_| Ok(NodeInfo { model: "x86_64".to_owned(), memory_kib: 64 << 20, cpus: 16 })).await
    }

    async fn domain_capabilities(&self, machine: &str, virt_type: &str) -> CallResult<String> {
        let text = format!(
            "<domainCapabilities><domain>{virt_type}</domain><machine>pc-{machine}</machine><arch>x86_64</arch><vcpu max='255'/>\
             <os supported='yes'><enum name='firmware'><value>bios</value><value>efi</value></enum></os></domainCapabilities>"
        );
        self.call("domain_capabilities", |_| Ok(text)).await
    }

    async fn has_interface(&self, name: &str) -> CallResult<Option<bool>> {
        self.call("has_interface", |s| Ok(s.bridges.as_ref().map(|b| b.iter().any(|n| n == name)))).await
    }

    async fn lookup_domain(&self, name: &str) -> CallResult<DomainRef> {
        self.call("lookup_domain", |s| match s.domains.get(name) {
            Some(d) => Ok(DomainRef { name: name.to_owned(), uuid: d.uuid, handle: None }),
            None => Err(refused(code::NO_DOMAIN, FROM_QEMU, format!("no domain with matching name '{name}'"))),
        })
        .await
    }

    async fn list_domains(&self) -> CallResult<Vec<DomainRef>> {
        self.call("list_domains", |s| {
            Ok(s.domains.iter().map(|(name, d)| DomainRef { name: name.clone(), uuid: d.uuid, handle: None }).collect())
        })
        .await
    }

    async fn define_domain(&self, xml: &str) -> CallResult<DomainRef> {
        self.call("define_domain", |s| s.define(xml)).await
    }

    async fn start_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.call("start_domain", |s| s.start(domain)).await
    }

    async fn destroy_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.call("destroy_domain", |s| {
            let found = s.domain(domain)?;
            if found.state.state == DOMAIN_SHUTOFF {
                return Err(refused(code::OPERATION_INVALID, FROM_QEMU, "domain is not running"));
            }
            found.state = RawState { state: DOMAIN_SHUTOFF, reason: 2 };
            found.forget_if_stopped();
            if !found.persistent {
                s.domains.remove(&domain.name);
            }
            Ok(())
        })
        .await
    }

    async fn undefine_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.call("undefine_domain", |s| {
            let found = s.domain(domain)?;
            found.persistent = false;
            if found.state.state == DOMAIN_SHUTOFF {
                s.domains.remove(&domain.name);
            }
            Ok(())
        })
        .await
    }

    async fn domain_state(&self, domain: &DomainRef) -> CallResult<RawState> {
        self.call("domain_state", |s| Ok(s.domain(domain)?.state)).await
    }

    async fn domain_xml(&self, domain: &DomainRef, _inactive: bool) -> CallResult<String> {
        self.call("domain_xml", |s| {
            let found = s.domain(domain)?;
            Ok(xml::with_metadata(&found.xml, found.uuid, &[&found.metadata[..], &found.live].concat()))
        })
        .await
    }

    async fn domain_metadata(&self, domain: &DomainRef, uri: &str) -> CallResult<Option<String>> {
        self.call("domain_metadata", |s| Ok(s.domain(domain)?.metadata.iter().find(|(u, _)| u == uri).map(|(_, e)| e.clone()))).await
    }

    async fn set_domain_metadata(&self, domain: &DomainRef, uri: &str, _prefix: &str, element: &str) -> CallResult<()> {
        self.call("set_domain_metadata", |s| {
            Document::parse(element)?;
            s.domain(domain)?.set_metadata(uri, element);
            Ok(())
        })
        .await
    }

    async fn set_live_metadata(&self, domain: &DomainRef, uri: &str, _prefix: &str, element: &str) -> CallResult<()> {
        self.call("set_live_metadata", |s| {
            Document::parse(element)?;
            let found = s.domain(domain)?;
            if found.state.state == DOMAIN_SHUTOFF {
                return Err(refused(code::OPERATION_INVALID, FROM_QEMU, "Requested operation is not valid: domain is not running"));
            }
            found.live.retain(|(u, _)| u != uri);
            found.live.push((uri.to_owned(), element.to_owned()));
            Ok(())
        })
        .await
    }

    async fn domain_interfaces(&self, domain: &DomainRef, source: AddressSource) -> CallResult<Vec<GuestInterface>> {
        self.call("domain_interfaces", |s| {
            let found = s.domain(domain)?;
            if found.state.state != DOMAIN_RUNNING {
                return Err(refused(code::OPERATION_INVALID, FROM_QEMU, "Requested operation is not valid: domain is not running"));
            }
            found.interfaces.get(&source).cloned().unwrap_or_else(|| Ok(Vec::new()))
        })
        .await
    }

    async fn lookup_pool(&self, name: &str) -> CallResult<PoolRef> {
        self.call("lookup_pool", |s| s.pool(name).map(|_| PoolRef { name: name.to_owned(), handle: None })).await
    }

    async fn pool_xml(&self, pool: &PoolRef) -> CallResult<String> {
        self.call("pool_xml", |s| {
            s.pool(&pool.name)?;
            Ok(format!("<pool type='dir'><name>{0}</name><target><path>/pools/{0}</path></target></pool>", pool.name))
        })
        .await
    }

    async fn pool_info(&self, pool: &PoolRef) -> CallResult<PoolInfo> {
        self.call("pool_info", |s| Ok(s.pool(&pool.name)?.info)).await
    }

    async fn refresh_pool(&self, pool: &PoolRef) -> CallResult<()> {
        self.call("refresh_pool", |s| {
            let pool = s.active_pool(&pool.name)?;
            for (name, content) in std::mem::take(&mut pool.unseen) {
                pool.volumes.insert(name, Volume::probed(content));
            }
            pool.volumes.values_mut().for_each(Volume::probe);
            pool.info.available = pool.info.available.saturating_sub(std::mem::take(&mut pool.hidden));
            Ok(())
        })
        .await
    }

    async fn list_volumes(&self, pool: &PoolRef) -> CallResult<Vec<VolumeRef>> {
        self.call("list_volumes", |s| {
            let volumes = &s.active_pool(&pool.name)?.volumes;
            Ok(volumes
                .keys()
                .map(|name| VolumeRef { name: name.clone(), key: format!("/pools/{}/{name}", pool.name), handle: None })
                .collect())
        })
        .await
    }

    async fn lookup_volume(&self, pool: &PoolRef, name: &str) -> CallResult<VolumeRef> {
        self.call("lookup_volume", |s| {
            let key = format!("/pools/{}/{name}", pool.name);
            s.active_pool(&pool.name)?;
            s.volume(&key).map(|_| VolumeRef { name: name.to_owned(), key: key.clone(), handle: None })
        })
        .await
    }

    async fn volume_info(&self, volume: &VolumeRef) -> CallResult<VolumeInfo> {
        self.call("volume_info", |s| s.volume(&volume.key).map(|v| VolumeInfo { capacity: v.capacity, allocation: v.allocation })).await
    }

    async fn volume_xml(&self, volume: &VolumeRef) -> CallResult<String> {
        self.call("volume_xml", |s| {
            let v = s.volume(&volume.key)?;
            let backing = match &v.backing {
                Some(path) => format!("<backingStore><path>{path}</path><format type='qcow2'/></backingStore>"),
                None => String::new(),
            };
            Ok(format!(
                "<volume type='file'><name>{}</name><key>{key}</key><capacity unit='bytes'>{}</capacity><allocation unit='bytes'>{}</allocation>\
                 <physical unit='bytes'>{}</physical><target><path>{key}</path><format type='{}'/>\
                 <timestamps><mtime>{:.9}</mtime><btime>0</btime></timestamps></target>{backing}</volume>",
                volume.name,
                v.capacity,
                v.allocation,
                v.allocation,
                v.format,
                v.mtime,
                key = volume.key,
            ))
        })
        .await
    }

    async fn create_volume(&self, pool: &PoolRef, xml: &str) -> CallResult<VolumeRef> {
        self.call("create_volume", |s| s.create_volume(&pool.name, xml)).await
    }

    async fn delete_volume(&self, volume: &VolumeRef) -> CallResult<()> {
        self.call("delete_volume", |s| {
            let allocation = s.volume(&volume.key)?.allocation;
            let pool = s.pool_of(&volume.key)?;
            pool.volumes.remove(&volume.name);
            pool.info.available += allocation;
            pool.info.allocation = pool.info.allocation.saturating_sub(allocation);
            Ok(())
        })
        .await
    }

    async fn upload(&self, volume: &VolumeRef, length: u64, parts: mpsc::Receiver<UploadPart>, _budget: Duration) -> CallResult<u64> {
        let answer = match self.step().await {
            Ok(()) => self.send(volume, length, parts).await,
            Err(e) => Err(e),
        };
        if let Err(CallFailure::LinkDead { .. } | CallFailure::Timeout { .. }) = &answer {
            self.dead.cancel();
        }
        answer.map_err(|kind| CallError { host: self.host.name.clone(), call: "upload", kind })
    }

    async fn download(&self, volume: &VolumeRef, limit: u64) -> CallResult<Bytes> {
        self.call("download", |s| {
            let volume = s.volume(&volume.key)?;
            let content = lock(&volume.file);
            let end = content.len().min(usize::try_from(limit).unwrap_or(usize::MAX));
            Ok(Bytes::copy_from_slice(&content[..end]))
        })
        .await
    }

    fn close(&self) {
        self.dead.cancel();
        let time = *lock(&self.host.closing_takes);
        if !time.is_zero() {
            // the clock moves at the first poll, before the future yields
            let _ = tokio::time::advance(time).now_or_never();
        }
    }
}

/// Links to a fixed set of hosts.
#[derive(Debug, Default)]
pub struct MemoryConnect {
    hosts: HashMap<HostId, Arc<MemoryHost>>,
    control: Mutex<HashMap<HostId, Arc<MemoryLink>>>,
    refusals: Mutex<VecDeque<ProviderError>>,
    dials: AtomicU64,
    unreachable: AtomicBool,
    silent: Mutex<Vec<String>>,
}

impl MemoryConnect {
    pub fn new(hosts: impl IntoIterator<Item = (HostId, Arc<MemoryHost>)>) -> Arc<Self> {
        Arc::new(Self { hosts: hosts.into_iter().collect(), ..Self::default() })
    }

    /// One entry with one host.
    pub fn single(entry: &str, host: &Arc<MemoryHost>) -> Arc<Self> {
        Self::new([(HostId { entry: entry.to_owned(), host: host.name.clone() }, host.clone())])
    }

    /// The next dial fails so; several are used in order.
    pub fn refuse_next(&self, error: ProviderError) {
        lock(&self.refusals).push_back(error);
    }

    pub fn set_unreachable(&self, unreachable: bool) {
        self.unreachable.store(unreachable, Ordering::SeqCst);
    }

    /// From here on a dial of this host neither succeeds nor fails.
    pub fn set_silent(&self, host: &str) {
        lock(&self.silent).push(host.to_owned());
    }

    pub fn dials(&self) -> u64 {
        self.dials.load(Ordering::SeqCst)
    }

    fn dial(&self, id: &HostId) -> Result<Arc<MemoryLink>, ProviderError> {
        self.dials.fetch_add(1, Ordering::SeqCst);
        if let Some(error) = lock(&self.refusals).pop_front() {
            return Err(error);
        }
        if self.unreachable.load(Ordering::SeqCst) {
            return Err(ProviderError::new(Reason::HostUnreachable, format!("host {} is unreachable", id.host)).on_host(&id.host));
        }
        match self.hosts.get(id) {
            Some(host) => Ok(host.link()),
            None => Err(ProviderError::new(Reason::HostNotConfigured, format!("host {} is not configured", id.host)).on_host(&id.host)),
        }
    }
}

#[async_trait]
impl Connect for MemoryConnect {
    async fn control(&self, host: &HostId) -> Result<Arc<dyn Hypervisor>, ProviderError> {
        if let Some(link) = lock(&self.control).get(host).filter(|l| l.is_alive()) {
            return Ok(link.clone());
        }
        let link = self.dial(host)?;
        lock(&self.control).insert(host.clone(), link.clone());
        Ok(link)
    }

    async fn dedicated(&self, host: &HostId) -> Result<Arc<dyn Hypervisor>, ProviderError> {
        if lock(&self.silent).contains(&host.host) {
            std::future::pending::<()>().await;
        }
        Ok(self.dial(host)?)
    }

    async fn dedicated_by(&self, host: &HostId, deadline: tokio::time::Instant) -> Result<Arc<dyn Hypervisor>, ProviderError> {
        let unreachable = || ProviderError::new(Reason::HostUnreachable, format!("host {} does not answer", host.host));
        tokio::time::timeout_at(deadline, self.dedicated(host)).await.unwrap_or_else(|_| Err(unreachable().on_host(&host.host)))
    }
}

#[cfg(test)]
mod tests;
