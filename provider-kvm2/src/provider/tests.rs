//! The operations over a host in memory: order of steps, ownership, crash points.
//! What libvirt itself does is the lab's to say.

use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretSlice;

use super::*;
use crate::config::*;
use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::mark::{self, Mark};
use crate::domain::state::RawState;
use crate::error::Reason;
use crate::hypervisor::memory::{MemoryConnect, MemoryHost};
use crate::hypervisor::{Budgets, CallFailure, Hypervisor};
use crate::telemetry::metrics::Metrics;

mod foreign_text;

const BASE: &str = "base-lab-tiny-0a1b2c3d.raw";

fn entry() -> Entry {
    let image = CatalogueImage {
        url: ImageUrl::parse("http://images.invalid/tiny.raw").expect("a URL"),
        sha256: Sha256Hex::parse(&"ab".repeat(32)),
        format: ImageFormat::Raw,
        firmware: Firmware::Uefi,
    };
    Entry {
        name: "lab".into(),
        ssh_key_file: "/nowhere/key".into(),
        host_keys: HostKeys::Ignored,
        disk_size_gib: 1,
        vendor_data: None,
        guest_agent: GuestAgent::Install,
        network_config: NetworkConfig::Written,
        images: [("tiny".to_owned(), image)].into(),
        machine_types: [("small".to_owned(), MachineType { vcpus: 1, memory_mib: 256 })].into(),
        hosts: vec![host("hv1")],
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".into(),
        machine: "q35".into(),
        pool_reserve: PoolReserve::FivePercent,
        max_image_bytes: 1 << 30,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Budgets::default(),
        warnings: Vec::new(),
    }
}

fn host(name: &str) -> Host {
    Host {
        name: name.into(),
        address: "127.0.0.1".into(),
        port: 22,
        user: "u".into(),
        socket: "/s".into(),
        pool: "default".into(),
        bridge: "br0".into(),
    }
}

struct Bench {
    host: Arc<MemoryHost>,
    config: ConfigHandle,
}

impl Bench {
    /// A host that already holds the image.
    fn warm() -> Self {
        let host = MemoryHost::new("hv1");
        host.put_volume("default", BASE, &[7; 4096]);
        host.put_volume("default", &format!("{BASE}.sha256"), "ab".repeat(32).as_bytes());
        let origin = serde_json::json!({
            "entry": "lab", "key": "tiny", "url": "http://images.invalid/tiny.raw", "urlSha256": "", "length": 4096, "virtualSize": 4096,
            "format": "raw", "time": "2026-01-01T00:00:00Z", "storedSha256": "ab".repeat(32),
        });
        host.put_volume("default", &format!("{BASE}.origin"), origin.to_string().as_bytes());
        Self { host, config: ConfigHandle::fixed(Config { entries: vec![Arc::new(entry())] }) }
    }

    /// A daemon: what it remembers is its own, what it made is the host's.
    fn daemon(&self, replica: &str) -> Provider {
        let connect = MemoryConnect::single("lab", &self.host);
        let images = ImageCache::new(connect.clone(), Metrics::new());
        Provider::new(self.config.clone(), connect, images, replica.to_owned())
    }

    async fn mark_of(&self, name: &str) -> Option<Mark> {
        let link = self.host.link();
        let domain = link.lookup_domain(name).await.ok()?;
        let element = link.domain_metadata(&domain, mark::NAMESPACE).await.ok()??;
        Mark::parse(&element, jiff::Timestamp::now()).ok()
    }

    /// As if the attempt that its mark names had begun five minutes ago.
    async fn age(&self, name: &str) {
        let mark = self.mark_of(name).await.expect("a mark");
        let old = Mark { attempt_at: Some(jiff::Timestamp::now() - jiff::SignedDuration::from_secs(300)), ..mark };
        let link = self.host.link();
        let domain = link.lookup_domain(name).await.expect("there");
        link.set_domain_metadata(&domain, mark::NAMESPACE, mark::PREFIX, &old.to_metadata()).await.expect("aged");
    }

    /// Volumes beside the base and what lies with it.
    fn vm_volumes(&self) -> Vec<String> {
        self.host.volume_names("default").into_iter().filter(|v| !v.starts_with("base-")).collect()
    }
}

fn create(name: &str, uid: &str) -> CreateRequest {
    CreateRequest {
        entry: String::new(),
        key: Key { name: name.into(), uid: uid.into(), installation_id: "cluster-1".into() },
        placement: Placement { machine_type: "small".into(), image: "tiny".into(), ..Placement::default() },
        user_data: Arc::new(SecretSlice::from(b"#cloud-config\n".to_vec())),
        spec_hash: "h1".into(),
        max_wait: Duration::from_secs(25),
    }
}

fn by_key(name: &str, uid: &str) -> Selector {
    Selector::Key { key: Key { name: name.into(), uid: uid.into(), installation_id: "cluster-1".into() }, zone: String::new() }
}

fn delete(selector: Selector) -> DeleteRequest {
    DeleteRequest { entry: String::new(), selector, unknown_host: UnknownHost::Refuse }
}

