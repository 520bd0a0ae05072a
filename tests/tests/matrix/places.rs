//! Every failpoint of one daemon, one after the other: the step fails, loses its link, panics; or it stands there while
//! its caller's deadline passes or its caller goes away. The daemon lives on, so it must be as it was in the end.

use std::future::Future;
use std::time::{Duration, Instant};

use egress_provider_proto::v1::{CreateRequest, ErrorReason, InstancePhase};
use lab_tests::case::{request, uid_of};
use lab_tests::counters::DaemonCounts;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Daemon, FaultProxy, Hold, Outcome, Places, Refusal, Summary, failpoints};
use serde_json::json;
use tonic::{Code, Request, Status};

use crate::bystander::Bystander;
use crate::hosts;
use crate::support::{Found, delete, left_over};

const HOST: &str = "hv2";
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);
/// Deadline of a caller whose work is held up for longer.
const DEADLINE: Duration = Duration::from_millis(400);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happens {
    Error,
    LinkLost,
    Panic,
    /// Held there until the caller's deadline has passed.
    Deadline,
    /// Held there until the caller has gone.
    Away,
}

impl Happens {
    fn reason(self) -> Option<ErrorReason> {
        match self {
            Self::Error | Self::Panic => Some(ErrorReason::Internal),
            Self::LinkLost => Some(ErrorReason::LinkLost),
            Self::Deadline | Self::Away => None,
        }
    }
}

/// One daemon behind a proxy that counts its connections, and a bystander on its link.
struct Bench {
    case: Case,
    daemon: Daemon,
    places: Places,
    proxy: FaultProxy,
}

impl Bench {
    async fn start(case: Case, program: &std::path::Path, tries: usize) -> Self {
        let host = case.host(HOST);
        let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
        let tiny = case.lab.image("tiny");
        let mut entry = case.entry().via(HOST, proxy.addr());
        // an image of its own for every try that has to fetch one
        for n in 1..=tries {
            entry = entry.image(&cold(n), json!({ "url": tiny.url, "sha256": tiny.sha256, "firmware": "bios" }));
        }
        let places = Places::new(case.dir());
        let daemon = case.failing_daemon_in("d", entry, program, places.all()).await;
        Self { case, daemon, places, proxy }
    }

    fn clients(&self) -> Clients {
        self.daemon.clients()
    }

    fn request(&self, vm: &str, image: &str) -> CreateRequest {
        request(vm, HOST, image)
    }
}

fn cold(n: usize) -> String {
    format!("cold{n}")
}

