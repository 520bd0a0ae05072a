//! What the matrices share: tries side by side, and what is on a host against what may be there.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_provider_proto::v1::{ErrorClass, ListByTagResponse};
use lab_tests::case::uid_of;
use lab_tests::lab::Host;
use lab_tests::scratch::sha256_of;
use lab_tests::{Case, Clients, Daemon, Outcome, Refusal, Summary, Turn, eventually, lockup};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Code, Status};

/// Tries at a time that do not disturb each other: each waits most of its time, on a machine of two cores.
pub(crate) const AT_A_TIME: usize = 4;
/// Longest that a try may take. It only tells what is stuck.
const LIMIT: Duration = Duration::from_secs(240);
/// Of a try that a lock-up of libvirtd came between.
const ATTEMPTS: usize = 3;
/// Added to a try's number for each further attempt.
const ANOTHER: usize = 1000;

/// Calls of a sound host while another one is silent.
const MEANWHILE: usize = 5;

/// Between two tries of a caller that may come again.
const PAUSE: Duration = Duration::from_millis(200);

/// Tests that break a host take turns, their cleaning up included: taken before the case is started.
pub(crate) async fn in_turn() -> Turn {
    static TURN: Mutex<()> = Mutex::const_new(());
    Turn::take(&TURN).await
}

/// One base for all that find the image on the host.
pub(crate) async fn with_base(case: &Case, host: &str) {
    let warm = case.vm("warm");
    let daemon = case.daemon_in("warm", case.other_entry("w")).await;
    daemon.clients().create(case.request(&warm, host)).await.expect("created");
    daemon.clients().delete_by_key(&warm, &uid_of(&warm)).await.expect("deleted");
}

