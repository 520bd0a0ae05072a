//! An operator between an API server and providers, with intervals that a test has time for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use egress_operator::crd::proxy::{External, Placement, ProxySpec};
use egress_operator::crd::{Condition, ConditionStatus, Proxy};
use egress_operator::discovery::Token;
use egress_operator::gc::GcOptions;
use egress_operator::health::thresholds::Thresholds;
use egress_operator::health::{ProbeOptions, ProberOptions};
use egress_operator::leader::LeaseOptions;
use egress_operator::provider_client::Provider;
use egress_operator::provider_health::MonitorOptions;
use egress_operator::pulse::{Pulse, PulseLayer};
use egress_operator::run::{Operator, RunError};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::client::ClientBuilder;
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::apiserver::ApiServer;
use crate::sim::SimProvider;

/// Namespace of the Proxies.
pub const NAMESPACE: &str = "default";
/// Only tells what is stuck.
pub const SOON: Duration = Duration::from_secs(30);
/// The token of discovery.
pub const TOKEN: &str = "a-token-for-tests-only";

/// What a test wants otherwise.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Of the collector.
    pub gc: GcOptions,
    /// Takes part in an election.
    pub leader_elect: bool,
    /// Of a lease.
    pub lease_duration: Duration,
    /// Between checks of providers.
    pub check_interval: Duration,
    /// Probes at a time.
    pub probes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gc: GcOptions { interval: Duration::from_secs(3600), minimum_age: Duration::from_secs(3600), most: 5, dry_run: false },
            leader_elect: false,
            lease_duration: Duration::from_secs(3),
            check_interval: Duration::from_secs(3600),
            probes: 64,
        }
    }
}

/// An operator that runs.
pub struct Rig {
    /// The API server, which outlives operators.
    pub server: ApiServer,
    /// The provider `sim`, which does too.
    pub sim: SimProvider,
    /// To ask the API server past all faults.
    pub client: Client,
    /// Where discovery is.
    pub discovery: String,
    /// Where /metrics is.
    pub ops: String,
    stop: CancellationToken,
    running: Option<JoinHandle<Result<(), RunError>>>,
    _files: tempfile::TempDir,
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").field("discovery", &self.discovery).field("ops", &self.ops).finish_non_exhaustive()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }
}

impl Rig {
    /// With everything new.
    pub async fn start() -> Self {
        Self::between(ApiServer::begin().await, SimProvider::default(), Settings::default()).await
    }

    /// Between an API server and a provider that are there.
    pub async fn between(server: ApiServer, sim: SimProvider, settings: Settings) -> Self {
        let providers: BTreeMap<String, Arc<dyn Provider>> =
            BTreeMap::from([("sim".to_owned(), Arc::new(sim.clone()) as Arc<dyn Provider>)]);
        Self::with(server, sim, providers, settings).await
    }

    /// With these providers.
    pub async fn with(server: ApiServer, sim: SimProvider, providers: BTreeMap<String, Arc<dyn Provider>>, settings: Settings) -> Self {
        let files = tempfile::tempdir().expect("a directory");
        std::fs::write(files.path().join("token"), TOKEN).expect("written");
        let listen = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (ops, discovery) = (listen().await, listen().await);
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
        let urls = (url(&ops), url(&discovery));
        let pulse = Pulse::default();
        let namespace = "egress-proxies".to_owned();
        let operator = Operator {
            namespace: namespace.clone(),
            installation_id: None,
            lease: settings.leader_elect.then(|| LeaseOptions {
                namespace: namespace.clone(),
                name: "egress-operator".to_owned(),
                identity: uuid::Uuid::new_v4().to_string(),
                duration: settings.lease_duration,
                renew_deadline: settings.lease_duration.mul_f64(2.0 / 3.0),
                retry: settings.lease_duration / 10,
            }),
            providers,
            prober: ProberOptions {
                probe: ProbeOptions { target: "example.org:443".to_owned(), canary: None, timeout: Duration::from_secs(5) },
                interval: Duration::from_millis(500),
                in_doubt: Duration::from_millis(50),
                thresholds: Thresholds { rise: 2, fall: 2 },
                most: settings.probes,
            },
            monitor: MonitorOptions { namespace, interval: settings.check_interval, refresh: Duration::from_secs(3600) },
            gc: settings.gc,
            ops: Some(ops),
            discovery: Some((discovery, Token::in_file(files.path().join("token")))),
            pulse: pulse.clone(),
        };
        // the way of a real client, with its layers, so that faults meet what they would meet
        let port = server.listen().await;
        let config = kube::Config::new(port.url.parse().expect("a URL"));
        let client = ClientBuilder::try_from(config).expect("a client").with_layer(&PulseLayer(pulse)).build();
        let stop = CancellationToken::new();
        let running = tokio::spawn({
            let stop = stop.clone();
            async move {
                // the port is served as long as the operator runs
                let _port = port;
                operator.run(client, stop).await
            }
        });
        let client = server.client();
        Self { server, sim, client, discovery: urls.1, ops: urls.0, stop, running: Some(running), _files: files }
    }

