//! Storage pools that are not what they were: not mounted, read-only, stopped, busy.

use std::time::Duration;

use egress_provider_proto::v1::{CheckReason, ErrorReason as Reason, InstanceState, create_response, delete_response, orphan_volume::Kind};
use lab_tests::case::uid_of;
use lab_tests::lab::Broken;
use lab_tests::{Case, eventually, refused};

use crate::faults::{id, row};
use crate::{BROKEN_TOO, alone};

/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_file_system_is_not_mounted_is_named_and_nothing_is_put_into_its_place() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("unmounted", &[BROKEN_TOO]) else { return };
    let broken = case.host(BROKEN_TOO);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (running, stopped, new) = (case.vm("running"), case.vm("stopped"), case.vm("new"));
    for vm in [&running, &stopped] {
        clients.create(case.request(vm, BROKEN_TOO)).await.expect("created");
    }
    broken.virsh(&["destroy", &stopped]);
    let before = case.left(BROKEN_TOO);
    let gone = Broken::by(broken, &["unmount-pool", "default"], &["mount-pool", "default"]);

    let refusal = refused(clients.create(case.request(&new, BROKEN_TOO)).await, Reason::PoolNotActive);
    assert!(refusal.message.contains("mounted"), "{}", refusal.message);
    // its disk is not lost, it is only not there
    refused(clients.create(case.request(&stopped, BROKEN_TOO)).await, Reason::PoolNotActive);
    let row = row(BROKEN_TOO, &clients).await;
    assert_eq!(row.reason(), CheckReason::PoolNotActive, "{row:?}");
    assert!(row.remediation.contains("mounted"), "{row:?}");
    // what runs goes on, and is told as it is
    assert_eq!(clients.get(&id(BROKEN_TOO, &running), &uid_of(&running)).await.expect("read").state(), InstanceState::Provisioning);
    let listed = clients.list_complete().await.expect("a listing").instances;
    assert!([&running, &stopped].iter().all(|vm| listed.iter().any(|i| &&i.name == vm)), "{listed:?}");
    broken.virsh(&["pool-refresh", "default"]);
    assert_eq!(broken.virsh(&["vol-list", "default"]).trim(), "", "nothing was put where the pool was");
    assert!(!broken.domains().contains(&new));

    drop(gone);
    assert_eq!(case.left(BROKEN_TOO), before);
    let started = clients.create(case.request(&stopped, BROKEN_TOO)).await.expect("started");
    assert_eq!(started.outcome(), create_response::Outcome::Existing);
    clients.create(case.request(&new, BROKEN_TOO)).await.expect("created");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_deleted_while_its_pool_was_not_mounted_is_listed_and_removable_afterwards() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("unmountdel", &[BROKEN_TOO]) else { return };
    let broken = case.host(BROKEN_TOO);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(case.request(&vm, BROKEN_TOO)).await.expect("created");
    let gone = Broken::by(broken, &["unmount-pool", "default"], &["mount-pool", "default"]);
    broken.virsh(&["pool-refresh", "default"]);
    clients.delete(&id(BROKEN_TOO, &vm), &uid_of(&vm)).await.expect("deleted");
    assert!(!broken.domains().contains(&vm));
    drop(gone);
    let list = clients.list_complete().await.expect("a listing");
    let orphans: Vec<_> = list.orphan_volumes.iter().filter(|v| v.name.starts_with(&vm)).map(|v| v.kind()).collect();
    assert!(orphans.contains(&Kind::Overlay) && orphans.contains(&Kind::Seed), "{orphans:?}");
    let deleted = clients.delete(&id(BROKEN_TOO, &vm), &uid_of(&vm)).await.expect("removed");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    assert_eq!(case.left(BROKEN_TOO), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_or_stopped_pool_is_named_and_used_again_without_a_restart() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("readonly", &[BROKEN_TOO]) else { return };
    let broken = case.host(BROKEN_TOO);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (old, new) = (case.vm("old"), case.vm("new"));
    clients.create(case.request(&old, BROKEN_TOO)).await.expect("created");

    let read_only = Broken::by(broken, &["readonly-pool", "default"], &["writable-pool", "default"]);
    let refusal = refused(clients.create(case.request(&new, BROKEN_TOO)).await, Reason::PoolNotActive);
    assert!(refusal.message.contains("read-only"), "{}", refusal.message);
    assert!(!broken.domains().contains(&new), "nothing is left of it");
    // what cannot be removed is not called removed, and stays listed
    refused(clients.delete(&id(BROKEN_TOO, &old), &uid_of(&old)).await, Reason::PoolNotActive);
    assert!(clients.list_complete().await.expect("a listing").instances.iter().any(|i| i.name == old));
    drop(read_only);
    clients.create(case.request(&new, BROKEN_TOO)).await.expect("created");
    clients.delete(&id(BROKEN_TOO, &old), &uid_of(&old)).await.expect("deleted");

    broken.virsh(&["pool-destroy", "default"]);
    refused(clients.create(case.request(&old, BROKEN_TOO)).await, Reason::PoolNotActive);
    assert_eq!(row(BROKEN_TOO, &clients).await.reason(), CheckReason::PoolNotActive);
    broken.virsh(&["pool-start", "default"]);
    clients.create(case.request(&old, BROKEN_TOO)).await.expect("created");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_a_job_running_is_waited_for_and_then_used_with_the_numbers_it_has() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("pooljob", &[BROKEN_TOO]) else { return };
    let broken = case.host(BROKEN_TOO);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vms: Vec<_> = ["a", "b", "c", "d"].map(|n| case.vm(n)).into();
    clients.create(case.request(&case.vm("warm"), BROKEN_TOO)).await.expect("created");
    let held = Broken::by(broken, &["hold-volumes"], &["release-volumes"]);
    let create = |vm: &String| {
        let (clients, request) = (clients.clone(), case.request(vm, BROKEN_TOO));
        tokio::spawn(async move { clients.create(request).await })
    };
    let first = create(&vms[0]);
    eventually("an overlay is being made", LIMIT, || async {
        match broken.try_virsh(&["pool-refresh", "default"]) {
            Err(why) if why.contains("asynchronous jobs") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    // they refresh the pool, too, all at once
    let others: Vec<_> = vms[1..].iter().map(create).collect();
    assert_eq!(row(BROKEN_TOO, &clients).await.reason(), CheckReason::Reachable);
    eventually("the others are past the refresh", LIMIT, || async {
        let domains = broken.domains();
        if vms.iter().all(|vm| domains.contains(vm)) { Ok(()) } else { Err(format!("{domains:?}")) }
    })
    .await;
    drop(held);
    for creating in std::iter::once(first).chain(others) {
        creating.await.expect("the caller's task").expect("created");
    }
}
