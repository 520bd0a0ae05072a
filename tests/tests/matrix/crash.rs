//! The daemon is gone at a place, from one moment to the next. The same daemon started again lists everything that lies
//! on the host; a Create then makes the same VM, or a Delete by key leaves nothing but bases.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1::InstancePhase;
use lab_tests::case::uid_of;
use lab_tests::summary::is_full;
use lab_tests::{Case, Outcome, Summary, failpoints};

use crate::hosts;
use crate::support::{AT_A_TIME, Found, delete, run_all, with_base};

const HOST: &str = "hv3";
/// For what has to come back by itself. It only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    /// The image is on the host.
    Warm,
    /// It has to be fetched.
    Cold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Create,
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// As by kill -9.
    Abort,
    /// With exit handlers and destructors, libvirt's among them.
    Exit,
}

#[derive(Debug, Clone)]
struct Try {
    point: String,
    how: How,
    cache: Cache,
    then: Then,
}

/// Everything, or some places that differ in kind.
fn tries() -> Vec<Try> {
    let all = |points: Vec<String>, caches: &[Cache]| {
        let caches = caches.to_vec();
        points.into_iter().flat_map(move |point| {
            let point = Arc::new(point);
            caches.clone().into_iter().flat_map(move |cache| {
                let point = point.clone();
                [Then::Create, Then::Delete].map(move |then| Try { point: point.to_string(), how: How::Abort, cache, then })
            })
        })
    };
    let mut tries: Vec<_> = all(failpoints::of("create"), &[Cache::Warm, Cache::Cold]).collect();
    tries.extend(all(failpoints::of("delete"), &[Cache::Warm]));
    tries.extend(all(failpoints::of("publish"), &[Cache::Cold]));
    // what a crash leaves does not depend on how it came, so once for each place
    let exits: Vec<_> =
        tries.iter().filter(|t| t.then == Then::Create && (t.cache == Cache::Warm || t.point.starts_with("publish."))).cloned().collect();
    tries.extend(exits.into_iter().map(|t| Try { how: How::Exit, ..t }));
    if !is_full() {
        const SOME: [(&str, Cache, Then); 8] = [
            ("create.after_define", Cache::Cold, Then::Delete),
            ("create.in_seed_upload", Cache::Warm, Then::Create),
            ("create.before_ready", Cache::Warm, Then::Create),
            ("create.after_overlay", Cache::Warm, Then::Delete),
            ("delete.between_volumes", Cache::Warm, Then::Create),
            ("publish.in_body", Cache::Cold, Then::Create),
            ("publish.in_marker", Cache::Cold, Then::Create),
            ("publish.after_marker", Cache::Cold, Then::Delete),
        ];
        tries.retain(|t| t.how == How::Abort && SOME.contains(&(t.point.as_str(), t.cache, t.then)));
        assert_eq!(tries.len(), SOME.len(), "every place is there");
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_anywhere_loses_leaks_and_locks_nothing() {
    let Some(case) = Case::start("mcrash", &[HOST]) else { return };
    let Some(program) = failpoints::binary("a_daemon_that_dies_anywhere_loses_leaks_and_locks_nothing") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    with_base(&case, HOST).await;
    let mut summary = Summary::of("crash");
    let tries = tries().into_iter().map(|one| {
        let point = format!("{:?} at {}, {:?}, then {:?}", one.how, one.point, one.cache, one.then);
        let (case, program) = (case.clone(), program.clone());
        (point, move |n| crash(case.clone(), program.clone(), n, one.clone()))
    });
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries.collect()).await;
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn crash(case: Arc<Case>, program: PathBuf, n: usize, one: Try) -> Outcome {
    let entry = match one.cache {
        Cache::Warm => case.other_entry("w"),
        Cache::Cold => case.other_entry(&format!("c{n}")),
    };
    let entry_name = entry.name().to_owned();
    let (vm, host) = (case.vm(&format!("r{n}")), case.host(HOST));
    let mut outcome = Outcome::default();
    let action = format!("{}=return({})", one.point, if one.how == How::Abort { "abort" } else { "exit" });
    let mut daemon = case.failing_daemon_in(&format!("r{n}"), entry, &program, action).await;
    let clients = daemon.clients();

    let created = clients.create(case.request(&vm, HOST)).await;
    if one.point.starts_with("delete.") {
        if let Err(e) = created {
            return Outcome::wrong(format!("Create before the Delete: {}", e.message()));
        }
        // its answer does not come
        let _ = clients.delete_by_key(&vm, &uid_of(&vm)).await;
    }
    match daemon.ends(SOON).await {
        Ok(_) => {}
        Err(e) => return Outcome::wrong(format!("the place was not reached: {e}")),
    }
    let uuid = host.try_virsh(&["domuuid", &vm]).ok();
    daemon.disarm();
    daemon.restart().await;
    let clients = daemon.clients();

    let found = Found::on(host, &entry_name, &vm);
    match clients.list_complete().await {
        Ok(list) => outcome.leaked.extend(found.unlisted(&vm, &list)),
        Err(e) => outcome.wrong.push(format!("ListByTag after the crash: {}", e.message())),
    }
    if one.then == Then::Create {
        match tokio::time::timeout(SOON, clients.create(case.request(&vm, HOST))).await {
            Ok(Ok(created)) => {
                let instance = created.instance.unwrap_or_default();
                if instance.phase() != InstancePhase::Ready || !host.is_active(&vm) {
                    outcome.wrong.push(format!("after Create it is {:?}", instance.phase()));
                }
                let same = uuid.is_none() || uuid == host.try_virsh(&["domuuid", &vm]).ok();
                if !same {
                    outcome.wrong.push("Create made another VM".to_owned());
                }
                if Found::on(host, &entry_name, &vm).volumes.len() != 2 {
                    outcome.wrong.push("overlay and seed are not both there".to_owned());
                }
            }
            Ok(Err(e)) => outcome.wrong.push(format!("Create after the crash: {}", e.message())),
            Err(_) => outcome.stuck.push(format!("Create after the crash is not over within {SOON:?}")),
        }
    }
    delete(&mut outcome, &clients, host, &entry_name, &vm, SOON).await;
    outcome
}