    /// As kill -9: nothing is finished.
    pub async fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            let _ = running.await;
        }
    }

    /// As SIGTERM; how it ended.
    pub async fn end(&mut self) -> Result<(), RunError> {
        self.stop.cancel();
        self.ended().await
    }

    /// Waits until it ends by itself.
    pub async fn ended(&mut self) -> Result<(), RunError> {
        let running = self.running.take().expect("it runs");
        tokio::time::timeout(SOON, running).await.expect("it ends in time").expect("no panic")
    }

    /// Another operator between the same.
    pub async fn again(&self, settings: Settings) -> Self {
        Self::between(self.server.clone(), self.sim.clone(), settings).await
    }

    /// Proxies.
    #[must_use]
    pub fn proxies(&self) -> Api<Proxy> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Applies a Proxy.
    pub async fn apply(&self, name: &str, spec: ProxySpec) -> Proxy {
        self.proxies().create(&PostParams::default(), &Proxy::new(name, spec)).await.expect("it is taken")
    }

    /// Deletes a Proxy; it may still be there for a while.
    pub async fn delete(&self, name: &str) {
        self.proxies().delete(name, &DeleteParams::default()).await.expect("it is there");
    }

    /// What a person does who does not want to wait: after some errors the next look is ten minutes away. A Proxy that is
    /// gone by now was looked at by itself.
    pub async fn look_again(&self, name: &str) {
        let now = uuid::Uuid::new_v4().to_string();
        let touch = serde_json::json!({ "metadata": { "annotations": { "look": now } } });
        match self.proxies().patch(name, &PatchParams::default(), &Patch::Merge(&touch)).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(e) => panic!("{e}"),
        }
    }

    /// Waits until a Proxy is as a test wants it.
    pub async fn until(&self, name: &str, what: &str, fits: impl Fn(&Proxy) -> bool) -> Proxy {
        let mut last = None;
        let end = tokio::time::Instant::now() + SOON;
        loop {
            if let Ok(Some(proxy)) = self.proxies().get_opt(name).await {
                if fits(&proxy) {
                    return proxy;
                }
                last = Some(proxy);
            }
            assert!(tokio::time::Instant::now() < end, "{what} does not come true within {SOON:?}: {last:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a Proxy is gone.
    pub async fn until_gone(&self, name: &str) {
        lab_tests::eventually("the Proxy is gone", SOON, || async {
            match self.proxies().get_opt(name).await {
                Ok(None) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }

    /// The sum of a counter over its labels.
    pub async fn metric(&self, name: &str) -> u64 {
        let text = reqwest::get(format!("{}/metrics", self.ops)).await.expect("an answer").text().await.expect("text");
        let values = text.lines().filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        values.filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }

    /// Reasons of the events about a Proxy.
    pub async fn events(&self, name: &str) -> Vec<String> {
        let events: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        let all = events.list(&kube::api::ListParams::default()).await.expect("events");
        all.items
            .into_iter()
            .filter(|e| e.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name))
            .filter_map(|e| e.reason)
            .collect()
    }
}

/// A port of loopback that was free a moment ago, for a program that binds it by itself.
#[must_use]
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// A Proxy that `sim` makes.
#[must_use]
pub fn managed(port: u16) -> ProxySpec {
    let placement = Placement { zone: "sim".into(), machine_type: "small".into(), image: "debian".into(), ..Placement::default() };
    ProxySpec { provider: Some("sim".into()), placement: Some(placement), cloud_init: None, port, external: None, provisioning: None }
}

/// A Proxy that is there.
#[must_use]
pub fn external(address: &str, port: u16) -> ProxySpec {
    ProxySpec { provider: None, placement: None, external: Some(External { address: address.to_owned() }), ..managed(port) }
}

/// A condition's status and reason; Unknown and empty where there is none.
#[must_use]
pub fn condition(proxy: &Proxy, type_: &str) -> (ConditionStatus, String) {
    let conditions: &[Condition] = proxy.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    conditions.iter().find(|c| c.type_ == type_).map_or((ConditionStatus::Unknown, String::new()), |c| (c.status, c.reason.clone()))
}

/// Whether a condition holds.
#[must_use]
pub fn is(proxy: &Proxy, type_: &str) -> bool {
    condition(proxy, type_).0 == ConditionStatus::True
}

/// A proxy that answers every CONNECT with a status; on every address of 127/8.
pub async fn answering_proxy(status: &'static str) -> (u16, JoinHandle<()>) {
    let (port, task, _) = counting_proxy(status).await;
    (port, task)
}

/// As [`answering_proxy`], and how often it was connected to.
pub async fn counting_proxy(status: &'static str) -> (u16, JoinHandle<()>, Arc<AtomicUsize>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    let task = tokio::spawn(async move {
        let mut open = tokio::task::JoinSet::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            open.spawn(async move {
                let _ = stream.read(&mut [0; 1024]).await;
                let _ = stream.write_all(format!("HTTP/1.1 {status}\r\n\r\n").as_bytes()).await;
            });
            while open.try_join_next().is_some() {}
        }
    });
    (port, task, seen)
}