fn list() -> ListRequest {
    ListRequest {
        entry: String::new(),
        installation_id: String::new(),
        page_size: 0,
        page_token: String::new(),
        completeness: Completeness::Required,
    }
}

fn reason<T: std::fmt::Debug>(result: Result<T>) -> Reason {
    result.expect_err("refused").reason()
}

#[tokio::test(start_paused = true)]
async fn a_warm_create_makes_a_running_marked_domain_with_its_two_volumes() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let created = provider.create(create("vm-1", "u1")).await.expect("created");
    assert_eq!(created.outcome, CreateOutcome::Created);
    assert_eq!(created.instance.id.to_string(), "hosts/hv1/domains/vm-1");
    assert_eq!((created.instance.state, created.instance.state_reason), (State::Provisioning, StateReason::WaitingForAgent));
    assert_eq!(bench.vm_volumes(), ["vm-1-seed.iso", "vm-1.qcow2"]);
    let mark = bench.mark_of("vm-1").await.expect("marked");
    assert_eq!((mark.phase, mark.uid.as_str(), mark.installation_id.as_str()), (Phase::Ready, "u1", "cluster-1"));
    assert_eq!((mark.base.as_str(), mark.image_key.as_str()), (BASE, "tiny"));
}

#[tokio::test(start_paused = true)]
async fn the_domain_is_defined_before_its_volumes_and_removed_after_them() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let calls = bench.host.calls();
    let at = |call: &str| calls.iter().position(|c| *c == call).unwrap_or_else(|| panic!("no {call} in {calls:?}"));
    assert!(at("define_domain") < at("create_volume"), "{calls:?}");
    assert!(at("create_volume") < at("start_domain"), "{calls:?}");
    provider.delete(delete(by_key("vm-1", "u1"))).await.expect("deleted");
    let calls = bench.host.calls();
    let last = |call: &str| calls.iter().rposition(|c| *c == call).unwrap_or_else(|| panic!("no {call} in {calls:?}"));
    assert!(last("delete_volume") < last("undefine_domain"), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn create_again_returns_the_same_instance_and_creates_nothing() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let first = provider.create(create("vm-1", "u1")).await.expect("created");
    bench.host.calls();
    let again = provider.create(create("vm-1", "U1")).await.expect("existing");
    assert_eq!(again.outcome, CreateOutcome::Existing);
    assert_eq!(again.instance.id, first.instance.id);
    let calls = bench.host.calls();
    assert!(!calls.iter().any(|c| matches!(*c, "define_domain" | "create_volume" | "start_domain" | "upload")), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn a_taken_name_is_refused_with_the_reason_that_fits() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    assert_eq!(reason(provider.create(create("vm-1", "u2")).await), Reason::NameOwnedByOtherUid);
    let other_spec = CreateRequest { spec_hash: "h2".into(), ..create("vm-1", "u1") };
    assert_eq!(reason(provider.create(other_spec).await), Reason::SpecConflict);
    let mut other_cluster = create("vm-1", "u1");
    other_cluster.key.installation_id = "cluster-2".into();
    assert_eq!(reason(provider.create(other_cluster).await), Reason::NameOwnedByOtherUid);
    assert_eq!(bench.mark_of("vm-1").await.expect("still there").uid, "u1");
}

#[tokio::test(start_paused = true)]
async fn a_foreign_domain_survives_every_operation() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let link = bench.host.link();
    let xml = "<domain type='qemu'><name>docker-29</name><memory unit='MiB'>64</memory><vcpu>1</vcpu><os><type>hvm</type></os></domain>";
    let domain = link.define_domain(xml).await.expect("defined");
    link.start_domain(&domain).await.expect("started");
    let id =
        || Selector::Id { id: "hosts/hv1/domains/docker-29".into(), expected_uid: String::new(), expected_installation: String::new() };
    assert_eq!(reason(provider.create(create("docker-29", "u1")).await), Reason::NameNotManaged);
    assert_eq!(reason(provider.get("", id()).await), Reason::NotManaged);
    assert_eq!(reason(provider.delete(delete(id())).await), Reason::NotManaged);
    assert_eq!(reason(provider.delete(delete(by_key("docker-29", "u1"))).await), Reason::NotManaged);
    assert!(provider.list(list()).await.expect("listed").instances.is_empty());
    assert_eq!(bench.host.domain_raw_state("docker-29").map(|s| s.state), Some(1));
}

#[tokio::test(start_paused = true)]
async fn delete_checks_the_uid_it_is_given() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    assert_eq!(reason(provider.delete(delete(by_key("vm-1", "u2"))).await), Reason::UidMismatch);
    let wrong = Selector::Id { id: "hosts/hv1/domains/vm-1".into(), expected_uid: "u2".into(), expected_installation: String::new() };
    assert_eq!(reason(provider.delete(delete(wrong)).await), Reason::UidMismatch);
    assert_eq!(bench.host.domain_names(), ["vm-1"]);
}

