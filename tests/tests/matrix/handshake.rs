//! A host that falls silent at some byte of a dial: in the version exchange, the key exchange, the authentication, the
//! opening of the socket or of libvirt. Its callers are back within the dial's budget and are told the stage, other hosts
//! answer meanwhile, and the same daemon uses the host as soon as it speaks again.

use std::collections::BTreeSet;
use std::time::Duration;

use egress_provider_proto::v1::ErrorClass;
use lab_tests::counters::DaemonCounts;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Fault, FaultProxy, Outcome, Refusal, Summary, eventually};
use serde_json::json;

use crate::hosts;
use crate::support::{ask_meanwhile, get, until_served};

const SILENT: &str = "hv2";
const SOUND: &str = "hv3";
/// The budget of a dial, and a call behind it; beyond that only what a busy machine may add.
const DIAL_SECONDS: u64 = 3;
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);
const CALLERS: usize = 3;
/// As the errors of a dial name them.
const STAGES: [&str; 4] = ["SSH handshake", "SSH authentication", "opening the libvirt socket", "opening libvirt"];

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_falls_silent_at_any_byte_of_a_dial_costs_its_callers_the_budget_of_the_dial() {
    let Some(case) = Case::start("mdial", &[SILENT, SOUND]) else { return };
    let running = hosts::enter(&case).await;
    let host = case.host(SILENT);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let budgets = json!({ "dial": format!("{DIAL_SECONDS}s"), "call": "3s" });
    let daemon = case.daemon(case.entry().via(SILENT, proxy.addr()).set("budgets", budgets)).await;
    let (clients, none) = (daemon.clients(), case.vm("none"));
    get(&clients, SOUND, &none).await.expect("an answer");
    let whole = dial(&clients, &proxy, &none).await;
    let before = DaemonCounts::of(&daemon).await;

    let parts: u64 = if is_full() { 24 } else { 3 };
    // the first bytes are the version exchange
    let mut limits: Vec<_> = if is_full() { vec![0, 1, 20] } else { vec![] };
    limits.extend((1..=parts).map(|part| whole * (2 * part - 1) / (2 * parts)));
    let mut seen = BTreeSet::new();
    let mut summary = Summary::of("handshake");
    for limit in limits {
        let (outcome, stage) = silent_after(&clients, &proxy, &none, limit).await;
        seen.extend(stage);
        summary.add(format!("after {limit} of {whole} bytes"), outcome);
    }
    let mut all = Outcome::default();
    if is_full() {
        let missing = STAGES.into_iter().filter(|stage| !seen.contains(stage));
        all.wrong.extend(missing.map(|stage| format!("no try ended in the stage {stage}")));
    }
    drop(clients);
    all.leaked.extend(before.grown(&daemon).await);
    summary.add("every stage was tried, and what is left", all);
    drop(daemon);
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

/// Bytes that a host says in a dial, without what it answers to the first call.
async fn dial(clients: &Clients, proxy: &FaultProxy, none: &str) -> u64 {
    get(clients, SILENT, none).await.expect("an answer");
    let first = proxy.counts().to_client;
    get(clients, SILENT, none).await.expect("an answer");
    // the second had no dial
    first - (proxy.counts().to_client - first)
}

/// How it went, and the stage that the callers were told.
async fn silent_after(clients: &Clients, proxy: &FaultProxy, none: &str, limit: u64) -> (Outcome, Option<&'static str>) {
    let (mut outcome, mut stage) = (Outcome::default(), None);
    // the link is gone, and the next one stops in the middle of its dial
    proxy.set(Fault::Reset);
    eventually("the link is gone", SOON, || async { if proxy.counts().open == 0 { Ok(()) } else { Err("it is open".to_owned()) } }).await;
    proxy.set(Fault::StallAfter(limit));
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| {
            let (clients, none) = (clients.clone(), none.to_owned());
            tokio::spawn(async move { get(&clients, SILENT, &none).await })
        })
        .collect();
    ask_meanwhile(clients, SOUND, none, &callers, &mut outcome).await;
    for (n, caller) in callers.into_iter().enumerate() {
        match tokio::time::timeout(BACK_WITHIN, caller).await {
            Err(_) => outcome.stuck.push(format!("caller {n} is not back within {BACK_WITHIN:?}")),
            Ok(Err(e)) => outcome.wrong.push(format!("caller {n}: {e}")),
            Ok(Ok(Ok(()))) => outcome.wrong.push(format!("caller {n} was answered")),
            Ok(Ok(Err(status))) => {
                let refusal = Refusal::of(&status);
                if refusal.reason.class() != ErrorClass::Transient {
                    outcome.wrong.push(format!("caller {n}: {refusal:?}"));
                }
                stage = STAGES.into_iter().find(|stage| refusal.metadata.get("stage").is_some_and(|said| said == stage)).or(stage);
            }
        }
    }
    proxy.set(Fault::Pass);
    until_served(&mut outcome, "a call after the silence", SOON, || get(clients, SILENT, none)).await;
    (outcome, stage)
}
