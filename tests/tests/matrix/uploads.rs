//! Uploads that fail, on either side, again and again: after two hundred of a kind the daemon is as it was, libvirtd is the
//! same process, a guest beside them has noticed nothing, no volume is left and the next Create succeeds.
//!
//! `source` has what an image server does wrong, `target` what happens to a host meanwhile.

mod others;
mod room;
mod source;
mod target;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use egress_provider_proto::v1::{CreateRequest, DeleteRequest, ErrorReason, InstanceKey, delete_request};
use futures::future::join_all;
use lab_tests::case::{request, uid_of};
use lab_tests::counters::{self, Usage};
use lab_tests::lab::Host;
use lab_tests::scratch::{ScratchImage, sha256_of};
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Daemon, ImageServer, Outcome, ProvidersFile, Refusal, Summary, eventually};
use serde_json::json;
use tonic::Status;

use self::room::Room;
use self::source::Source;
use self::target::Target;
use crate::support::in_turn;

const HOST: &str = "hv1";
/// Tries of a kind at the same time.
const AT_A_TIME: usize = 8;
/// Images of the catalogue. A failure is remembered for ten seconds, so that one image is not tried again too soon.
const IMAGES: usize = 400;
/// From the images of one kind to those of the next.
const STRIDE: usize = 11;
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(60);
/// An upload of the entry `brief` ends when this is spent.
const BRIEF: &str = "3s";
/// What memory may vary by between two looks; the uploads of one kind are many times that.
const RESIDENT_KIB: u64 = 24 << 10;

fn tries() -> usize {
    if is_full() { 200 } else { 3 }
}

/// Which of the daemon's entries an upload is made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    /// The pool `default`, and the usual budgets.
    Plain,
    /// A short budget for uploads.
    Brief,
    /// A pool that can be filled and stopped.
    Room,
}

/// What has to come of an upload.
#[derive(Debug, Clone, Copy)]
enum Expected {
    Stored,
    /// One of these reasons, and a message that says what to do.
    Refused(&'static [ErrorReason], &'static str),
    /// Either, as the order of things has it; a refusal then says one of these reasons.
    StoredOr(&'static [ErrorReason]),
}

/// What all tries share.
struct Rig {
    daemon: Daemon,
    clients: Clients,
    server: ImageServer,
    /// Another host, as far as a client can tell.
    mirror: ImageServer,
    image: ScratchImage,
    bytes: Vec<u8>,
    entries: BTreeMap<By, String>,
    /// Before the case cleans its host up.
    room: Option<Room>,
    case: Case,
}

impl Rig {
    async fn start(case: Case) -> Self {
        let (server, mirror) = (ImageServer::start().await, ImageServer::start_at("127.0.0.2").await);
        let image = ScratchImage::filled(case.dir(), "i.qcow2", 2, 1);
        let plain = case.other_entry("plain").set("urlPolicy", json!({ "allow": ["127.0.0.1"] }));
        let brief = case.other_entry("brief").set("budgets", json!({ "uploadImage": BRIEF }));
        let roomy = case.other_entry("room").host_set(HOST, "pool", room::POOL);
        let entries = [(By::Plain, &plain), (By::Brief, &brief), (By::Room, &roomy)].map(|(by, e)| (by, e.name().to_owned())).into();
        let description = |n: usize| json!({ "url": server.url(&format!("i{n}")), "firmware": "bios" });
        let with = |n: usize, sha256: &str| json!({ "url": server.url(&format!("i{n}")), "firmware": "bios", "sha256": sha256 });
        let catalogue = |entry| (0..IMAGES).fold(entry, |entry: lab_tests::EntryFile, n| entry.image(&format!("i{n}"), description(n)));
        let plain = (0..IMAGES).fold(plain, |entry, n| {
            entry.image(&format!("good{n}"), with(n, &image.sha256)).image(&format!("wrong{n}"), with(n, &format!("{n:064x}")))
        });
        let daemon = case.daemon(ProvidersFile::new([plain, brief, roomy].map(catalogue))).await;
        let (clients, bytes) = (daemon.clients(), image.bytes());
        Self { daemon, clients, server, mirror, image, bytes, entries, room: None, case }
    }

    fn host(&self) -> &Host {
        self.case.host(HOST)
    }

    fn pool(by: By) -> &'static str {
        if by == By::Room { room::POOL } else { "default" }
    }

    fn room(&self) -> &Room {
        self.room.as_ref().expect("made at the start of the matrix")
    }

    /// A file of the entry's pool as this machine sees it.
    fn volume_path(&self, by: By, volume: &str) -> PathBuf {
        if by == By::Room { self.room().path(volume) } else { self.host().volume_path("default", volume) }
    }

