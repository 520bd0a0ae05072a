//! Links against a real sshd and a real libvirtd: the lab, found through KVM2_LAB.
//!
//! The tests stop, freeze and misconfigure things, so they hold a lock on the lab.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use provider_kvm2::config::{
    Config, ConfigHandle, DigestPolicy, Entry, GuestAgent, Host, HostKeys, NetworkConfig, PoolReserve, UrlPolicy, VirtType,
};
use provider_kvm2::error::{ProviderError, Reason};
use provider_kvm2::hypervisor::{
    Budgets, CallError, CallFailure, Connect, HostId, Hypervisor, PoolInfo, PoolRef, UploadPart, VolumeRef, code,
};
use provider_kvm2::link::HostTable;
use provider_kvm2::telemetry::metrics::Metrics;
use serde_json::Value;
use tokio::sync::mpsc;

const MIB: u64 = 1 << 20;

struct Lab {
    description: Value,
    _lock: File,
}

/// None, with the reason printed, where there is no lab.
fn lab() -> Option<Lab> {
    let Some(dir) = std::env::var_os("KVM2_LAB").map(PathBuf::from) else {
        println!("skipped: KVM2_LAB is not set; run tests/lab/up and point it at the lab's directory");
        return None;
    };
    let text = std::fs::read_to_string(dir.join("lab.json")).expect("KVM2_LAB names a directory with a lab.json");
    let lock = File::create(dir.join("link-tests.lock")).expect("the lab's directory can be written to");
    lock.lock().expect("a lock");
    Some(Lab { description: serde_json::from_str(&text).expect("lab.json is JSON"), _lock: lock })
}

