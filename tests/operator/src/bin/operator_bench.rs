//! How the operator carries thousands of Proxies; `tests/bench operator` builds what it needs and runs it.
//!
//! usage: operator-bench [--proxies N] [--idle SECONDS] [--provider-ms N] [--operator PATH]
//!
//! The operator is the built program in a process of its own, over sockets; API server, provider and proxies are in this
//! one. Prints what a Proxy costs until it is Ready, what all of them cost while nothing happens, and what a restart
//! costs. A bound that was missed is a finding, not a failure of the program.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use egress_operator::crd::Proxy;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use lab_tests::counters::Usage;
use operator_tests::apiserver::{ApiServer, Kind, kubeconfig};
use operator_tests::rig::{answering_proxy, free_port, managed};
use operator_tests::{Method, SimProvider, grpc};
use serde_json::Value;

/// How often progress is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Only ends a measurement that hangs.
const GIVE_UP: Duration = Duration::from_secs(900);
/// Until what follows a burst has passed: answers, timers, idle connections.
const CALM: Duration = Duration::from_secs(10);
/// In each namespace, so that no list is all in one.
const PER_NAMESPACE: usize = 500;

struct Options {
    proxies: usize,
    idle: Duration,
    provider: Duration,
    operator: PathBuf,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("usage: operator-bench [--proxies N] [--idle SECONDS] [--provider-ms N] [--operator PATH]");
        return ExitCode::from(2);
    };
    if !options.operator.exists() {
        eprintln!("{} is not built: cargo build --release -p egress-operator", options.operator.display());
        return ExitCode::FAILURE;
    }
    let mut report = Report::default();
    measure(&options, &mut report).await;
    println!("{} of {} bounds kept", report.judged - report.missed, report.judged);
    ExitCode::SUCCESS
}

fn options() -> Option<Options> {
    let beside = std::env::current_exe().ok()?.with_file_name("egress-operator");
    let mut options = Options { proxies: 5000, idle: Duration::from_secs(60), provider: Duration::ZERO, operator: beside };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next()?;
        match arg.as_str() {
            "--proxies" => options.proxies = value.parse().ok().filter(|n| *n > 0)?,
            "--idle" => options.idle = Duration::from_secs(value.parse().ok().filter(|n| *n > 0)?),
            "--provider-ms" => options.provider = Duration::from_millis(value.parse().ok()?),
            "--operator" => options.operator = value.into(),
            _ => return None,
        }
    }
    Some(options)
}