    /// Volumes of the images that are tried, complete or not.
    fn bases(&self, by: By) -> Vec<String> {
        let prefix = format!("base-{}-", self.entries[&by]);
        let dir = self.volume_path(by, "");
        let files = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        files
            .filter_map(|file| file.ok()?.file_name().into_string().ok())
            .filter(|v| v.starts_with(&prefix) && !v.contains("-tiny-"))
            .collect()
    }

    /// A Create of a VM by an image, catalogue key or URL.
    async fn create(&self, by: By, vm: &str, image: &str) -> Result<(), Status> {
        let request = CreateRequest { entry: self.entries[&by].clone(), ..request(vm, HOST, image) };
        self.clients.create(request).await.map(drop)
    }

    async fn delete(&self, by: By, vm: &str) -> Result<(), Status> {
        let key = InstanceKey { name: vm.to_owned(), uid: uid_of(vm), ..Default::default() };
        let selector = Some(delete_request::Selector::Key(key));
        let request = DeleteRequest { entry: self.entries[&by].clone(), selector, ..Default::default() };
        self.clients.provider.clone().delete(request).await.map(drop)
    }

    fn vm(&self, n: usize) -> String {
        self.case.vm(&format!("u{n}"))
    }

    /// Whether what came of the Create of VM `n` is what had to. The VM is deleted; what was stored is compared with the
    /// image, and removed.
    async fn judge(&self, by: By, n: usize, result: Result<(), Status>, expected: Expected) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(e) = self.delete(by, &self.vm(n)).await {
            outcome.wrong.push(format!("Delete: {}", e.message()));
        }
        match (result, expected) {
            (Ok(()), Expected::Stored | Expected::StoredOr(_)) => outcome.wrong.extend(self.remove_base(by, n, true).err()),
            (Ok(()), Expected::Refused(..)) => outcome.wrong.push("it was stored".to_owned()),
            (Err(e), Expected::Refused(reasons, advice)) => {
                let refusal = Refusal::of(&e);
                if !reasons.contains(&refusal.reason) || !refusal.message.contains(advice) {
                    outcome.wrong.push(format!("not {reasons:?} with {advice:?}: {refusal:?}"));
                }
            }
            (Err(e), Expected::StoredOr(reasons)) => {
                let refusal = Refusal::of(&e);
                if !reasons.contains(&refusal.reason) {
                    outcome.wrong.push(format!("not {reasons:?}: {refusal:?}"));
                }
                // refused for a volume after the image, say
                outcome.wrong.extend(self.remove_base(by, n, false).err());
            }
            (Err(e), Expected::Stored) => outcome.wrong.push(format!("{:?}", Refusal::of(&e))),
        }
        outcome
    }

    /// Removes the base of image `n`, which has to be whole. It may be missing unless it `must` be there.
    fn remove_base(&self, by: By, n: usize, must: bool) -> Result<(), String> {
        let prefix = format!("base-{}-i{n}-", self.entries[&by]);
        let volumes: Vec<_> = self.bases(by).into_iter().filter(|v| v.starts_with(&prefix)).collect();
        match volumes.iter().find(|v| v.ends_with(".qcow2")) {
            Some(base) if volumes.len() == 3 && sha256_of(&self.volume_path(by, base)) == self.image.sha256 => {}
            None if volumes.is_empty() && !must => {}
            _ => return Err(format!("what was stored is not the image, its origin and its marker: {volumes:?}")),
        }
        for volume in volumes {
            let deleted = self.host().try_virsh(&["vol-delete", &volume, "--pool", Self::pool(by)]);
            deleted.map_err(|e| format!("it cannot be removed: {e}"))?;
        }
        Ok(())
    }

    /// A Create and a Delete of a VM by an image that none of the faults is about.
    async fn next_create(&self) -> Result<(), String> {
        let vm = self.case.vm("next");
        self.create(By::Plain, &vm, "tiny").await.map_err(|e| format!("the next Create: {}", e.message()))?;
        self.delete(By::Plain, &vm).await.map_err(|e| format!("its Delete: {}", e.message()))
    }
}

/// What must be after the tries of a kind as it was before them.
#[derive(Debug, PartialEq, Eq)]
struct Still {
    libvirtd: Option<i32>,
    /// The process of the guest beside the uploads, and how libvirt calls its state.
    guest: (String, String),
    ssh_sessions: usize,
    libvirt_clients: usize,
    bases: Vec<String>,
}

impl Still {
    fn of(rig: &Rig, guest: &str) -> Result<Self, String> {
        let host = rig.host();
        let pids = host.try_act(&["pids"])?;
        let process = pids.lines().find(|line| line.starts_with(&format!("guest:{guest} "))).unwrap_or("none").to_owned();
        Ok(Self {
            libvirtd: host.pid("libvirtd").filter(|pid| counters::is_alive(*pid)),
            guest: (process, host.try_virsh(&["domstate", guest])?),
            ssh_sessions: counters::ssh_sessions(host).len(),
            libvirt_clients: counters::libvirt_clients(host)?,
            bases: [By::Plain, By::Brief, By::Room].iter().flat_map(|by| rig.bases(*by)).collect(),
        })
    }
}

