//! Callers that go away, and a Delete that comes in the middle of a Create. Who goes away ends its own wait and nothing
//! else; a Delete wins, soon, and leaves no lock. Somebody else's calls on the same link go on all the while.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lab_tests::case::uid_of;
use lab_tests::counters::DaemonCounts;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Daemon, FaultProxy, Hold, Outcome, Summary, eventually, failpoints};
use tonic::{Code, Request};

use crate::bystander::Bystander;
use crate::hosts;
use crate::support::{AT_A_TIME, delete, left_over, run_all};

const HOST: &str = "hv2";
/// A Delete that was let through is over by then: the promise that it wins within seconds.
const WINS_WITHIN: Duration = Duration::from_secs(10);
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);

#[derive(Debug, Clone, Copy)]
enum Goes {
    /// The call carries a deadline.
    Deadline,
    /// The caller drops the call without a word.
    Away,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_at_any_moment_costs_nobody_anything() {
    let Some(case) = Case::start("mleave", &[HOST]) else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let daemon = case.daemon(case.entry().via(HOST, proxy.addr())).await;
    let steady = case.vm("steady");
    daemon.clients().create(case.request(&steady, HOST)).await.expect("created");
    let connections = proxy.counts().connections;
    let before = DaemonCounts::of(&daemon).await;
    let bystander = Bystander::of(daemon.clients(), HOST, steady.clone());

    let millis: &[u64] = if is_full() { &[1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 500, 800, 1300] } else { &[1, 20, 100, 300] };
    let mut tries = Vec::new();
    for millis in millis {
        for goes in [Goes::Deadline, Goes::Away] {
            let (case, clients, after) = (case.clone(), daemon.clients(), Duration::from_millis(*millis));
            let work = move |n| {
                let (case, clients, vm) = (case.clone(), clients.clone(), case.vm(&format!("{goes:?}{n}").to_lowercase()));
                async move { leave(&case, &clients, &vm, after, goes).await }
            };
            tries.push((format!("{goes:?} after {millis} ms"), work));
        }
    }
    let mut summary = Summary::of("leave");
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries).await;
    let mut others = Outcome::default();
    bystander.close(&mut others).await;
    if proxy.counts().connections != connections {
        others.wrong.push(format!("the link was dialled again: {} became {}", connections, proxy.counts().connections));
    }
    delete(&mut others, &daemon.clients(), host, &case.entry_name(), &steady, SOON).await;
    others.leaked.extend(before.grown(&daemon).await);
    others.leaked.extend(left_over(&case, HOST));
    summary.add("bystander on the same link, and what is left", others);
    drop(daemon);
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn leave(case: &Case, clients: &Clients, vm: &str, after: Duration, goes: Goes) -> Outcome {
    let mut outcome = Outcome::default();
    match goes {
        Goes::Deadline => {
            let mut request = Request::new(case.request(vm, HOST));
            request.set_timeout(after);
            match clients.provider.clone().create(request).await {
                Ok(_) => {}
                Err(e) if matches!(e.code(), Code::DeadlineExceeded | Code::Cancelled | Code::Unavailable) => {}
                Err(e) => outcome.wrong.push(format!("Create with a deadline: {:?}: {}", e.code(), e.message())),
            }
        }
        Goes::Away => {
            let _ = tokio::time::timeout(after, clients.create(case.request(vm, HOST))).await;
        }
    }
    // whatever has become of it: the next one joins it, finds it or makes it
    match tokio::time::timeout(SOON, clients.create(case.request(vm, HOST))).await {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => outcome.wrong.push(format!("Create afterwards: {}", e.message())),
        Err(_) => outcome.stuck.push(format!("Create afterwards is not over within {SOON:?}")),
    }
    delete(&mut outcome, clients, case.host(HOST), &case.entry_name(), vm, SOON).await;
    outcome
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_wins_over_a_create_wherever_that_is() {
    let Some(case) = Case::start("mwins", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_delete_wins_over_a_create_wherever_that_is") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    let daemon = case.daemon_in("warm", case.other_entry("w")).await;
    let steady = case.vm("steady");
    daemon.clients().create(case.request(&steady, HOST)).await.expect("created");
    drop(daemon);
    let mut points = failpoints::of("create");
    points.extend(failpoints::of("publish"));
    if !is_full() {
        points.retain(|p| ["create.after_define", "create.in_seed_upload", "create.before_ready", "publish.in_body"].contains(&p.as_str()));
    }
    let tries = points.into_iter().map(|point| {
        let (case, program, steady) = (case.clone(), program.clone(), steady.clone());
        (point.clone(), move |n| delete_at(case.clone(), program.clone(), n, point.clone(), steady.clone()))
    });
    let mut summary = Summary::of("delete");
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries.collect()).await;
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn delete_at(case: Arc<Case>, program: PathBuf, n: usize, point: String, steady: String) -> Outcome {
    let pulls = point.starts_with("publish.");
    let entry = if pulls { case.other_entry(&format!("c{n}")) } else { case.other_entry("w") };
    let entry_name = entry.name().to_owned();
    let (vm, host) = (case.vm(&format!("r{n}")), case.host(HOST));
    let dir = format!("r{n}");
    let hold = Hold::new(case.dir(), &dir);
    let daemon = case.failing_daemon_in(&dir, entry, &program, hold.at(&point)).await;
    let clients = daemon.clients();
    let mut outcome = Outcome::default();
    let bystander = Bystander::of(daemon.clients(), HOST, steady);

    let creating = tokio::spawn({
        let (clients, request) = (clients.clone(), case.request(&vm, HOST));
        async move { clients.create(request).await }
    });
    says(&daemon, "failpoint reached").await;
    let deleting = tokio::spawn({
        let (clients, vm) = (clients.clone(), vm.clone());
        async move { clients.delete_by_key(&vm, &uid_of(&vm)).await }
    });
    says(&daemon, "a Delete ends the running Create").await;
    // a pull is nobody's: a Delete does not wait for it, but for a step on the host it does
    if !pulls {
        hold.let_go();
    }
    match tokio::time::timeout(WINS_WITHIN, deleting).await {
        Ok(Ok(Ok(answer))) if answer.create_cancelled => {}
        Ok(Ok(Ok(answer))) => outcome.wrong.push(format!("Delete does not tell of the Create: {answer:?}")),
        Ok(Ok(Err(e))) => outcome.wrong.push(format!("Delete: {}", e.message())),
        Ok(Err(e)) => outcome.wrong.push(format!("Delete: {e}")),
        Err(_) => outcome.stuck.push(format!("Delete is not over within {WINS_WITHIN:?}")),
    }
    // cancelled, or done just before it was removed
    if tokio::time::timeout(SOON, creating).await.is_err() {
        outcome.stuck.push("the Create is not over".to_owned());
    }
    hold.let_go();
    // nothing is left, and nothing is in the way of the next
    delete(&mut outcome, &clients, host, &entry_name, &vm, SOON).await;
    match tokio::time::timeout(SOON, clients.create(case.request(&vm, HOST))).await {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => outcome.wrong.push(format!("Create afterwards: {}", e.message())),
        Err(_) => outcome.stuck.push(format!("Create afterwards is not over within {SOON:?}")),
    }
    delete(&mut outcome, &clients, host, &entry_name, &vm, SOON).await;
    bystander.close(&mut outcome).await;
    outcome
}

async fn says(daemon: &Daemon, what: &str) {
    eventually(what, SOON, || async { if daemon.log().contains(what) { Ok(()) } else { Err("the daemon has not said so".to_owned()) } })
        .await;
}
