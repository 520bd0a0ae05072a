//! The whole chain with nothing replaced but the API server: a Proxy is applied, the operator asks the daemon, the daemon
//! makes a VM on a hypervisor, the VM boots, a CONNECT goes through its Squid, the proxy is offered and leased, replaced
//! when its image changes, and removed until the host is empty but for the bases.
//!
//! Guests are reached from the network namespace of their hypervisor only, so the operator runs there, and so does the
//! socket of the API server; the daemon's socket is a file and needs no network.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use egress_operator::conditions::{HEALTHY, READY};
use egress_operator::crd::proxy::{CloudInit, Placement, ProxySpec};
use egress_operator::crd::{ProviderHealth, Proxy};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use lab_tests::{Case, Cleanup, Collector, Daemon, Host, eventually};
use opentelemetry_proto::tonic::trace::v1::Span;
use operator_tests::ApiServer;
use operator_tests::apiserver::kubeconfig;
use operator_tests::rig::{condition, is};
use serde_json::json;

const HOST: &str = "hv1";
const SECOND_HOST: &str = "hv2";
/// Only ends a test that would hang: a VM boots for most of a minute under emulation, twice here.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
const API: &str = "127.0.0.1:26443";
const DISCOVERY: &str = "127.0.0.1:26480";
const TOKEN: &str = "a-token-for-tests-only";

/// The built operator in a network namespace; ended when dropped.
struct Operator {
    child: Child,
    log: PathBuf,
}

impl Operator {
    /// In the network of a host's guests.
    fn start(host: &Host, dir: &Path, target: &str) -> Self {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", host.netns_path.display())).arg("--").arg(Self::program());
        Self::run(command, dir, target)
    }

    fn program() -> PathBuf {
        let program = lab_tests::daemon::binary().with_file_name("egress-operator");
        assert!(program.exists(), "{} is not built: cargo build -p egress-operator", program.display());
        program
    }

