//! Two daemons of one entry on one instance, while one of them stands or dies at a failpoint of Create, publish or
//! Delete. In the end both know one whole VM, its base is complete, and a Delete by either leaves nothing for both.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1::CreateRequest;
use lab_tests::case::uid_of;
use lab_tests::clients::seconds;
use lab_tests::lab::Host;
use lab_tests::summary::is_full;
use lab_tests::{Case, Clients, Hold, Outcome, Summary, failpoints};
use tonic::Code;

use crate::hosts;
use crate::support::{AT_A_TIME, Found, delete, left_over, may_be, reached, run_all, until_served, whole, with_base};

const HOST: &str = "hv3";
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(45);
/// Of the instance that comes after, under the same name.
const OTHER_UID: &str = "uid-of-another";
/// How long the other daemon may let its caller wait while the first is in its way.
const MEANWHILE_SECONDS: u64 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Stands,
    Dies,
}

/// What the other daemon is told meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Other {
    Creates,
    Deletes,
    /// Delete, and then Create for another owner under the same name.
    Replaces,
    /// Delete, and then the same Create again.
    Recreates,
}

#[derive(Debug, Clone)]
struct Try {
    point: String,
    cold: bool,
    first: First,
    other: Other,
}

fn tries() -> Vec<Try> {
    let points = |operation: &str, cold: bool| failpoints::of(operation).into_iter().map(move |point| (point, cold));
    let points = points("create", false).chain(points("create", true)).chain(points("publish", true)).chain(points("delete", false));
    let mut tries: Vec<_> = points
        .flat_map(|(point, cold)| {
            [(First::Stands, Other::Creates), (First::Dies, Other::Creates), (First::Stands, Other::Deletes), (First::Dies, Other::Deletes)]
                .map(|(first, other)| Try { point: point.clone(), cold, first, other })
        })
        // the image is not there or is: before the volumes that is all the difference, and the pull has places of its own
        .filter(|t| !t.cold || t.point.starts_with("publish.") || t.other == Other::Creates)
        .collect();
    let replaces =
        failpoints::of("delete").into_iter().map(|point| Try { point, cold: false, first: First::Stands, other: Other::Replaces });
    tries.extend(replaces);
    let recreates =
        failpoints::of("create").into_iter().map(|point| Try { point, cold: false, first: First::Stands, other: Other::Recreates });
    tries.extend(recreates);
    if !is_full() {
        const SOME: [(&str, bool, First, Other); 7] = [
            ("create.after_overlay", false, First::Stands, Other::Creates),
            ("create.before_seed", false, First::Stands, Other::Deletes),
            ("create.after_define", true, First::Dies, Other::Creates),
            ("publish.in_body", true, First::Stands, Other::Creates),
            ("delete.after_destroy", false, First::Stands, Other::Creates),
            ("delete.before_undefine", false, First::Stands, Other::Replaces),
            ("create.after_seed_volume", false, First::Stands, Other::Recreates),
        ];
        tries.retain(|t| SOME.contains(&(t.point.as_str(), t.cold, t.first, t.other)));
        assert_eq!(tries.len(), SOME.len(), "every place is there");
    }
    tries
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_of_one_entry_agree_wherever_one_of_them_stands_or_dies() {
    let Some(case) = Case::start("mpair", &[HOST]) else { return };
    let Some(program) = failpoints::binary("two_daemons_of_one_entry_agree") else { return };
    let running = hosts::enter(&case).await;
    let case = Arc::new(case);
    with_base(&case, HOST).await;
    let tries = tries().into_iter().map(|one| {
        let point = format!("{}, {}, {:?}, the other {:?}", one.point, if one.cold { "cold" } else { "warm" }, one.first, one.other);
        let (case, program) = (case.clone(), program.clone());
        (point, move |n| pair(case.clone(), program.clone(), n, one.clone()))
    });
    let mut summary = Summary::of("pair");
    run_all(&mut summary, AT_A_TIME, &[case.host(HOST)], tries.collect()).await;
    let left: Vec<_> = left_over(&case, HOST).into_iter().filter(|name| !name.starts_with("base-")).collect();
    summary.add("what is left", Outcome { leaked: left, ..Outcome::default() });
    drop(case);
    running.leave(&mut summary).await;
    summary.close();
}

async fn pair(case: Arc<Case>, program: PathBuf, n: usize, one: Try) -> Outcome {
    let entry = if one.cold { case.other_entry(&format!("c{n}")) } else { case.other_entry("w") };
    let entry_name = entry.name().to_owned();
    let (vm, host) = (case.vm(&format!("r{n}")), case.host(HOST));
    let mut outcome = Outcome::default();
    let hold = Hold::new(case.dir(), &format!("r{n}"));
    let action = if one.first == First::Stands { hold.at(&one.point) } else { format!("{}=return(abort)", one.point) };
    let mut a = case.failing_daemon_in(&format!("a{n}"), entry.clone(), &program, action).await;
    let b = case.daemon_in(&format!("b{n}"), entry).await;
    let (first, second) = (a.clients(), b.clients());

    let call = {
        let (clients, vm, request, deletes) = (first.clone(), vm.clone(), case.request(&vm, HOST), one.point.starts_with("delete."));
        if deletes && let Err(e) = clients.create(request.clone()).await {
            return Outcome::wrong(format!("Create before the Delete: {}", e.message()));
        }
        tokio::spawn(async move {
            if deletes { clients.delete_by_key(&vm, &uid_of(&vm)).await.map(drop) } else { clients.create(request).await.map(drop) }
        })
    };
    match one.first {
        First::Stands => reached(&a, SOON).await,
        First::Dies => {
            if let Err(e) = a.ends(SOON).await {
                return Outcome::wrong(format!("the place was not reached: {e}"));
            }
        }
    }
    let short = CreateRequest { max_wait: seconds(MEANWHILE_SECONDS), ..case.request(&vm, HOST) };
    let meanwhile = match one.other {
        Other::Creates => tokio::time::timeout(SOON, second.create(short.clone())).await.map(|answer| answer.map(drop)),
        Other::Deletes | Other::Replaces | Other::Recreates => {
            tokio::time::timeout(SOON, second.delete_by_key(&vm, &uid_of(&vm))).await.map(|answer| answer.map(drop))
        }
    };
    match meanwhile {
        Ok(answer) => may_be(&mut outcome, "the other daemon meanwhile", answer),
        Err(_) => outcome.stuck.push(format!("the other daemon does not answer within {SOON:?}")),
    }
    // what a Delete that was held up goes on with must not be the next instance of that name
    let replaced = CreateRequest { uid: OTHER_UID.to_owned(), ..case.request(&vm, HOST) };
    if one.other == Other::Replaces {
        until_served(&mut outcome, "Create for the other owner", SOON, || second.create(replaced.clone())).await;
    }
    if one.other == Other::Recreates {
        match tokio::time::timeout(SOON, second.create(short)).await {
            Ok(answer) => may_be(&mut outcome, "the other daemon's Create after its Delete", answer.map(drop)),
            Err(_) => outcome.stuck.push(format!("the other daemon's Create is not answered within {SOON:?}")),
        }
    }
    hold.let_go();
    match tokio::time::timeout(SOON, call).await {
        Ok(Ok(answer)) if one.first == First::Stands => may_be(&mut outcome, "the first daemon", answer),
        Ok(_) => {}
        Err(_) => outcome.stuck.push(format!("the first daemon does not answer within {SOON:?}")),
    }
    if one.other == Other::Replaces {
        whole(&mut outcome, host, &entry_name, &vm);
        until_served(&mut outcome, "Delete for the other owner", SOON, || second.delete_by_key(&vm, OTHER_UID)).await;
    }
    if one.first == First::Dies {
        a.disarm();
        a.restart().await;
    }
    let (first, second) = (a.clients(), b.clients());
    agree(&mut outcome, &case, host, &entry_name, &vm, &first, &second).await;
    let found = Found::on(host, &entry_name, &vm);
    if one.first == First::Stands && !(found.incomplete.is_empty() && found.strays.is_empty()) {
        outcome.leaked.extend(found.incomplete.iter().chain(&found.strays).cloned());
    }
    if !(1..=2).contains(&found.complete.len()) && one.cold {
        outcome.wrong.push(format!("bases: {found:?}"));
    }
    let (deletes, looks) = if n.is_multiple_of(2) { (&first, &second) } else { (&second, &first) };
    delete(&mut outcome, deletes, host, &entry_name, &vm, SOON).await;
    match looks.get_by_key(&vm, &uid_of(&vm)).await {
        Err(e) if e.code() == Code::NotFound => {}
        other => outcome.wrong.push(format!("after the Delete the other daemon says {other:?}")),
    }
    outcome
}

/// Both daemons create it, and it is one VM with all that belongs to it.
async fn agree(outcome: &mut Outcome, case: &Case, host: &Host, entry: &str, vm: &str, first: &Clients, second: &Clients) {
    let one = until_served(outcome, "Create by the first", SOON, || first.create(case.request(vm, HOST))).await;
    let uuid = host.try_virsh(&["domuuid", vm]).ok();
    let two = until_served(outcome, "Create by the second", SOON, || second.create(case.request(vm, HOST))).await;
    let id =
        |created: Option<egress_provider_proto::v1::CreateResponse>| created.unwrap_or_default().instance.unwrap_or_default().instance_id;
    let (one, two) = (id(one), id(two));
    if one != two {
        outcome.wrong.push(format!("the daemons made {one} and {two}"));
    }
    if uuid != host.try_virsh(&["domuuid", vm]).ok() {
        outcome.wrong.push("the second made another VM of it".to_owned());
    }
    whole(outcome, host, entry, vm);
}
