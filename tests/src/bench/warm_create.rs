//! A warm Create to a running domain against a script of virsh commands that does the same,
//! and how many round trips to the host each waits for.

use std::time::{Duration, Instant};

use crate::case::{request, uid_of};
use crate::clients::Clients;
use crate::daemon::Daemon;
use crate::fault_proxy::FaultProxy;
use crate::lab::Host;

use super::report::{Figure, Limit, Unit};
use super::rig::{HOST, Rig};
use super::rival::Rival;
use super::series::{Series, timed};

const RIVAL: &str = "kt-bench-rival";
/// Of each direction, where round trips are told from the time that they take.
const DELAY: Duration = Duration::from_millis(50);
/// As long as the delay is in force, a script of virsh commands takes many seconds.
const DELAYED_RIVAL_ROUNDS: usize = 3;

pub async fn measure(rig: &Rig) -> Vec<Figure> {
    let daemon = rig.daemon("create", rig.entry()).await;
    let clients = daemon.clients();
    let script = Script::like_a_vm_of_ours(rig, &clients).await;
    let rival = rig.rival();
    let (mut ours, mut each, mut session) = (Series::default(), Series::default(), Series::default());
    for round in 0..2 * rig.rounds {
        let us = async { create_and_delete(rig, &clients, round).await };
        let them = async { (script.one_by_one(&rival), script.in_one_session(&rival)) };
        let (us, (a, b)) = if Rig::ours_first(round) {
            let us = us.await;
            (us, them.await)
        } else {
            let them = them.await;
            (us.await, them)
        };
        ours.push_seconds(us);
        each.push_seconds(a);
        session.push_seconds(b);
    }
    let time = Figure::new("Warm Create to a running domain")
        .line("Create", Unit::Seconds, &ours)
        .line("script: five virsh commands", Unit::Seconds, &each)
        .judged("ratio to the script", Unit::Plain, &ours.over(&each), Limit(0.5))
        .line("the same commands in one virsh session", Unit::Seconds, &session)
        .line("ratio to the session", Unit::Plain, &ours.over(&session))
        .note("the script's seed and domain document are made beforehand and not counted");
    drop(daemon);
    vec![time, round_trips(rig, &script).await]
}

/// Counted by a proxy between daemon and host, which also makes the way long.
async fn round_trips(rig: &Rig, script: &Script) -> Figure {
    let host = rig.host();
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    // at debug the log names each call
    let daemon = rig.case.daemon_in("create-far", rig.entry().via(HOST, proxy.addr())).await;
    let clients = daemon.clients();
    create_and_delete(rig, &clients, 0).await;
    let rival = Rival::to(&rig.case.lab, host, Some(proxy.addr()), &rig.dir("rival-far"));

    let (mut turns, mut calls, mut waited, mut far) = (Series::default(), Series::default(), Series::default(), Series::default());
    let (mut start_near, mut start_far) = (Series::default(), Series::default());
    let mut named = String::new();
    let rtt = 2.0 * DELAY.as_secs_f64();
    for round in 0..rig.rounds {
        let vm = rig.case.vm(&format!("far{round}"));
        let turned = proxy.counts().round_trips;
        let near = Observed::create(&daemon, &clients, &vm).await;
        turns.push((proxy.counts().round_trips - turned) as f64);
        calls.push(near.calls.len() as f64);
        delete(&clients, &vm).await;

        proxy.delay(DELAY);
        let delayed = Observed::create(&daemon, &clients, &vm).await;
        proxy.delay(Duration::ZERO);
        delete(&clients, &vm).await;
        far.push(delayed.took);
        start_near.push(near.start());
        start_far.push(delayed.start());
        // the start of QEMU takes longer and varies more than all else; as one call it is one round trip
        waited.push((delayed.took - delayed.start() - near.took + near.start()) / rtt + 1.0);
        named = delayed.calls.iter().map(|(name, took)| format!("{name} {:.0}", took * 1000.0)).collect::<Vec<_>>().join(", ");
    }
    proxy.delay(DELAY);
    let (mut each, mut session) = (Series::default(), Series::default());
    for _ in 0..DELAYED_RIVAL_ROUNDS.min(rig.rounds) {
        // a thread of its own: the proxy goes on beside it
        let (script, rival) = (script.clone(), rival.clone());
        let work = move || (script.one_by_one(&rival), script.in_one_session(&rival));
        let (a, b) = tokio::task::spawn_blocking(work).await.expect("a thread that runs a script");
        each.push_seconds(a);
        session.push_seconds(b);
    }
    let rtt = (2 * DELAY).as_millis();
    Figure::new("Round trips to the host of a warm Create")
        .judged("waited for: added time per added round-trip time", Unit::Plain, &waited, Limit(10.0))
        .line("changes of direction on the wire", Unit::Plain, &turns)
        .line("libvirt calls, some at once", Unit::Plain, &calls)
        .line(format!("Create with a round trip of {rtt} ms"), Unit::Seconds, &far)
        .line("  of it start_domain", Unit::Seconds, &start_far)
        .line("start_domain without the delay", Unit::Seconds, &start_near)
        .line(format!("script, {rtt} ms"), Unit::Seconds, &each)
        .line(format!("virsh session, {rtt} ms"), Unit::Seconds, &session)
        .note(format!("calls of the last with {rtt} ms, and their ms: {named}"))
}