async fn measure(options: &Options, report: &mut Report) {
    let n = options.proxies;
    let dir = tempfile::tempdir().expect("a directory");
    let server = ApiServer::default();
    let port = server.listen().await;
    let sim = SimProvider::default();
    sim.delay(options.provider);
    let socket = dir.path().join("provider.sock");
    let _provider = grpc::serve(sim.clone(), &socket);
    let (proxy_port, _answering) = answering_proxy("200 OK").await;
    let providers = serde_json::json!({ "providers": [{ "name": "sim", "endpoint": format!("unix:{}", socket.display()) }] });
    std::fs::write(dir.path().join("providers.yaml"), providers.to_string()).expect("written");
    std::fs::write(dir.path().join("kubeconfig"), kubeconfig(&port.url)).expect("written");
    std::fs::write(dir.path().join("token"), TOKEN).expect("written");
    let world = World { server, sim, proxies: n };

    println!("{n} Proxies; {} processors; each call of the provider takes {:?}", processors(), options.provider);
    let mut operator = Operator::start(&options.operator, dir.path()).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    report.title("Until all are Ready");
    report.line("resident before the first Proxy, MiB", mib(operator.usage().resident_kib));

    let before = Reading::of(&world, &operator);
    let start = Instant::now();
    world.apply(proxy_port).await;
    report.line("applied within, s", seconds(start.elapsed()));
    let provisioned = world.until(Kind::Proxy, n, |proxy| holds(proxy, "Provisioned")).await - start;
    let ready = world.until(Kind::Proxy, n, |proxy| holds(proxy, "Ready")).await - start;
    report.line("all Provisioned after, s", seconds(provisioned));
    report.line("all Ready after (two probes each), s", seconds(ready));
    tokio::time::sleep(CALM).await;
    let spent = Reading::of(&world, &operator) - before;
    spent.show(report, n, Costs::Convergence);
    report.bound("most resident (VmHWM), MiB", mib(Usage::peak_kib(operator.pid())), memory_limit_mib());
    report.bound("most descriptors", operator.most_descriptors() as f64, 1024.0);
    report.line("bytes of log per Proxy", operator.log_bytes() as f64 / n as f64);

    report.title(&format!("While nothing happens, for {:?}", options.idle));
    let before = Reading::of(&world, &operator);
    let start = Instant::now();
    tokio::time::sleep(options.idle).await;
    let took = start.elapsed();
    let spent = Reading::of(&world, &operator) - before;
    report.bound("processor, % of one", spent.cpu.as_secs_f64() / took.as_secs_f64() * 100.0, 10.0);
    report.line("processor per Proxy and minute, ms", spent.cpu.as_secs_f64() * 1e3 / n as f64 / (took.as_secs_f64() / 60.0));
    spent.show(report, n, Costs::Minute(took));
    report.line("resident, MiB", mib(operator.usage().resident_kib));
    report.line("resident per Proxy, KiB", operator.usage().resident_kib as f64 / n as f64);
    report.line("descriptors", operator.usage().descriptors as f64);
    discovery(report, &operator).await;

    report.title("A restart");
    let start = Instant::now();
    operator.end();
    report.line("ended after SIGTERM within, s", seconds(start.elapsed()));
    let zero = Reading { cpu: Duration::ZERO, ..Reading::of(&world, &operator) };
    let start = Instant::now();
    let mut operator = Operator::start(&options.operator, dir.path()).await;
    report.line("cache filled after, s", seconds(start.elapsed()));
    let least_ready = Arc::new(AtomicUsize::new(n));
    let watching = tokio::spawn({
        let (world, least) = (world.clone(), least_ready.clone());
        async move {
            loop {
                least.fetch_min(world.server.holding(Kind::Proxy, |p| holds(p, "Ready")), Ordering::Relaxed);
                tokio::time::sleep(LOOK).await;
            }
        }
    });
    let asked = zero.calls.get("Get").copied().unwrap_or(0) + n;
    eventually("each was asked once", || world.sim.calls(Method::Get) >= asked).await;
    report.line("each was asked once after, s", seconds(start.elapsed()));
    // until each had the probes that decide, and what follows from them
    while operator.probes().await < 2 * n {
        assert!(start.elapsed() < GIVE_UP, "the probes do not come");
        tokio::time::sleep(LOOK).await;
    }
    report.line("each was probed twice after, s", seconds(start.elapsed()));
    tokio::time::sleep(CALM).await;
    watching.abort();
    let spent = Reading::of(&world, &operator) - zero;
    report.least("Ready all the time, of all", least_ready.load(Ordering::Relaxed) as f64, n as f64);
    spent.show(report, n, Costs::Restart);
    report.bound("most resident (VmHWM), MiB", mib(Usage::peak_kib(operator.pid())), memory_limit_mib());
    report.bound("most descriptors", operator.most_descriptors() as f64, 1024.0);

    report.title("Until all are deleted");
    let before = Reading::of(&world, &operator);
    let start = Instant::now();
    world.delete().await;
    world.until(Kind::Proxy, 0, |_| true).await;
    report.line("all gone after, s", seconds(start.elapsed()));
    let spent = Reading::of(&world, &operator) - before;
    spent.show(report, n, Costs::Deletion);
    report.bound("instances left", world.sim.instances().len() as f64, 0.0);
    tokio::time::sleep(CALM).await;
    report.line("resident afterwards, MiB", mib(operator.usage().resident_kib));
    operator.end();
}

/// What a client of discovery waits for.
async fn discovery(report: &mut Report, operator: &Operator) {
    let client = reqwest::Client::new();
    let url = format!("http://127.0.0.1:{}/v1/proxies", operator.discovery);
    let ask = async |etag: Option<String>| {
        let mut request = client.get(&url).bearer_auth(TOKEN);
        if let Some(etag) = etag {
            request = request.header("if-none-match", etag);
        }
        let start = Instant::now();
        let answer = request.send().await.expect("an answer");
        let etag = answer.headers().get("etag").and_then(|e| e.to_str().ok()).unwrap_or_default().to_owned();
        let bytes = answer.bytes().await.expect("a body").len();
        (start.elapsed(), bytes, etag)
    };
    let (_, _, etag) = ask(None).await;
    let (full, bytes, _) = ask(None).await;
    let (again, _, _) = ask(Some(etag)).await;
    report.line("discovery: all Ready ones, ms", full.as_secs_f64() * 1e3);
    report.line("discovery: size of that, KiB", bytes as f64 / 1024.0);
    report.line("discovery: the same with its ETag (304), ms", again.as_secs_f64() * 1e3);
}

