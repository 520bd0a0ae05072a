//! Hosts that take few connections, and many callers at once: each is served, or told that it is a matter of time and of
//! what, and is served when it comes again.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use egress_provider_proto::v1::{CheckReason, CreateRequest, ErrorClass, ErrorReason};
use lab_tests::case::{request, uid_of};
use lab_tests::lab::Host;
use lab_tests::summary::is_full;
use lab_tests::{Answer, Case, Clients, ImageServer, Outcome, Refusal, Summary};
use serde_json::json;
use tokio::task::JoinSet;

use crate::hosts;
use crate::support::{Found, delete, in_turn};

const NARROW: &str = "hv1";
/// Daemons that serve the same host.
const DAEMONS: usize = 3;
const HOSTS: [&str; 2] = [NARROW, "hv2"];
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(200);
/// Between two tries of a caller that was not told how long to wait.
const PAUSE: Duration = Duration::from_millis(500);

/// Few connections to a host until dropped.
struct Narrow<'a>(&'a Host);

impl<'a> Narrow<'a> {
    fn new(host: &'a Host) -> Self {
        host.act(&["sshd-config", "MaxSessions", "4", "MaxStartups", "3"]);
        host.act(&["libvirtd-config", "max_clients", "5", "max_anonymous_clients", "5"]);
        Self(host)
    }
}

impl Drop for Narrow<'_> {
    fn drop(&mut self) {
        self.0.act(&["libvirtd-config"]);
        self.0.act(&["sshd-config"]);
    }
}

/// What callers were told before they were served.
type Told = BTreeMap<&'static str, usize>;

type Answered<T> = Result<T, (ErrorReason, String, Option<Duration>)>;

/// One caller that comes again as long as it is told that it may.
async fn served<T, F>(call: impl Fn() -> F) -> (Outcome, Told, Option<T>)
where
    F: Future<Output = Answered<T>>,
{
    let (mut outcome, mut told) = (Outcome::default(), Told::new());
    let tries = async {
        loop {
            match call().await {
                Ok(answer) => return Some(answer),
                Err((reason, message, after)) => {
                    *told.entry(reason.wire_name()).or_default() += 1;
                    if reason.class() != ErrorClass::Transient || matches!(reason, ErrorReason::Internal | ErrorReason::LibvirtError) {
                        outcome.wrong.push(format!("{}: {message}", reason.wire_name()));
                        return None;
                    }
                    tokio::time::sleep(after.unwrap_or(PAUSE)).await;
                }
            }
        }
    };
    match tokio::time::timeout(SOON, tries).await {
        Ok(answer) => (outcome, told, answer),
        Err(_) => (Outcome { stuck: vec![format!("not served within {SOON:?}: {told:?}")], ..outcome }, told, None),
    }
}

/// The id of the instance.
async fn create(clients: Clients, request: CreateRequest) -> Answered<String> {
    match clients.create(request).await {
        Ok(created) => Ok(created.instance.unwrap_or_default().instance_id),
        Err(e) => {
            let refusal = Refusal::of(&e);
            Err((refusal.reason, refusal.message, refusal.retry_after))
        }
    }
}

async fn check(clients: Clients) -> Answered<()> {
    let check = clients.check().await.expect("check never fails for a host");
    match check.hosts.into_iter().find(|row| row.reason() != CheckReason::Reachable) {
        None => Ok(()),
        Some(row) => Err((ErrorReason::from_wire_name(&row.error_reason).unwrap_or_default(), row.message, None)),
    }
}

