//! A guest whose agent is silent, or says what no agent says: it costs nobody else anything, and takes
//! no address away that was known.

use std::time::Duration;

use egress_provider_proto::v1::{CloudInit, CreateRequest, ErrorReason as Reason, Instance, InstanceState, Placement};
use lab_tests::case::uid_of;
use lab_tests::counters::Usage;
use lab_tests::{Case, Clients, Refusal, eventually, refused};

const HOST: &str = "hv1";
/// Only ends a test that would hang; several guests share two CPUs.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const LIMIT: Duration = Duration::from_secs(60);
/// Where the false agent takes its orders.
const ORDERS: u16 = 8099;
/// At two at a time and five seconds each they take longer than a call may.
const CALLERS: usize = 16;
/// More than any answer of an agent may cost the daemon.
const MEMORY_KIB: u64 = 64 << 10;

/// In the place of the guest agent, after the real one has done its part: it answers as it is told to over HTTP.
const FALSE_AGENT: &str = r#"
import http.server, json, os, threading, time
mode = 'honest'
asked = 0
port = os.open('/dev/virtio-ports/org.qemu.guest_agent.0', os.O_RDWR)
def say(data):
    while data:
        data = data[os.write(port, data):]
def nic(i, n, ip):
    return {'name': 'e%d' % i, 'hardware-address': '02:00:00:00:%02x:%02x' % (i >> 8 & 255, i & 255),
            'ip-addresses': [{'ip-address-type': 'ipv4', 'ip-address': ip, 'prefix': 24}] * n}
def answer(request):
    global asked
    asked += 1
    kind = request.get('execute')
    if mode == 'deaf':
        return
    if kind in ('guest-sync', 'guest-sync-delimited'):
        if mode == 'unsynced':
            say(b'{"return": "x"}\n' * 100)
        else:
            say(json.dumps({'return': request['arguments']['id']}).encode() + b'\n')
    elif mode == 'mute':
        pass
    elif mode == 'junk':
        say(b'}{ [\x00\xff\n')
    elif mode == 'error':
        say(json.dumps({'error': {'class': 'X' * 10000, 'desc': '\u001b[31m' * 1000}}).encode() + b'\n')
    elif mode == 'shape':
        say(b'{"return": [{"name": 5}, {"name": "e", "ip-addresses": {"a": 1}}, null]}\n')
    elif mode == 'huge':
        for _ in range(400):
            say(b'x' * 65536)
        say(b'\n')
    elif mode == 'texts':
        nics = [nic(0, 1, text) for text in ('999.1.1.1', 'not an address', '', '\u001b[31m', '0.0.0.0', 'fe80::1%eth0', '10.0.0.1' * 1000)]
        say(json.dumps({'return': nics}).encode() + b'\n')
    elif mode == 'many':
        say(json.dumps({'return': [nic(i, 2, '10.%d.%d.%d' % (i >> 16, i >> 8 & 255, i & 255)) for i in range(2000)]}).encode() + b'\n')
    elif mode == 'toomany':
        say(json.dumps({'return': [nic(i, 1, '10.1.1.1') for i in range(20000)]}).encode() + b'\n')
    else:
        say(json.dumps({'error': {'class': 'CommandNotFound', 'desc': 'no'}}).encode() + b'\n')
def serve():
    buffer = b''
    while True:
        try:
            data = os.read(port, 65536)
        except OSError:
            data = b''
        if not data:
            time.sleep(0.1)
            continue
        buffer += data
        *lines, buffer = buffer.split(b'\n')
        for line in lines:
            try:
                request = json.loads(line.strip(b'\xff'))
            except ValueError:
                continue
            try:
                answer(request)
            except OSError:
                pass