const TOKEN: &str = "a-token-for-a-benchmark";

/// What is outside the operator.
#[derive(Clone)]
struct World {
    server: ApiServer,
    sim: SimProvider,
    proxies: usize,
}

impl World {
    fn api(&self, of: usize) -> Api<Proxy> {
        Api::namespaced(self.server.client_aside(), &format!("team-{}", of / PER_NAMESPACE))
    }

    async fn apply(&self, port: u16) {
        for i in 0..self.proxies {
            let proxy = as_applied(&format!("proxy-{i:05}"), port);
            self.api(i).create(&PostParams::default(), &proxy).await.expect("it is taken");
        }
    }

    async fn delete(&self) {
        for i in 0..self.proxies {
            self.api(i).delete(&format!("proxy-{i:05}"), &DeleteParams::default()).await.expect("it is there");
        }
    }

    /// When exactly so many objects of a kind fit.
    async fn until(&self, kind: Kind, count: usize, fits: impl Fn(&Value) -> bool) -> Instant {
        eventually("all are as they should be", || self.server.holding(kind, &fits) == count).await
    }
}

async fn eventually(what: &str, holds: impl Fn() -> bool) -> Instant {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < GIVE_UP, "{what}: not within {GIVE_UP:?}");
        tokio::time::sleep(LOOK).await;
    }
    Instant::now()
}

/// With what `kubectl apply` and a real API server put on an object: more than half of its bytes.
fn as_applied(name: &str, port: u16) -> Proxy {
    let mut spec = managed(port);
    spec.cloud_init = Some(egress_operator::crd::proxy::CloudInit {
        inline: Some(format!("#cloud-config\nhostname: {name}\npackages: [squid]\nruncmd:\n- systemctl enable --now squid\n")),
        ..Default::default()
    });
    let mut proxy = Proxy::new(name, spec);
    let applied = serde_json::to_string(&proxy).expect("JSON");
    proxy.metadata.labels = Some([("purpose".to_owned(), "web".to_owned())].into());
    proxy.metadata.annotations = Some([("kubectl.kubernetes.io/last-applied-configuration".to_owned(), applied)].into());
    proxy.metadata.managed_fields = serde_json::from_value(serde_json::json!([
        { "manager": "kubectl-client-side-apply", "operation": "Update", "apiVersion": "egressproxies.io/v1alpha1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
          "fieldsV1": { "f:metadata": { "f:annotations": { ".": {}, "f:kubectl.kubernetes.io/last-applied-configuration": {} }, "f:labels": { ".": {}, "f:purpose": {} } },
            "f:spec": { ".": {}, "f:cloudInit": { ".": {}, "f:inline": {} }, "f:placement": { ".": {}, "f:image": {}, "f:machineType": {}, "f:zone": {} }, "f:port": {}, "f:provider": {} } } },
        { "manager": "egress-operator", "operation": "Update", "apiVersion": "egressproxies.io/v1alpha1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
          "fieldsV1": { "f:metadata": { "f:finalizers": { ".": {}, "v:\"egressproxies.io/instance\"": {} } } } },
        { "manager": "egress-operator", "operation": "Update", "subresource": "status", "apiVersion": "egressproxies.io/v1alpha1", "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
          "fieldsV1": { "f:status": { ".": {}, "f:address": {}, "f:addresses": {}, "f:conditions": {
            ".": {}, "k:{\"type\":\"Provisioned\"}": { ".": {}, "f:lastTransitionTime": {}, "f:message": {}, "f:observedGeneration": {}, "f:reason": {}, "f:since": {}, "f:status": {}, "f:type": {} },
            "k:{\"type\":\"Healthy\"}": { ".": {}, "f:lastTransitionTime": {}, "f:message": {}, "f:observedGeneration": {}, "f:reason": {}, "f:since": {}, "f:status": {}, "f:type": {} },
            "k:{\"type\":\"Ready\"}": { ".": {}, "f:lastTransitionTime": {}, "f:message": {}, "f:observedGeneration": {}, "f:reason": {}, "f:since": {}, "f:status": {}, "f:type": {} } },
            "f:instanceId": {}, "f:instanceName": {}, "f:observedGeneration": {}, "f:phase": {}, "f:specHash": {}, "f:zone": {} } } }
    ]))
    .expect("managed fields");
    proxy
}