fn places(some: &[&str]) -> Vec<String> {
    let mut points: Vec<_> = ["create", "publish", "delete"].into_iter().flat_map(failpoints::of).collect();
    if !is_full() {
        points.retain(|p| some.contains(&p.as_str()));
        assert_eq!(points.len(), some.len(), "every place is there");
    }
    points
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_fails_anywhere_is_one_classified_error_and_costs_nobody_else_anything() {
    let Some(case) = Case::start("merror", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_step_that_fails_anywhere") else { return };
    let points = places(&["create.in_seed_upload", "create.after_start", "publish.in_body", "delete.between_volumes"]);
    let happens: &[Happens] =
        if is_full() { &[Happens::Error, Happens::LinkLost, Happens::Panic] } else { &[Happens::Error, Happens::Panic] };
    matrix("error", case, &program, points, happens).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_while_its_work_stands_anywhere_costs_nobody_anything() {
    let Some(case) = Case::start("mheld", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_caller_that_goes_away_while_its_work_stands_anywhere") else { return };
    let points = places(&["create.before_define", "publish.before_finish", "delete.after_destroy"]);
    matrix("held", case, &program, points, &[Happens::Deadline, Happens::Away]).await;
}

async fn matrix(name: &'static str, case: Case, program: &std::path::Path, points: Vec<String>, happens: &[Happens]) {
    let running = hosts::enter(&case).await;
    let bench = Bench::start(case, program, points.len() * happens.len()).await;
    let steady = bench.case.vm("steady");
    let clients = bench.clients();
    clients.create(bench.request(&steady, "tiny")).await.expect("created");
    clients.list_complete().await.expect("listed");
    let before = DaemonCounts::of(&bench.daemon).await;
    let bystander = Bystander::of(bench.clients(), HOST, steady.clone());
    let control = bench.proxy.counts().open;

    let mut summary = Summary::of(name);
    let mut n = 0;
    for point in &points {
        for happens in happens {
            n += 1;
            let outcome = one(&bench, &clients, n, point, *happens).await;
            summary.add(format!("{happens:?} at {point}"), outcome);
        }
    }
    let mut others = Outcome::default();
    bystander.close(&mut others).await;
    delete(&mut others, &clients, bench.case.host(HOST), &bench.case.entry_name(), &steady, SOON).await;
    drop(clients);
    others.leaked.extend(before.grown(&bench.daemon).await);
    let open = bench.proxy.counts().open;
    if open != control {
        others.leaked.push(format!("{open} connections to the host, {control} before"));
    }
    others.leaked.extend(left_over(&bench.case, HOST));
    summary.add("bystander on the same link, and what is left", others);
    drop(bench);
    running.leave(&mut summary).await;
    summary.close();
}

async fn one(bench: &Bench, clients: &Clients, n: usize, point: &str, happens: Happens) -> Outcome {
    let mut outcome = Outcome::default();
    let (vm, host, entry) = (bench.case.vm(&format!("r{n}")), bench.case.host(HOST), bench.case.entry_name());
    let image = if point.starts_with("publish.") { cold(n) } else { "tiny".to_owned() };
    let deletes = point.starts_with("delete.");
    if deletes && let Err(e) = clients.create(bench.request(&vm, &image)).await {
        return Outcome::wrong(format!("Create before the Delete: {}", e.message()));
    }
    let uuid = host.try_virsh(&["domuuid", &vm]).ok();

    let hold = Hold::new(bench.case.dir(), &format!("r{n}"));
    bench.places.arm(
        point,
        &match happens {
            Happens::Error => "error".to_owned(),
            Happens::LinkLost => "link-lost".to_owned(),
            Happens::Panic => "panic".to_owned(),
            Happens::Deadline | Happens::Away => hold.action(),
        },
    );
    let limit = (happens == Happens::Deadline).then_some(DEADLINE);
    let call = || {
        let (clients, vm, request) = (clients.clone(), vm.clone(), bench.request(&vm, &image));
        async move {
            if deletes {
                return delete_by_key(&clients, &vm, limit).await;
            }
            let mut request = Request::new(request);
            if let Some(limit) = limit {
                request.set_timeout(limit);
            }
            clients.provider.clone().create(request).await.map(drop)
        }
    };
    first(&mut outcome, bench, point, happens, &hold, call).await;
    if deletes {
        // what is left is what it was, or nothing
        if let Ok(now) = host.try_virsh(&["domuuid", &vm])
            && Some(&now) != uuid.as_ref()
        {
            outcome.wrong.push("the Delete left another domain".to_owned());
        }
        delete(&mut outcome, clients, host, &entry, &vm, SOON).await;
    }
    // the same daemon, at once, and with one call: nothing is locked and nothing is in the way
    match tokio::time::timeout(SOON, clients.create(bench.request(&vm, &image))).await {
        Ok(Ok(created)) => {
            let found = Found::on(host, &entry, &vm);
            let phase = created.instance.unwrap_or_default().phase();
            if phase != InstancePhase::Ready || !host.is_active(&vm) || found.volumes.len() != 2 {
                outcome.wrong.push(format!("after Create it is {phase:?} with {:?}", found.volumes));
            }
            if !found.incomplete.is_empty() || !found.strays.is_empty() {
                outcome.leaked.extend(found.incomplete.into_iter().chain(found.strays));
            }
        }
        Ok(Err(e)) => outcome.wrong.push(format!("Create afterwards: {}: {}", Refusal::of(&e).reason.wire_name(), e.message())),
        Err(_) => outcome.stuck.push(format!("Create afterwards is not over within {SOON:?}")),
    }
    delete(&mut outcome, clients, host, &entry, &vm, SOON).await;
    outcome
}

/// The call that comes to the place. On a busy machine a short deadline may pass before the daemon has begun, or a dial
/// may take too long: then it is made again.
async fn first<F>(outcome: &mut Outcome, bench: &Bench, point: &str, happens: Happens, hold: &Hold, call: impl Fn() -> F)
where
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    if happens == Happens::Away {
        let call = tokio::spawn(call());
        reached(outcome, bench, point).await;
        call.abort();
        hold.let_go();
        return;
    }
    let start = Instant::now();
    loop {
        let answer = match tokio::time::timeout(SOON, tokio::spawn(call())).await {
            Err(_) => return outcome.stuck.push(format!("the call is not back within {SOON:?}")),
            Ok(Err(e)) => return outcome.wrong.push(format!("the call: {e}")),
            Ok(Ok(answer)) => answer,
        };
        let deadline = answer.as_ref().is_err_and(|e| matches!(e.code(), Code::DeadlineExceeded | Code::Cancelled | Code::Unavailable));
        if bench.places.is_armed(point) && deadline && start.elapsed() < SOON {
            tokio::time::sleep(DEADLINE).await;
            continue;
        }
        match (answer, happens.reason()) {
            // a finished step needs nothing more, and a lost link may be made anew
            (Ok(()), _) => {}
            (Err(e), Some(reason)) => {
                let refusal = Refusal::of(&e);
                if refusal.reason != reason {
                    outcome.wrong.push(format!("the call: {}: {}", refusal.reason.wire_name(), refusal.message));
                }
            }
            (Err(_), None) if deadline => {}
            (Err(e), None) => outcome.wrong.push(format!("the call with a deadline: {:?}: {}", e.code(), e.message())),
        }
        break;
    }
    reached(outcome, bench, point).await;
    hold.let_go();
}

async fn reached(outcome: &mut Outcome, bench: &Bench, point: &str) {
    let start = Instant::now();
    while bench.places.is_armed(point) {
        if start.elapsed() > SOON {
            bench.places.disarm(point);
            outcome.wrong.push("the daemon never came to the place".to_owned());
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn delete_by_key(clients: &Clients, vm: &str, limit: Option<Duration>) -> Result<(), Status> {
    use egress_provider_proto::v1::{DeleteRequest, InstanceKey, delete_request};
    let key = InstanceKey { name: vm.to_owned(), uid: uid_of(vm), ..Default::default() };
    let mut request = Request::new(DeleteRequest { selector: Some(delete_request::Selector::Key(key)), ..Default::default() });
    if let Some(limit) = limit {
        request.set_timeout(limit);
    }
    clients.provider.clone().delete(request).await.map(drop)
}
