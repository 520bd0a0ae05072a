//! VMs that really boot: from Create to an answered CONNECT through the guest's proxy, and
//! guests that make reading their address hard.
//!
//! A boot takes most of a minute under emulation, so each guest serves as many statements as it can.

use std::time::Duration;

use egress_provider_proto::v1::{
    AddressFamily, AddressSource, CheckReason, CloudInit, CreateRequest, ErrorReason as Reason, Instance, InstancePhase, InstanceState,
    Placement, create_response, delete_response,
};
use lab_tests::case::uid_of;
use lab_tests::{Case, Clients, EntryFile, Fault, FaultProxy, eventually, refused};

const HOST: &str = "hv1";
/// Only ends a test that would hang; several guests share two CPUs.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const PROXY_PORT: u16 = 3128;
/// Where a guest without an agent shows its log.
const LOG_PORT: u16 = 8088;
/// Written by user-data, and in vain by [`VENDOR_DATA`].
const MARKER: &str = "/run/kt-marker";
/// Sets what user-data sets, too, and something of its own.
const VENDOR_DATA: &str = "#cloud-config
hostname: kt-vendor
write_files:
  - path: /run/kt-marker
    content: marker of the vendor
runcmd:
  - [touch, /run/kt-vendor]
";

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

/// The test's entry with an image that boots.
fn entry(case: &Case, image: &str) -> EntryFile {
    case.entry().lab_image(&case.lab, image).set("diskSizeGb", 3)
}

fn request(case: &Case, vm: &str, image: &str) -> CreateRequest {
    let user_data = format!("#cloud-config\nhostname: kt-user\nwrite_files:\n  - path: {MARKER}\n    content: marker of {vm}\n");
    CreateRequest {
        placement: Some(Placement { zone: HOST.into(), machine_type: "small".into(), image: image.into(), ..Default::default() }),
        cloud_init: Some(CloudInit { user_data: user_data.into_bytes() }),
        ..case.request(vm, HOST)
    }
}

/// Polls as a caller does until the instance has its address.
async fn running(clients: &Clients, vm: &str) -> Instance {
    eventually(&format!("{vm} runs and has an address"), BOOT_LIMIT, || async {
        let instance = match clients.get(&id(vm), &uid_of(vm)).await {
            Ok(instance) => instance,
            // transient by contract; anything else is wrong in a boot
            Err(status) if lab_tests::Refusal::of(&status).reason == Reason::AddressUnreadable => return Err(status.to_string()),
            Err(status) => panic!("{status:?}"),
        };
        match instance.state() {
            InstanceState::Running => Ok(instance),
            InstanceState::Provisioning => Err(format!("{:?}", instance.state_reason())),
            other => panic!("{other:?} while booting: {instance:?}"),
        }
    })
    .await
}

fn primary(instance: &Instance) -> &str {
    let primary: Vec<_> = instance.addresses.iter().filter(|a| a.primary).collect();
    let [address] = primary[..] else { panic!("one primary address: {:?}", instance.addresses) };
    assert_eq!(address.family(), AddressFamily::Ipv4);
    assert_eq!(&instance.addresses[0].ip, &address.ip, "the primary address comes first");
    &address.ip
}

/// The MAC of the NIC in the domain's document.
fn nic_mac(case: &Case, vm: &str) -> String {
    let table = case.host(HOST).virsh(&["domiflist", vm]);
    let mac = table.split_whitespace().find(|word| word.len() == 17 && word.matches(':').count() == 5);
    mac.unwrap_or_else(|| panic!("no MAC in {table}")).to_lowercase()
}

/// What the lab's target says to a client that comes through the guest's proxy.
fn connect_through(case: &Case, ip: &str) -> Result<String, String> {
    let host = case.host(HOST);
    let proxy = format!("http://{ip}:{PROXY_PORT}");
    let target = format!("http://{}/", host.connect_target);
    host.netexec(&["curl", "-sS", "-m", "30", "--proxytunnel", "--proxy", &proxy, &target])
}

/// Runs a program in the guest; whether it ended with success.
async fn guest_runs(case: &Case, vm: &str, program: &str, args: &[&str]) -> bool {
    let host = case.host(HOST);
    let ask = |command: serde_json::Value| -> Result<serde_json::Value, String> {
        let answer = host.try_virsh(&["qemu-agent-command", vm, &command.to_string()])?;
        serde_json::from_str::<serde_json::Value>(&answer).map(|v| v["return"].clone()).map_err(|e| e.to_string())
    };
    let started =
        ask(serde_json::json!({ "execute": "guest-exec", "arguments": { "path": program, "arg": args } })).expect("the agent answers");
    let status = serde_json::json!({ "execute": "guest-exec-status", "arguments": { "pid": started["pid"] } });
    eventually("the program ends", Duration::from_secs(60), || async {
        let answer = ask(status.clone())?;
        if answer["exited"] == true { Ok(answer["exitcode"] == 0) } else { Err(answer.to_string()) }
    })
    .await
}

