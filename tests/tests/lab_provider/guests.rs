//! Guests that stop by themselves, and what people do to a domain by hand.

use std::time::Duration;

use egress_provider_proto::v1::{ErrorReason as Reason, InstanceState, StateReason, create_response, delete_response};
use lab_tests::case::{request, uid_of};
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, Clients, ImageServer, eventually, refused};

const HOST: &str = "hv2";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(90);

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

async fn stopped(clients: &Clients, vm: &str, reason: StateReason) {
    let why = eventually("the instance is stopped", LIMIT, || async {
        let instance = match clients.get(&id(vm), &uid_of(vm)).await {
            Ok(instance) => instance,
            // it stopped between the look at its state and the one at its addresses
            Err(status) => return Err(refused::<()>(Err(status), Reason::AddressUnreadable).message),
        };
        match instance.state() {
            InstanceState::Stopped => Ok(instance.state_reason()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(why, reason);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_crashes_or_shuts_down_is_stopped_for_its_reason_and_started_again_by_create() {
    let Some(case) = Case::start("ends", &[HOST]) else { return };
    let host = case.host(HOST);
    let image = ScratchImage::that_powers_off(case.dir(), "off.raw");
    let server = ImageServer::start().await;
    server.serve("off.raw", image.bytes(), [Answer::Whole]);
    let off = serde_json::json!({ "url": server.url("off.raw"), "sha256": image.sha256, "format": "raw", "firmware": "bios" });
    let daemon = case.daemon(case.entry().image("off", off)).await;
    let clients = daemon.clients();

    let leaving = case.vm("leaving");
    clients.create(request(&leaving, HOST, "off")).await.expect("created");
    stopped(&clients, &leaving, StateReason::GuestShutdown).await;

    let vm = case.vm("killed");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    for signal in ["KILL", "SEGV"] {
        host.act(&["kill-guest", &vm, signal]);
        stopped(&clients, &vm, StateReason::Crashed).await;
        let again = clients.create(case.request(&vm, HOST)).await.expect("started");
        assert_eq!(again.outcome(), create_response::Outcome::Existing);
        assert!(host.is_active(&vm));
    }
    for vm in [&leaving, &vm] {
        clients.delete(&id(vm), &uid_of(vm)).await.expect("deleted");
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_qemu_hangs_is_told_as_it_is_and_deleted_all_the_same() {
    let Some(case) = Case::start("hangs", &[HOST]) else { return };
    let host = case.host(HOST);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (hung, other) = (case.vm("hung"), case.vm("other"));
    for vm in [&hung, &other] {
        clients.create(case.request(vm, HOST)).await.expect("created");
    }
    host.act(&["kill-guest", &hung, "STOP"]);
    let instance = clients.get(&id(&hung), &uid_of(&hung)).await.expect("read");
    assert_eq!(instance.state(), InstanceState::Provisioning, "{instance:?}");
    clients.get(&id(&other), &uid_of(&other)).await.expect("another guest of the host");
    let deleted = clients.delete(&id(&hung), &uid_of(&hung)).await.expect("deleted");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    assert!(!host.domains().contains(&hung));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_domain_is_listed_under_its_new_name_and_its_volumes_are_kept_from_others() {
    let Some(case) = Case::start("renamed", &[HOST]) else { return };
    let host = case.host(HOST);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (old, new) = (case.vm("old"), case.vm("new"));
    clients.create(case.request(&old, HOST)).await.expect("created");
    host.virsh(&["destroy", &old]);
    host.virsh(&["domrename", &old, &new]);

    refused(clients.get(&id(&old), &uid_of(&old)).await, Reason::InstanceNotFound);
    let listed = clients.list_complete().await.expect("a listing").instances;
    assert!(listed.iter().any(|i| i.name == new && i.uid == uid_of(&old)) && listed.iter().all(|i| i.name != old), "{listed:?}");
    assert_eq!(clients.get(&id(&new), &uid_of(&old)).await.expect("read").state(), InstanceState::Stopped);
    // the disk is the renamed domain's still
    refused(clients.create(case.request(&old, HOST)).await, Reason::VolumeConflict);
    refused(clients.delete(&id(&old), &uid_of(&old)).await, Reason::VolumeConflict);
    assert!(case.left(HOST).contains(&format!("{old}.qcow2")));

    // what is deleted under the new name leaves the volumes of the old one, which are then free to be removed
    clients.delete(&id(&new), &uid_of(&old)).await.expect("deleted");
    let orphans = clients.list_complete().await.expect("a listing").orphan_volumes;
    assert_eq!(orphans.iter().filter(|v| v.name.starts_with(&old)).count(), 2, "{orphans:?}");
    clients.delete(&id(&old), &uid_of(&old)).await.expect("removed");
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_was_undefined_while_it_ran_or_saved_by_hand_is_still_served() {
    let Some(case) = Case::start("byhand", &[HOST]) else { return };
    let host = case.host(HOST);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let (transient, saved) = (case.vm("transient"), case.vm("saved"));
    for vm in [&transient, &saved] {
        clients.create(case.request(vm, HOST)).await.expect("created");
    }
    host.virsh(&["undefine", &transient]);
    assert_eq!(clients.get(&id(&transient), &uid_of(&transient)).await.expect("read").state(), InstanceState::Provisioning);
    assert!(clients.list_complete().await.expect("a listing").instances.iter().any(|i| i.name == transient));
    let again = clients.create(case.request(&transient, HOST)).await.expect("it runs");
    assert_eq!(again.outcome(), create_response::Outcome::Existing);

    host.virsh(&["managedsave", &saved]);
    stopped(&clients, &saved, StateReason::Saved).await;
    let again = clients.create(case.request(&saved, HOST)).await.expect("restored");
    assert_eq!(again.outcome(), create_response::Outcome::Existing);
    assert!(host.is_active(&saved));

    for vm in [&transient, &saved] {
        clients.delete(&id(vm), &uid_of(vm)).await.expect("deleted");
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
}