fn holds(proxy: &Value, condition: &str) -> bool {
    let all = proxy["status"]["conditions"].as_array();
    all.is_some_and(|all| all.iter().any(|c| c["type"] == condition && c["status"] == "True"))
}

/// The program under measurement; ended when dropped.
struct Operator {
    child: Child,
    log: PathBuf,
    ops: u16,
    discovery: u16,
    most_descriptors: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Operator {
    /// Starts it and waits until its cache is filled.
    async fn start(program: &Path, dir: &Path) -> Self {
        let log = dir.join("operator.log");
        let (ops, discovery) = (free_port(), free_port());
        let out = std::fs::File::options().create(true).append(true).open(&log).expect("a file");
        let child = Command::new(program)
            .arg("--providers-file")
            .arg(dir.join("providers.yaml"))
            .args(["--probe-target", "example.org:443"])
            .args(["--ops-listen", &format!("127.0.0.1:{ops}"), "--discovery-listen", &format!("127.0.0.1:{discovery}")])
            .arg("--discovery-token-file")
            .arg(dir.join("token"))
            .env("KUBECONFIG", dir.join("kubeconfig"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(out)
            .spawn()
            .expect("it starts");
        let most_descriptors = Arc::new(AtomicUsize::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        // a thread, so that nothing else here delays it
        std::thread::spawn({
            let (most, stop, pid) = (most_descriptors.clone(), stop.clone(), child.id());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
                    most.fetch_max(open, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
        let operator = Self { child, log, ops, discovery, most_descriptors, stop };
        let start = Instant::now();
        let url = format!("http://127.0.0.1:{ops}/readyz");
        while !reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success()) {
            assert!(start.elapsed() < Duration::from_secs(60), "it is not ready: {}", operator.log_tail());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        operator
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    fn usage(&self) -> Usage {
        Usage::of(self.pid())
    }

    fn most_descriptors(&self) -> usize {
        self.most_descriptors.load(Ordering::Relaxed)
    }

    /// Of user and system together.
    fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        // the name, in parentheses, may hold anything
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks: u64 = [11, 12].iter().filter_map(|n| fields.get(*n)?.parse::<u64>().ok()).sum();
        // a hundred ticks a second, wherever Linux shows them
        Duration::from_millis(ticks * 10)
    }

    async fn probes(&self) -> usize {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.ops)).await.expect("metrics").text().await.expect("text");
        let values = text.lines().filter(|l| l.starts_with("egress_operator_probes_total{"));
        values.filter_map(|l| l.rsplit(' ').next()?.parse::<usize>().ok()).sum()
    }

    fn log_bytes(&self) -> u64 {
        std::fs::metadata(&self.log).map_or(0, |m| m.len())
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// As SIGTERM; waits for its end.
    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), nix::sys::signal::Signal::SIGTERM);
        let status = self.child.wait().expect("it was started here");
        if !status.success() {
            println!("the operator ended with {status}{}:\n{}", if status.core_dumped() { " and a core" } else { "" }, self.log_tail());
        }
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What everything has cost up to a moment.
#[derive(Clone)]
struct Reading {
    cpu: Duration,
    requests: BTreeMap<String, usize>,
    calls: BTreeMap<String, usize>,
}

/// What a cost is held against.
enum Costs {
    Convergence,
    Minute(Duration),
    Restart,
    Deletion,
}

impl Reading {
    fn of(world: &World, operator: &Operator) -> Self {
        let calls = [Method::Create, Method::Get, Method::Delete, Method::List, Method::Check];
        Self {
            cpu: operator.cpu(),
            requests: world.server.tally(),
            calls: calls.into_iter().map(|m| (format!("{m:?}"), world.sim.calls(m))).collect(),
        }
    }

    fn show(&self, report: &mut Report, proxies: usize, costs: Costs) {
        let (per, minutes) = match costs {
            Costs::Minute(took) => ("per Proxy and minute", took.as_secs_f64() / 60.0),
            _ => ("per Proxy", 1.0),
        };
        if minutes == 1.0 {
            report.line("processor per Proxy, ms", self.cpu.as_secs_f64() * 1e3 / proxies as f64);
        }
        let rate = |count: usize| count as f64 / proxies as f64 / minutes;
        for (method, count) in self.calls.iter().filter(|(_, count)| **count > 0) {
            let bound = match (&costs, method.as_str()) {
                (Costs::Convergence, "Create") | (Costs::Deletion, "Delete") => Some(1.0),
                // for what the probes say; how the VM is was the answer of the Create
                (Costs::Convergence, "Get") => Some(1.0),
                // each once in 60 to 72 seconds; of those that were made together a short look may see more than its part
                (Costs::Minute(_), "Get") => Some(1.1),
                // to look how it is, and for what the probes say
                (Costs::Restart, "Get") => Some(2.0),
                _ => None,
            };
            report.maybe(&format!("provider: {method} {per}"), rate(*count), bound);
        }
        let mut all = 0;
        for (label, count) in self.requests.iter().filter(|(_, count)| **count > 0) {
            all += count;
            let bound = match (&costs, label.as_str()) {
                (Costs::Convergence, "PUT proxies/status") => Some(3.0),
                (Costs::Minute(_) | Costs::Restart, "PUT proxies/status" | "POST events") => Some(0.0),
                _ => None,
            };
            report.maybe(&format!("API server: {label} {per}"), rate(*count), bound);
        }
        report.line(&format!("API server: all requests {per}"), rate(all));
    }
}

impl std::ops::Sub for Reading {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let less = |now: BTreeMap<String, usize>, then: BTreeMap<String, usize>| {
            now.into_iter().map(|(k, n)| (k.clone(), n - then.get(&k).copied().unwrap_or(0))).collect()
        };
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            requests: less(self.requests, before.requests),
            calls: less(self.calls, before.calls),
        }
    }
}

#[derive(Default)]
struct Report {
    judged: usize,
    missed: usize,
}

impl Report {
    fn title(&mut self, title: &str) {
        println!("\n{title}");
    }

    fn line(&mut self, label: &str, value: f64) {
        println!("  {label:<62} {:>10}", Plain(value));
    }

    fn maybe(&mut self, label: &str, value: f64, most: Option<f64>) {
        match most {
            Some(most) => self.bound(label, value, most),
            None => self.line(label, value),
        }
    }

    fn bound(&mut self, label: &str, value: f64, most: f64) {
        self.judge(label, value, "at most", most, value <= most);
    }

    fn least(&mut self, label: &str, value: f64, least: f64) {
        self.judge(label, value, "at least", least, value >= least);
    }

    fn judge(&mut self, label: &str, value: f64, how: &str, bound: f64, kept: bool) {
        self.judged += 1;
        self.missed += usize::from(!kept);
        println!("  {label:<62} {:>10}  {how} {}: {}", Plain(value), Plain(bound), if kept { "kept" } else { "MISSED" });
    }
}

/// With as many digits as say something.
struct Plain(f64);

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = if self.0.fract() == 0.0 || self.0.abs() >= 1000.0 {
            0
        } else if self.0.abs() >= 10.0 {
            1
        } else {
            3
        };
        f.pad(&format!("{:.digits$}", self.0))
    }
}

fn seconds(of: Duration) -> f64 {
    of.as_secs_f64()
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// What the shipped pod gives the operator.
fn memory_limit_mib() -> f64 {
    let deployment: Value = serde_saphyr::from_str(include_str!("../../../../deploy/base/deployment.yaml")).expect("YAML");
    let containers = deployment["spec"]["template"]["spec"]["containers"].as_array().expect("containers");
    let ours = containers.iter().find(|c| c["name"] == "operator" || c["name"] == "egress-operator").expect("the operator's container");
    let limit = ours["resources"]["limits"]["memory"].as_str().expect("a limit");
    limit.strip_suffix("Mi").and_then(|n| n.parse().ok()).expect("a limit in Mi")
}