/// H3: no answer without an address for a running instance, wherever a Get loses its link.
async fn an_address_is_read_or_refused_wherever_the_link_is_cut(case: &Case, entry: &EntryFile, vm: &str) {
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let mut daemon = case.daemon_in("cut", entry.clone().via(HOST, proxy.addr())).await;
    refused(daemon.clients().get(&id("absent"), "").await, Reason::InstanceNotFound);
    let before = proxy.counts().to_server;
    daemon.clients().get(&id(vm), &uid_of(vm)).await.expect("read");
    let whole = proxy.counts().to_server - before;
    let mut cuts = 0;
    for part in 1..=8 {
        // a new daemon, which remembers no address, and its one link, whose bytes are counted from its start
        daemon.kill();
        proxy.set(Fault::Pass);
        let before = proxy.counts().to_server;
        daemon.restart().await;
        let clients = daemon.clients();
        refused(clients.get(&id("absent"), "").await, Reason::InstanceNotFound);
        let linked = proxy.counts().to_server - before;
        proxy.set(Fault::CutAfter(linked + whole * part / 9));
        match clients.get(&id(vm), &uid_of(vm)).await {
            Ok(instance) => {
                assert_eq!(instance.state(), InstanceState::Running, "part {part}: {instance:?}");
                primary(&instance);
            }
            Err(status) => {
                let refusal = lab_tests::Refusal::of(&status);
                assert!(matches!(refusal.reason, Reason::LinkLost | Reason::AddressUnreadable), "part {part}: {refusal:?}");
                assert_eq!(refusal.code, tonic::Code::Unavailable);
                cuts += 1;
            }
        }
    }
    assert!(cuts >= 4, "the cuts met the call: {cuts}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_created_boots_proxies_and_is_deleted_without_a_trace() {
    let Some(case) = Case::start("life", &[HOST]) else { return };
    let entry = entry(&case, "debian").set("vendorData", VENDOR_DATA);
    let daemon = case.daemon(entry.clone()).await;
    let clients = daemon.clients();
    let host = case.host(HOST);
    let vm = case.vm("a");
    let created = clients.create(request(&case, &vm, "debian")).await.expect("created");
    assert_eq!(created.outcome(), create_response::Outcome::Created);
    let instance = created.instance.expect("an instance");
    assert_eq!((instance.instance_id.as_str(), instance.phase()), (id(&vm).as_str(), InstancePhase::Ready));
    assert!(matches!(instance.state(), InstanceState::Provisioning | InstanceState::Running), "{instance:?}");

    let instance = running(&clients, &vm).await;
    let ip = primary(&instance).to_owned();
    assert_eq!(instance.addresses[0].mac, nic_mac(&case, &vm));
    assert_eq!((instance.uid.as_str(), instance.host.as_str()), (uid_of(&vm).as_str(), HOST));
    let created_at = instance.created_at.expect("a time").seconds;
    let now =
        i64::try_from(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs()).expect("fits");
    assert!((now - 3600..=now).contains(&created_at), "{created_at} against {now}");

    // the proxy in the guest answers a CONNECT, and the target sees the guest
    let said = eventually("the guest's proxy answers", BOOT_LIMIT, || std::future::ready(connect_through(&case, &ip))).await;
    assert!(said.contains(&ip), "the target saw another client: {said}");
    // cloud-init has applied user-data and vendor-data; where both set a key, the user's is what counts (D2)
    let finds = async |text: &str, file: &str| guest_runs(&case, &vm, "/usr/bin/grep", &["-q", text, file]).await;
    // commands come last, after the scripts of vendor-data
    eventually("the vendor's command has run", BOOT_LIMIT, || async {
        if guest_runs(&case, &vm, "/usr/bin/test", &["-e", "/run/kt-vendor"]).await { Ok(()) } else { Err("not yet".into()) }
    })
    .await;
    assert!(finds(&format!("marker of {vm}"), MARKER).await, "the user's file");
    assert!(finds("kt-user", "/proc/sys/kernel/hostname").await, "the user's host name");
    let output = "/var/log/cloud-init-output.log";
    assert!(finds("kvm2 guest agent: already installed", output).await && finds("kvm2 guest agent: running", output).await, "our script");

    an_address_is_read_or_refused_wherever_the_link_is_cut(&case, &entry, &vm).await;

    let domains = host.domains().len();
    let again = clients.create(request(&case, &vm, "debian")).await.expect("the same");
    assert_eq!(again.outcome(), create_response::Outcome::Existing);
    assert_eq!(again.instance.expect("an instance").instance_id, id(&vm));
    assert!(host.domains().len() <= domains, "nothing was made");
    let listed = clients.list_complete().await.expect("a listing").instances;
    let listed = listed.iter().find(|i| i.name == vm).expect("it is listed");
    assert_eq!((listed.uid.as_str(), listed.instance_id.as_str()), (uid_of(&vm).as_str(), id(&vm).as_str()));
    let check = clients.check().await.expect("a table");
    assert!(check.hosts.iter().all(|h| h.reason() == CheckReason::Reachable), "{check:?}");

    // H3: an agent that has gone is no address that has gone
    guest_runs(&case, &vm, "/usr/bin/systemd-run", &["--on-active=1", "systemctl", "stop", "qemu-guest-agent"]).await;
    eventually("the agent is gone", BOOT_LIMIT, || async {
        if host.try_virsh(&["qemu-agent-command", &vm, r#"{"execute":"guest-ping"}"#]).is_err() { Ok(()) } else { Err("it answers".into()) }
    })
    .await;
    // libvirt leaves ARP entries out while the kernel is confirming them (some seconds after traffic); no answer may
    // take the address that nobody can read for one that is gone
    eventually("the address is read from another source", BOOT_LIMIT, || async {
        connect_through(&case, &ip)?;
        let instance = match clients.get(&id(&vm), &uid_of(&vm)).await {
            Ok(instance) => instance,
            Err(status) => return Err(refused::<()>(Err(status), Reason::AddressUnreadable).message),
        };
        assert_eq!((instance.state(), primary(&instance)), (InstanceState::Running, ip.as_str()));
        let source = instance.addresses[0].source();
        if source == AddressSource::GuestAgent { Err("told by the agent".into()) } else { Ok(()) }
    })
    .await;

    let deleted = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    assert_eq!(deleted.outcome(), delete_response::Outcome::Deleted);
    assert_eq!(deleted.removed.len(), 3, "domain, disk and seed: {:?}", deleted.removed);
    refused(clients.get(&id(&vm), &uid_of(&vm)).await, Reason::InstanceNotFound);
    let again = clients.delete(&id(&vm), &uid_of(&vm)).await.expect("absent");
    assert_eq!(again.outcome(), delete_response::Outcome::AlreadyAbsent);
    assert_eq!(case.left(HOST), Vec::<String>::new());
    let bases = case.bases(HOST);
    assert_eq!(bases.len(), 3, "the base, its origin and its marker: {bases:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_an_agent_still_gets_its_address_read_and_our_script_fails_harmlessly() {
    let Some(case) = Case::start("noagent", &[HOST]) else { return };
    let daemon = case.daemon(entry(&case, "noagent")).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    // nobody can look inside, so the guest shows its log when the user's own scripts run, which is after ours
    let user_data = format!("#cloud-config\nruncmd:\n  - [systemd-run, python3, -m, http.server, '{LOG_PORT}', -d, /var/log]\n");
    let cloud_init = Some(CloudInit { user_data: user_data.into_bytes() });
    clients.create(CreateRequest { cloud_init, ..request(&case, &vm, "noagent") }).await.expect("created");
    let instance = running(&clients, &vm).await;
    let url = format!("http://{}:{LOG_PORT}/cloud-init-output.log", primary(&instance));
    let log = eventually("the guest shows its log", BOOT_LIMIT, || {
        std::future::ready(case.host(HOST).netexec(&["curl", "-fsS", "-m", "10", &url]))
    })
    .await;
    assert!(log.contains("kvm2 guest agent: could not be installed"), "{log}");
    assert!(instance.addresses.iter().all(|a| a.source() != AddressSource::GuestAgent), "{:?}", instance.addresses);
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_an_image_with_a_baked_machine_id_get_addresses_of_their_own() {
    let Some(case) = Case::start("baked", &[HOST]) else { return };
    let daemon = case.daemon(entry(&case, "baked")).await;
    let clients = daemon.clients();
    let (a, b) = (case.vm("a"), case.vm("b"));
    for vm in [&a, &b] {
        clients.create(request(&case, vm, "baked")).await.expect("created");
    }
    let (one, two) = tokio::join!(running(&clients, &a), running(&clients, &b));
    assert_ne!(primary(&one), primary(&two));
    assert_ne!(nic_mac(&case, &a), nic_mac(&case, &b));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_of_another_interface_of_the_guest_is_not_taken_for_its_own() {
    let Some(case) = Case::start("dummy", &[HOST]) else { return };
    let daemon = case.daemon(entry(&case, "dummy")).await;
    let clients = daemon.clients();
    let vm = case.vm("a");
    clients.create(request(&case, &vm, "dummy")).await.expect("created");
    let instance = running(&clients, &vm).await;
    let subnet = case.host(HOST).gateway.rsplit_once('.').expect("an IPv4 address").0.to_owned();
    assert!(primary(&instance).starts_with(&subnet), "{:?} is not in {subnet}.0/24", instance.addresses);
    assert_eq!(instance.addresses[0].mac, nic_mac(&case, &vm));
}