fn add(told: &mut Told, more: Told) {
    for (reason, n) in more {
        *told.entry(reason).or_default() += n;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_few_places_serves_every_caller_in_the_end() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("mlimits", &[NARROW]) else { return };
    let running = hosts::enter(&case).await;
    let callers = if is_full() { 30 } else { 6 };
    let mut summary = Summary::of("limits");
    {
        let _narrow = Narrow::new(case.host(NARROW));
        // one daemon keeps within such limits by itself; several do not know of each other
        let mut daemons = Vec::new();
        for n in 0..DAEMONS {
            daemons.push(case.daemon_in(&format!("d{n}"), case.entry()).await);
        }
        let clients = |n: usize| daemons[n % DAEMONS].clients();
        let mut calls = JoinSet::new();
        for n in 0..callers {
            let (clients, vm) = (clients(n), case.vm(&format!("r{n}")));
            calls.spawn(async move {
                let (outcome, told, _) = served(|| create(clients.clone(), request(&vm, NARROW, "tiny"))).await;
                (format!("Create {n}"), outcome, told)
            });
        }
        for n in 0..callers {
            let clients = clients(n);
            calls.spawn(async move {
                let (outcome, told, _) = served(|| check(clients.clone())).await;
                (format!("Check {n}"), outcome, told)
            });
        }
        let mut told = Told::new();
        while let Some(done) = calls.join_next().await {
            let (what, outcome, more) = done.expect("a caller's task");
            add(&mut told, more);
            summary.add(what, outcome);
        }
        eprintln!("limits: {callers} Creates and Checks were served; told before: {told:?}");
        for n in 0..callers {
            let mut outcome = Outcome::default();
            delete(&mut outcome, &clients(n), case.host(NARROW), &case.entry_name(), &case.vm(&format!("r{n}")), SOON).await;
            summary.add(format!("Delete {n}"), outcome);
        }
    }
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_creates_of_few_names_by_two_daemons_on_a_cold_cache_make_each_once() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("mrace", &HOSTS) else { return };
    let running = hosts::enter(&case).await;
    let (creates, names) = if is_full() { (50, 10) } else { (9, 3) };
    let server = ImageServer::start().await;
    server.serve("i.qcow2", std::fs::read(&case.lab.image("tiny").path).expect("the image"), [Answer::Whole]);
    let entry =
        case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": case.lab.image("tiny").sha256, "firmware": "bios" }));
    let (one, two) = (case.daemon_in("d1", entry.clone()).await, case.daemon_in("d2", entry).await);
    let mut summary = Summary::of("race");
    let mut calls = JoinSet::new();
    let name = |n: usize| (case.vm(&format!("r{}", n % names)), HOSTS[n % names % HOSTS.len()]);
    for n in 0..creates {
        let (vm, host) = name(n);
        // the second round of each name goes to the other daemon
        let clients = if (n / names).is_multiple_of(2) { one.clients() } else { two.clients() };
        calls.spawn(async move {
            let (mut outcome, told, id) = served(|| create(clients.clone(), request(&vm, host, "i"))).await;
            if id.is_some_and(|id| id != format!("hosts/{host}/domains/{vm}")) {
                outcome.wrong.push("another id".to_owned());
            }
            (format!("Create {n}"), outcome, told)
        });
    }
    let mut told = Told::new();
    while let Some(done) = calls.join_next().await {
        let (what, outcome, more) = done.expect("a caller's task");
        add(&mut told, more);
        summary.add(what, outcome);
    }
    eprintln!("race: {creates} Creates of {names} names; told before: {told:?}; {} fetches", server.gets("i.qcow2"));
    for n in 0..names {
        let (vm, host) = name(n);
        let mut outcome = Outcome::default();
        if !case.host(host).is_active(&vm) {
            outcome.wrong.push(format!("{vm} does not run"));
        }
        let found = Found::on(case.host(host), &case.entry_name(), &vm);
        // each daemon at worst stores the image once
        if !(1..=2).contains(&found.complete.len()) || !found.incomplete.is_empty() {
            outcome.wrong.push(format!("bases: {found:?}"));
        }
        delete(&mut outcome, &two.clients(), case.host(host), &case.entry_name(), &vm, SOON).await;
        let gone = one.clients().get_by_key(&vm, &uid_of(&vm)).await;
        if gone.is_ok() {
            outcome.wrong.push(format!("{vm} is still there for the other daemon"));
        }
        summary.add(format!("{vm} once"), outcome);
    }
    drop((one, two));
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}
