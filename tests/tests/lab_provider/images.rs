//! Base images on a real host: verified, never mixed, never replaced, and refused when they do not fit.

use std::path::Path;
use std::time::{Duration, Instant};

use egress_provider_proto::v1::{CreateRequest, ErrorReason as Reason, StateReason};
use lab_tests::case::{request, uid_of};
use lab_tests::clients::seconds;
use lab_tests::lab::Host;
use lab_tests::scratch::{ScratchImage, sha256_of};
use lab_tests::{Answer, Case, ImageServer, eventually, lockup, refused};
use serde_json::json;

use crate::{BROKEN_TOO, alone};

const HOST: &str = "hv2";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(90);

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

/// The base that the disk of a VM backs onto, by name.
fn base_of(host: &Host, vm: &str) -> String {
    let xml = host.virsh(&["vol-dumpxml", &format!("{vm}.qcow2"), "--pool", "default"]);
    let backing = xml.split("<backingStore>").nth(1).unwrap_or_else(|| panic!("no backing file in {xml}"));
    let path = backing.split("<path>").nth(1).and_then(|rest| rest.split("</path>").next()).expect("a path of the backing file");
    Path::new(path).file_name().expect("a file name").to_string_lossy().into_owned()
}

/// Complete bases of the test's entry, i.e. those that have a marker.
fn complete_bases(case: &Case, host: &str) -> Vec<String> {
    case.bases(host).iter().filter_map(|v| v.strip_suffix(".sha256")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_digest_makes_another_base_and_old_vms_keep_theirs() {
    let Some(case) = Case::start("changed", &[HOST]) else { return };
    let (first, second) = (ScratchImage::filled(case.dir(), "1.qcow2", 2, 1), ScratchImage::filled(case.dir(), "2.qcow2", 2, 2));
    let server = ImageServer::start().await;
    server.serve("i.qcow2", first.bytes(), [Answer::Whole]);
    let entry = |sha256: &str| {
        case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": sha256, "format": "qcow2", "firmware": "bios" }))
    };
    let mut daemon = case.daemon(entry(&first.sha256)).await;
    let host = case.host(HOST);
    let (old, new) = (case.vm("old"), case.vm("new"));
    daemon.clients().create(request(&old, HOST, "i")).await.expect("created");
    let old_base = base_of(host, &old);
    daemon.kill();

    server.serve("i.qcow2", second.bytes(), [Answer::Whole]);
    let daemon = case.daemon_in("e", entry(&second.sha256)).await;
    daemon.clients().create(request(&new, HOST, "i")).await.expect("created");
    let new_base = base_of(host, &new);
    assert_ne!(old_base, new_base);
    assert_eq!(base_of(host, &old), old_base);
    assert_eq!(sha256_of(&host.volume_path("default", &old_base)), first.sha256);
    assert_eq!(sha256_of(&host.volume_path("default", &new_base)), second.sha256);
    // the old VM still boots from its own
    host.virsh(&["destroy", &old]);
    host.virsh(&["start", &old]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistyped_digest_is_one_refused_download_and_touches_nothing() {
    let Some(case) = Case::start("mistyped", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 2, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::Whole]);
    let description = |sha256: &str| json!({ "url": server.url("i.qcow2"), "sha256": sha256, "format": "qcow2", "firmware": "bios" });
    let mistyped = "0".repeat(64);
    let entry = case.entry().image("good", description(&image.sha256)).image("bad", description(&mistyped));
    let daemon = case.daemon(entry).await;
    let clients = daemon.clients();
    clients.create(request(&case.vm("good"), HOST, "good")).await.expect("created");
    let before = case.bases(HOST);
    let bad = case.vm("bad");
    let refusal = refused(clients.create(request(&bad, HOST, "bad")).await, Reason::DigestMismatch);
    assert!(refusal.message.contains(&mistyped) && refusal.message.contains(&image.sha256), "both digests: {}", refusal.message);
    assert_eq!(case.bases(HOST), before);
    assert!(case.left(HOST).iter().all(|name| !name.starts_with(&bad)), "{:?}", case.left(HOST));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_smaller_than_the_image_is_refused_before_anything_is_left() {
    let Some(case) = Case::start("small", &[HOST]) else { return };
    let image = ScratchImage::qcow2(case.dir(), "i.qcow2", "4G");
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::Whole]);
    let entry = case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let daemon = case.daemon(entry).await;
    let vm = case.vm("a");
    for _ in 0..2 {
        let refusal = refused(daemon.clients().create(request(&vm, HOST, "i")).await, Reason::DiskTooSmall);
        assert!(refusal.message.contains("4294967296") || refusal.message.contains("4 GiB"), "the image's size: {}", refusal.message);
        assert!(refusal.message.contains("1073741824") || refusal.message.contains("1 GiB"), "the disk's size: {}", refusal.message);
        assert_eq!(case.left(HOST), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_safe_image_of_the_declared_format_is_refused_and_leaves_nothing() {
    let Some(case) = Case::start("unsafe", &[HOST]) else { return };
    let server = ImageServer::start().await;
    let plain = ScratchImage::qcow2(case.dir(), "plain.qcow2", "16M").bytes();
    let backed = ScratchImage::with_backing_file(case.dir(), "backed.qcow2", "/etc/passwd").bytes();
    server.serve("backed", backed, [Answer::Whole]);
    server.serve("raw", vec![b'x'; 1 << 20], [Answer::Whole]);
    server.serve("html", Vec::new(), [Answer::Html]);
    server.serve("gzip", plain.clone(), [Answer::ContentEncodingGzip]);
    server.serve("gone", Vec::new(), [Answer::Status(404, vec![])]);
    server.serve("forbidden", Vec::new(), [Answer::Status(403, vec![])]);
    server.serve("busy", Vec::new(), [Answer::Status(503, vec![("Retry-After", "7".into())])]);
    server.serve("longer", plain.clone(), [Answer::Announced(plain.len() as u64 - 512)]);
    let cases = [
        ("backed", vec![Reason::ImageUnsafe]),
        ("raw", vec![Reason::ImageFormatMismatch]),
        ("html", vec![Reason::ImageFormatMismatch]),
        ("gzip", vec![Reason::ImageFormatMismatch, Reason::ImageSourceBroken]),
        ("gone", vec![Reason::ImageNotFound]),
        ("forbidden", vec![Reason::ImageForbidden]),
        ("busy", vec![Reason::ImageSourceUnavailable]),
    ];
    let mut entry = case.entry();
    for (path, _) in &cases {
        entry = entry.image(path, json!({ "url": server.url(path), "firmware": "bios" }));
    }
    let daemon = case.daemon(entry).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let libvirtd = host.pid("libvirtd");
    for (path, reasons) in cases {
        let vm = case.vm(path);
        let status = clients.create(request(&vm, HOST, path)).await.expect_err(path);
        let refusal = lab_tests::Refusal::of(&status);
        assert!(reasons.contains(&refusal.reason), "{path}: {refusal:?}");
        clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
    assert_eq!(case.bases(HOST), Vec::<String>::new());
    assert_eq!(host.pid("libvirtd"), libvirtd, "libvirtd lives on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_breaks_off_is_resumed_where_it_broke() {
    let Some(case) = Case::start("resume", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 4, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::Truncated(1 << 20), Answer::ResetAt(2 << 20), Answer::Whole]);
    let entry = case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let daemon = case.daemon(entry).await;
    daemon.clients().create(request(&case.vm("a"), HOST, "i")).await.expect("created");
    let gets: Vec<_> = server.seen().into_iter().filter(|s| s.method == "GET").collect();
    assert_eq!(gets.len(), 3, "{gets:?}");
    assert_eq!(gets[1].range.as_deref(), Some("bytes=1048576-"));
    assert!(gets[1].if_range.is_some(), "a changed image must not be stitched to the old one: {:?}", gets[1]);
    let [base] = &complete_bases(&case, HOST)[..] else { panic!("{:?}", case.bases(HOST)) };
    assert_eq!(sha256_of(&case.host(HOST).volume_path("default", base)), image.sha256);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_refused_or_wrong_is_no_verdict() {
    let Some(case) = Case::start("head", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 1, 1);
    let server = ImageServer::start().await;
    for (path, head) in [("a", Answer::Status(405, vec![])), ("b", Answer::Status(403, vec![])), ("c", Answer::Announced(0))] {
        server.serve(path, image.bytes(), [Answer::Whole]);
        server.set_head(path, head);
    }
    let describe = |path: &str| json!({ "url": server.url(path), "sha256": image.sha256, "firmware": "bios" });
    let entry = case.entry().image("a", describe("a")).image("b", describe("b")).image("c", describe("c"));
    let daemon = case.daemon(entry).await;
    for path in ["a", "b", "c"] {
        daemon.clients().create(request(&case.vm(path), HOST, path)).await.expect(path);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_on_a_cold_cache_each_boot_from_a_whole_base() {
    let Some(case) = Case::start("race", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 8, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::GateAt(3 << 20)]);
    let entry = || case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let (one, two) = (case.daemon_in("one", entry()).await, case.daemon_in("two", entry()).await);
    let (a, b) = (case.vm("a"), case.vm("b"));
    let creating = [(&one, &a), (&two, &b)].map(|(daemon, vm)| {
        let (clients, request) = (daemon.clients(), request(vm, HOST, "i"));
        tokio::spawn(async move { clients.create(request).await })
    });
    eventually("part of a base is on the host", LIMIT, || async {
        if case.bases(HOST).iter().any(|v| v.ends_with(".qcow2")) { Ok(()) } else { Err(format!("{:?}", case.bases(HOST))) }
    })
    .await;
    // one that finds the part, and does not take it for the whole
    let (late, c) = (case.daemon_in("late", entry()).await, case.vm("c"));
    let creating_late = {
        let (clients, request) = (late.clients(), request(&c, HOST, "i"));
        tokio::spawn(async move { clients.create(request).await })
    };
    for (daemon, vm) in [(&one, &a), (&two, &b), (&late, &c)] {
        eventually("it waits for the image", LIMIT, || async {
            let instance = daemon.clients().get(&id(vm), &uid_of(vm)).await.map_err(|e| e.to_string())?;
            if instance.state_reason() == StateReason::ImagePull { Ok(()) } else { Err(format!("{:?}", instance.state_reason())) }
        })
        .await;
    }
    server.open_gate();
    for create in creating.into_iter().chain([creating_late]) {
        create.await.expect("the caller's task").expect("created");
    }
    let host = case.host(HOST);
    for vm in [&a, &b, &c] {
        assert_eq!(sha256_of(&host.volume_path("default", &base_of(host, vm))), image.sha256);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_daemon_killed_in_a_pull_left_is_never_booted_from() {
    // libvirtd may lock itself up when its client goes in an upload
    const HOST: &str = BROKEN_TOO;
    let _turn = alone(HOST).await;
    let Some(case) = Case::start("killed", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 8, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::GateAt(3 << 20), Answer::Whole]);
    let entry = case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let mut daemon = case.daemon(entry).await;
    let vm = case.vm("a");
    let no_wait = CreateRequest { max_wait: seconds(0), ..request(&vm, HOST, "i") };
    daemon.clients().create(no_wait).await.expect_err("unfinished");
    eventually("part of the base is on the host", LIMIT, || async {
        if case.bases(HOST).iter().any(|v| v.ends_with(".qcow2")) { Ok(()) } else { Err(format!("{:?}", case.bases(HOST))) }
    })
    .await;
    let partial = case.bases(HOST).into_iter().find(|v| v.ends_with(".qcow2")).expect("the partial base");
    daemon.kill();
    lockup::mended(case.host(HOST), Instant::now());
    assert_eq!(complete_bases(&case, HOST), Vec::<String>::new(), "a base without its marker");
    daemon.restart().await;
    // a repeated Create is how a caller waits for a pull that takes long
    eventually("the instance is made", Duration::from_secs(150), || async {
        daemon.clients().create(request(&vm, HOST, "i")).await.map_err(|e| e.to_string())
    })
    .await;
    let host = case.host(HOST);
    let base = base_of(host, &vm);
    assert_ne!(base, partial);
    assert_eq!(sha256_of(&host.volume_path("default", &base)), image.sha256);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_by_url_is_fetched_only_where_policy_allows() {
    let Some(case) = Case::start("url", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 1, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::Whole]);
    server.serve("away", Vec::new(), [Answer::Redirect(302, "http://169.254.169.254/latest/meta-data".into())]);
    let (plain, away) = (server.url("i.qcow2"), server.url("away"));
    let daemon = case.daemon(case.entry()).await;
    refused(daemon.clients().create(request(&case.vm("a"), HOST, &plain)).await, Reason::ImageUrlForbidden);
    assert_eq!(server.seen(), [], "not even asked");
    drop(daemon);
    let daemon = case.daemon_in("open", case.entry().set("urlPolicy", json!({ "allow": ["127.0.0.1"] }))).await;
    let clients = daemon.clients();
    clients.create(request(&case.vm("a"), HOST, &plain)).await.expect("an allowed mirror");
    refused(clients.create(request(&case.vm("b"), HOST, &away)).await, Reason::ImageUrlForbidden);
    clients.delete(&id(&case.vm("b")), &uid_of(&case.vm("b"))).await.expect("deleted");
}

/// Failed uploads of each kind, after those that fill pools and caches.
const ROUNDS: usize = 12;
const WARM_UP: usize = 3;

/// What memory may vary by between two looks; the uploads together are many times that.
const RESIDENT_KIB: u64 = 16 << 10;

/// A link that is cut in an upload is not among them: libvirtd 11.3 may then lock itself up, whoever the client is (see
/// the ledger, H2), and the other tests of the host with it.
#[tokio::test(flavor = "multi_thread")]
async fn failed_uploads_of_every_kind_leave_libvirtd_alive_and_the_daemon_as_it_was() {
    let Some(case) = Case::start("fails", &[HOST]) else { return };
    let host = case.host(HOST);
    let libvirtd = host.pid("libvirtd");
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 4, 1);
    let server = ImageServer::start().await;
    let describe = |path: &str, sha256: &str| json!({ "url": server.url(path), "sha256": sha256, "firmware": "bios" });
    let mut entry = case.entry();
    for key in ["cut", "gone"] {
        entry = entry.image(key, describe(key, &image.sha256));
    }
    // a digest that was found wrong is remembered, so each round has its own
    for n in 0..WARM_UP + ROUNDS {
        entry = entry.image(&format!("wrong{n}"), describe("wrong", &format!("{n:064x}")));
    }
    let daemon = case.daemon(entry).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    let create = async |key: &str| clients.create(request(&vm, HOST, key)).await;
    let partial = || case.bases(HOST).into_iter().find(|v| v.ends_with(".qcow2"));
    let round = async |n: usize| {
        // the source breaks off and does not come back
        server.serve("cut", image.bytes(), [Answer::Truncated(2 << 20), Answer::Status(404, vec![])]);
        create("cut").await.expect_err("a source that breaks");

        server.serve("wrong", image.bytes(), [Answer::Whole]);
        refused(create(&format!("wrong{n}")).await, Reason::DigestMismatch);

        // somebody deletes the volume under the upload
        server.close_gate();
        server.serve("gone", image.bytes(), [Answer::GateAt(2 << 20)]);
        let delete = async {
            let volume = eventually("the upload has its volume", LIMIT, || async { partial().ok_or_else(|| "none".to_owned()) }).await;
            host.delete_volume("default", &volume);
            server.open_gate();
        };
        let (created, ()) = tokio::join!(create("gone"), delete);
        created.expect_err("an image whose volume is gone");
    };
    for n in 0..WARM_UP {
        round(n).await;
    }
    let usage = || lab_tests::counters::Usage::of(daemon.pid());
    let before = usage();
    for n in WARM_UP..WARM_UP + ROUNDS {
        round(n).await;
    }
    eventually("what grew is given back", LIMIT, || async {
        let after = usage();
        let grown = after.threads > before.threads + 2
            || after.descriptors > before.descriptors + 2
            || after.resident_kib > before.resident_kib + RESIDENT_KIB;
        if grown { Err(format!("{before:?} became {after:?}")) } else { Ok(()) }
    })
    .await;
    assert_eq!((case.bases(HOST), case.left(HOST)), (Vec::new(), vec![vm.clone()]), "an unfinished domain, for the next Create");
    clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    assert_eq!(host.pid("libvirtd"), libvirtd);
    assert!(libvirtd.is_some_and(lab_tests::counters::is_alive), "libvirtd has died");
}