impl Lab {
    fn text(&self, pointer: &str) -> String {
        self.description.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("lab.json has {pointer}")).to_owned()
    }

    fn number(&self, pointer: &str) -> u64 {
        self.description.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("lab.json has {pointer}"))
    }

    fn entry(&self) -> Entry {
        let host = |i: usize| Host {
            name: self.text(&format!("/hosts/{i}/name")),
            address: self.text(&format!("/hosts/{i}/address")),
            port: u16::try_from(self.number(&format!("/hosts/{i}/port"))).expect("a port"),
            user: self.text(&format!("/hosts/{i}/user")),
            socket: self.text(&format!("/hosts/{i}/socket")),
            pool: self.text(&format!("/hosts/{i}/pool")),
            bridge: self.text(&format!("/hosts/{i}/bridge")),
        };
        Entry {
            name: "lab".to_owned(),
            ssh_key_file: self.text("/id_ed25519").into(),
            host_keys: HostKeys::KnownHosts(self.text("/known_hosts").into()),
            disk_size_gib: 3,
            vendor_data: None,
            guest_agent: GuestAgent::Leave,
            network_config: NetworkConfig::Written,
            images: BTreeMap::new(),
            machine_types: BTreeMap::new(),
            hosts: vec![host(0), host(1)],
            virt_type: VirtType::Qemu,
            cpu_mode: "maximum".to_owned(),
            machine: "q35".to_owned(),
            pool_reserve: PoolReserve::FivePercent,
            max_image_bytes: 1 << 30,
            url_policy: UrlPolicy::default(),
            digests: DigestPolicy::Optional,
            budgets: Budgets::default(),
            warnings: Vec::new(),
        }
    }

    fn table(&self) -> Arc<HostTable> {
        table(self.entry())
    }

    /// Breaks or mends the first host.
    fn host(&self, action: &str) -> String {
        self.host_with(action, &[])
    }

    fn host_with(&self, action: &str, more: &[&str]) -> String {
        let tool = Path::new(&self.text("/tools_dir")).join("host");
        let id = self.number("/id").to_string();
        let output = Command::new(tool).args(["--id", &id, "hv1", action]).args(more).output().expect("the lab's tool runs");
        assert!(output.status.success(), "{action}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Of now: what the tests restart has another one than lab.json says.
    fn pid(&self, process: &str) -> String {
        let pids = self.host("pids");
        let pid = pids.lines().filter_map(|l| l.split_once(' ')).find(|(name, _)| *name == process);
        pid.unwrap_or_else(|| panic!("{process} runs")).1.trim().to_owned()
    }

    fn virsh(&self, args: &[&str]) -> String {
        let output = Command::new("virsh").arg("-c").arg(self.text("/hosts/0/uri")).args(args).output().expect("virsh runs");
        assert!(output.status.success(), "virsh {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Processes of sshd that serve one connection of `user` each.
    fn sessions(&self, user: &str) -> Vec<String> {
        let listener = self.pid("sshd");
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
            let path = entry.path();
            let title = std::fs::read(path.join("cmdline")).unwrap_or_default();
            let title = String::from_utf8_lossy(&title).into_owned();
            if title.starts_with(&format!("sshd: {user}")) && ancestors(&path).contains(&listener) {
                found.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        found
    }
}

fn ancestors(process: &Path) -> Vec<String> {
    let mut chain = Vec::new();
    let mut path = process.to_owned();
    for _ in 0..4 {
        let Ok(status) = std::fs::read_to_string(path.join("status")) else { break };
        let Some(parent) = status.lines().find_map(|l| l.strip_prefix("PPid:")).map(|p| p.trim().to_owned()) else { break };
        path = PathBuf::from("/proc").join(&parent);
        chain.push(parent);
    }
    chain
}

fn signal(pids: &[String], signal: &str) {
    let status = Command::new("kill").arg(format!("-{signal}")).args(pids).status().expect("kill runs");
    assert!(status.success());
}

fn table(entry: Entry) -> Arc<HostTable> {
    HostTable::new(ConfigHandle::fixed(Config { entries: vec![Arc::new(entry)] }), Metrics::new())
}

fn hv1() -> HostId {
    HostId { entry: "lab".to_owned(), host: "hv1".to_owned() }
}

async fn refused(entry: Entry) -> ProviderError {
    let table = table(entry);
    let e = table.control(&hv1()).await.map(|_| ()).expect_err("the dial fails");
    table.shutdown().await;
    e
}

fn volume_xml(name: &str, bytes: u64) -> String {
    format!(
        "<volume><name>{name}</name><capacity unit='bytes'>{bytes}</capacity><allocation unit='bytes'>{bytes}</allocation>\
         <target><format type='raw'/></target></volume>"
    )
}

/// A volume of this test, made anew.
async fn fresh_volume(link: &dyn Hypervisor, name: &str, bytes: u64) -> (PoolRef, VolumeRef) {
    let pool = link.lookup_pool("default").await.expect("the pool");
    if let Ok(old) = link.lookup_volume(&pool, name).await {
        link.delete_volume(&old).await.expect("deletes");
    }
    let volume = link.create_volume(&pool, &volume_xml(name, bytes)).await.expect("creates");
    (pool, volume)
}

async fn send_all(sender: mpsc::Sender<UploadPart>, bytes: u64) {
    let chunk = Bytes::from(vec![0xa5; MIB as usize]);
    let mut left = bytes;
    while left > 0 {
        let n = left.min(MIB);
        if sender.send(UploadPart::Data(chunk.slice(..n as usize))).await.is_err() {
            return;
        }
        left -= n;
    }
    let _ = sender.send(UploadPart::Finish).await;
}

fn counts() -> (usize, usize) {
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).expect("/proc").count();
    (count("task"), count("fd"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_answers_and_is_shared() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let started = Instant::now();
    let link = table.control(&hv1()).await.expect("dials");
    println!("link up in {:?}", started.elapsed());
    assert!(link.lib_version().await.expect("a version") >= 6_000_000);
    assert!(!link.hostname().await.expect("a name").is_empty());
    assert!(link.node_info().await.expect("info").cpus > 0);
    assert!(link.domain_capabilities("q35", "qemu").await.expect("capabilities").contains("<domainCapabilities>"));
    let again = table.control(&hv1()).await.expect("is there");
    assert!(Arc::ptr_eq(&link, &again));
    table.shutdown().await;
    assert!(!link.is_alive());
    let e = table.control(&hv1()).await.map(|_| ()).expect_err("stopped");
    assert_eq!(e.reason(), Reason::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_come_at_once_share_one_dial() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let host = hv1();
    let links = join_all((0..20).map(|_| table.control(&host))).await;
    let first = links[0].as_ref().expect("dials");
    assert!(links.iter().all(|l| l.as_ref().is_ok_and(|l| Arc::ptr_eq(l, first))));
    assert_eq!(lab.sessions("kvm2lab").len(), 2, "one connection has a monitor and a session process");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_calls_at_once_all_succeed() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    let started = Instant::now();
    for _ in 0..20 {
        for answer in join_all((0..30).map(|_| link.hostname())).await {
            answer.expect("an answer");
        }
    }
    println!("{:.0} calls/s", 600.0 / started.elapsed().as_secs_f64());
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn domains_and_volumes_live_their_life() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    let name = "link-test-life";
    let xml = format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"
    );
    if let Ok(old) = link.lookup_domain(name).await {
        let _ = link.destroy_domain(&old).await;
        link.undefine_domain(&old).await.expect("undefines");
    }
    let domain = link.define_domain(&xml).await.expect("defines");
    assert_eq!(link.lookup_domain(name).await.expect("finds").uuid, domain.uuid);
    assert!(link.list_domains().await.expect("lists").iter().any(|d| d.name == name));

    let uri = "urn:kvm2:test";
    assert_eq!(link.domain_metadata(&domain, uri).await.expect("reads"), None);
    link.set_domain_metadata(&domain, uri, "t", "<mark a='1'/>").await.expect("writes while stopped");
    link.start_domain(&domain).await.expect("starts");
    assert_eq!(link.domain_state(&domain).await.expect("a state").state, 1);
    assert!(link.start_domain(&domain).await.expect_err("runs already").is(code::OPERATION_INVALID));
    link.set_domain_metadata(&domain, uri, "t", "<mark a='2'/>").await.expect("writes while running");
    assert!(link.domain_metadata(&domain, uri).await.expect("reads").is_some_and(|m| m.contains("a=\"2\"")));
    assert!(link.domain_xml(&domain, true).await.expect("a document").contains("a=\"2\""));
    let marks = link.domains_metadata(&[domain.clone(), domain.clone()], uri).await.expect("the link stands");
    assert!(marks.iter().all(|m| m.as_ref().is_ok_and(|m| m.as_deref().is_some_and(|m| m.contains("a=\"2\"")))), "{marks:?}");
    assert!(matches!(link.domains_metadata(std::slice::from_ref(&domain), "urn:other").await.as_deref(), Ok([Ok(None)])));
    let agent = link.domain_interfaces(&domain, provider_kvm2::domain::addresses::AddressSource::Agent).await;
    assert!(agent.is_err(), "it has no agent");
    link.destroy_domain(&domain).await.expect("destroys");
    assert!(link.destroy_domain(&domain).await.expect_err("is off").is(code::OPERATION_INVALID));
    link.undefine_domain(&domain).await.expect("undefines");
    let e = ProviderError::from(link.lookup_domain(name).await.expect_err("is gone"));
    assert_eq!(e.reason(), Reason::InstanceNotFound);
    let marks = link.domains_metadata(&[domain], uri).await.expect("a domain that is gone is not the link's fault");
    assert!(matches!(&marks[..], [Err(e)] if e.is(code::NO_DOMAIN)), "{marks:?}");

    let content = b"sixty-four hex digits would stand here";
    let (pool, volume) = fresh_volume(&*link, "link-test-small", content.len() as u64).await;
    assert!(link.pool_info(&pool).await.expect("info").available > 0);
    assert!(link.pool_xml(&pool).await.expect("a document").contains("<target>"));
    let (sender, parts) = mpsc::channel(2);
    sender.send(UploadPart::Data(Bytes::from_static(content))).await.expect("room");
    sender.send(UploadPart::Finish).await.expect("room");
    let sent = link.upload(&volume, content.len() as u64, parts, Duration::from_secs(10)).await.expect("uploads");
    assert_eq!(sent, content.len() as u64);
    assert_eq!(&link.download(&volume, 1000).await.expect("downloads")[..], content);
    assert_eq!(&link.download(&volume, 5).await.expect("downloads")[..], &content[..5]);
    assert!(link.volume_key_is_in_pool(&volume));
    assert!(link.create_volume(&pool, &volume_xml("link-test-small", 10)).await.expect_err("exists").is(code::STORAGE_VOL_EXIST));
    link.refresh_pool(&pool).await.expect("refreshes");
    assert!(link.list_volumes(&pool).await.expect("lists").iter().any(|v| v.name == volume.name));
    link.delete_volume(&volume).await.expect("deletes");
    assert!(link.lookup_volume(&pool, "link-test-small").await.expect_err("is gone").is(code::NO_STORAGE_VOL));
    println!("bridge: {:?}, none: {:?}", link.has_interface("br0").await, link.has_interface("br9").await);
    table.shutdown().await;
}

trait InPool {
    fn volume_key_is_in_pool(&self, volume: &VolumeRef) -> bool;
}

impl InPool for Arc<dyn Hypervisor> {
    fn volume_key_is_in_pool(&self, volume: &VolumeRef) -> bool {
        volume.key.ends_with(&format!("/{}", volume.name))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_is_as_fast_as_the_cipher() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.dedicated(&hv1()).await.expect("dials");
    let bytes = 414 * MIB;
    for _ in 0..3 {
        let (_, volume) = fresh_volume(&*link, "link-test-big", bytes).await;
        let (sender, parts) = mpsc::channel(8);
        let source = tokio::spawn(send_all(sender, bytes));
        let started = Instant::now();
        assert_eq!(link.upload(&volume, bytes, parts, Duration::from_secs(120)).await.expect("uploads"), bytes);
        let took = started.elapsed().as_secs_f64();
        source.await.expect("the source ends");
        println!("upload: {:.2} s, {:.0} MB/s", took, bytes as f64 / 1e6 / took);
        link.delete_volume(&volume).await.expect("deletes");
    }
    link.close();
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_source_aborts_the_stream_and_libvirtd_lives() {
    let Some(lab) = lab() else { return };
    let libvirtd = lab.pid("libvirtd");
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    for round in 0..10 {
        let (_, volume) = fresh_volume(&*link, "link-test-bad", 4 * MIB).await;
        let (sender, parts) = mpsc::channel(8);
        for _ in 0..3 {
            sender.send(UploadPart::Data(Bytes::from(vec![1; MIB as usize]))).await.expect("room");
        }
        let mut expected = "aborted";
        match round % 3 {
            0 => sender.send(UploadPart::Abort).await.expect("room"),
            1 => drop(sender),
            _ => {
                expected = "announced";
                sender.send(UploadPart::Data(Bytes::from(vec![1; 2 * MIB as usize]))).await.expect("room");
                sender.send(UploadPart::Finish).await.expect("room");
            }
        }
        let e = link.upload(&volume, 4 * MIB, parts, Duration::from_secs(20)).await.expect_err("fails");
        assert!(e.kind.to_string().contains(expected), "{:?}", e.kind);
        link.delete_volume(&volume).await.expect("the link is as good as before");
    }
    assert!(link.is_alive());
    assert_eq!(lab.pid("libvirtd"), libvirtd, "libvirtd is still the same process");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_freezes_in_an_upload_releases_everybody_within_20_s() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    let (_, volume) = fresh_volume(&*link, "link-test-freeze", 414 * MIB).await;
    let (sender, parts) = mpsc::channel(8);
    let source = tokio::spawn({
        let sender = sender.clone();
        async move {
            let part = Bytes::from(vec![1; MIB as usize]);
            while sender.send(UploadPart::Data(part.clone())).await.is_ok() {}
        }
    });
    let upload = tokio::spawn({
        let (link, volume) = (link.clone(), volume.clone());
        async move { link.upload(&volume, 1 << 40, parts, Duration::from_secs(600)).await }
    });
    // the upload runs once parts are taken
    while sender.capacity() == 8 {
        tokio::task::yield_now().await;
    }
    let frozen = lab.sessions("kvm2lab");
    signal(&frozen, "STOP");
    let started = Instant::now();
    let calls: Vec<_> = (0..6)
        .map(|_| {
            tokio::spawn({
                let link = link.clone();
                async move { link.hostname().await }
            })
        })
        .collect();
    let released = tokio::time::timeout(Duration::from_secs(20), async {
        let upload = upload.await.expect("no panic").map(|_| ());
        let calls = join_all(calls).await;
        (upload, calls)
    });
    // nobody else waits for that host
    let other = table.control(&HostId { host: "hv2".to_owned(), ..hv1() }).await.expect("dials the other host");
    other.hostname().await.expect("answers");
    assert!(link.is_alive(), "the frozen link is still waited for");
    let (upload, calls) = released.await.expect("all callers are back within 20 s");
    println!("released after {:?}", started.elapsed());
    let dead = |e: &CallError| matches!(e.kind, CallFailure::LinkDead { .. });
    assert!(upload.is_err_and(|e| dead(&e)));
    assert!(calls.into_iter().all(|c| c.expect("no panic").is_err_and(|e| dead(&e))));
    source.await.expect("the source ends");
    // another link is dialled while the frozen sessions are still there
    let fresh = table.control(&hv1()).await.expect("redials");
    fresh.hostname().await.expect("answers");
    signal(&frozen, "CONT");
    fresh
        .delete_volume(&fresh.lookup_volume(&fresh.lookup_pool("default").await.expect("pool"), "link-test-freeze").await.expect("volume"))
        .await
        .expect("deletes");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_dies_wakes_its_callers_and_the_next_call_redials() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    link.hostname().await.expect("answers");
    signal(&lab.sessions("kvm2lab"), "KILL");
    while link.is_alive() {
        tokio::task::yield_now().await;
    }
    let e = ProviderError::from(link.hostname().await.expect_err("is dead"));
    assert_eq!(e.reason(), Reason::LinkLost);
    table.control(&hv1()).await.expect("redials").hostname().await.expect("answers");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_does_not_hurt_the_link() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    for _ in 0..50 {
        let call = tokio::time::timeout(Duration::from_micros(50), link.list_domains());
        let _ = call.await;
    }
    link.hostname().await.expect("answers");
    assert!(link.is_alive());
    let same = table.control(&hv1()).await.expect("is there");
    assert!(Arc::ptr_eq(&link, &same));
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_rsa_key_is_good_too() {
    let Some(lab) = lab() else { return };
    let mut entry = lab.entry();
    entry.ssh_key_file = lab.text("/id_rsa").into();
    let table = table(entry);
    table.control(&hv1()).await.expect("dials").hostname().await.expect("answers");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_known_by_its_rsa_key_alone_is_verified() {
    let Some(lab) = lab() else { return };
    let all = std::fs::read_to_string(lab.text("/known_hosts")).expect("reads");
    let dir = tempfile::tempdir().expect("temporary directory");
    let file = dir.path().join("known_hosts");
    let rsa: String = all.lines().filter(|l| l.contains("ssh-rsa")).map(|l| format!("{l}\n")).collect();
    assert!(!rsa.is_empty());
    std::fs::write(&file, rsa).expect("writes");
    let mut entry = lab.entry();
    entry.host_keys = HostKeys::KnownHosts(file);
    let table = table(entry);
    table.control(&hv1()).await.expect("dials").hostname().await.expect("answers");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_its_own_reason() {
    let Some(lab) = lab() else { return };
    let dir = tempfile::tempdir().expect("temporary directory");
    let known = std::fs::read_to_string(lab.text("/known_hosts")).expect("reads");
    let with_known_hosts = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("writes");
        let mut entry = lab.entry();
        entry.host_keys = HostKeys::KnownHosts(path);
        entry
    };
    let with_host = |change: &dyn Fn(&mut Host)| {
        let mut entry = lab.entry();
        change(&mut entry.hosts[0]);
        entry
    };
    let strange = dir.path().join("strange");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&strange).status().expect("ssh-keygen runs");
    assert!(made.success());
    let strange_public = std::fs::read_to_string(strange.with_extension("pub")).expect("reads");
    let name = known.split_whitespace().next().expect("a line").to_owned();
    let mut wrong_key = lab.entry();
    wrong_key.ssh_key_file = strange;
    let mut no_key = lab.entry();
    no_key.ssh_key_file = dir.path().join("nothing");

    let cases = [
        ("wrong key", wrong_key, Reason::SshAuthRejected),
        ("no key file", no_key, Reason::CredentialsUnavailable),
        ("empty known_hosts", with_known_hosts("empty", String::new()), Reason::HostKeyUnknown),
        ("other host key", with_known_hosts("changed", format!("{name} {strange_public}")), Reason::HostKeyChanged),
        ("revoked", with_known_hosts("revoked", known.lines().map(|l| format!("{l}\n@revoked {l}\n")).collect()), Reason::HostKeyRevoked),
        ("closed port", with_host(&|h| h.port = 1), Reason::HostUnreachable),
        ("socket missing, no shell", with_host(&|h| h.socket = "/run/libvirt/nothing".to_owned()), Reason::SocketUnavailable),
        (
            "socket missing",
            with_host(&|h| {
                h.user = lab.text("/hosts/0/exec_user");
                h.socket = "/run/libvirt/nothing".to_owned();
            }),
            Reason::SocketMissing,
        ),
        ("socket denied", with_host(&|h| h.user = lab.text("/hosts/0/denied_user")), Reason::SocketUnavailable),
    ];
    for (case, entry, expected) in cases {
        let e = refused(entry).await;
        println!("{case}: {e:?}");
        if case.starts_with("socket") && e.reason() == Reason::SocketDenied {
            continue;
        }
        assert_eq!(e.reason(), expected, "{case}: {e:?}");
        assert_eq!(e.host(), Some("hv1"), "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_links_leave_no_thread_no_descriptor_and_no_socket() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let one = async || {
        let link = table.dedicated(&hv1()).await.expect("dials");
        link.hostname().await.expect("answers");
        link.close();
        while link.is_alive() {
            tokio::task::yield_now().await;
        }
    };
    for _ in 0..5 {
        one().await;
    }
    let before = settled().await;
    for _ in 0..50 {
        one().await;
    }
    let after = settled().await;
    println!("threads and descriptors: {before:?} before, {after:?} after");
    // the margin is for a test of this process that begins or ends meanwhile; one thread or file lost per link is far more
    assert!(after.0 <= before.0 + 10, "threads: {before:?} {after:?}");
    assert!(after.1 <= before.1 + 10, "descriptors: {before:?} {after:?}");
    table.shutdown().await;
    let left = std::fs::read_dir(std::env::temp_dir()).expect("reads").flatten();
    assert!(!left.into_iter().any(|e| e.file_name().to_string_lossy().starts_with("kvm2-")), "no socket directory is left");
}

/// Waits until the descriptors of closed links are gone.
async fn settled() -> (usize, usize) {
    let mut last = counts();
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = counts();
        if now == last {
            return now;
        }
        last = now;
    }
    last
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_host_is_said_to_be_not_configured() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let e = table.control(&HostId { entry: "lab".to_owned(), host: "gone".to_owned() }).await.map(|_| ()).expect_err("is not there");
    assert_eq!(e.reason(), Reason::HostNotConfigured);
    assert!(!lab.virsh(&["version"]).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_restarts_costs_one_link_and_no_more() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    for _ in 0..3 {
        let link = table.control(&hv1()).await.expect("dials");
        link.hostname().await.expect("answers");
        lab.host("restart-libvirtd");
        while link.is_alive() {
            tokio::task::yield_now().await;
        }
        let e = ProviderError::from(link.hostname().await.expect_err("is dead"));
        assert_eq!(e.reason(), Reason::LinkLost);
    }
    table.control(&hv1()).await.expect("redials").hostname().await.expect("answers");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_libvirtd_that_hangs_costs_the_budget_of_the_call() {
    let Some(lab) = lab() else { return };
    let mut entry = lab.entry();
    entry.budgets.call = Duration::from_secs(2);
    let table = table(entry);
    let link = table.control(&hv1()).await.expect("dials");
    lab.host("freeze-libvirtd");
    let results = join_all((0..8).map(|_| link.hostname())).await;
    lab.host("thaw-libvirtd");
    for result in results {
        let e = ProviderError::from(result.expect_err("no answer"));
        assert!(matches!(e.reason(), Reason::CallTimeout | Reason::LinkLost), "{e:?}");
    }
    assert!(!link.is_alive());
    table.control(&hv1()).await.expect("redials").hostname().await.expect("answers");
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_with_a_shell_sees_the_interfaces() {
    let Some(lab) = lab() else { return };
    let mut entry = lab.entry();
    entry.hosts[0].user = lab.text("/hosts/0/exec_user");
    let table = table(entry);
    let link = table.control(&hv1()).await.expect("dials");
    assert_eq!(link.has_interface("lo").await.expect("an answer"), Some(true));
    assert_eq!(link.has_interface("br9").await.expect("an answer"), Some(false));
    assert_eq!(link.has_interface("../lo/x'y").await.expect("an answer"), Some(false));
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_no_libvirt_costs_one_error_and_nothing_else() {
    let Some(lab) = lab() else { return };
    let dir = tempfile::tempdir().expect("temporary directory");
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("ours");
    let huge = b"\x7f\xff\xff\xff\x20\x00\x80\x86";
    let short = b"\x00\x00\x00\x04";
    let text = b"HTTP/1.1 400 Bad Request\r\n\r\n";
    let cases: [(&str, Option<&'static [u8]>); 5] =
        [("closes", Some(b"")), ("huge", Some(huge)), ("short", Some(short)), ("text", Some(text)), ("silent", None)];
    let before = settled().await;
    for (case, answer) in cases {
        let path = dir.path().join(case);
        let listener = tokio::net::UnixListener::bind(&path).expect("binds");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
        let peer = tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                if let Some(bytes) = answer {
                    // what it says comes when it was spoken to: a peer that closes before is one that restarts
                    let mut first = [0; 28];
                    if !bytes.is_empty() {
                        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut first).await;
                    }
                    let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, bytes).await;
                } else {
                    kept.push(stream);
                }
            }
        });
        let mut entry = lab.entry();
        entry.hosts[0].socket = path.to_str().expect("text").to_owned();
        entry.budgets.dial = Duration::from_secs(2);
        let table = table(entry);
        for _ in 0..if answer.is_some() { 10 } else { 1 } {
            let e = table.control(&hv1()).await.map(drop).expect_err("no libvirt");
            println!("{case}: {e:?}");
            let expected = match case {
                "huge" | "text" => Reason::HostIncompatible,
                // sshd lives, and what listens behind it does not answer
                "silent" => Reason::CallTimeout,
                _ => Reason::LibvirtRestarting,
            };
            assert_eq!(e.reason(), expected, "{case}: {e:?}");
        }
        table.shutdown().await;
        peer.abort();
    }
    let after = settled().await;
    // 41 dials lie between the two counts; other tests of this process begin and end
    assert!(after.1 <= before.1 + 10, "descriptors: {before:?} {after:?}");
}

fn reason<T: std::fmt::Debug>(what: &str, result: Result<T, CallError>) -> Reason {
    let error = result.expect_err(what);
    println!("{what}: {:?}", error.kind);
    ProviderError::from(error).reason()
}

fn domain_xml(name: &str, kind: &str, machine: &str, devices: &str) -> String {
    format!(
        "<domain type='{kind}'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='{machine}'>hvm</type></os><devices>{devices}</devices></domain>"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn libvirts_errors_have_the_reasons_of_the_table() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    assert_eq!(reason("no pool", link.lookup_pool("nothing").await), Reason::PoolNotFound);

    let inactive = link.lookup_pool("inactive").await.expect("is defined");
    if link.pool_info(&inactive).await.expect("info").state == PoolInfo::RUNNING {
        // a libvirtd that starts takes a directory that exists for a pool that was running
        lab.virsh(&["pool-destroy", "inactive"]);
    }
    assert_ne!(link.pool_info(&inactive).await.expect("info").state, PoolInfo::RUNNING);
    assert_eq!(reason("inactive refresh", link.refresh_pool(&inactive).await), Reason::PoolNotActive);
    assert_eq!(reason("inactive list", link.list_volumes(&inactive).await), Reason::PoolNotActive);
    assert_eq!(reason("inactive lookup", link.lookup_volume(&inactive, "x").await), Reason::PoolNotActive);
    assert_eq!(reason("inactive create", link.create_volume(&inactive, &volume_xml("x", 10)).await), Reason::PoolNotActive);

    let small = link.lookup_pool("small").await.expect("is defined");
    let too_big = link.pool_info(&small).await.expect("info").capacity + MIB;
    assert_eq!(reason("no space", link.create_volume(&small, &volume_xml("link-test-space", too_big)).await), Reason::PoolSpace);
    assert!(link.lookup_volume(&small, "link-test-space").await.is_err(), "nothing is left of it");

    let pool = link.lookup_pool("default").await.expect("is defined");
    let unseen = PathBuf::from(lab.text("/hosts/0/pools/default/local_path")).join("link-test-unseen");
    std::fs::write(&unseen, b"x").expect("writes");
    let conflict = reason("unseen file", link.create_volume(&pool, &volume_xml("link-test-unseen", 10)).await);
    std::fs::remove_file(&unseen).expect("removes");
    assert_eq!(conflict, Reason::VolumeConflict);
    let (_, volume) = fresh_volume(&*link, "link-test-gone", 10).await;
    link.delete_volume(&volume).await.expect("deletes");
    assert_eq!(reason("volume is gone", link.volume_info(&volume).await), Reason::StateChanged);

    let name = "link-test-errors";
    let define = async |xml: String| link.define_domain(&xml).await;
    assert_eq!(reason("no such machine", define(domain_xml(name, "qemu", "nosuch", "")).await), Reason::MachineUnsupported);
    assert_eq!(reason("malformed", define("<domain".to_owned()).await), Reason::HostRejected);
    assert_eq!(reason("unknown element", define(domain_xml(name, "qemu", "q35", "<nonsense/>")).await), Reason::HostRejected);
    assert_eq!(reason("no such machine's capabilities", link.domain_capabilities("nosuch", "qemu").await), Reason::MachineUnsupported);
    println!("kvm: {:?}", link.domain_capabilities("q35", "kvm").await.map(|x| x.len()));
    let bridge = "<interface type='bridge'><source bridge='nosuchbr'/><model type='virtio'/></interface>";
    let domain = define(domain_xml(name, "qemu", "q35", bridge)).await.expect("defines");
    let start = reason("no bridge", link.start_domain(&domain).await);
    link.undefine_domain(&domain).await.expect("undefines");
    assert_eq!(start, Reason::BridgeMissing);
    let disk = "<disk type='file' device='disk'><source file='/nothing'/><target dev='vda' bus='virtio'/></disk>";
    let domain = define(domain_xml(name, "qemu", "q35", disk)).await.expect("defines");
    let start = reason("no disk", link.start_domain(&domain).await);
    link.undefine_domain(&domain).await.expect("undefines");
    assert_eq!(start, Reason::StartFailed);
    table.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refreshes_wait_for_other_jobs_of_the_pool() {
    let Some(lab) = lab() else { return };
    let table = lab.table();
    let link = table.control(&hv1()).await.expect("dials");
    let pool = link.lookup_pool("default").await.expect("the pool");
    let makes = join_all((0..4).map(|i| {
        let (link, pool) = (link.clone(), pool.clone());
        async move {
            let name = format!("link-test-job-{i}");
            if let Ok(old) = link.lookup_volume(&pool, &name).await {
                link.delete_volume(&old).await.expect("deletes");
            }
            let volume = link.create_volume(&pool, &volume_xml(&name, 64 * MIB)).await.expect("creates");
            link.delete_volume(&volume).await.expect("deletes");
        }
    }));
    let refreshes = join_all((0..20).map(|_| link.refresh_pool(&pool)));
    let (_, refreshed) = tokio::join!(makes, refreshes);
    for result in refreshed {
        result.expect("refreshes");
    }
    table.shutdown().await;
}

fn ssh_keygen(args: &[&str]) {
    assert!(Command::new("ssh-keygen").arg("-q").args(args).status().expect("ssh-keygen runs").success(), "{args:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_a_certificate_is_trusted_by_its_authority() {
    let Some(lab) = lab() else { return };
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("text").to_owned();
    let (address, port) = (lab.text("/hosts/0/address"), lab.number("/hosts/0/port"));
    ssh_keygen(&["-t", "ed25519", "-N", "", "-f", &path("ca")]);
    std::fs::copy(lab.text("/hosts/0/host_keys/ed25519"), path("host.pub")).expect("copies");
    let authority = std::fs::read_to_string(path("ca.pub")).expect("reads");
    let trusted = format!("@cert-authority [{address}]:{port} {authority}");
    let attempt = async |text: String| {
        std::fs::write(path("known_hosts"), text).expect("writes");
        let mut entry = lab.entry();
        entry.host_keys = HostKeys::KnownHosts(path("known_hosts").into());
        let table = table(entry);
        let result = table.control(&hv1()).await.map(drop);
        table.shutdown().await;
        result.err().map(|e| e.reason())
    };
    let mut outcomes = Vec::new();
    for principal in [address.as_str(), "another"] {
        ssh_keygen(&["-s", &path("ca"), "-I", "host", "-h", "-n", principal, "-V", "-5m:+1h", &path("host.pub")]);
        lab.host_with("sshd-config", &["HostCertificate", &path("host-cert.pub")]);
        outcomes.push(attempt(trusted.clone()).await);
        outcomes.push(attempt(format!("{trusted}@revoked * {authority}")).await);
        // without an authority the certificate is not asked for
        outcomes.push(attempt(std::fs::read_to_string(lab.text("/known_hosts")).expect("reads")).await);
    }
    lab.host("sshd-config");
    let revoked = Some(Reason::HostKeyRevoked);
    assert_eq!(outcomes, [None, revoked, None, Some(Reason::HostKeyUnknown), revoked, None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sshd_that_throttles_or_forbids_says_so() {
    let Some(lab) = lab() else { return };
    let entry = |user: &str| {
        let mut entry = lab.entry();
        entry.hosts[0].user = user.to_owned();
        entry.budgets.dial = Duration::from_secs(3);
        entry
    };
    lab.host_with("sshd-config", &["AllowStreamLocalForwarding", "no"]);
    let with_shell = refused(entry(&lab.text("/hosts/0/exec_user"))).await;
    let without = refused(entry(&lab.text("/hosts/0/user"))).await;
    lab.host("sshd-config");
    assert_eq!(with_shell.reason(), Reason::StreamlocalForwardingDisabled, "{with_shell:?}");
    assert_eq!(without.reason(), Reason::SocketUnavailable, "{without:?}");
}
