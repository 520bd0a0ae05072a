//! A libvirtd that restarts while it is asked, that speaks another language, that shows more than usual.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use egress_provider_proto::v1::{CheckReason, ErrorClass, ErrorReason as Reason};
use lab_tests::case::uid_of;
use lab_tests::lab::Broken;
use lab_tests::{Case, Clients, Refusal, eventually, refused};
use tonic::Status;

use crate::faults::{id, lacks, row};
use crate::{BROKEN_TOO, alone};

/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);

/// Calls over and over until it is told to stop; how often each reason came. Every failure has to be Transient.
async fn call_on<F: Future<Output = Result<(), Status>>>(stop: Arc<AtomicBool>, call: impl Fn() -> F) -> BTreeMap<&'static str, u32> {
    let mut failures = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        if let Err(status) = call().await {
            let refusal = Refusal::of(&status);
            assert_eq!(refusal.reason.class(), ErrorClass::Transient, "{}: {}", refusal.reason.wire_name(), refusal.message);
            *failures.entry(refusal.reason.wire_name()).or_default() += 1;
        }
    }
    failures
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_restarts_over_and_over_fails_calls_only_transiently_and_one_at_most_afterwards() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("loop", &[BROKEN_TOO]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (steady, coming) = (case.vm("steady"), case.vm("coming"));
    clients.create(case.request(&steady, BROKEN_TOO)).await.expect("created");
    let stop = Arc::new(AtomicBool::new(false));
    let get = |clients: &Clients| {
        let (clients, vm) = (clients.clone(), steady.clone());
        async move { clients.get(&id(BROKEN_TOO, &vm), &uid_of(&vm)).await.map(drop) }
    };
    let reading = tokio::spawn(call_on(stop.clone(), {
        let (clients, vm) = (clients.clone(), steady.clone());
        move || {
            let (clients, vm) = (clients.clone(), vm.clone());
            async move { clients.get(&id(BROKEN_TOO, &vm), &uid_of(&vm)).await.map(drop) }
        }
    }));
    let listing = tokio::spawn(call_on(stop.clone(), {
        let (clients, vm) = (clients.clone(), steady.clone());
        move || {
            let (clients, vm) = (clients.clone(), vm.clone());
            async move {
                let list = clients.list_complete().await?;
                assert!(list.instances.iter().any(|i| i.name == vm), "a complete listing without {vm}: {list:?}");
                Ok(())
            }
        }
    }));
    let making = tokio::spawn(call_on(stop.clone(), {
        let (clients, vm, request) = (clients.clone(), coming.clone(), case.request(&coming, BROKEN_TOO));
        move || {
            let (clients, vm, request) = (clients.clone(), vm.clone(), request.clone());
            async move {
                clients.create(request).await?;
                clients.delete_by_key(&vm, &uid_of(&vm)).await.map(drop)
            }
        }
    }));
    for round in 0..4 {
        let host = case.host(BROKEN_TOO).clone();
        let restarted = tokio::task::spawn_blocking(move || {
            if round % 2 == 0 {
                host.act(&["restart-libvirtd"]);
            } else {
                host.act(&["kill-libvirtd"]);
                host.act(&["start-libvirtd"]);
            }
        });
        restarted.await.expect("restarted");
        // the link may have been found dead only by this call
        if get(&clients).await.is_err() {
            get(&clients).await.unwrap_or_else(|e| panic!("round {round}: the second call: {e:?}"));
        }
    }
    stop.store(true, Ordering::Relaxed);
    for (what, caller) in [("get", reading), ("list", listing), ("create and delete", making)] {
        let failures = caller.await.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(!failures.contains_key(Reason::Internal.wire_name()), "{what}: {failures:?}");
    }
    clients.create(case.request(&coming, BROKEN_TOO)).await.expect("created");
    for vm in [&steady, &coming] {
        clients.delete_by_key(vm, &uid_of(vm)).await.expect("deleted");
    }
    assert_eq!(case.left(BROKEN_TOO), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_speaks_german_gets_the_same_reasons() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("german", &[BROKEN_TOO]) else { return };
    let broken = case.host(BROKEN_TOO);
    let _german = Broken::by(broken, &["libvirtd-locale", "de_DE.UTF-8"], &["libvirtd-locale", "C"]);
    let said = broken.try_virsh(&["pool-info", "absent"]).expect_err("no such pool");
    assert!(said.contains("nicht gefunden"), "the host does not speak German: {said}");

    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (vm, waiting, blocked) = (case.vm("a"), case.vm("waiting"), case.vm("blocked"));
    refused(clients.get(&id(BROKEN_TOO, &vm), "").await, Reason::InstanceNotFound);
    clients.create(case.request(&vm, BROKEN_TOO)).await.expect("created");
    let file = broken.volume_path("default", &format!("{blocked}.qcow2"));
    std::fs::write(&file, b"somebody's data").expect("placing a file");
    refused(clients.create(case.request(&blocked, BROKEN_TOO)).await, Reason::VolumeConflict);

    // a pool that is busy is busy in every language
    let held = Broken::by(broken, &["hold-volumes"], &["release-volumes"]);
    let create = |vm: &str| {
        let (clients, request) = (clients.clone(), case.request(vm, BROKEN_TOO));
        tokio::spawn(async move { clients.create(request).await })
    };
    let first = create(&case.vm("first"));
    eventually("an overlay is being made", LIMIT, || async {
        let defined = broken.domains().contains(&case.vm("first"));
        if defined && broken.try_virsh(&["pool-refresh", "default"]).is_err() { Ok(()) } else { Err("not yet".into()) }
    })
    .await;
    let second = create(&waiting);
    eventually("the second is past the refresh", LIMIT, || async {
        if broken.domains().contains(&waiting) { Ok(()) } else { Err("not yet".into()) }
    })
    .await;
    drop(held);
    for creating in [first, second] {
        creating.await.expect("the caller's task").expect("created");
    }
    broken.virsh(&["pool-destroy", "default"]);
    let refusal = clients.create(case.request(&case.vm("b"), BROKEN_TOO)).await;
    broken.virsh(&["pool-start", "default"]);
    refused(refusal, Reason::PoolNotActive);

    let entries = [
        ("pool", case.entry().host_set(BROKEN_TOO, "pool", "elsewhere"), Reason::PoolNotFound),
        ("kvm", case.entry().set("virtType", "kvm"), Reason::KvmUnavailable),
        ("machine", case.entry().set("machine", "pdp11"), Reason::MachineUnsupported),
        ("bridge", case.entry().host_set(BROKEN_TOO, "bridge", "br9"), Reason::BridgeMissing),
        ("space", case.entry().host_set(BROKEN_TOO, "pool", "small"), Reason::PoolSpace),
    ];
    for (dir, entry, reason) in entries {
        let daemon = case.daemon_in(dir, entry).await;
        refused(daemon.clients().create(case.request(&case.vm("never"), BROKEN_TOO)).await, reason);
        assert!(!broken.domains().contains(&case.vm("never")), "{dir}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bridge_is_found_before_anything_is_made_where_libvirt_shows_interfaces() {
    let _turn = alone(BROKEN_TOO).await;
    let Some(case) = Case::start("ifdriver", &[BROKEN_TOO]) else { return };
    let _driver = Broken::by(case.host(BROKEN_TOO), &["interface-driver", "on"], &["interface-driver", "off"]);
    // the account has no shell: libvirt alone can tell
    let daemon = case.daemon(case.entry().host_set(BROKEN_TOO, "bridge", "br9")).await;
    lacks(BROKEN_TOO, &case, &daemon, Reason::BridgeMissing, CheckReason::BridgeMissing).await;
    let daemon = case.daemon_in("sound", case.entry()).await;
    assert_eq!(row(BROKEN_TOO, &daemon.clients()).await.reason(), CheckReason::Reachable);
    daemon.clients().create(case.request(&case.vm("a"), BROKEN_TOO)).await.expect("created");
}
