//! Create or Delete of one daemon and of another on one instance, each at any of its steps when the other goes on.
//!
//! `pair` lets one of them stand while the other does all of its work; here both stand, and go to their ends one after
//! the other. Whatever they answer, what is there then is a whole VM, or nothing, or an unfinished one that its domain
//! stands for; the next Create makes it whole.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1::CreateRequest;
use lab_tests::case::uid_of;
use lab_tests::clients::seconds;
use lab_tests::lab::Host;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Daemon, Hold, Outcome, Summary, eventually, failpoints};
use tokio::task::JoinHandle;
use tonic::Status;

use crate::hosts;
use crate::support::{AT_A_TIME, Found, delete, left_over, may_be, reached, run_all, until_served, whole, with_base};

const HOST: &str = "hv3";
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);

/// How long a Create that comes while one of them still stands may let its caller wait.
const MEANWHILE_SECONDS: u64 = 2;

/// Who goes on first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    First,
    Second,
}

/// Two calls, by the failpoint at which each stands; the second is made when the first stands.
#[derive(Debug, Clone)]
struct Try {
    first: String,
    second: String,
    next: Next,
}

/// Until its domain is defined a Create keeps nobody away, and leaves a Delete nothing to do.
const NOTHING_YET: [&str; 2] = ["create.after_lookup", "create.before_define"];

fn tries() -> Vec<Try> {
    let (creates, deletes) = (failpoints::of("create"), failpoints::of("delete"));
    let (early, late): (Vec<_>, Vec<_>) = creates.iter().cloned().partition(|point| NOTHING_YET.contains(&point.as_str()));
    let mut tries = Vec::new();
    for (firsts, seconds) in [(&late, &deletes), (&early, &creates), (&deletes, &deletes)] {
        for (first, second) in firsts.iter().flat_map(|first| seconds.iter().map(move |second| (first, second))) {
            tries.extend([Next::First, Next::Second].map(|next| Try { first: first.clone(), second: second.clone(), next }));
        }
    }
    if !is_full() {
        const SOME: [(&str, &str, Next); 3] = [
            ("create.before_seed", "delete.before_undefine", Next::First),
            ("create.after_start", "delete.between_volumes", Next::First),
            ("create.before_overlay", "delete.after_mark", Next::Second),
        ];
        tries.retain(|t| SOME.contains(&(t.first.as_str(), t.second.as_str(), t.next)));
        assert_eq!(tries.len(), SOME.len(), "every place is there");
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_two_daemons_that_meet_anywhere_leave_a_whole_vm_or_none() {
    let Some(case) = Case::start("mcross", &[HOST]) else { return };
    let Some(program) = failpoints::binary("calls_of_two_daemons_that_meet_anywhere") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    with_base(&case, HOST).await;
    let tries = tries().into_iter().map(|one| {
        let point = format!("{} and {}, the {:?} goes on", one.first, one.second, one.next);
        let (case, program) = (case.clone(), program.clone());
        (point, move |n| cross(case.clone(), program.clone(), n, one.clone()))
    });
    let mut summary = Summary::of("cross");
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries.collect()).await;
    let left: Vec<_> = left_over(&case, HOST).into_iter().filter(|name| !name.starts_with("base-")).collect();
    summary.add("what is left", Outcome { leaked: left, ..Outcome::default() });
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn cross(case: Arc<Case>, program: PathBuf, n: usize, one: Try) -> Outcome {
    let entry = case.other_entry("w");
    let entry_name = entry.name().to_owned();
    let (vm, host) = (case.vm(&format!("x{n}")), case.host(HOST));
    let mut outcome = Outcome::default();
    let holds = [Hold::new(case.dir(), &format!("x{n}a")), Hold::new(case.dir(), &format!("x{n}b"))];
    let a = case.failing_daemon_in(&format!("xa{n}"), entry.clone(), &program, holds[0].at(&one.first)).await;
    let b = case.failing_daemon_in(&format!("xb{n}"), entry, &program, holds[1].at(&one.second)).await;
    let (first, second) = (a.clients(), b.clients());
    let request = case.request(&vm, HOST);
    if one.first.starts_with("delete.")
        && let Err(e) = first.create(request.clone()).await
    {
        return Outcome::wrong(format!("Create before the Deletes: {}", e.message()));
    }
    let call = |clients: &Clients, point: &str| {
        let (clients, vm, request, deletes) = (clients.clone(), vm.clone(), request.clone(), point.starts_with("delete."));
        tokio::spawn(async move {
            if deletes { clients.delete_by_key(&vm, &uid_of(&vm)).await.map(drop) } else { clients.create(request).await.map(drop) }
        })
    };
    let first_call = call(&first, &one.first);
    reached(&a, SOON).await;
    let second_call = call(&second, &one.second);
    // one that finds the first in its way, or nothing to do, is over at once
    stands_or_is_over(&b, &second_call).await;

    let [first_hold, second_hold] = &holds;
    let mut calls = [("the first", first_hold, first_call, &first), ("the second", second_hold, second_call, &second)];
    if one.next == Next::Second {
        calls.reverse();
    }
    let mut all_ok = true;
    for (n, (who, hold, call, clients)) in calls.into_iter().enumerate() {
        hold.let_go();
        match tokio::time::timeout(SOON, call).await {
            Ok(Ok(answer)) => {
                all_ok &= answer.is_ok();
                may_be(&mut outcome, who, answer);
            }
            Ok(Err(e)) => outcome.wrong.push(format!("{who}: {e}")),
            Err(_) => outcome.stuck.push(format!("{who} is not answered within {SOON:?}")),
        }
        if n == 0 {
            let short = CreateRequest { max_wait: seconds(MEANWHILE_SECONDS), ..request.clone() };
            match tokio::time::timeout(SOON, clients.create(short)).await {
                Ok(answer) => {
                    all_ok &= answer.is_ok();
                    may_be(&mut outcome, "a Create while the other stands", answer.map(drop));
                }
                Err(_) => outcome.stuck.push(format!("a Create while the other stands is not answered within {SOON:?}")),
            }
        }
    }
    consistent(&mut outcome, host, &entry_name, &vm, all_ok);
    until_served(&mut outcome, "the Create after both", SOON, || second.create(request.clone())).await;
    whole(&mut outcome, host, &entry_name, &vm);
    delete(&mut outcome, &first, host, &entry_name, &vm, SOON).await;
    outcome
}

async fn stands_or_is_over(daemon: &Daemon, call: &JoinHandle<Result<(), Status>>) {
    eventually("the daemon stands there, or its call is over", SOON, || async {
        let there = call.is_finished() || daemon.log().contains("failpoint reached");
        if there { Ok(()) } else { Err("neither".to_owned()) }
    })
    .await;
}

/// A whole VM or nothing; an unfinished one, too, if one of the two callers was told to come again.
fn consistent(outcome: &mut Outcome, host: &Host, entry: &str, vm: &str, all_ok: bool) {
    let found = Found::on(host, entry, vm);
    match (found.domain, found.volumes.len()) {
        (false, 0) => {}
        (false, _) => outcome.leaked.extend(found.volumes),
        (true, _) if all_ok || host.is_active(vm) => whole(outcome, host, entry, vm),
        (true, _) => {}
    }
}