/// Whether a host answered: that it has no such VM is an answer, too.
pub(crate) async fn get(clients: &Clients, host: &str, vm: &str) -> Result<(), Status> {
    match clients.get(&format!("hosts/{host}/domains/{vm}"), &uid_of(vm)).await {
        Err(e) if e.code() != Code::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Asks a sound host while callers wait for a silent one: it answers, and before they are back.
pub(crate) async fn ask_meanwhile<T>(clients: &Clients, sound: &str, vm: &str, callers: &[JoinHandle<T>], outcome: &mut Outcome) {
    let mut meanwhile = false;
    for _ in 0..MEANWHILE {
        if let Err(e) = get(clients, sound, vm).await {
            outcome.wrong.push(format!("the other host: {}", e.message()));
        }
        meanwhile |= !callers.iter().all(JoinHandle::is_finished);
    }
    if !meanwhile {
        outcome.wrong.push("the other host was answered only when the silent one's callers were back".to_owned());
    }
}

/// Runs all tries, some at a time, and notes how each ended; one that does not end is stuck.
///
/// A try makes its names from the number that it is given. One that went wrong while libvirtd of a host was locked up is
/// made once more, with another number: others of them kill daemons in an upload.
pub(crate) async fn run_all<W, F>(summary: &mut Summary, at_a_time: usize, hosts: &[&Host], tries: Vec<(String, W)>)
where
    W: Fn(usize) -> F,
    F: Future<Output = Outcome> + Send + 'static,
{
    let mut turn: Vec<_> = (0..tries.len()).collect();
    for again in 0..ATTEMPTS {
        let places = Arc::new(Semaphore::new(at_a_time));
        let mut running = JoinSet::new();
        for n in std::mem::take(&mut turn) {
            let (places, work) = (places.clone(), tries[n].1(again * ANOTHER + n));
            running.spawn(async move {
                let _place = places.acquire_owned().await.expect("nobody closes it");
                let began = Instant::now();
                let outcome = match tokio::time::timeout(LIMIT, tokio::spawn(work)).await {
                    Ok(Ok(outcome)) => outcome,
                    Ok(Err(e)) => Outcome::wrong(format!("panicked: {e}")),
                    Err(_) => Outcome { stuck: vec![format!("not over within {LIMIT:?}")], ..Outcome::default() },
                };
                (n, began, outcome)
            });
        }
        while let Some(done) = running.join_next().await {
            let (n, began, outcome) = done.expect("a try's panic is caught");
            let point = &tries[n].0;
            if !outcome.is_good() && again + 1 < ATTEMPTS && any_locked_up(hosts, began) {
                eprintln!("{point}: once more, after a lock-up: {outcome:?}");
                turn.push(n);
            } else {
                summary.add(point, outcome);
            }
        }
    }
    // not left to the next
    any_locked_up(hosts, Instant::now());
}

/// Restarts each libvirtd that is locked up. Whether one was, since then.
fn any_locked_up(hosts: &[&Host], since: Instant) -> bool {
    tokio::task::block_in_place(|| hosts.iter().filter(|host| lockup::mended(host, since)).count() > 0)
}

/// What of one entry and of one VM lies on a host.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The VM's domain.
    pub(crate) domain: bool,
    /// The VM's volumes.
    pub(crate) volumes: Vec<String>,
    /// Bases that are complete, their content checked.
    pub(crate) complete: Vec<String>,
    /// Bases that are not.
    pub(crate) incomplete: Vec<String>,
    /// Origins and markers whose base is gone.
    pub(crate) strays: Vec<String>,
}

impl Found {
    pub(crate) fn on(host: &Host, entry: &str, vm: &str) -> Self {
        let volumes = host.volumes("default");
        let bases: BTreeSet<_> = volumes.iter().filter(|v| v.starts_with(&format!("base-{entry}-"))).cloned().collect();
        let mut found = Self {
            domain: host.domains().iter().any(|d| d == vm),
            volumes: volumes.into_iter().filter(|v| *v == format!("{vm}.qcow2") || *v == format!("{vm}-seed.iso")).collect(),
            ..Self::default()
        };
        for name in &bases {
            let side = name.strip_suffix(".sha256").or_else(|| name.strip_suffix(".origin"));
            match side {
                Some(base) if bases.contains(base) => {}
                Some(_) => found.strays.push(name.clone()),
                None if is_complete(host, name) => found.complete.push(name.clone()),
                None => found.incomplete.push(name.clone()),
            }
        }
        found
    }

    /// What a listing does not show although it is there.
    pub(crate) fn unlisted(&self, vm: &str, list: &ListByTagResponse) -> Vec<String> {
        let listed = |volume: &String| list.orphan_volumes.iter().any(|o| &o.name == volume);
        let instance = list.instances.iter().any(|i| i.name == vm);
        let mut unlisted: Vec<_> = self.incomplete.iter().filter(|base| !listed(base)).cloned().collect();
        unlisted.extend(self.strays.iter().filter(|stray| !listed(stray)).cloned());
        if self.domain && !instance {
            unlisted.push(vm.to_owned());
        }
        if !self.domain {
            unlisted.extend(self.volumes.iter().filter(|volume| !listed(volume)).cloned());
        }
        unlisted
    }
}

/// A base with its origin, and with the digest of its bytes as its marker.
fn is_complete(host: &Host, base: &str) -> bool {
    let marker = std::fs::read_to_string(host.volume_path("default", &format!("{base}.sha256"))).unwrap_or_default();
    let origin = std::fs::read_to_string(host.volume_path("default", &format!("{base}.origin"))).unwrap_or_default();
    origin.starts_with('{') && marker.len() == 64 && marker == sha256_of(&host.volume_path("default", base))
}

/// What of a case lies on a host at its end that may not: all but complete bases.
pub(crate) fn left_over(case: &Case, host: &str) -> Vec<String> {
    let host = case.host(host);
    let side = |name: &str| name.strip_suffix(".sha256").or_else(|| name.strip_suffix(".origin")).unwrap_or(name).to_owned();
    case.left(&host.name)
        .into_iter()
        .chain(
            host.volumes("default")
                .into_iter()
                .filter(|v| v.starts_with(&format!("base-{}-", case.entry_name())) && !is_complete(host, &side(v))),
        )
        .collect()
}

/// A call that is made again for as long as it is told that this is worth it.
pub(crate) async fn until_served<T, F>(outcome: &mut Outcome, what: &str, limit: Duration, call: impl Fn() -> F) -> Option<T>
where
    F: Future<Output = Result<T, Status>>,
{
    let tries = async {
        loop {
            match call().await {
                Ok(answer) => return Ok(answer),
                Err(e) => {
                    let refusal = Refusal::of(&e);
                    if refusal.reason.class() != ErrorClass::Transient {
                        return Err(format!("{what}: {}: {}", refusal.reason.wire_name(), refusal.message));
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    };
    match tokio::time::timeout(limit, tries).await {
        Ok(Ok(answer)) => return Some(answer),
        Ok(Err(e)) => outcome.wrong.push(e),
        Err(_) => outcome.stuck.push(format!("{what} is not served within {limit:?}")),
    }
    None
}

/// Whether a VM is deleted within `limit`; what is left of it afterwards is leaked.
pub(crate) async fn delete(outcome: &mut Outcome, clients: &Clients, host: &Host, entry: &str, vm: &str, limit: Duration) {
    match tokio::time::timeout(limit, clients.delete_by_key(vm, &lab_tests::case::uid_of(vm))).await {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => outcome.wrong.push(format!("Delete: {}", e.message())),
        Err(_) => outcome.stuck.push(format!("Delete is not over within {limit:?}")),
    }
    let found = Found::on(host, entry, vm);
    if found.domain {
        outcome.leaked.push(vm.to_owned());
    }
    outcome.leaked.extend(found.volumes.iter().cloned());
    match clients.list_complete().await {
        Ok(list) => {
            // a pull goes on by itself: what was incomplete before the listing may be complete in it
            let still = Found::on(host, entry, vm).unlisted(vm, &list);
            outcome.leaked.extend(found.unlisted(vm, &list).into_iter().filter(|name| still.contains(name)));
        }
        Err(e) => outcome.wrong.push(format!("ListByTag: {}", e.message())),
    }
}

/// A running VM that will be there after a shutdown, with its disk and its seed.
pub(crate) fn whole(outcome: &mut Outcome, host: &Host, entry: &str, vm: &str) {
    let info = host.try_virsh(&["dominfo", vm]).unwrap_or_default();
    let persistent = info.lines().any(|line| line.starts_with("Persistent:") && line.ends_with("yes"));
    let volumes = Found::on(host, entry, vm).volumes;
    if !host.is_active(vm) || !persistent || volumes.len() != 2 {
        outcome.wrong.push(format!("it is not whole: running {}, persistent {persistent}, volumes {volumes:?}", host.is_active(vm)));
    }
}

/// An answer that is OK or that says to come again.
pub(crate) fn may_be(outcome: &mut Outcome, who: &str, answer: Result<(), Status>) {
    if let Err(e) = answer {
        let refusal = Refusal::of(&e);
        if refusal.reason.class() != ErrorClass::Transient {
            outcome.wrong.push(format!("{who}: {}: {}", refusal.reason.wire_name(), refusal.message));
        }
    }
}

/// The daemon stands at the failpoint that it was given.
pub(crate) async fn reached(daemon: &Daemon, limit: Duration) {
    eventually("the daemon stands there", limit, || async {
        if daemon.log().contains("failpoint reached") { Ok(()) } else { Err("the daemon has not said so".to_owned()) }
    })
    .await;
}