fn has_grown(now: Usage, before: Usage) -> bool {
    now.threads > before.threads + 2 || now.descriptors > before.descriptors + 2 || now.resident_kib > before.resident_kib + RESIDENT_KIB
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Of(Source),
    On(Target),
}

/// Some tries of a kind at the same time, each with an image of its own.
async fn batch(rig: &Rig, kind: Kind, numbers: Vec<usize>) -> Vec<Outcome> {
    let work = async {
        match kind {
            Kind::Of(source) => join_all(numbers.iter().map(|n| source.upload(rig, *n))).await,
            Kind::On(target) => target.uploads(rig, &numbers).await,
        }
    };
    match tokio::time::timeout(SOON, work).await {
        Ok(outcomes) => outcomes,
        Err(_) => vec![Outcome { stuck: vec![format!("not over within {SOON:?}")], ..Outcome::default() }],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_that_fail_on_either_side_change_nothing_however_often() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("mupload", &[HOST]) else { return };
    let mut rig = Rig::start(case).await;
    rig.room = Some(Room::on(rig.host()));
    let guest = rig.case.vm("guest");
    rig.create(By::Plain, &guest, "tiny").await.expect("a guest beside the uploads");
    let mut kinds: Vec<Kind> = Source::ALL.map(Kind::Of).into_iter().chain(Target::ALL.map(Kind::On)).collect();
    if !is_full() {
        kinds = kinds.into_iter().step_by(6).collect();
    }
    let mut summary = Summary::of("uploads");
    let mut flat = None;
    let image = |kind: usize, n: usize| (kind * STRIDE + n) % IMAGES;
    for (k, kind) in kinds.iter().enumerate() {
        // caches, pools of threads and of memory are filled by the first of each kind, as many at a time as later
        let numbers = (0..tries().min(AT_A_TIME)).map(|n| image(k, STRIDE - 1 - n)).collect();
        for first in batch(&rig, *kind, numbers).await {
            if !first.is_good() {
                eprintln!("uploads: {kind:?}: the first: {first:?}");
            }
            summary.add(format!("{kind:?} first"), first);
        }
    }
    rig.next_create().await.expect("created and deleted");
    let before = (Usage::of(rig.daemon.pid()), Still::of(&rig, &guest).expect("a sound host"));
    for (k, kind) in kinds.iter().enumerate() {
        let began = Instant::now();
        let mut outcomes = Vec::new();
        for first in (0..tries()).step_by(AT_A_TIME) {
            let numbers = (first..tries().min(first + AT_A_TIME)).map(|n| image(k, n)).collect();
            outcomes.extend(batch(&rig, *kind, numbers).await);
        }
        let took = began.elapsed();
        let mut after = Outcome::default();
        if let Err(e) = rig.next_create().await {
            after.wrong.push(e);
        }
        let still = eventually_still(&rig, &guest, &before.1).await;
        after.leaked.extend(still.err());
        let usage = eventually_flat(&rig, before.0).await;
        if has_grown(usage, before.0) {
            after.leaked.push(format!("{:?} became {usage:?}", before.0));
        }
        eprintln!("uploads: {kind:?}: {} tries in {took:.1?}; {usage:?}", outcomes.len());
        flat = Some(usage);
        outcomes.push(after);
        for bad in outcomes.iter().filter(|outcome| !outcome.is_good()).take(1) {
            eprintln!("uploads: {kind:?}: for one: {bad:?}");
        }
        for (n, outcome) in outcomes.into_iter().enumerate() {
            summary.add(format!("{kind:?} {n}"), outcome);
        }
    }
    eprintln!("uploads: {:?} before, {flat:?} after", before.0);
    drop(rig);
    summary.close();
}

/// What is taken down behind the last answer may take a moment.
async fn eventually_still(rig: &Rig, guest: &str, before: &Still) -> Result<(), String> {
    let began = Instant::now();
    loop {
        let now = Still::of(rig, guest)?;
        if now == *before {
            return Ok(());
        }
        if began.elapsed() > Duration::from_secs(20) {
            return Err(format!("{before:?} became {now:?}"));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn eventually_flat(rig: &Rig, before: Usage) -> Usage {
    let began = Instant::now();
    loop {
        let now = Usage::of(rig.daemon.pid());
        if !has_grown(now, before) || began.elapsed() > Duration::from_secs(30) {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until as many uploads have their volume.
async fn have_volumes(rig: &Rig, by: By, count: usize) {
    eventually("the uploads have their volumes", SOON, || async {
        let volumes: Vec<_> = rig.bases(by).into_iter().filter(|v| v.ends_with(".qcow2")).collect();
        if volumes.len() >= count { Ok(()) } else { Err(format!("{volumes:?}")) }
    })
    .await;
}
