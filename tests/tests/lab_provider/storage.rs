//! Instances that need no guest: what is made, adopted, refused and left alone on a real host.

use std::time::{Duration, Instant};

use egress_provider_proto::v1::{
    CloudInit, CreateRequest, ErrorReason as Reason, InstancePhase, InstanceState, StateReason, create_response, delete_response,
};
use lab_tests::case::{request, uid_of};
use lab_tests::lab::Host;
use lab_tests::{Case, eventually, lockup, refused};
use serde_json::json;

use crate::{BROKEN_TOO, alone};

const HOST: &str = "hv2";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);
/// The predecessor's mark namespace, which is ours too.
const NAMESPACE: &str = "https://gitea.home.hrajfrisbee.cz/kacerr/egress-proxies-operator/kvm2";

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

/// A domain as somebody else would define it; `metadata` goes inside `<metadata>`.
fn define(host: &Host, name: &str, metadata: &str, disk: Option<&str>) {
    let disk = disk.map_or(String::new(), |path| {
        format!(
            "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{path}'/><target dev='vda' bus='virtio'/></disk>"
        )
    });
    host.define(&format!(
        "<domain type='qemu'><name>{name}</name><metadata>{metadata}</metadata><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type machine='q35'>hvm</type></os><devices>{disk}<controller type='usb' model='none'/></devices></domain>"
    ));
}