/// A Create and the calls that it made, in seconds.
struct Observed {
    took: f64,
    calls: Vec<(String, f64)>,
}

impl Observed {
    async fn create(daemon: &Daemon, clients: &Clients, vm: &str) -> Self {
        let logged = daemon.log().len();
        let took = create(clients, vm).await.as_secs_f64();
        let log = daemon.log();
        let calls = log[logged..].lines().filter(|line| line.contains("libvirt call")).filter_map(|line| {
            let mut words = line.split("rpc=").nth(1)?.split_whitespace();
            let (name, ms) = (words.next()?.trim_matches('"'), words.next()?.strip_prefix("ms=")?.parse::<f64>().ok()?);
            Some((name.to_owned(), ms / 1000.0))
        });
        Self { took, calls: calls.collect() }
    }

    fn start(&self) -> f64 {
        let started = self.calls.iter().find(|(name, _)| name == "start_domain");
        started.unwrap_or_else(|| panic!("the log of a Create names no start: {:?}", self.calls)).1
    }
}

async fn create(clients: &Clients, vm: &str) -> Duration {
    let (took, created) = timed(clients.create(request(vm, HOST, "tiny"))).await;
    created.unwrap_or_else(|e| panic!("{vm}: {e}"));
    took
}

async fn delete(clients: &Clients, vm: &str) {
    clients.delete_by_key(vm, &uid_of(vm)).await.unwrap_or_else(|e| panic!("{vm}: {e}"));
}

async fn create_and_delete(rig: &Rig, clients: &Clients, round: usize) -> Duration {
    let vm = rig.case.vm(&format!("vm{round}"));
    let took = create(clients, &vm).await;
    assert!(rig.host().is_active(&vm), "{vm} was created and does not run");
    delete(clients, &vm).await;
    took
}

/// What a person writes who makes the same VM by hand.
#[derive(Debug, Clone)]
struct Script {
    host: Host,
    steps: Vec<Vec<String>>,
}

impl Script {
    /// With a document and a seed that a Create made, so that both sides do the same.
    async fn like_a_vm_of_ours(rig: &Rig, clients: &Clients) -> Self {
        let host = rig.host();
        let vm = rig.case.vm("model");
        create(clients, &vm).await;
        let xml = host.virsh(&["dumpxml", "--inactive", &vm]).replace(&vm, RIVAL);
        let xml: String = xml.lines().filter(|line| !line.contains("<uuid>")).map(|line| format!("{line}\n")).collect();
        let dir = rig.dir("script");
        let (document, seed) = (dir.join("domain.xml"), dir.join("seed.iso"));
        std::fs::write(&document, xml).expect("writing a document");
        let size = std::fs::copy(host.volume_path("default", &format!("{vm}-seed.iso")), &seed).expect("copying a seed");
        delete(clients, &vm).await;

        let prefix = format!("base-{}-tiny-", rig.case.entry_name());
        let bases = rig.case.bases(HOST);
        let base = bases.iter().find(|v| v.starts_with(&prefix) && v.ends_with(".qcow2")).unwrap_or_else(|| panic!("no base: {bases:?}"));
        let base = host.pools["default"].path.join(base).display().to_string();
        let (document, seed) = (document.display().to_string(), seed.display().to_string());
        let steps = [
            format!("vol-create-as default {RIVAL}.qcow2 1G --format qcow2 --backing-vol {base} --backing-vol-format qcow2"),
            format!("vol-create-as default {RIVAL}-seed.iso {size} --format raw"),
            format!("vol-upload {RIVAL}-seed.iso {seed} --pool default"),
            format!("define {document}"),
            format!("start {RIVAL}"),
        ];
        Self { host: host.clone(), steps: steps.iter().map(|step| step.split(' ').map(str::to_owned).collect()).collect() }
    }

    fn one_by_one(&self, rival: &Rival) -> Duration {
        self.run(|| {
            for step in &self.steps {
                rival.run(&step.iter().map(String::as_str).collect::<Vec<_>>());
            }
        })
    }

    fn in_one_session(&self, rival: &Rival) -> Duration {
        let lines: String = self.steps.iter().map(|step| step.join(" ") + "\n").collect();
        self.run(|| drop(rival.session(&lines)))
    }

    fn run(&self, work: impl FnOnce()) -> Duration {
        let start = Instant::now();
        work();
        let took = start.elapsed();
        assert!(self.host.is_active(RIVAL), "the script ran and its domain does not");
        self.host.virsh(&["destroy", RIVAL]);
        self.host.virsh(&["undefine", RIVAL]);
        for volume in [format!("{RIVAL}.qcow2"), format!("{RIVAL}-seed.iso")] {
            self.host.virsh(&["vol-delete", &volume, "--pool", "default"]);
        }
        took
    }
}