#[tokio::test(start_paused = true)]
async fn delete_leaves_the_base_alone_and_can_be_repeated() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let deleted = provider.delete(delete(by_key("vm-1", "u1"))).await.expect("deleted");
    assert_eq!(deleted.outcome, DeleteOutcome::Deleted);
    assert_eq!(deleted.removed.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["vm-1", "vm-1.qcow2", "vm-1-seed.iso"]);
    assert_eq!(provider.delete(delete(by_key("vm-1", "u1"))).await.expect("absent").outcome, DeleteOutcome::AlreadyAbsent);
    assert_eq!(reason(provider.get("", by_key("vm-1", "u1")).await), Reason::InstanceNotFound);
    assert_eq!(bench.host.volume_names("default").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn volumes_without_a_domain_are_refused_listed_and_never_deleted() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    bench.host.put_volume("default", "vm-1-seed.iso", b"someone's");
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::VolumeConflict);
    assert_eq!(provider.delete(delete(by_key("vm-1", "u1"))).await.expect("absent").outcome, DeleteOutcome::AlreadyAbsent);
    assert_eq!(bench.host.volume_content("default", "vm-1-seed.iso").as_deref(), Some(&b"someone's"[..]));
    assert!(bench.host.domain_names().is_empty(), "nothing was half made");
    let page = provider.list(list()).await.expect("listed");
    assert_eq!(page.orphan_volumes.iter().map(|v| (v.name.as_str(), v.kind)).collect::<Vec<_>>(), [("vm-1-seed.iso", OrphanKind::Seed)]);
}

#[tokio::test(start_paused = true)]
async fn bad_placements_are_refused_before_any_host_is_asked() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let with = |edit: fn(&mut CreateRequest)| {
        let mut request = create("vm-1", "u1");
        edit(&mut request);
        request
    };
    let cases = [
        (with(|r| r.entry = "other".into()), Reason::EntryUnknown),
        (with(|r| r.placement.zone = "hv9".into()), Reason::ZoneUnknown),
        (with(|r| r.placement.machine_type = "huge".into()), Reason::MachineTypeUnknown),
        (with(|r| r.placement.image = "windows".into()), Reason::ImageUnknown),
        (with(|r| r.placement.image = "http://10.0.0.1/x".into()), Reason::ImageUrlForbidden),
        (with(|r| r.key.name = "../etc".into()), Reason::NameInvalid),
    ];
    for (request, expected) in cases {
        assert_eq!(reason(provider.create(request).await), expected);
    }
    assert!(bench.host.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_image_larger_than_the_disk_leaves_nothing_behind() {
    let bench = Bench::warm();
    let origin = String::from_utf8(bench.host.volume_content("default", &format!("{BASE}.origin")).expect("origin")).expect("text");
    bench.host.put_volume(
        "default",
        &format!("{BASE}.origin"),
        origin.replace("\"virtualSize\":4096", "\"virtualSize\":2147483648").as_bytes(),
    );
    let refused = bench.daemon("a").create(create("vm-1", "u1")).await.expect_err("too large");
    assert_eq!(refused.reason(), Reason::DiskTooSmall);
    assert!(refused.message().contains("2147483648") && refused.message().contains("1073741824"), "{refused}");
    assert!(bench.host.domain_names().is_empty() && bench.vm_volumes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn space_grown_behind_libvirts_back_is_seen_before_anything_is_made() {
    let bench = Bench::warm();
    bench.host.grow_behind_the_back("default", 95 << 30);
    assert_eq!(reason(bench.daemon("a").create(create("vm-1", "u1")).await), Reason::PoolSpace);
    assert!(bench.host.domain_names().is_empty() && bench.vm_volumes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_missing_bridge_is_named_before_anything_is_made() {
    let bench = Bench::warm();
    bench.host.set_bridges(&["virbr0"]);
    let provider = bench.daemon("a");
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::BridgeMissing);
    assert!(!bench.host.calls().contains(&"define_domain"), "nothing was half made");
    let row = provider.check("", Duration::ZERO).await.expect("a round").remove(0);
    assert_eq!(problem(&row), Some(Reason::BridgeMissing));
}

#[tokio::test(start_paused = true)]
async fn a_paused_instance_is_reported_and_never_destroyed() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    bench.host.set_domain_state("vm-1", RawState { state: 3, reason: 5 });
    let instance = provider.get("", by_key("vm-1", "u1")).await.expect("read");
    assert_eq!((instance.state, instance.state_reason), (State::Paused, StateReason::IoError));
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::PausedByAdmin);
    assert_eq!(bench.host.domain_raw_state("vm-1").map(|s| s.state), Some(3));
}

#[tokio::test(start_paused = true)]
async fn a_stopped_instance_is_started_and_one_without_its_disk_is_an_error() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    bench.host.set_domain_state("vm-1", RawState { state: 5, reason: 1 });
    bench.host.remove_volume("default", "vm-1-seed.iso");
    let again = provider.create(create("vm-1", "u1")).await.expect("started");
    assert_eq!(again.outcome, CreateOutcome::Existing);
    assert_eq!(bench.vm_volumes(), ["vm-1-seed.iso", "vm-1.qcow2"], "the seed was rebuilt");
    bench.host.set_domain_state("vm-1", RawState { state: 5, reason: 1 });
    bench.host.remove_volume("default", "vm-1.qcow2");
    // another daemon's Delete may be at work, whose mark the end of the Create has overwritten
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::StateChanged);
    bench.age("vm-1").await;
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::DiskLost);
    assert_eq!(bench.vm_volumes(), ["vm-1-seed.iso"], "no empty disk was made");
}

