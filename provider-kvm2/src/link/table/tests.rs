use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use russh::keys::ssh_key::LineEnding;
use russh::keys::{Algorithm, PrivateKey};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

use super::*;
use crate::config::{DigestPolicy, Entry, GuestAgent, Host, HostKeys, NetworkConfig, PoolReserve, UrlPolicy, VirtType};
use crate::hypervisor::Budgets;

/// Something that listens where an sshd should, and counts who comes.
struct Listener {
    port: u16,
    connections: Arc<AtomicUsize>,
    came: Arc<Notify>,
}

#[derive(Clone, Copy)]
enum Manner {
    Silent,
    ClosesAtOnce,
    Says(&'static [u8]),
}

async fn listen(manner: Manner) -> Listener {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let (connections, came) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, notify) = (connections.clone(), came.clone());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            notify.notify_one();
            tokio::spawn(serve(stream, manner));
        }
    });
    Listener { port, connections, came }
}

async fn serve(mut stream: TcpStream, manner: Manner) {
    match manner {
        Manner::Silent => {}
        Manner::ClosesAtOnce => return,
        Manner::Says(bytes) => {
            let _ = stream.write_all(bytes).await;
        }
    }
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
}

fn config(dir: &tempfile::TempDir, port: u16, dial: Duration) -> Config {
    let key_file = dir.path().join("key");
    if !key_file.exists() {
        let key = PrivateKey::random(&mut russh::keys::key::safe_rng(), Algorithm::Ed25519).expect("random key");
        std::fs::write(&key_file, key.to_openssh(LineEnding::LF).expect("encodes").as_bytes()).expect("writes");
    }
    let host = Host {
        name: "hv1".to_owned(),
        address: "127.0.0.1".to_owned(),
        port,
        user: "user".to_owned(),
        socket: "/run/libvirt/libvirt-sock".to_owned(),
        pool: "default".to_owned(),
        bridge: "br0".to_owned(),
    };
    let entry = Entry {
        name: "lab".to_owned(),
        ssh_key_file: key_file,
        host_keys: HostKeys::Ignored,
        disk_size_gib: 1,
        vendor_data: None,
        guest_agent: GuestAgent::Leave,
        network_config: NetworkConfig::Omitted,
        images: BTreeMap::new(),
        machine_types: BTreeMap::new(),
        hosts: vec![host],
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".to_owned(),
        machine: "q35".to_owned(),
        pool_reserve: PoolReserve::FivePercent,
        max_image_bytes: 1,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Budgets { dial, ..Budgets::default() },
        warnings: Vec::new(),
    };
    Config { entries: vec![Arc::new(entry)] }
}

fn hv1() -> HostId {
    HostId { entry: "lab".to_owned(), host: "hv1".to_owned() }
}

struct Fixture {
    _dir: tempfile::TempDir,
    listener: Listener,
    table: Arc<HostTable>,
    metrics: Metrics,
}

async fn fixture(manner: Manner, dial: Duration) -> Fixture {
    let dir = tempfile::tempdir().expect("temporary directory");
    let listener = listen(manner).await;
    let metrics = Metrics::new();
    let table = HostTable::new(ConfigHandle::fixed(config(&dir, listener.port, dial)), metrics.clone());
    Fixture { _dir: dir, listener, table, metrics }
}

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_silent_host_is_unreachable_within_the_budget_and_the_stage_is_named() {
    let f = fixture(Manner::Silent, SHORT).await;
    let e = f.table.dedicated(&hv1()).await.expect_err("no answer");
    assert_eq!((e.reason(), e.host()), (Reason::HostUnreachable, Some("hv1")));
    assert!(e.message().contains("SSH handshake"), "{}", e.message());
    assert_eq!(e.metadata().get("stage").map(String::as_str), Some("SSH handshake"));
    let text = f.metrics.encode();
    assert!(text.contains("event=\"dial_failed\"} 1") && !text.contains("event=\"dropped\""), "{text}");
}