/// The document of a domain, which shows every change to it.
fn document(host: &Host, name: &str) -> String {
    host.virsh(&["dumpxml", "--inactive", name])
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_lifecycles_in_a_row_leave_only_the_cached_base() {
    let Some(case) = Case::start("ten", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    for round in 0..10 {
        let created = clients.create(case.request(&vm, HOST)).await.expect("created");
        assert_eq!(created.outcome(), create_response::Outcome::Created, "round {round}");
        assert_eq!(created.instance.as_ref().expect("an instance").instance_id, id(&vm));
        let deleted = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
        assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted, "round {round}");
        refused(clients.get(&id(&vm), &uid_of(&vm)).await, Reason::InstanceNotFound);
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
    let bases = case.bases(HOST);
    assert_eq!(bases.len(), 3, "a base, its origin and its marker: {bases:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_again_gives_the_same_id_and_makes_nothing() {
    let Some(case) = Case::start("again", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    // at the same time: one makes it, the others join
    let (one, two) = tokio::join!(clients.create(case.request(&vm, HOST)), clients.create(case.request(&vm, HOST)));
    let outcomes = [one.expect("created").outcome(), two.expect("joined").outcome()];
    assert!(outcomes.contains(&create_response::Outcome::Created) && outcomes.contains(&create_response::Outcome::Joined), "{outcomes:?}");
    let before = (document(case.host(HOST), &vm), case.left(HOST));
    let again = clients.create(case.request(&vm, HOST)).await.expect("the same");
    assert_eq!(again.outcome(), create_response::Outcome::Existing);
    assert_eq!(again.instance.expect("an instance").instance_id, id(&vm));
    assert_eq!((document(case.host(HOST), &vm), case.left(HOST)), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_uid_or_spec_hash_is_refused_and_changes_nothing() {
    let Some(case) = Case::start("owner", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    let before = document(case.host(HOST), &vm);
    let other_uid = CreateRequest { uid: "somebody-else".into(), ..case.request(&vm, HOST) };
    let refusal = refused(clients.create(other_uid).await, Reason::NameOwnedByOtherUid);
    assert_eq!(refusal.metadata.get("owner_uid"), Some(&uid_of(&vm)));
    let other_installation = CreateRequest { installation_id: "other-cluster".into(), ..case.request(&vm, HOST) };
    // the mark says no installation, and such a mark matches every one
    clients.create(other_installation).await.expect("a mark without an installation matches");
    let other_spec = CreateRequest { spec_hash: "sha256:2".into(), ..case.request(&vm, HOST) };
    refused(clients.create(other_spec).await, Reason::SpecConflict);
    refused(clients.get(&id(&vm), "somebody-else").await, Reason::UidMismatch);
    refused(clients.delete(&id(&vm), "somebody-else").await, Reason::UidMismatch);
    refused(clients.delete_by_key(&vm, "somebody-else").await, Reason::UidMismatch);
    assert_eq!(document(case.host(HOST), &vm), before);
    // case of letters is no difference (E2)
    clients.get(&id(&vm), &uid_of(&vm).to_uppercase()).await.expect("the same uid");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_domain_that_is_not_ours_survives_every_rpc() {
    let Some(case) = Case::start("foreign", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let theirs = [
        (case.vm("plain"), String::new()),
        // the older provider's element, in a namespace of its own
        (
            case.vm("older"),
            "<k:instance xmlns:k='https://example.org/other'><k:managed>true</k:managed><k:uid>u</k:uid></k:instance>".into(),
        ),
        (case.vm("released"), format!("<k:instance xmlns:k='{NAMESPACE}'><k:managed>false</k:managed><k:uid>u</k:uid></k:instance>")),
    ];
    for (name, metadata) in &theirs {
        define(host, name, metadata, None);
        let before = document(host, name);
        refused(clients.create(case.request(name, HOST)).await, Reason::NameNotManaged);
        refused(clients.get(&id(name), "").await, Reason::NotManaged);
        refused(clients.get_by_key(name, &uid_of(name)).await, Reason::NotManaged);
        refused(clients.delete(&id(name), "").await, Reason::NotManaged);
        refused(clients.delete(&id(name), &uid_of(name)).await, Reason::NotManaged);
        refused(clients.delete_by_key(name, &uid_of(name)).await, Reason::NotManaged);
        let list = clients.list_complete().await.expect("a listing");
        assert!(list.instances.iter().all(|i| &i.name != name), "{name} is listed");
        assert_eq!(&document(host, name), &before);
    }
    assert_eq!(case.bases(HOST), Vec::<String>::new(), "a refused Create pulls nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_domain_and_a_base_of_the_predecessor_are_adopted_as_they_are() {
    let Some(case) = Case::start("adopt", &[HOST]) else { return };
    let host = case.host(HOST);
    let tiny = case.lab.image("tiny");
    // as the predecessor left them: a base under its name with its marker, an overlay, a defined domain
    let base = format!("base-{}-tiny.qcow2", case.entry_name());
    let base_path = host.volume_path("default", &base);
    std::fs::copy(&tiny.path, &base_path).expect("placing a base");
    std::fs::write(host.volume_path("default", &format!("{base}.sha256")), &tiny.sha256).expect("placing a marker");
    let (old, overlay) = (case.vm("old"), format!("{}.qcow2", case.vm("old")));
    host.virsh(&["pool-refresh", "default"]);
    host.virsh(&["vol-create-as", "default", &overlay, "1G", "--format", "qcow2", "--backing-vol", &base, "--backing-vol-format", "qcow2"]);
    let overlay_on_host = host.virsh(&["vol-path", &overlay, "--pool", "default"]);
    let uid = uid_of(&old);
    let mark = format!(
        "<instance xmlns='{NAMESPACE}'><managed>true</managed><uid>{uid}</uid><createdAt>2026-01-02T03:04:05Z</createdAt></instance>"
    );
    define(host, &old, &mark, Some(overlay_on_host.trim()));

    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let instance = clients.get(&id(&old), &uid).await.expect("adopted");
    assert_eq!((instance.uid.as_str(), instance.state()), (uid.as_str(), InstanceState::Stopped));
    assert_eq!(instance.created_at.map(|t| t.seconds), Some(1_767_323_045));
    let listed = clients.list_complete().await.expect("a listing").instances;
    assert!(listed.iter().any(|i| i.name == old && i.uid == uid), "{listed:?}");
    // a new VM uses the old base and pulls nothing
    let new = case.vm("new");
    clients.create(case.request(&new, HOST)).await.expect("created");
    assert_eq!(case.bases(HOST), [base.clone(), format!("{base}.sha256")]);
    assert!(document(host, &new).contains(&new));
    let seen = host.virsh(&["vol-dumpxml", &format!("{new}.qcow2"), "--pool", "default"]);
    assert!(seen.contains(&base), "{seen}");
    // and a Create of the old one starts it
    let started = clients.create(case.request(&old, HOST)).await.expect("started");
    assert_eq!(started.outcome(), create_response::Outcome::Existing);
    assert!(host.is_active(&old));
    clients.delete(&id(&old), &uid).await.expect("deleted");
    assert!(!host.domains().contains(&old));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_in_the_way_is_named_and_kept() {
    let Some(case) = Case::start("volume", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    let path = host.volume_path("default", &format!("{vm}.qcow2"));
    std::fs::write(&path, b"somebody's data").expect("placing a file");
    let refusal = refused(clients.create(case.request(&vm, HOST)).await, Reason::VolumeConflict);
    assert!(refusal.message.contains(&format!("{vm}.qcow2")), "{}", refusal.message);
    assert_eq!(std::fs::read(&path).expect("it is there"), b"somebody's data");
    assert!(!host.domains().contains(&vm), "nothing is left of a Create that cannot succeed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_vm_is_reported_as_paused_and_neither_resumed_nor_destroyed() {
    let Some(case) = Case::start("paused", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    host.virsh(&["suspend", &vm]);
    let instance = clients.get(&id(&vm), &uid_of(&vm)).await.expect("read");
    assert_eq!((instance.state(), instance.state_reason()), (InstanceState::Paused, StateReason::PausedByAdmin));
    refused(clients.create(case.request(&vm, HOST)).await, Reason::PausedByAdmin);
    assert_eq!(host.virsh(&["domstate", &vm]).trim(), "paused");
    host.virsh(&["resume", &vm]);
    let instance = clients.get(&id(&vm), &uid_of(&vm)).await.expect("read");
    assert_eq!(instance.state(), InstanceState::Provisioning);
}

/// As if the last attempt of a Create had been long ago.
fn age(host: &Host, vm: &str) {
    const OLD: &str = "2026-01-01T00:00:00Z";
    let element = host.virsh(&["metadata", vm, NAMESPACE]);
    let (before, rest) = element.split_once("attemptAt>").expect("the mark has an attempt");
    let (_, after) = rest.split_once('<').expect("the element ends");
    host.virsh(&["metadata", vm, NAMESPACE, "--key", "kvm2", "--set", &format!("{before}attemptAt>{OLD}<{after}")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_vm_is_started_again_with_its_own_disk_and_a_lost_disk_is_an_error() {
    let Some(case) = Case::start("stopped", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    host.virsh(&["destroy", &vm]);
    let instance = clients.get(&id(&vm), &uid_of(&vm)).await.expect("read");
    assert_eq!((instance.state(), instance.state_reason()), (InstanceState::Stopped, StateReason::Destroyed));
    let started = clients.create(case.request(&vm, HOST)).await.expect("started");
    assert_eq!(started.outcome(), create_response::Outcome::Existing);
    assert!(host.is_active(&vm));
    host.virsh(&["destroy", &vm]);
    host.virsh(&["vol-delete", &format!("{vm}.qcow2"), "--pool", "default"]);
    // so soon after its Create a Delete of another daemon may be at work
    refused(clients.create(case.request(&vm, HOST)).await, Reason::StateChanged);
    age(host, &vm);
    refused(clients.create(case.request(&vm, HOST)).await, Reason::DiskLost);
    assert!(!host.is_active(&vm));
    let deleted = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_needs_no_id_and_is_idempotent_and_removes_what_a_lost_domain_left() {
    let Some(case) = Case::start("bykey", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    let deleted = clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("deleted");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    for _ in 0..2 {
        let again = clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("absent");
        assert_eq!(again.outcome(), delete_response::Outcome::AlreadyAbsent);
        let again = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("absent");
        assert_eq!(again.outcome(), delete_response::Outcome::AlreadyAbsent);
    }
    // a domain that a person undefined leaves its volumes
    clients.create(case.request(&vm, HOST)).await.expect("created");
    host.virsh(&["destroy", &vm]);
    host.virsh(&["undefine", &vm, "--nvram"]);
    assert_eq!(case.left(HOST).len(), 2, "overlay and seed");
    let deleted = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn nvram_saved_memory_snapshots_and_checkpoints_do_not_keep_a_vm_from_being_deleted() {
    let Some(case) = Case::start("nvram", &[HOST]) else { return };
    let uefi = json!({ "url": case.lab.image("tiny").url, "sha256": case.lab.image("tiny").sha256, "firmware": "uefi" });
    let daemon = case.daemon(case.entry().image("uefi", uefi)).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let (saved, snapshotted, checked) = (case.vm("saved"), case.vm("snap"), case.vm("check"));

    clients.create(request(&saved, HOST, "uefi")).await.expect("created");
    host.virsh(&["managedsave", &saved]);
    let instance = clients.get(&id(&saved), &uid_of(&saved)).await.expect("read");
    assert_eq!((instance.state(), instance.state_reason()), (InstanceState::Stopped, StateReason::Saved));
    // libvirt makes a snapshot only of disks that can hold one, and of a VM without NVRAM
    clients.create(case.request(&snapshotted, HOST)).await.expect("created");
    host.virsh(&["destroy", &snapshotted]);
    host.virsh(&["snapshot-create-as", &snapshotted, "s1", "--diskspec", "vda,snapshot=internal", "--diskspec", "vdb,snapshot=no"]);

    // libvirt refuses to undefine it without being told about both
    clients.create(case.request(&checked, HOST)).await.expect("created");
    host.virsh(&["checkpoint-create-as", &checked, "c1", "--diskspec", "vda,checkpoint=bitmap", "--diskspec", "vdb,checkpoint=no"]);
    host.virsh(&["managedsave", &checked]);

    for vm in [&saved, &snapshotted, &checked] {
        clients.delete(&id(vm), &uid_of(vm)).await.expect("deleted");
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tpm_that_somebody_gave_a_vm_goes_with_its_state() {
    let Some(case) = Case::start("tpm", &[HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    host.virsh(&["destroy", &vm]);
    // state that libvirt keeps unless it is told to remove it
    let tpm = "<tpm model='tpm-crb'><backend type='emulator' version='2.0' persistent_state='yes'/></tpm></devices>";
    host.define(&document(host, &vm).replace("</devices>", tpm));
    host.virsh(&["start", &vm]);
    host.virsh(&["destroy", &vm]);
    let libvirtd = host.pid("libvirtd").expect("it runs");
    let uuid = host.virsh(&["domuuid", &vm]);
    let state = std::path::PathBuf::from(format!("/proc/{libvirtd}/root/var/lib/libvirt/swtpm/{}", uuid.trim()));
    assert!(state.exists(), "{} is what Delete has to remove", state.display());
    clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    assert!(!state.exists(), "{} is left", state.display());
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_has_the_instances_of_its_installation_by_host_and_name_in_pages() {
    let Some(case) = Case::start("list", &["hv1", HOST]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let names: Vec<_> = ["a", "b", "c"].map(|n| case.vm(n)).into();
    for (name, zone) in names.iter().zip([HOST, "hv1", HOST]) {
        let request = CreateRequest { installation_id: "cluster-1".into(), ..case.request(name, zone) };
        clients.create(request).await.expect("created");
    }
    let mut found = Vec::new();
    let mut page_token = String::new();
    loop {
        let page = egress_provider_proto::v1::ListByTagRequest {
            installation_id: "cluster-1".into(),
            page_size: 2,
            page_token,
            require_complete: true,
            ..Default::default()
        };
        let page = clients.provider.clone().list_by_tag(page).await.expect("a page").into_inner();
        assert!(page.complete && page.instances.len() <= 2, "{page:?}");
        found.extend(page.instances.into_iter().map(|i| (i.host, i.name)));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let ours: Vec<_> = found.into_iter().filter(|(_, name)| names.contains(name)).collect();
    let expected = [("hv1", 1), (HOST, 0), (HOST, 2)].map(|(host, n): (&str, usize)| (host.to_owned(), names[n].clone()));
    assert_eq!(ours, expected);
    let other = egress_provider_proto::v1::ListByTagRequest { installation_id: "cluster-2".into(), ..Default::default() };
    let other = clients.provider.clone().list_by_tag(other).await.expect("a page").into_inner();
    assert!(other.instances.iter().all(|i| !names.contains(&i.name)), "{other:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_daemon_left_is_seen_by_list_and_completed_by_create_or_removed_by_delete() {
    // libvirtd may lock itself up when its client goes in an upload
    const HOST: &str = BROKEN_TOO;
    let _turn = alone(HOST).await;
    let Some(case) = Case::start("crash", &[HOST]) else { return };
    let id = |vm: &str| format!("hosts/{HOST}/domains/{vm}");
    // the pull stops half way, so that both Creates are cut off with their domain defined and no volume of theirs made
    let server = lab_tests::ImageServer::start().await;
    let image = std::fs::read(&case.lab.image("tiny").path).expect("the image");
    server.serve("tiny.qcow2", image, [lab_tests::Answer::GateAt(100_000)]);
    let entry = case.entry().image_set("tiny", "url", server.url("tiny.qcow2"));
    let mut daemon = case.daemon(entry).await;
    let (kept, dropped) = (case.vm("kept"), case.vm("dropped"));
    let clients = daemon.clients();
    for vm in [&kept, &dropped] {
        let no_wait = CreateRequest { max_wait: lab_tests::clients::seconds(0), ..case.request(vm, HOST) };
        clients.create(no_wait).await.expect_err("unfinished");
    }
    let host = case.host(HOST);
    eventually("both domains are defined", LIMIT, || async {
        let domains = host.domains();
        if domains.contains(&kept) && domains.contains(&dropped) { Ok(()) } else { Err(format!("{domains:?}")) }
    })
    .await;
    daemon.kill();
    lockup::mended(host, Instant::now());
    server.open_gate();
    daemon.restart().await;
    let clients = daemon.clients();
    let listed = clients.list_complete().await.expect("a listing").instances;
    for vm in [&kept, &dropped] {
        let found = listed.iter().find(|i| &i.name == vm).unwrap_or_else(|| panic!("{vm} is not listed: {listed:?}"));
        assert_eq!(found.phase(), InstancePhase::Creating);
        let instance = clients.get(&id(vm), &uid_of(vm)).await.expect("read");
        assert_eq!((instance.state(), instance.state_reason()), (InstanceState::Provisioning, StateReason::CreateIncomplete));
    }
    let created = clients.create(case.request(&kept, HOST)).await.expect("completed");
    assert_eq!(created.outcome(), create_response::Outcome::Created);
    assert!(host.is_active(&kept));
    clients.delete(&id(&dropped), &uid_of(&dropped)).await.expect("removed");
    clients.delete(&id(&kept), &uid_of(&kept)).await.expect("removed");
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_ends_a_running_create_and_nothing_is_left() {
    let Some(case) = Case::start("cancel", &[HOST]) else { return };
    let server = lab_tests::ImageServer::start().await;
    let image = std::fs::read(&case.lab.image("tiny").path).expect("the image");
    server.serve("tiny.qcow2", image, [lab_tests::Answer::GateAt(100_000)]);
    let daemon = case.daemon(case.entry().image_set("tiny", "url", server.url("tiny.qcow2"))).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    let creating = tokio::spawn({
        let (clients, request) = (clients.clone(), case.request(&vm, HOST));
        async move { clients.create(request).await }
    });
    let host = case.host(HOST);
    eventually("the pull runs", LIMIT, || async {
        if server.gets("tiny.qcow2") > 0 && host.domains().contains(&vm) { Ok(()) } else { Err("not yet".into()) }
    })
    .await;
    // one that waits for a cold image is told so, with when to come back
    let no_wait = CreateRequest { max_wait: lab_tests::clients::seconds(0), ..case.request(&vm, HOST) };
    let refusal = refused(clients.create(no_wait).await, Reason::ImagePullInProgress);
    assert!(refusal.retry_after.is_some(), "{refusal:?}");
    assert!(refusal.metadata.contains_key("bytes_done"), "{refusal:?}");
    let deleted = clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("deleted");
    assert!(deleted.create_cancelled, "{deleted:?}");
    refused(creating.await.expect("the caller's task"), Reason::CreateCancelled);
    assert_eq!(case.left(HOST), Vec::<String>::new());
    refused(clients.get(&id(&vm), &uid_of(&vm)).await, Reason::InstanceNotFound);
    // the pull went on for the next one
    server.open_gate();
    clients.create(case.request(&vm, HOST)).await.expect("created");
    assert_eq!(server.gets("tiny.qcow2"), 1, "one pull for all");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_goes_away_ends_its_wait_and_not_the_work() {
    let Some(case) = Case::start("gone", &[HOST]) else { return };
    let server = lab_tests::ImageServer::start().await;
    let image = std::fs::read(&case.lab.image("tiny").path).expect("the image");
    server.serve("tiny.qcow2", image, [lab_tests::Answer::GateAt(100_000)]);
    let daemon = case.daemon(case.entry().image_set("tiny", "url", server.url("tiny.qcow2"))).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    let creating = tokio::spawn({
        let (clients, request) = (clients.clone(), case.request(&vm, HOST));
        async move { clients.create(request).await }
    });
    eventually("the pull runs", LIMIT, || async { if server.gets("tiny.qcow2") > 0 { Ok(()) } else { Err("not yet".into()) } }).await;
    creating.abort();
    creating.await.expect_err("the caller is gone");
    server.open_gate();
    eventually("the instance is there although nobody waited", LIMIT, || async {
        let instance = clients.get(&id(&vm), &uid_of(&vm)).await.map_err(|e| e.to_string())?;
        if instance.phase() == InstancePhase::Ready { Ok(()) } else { Err(format!("{:?}", instance.state_reason())) }
    })
    .await;
    let again = clients.create(case.request(&vm, HOST)).await.expect("found");
    assert_eq!(again.outcome(), create_response::Outcome::Existing);
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_reaches_the_seed_byte_for_byte_and_no_log() {
    let Some(case) = Case::start("secret", &[HOST]) else { return };
    let daemon = case.talkative_daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    let user_data = b"#cloud-config\r\npassword: s3cr3t-d0-n0t-sh0w\0\xff\n".to_vec();
    let cloud_init = Some(CloudInit { user_data: user_data.clone() });
    clients.create(CreateRequest { cloud_init, ..case.request(&vm, HOST) }).await.expect("created");
    clients.get(&id(&vm), &uid_of(&vm)).await.expect("read");
    let seed = std::fs::read(case.host(HOST).volume_path("default", &format!("{vm}-seed.iso"))).expect("the seed");
    assert!(seed.windows(user_data.len()).any(|part| part == user_data), "the user-data is not in the seed as it is");
    let document = document(case.host(HOST), &vm);
    clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    let log = daemon.log();
    assert!(log.contains(&vm), "the log is there");
    let key = std::fs::read_to_string(&case.lab.id_ed25519).expect("the key");
    let key_line = key.lines().nth(1).expect("a line of the key");
    for secret in ["s3cr3t-d0-n0t-sh0w", key_line] {
        assert!(!log.contains(secret), "a secret in the log");
        assert!(!document.contains(secret), "a secret in the domain's document");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_may_write_no_large_file_makes_the_largest_seed() {
    let Some(case) = Case::start("nofile", &[HOST]) else { return };
    let mut daemon = case.daemon(case.entry()).await;
    // one byte more in a file ends the daemon; its log stays far below
    let limit = ["--pid", &daemon.pid().to_string(), "--fsize=524288"].map(str::to_owned);
    let limited = std::process::Command::new("prlimit").args(&limit).status().expect("prlimit runs");
    assert!(limited.success(), "{limited}");
    let vm = case.vm("a");
    let cloud_init = Some(CloudInit { user_data: vec![b'#'; 1 << 20] });
    daemon.clients().create(CreateRequest { cloud_init, ..case.request(&vm, HOST) }).await.expect("created");
    let seed = case.host(HOST).volume_path("default", &format!("{vm}-seed.iso"));
    assert!(std::fs::metadata(seed).expect("the seed").len() > 1 << 20);
    assert_eq!(daemon.exited(), None);
}