    fn run(mut command: Command, dir: &Path, target: &str) -> Self {
        let log = dir.join("operator.log");
        let out = std::fs::File::create(&log).expect("a file");
        let child = command
            .args(["--providers-file", &dir.join("operator.yaml").display().to_string()])
            .args(["--probe-target", target, "--probe-interval", "2s", "--check-interval", "2s", "--ops-listen", "127.0.0.1:0"])
            .args([
                "--discovery-listen",
                DISCOVERY,
                "--discovery-token-file",
                &dir.join("token").display().to_string(),
                "--log-level",
                "debug",
            ])
            .env("KUBECONFIG", dir.join("kubeconfig"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(out)
            .spawn()
            .expect("nsenter");
        Self { child, log }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Operator {
    /// As SIGTERM; returns when it has ended.
    fn end(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<_> = log.lines().rev().take(40).collect();
            eprintln!("the operator's last lines:\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
    }
}

/// A socket that listens in the network namespace of a host and is used from here.
fn listener_in(host: &Host, at: &'static str) -> std::net::TcpListener {
    let netns = std::fs::File::open(&host.netns_path).expect("the namespace");
    // a thread of its own: it ends in the other namespace
    std::thread::spawn(move || {
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).expect("root may");
        std::net::TcpListener::bind(at).expect("a port")
    })
    .join()
    .expect("no panic")
}

/// What the operator needs beside its flags: where the API server is, its token, its provider.
fn write_files(dir: &Path, api: &str, daemon: &Daemon) {
    std::fs::write(dir.join("kubeconfig"), kubeconfig(api)).expect("written");
    std::fs::write(dir.join("token"), TOKEN).expect("written");
    let providers = json!({ "providers": [{ "name": "kvm2-lab", "endpoint": format!("unix:{}", daemon.socket().display()) }] });
    std::fs::write(dir.join("operator.yaml"), providers.to_string()).expect("written");
}

async fn until(proxies: &Api<Proxy>, what: &str, fits: impl Fn(&Proxy) -> bool) -> Proxy {
    eventually(what, BOOT_LIMIT, || async {
        let proxy = proxies.get("squid").await.map_err(|e| e.to_string())?;
        if fits(&proxy) { Ok(proxy) } else { Err(serde_json::to_string(&proxy.status).unwrap_or_default()) }
    })
    .await
}

fn curl(host: &Host, method: &str, path: &str, body: &str) -> serde_json::Value {
    let auth = format!("Authorization: Bearer {TOKEN}");
    let url = format!("http://{DISCOVERY}{path}");
    let answer = host.netexec(&["curl", "-sS", "-m", "10", "-X", method, "-H", &auth, "-d", body, &url]).expect("curl");
    if answer.trim().is_empty() {
        serde_json::Value::Null
    } else {
        serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{e}: {answer}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_is_applied_becomes_a_vm_that_is_probed_offered_replaced_and_removed() {
    let Some(case) = Case::start("chain", &[HOST]) else { return };
    let host = case.host(HOST);
    let _px = Cleanup::of(vec![host.clone()], "px-", "kt-chain");
    let image = case.lab.image("debian");
    let entry = case.entry().set("diskSizeGb", 3).lab_image(&case.lab, "debian");
    // the same image under another name is another image to the operator
    let entry = entry.image("debian-next", json!({ "url": image.url, "sha256": image.sha256, "firmware": "bios" }));
    let daemon = case.daemon(entry).await;

    let server = ApiServer::default();
    let listener = listener_in(host, API);
    listener.set_nonblocking(true).expect("a socket");
    let port = server.listen_on(tokio::net::TcpListener::from_std(listener).expect("a socket"));
    let dir = case.dir();
    write_files(dir, &port.url, &daemon);
    let operator = Operator::start(host, dir, &host.connect_target);

    let proxies: Api<Proxy> = Api::namespaced(server.client(), "default");
    let placement = Placement { zone: HOST.into(), machine_type: "small".into(), image: "debian".into(), ..Placement::default() };
    let cloud_init = CloudInit { inline: Some("#cloud-config\nhostname: egress\n".into()), ..CloudInit::default() };
    let spec = ProxySpec {
        provider: Some("kvm2-lab".into()),
        placement: Some(placement),
        cloud_init: Some(cloud_init),
        port: 3128,
        external: None,
        provisioning: None,
    };
    proxies.create(&PostParams::default(), &Proxy::new("squid", spec)).await.expect("applied");

    let ready = until(&proxies, "a real CONNECT through Squid", |p| is(p, READY)).await;
    assert_eq!(condition(&ready, HEALTHY).1, "ConnectOk");
    let first = ready.status.clone().expect("a status");
    let vm = format!("px-{}", ready.uid().expect("a uid"));
    assert_eq!(first.instance_id.as_deref(), Some(format!("hosts/{HOST}/domains/{vm}").as_str()));
    assert!(host.is_active(&vm));
    let health: Api<ProviderHealth> = Api::namespaced(server.client(), "egress-proxies");
    eventually("the ProviderHealth says 1/1", BOOT_LIMIT, || async {
        let seen = health.get("kvm2-lab").await.map_err(|e| e.to_string())?.status.unwrap_or_default();
        if seen.ready == "1/1" { Ok(()) } else { Err(format!("{seen:?}")) }
    })
    .await;

    eventually("it is offered", BOOT_LIMIT, || async {
        let list = curl(host, "GET", "/v1/proxies", "");
        if list["items"][0]["address"].as_str() == first.address.as_deref() { Ok(()) } else { Err(list.to_string()) }
    })
    .await;
    let lease = curl(host, "POST", "/v1/leases", r#"{"client": "e2e", "ttlSeconds": 60}"#);
    assert_eq!(lease["proxy"]["name"], "squid", "{lease}");
    let through = format!("http://{}:3128", lease["proxy"]["address"].as_str().expect("an address"));
    let target = format!("http://{}/", host.connect_target);
    let body = host.netexec(&["curl", "-sS", "-m", "30", "--proxytunnel", "--proxy", &through, &target]).expect("the client gets through");
    assert!(body.contains(first.address.as_deref().expect("an address")), "the target saw another client: {body}");

    let other = json!({ "spec": { "placement": { "image": "debian-next" } } });
    proxies.patch("squid", &PatchParams::default(), &Patch::Merge(&other)).await.expect("patched");
    until(&proxies, "replaced and Ready", |p| p.status.as_ref().is_some_and(|s| s.spec_hash != first.spec_hash) && is(p, READY)).await;
    assert!(host.is_active(&vm));

    delete(&proxies).await;
    assert!(!host.domains().contains(&vm));
    let left: Vec<_> = host.volumes("default").into_iter().filter(|v| v.starts_with(&vm)).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(case.bases(HOST).iter().any(|v| v.contains("-debian-")), "the bases stay: {:?}", case.bases(HOST));
    assert!(!operator.log().contains("hostname: egress"), "user-data is in no log");
    drop(operator);
}

/// Deletes the Proxy, and waits until it is gone.
async fn delete(proxies: &Api<Proxy>) {
    proxies.delete("squid", &DeleteParams::default()).await.expect("deleted");
    eventually("the Proxy is gone", BOOT_LIMIT, || async {
        match proxies.get_opt("squid").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// A span by its name and service; the one that `fits` where there are several.
fn span<'a>(all: &'a [(String, Span)], service: &str, name: &str, fits: impl Fn(&Span) -> bool) -> &'a Span {
    let found = all.iter().find(|(of, span)| of == service && span.name == name && fits(span));
    let names =
        || all.iter().map(|(of, s)| format!("{of}: {} {:?} < {:?}", s.name, s.span_id, s.parent_span_id)).collect::<Vec<_>>().join("\n");
    &found.unwrap_or_else(|| panic!("no such span {name} of {service}:\n{}", names())).1
}

/// Whether a span is below another one.
fn is_below(all: &[(String, Span)], span: &Span, ancestor: &Span) -> bool {
    let parent = |of: &Span| all.iter().map(|(_, s)| s).find(|s| s.trace_id == of.trace_id && s.span_id == of.parent_span_id);
    std::iter::successors(parent(span), |s| parent(s)).any(|s| s.span_id == ancestor.span_id)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconciliation_its_call_and_what_the_daemon_does_for_it_are_one_trace() {
    // not the host of the other test: what is swept there is not this one's
    let Some(case) = Case::start("trace", &[SECOND_HOST]) else { return };
    let host = case.host(SECOND_HOST);
    let _px = Cleanup::of(vec![host.clone()], "px-", "kt-trace");
    let (collector, at) = Collector::start().await;
    let endpoint = format!("http://{at}");
    let entry = case.entry().lab_image(&case.lab, "tiny");
    let files = case.dir().join("d");
    std::fs::create_dir(&files).expect("a directory");
    let variables = vec![("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.clone())];
    let mut daemon = Daemon::start_logging(&files, &entry.into(), "info", "text", variables).await;

    let server = ApiServer::default();
    let port = server.listen().await;
    let dir = case.dir();
    write_files(dir, &port.url, &daemon);
    let mut command = Command::new(Operator::program());
    command.args(["--otlp-endpoint", &endpoint]);
    let mut operator = Operator::run(command, dir, "127.0.0.1:1");
    let proxies: Api<Proxy> = Api::namespaced(server.client(), "default");
    let placement = Placement { zone: SECOND_HOST.into(), machine_type: "small".into(), image: "tiny".into(), ..Placement::default() };
    let spec = ProxySpec {
        placement: Some(placement),
        provider: Some("kvm2-lab".into()),
        cloud_init: None,
        port: 3128,
        external: None,
        provisioning: None,
    };
    proxies.create(&PostParams::default(), &Proxy::new("squid", spec)).await.expect("applied");
    until(&proxies, "the VM is there", |p| p.status.as_ref().is_some_and(|s| s.instance_id.is_some())).await;
    delete(&proxies).await;
    // both send what they have when they end
    operator.end();
    assert!(daemon.stop().await.success());

    let all = collector.spans();
    for (call, of_libvirt) in [("Create", "kvm2.define_domain"), ("Delete", "kvm2.undefine_domain")] {
        let asked = span(&all, "egress-operator", call, |_| true);
        let reconciliation = span(&all, "egress-operator", "Reconcile Proxy", |s| s.span_id == asked.parent_span_id);
        let served = span(&all, "kvm2-providerd", call, |s| s.parent_span_id == asked.span_id);
        let done = span(&all, "kvm2-providerd", of_libvirt, |s| is_below(&all, s, served));
        for other in [asked, served, done] {
            assert_eq!(other.trace_id, reconciliation.trace_id, "{call}");
        }
    }
}