#[tokio::test(start_paused = true)]
async fn an_empty_pool_that_has_to_hold_a_disk_of_ours_is_not_taken_for_an_empty_pool() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    bench.host.volume_names("default").iter().for_each(|name| bench.host.remove_volume("default", name));
    assert_eq!(reason(provider.create(create("vm-2", "u2")).await), Reason::PoolNotActive);
    bench.host.set_domain_state("vm-1", RawState { state: 5, reason: 1 });
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::PoolNotActive, "its disk is not lost");
    let row = provider.check("", Duration::ZERO).await.expect("a round").remove(0);
    assert_eq!(row.problem.map(|e| e.reason()), Some(Reason::PoolNotActive));
    assert!(bench.host.volume_names("default").is_empty() && bench.host.domain_names() == ["vm-1"]);
    // without an instance that has run there, an empty pool is a new one
    provider.delete(delete(by_key("vm-1", "u1"))).await.expect("deleted");
    let row = provider.check("", Duration::ZERO).await.expect("a round").remove(0);
    assert!(row.problem.is_none(), "{:?}", row.problem);
}

#[tokio::test(start_paused = true)]
async fn an_instance_runs_only_with_its_own_nics_ipv4_and_unreadable_is_not_missing() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let mac = crate::domain::names::mac_for("cluster-1", &VmName::parse("vm-1").expect("name"), "u1");
    let nic =
        |name: &str, mac: &str, ip: &str| GuestInterface { name: name.into(), mac: mac.into(), addresses: vec![ip.parse().expect("ip")] };
    let get = || provider.get("", by_key("vm-1", "u1"));

    let instance = get().await.expect("read");
    assert_eq!((instance.state, instance.addresses.len()), (State::Provisioning, 0));

    let guest = vec![nic("docker0", "02:42:00:00:00:01", "172.17.0.1"), nic("enp1s0", &mac.to_uppercase(), "192.168.9.7")];
    bench.host.set_interfaces("vm-1", AddressSource::Agent, Ok(guest));
    let instance = get().await.expect("read");
    assert_eq!(instance.state, State::Running);
    let primary = instance.addresses.iter().find(|a| a.primary).expect("a primary");
    assert_eq!(primary.ip.to_string(), "192.168.9.7");

    let broken = || Err(CallFailure::Libvirt { code: 86, domain: 10, message: "agent".into() });
    bench.host.set_interfaces("vm-1", AddressSource::Agent, broken());
    assert_eq!(reason(get().await), Reason::AddressUnreadable, "an agent that fell silent takes no address away");
    let restarted = bench.daemon("a");
    let read = restarted.get("", by_key("vm-1", "u1")).await;
    assert_eq!(reason(read), Reason::AddressUnreadable, "nor does it for a daemon that has never read it");
    bench.host.set_interfaces("vm-1", AddressSource::Lease, broken());
    bench.host.set_interfaces("vm-1", AddressSource::Arp, broken());
    assert_eq!(reason(get().await), Reason::AddressUnreadable);
    assert_eq!(reason(restarted.get("", by_key("vm-1", "u1")).await), Reason::AddressUnreadable, "whatever a daemon remembers");

    // a guest that starts anew has no address yet
    bench.host.set_interfaces("vm-1", AddressSource::Lease, Ok(Vec::new()));
    bench.host.set_domain_state("vm-1", RawState { state: 5, reason: 1 });
    bench.host.set_domain_state("vm-1", RawState { state: 1, reason: 1 });
    assert_eq!(get().await.expect("read").state_reason, StateReason::WaitingForAgent);
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_key_share_one_create() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let (a, b, c) =
        tokio::join!(provider.create(create("vm-1", "u1")), provider.create(create("vm-1", "u1")), provider.create(create("vm-1", "u2")));
    let outcomes = [a.expect("created").outcome, b.expect("joined").outcome];
    assert_eq!(outcomes, [CreateOutcome::Created, CreateOutcome::Joined]);
    assert_eq!(reason(c), Reason::NameOwnedByOtherUid);
    assert_eq!(bench.host.calls().iter().filter(|c| **c == "define_domain").count(), 1);
    assert_eq!(provider.running(), 0, "no job is left");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_does_not_end_the_work() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let impatient = CreateRequest { max_wait: Duration::ZERO, ..create("vm-1", "u1") };
    let answer = provider.create(impatient).await.expect_err("not waited for");
    assert_eq!(answer.reason(), Reason::CallTimeout);
    assert!(answer.metadata().contains_key("step") && answer.retry_delay().is_some());
    let created = provider.create(create("vm-1", "u1")).await.expect("joined or existing");
    assert_ne!(created.outcome, CreateOutcome::Created);
    assert_eq!(bench.vm_volumes().len(), 2);
}