#[tokio::test]
async fn callers_of_one_failing_dial_share_its_error_and_the_next_caller_dials_again() {
    let f = fixture(Manner::Silent, SHORT).await;
    let host = hv1();
    for result in join_all((0..20).map(|_| f.table.control(&host))).await {
        assert_eq!(result.expect_err("no answer").reason(), Reason::HostUnreachable);
    }
    assert_eq!(f.listener.connections.load(Ordering::SeqCst), 1);
    f.table.control(&host).await.expect_err("no answer either");
    assert_eq!(f.listener.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_end_the_dial_of_the_others() {
    let f = fixture(Manner::Silent, SHORT).await;
    let host = hv1();
    let mut leaver = Box::pin(f.table.control(&host));
    tokio::select! {
        biased;
        _ = &mut leaver => panic!("too early"),
        () = f.listener.came.notified() => {}
    }
    let stayer = f.table.control(&host);
    drop(leaver);
    assert_eq!(stayer.await.expect_err("no answer").reason(), Reason::HostUnreachable);
    assert_eq!(f.listener.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_throttling_sshd_is_tried_again_within_the_budget() {
    // room for more than one try on a machine that has much else to do
    let f = fixture(Manner::ClosesAtOnce, Duration::from_secs(5)).await;
    let e = f.table.dedicated(&hv1()).await.expect_err("never served");
    assert_eq!(e.reason(), Reason::SshThrottled);
    assert!(e.is_transient());
    assert!(f.listener.connections.load(Ordering::SeqCst) > 1);
}

#[tokio::test]
async fn what_is_no_ssh_server_is_said_to_be_none() {
    let f = fixture(Manner::Says(&[b'x'; 600]), LONG).await;
    let e = f.table.dedicated(&hv1()).await.expect_err("no SSH");
    assert_eq!(e.reason(), Reason::HostIncompatible);
}

#[tokio::test]
async fn a_broken_handshake_ends_without_a_panic() {
    // a banner, then a packet whose length is absurd
    let f = fixture(Manner::Says(b"SSH-2.0-x\r\n\xff\xff\xff\xff\x04garbage"), LONG).await;
    let e = f.table.dedicated(&hv1()).await.expect_err("no key exchange");
    assert_eq!(e.reason(), Reason::HostIncompatible);
}

#[tokio::test]
async fn at_most_three_dials_of_a_host_run_at_a_time() {
    let f = fixture(Manner::Silent, LONG).await;
    let host = hv1();
    let mut dials = Box::pin(join_all((0..8).map(|_| f.table.dedicated(&host))));
    let connections = || f.listener.connections.load(Ordering::SeqCst);
    // a fourth has every chance to come: its place is given to other tasks again and again
    let mut chances = 20_000;
    while chances > 0 {
        tokio::select! {
            biased;
            _ = &mut dials => panic!("nobody answers"),
            () = tokio::task::yield_now() => {}
        }
        assert!(connections() <= DIALS_PER_HOST, "{} at a time", connections());
        if connections() == DIALS_PER_HOST {
            chances -= 1;
        }
    }
}

#[tokio::test]
async fn a_shutdown_ends_a_dial_and_refuses_the_next() {
    let f = fixture(Manner::Silent, LONG).await;
    let table = f.table.clone();
    let dial = tokio::spawn(async move { table.control(&hv1()).await.map(drop) });
    f.listener.came.notified().await;
    f.table.shutdown().await;
    assert_eq!(dial.await.expect("no panic").expect_err("ended").reason(), Reason::ShuttingDown);
    assert_eq!(f.table.control(&hv1()).await.expect_err("stopped").reason(), Reason::ShuttingDown);
}

#[tokio::test]
async fn a_host_that_moved_is_dialled_at_its_new_address_and_a_removed_one_is_not() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let (old, new) = (listen(Manner::Says(&[b'x'; 600])).await, listen(Manner::Says(&[b'x'; 600])).await);
    let (sender, receiver) = watch::channel(Arc::new(config(&dir, old.port, LONG)));
    let table = HostTable::new(ConfigHandle::new(receiver), Metrics::new());
    table.control(&hv1()).await.expect_err("no SSH");
    sender.send_replace(Arc::new(config(&dir, new.port, LONG)));
    table.control(&hv1()).await.expect_err("no SSH");
    assert_eq!((old.connections.load(Ordering::SeqCst), new.connections.load(Ordering::SeqCst)), (1, 1));
    sender.send_replace(Arc::new(Config { entries: Vec::new() }));
    assert_eq!(table.control(&hv1()).await.expect_err("gone").reason(), Reason::HostNotConfigured);
}