class Orders(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global mode
        word = self.path.strip('/')
        mode = mode if word == 'asked' else word
        self.send_response(200)
        self.end_headers()
        self.wfile.write((str(asked) if word == 'asked' else word).encode())
threading.Thread(target=serve, daemon=True).start()
http.server.HTTPServer(('', 8099), Orders).serve_forever()
"#;

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

fn primary(instance: &Instance) -> String {
    instance.addresses.iter().find(|a| a.primary).map(|a| a.ip.clone()).unwrap_or_else(|| panic!("no primary address: {instance:?}"))
}

/// The address that it has, or that it cannot be read: nothing else is true of a running guest whose address was known.
async fn address_or_unreadable(clients: &Clients, vm: &str, ip: &str, what: &str) -> Result<(), Reason> {
    match clients.get(&id(vm), &uid_of(vm)).await {
        Ok(instance) => {
            assert_eq!((instance.state(), primary(&instance).as_str()), (InstanceState::Running, ip), "{what}: {instance:?}");
            assert!(instance.addresses.len() <= 64, "{what}: {} addresses", instance.addresses.len());
            assert!(instance.addresses.iter().all(|a| a.ip.parse::<std::net::IpAddr>().is_ok()), "{what}: {instance:?}");
            Ok(())
        }
        Err(status) => {
            let refusal = Refusal::of(&status);
            assert_eq!(refusal.reason, Reason::AddressUnreadable, "{what}: {refusal:?}");
            Err(refusal.reason)
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_silent_or_talks_nonsense_costs_its_own_guest_an_answer_and_nobody_anything_else() {
    let Some(case) = Case::start("agent", &[HOST]) else { return };
    let host = case.host(HOST);
    let mut daemon = case.daemon(case.entry().lab_image(&case.lab, "debian").set("diskSizeGb", 3)).await;
    let clients = daemon.clients();
    let (vm, other) = (case.vm("a"), case.vm("other"));
    clients.create(case.request(&other, HOST)).await.expect("created");
    // a unit of its own, for cloud-init to come to its end
    let indented = FALSE_AGENT.replace('\n', "\n      ");
    let user_data = format!(
        "#cloud-config\nwrite_files:\n  - path: /run/agent.py\n    content: |\n      {indented}\nruncmd:\n  - [systemctl, stop, qemu-guest-agent]\n  \
         - [systemd-run, python3, /run/agent.py]\n"
    );
    let request = CreateRequest {
        placement: Some(Placement { zone: HOST.into(), machine_type: "small".into(), image: "debian".into(), ..Default::default() }),
        cloud_init: Some(CloudInit { user_data: user_data.into_bytes() }),
        ..case.request(&vm, HOST)
    };
    clients.create(request).await.expect("created");
    let ip = eventually("it has an address", BOOT_LIMIT, || async {
        let instance = clients.get(&id(&vm), &uid_of(&vm)).await.map_err(|e| e.to_string())?;
        if instance.state() == InstanceState::Running { Ok(primary(&instance)) } else { Err(format!("{:?}", instance.state_reason())) }
    })
    .await;
    let order = |mode: &str| host.netexec(&["curl", "-fsS", "-m", "10", &format!("http://{ip}:{ORDERS}/{mode}")]);
    eventually("the false agent takes orders", BOOT_LIMIT, || std::future::ready(order("honest"))).await;

    let modes = ["deaf", "mute", "unsynced", "junk", "error", "shape", "huge", "texts", "many", "toomany", "honest"];
    for mode in modes {
        order(mode).unwrap_or_else(|e| panic!("{mode}: {e}"));
        // one that has not asked it before: who was silent once is left alone for a while
        daemon.kill();
        daemon.restart().await;
        let clients = daemon.clients();
        clients.get(&id(&other), &uid_of(&other)).await.unwrap_or_else(|e| panic!("{mode}: another guest: {e:?}"));
        let before = Usage::of(daemon.pid()).resident_kib;
        // as many as agents have places of a link, and one who wants something else of the host
        let asked: Vec<_> = (0..2)
            .map(|_| {
                let (clients, vm, ip) = (clients.clone(), vm.clone(), ip.clone());
                tokio::spawn(async move { address_or_unreadable(&clients, &vm, &ip, mode).await })
            })
            .collect();
        clients.get(&id(&other), &uid_of(&other)).await.unwrap_or_else(|e| panic!("{mode}: another guest: {e:?}"));
        for call in asked {
            let _ = call.await.unwrap_or_else(|e| panic!("{mode}: {e}"));
        }
        let resident = Usage::of(daemon.pid()).resident_kib;
        assert!(resident < before + MEMORY_KIB, "{mode}: {before} KiB became {resident}");
    }

    order("deaf").expect("the last order");
    daemon.kill();
    daemon.restart().await;
    let clients = daemon.clients();
    let asked = || order("asked").expect("a number").trim().parse::<u32>().expect("a number");
    // more callers than a silent agent lets through within the budget of a call: whoever asks for anything else is served
    let before = asked();
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| {
            let (clients, vm, ip) = (clients.clone(), vm.clone(), ip.clone());
            tokio::spawn(async move { address_or_unreadable(&clients, &vm, &ip, "deaf").await })
        })
        .collect();
    eventually("the agent is asked", LIMIT, || async { if asked() > before { Ok(()) } else { Err("not yet".to_owned()) } }).await;
    refused(clients.get(&id("kt-agent-absent"), "").await, Reason::InstanceNotFound);
    assert!(callers.iter().any(|call| !call.is_finished()), "it was answered only when the silent agent's callers were back");
    clients.get(&id(&other), &uid_of(&other)).await.expect("another guest");
    for call in callers {
        let _ = call.await.unwrap_or_else(|e| panic!("deaf: {e}"));
    }
    let before = asked();
    for _ in 0..3 {
        let _ = address_or_unreadable(&clients, &vm, &ip, "left alone").await;
    }
    assert_eq!(asked(), before, "a silent agent is left alone for a while");

    // H3: a daemon that has never seen the address does not say that there is none
    daemon.kill();
    daemon.restart().await;
    let clients = daemon.clients();
    eventually("no source knows the address", LIMIT, || async {
        host.netexec(&["ip", "neigh", "flush", "dev", "br0"])?;
        address_or_unreadable(&clients, &vm, &ip, "fresh").await.err().ok_or_else(|| "the ARP table knows it".to_owned())
    })
    .await;
    // and a guest that starts anew has none, whatever was known of the one before
    host.virsh(&["destroy", &vm]);
    host.virsh(&["start", &vm]);
    let instance = clients.get(&id(&vm), &uid_of(&vm)).await.expect("read");
    assert_eq!((instance.state(), instance.addresses.len()), (InstanceState::Provisioning, 0), "{instance:?}");
    clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    refused(clients.get(&id(&vm), &uid_of(&vm)).await, Reason::InstanceNotFound);
}