/// Lets a daemon run Create until its host stops answering at `step`, then kills it.
async fn killed_at(bench: &Bench, step: u64) -> bool {
    let provider = bench.daemon("a");
    bench.host.freeze_at(step);
    // paused time: a step that never answers ends at its budget, far later than a whole Create takes
    let finished = tokio::time::timeout(Duration::from_secs(5), provider.create(create("vm-1", "u1"))).await.is_ok();
    drop(provider);
    bench.host.drop_links();
    bench.host.thaw();
    finished
}

/// How many steps a whole Create has.
async fn steps_of_a_create() -> u64 {
    let bench = Bench::warm();
    bench.daemon("a").create(create("vm-1", "u1")).await.expect("created");
    bench.host.steps()
}

#[tokio::test(start_paused = true)]
async fn a_daemon_killed_at_any_step_of_create_leaves_what_the_next_create_completes() {
    for step in 0..steps_of_a_create().await {
        let bench = Bench::warm();
        killed_at(&bench, step).await;
        let created = bench.daemon("a").create(create("vm-1", "u1")).await;
        created.unwrap_or_else(|e| panic!("killed at step {step}: {e:?}"));
        assert_eq!(bench.vm_volumes(), ["vm-1-seed.iso", "vm-1.qcow2"], "killed at step {step}");
        assert_eq!(bench.mark_of("vm-1").await.map(|m| m.phase), Some(Phase::Ready), "killed at step {step}");
        assert_eq!(bench.host.domain_raw_state("vm-1").map(|s| s.state), Some(1), "killed at step {step}");
        assert_eq!(bench.host.crashes(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_daemon_killed_at_any_step_of_create_leaves_nothing_that_list_or_delete_does_not_see() {
    for step in 0..steps_of_a_create().await {
        let bench = Bench::warm();
        killed_at(&bench, step).await;
        let daemon = bench.daemon("b");
        let page = daemon.list(list()).await.expect("listed");
        let something = !bench.host.domain_names().is_empty() || !bench.vm_volumes().is_empty();
        assert_eq!(
            page.instances.len(),
            usize::from(something),
            "killed at step {step}: {:?} {:?}",
            bench.host.domain_names(),
            bench.vm_volumes()
        );
        daemon.delete(delete(by_key("vm-1", "u1"))).await.unwrap_or_else(|e| panic!("killed at step {step}: {e:?}"));
        assert!(bench.host.domain_names().is_empty() && bench.vm_volumes().is_empty(), "killed at step {step}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_daemon_killed_at_any_step_of_delete_leaves_what_the_next_delete_removes() {
    for step in 0.. {
        let bench = Bench::warm();
        bench.daemon("a").create(create("vm-1", "u1")).await.expect("created");
        let provider = bench.daemon("a");
        bench.host.freeze_at(step);
        let finished = tokio::time::timeout(Duration::from_secs(5), provider.delete(delete(by_key("vm-1", "u1")))).await.is_ok();
        bench.host.drop_links();
        bench.host.thaw();
        if !finished && !bench.vm_volumes().is_empty() {
            assert_eq!(bench.host.domain_names(), ["vm-1"], "killed at step {step}: volumes without a domain");
        }
        bench.daemon("b").delete(delete(by_key("vm-1", "u1"))).await.unwrap_or_else(|e| panic!("killed at step {step}: {e:?}"));
        assert!(bench.host.domain_names().is_empty() && bench.vm_volumes().is_empty(), "killed at step {step}");
        if finished {
            assert!(step > 3, "the loop has seen every step");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_create_after_a_delete_that_was_killed_makes_a_new_instance() {
    let bench = Bench::warm();
    bench.daemon("a").create(create("vm-1", "u1")).await.expect("created");
    let provider = bench.daemon("a");
    bench.host.calls();
    bench.host.fail_next("undefine_domain", CallFailure::LinkDead { cause: "cut".into() });
    provider.delete(delete(by_key("vm-1", "u1"))).await.expect_err("cut off");
    let instance = provider.get("", by_key("vm-1", "u1")).await.expect("still there");
    assert_eq!(instance.state, State::Deleting);
    let created = provider.create(create("vm-1", "u1")).await.expect("made anew");
    assert_eq!(created.outcome, CreateOutcome::Created);
}

#[tokio::test(start_paused = true)]
async fn a_create_steps_back_from_another_daemons_fresh_delete_and_a_delete_ends_it() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    bench.host.fail_next("undefine_domain", CallFailure::LinkDead { cause: "cut".into() });
    provider.delete(delete(by_key("vm-1", "u1"))).await.expect_err("cut off");
    let other = bench.daemon("b");
    let busy = other.create(create("vm-1", "u1")).await.expect_err("a Delete is on its way");
    assert_eq!(busy.reason(), Reason::OperationInProgress);
    assert_eq!(bench.mark_of("vm-1").await.map(|m| (m.phase, m.owner)), Some((Phase::Deleting, "a".to_owned())));
    other.delete(delete(by_key("vm-1", "u1"))).await.expect("ended by another");
    let created = other.create(create("vm-1", "u1")).await.expect("made anew");
    assert_eq!(created.outcome, CreateOutcome::Created);
}

#[tokio::test(start_paused = true)]
async fn a_create_that_ends_while_another_daemon_deletes_leaves_no_domain_without_a_disk() {
    // looks at the mark in a Delete: whose it is, and whether it still goes before the volumes and before the domain
    for (looks, outcome) in [(1, None), (2, Some(DeleteOutcome::Deleted))] {
        let bench = Bench::warm();
        bench.daemon("a").create(create("vm-1", "u1")).await.expect("created");
        let ready = bench.mark_of("vm-1").await.expect("a mark").to_metadata();
        bench.host.write_before("domain_metadata", looks, "vm-1", mark::NAMESPACE, &ready);
        let deleted = bench.daemon("b").delete(delete(by_key("vm-1", "u1"))).await;
        assert_eq!(deleted.as_ref().ok().map(|d| d.outcome), outcome, "{deleted:?}");
        // whole or gone
        assert_eq!((bench.host.domain_names().len(), bench.vm_volumes().len()), if outcome.is_some() { (0, 0) } else { (1, 2) });
    }
}

#[tokio::test(start_paused = true)]
async fn another_daemons_fresh_attempt_is_let_alone_and_an_old_one_taken_over() {
    let bench = Bench::warm();
    let steps = steps_of_a_create().await;
    killed_at(&bench, steps - 3).await;
    let mark = bench.mark_of("vm-1").await.expect("unfinished");
    assert_eq!((mark.phase, mark.owner.as_str()), (Phase::Creating, "a"));
    let busy = bench.daemon("b").create(create("vm-1", "u1")).await.expect_err("let alone");
    assert_eq!(busy.reason(), Reason::OperationInProgress);
    assert!(busy.retry_delay().is_some());

    bench.age("vm-1").await;
    bench.daemon("b").create(create("vm-1", "u1")).await.expect("taken over");
    assert_eq!(bench.mark_of("vm-1").await.map(|m| m.owner), Some("b".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn who_does_not_get_the_overlay_steps_back_and_touches_nothing() {
    let bench = Bench::warm();
    bench.host.fail_next("create_volume", CallFailure::Libvirt { code: 90, domain: 18, message: "exists".into() });
    let busy = bench.daemon("a").create(create("vm-1", "u1")).await.expect_err("another was first");
    assert_eq!(busy.reason(), Reason::OperationInProgress);
    assert_eq!(bench.host.domain_names(), ["vm-1"], "the winner's domain is left alone");
}

#[tokio::test(start_paused = true)]
async fn a_link_that_dies_in_a_listing_fails_the_listing() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    for n in 0..5 {
        provider.create(create(&format!("vm-{n}"), "u1")).await.expect("created");
    }
    bench.host.fail_next("domain_metadata", CallFailure::LinkDead { cause: "cut".into() });
    assert_eq!(reason(provider.list(list()).await), Reason::ListingIncomplete);
    bench.host.fail_next("domain_metadata", CallFailure::LinkDead { cause: "cut".into() });
    let page = provider.list(ListRequest { completeness: Completeness::BestEffort, ..list() }).await.expect("partial");
    assert_eq!((page.instances.len(), page.unreachable.len()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn pages_hold_every_instance_once() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    for n in 0..7 {
        provider.create(create(&format!("vm-{n}"), "u1")).await.expect("created");
    }
    let mut names = Vec::new();
    let mut token = String::new();
    loop {
        let page = provider.list(ListRequest { page_size: 3, page_token: token, ..list() }).await.expect("listed");
        names.extend(page.instances.iter().map(|i| i.id.name.to_string()));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(names, (0..7).map(|n| format!("vm-{n}")).collect::<Vec<_>>());
    assert_eq!(reason(provider.list(ListRequest { page_token: "9/x".into(), ..list() }).await), Reason::PageTokenInvalid);
}

#[tokio::test(start_paused = true)]
async fn an_unconfigured_host_is_refused_or_abandoned_as_asked() {
    let provider = Bench::warm().daemon("a");
    let gone = || Selector::Id { id: "hosts/hv9/domains/vm-1".into(), expected_uid: "u1".into(), expected_installation: String::new() };
    assert_eq!(reason(provider.delete(delete(gone())).await), Reason::HostNotConfigured);
    assert_eq!(reason(provider.get("", gone()).await), Reason::HostNotConfigured);
    let abandoned = provider.delete(DeleteRequest { unknown_host: UnknownHost::Abandon, ..delete(gone()) }).await.expect("left behind");
    assert_eq!(abandoned.outcome, DeleteOutcome::Abandoned);
}

#[tokio::test(start_paused = true)]
async fn a_check_answers_a_row_per_host_whatever_happens() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let row = provider.check("", Duration::ZERO).await.expect("a round").remove(0);
    assert!(row.problem.is_none(), "{:?}", row.problem);
    bench.host.stop_pool("default");
    let row = provider.check("", Duration::ZERO).await.expect("a round").remove(0);
    assert_eq!(row.problem.map(|e| e.reason()), Some(Reason::PoolNotActive));
    assert!(row.remediation.contains("virsh pool-start default"), "{}", row.remediation);
    bench.host.freeze_at(0);
    let started = tokio::time::Instant::now();
    let row = provider.check("", Duration::from_secs(3)).await.expect("a round").remove(0);
    assert_eq!(row.problem.map(|e| e.reason()), Some(Reason::CallTimeout));
    assert!(started.elapsed() <= Duration::from_secs(3), "{:?}", started.elapsed());
}

/// Hosts hv1, hv2 and so on in one entry, and a daemon.
struct Fleet {
    hosts: Vec<Arc<MemoryHost>>,
    connect: Arc<MemoryConnect>,
    provider: Provider,
}

impl Fleet {
    fn of(size: usize) -> Self {
        let hosts: Vec<_> = (1..=size).map(|n| MemoryHost::new(&format!("hv{n}"))).collect();
        let names: Vec<_> = (1..=size).map(|n| format!("hv{n}")).collect();
        let ids = names.iter().map(|name| HostId { entry: "lab".into(), host: name.clone() });
        let connect = MemoryConnect::new(ids.zip(hosts.iter().cloned()));
        let entry = Entry { hosts: names.iter().map(|name| host(name)).collect(), ..entry() };
        let config = ConfigHandle::fixed(Config { entries: vec![Arc::new(entry)] });
        let images = ImageCache::new(connect.clone(), Metrics::new());
        Self { hosts, provider: Provider::new(config, connect.clone(), images, "a".into()), connect }
    }

    async fn check(&self, timeout: Duration) -> Vec<HostCheck> {
        self.provider.check("", timeout).await.expect("a round")
    }
}

fn problem(row: &HostCheck) -> Option<Reason> {
    row.problem.as_ref().map(|e| e.reason())
}

#[tokio::test(start_paused = true)]
async fn a_row_has_the_reason_of_its_own_host_and_a_sound_one_waits_for_nobody() {
    let fleet = Fleet::of(4);
    fleet.hosts[0].freeze_at(0);
    fleet.hosts[2].stop_pool("default");
    fleet.connect.set_silent("hv4");
    let rows = fleet.check(Duration::from_secs(3)).await;
    assert_eq!(rows.iter().map(|r| r.host.as_str()).collect::<Vec<_>>(), ["hv1", "hv2", "hv3", "hv4"]);
    let reasons: Vec<_> = rows.iter().map(problem).collect();
    assert_eq!(reasons, [Some(Reason::CallTimeout), None, Some(Reason::PoolNotActive), Some(Reason::HostUnreachable)]);
    assert_eq!([rows[1].latency, rows[2].latency], [Duration::ZERO; 2], "paused time: only waiting takes any");
}

#[tokio::test(start_paused = true)]
async fn a_check_shows_the_space_that_a_create_may_use() {
    let fleet = Fleet::of(1);
    fleet.hosts[0].grow_behind_the_back("default", 40 << 30);
    let details = fleet.check(Duration::ZERO).await.remove(0).details;
    assert_eq!([details.pool_available_bytes, details.pool_reserve_bytes].map(|n| n >> 30), [55, 5]);
    assert_eq!(details.warnings, Vec::<String>::new());
    fleet.hosts[0].grow_behind_the_back("default", 55 << 30);
    let details = fleet.check(Duration::ZERO).await.remove(0).details;
    assert_eq!(details.pool_available_bytes, 0);
    assert!(details.warnings.iter().any(|w| w.contains("no room")), "{:?}", details.warnings);
}

#[tokio::test(start_paused = true)]
async fn the_latency_of_a_check_does_not_count_the_closing_of_its_link() {
    let fleet = Fleet::of(1);
    fleet.hosts[0].closing_takes(Duration::from_secs(5));
    let started = tokio::time::Instant::now();
    let row = fleet.check(Duration::ZERO).await.remove(0);
    assert_eq!(started.elapsed(), Duration::from_secs(5), "the link was closed");
    assert_eq!((problem(&row), row.latency), (None, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn no_connection_is_unreachable_and_no_answer_a_timeout_however_long_the_round() {
    for timeout in [1, 3_000, 10_000, 20_000].map(Duration::from_millis) {
        let fleet = Fleet::of(2);
        fleet.connect.set_silent("hv1");
        fleet.hosts[1].freeze_at(1);
        let rows = fleet.check(timeout).await;
        let reasons: Vec<_> = rows.iter().map(problem).collect();
        assert_eq!(reasons, [Some(Reason::HostUnreachable), Some(Reason::CallTimeout)], "in {timeout:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn at_most_sixteen_hosts_are_asked_at_a_time_and_each_has_its_turn_before_the_deadline() {
    let fleet = Fleet::of(40);
    fleet.hosts[..39].iter().for_each(|host| host.freeze_at(0));
    let started = tokio::time::Instant::now();
    let while_the_first_wait = async {
        tokio::time::sleep(Duration::from_millis(2_900)).await;
        fleet.connect.dials()
    };
    let (rows, dials) = tokio::join!(fleet.check(Duration::from_secs(9)), while_the_first_wait);
    assert_eq!(dials, 16);
    assert!(started.elapsed() <= Duration::from_secs(9), "{:?}", started.elapsed());
    assert_eq!(rows.iter().filter(|r| problem(r) == Some(Reason::CallTimeout)).count(), 39);
    assert_eq!(problem(&rows[39]), None, "behind 39 silent hosts a sound one is still asked");
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_for_a_bridge_that_vanished_says_so() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-0", "u1")).await.expect("the link knows the bridge");
    bench.host.set_bridges(&[]);
    bench.host.fail_next("start_domain", CallFailure::Libvirt { code: 38, domain: 0, message: "Cannot get interface MTU".into() });
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::BridgeMissing);
}

#[tokio::test(start_paused = true)]
async fn a_shut_down_daemon_takes_no_create_and_leaves_no_task() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.shutdown().await;
    assert_eq!(reason(provider.create(create("vm-1", "u1")).await), Reason::ShuttingDown);
    assert!(bench.host.domain_names().is_empty());
}

#[tokio::test(start_paused = true)]
async fn delete_by_id_removes_what_a_lost_domain_left_unless_another_domain_uses_it() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    let by_id = || Selector::Id { id: "hosts/hv1/domains/vm-1".into(), expected_uid: "u1".into(), expected_installation: String::new() };
    provider.create(create("vm-1", "u1")).await.expect("created");
    let link = bench.host.link();
    let domain = link.lookup_domain("vm-1").await.expect("there");
    link.destroy_domain(&domain).await.expect("stopped");
    link.undefine_domain(&domain).await.expect("undefined by hand");

    let renamed = format!(
        "<domain type='qemu'><name>renamed</name><memory>1</memory><vcpu>1</vcpu><os><type>hvm</type></os><devices><disk type='file' device='disk'><source file='{}'/><target dev='vda'/></disk></devices></domain>",
        link.lookup_volume(&link.lookup_pool("default").await.expect("pool"), "vm-1.qcow2").await.expect("volume").key
    );
    let user = link.define_domain(&renamed).await.expect("defined");
    assert_eq!(reason(provider.delete(delete(by_id())).await), Reason::VolumeConflict);
    assert_eq!(bench.vm_volumes().len(), 2);

    link.undefine_domain(&user).await.expect("undefined");
    assert_eq!(provider.delete(delete(by_key("vm-1", "u1"))).await.expect("absent").outcome, DeleteOutcome::AlreadyAbsent);
    let deleted = provider.delete(delete(by_id())).await.expect("removed");
    assert_eq!(deleted.removed.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["vm-1.qcow2", "vm-1-seed.iso"]);
    assert!(bench.vm_volumes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn volumes_that_lost_their_domain_a_moment_ago_are_waited_for_and_older_ones_refused() {
    let bench = Bench::warm();
    let provider = bench.daemon("a");
    provider.create(create("vm-1", "u1")).await.expect("created");
    let link = bench.host.link();
    let domain = link.lookup_domain("vm-1").await.expect("there");
    link.destroy_domain(&domain).await.expect("stopped");
    link.undefine_domain(&domain).await.expect("undefined");

    let busy = bench.daemon("b").create(create("vm-1", "u1")).await.expect_err("let alone");
    assert_eq!(busy.reason(), Reason::OperationInProgress);
    assert!(busy.retry_delay().is_some());
    for volume in ["vm-1.qcow2", "vm-1-seed.iso"] {
        bench.host.touch_volume("default", volume, Duration::from_secs(300));
        assert_eq!(reason(bench.daemon("b").create(create("vm-1", "u1")).await), Reason::VolumeConflict, "{volume}");
    }
    assert_eq!(bench.vm_volumes().len(), 2, "nobody removed them");
}

#[tokio::test(start_paused = true)]
async fn entries_that_share_a_host_list_their_own_instances() {
    let bench = Bench::warm();
    let other = Entry { name: "other".into(), ..entry() };
    let config = ConfigHandle::fixed(Config { entries: vec![Arc::new(entry()), Arc::new(other)] });
    let id = |entry: &str| HostId { entry: entry.into(), host: "hv1".into() };
    let connect = MemoryConnect::new([(id("lab"), bench.host.clone()), (id("other"), bench.host.clone())]);
    let images = ImageCache::new(connect.clone(), Metrics::new());
    let provider = Provider::new(config, connect, images, "a".into());
    provider.create(CreateRequest { entry: "lab".into(), ..create("vm-1", "u1") }).await.expect("created");
    let of = |entry: &str| provider.list(ListRequest { entry: entry.into(), ..list() });
    assert_eq!(of("lab").await.expect("listed").instances.len(), 1);
    assert_eq!(of("other").await.expect("listed").instances.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_domain_that_vanishes_in_the_middle_of_get_is_not_found() {
    for call in ["domain_metadata", "domain_state", "domain_xml", "domain_interfaces"] {
        let bench = Bench::warm();
        let provider = bench.daemon("a");
        provider.create(create("vm-1", "u1")).await.expect("created");
        bench.host.fail_next(call, CallFailure::Libvirt { code: 42, domain: 10, message: "Domain not found".into() });
        assert_eq!(reason(provider.get("", by_key("vm-1", "u1")).await), Reason::InstanceNotFound, "{call}");
    }
}
