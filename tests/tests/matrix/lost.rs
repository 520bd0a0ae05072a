//! The path to the host ends while the daemon stands at a failpoint: by a reset, in order, or for the host alone. The
//! caller is told that this is a matter of time, or served; the next Create converges, and a Delete leaves nothing.

use std::time::{Duration, Instant};

use egress_provider_proto::v1::ErrorClass;
use lab_tests::case::{request, uid_of};
use lab_tests::counters::DaemonCounts;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Daemon, Fault, FaultProxy, Hold, Outcome, Places, Refusal, Summary, eventually, failpoints, lockup};
use serde_json::json;
use tonic::Status;

use crate::hosts;
use crate::support::{Found, delete, in_turn, left_over, until_served};

const HOST: &str = "hv1";
/// Only tells what is stuck: the silence of a half-open link is noticed after 15 s.
const SOON: Duration = Duration::from_secs(60);
/// Where a stream is open. libvirtd 11.3 can lock itself up when its client goes then.
const IN_UPLOAD: [&str; 3] = ["create.in_seed_upload", "publish.in_body", "publish.before_finish"];

fn tries() -> Vec<(String, Fault)> {
    if !is_full() {
        return vec![("create.after_overlay".to_owned(), Fault::Reset), ("publish.after_body".to_owned(), Fault::Close)];
    }
    let points: Vec<_> = ["create", "publish", "delete"].into_iter().flat_map(failpoints::of).collect();
    let mut tries: Vec<_> = points.iter().flat_map(|point| [Fault::Reset, Fault::Close].map(|fault| (point.clone(), fault))).collect();
    // each costs the time that silence takes to be noticed
    let half_open = ["create.after_define", "create.before_start", "publish.after_volume", "publish.before_marker", "delete.after_mark"];
    tries.extend(half_open.map(|point| (point.to_owned(), Fault::HalfOpen)));
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_ends_anywhere_costs_one_answer_and_nothing_is_left() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("mlost", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_path_that_ends_anywhere") else { return };
    let running = hosts::enter(&case).await;
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let tries = tries();
    let tiny = case.lab.image("tiny");
    let mut entry = case.entry().via(HOST, proxy.addr());
    for n in 0..tries.len() {
        entry = entry.image(&format!("cold{n}"), json!({ "url": tiny.url, "sha256": tiny.sha256, "firmware": "bios" }));
    }
    let places = Places::new(case.dir());
    let daemon = case.failing_daemon_in("d", entry, &program, places.all()).await;
    let steady = case.vm("steady");
    let clients = daemon.clients();
    clients.create(case.request(&steady, HOST)).await.expect("created");
    let before = DaemonCounts::of(&daemon).await;

    let mut summary = Summary::of("lost");
    for (n, (point, fault)) in tries.iter().enumerate() {
        let bench = Bench { case: &case, daemon: &daemon, places: &places, proxy: &proxy, steady: &steady };
        let outcome = one(&bench, &clients, n, point, *fault).await;
        summary.add(format!("{fault:?} at {point}"), outcome);
    }
    let mut rest = Outcome::default();
    delete(&mut rest, &clients, host, &case.entry_name(), &steady, SOON).await;
    drop(clients);
    rest.leaked.extend(before.grown(&daemon).await);
    rest.leaked.extend(left_over(&case, HOST).into_iter().filter(|name| !name.starts_with("base-")));
    summary.add("what is left", rest);
    drop(daemon);
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

struct Bench<'a> {
    case: &'a Case,
    daemon: &'a Daemon,
    places: &'a Places,
    proxy: &'a FaultProxy,
    steady: &'a str,
}

async fn one(bench: &Bench<'_>, clients: &Clients, n: usize, point: &str, fault: Fault) -> Outcome {
    let mut outcome = Outcome::default();
    let (vm, host, entry) = (bench.case.vm(&format!("r{n}")), bench.case.host(HOST), bench.case.entry_name());
    let image = if point.starts_with("publish.") { format!("cold{n}") } else { "tiny".to_owned() };
    let create = || clients.create(request(&vm, HOST, &image));
    let deletes = point.starts_with("delete.");
    if deletes && let Err(e) = create().await {
        return Outcome::wrong(format!("Create before the Delete: {}", e.message()));
    }
    let hold = Hold::new(bench.case.dir(), &format!("r{n}"));
    bench.places.arm(point, &hold.action());
    let call = {
        let (clients, vm, request) = (clients.clone(), vm.clone(), request(&vm, HOST, &image));
        async move { if deletes { clients.delete_by_key(&vm, &uid_of(&vm)).await.map(drop) } else { clients.create(request).await.map(drop) } }
    };
    let call = tokio::spawn(call);
    let start = Instant::now();
    while bench.places.is_armed(point) && start.elapsed() < SOON {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if bench.places.disarm(point) {
        outcome.wrong.push("the daemon never came to the place".to_owned());
    }
    bench.proxy.set(fault);
    eventually("the host's end of every connection is gone", SOON, || async {
        match bench.proxy.counts().open {
            0 => Ok(()),
            n => Err(format!("{n} are open")),
        }
    })
    .await;
    if fault == Fault::HalfOpen {
        // the daemon has to find out by itself
        hold.let_go();
        answered(&mut outcome, "the call", call).await;
        bench.proxy.set(Fault::Pass);
    } else {
        bench.proxy.set(Fault::Pass);
        hold.let_go();
        answered(&mut outcome, "the call", call).await;
    }
    if IN_UPLOAD.contains(&point) {
        lockup::mended(host, Instant::now());
    }
    // somebody else on that link: the next call has a new one
    let (steady, steady_uid, uid) = (format!("hosts/{HOST}/domains/{}", bench.steady), uid_of(bench.steady), uid_of(&vm));
    let other = || clients.get(&steady, &steady_uid);
    until_served(&mut outcome, "another caller's Get", SOON, other).await;

    if deletes {
        until_served(&mut outcome, "Delete afterwards", SOON, || clients.delete_by_key(&vm, &uid)).await;
    }
    until_served(&mut outcome, "Create afterwards", SOON, create).await;
    let found = Found::on(host, &entry, &vm);
    if !host.is_active(&vm) || found.volumes.len() != 2 {
        outcome.wrong.push(format!("after Create there is {found:?}"));
    }
    delete(&mut outcome, clients, host, &entry, &vm, SOON).await;
    // who cannot reach the host, or whose stream libvirtd has not yet let go of, cannot remove what it made: that is listed,
    // as the Delete has looked
    if fault != Fault::HalfOpen && !IN_UPLOAD.contains(&point) {
        let found = Found::on(host, &entry, &vm);
        let own = found.incomplete.into_iter().chain(found.strays).filter(|name| name.starts_with(&format!("base-{entry}-{image}-")));
        outcome.leaked.extend(own);
    }
    if bench.daemon.log().contains("panicked at") {
        outcome.wrong.push("the daemon panicked".to_owned());
    }
    outcome
}

async fn answered(outcome: &mut Outcome, what: &str, call: tokio::task::JoinHandle<Result<(), Status>>) {
    match tokio::time::timeout(SOON, call).await {
        Err(_) => outcome.stuck.push(format!("{what} is not back within {SOON:?}")),
        Ok(Err(e)) => outcome.wrong.push(format!("{what}: {e}")),
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(e))) => {
            let refusal = Refusal::of(&e);
            if refusal.reason.class() != ErrorClass::Transient {
                outcome.wrong.push(format!("{what}: {refusal:?}"));
            }
        }
    }
}
