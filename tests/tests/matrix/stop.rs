//! A daemon that is told to end while one of its hosts is silent: idle, with a call on its way, in an upload, or with a
//! link that is being closed. It ends within its time, and whoever comes next finds nothing in the way.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lab_tests::case::{request, uid_of};
use lab_tests::summary::is_full;
use lab_tests::{Answer, Case, Fault, FaultProxy, Hold, ImageServer, Outcome, Summary, eventually, failpoints};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::hosts;
use crate::support::{AT_A_TIME, Found, delete, run_all, until_served};

const HOST: &str = "hv2";
/// Calls in flight have 25 s, pulls 10 s to remove what they made, links 11 s; beyond that only what a busy machine adds.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// Without a call nothing is waited for but pulls and links.
const IDLE_ENDS_WITHIN: Duration = Duration::from_secs(25);
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Busy {
    /// A link that stands, and nothing on it.
    Idle,
    Call,
    Upload,
    /// An image is complete, and the link of its upload is about to be closed.
    Close,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_told_to_stop_while_a_host_is_silent_ends_within_its_time() {
    let Some(case) = Case::start("mstop", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_daemon_that_is_told_to_stop") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    let mut tries = vec![(Busy::Upload, Fault::Stall)];
    if is_full() {
        tries.extend([(Busy::Idle, Fault::Stall), (Busy::Call, Fault::Stall), (Busy::Close, Fault::Stall)]);
        tries.extend([(Busy::Idle, Fault::HalfOpen), (Busy::Call, Fault::HalfOpen), (Busy::Close, Fault::HalfOpen)]);
    }
    let tries = tries.into_iter().map(|(busy, fault)| {
        let (case, program) = (case.clone(), program.clone());
        (format!("{fault:?} while {busy:?}"), move |n| stop(case.clone(), program.clone(), n, busy, fault))
    });
    let mut summary = Summary::of("stop");
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries.collect()).await;
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn stop(case: Arc<Case>, program: PathBuf, n: usize, busy: Busy, fault: Fault) -> Outcome {
    let mut outcome = Outcome::default();
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let server = ImageServer::start().await;
    let image = std::fs::read(&case.lab.image("tiny").path).expect("the image");
    let answer = if busy == Busy::Upload { Answer::GateAt(image.len() / 2) } else { Answer::Whole };
    server.serve("i.qcow2", image, [answer, Answer::Whole]);
    let entry = case
        .other_entry(&format!("c{n}"))
        .via(HOST, proxy.addr())
        .image("i", json!({ "url": server.url("i.qcow2"), "sha256": case.lab.image("tiny").sha256, "firmware": "bios" }));
    let entry_name = entry.name().to_owned();
    let dir = format!("r{n}");
    let hold = Hold::new(case.dir(), &dir);
    let places = if busy == Busy::Close { hold.after(1, "publish.after_marker") } else { String::new() };
    let mut daemon = case.failing_daemon_in(&dir, entry, &program, places).await;
    let clients = daemon.clients();
    let (here, vm) = (case.vm(&format!("here{n}")), case.vm(&format!("r{n}")));
    clients.create(request(&here, HOST, "tiny")).await.expect("created");

    let mut call = None;
    if matches!(busy, Busy::Upload | Busy::Close) {
        let (clients, request) = (clients.clone(), request(&vm, HOST, "i"));
        call = Some(tokio::spawn(async move { clients.create(request).await.map(drop) }));
        eventually("the Create is in its place", SOON, || async {
            let there = match busy {
                Busy::Upload => host.volumes("default").iter().any(|v| v.starts_with(&format!("base-{entry_name}-i-"))),
                _ => daemon.log().contains("failpoint reached"),
            };
            if there { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
    }
    proxy.set(fault);
    if busy == Busy::Call {
        let (clients, here) = (clients.clone(), here.clone());
        call = Some(tokio::spawn(async move { clients.get(&format!("hosts/{HOST}/domains/{here}"), &uid_of(&here)).await.map(drop) }));
        let calls = daemon.log().len();
        eventually("the call has come", SOON, || async { if daemon.log().len() > calls { Ok(()) } else { Err("not yet".to_owned()) } })
            .await;
    }
    daemon.signal(Signal::SIGTERM);
    hold.let_go();
    let limit = if busy == Busy::Idle { IDLE_ENDS_WITHIN } else { ENDS_WITHIN };
    match daemon.ends(limit).await {
        Ok(status) if status.success() => {}
        Ok(status) => outcome.wrong.push(format!("it ended with {status}")),
        Err(e) => {
            outcome.stuck.push(e);
            daemon.kill();
        }
    }
    if let Some(call) = call
        && tokio::time::timeout(SOON, call).await.is_err()
    {
        outcome.stuck.push("its caller was not told".to_owned());
    }
    server.open_gate();
    proxy.set(Fault::Pass);
    daemon.disarm();
    daemon.restart().await;
    let clients = daemon.clients();
    until_served(&mut outcome, "Create by its successor", SOON, || clients.create(request(&vm, HOST, "i"))).await;
    if Found::on(host, &entry_name, &vm).volumes.len() != 2 || !host.is_active(&vm) {
        outcome.wrong.push("the successor's VM is not whole".to_owned());
    }
    for vm in [&vm, &here] {
        delete(&mut outcome, &clients, host, &entry_name, vm, SOON).await;
    }
    outcome
}
