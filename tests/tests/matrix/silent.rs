//! A host that falls silent: its path, its sessions, its sshd or its libvirtd, in the middle of a dial, a small call, an
//! upload or the end of one. Its callers are back within their budgets, the other host's callers notice nothing, and when
//! it thaws it is used again without a restart.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_provider_proto::v1::ErrorClass;
use lab_tests::case::request;
use lab_tests::counters::DaemonCounts;
use lab_tests::lab::Host;
use lab_tests::summary::is_full;
use lab_tests::{Answer, Case, Fault, FaultProxy, Hold, ImageServer, Outcome, Refusal, Summary, eventually, failpoints, lockup};
use serde_json::json;
use tokio::task::JoinHandle;
use tonic::Status;

use crate::hosts;
use crate::support::{ask_meanwhile, delete, get, in_turn, run_all};

const SILENT: &str = "hv1";
const SOUND: &str = "hv2";
/// Longest that a caller may wait: the budgets below, or the silence after which a link is given up (15 s, looked at
/// every 5 s), and then a dial to clean up; beyond that only what a busy machine may add.
const BACK_WITHIN: Duration = Duration::from_secs(45);
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(60);
/// Callers of the silent host that wait at the same time.
const CALLERS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Dial,
    Call,
    Upload,
    /// All of an image is sent, the stream not finished.
    Finish,
    /// The same of a seed.
    Seed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freeze {
    /// Bytes go nowhere, in both directions.
    Path,
    Sessions,
    Sshd,
    /// Behind a live sshd.
    Libvirtd,
}

/// Thaws when dropped, whatever happens.
struct Frozen<'a> {
    host: &'a Host,
    proxy: &'a FaultProxy,
    freeze: Freeze,
}

impl<'a> Frozen<'a> {
    fn new(host: &'a Host, proxy: &'a FaultProxy, freeze: Freeze) -> Self {
        match freeze {
            Freeze::Path => proxy.set(Fault::Stall),
            Freeze::Sessions => drop(host.act(&["freeze-sessions"])),
            Freeze::Sshd => drop(host.act(&["freeze-sshd"])),
            Freeze::Libvirtd => drop(host.act(&["freeze-libvirtd"])),
        }
        Self { host, proxy, freeze }
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        match self.freeze {
            Freeze::Path => self.proxy.set(Fault::Pass),
            Freeze::Sessions => drop(self.host.act(&["thaw-sessions"])),
            Freeze::Sshd => drop(self.host.act(&["thaw-sshd"])),
            Freeze::Libvirtd => drop(self.host.act(&["thaw-libvirtd"])),
        }
    }
}

