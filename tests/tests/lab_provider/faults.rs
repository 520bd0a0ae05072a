//! Hosts that are broken in one way each, and what the daemon says and does about it.

use std::time::Duration;

use egress_provider_proto::v1::{
    CheckReason, CheckRequest, CreateRequest, ErrorReason as Reason, HostCheck, InstanceState, ListByTagResponse, Placement, StateReason,
};
use lab_tests::case::{request, uid_of};
use lab_tests::clients::seconds;
use lab_tests::lab::{Broken, Host};
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, Clients, Daemon, Fault, FaultProxy, ImageServer, eventually, refused};

use crate::{BROKEN, alone};

const SOUND: &str = "hv2";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn id(host: &str, vm: &str) -> String {
    format!("hosts/{host}/domains/{vm}")
}

pub(super) async fn row(host: &str, clients: &Clients) -> HostCheck {
    let check = clients.check().await.expect("check never fails for a host");
    let row = check.hosts.into_iter().find(|h| h.host == host).expect("a row for the host");
    assert_eq!(row.healthy, row.reason() == CheckReason::Reachable, "{row:?}");
    assert!(row.healthy || !(row.message.is_empty() || row.remediation.is_empty()), "what to do: {row:?}");
    row
}

/// Create and Check agree on a host that lacks something, and nothing is made.
pub(super) async fn lacks(host: &str, case: &Case, daemon: &lab_tests::Daemon, reason: Reason, check: CheckReason) {
    let clients = daemon.clients();
    let vm = case.vm("a");
    refused(clients.create(case.request(&vm, host)).await, reason);
    let row = row(host, &clients).await;
    assert_eq!((row.reason(), row.error_reason.as_str()), (check, reason.wire_name()), "{row:?}");
    assert_eq!(case.left(host), Vec::<String>::new());
    assert_eq!(case.bases(host), Vec::<String>::new(), "nothing was pulled for it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_host_is_reachable_and_described() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("sound", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let row = row(BROKEN, &daemon.clients()).await;
    assert_eq!(row.reason(), CheckReason::Reachable, "{row:?}");
    let details = row.details.expect("details");
    assert_eq!((details.user.as_str(), details.pool.as_str(), details.pool_state.as_str()), ("kvm2lab", "default", "running"));
    assert!(details.libvirt_version.contains('.') && details.pool_available_bytes.is_some_and(|n| n > 0), "{details:?}");
    assert!(!details.hostname.is_empty() && details.memory_mib > 0 && details.cpu_count > 0, "{details:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_takes_the_connection_and_never_answers_is_told_from_a_host_that_is_away() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("hung", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry().set("budgets", serde_json::json!({ "dial": "3s" }))).await;
    let clients = daemon.clients();
    // shorter than the budget of a dial, and longer
    let short = CheckRequest { timeout: seconds(2), ..Default::default() };
    let rows = async |request: CheckRequest| {
        let rows = clients.provider.clone().check(request).await.expect("check never fails for a host").into_inner().hosts;
        rows.into_iter().next().expect("a row")
    };
    let frozen = Broken::by(case.host(BROKEN), &["freeze-libvirtd"], &["thaw-libvirtd"]);
    for request in [short.clone(), CheckRequest::default()] {
        let row = rows(request).await;
        assert_eq!((row.reason(), row.error_reason.as_str()), (CheckReason::Timeout, "CALL_TIMEOUT"), "{row:?}");
        assert!(row.remediation.contains("restart libvirtd") && row.remediation.contains("guests go on"), "{row:?}");
    }
    let refusal = refused(clients.create(case.request(&case.vm("a"), BROKEN)).await, Reason::CallTimeout);
    assert!(refusal.message.contains("restart it"), "{refusal:?}");
    drop(frozen);
    assert_eq!(rows(short.clone()).await.reason(), CheckReason::Reachable);

    let _frozen = Broken::by(case.host(BROKEN), &["freeze-sshd"], &["thaw-sshd"]);
    assert_eq!(rows(short).await.reason(), CheckReason::Unreachable);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bridge_is_found_by_check_and_by_create_before_anything_is_made() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("bridge", &[BROKEN]) else { return };
    let entry = || case.entry().host_set(BROKEN, "bridge", "br9");
    {
        // an account with a shell can look at the host's interfaces
        let user = case.host(BROKEN).exec_user.as_str();
        let daemon = case.daemon_in("shell", entry().host_set(BROKEN, "user", user)).await;
        lacks(BROKEN, &case, &daemon, Reason::BridgeMissing, CheckReason::BridgeMissing).await;
    }
    let daemon = case.daemon(entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    refused(clients.create(case.request(&vm, BROKEN)).await, Reason::BridgeMissing);
    assert!(!case.host(BROKEN).domains().contains(&vm), "a Create that cannot succeed leaves nothing");
    let row = row(BROKEN, &clients).await;
    // where the account cannot look at interfaces, only a start can tell
    assert!(matches!(row.reason(), CheckReason::BridgeMissing | CheckReason::Reachable), "{row:?}");
    assert_eq!(case.left(BROKEN), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_does_not_exist_is_named_by_create_and_check() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("nopool", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry().host_set(BROKEN, "pool", "elsewhere")).await;
    lacks(BROKEN, &case, &daemon, Reason::PoolNotFound, CheckReason::PoolNotFound).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_not_active_is_named_by_create_and_check() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("inactive", &[BROKEN]) else { return };
    // a libvirtd that was restarted takes a pool whose directory exists for active; fails where it is not
    let _ = case.host(BROKEN).try_virsh(&["pool-destroy", "inactive"]);
    let daemon = case.daemon(case.entry().host_set(BROKEN, "pool", "inactive")).await;
    lacks(BROKEN, &case, &daemon, Reason::PoolNotActive, CheckReason::PoolNotActive).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_room_is_quota_with_numbers_and_check_shows_the_same() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("space", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry().host_set(BROKEN, "pool", "small")).await;
    let clients = daemon.clients();
    let refusal = refused(clients.create(case.request(&case.vm("a"), BROKEN)).await, Reason::PoolSpace);
    let number =
        |key: &str| refusal.metadata.get(key).and_then(|n| n.parse::<u64>().ok()).unwrap_or_else(|| panic!("{key} in {refusal:?}"));
    assert!(number("needed_bytes") > number("available_bytes"));
    let row = row(BROKEN, &clients).await;
    let offered = number("available_bytes").saturating_sub(number("reserve_bytes"));
    assert_eq!(row.details.and_then(|d| d.pool_available_bytes), Some(offered));
    assert!(!case.host(BROKEN).domains().contains(&case.vm("a")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_kvm_is_found_by_check_and_by_create_before_anything_is_made() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("kvm", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry().set("virtType", "kvm")).await;
    lacks(BROKEN, &case, &daemon, Reason::KvmUnavailable, CheckReason::KvmUnavailable).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_machine_is_found_by_check_and_by_create_before_anything_is_made() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("machine", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry().set("machine", "pdp11")).await;
    lacks(BROKEN, &case, &daemon, Reason::MachineUnsupported, CheckReason::MachineUnsupported).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_uefi_firmware_is_found_by_check_and_by_create_before_anything_is_made() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("firmware", &[BROKEN]) else { return };
    let _none = Broken::by(case.host(BROKEN), &["firmware", "none"], &["firmware", "plain"]);
    let daemon = case.daemon(case.entry().image_set("tiny", "firmware", "uefi")).await;
    lacks(BROKEN, &case, &daemon, Reason::FirmwareUnavailable, CheckReason::FirmwareUnavailable).await;
    // it is the image that needs it
    let clients = daemon.clients();
    clients.create(request(&case.vm("bios"), BROKEN, "tiny-raw")).await.expect("a BIOS image needs none");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_grew_behind_libvirts_back_and_what_only_root_could_use_is_offered_by_neither_create_nor_check() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("reserve", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let daemon = case.daemon(case.entry().host_set(BROKEN, "pool", "small")).await;
    let clients = daemon.clients();
    let shown = async || {
        let details = row(BROKEN, &clients).await.details.expect("details");
        (details.pool_available_bytes.expect("read"), details.pool_reserve_bytes)
    };
    let (before, _) = shown().await;
    // 1 MiB is left for QEMU, and some more for root, which libvirtd is
    let full = Broken::by(broken, &["fill-pool", "small", "1024"], &["unfill-pool", "small"]);
    let refusal = refused(clients.create(case.request(&case.vm("a"), BROKEN)).await, Reason::PoolSpace);
    let number =
        |key: &str| refusal.metadata.get(key).and_then(|n| n.parse::<u64>().ok()).unwrap_or_else(|| panic!("{key} in {refusal:?}"));
    let (available, reserve) = (number("available_bytes"), number("reserve_bytes"));
    assert!(available < before, "nobody has told libvirt: {available} of {before}");
    assert!((1 << 20..8 << 20).contains(&available) && reserve > 4 << 20, "root's part is in the one and the other: {refusal:?}");
    assert_eq!(shown().await, (available - reserve, reserve));
    assert!(!broken.domains().contains(&case.vm("a")));
    drop(full);
    assert_eq!(shown().await.0, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_paused_by_a_full_pool_is_reported_so_and_neither_resumed_nor_destroyed() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("enospc", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let image = ScratchImage::that_writes(case.dir(), "w.raw");
    let server = ImageServer::start().await;
    server.serve("w.raw", image.bytes(), [Answer::Whole]);
    let writer = serde_json::json!({ "url": server.url("w.raw"), "sha256": image.sha256, "format": "raw", "firmware": "bios" });
    let daemon = case.daemon(case.entry().image("writer", writer)).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(request(&vm, BROKEN, "writer")).await.expect("created");

    // its disk goes to a file system that can be filled: a disk of a Create needs more room than the small pool has
    broken.virsh(&["destroy", &vm]);
    let disk = format!("{vm}.qcow2");
    let xml = broken.virsh(&["vol-dumpxml", &disk, "--pool", "default"]);
    let base = xml.split("<backingStore>").nth(1).and_then(|x| x.split("<path>").nth(1)?.split("</path>").next()).expect("a backing file");
    let (here, there) = (broken.volume_path("default", &disk), broken.volume_path("small", &disk));
    ScratchImage::overlay(&there, base, "1G");
    std::fs::remove_file(&here).expect("removing the disk");
    std::os::unix::fs::symlink(broken.pools["small"].path.join(&disk), &here).expect("a link to the disk");
    let full = Broken::by(broken, &["fill-pool", "small", "4096"], &["unfill-pool", "small"]);
    broken.virsh(&["start", &vm]);
    eventually("the guest runs into the full pool", LIMIT, || async {
        let state = broken.virsh(&["domstate", "--reason", &vm]);
        if state.trim() == "paused (I/O error)" { Ok(()) } else { Err(state) }
    })
    .await;

    let instance = clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await.expect("read");
    assert_eq!((instance.state(), instance.state_reason()), (InstanceState::Paused, StateReason::IoError), "{instance:?}");
    refused(clients.create(request(&vm, BROKEN, "writer")).await, Reason::PausedByAdmin);
    assert_eq!(broken.virsh(&["domstate", "--reason", &vm]).trim(), "paused (I/O error)");
    assert!(clients.list_complete().await.expect("a listing").instances.iter().any(|i| i.name == vm));

    drop(full);
    broken.virsh(&["resume", &vm]);
    let instance = clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await.expect("read");
    assert_eq!(instance.state(), InstanceState::Provisioning, "{instance:?}");
    clients.delete(&id(BROKEN, &vm), &uid_of(&vm)).await.expect("deleted");
    assert_eq!(case.left(BROKEN), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_key_that_is_unknown_changed_or_revoked_is_refused_with_its_own_reason() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("hostkey", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let at = format!("[{}]:{} ", broken.address, broken.port);
    let known = std::fs::read_to_string(&case.lab.known_hosts).expect("known_hosts");
    let lines = |prefix: &str| known.lines().filter(|l| l.starts_with(prefix)).map(str::to_owned).collect::<Vec<_>>();
    let other = case.host(SOUND);
    let keys_of_other =
        lines(&format!("[{}]:{} ", other.address, other.port)).into_iter().filter_map(|l| Some(format!("{at}{}", l.split_once(' ')?.1)));
    let revoked = lines(&at).into_iter().flat_map(|line| [line.clone(), format!("@revoked {line}")]);
    let cases = [
        ("unknown", Vec::new(), Reason::HostKeyUnknown),
        ("changed", keys_of_other.collect(), Reason::HostKeyChanged),
        ("revoked", revoked.collect(), Reason::HostKeyRevoked),
    ];
    for (dir, lines, reason) in cases {
        let daemon = case.daemon_in(dir, case.entry().known_hosts(lines)).await;
        refused(daemon.clients().get(&id(BROKEN, "x"), "").await, reason);
        let row = row(BROKEN, &daemon.clients()).await;
        assert_eq!((row.reason(), row.error_reason.as_str()), (CheckReason::Unauthorized, reason.wire_name()), "{row:?}");
    }
    // one type of key is enough, whichever it is (L3)
    for kind in ["ssh-rsa", "ssh-ed25519"] {
        let only: Vec<_> = lines(&at).into_iter().filter(|l| l.contains(kind)).collect();
        assert!(!only.is_empty(), "the lab has an {kind} key");
        let daemon = case.daemon_in(kind, case.entry().known_hosts(only)).await;
        assert_eq!(row(BROKEN, &daemon.clients()).await.reason(), CheckReason::Reachable);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_host_refuses_is_permanent_and_a_rotated_one_works_without_a_restart() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("key", &[BROKEN]) else { return };
    let key = lab_tests::tools::ssh_key(case.dir(), "key");
    let daemon = case.daemon(case.entry().set("sshKeyFile", key.to_string_lossy().as_ref())).await;
    let clients = daemon.clients();
    refused(clients.create(case.request(&case.vm("a"), BROKEN)).await, Reason::SshAuthRejected);
    assert_eq!(row(BROKEN, &clients).await.reason(), CheckReason::Unauthorized);
    std::fs::copy(&case.lab.id_ed25519, &key).expect("replacing the key");
    clients.create(case.request(&case.vm("a"), BROKEN)).await.expect("the new key is used");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_is_missing_or_forbidden_says_so() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("socket", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let exec = broken.exec_user.clone();
    let cases = [
        // with a shell the reason can be told, without one it cannot
        ("missing", exec.as_str(), "/run/libvirt/none", vec![Reason::SocketMissing]),
        ("denied", broken.denied_user.as_str(), broken.socket.as_str(), vec![Reason::SocketDenied]),
        ("unsure", broken.user.as_str(), "/run/libvirt/none", vec![Reason::SocketUnavailable]),
    ];
    for (dir, user, socket, reasons) in cases {
        let entry = case.entry().host_set(BROKEN, "user", user).host_set(BROKEN, "socket", socket);
        let daemon = case.daemon_in(dir, entry).await;
        let status = daemon.clients().get(&id(BROKEN, "x"), "").await.expect_err(dir);
        let refusal = lab_tests::Refusal::of(&status);
        assert!(reasons.contains(&refusal.reason), "{dir}: {refusal:?}");
        assert_eq!(row(BROKEN, &daemon.clients()).await.reason(), CheckReason::Forbidden, "{dir}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_libvirtd_costs_at_most_one_call() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("restart", &[BROKEN]) else { return };
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(case.request(&vm, BROKEN)).await.expect("created");
    for round in 0..3 {
        case.host(BROKEN).act(&["restart-libvirtd"]);
        // the link may have been found dead only by this call
        if let Err(status) = clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await {
            let refusal = lab_tests::Refusal::of(&status);
            assert!(matches!(refusal.reason, Reason::LinkLost | Reason::LibvirtRestarting), "round {round}: {refusal:?}");
            clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await.unwrap_or_else(|e| panic!("round {round}: the second call: {e:?}"));
        }
    }
    clients.delete(&id(BROKEN, &vm), &uid_of(&vm)).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_cut_off_and_comes_back_is_used_again() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("cut", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let proxy = FaultProxy::to(format!("{}:{}", broken.address, broken.port)).await;
    let daemon = case.daemon(case.entry().via(BROKEN, proxy.addr())).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(case.request(&vm, BROKEN)).await.expect("created");
    for fault in [Fault::Refuse, Fault::Reset] {
        proxy.set(fault);
        // a dead link is lost at the first call and unreachable from then on
        eventually("the host is unreachable", LIMIT, || async {
            let status = clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await.expect_err("unreachable");
            let refusal = lab_tests::Refusal::of(&status);
            match refusal.reason {
                Reason::HostUnreachable | Reason::SshThrottled => Ok(()),
                Reason::LinkLost => Err("lost".into()),
                other => panic!("{fault:?}: {other:?}: {refusal:?}"),
            }
        })
        .await;
        proxy.set(Fault::Pass);
        eventually("the host is back", LIMIT, || async { clients.get(&id(BROKEN, &vm), &uid_of(&vm)).await.map_err(|e| e.to_string()) })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_falls_silent_in_an_upload_releases_its_callers_and_delays_no_other_host() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("silent", &[BROKEN, SOUND]) else { return };
    let broken = case.host(BROKEN);
    let proxy = FaultProxy::to(format!("{}:{}", broken.address, broken.port)).await;
    let image = lab_tests::scratch::ScratchImage::filled(case.dir(), "i.qcow2", 64, 1);
    let server = lab_tests::ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [lab_tests::Answer::GateAt(32 << 20)]);
    let entry = case
        .entry()
        .via(BROKEN, proxy.addr())
        .image("i", serde_json::json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let daemon = case.daemon(entry).await;
    let clients = daemon.clients();
    let (here, there) = (case.vm("here"), case.vm("there"));
    clients.create(case.request(&here, BROKEN)).await.expect("created");
    clients.create(case.request(&there, SOUND)).await.expect("created");
    let uploading = tokio::spawn({
        let (clients, request) = (clients.clone(), request(&case.vm("up"), BROKEN, "i"));
        async move { clients.create(request).await }
    });
    let before = proxy.counts().to_server;
    eventually("the upload is on its way", LIMIT, || async {
        let sent = proxy.counts().to_server - before;
        if sent > 16 << 20 { Ok(()) } else { Err(format!("{sent} bytes")) }
    })
    .await;
    proxy.set(Fault::Stall);
    server.open_gate();
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let (clients, here) = (clients.clone(), here.clone());
            tokio::spawn(async move { clients.get(&id(BROKEN, &here), &uid_of(&here)).await })
        })
        .collect();
    // the other host answers while all of these wait
    for _ in 0..10 {
        clients.get(&format!("hosts/{SOUND}/domains/{there}"), &uid_of(&there)).await.expect("the sound host");
    }
    assert!(waiting.iter().all(|w| !w.is_finished()), "the sound host had to wait for the silent one");
    // keepalive and call budget bound the wait; the bound of this test is far above both
    let released = async {
        for call in waiting {
            let status = call.await.expect("the caller's task").expect_err("a silent host gives no answer");
            assert!(lab_tests::Refusal::of(&status).reason.class() == egress_provider_proto::v1::ErrorClass::Transient, "{status:?}");
        }
        let status = uploading.await.expect("the caller's task").expect_err("a silent host takes no upload");
        assert!(lab_tests::Refusal::of(&status).reason.class() == egress_provider_proto::v1::ErrorClass::Transient, "{status:?}");
    };
    tokio::time::timeout(Duration::from_secs(100), released).await.expect("every caller comes back");
    proxy.set(Fault::Pass);
    eventually("the host is used again", LIMIT, || async {
        clients.get(&id(BROKEN, &here), &uid_of(&here)).await.map_err(|e| e.to_string())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_reads_nothing_of_an_unfinished_instance_is_listed_as_a_gap() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("gap", &[SOUND, BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let proxy = FaultProxy::to(format!("{}:{}", broken.address, broken.port)).await;
    let daemon = case.daemon(case.entry().via(BROKEN, proxy.addr())).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(case.request(&vm, SOUND)).await.expect("created");
    proxy.set(Fault::Refuse);
    let list = clients.list().await.expect("what can be listed");
    assert!(!list.complete, "{list:?}");
    assert_eq!(list.unreachable_hosts.iter().map(|h| h.host.as_str()).collect::<Vec<_>>(), [BROKEN]);
    assert!(list.instances.iter().any(|i| i.name == vm), "{list:?}");
    refused(clients.list_complete().await, Reason::ListingIncomplete);
    proxy.set(Fault::Pass);
    assert!(clients.list_complete().await.expect("complete again").complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_cut_in_the_middle_of_a_listing_fails_it_or_is_a_gap_and_never_shortens_it() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("cutlist", &[BROKEN]) else { return };
    let broken = case.host(BROKEN);
    let proxy = FaultProxy::to(format!("{}:{}", broken.address, broken.port)).await;
    let mut daemon = case.daemon(case.entry().via(BROKEN, proxy.addr())).await;
    let vms: Vec<_> = ["a", "b", "c", "d"].map(|n| case.vm(n)).into();
    for vm in &vms {
        daemon.clients().create(case.request(vm, BROKEN)).await.expect("created");
    }
    // a new daemon and its one link, whose bytes are counted from its start
    let linked = async |daemon: &mut Daemon| {
        daemon.kill();
        proxy.set(Fault::Pass);
        let before = proxy.counts().to_server;
        daemon.restart().await;
        refused(daemon.clients().get(&id(BROKEN, "absent"), "").await, Reason::InstanceNotFound);
        proxy.counts().to_server - before
    };
    linked(&mut daemon).await;
    let before = proxy.counts().to_server;
    daemon.clients().list_complete().await.expect("a listing");
    let whole = proxy.counts().to_server - before;
    let all = |list: &ListByTagResponse| list.complete && vms.iter().all(|vm| list.instances.iter().any(|i| &i.name == vm));
    let (mut failed, mut gaps) = (0, 0);
    for part in 1..=8 {
        for complete in [true, false] {
            let linked = linked(&mut daemon).await;
            let clients = daemon.clients();
            proxy.set(Fault::CutAfter(linked + whole * part / 9));
            if complete {
                match clients.list_complete().await {
                    Ok(list) => assert!(all(&list), "part {part}: {list:?}"),
                    failure => {
                        refused(failure, Reason::ListingIncomplete);
                        failed += 1;
                    }
                }
            } else {
                let list = clients.list().await.expect("what can be listed");
                if !list.complete {
                    assert_eq!(list.unreachable_hosts.iter().map(|h| h.host.as_str()).collect::<Vec<_>>(), [BROKEN]);
                    assert!(list.instances.is_empty(), "part {part}: half a host: {list:?}");
                    gaps += 1;
                } else {
                    assert!(all(&list), "part {part}: {list:?}");
                }
            }
        }
    }
    proxy.set(Fault::Pass);
    assert!(failed >= 3 && gaps >= 3, "the cuts met the listings: {failed} failed, {gaps} with a gap");
}

#[tokio::test(flavor = "multi_thread")]
async fn checks_and_failures_leave_no_thread_descriptor_or_session() {
    let _turn = alone(BROKEN).await;
    let Some(case) = Case::start("leak", &[BROKEN]) else { return };
    let broken: &Host = case.host(BROKEN);
    let daemon = case.daemon(case.entry()).await;
    let clients = daemon.clients();
    let failing = || CreateRequest {
        placement: Some(Placement { zone: BROKEN.into(), machine_type: "nano".into(), image: "gone".into(), ..Default::default() }),
        ..case.request(&case.vm("a"), BROKEN)
    };
    let round = async |n: usize| {
        for _ in 0..n {
            row(BROKEN, &clients).await;
            clients.create(failing()).await.expect_err("no such image");
            refused(clients.get(&id(BROKEN, "absent"), "").await, Reason::InstanceNotFound);
        }
    };
    // the first rounds fill pools and caches
    round(5).await;
    let usage = || lab_tests::counters::Usage::of(daemon.pid());
    let before = (usage(), lab_tests::counters::ssh_sessions(broken).len());
    round(20).await;
    eventually("what grew is given back", LIMIT, || async {
        let after = (usage(), lab_tests::counters::ssh_sessions(broken).len());
        let grown = after.0.threads > before.0.threads + 2 || after.0.descriptors > before.0.descriptors || after.1 > before.1;
        if grown { Err(format!("{before:?} became {after:?}")) } else { Ok(()) }
    })
    .await;
}