fn tries() -> Vec<(Place, Freeze)> {
    if !is_full() {
        return vec![(Place::Dial, Freeze::Sshd), (Place::Call, Freeze::Libvirtd), (Place::Seed, Freeze::Path)];
    }
    let mut tries = vec![(Place::Dial, Freeze::Sshd), (Place::Dial, Freeze::Path), (Place::Dial, Freeze::Libvirtd)];
    for place in [Place::Call, Place::Upload, Place::Finish, Place::Seed] {
        tries.extend([Freeze::Path, Freeze::Sessions, Freeze::Libvirtd].map(|freeze| (place, freeze)));
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_falls_silent_anywhere_costs_its_own_callers_their_budget_and_nobody_else_anything() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("msilent", &[SILENT, SOUND]) else { return };
    let Some(program) = failpoints::binary("a_host_that_falls_silent_anywhere") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    let tries = tries().into_iter().map(|(place, freeze)| {
        let (case, program) = (case.clone(), program.clone());
        (format!("{freeze:?} in {place:?}"), move |n| silent(case.clone(), program.clone(), n, place, freeze))
    });
    let mut summary = Summary::of("silent");
    run_all(&mut summary, 1, &[case.host(SOUND)], tries.collect()).await;
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn silent(case: Arc<Case>, program: PathBuf, n: usize, place: Place, freeze: Freeze) -> Outcome {
    let (silent, sound) = (case.host(SILENT), case.host(SOUND));
    let libvirtds = [silent, sound].map(|host| host.pid("libvirtd"));
    let proxy = FaultProxy::to(format!("{}:{}", silent.address, silent.port)).await;
    let server = ImageServer::start().await;
    let image = std::fs::read(&case.lab.image("tiny").path).expect("the image");
    let answer = if place == Place::Upload { Answer::GateAt(image.len() / 2) } else { Answer::Whole };
    server.serve("i.qcow2", image, [answer]);
    let entry = case
        .other_entry(&format!("c{n}"))
        .via(SILENT, proxy.addr())
        .image("i", json!({ "url": server.url("i.qcow2"), "sha256": case.lab.image("tiny").sha256, "firmware": "bios" }))
        .set(
            "budgets",
            json!({ "dial": "4s", "call": "6s", "start": "20s", "allocate": "10s", "uploadSmall": "6s", "uploadImage": "20s" }),
        );
    let entry_name = entry.name().to_owned();
    let dir = format!("r{n}");
    let hold = Hold::new(case.dir(), &dir);
    // the VM that is there before passes the place first
    let failpoints = match place {
        Place::Finish => hold.after(1, "publish.before_finish"),
        Place::Seed => hold.after(1, "create.in_seed_upload"),
        Place::Dial | Place::Call | Place::Upload => String::new(),
    };
    let daemon = case.failing_daemon_in(&dir, entry, &program, failpoints).await;
    let clients = daemon.clients();
    let (here, there, vm) = (case.vm(&format!("here{n}")), case.vm(&format!("there{n}")), case.vm(&format!("r{n}")));
    let mut outcome = Outcome::default();

    if place != Place::Dial {
        clients.create(request(&here, SILENT, "tiny-raw")).await.expect("created");
    }
    // the hold is for the silent host's VM: this one is made by a daemon that has none
    let other = case.daemon_in(&format!("o{n}"), case.other_entry(&format!("o{n}"))).await;
    other.clients().create(case.request(&there, SOUND)).await.expect("created");
    drop(other);
    // a dial that is to fall silent is the first of its daemon: there is nothing yet to compare with
    let before = if place == Place::Dial {
        None
    } else {
        // the link to the other host stands before and after
        get(&clients, SOUND, &there).await.expect("the other host answers");
        Some(DaemonCounts::of(&daemon).await)
    };
    let mut callers: Vec<JoinHandle<Result<(), Status>>> = Vec::new();
    if matches!(place, Place::Upload | Place::Finish | Place::Seed) {
        let (clients, request) = (clients.clone(), request(&vm, SILENT, "i"));
        callers.push(tokio::spawn(async move { clients.create(request).await.map(drop) }));
        eventually("the Create is in its place", SOON, || async {
            let there = match place {
                Place::Upload => silent.volumes("default").iter().any(|v| v.starts_with(&format!("base-{entry_name}-i-"))),
                _ => daemon.log().contains("failpoint reached"),
            };
            if there { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
    }
    let frozen = Frozen::new(silent, &proxy, freeze);
    hold.let_go();
    server.open_gate();
    for _ in 0..CALLERS {
        let (clients, here) = (clients.clone(), here.clone());
        callers.push(tokio::spawn(async move { get(&clients, SILENT, &here).await }));
    }
    if place == Place::Dial {
        // who asks for the other host before it would be answered whatever a dial holds up
        eventually("the dial is under way", SOON, || async {
            if proxy.counts().connections > 0 { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
    }
    ask_meanwhile(&clients, SOUND, &there, &callers, &mut outcome).await;
    for (n, caller) in callers.into_iter().enumerate() {
        match tokio::time::timeout(BACK_WITHIN, caller).await {
            Err(_) => outcome.stuck.push(format!("caller {n} is not back within {BACK_WITHIN:?}")),
            Ok(Err(e)) => outcome.wrong.push(format!("caller {n}: {e}")),
            // by a new link, around what is frozen
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(status))) => {
                let refusal = Refusal::of(&status);
                if refusal.reason.class() != ErrorClass::Transient {
                    outcome.wrong.push(format!("caller {n}: {refusal:?}"));
                }
            }
        }
    }
    drop(frozen);
    let locked_up = freeze == Freeze::Libvirtd && lockup::mended(silent, Instant::now());
    // the same daemon, with what was left unfinished
    let again = async {
        while let Err(e) = clients.create(request(&vm, SILENT, "i")).await {
            if Refusal::of(&e).reason.class() != ErrorClass::Transient {
                return Err(e.message().to_owned());
            }
        }
        Ok(())
    };
    match tokio::time::timeout(SOON, again).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => outcome.wrong.push(format!("Create after the thaw: {e}")),
        Err(_) => outcome.stuck.push(format!("the host is not used again within {SOON:?}")),
    }
    for vm in [&vm, &here] {
        delete(&mut outcome, &clients, silent, &entry_name, vm, SOON).await;
    }
    drop(clients);
    if let Some(before) = before {
        outcome.leaked.extend(before.grown(&daemon).await);
    }
    if !locked_up && libvirtds != [silent, sound].map(|host| host.pid("libvirtd"))
        || !lab_tests::counters::is_alive(libvirtds[0].unwrap_or_default())
    {
        outcome.wrong.push("a libvirtd has died".to_owned());
    }
    outcome
}
