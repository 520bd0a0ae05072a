//! The operator as a whole: what runs on every replica, what runs on the leader, and in which order it all ends.
//!
//! ```text
//! every replica:  watch of Proxies ─▶ store ─▶ discovery (read)      /metrics /livez /readyz      election
//! the leader:     store ─▶ reconciler      prober      monitor      collector      leases
//! ```
//! Who loses the lease ends the process: nothing of a leader goes on after it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference};
use kube::runtime::controller::{self, Controller};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::utils::predicates;
use kube::runtime::{Predicate as _, PredicateConfig, WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceBuilder;

use crate::address_book::AddressBook;
use crate::crd::Proxy;
use crate::discovery::{self, Discovery, LeaseDesk, Token};
use crate::gc::{Collector, GcOptions};
use crate::health::{Board, Prober, ProberOptions};
use crate::leader::{Elector, Ended, Leadership, LeaseOptions};
use crate::metrics::Metrics;
use crate::ops::{self, Ops};
use crate::provider_client::Providers;
use crate::provider_health::{Monitor, MonitorOptions};
use crate::pulse::Pulse;
use crate::reconcile::{self, Context};
use crate::user_data::UserDataSource;

/// Requests of reconciliations at the API server at a time, and what each may take.
const API_IN_FLIGHT: usize = 32;
const API_BUDGET: Duration = Duration::from_secs(30);
/// How often leases that have ended are removed.
const EXPIRE: Duration = Duration::from_secs(10);
/// What the tasks of a leader may take to end.
const DRAIN: Duration = Duration::from_secs(20);

/// Everything that an operator is made of.
#[derive(Debug)]
pub struct Operator {
    /// Its own namespace.
    pub namespace: String,
    /// Whose instances ours are; None: the UID of kube-system.
    pub installation_id: Option<String>,
    /// None: act without a Lease.
    pub lease: Option<LeaseOptions>,
    /// Configured providers.
    pub providers: Providers,
    /// Of the probes.
    pub prober: ProberOptions,
    /// Of the monitor.
    pub monitor: MonitorOptions,
    /// Of the collector.
    pub gc: GcOptions,
    /// Where /metrics is.
    pub ops: Option<TcpListener>,
    /// Where discovery is, and who may ask.
    pub discovery: Option<(TcpListener, Token)>,
    /// Of the watch.
    pub pulse: Pulse,
}

/// Why an operator ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// At the start.
    #[error("the API server cannot be asked for the namespace kube-system; is the service account allowed to get it?")]
    Installation(#[source] kube::Error),
    /// The lease is another's now.
    #[error("leadership is lost: the process ends, and another one goes on")]
    Lost,
    /// A part that never ends has ended.
    #[error("{0} has ended: this is a bug, please report it")]
    PartEnded(&'static str),
}

impl Operator {
    /// Runs until it is stopped.
    ///
    /// # Errors
    /// It cannot start, has lost the lease, or one of its parts has died.
    pub async fn run(self, client: Client, stop: CancellationToken) -> Result<(), RunError> {
        let installation_id = match &self.installation_id {
            Some(id) => id.clone(),
            None => installation(&client).await.map_err(RunError::Installation)?,
        };
        tracing::info!(installation_id, providers = ?self.providers.keys().collect::<Vec<_>>(), "starting");
        let leadership = if self.lease.is_some() { Leadership::default() } else { Leadership::always() };
        let metrics = Arc::new(Metrics::default());
        let synced = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(Bell::default());
        let (watch_task, store) = watch_of_proxies(client.clone(), synced.clone(), bell.clone());
        let desk = Arc::new(LeaseDesk::new(client.clone(), &self.namespace));

        // servers end last, so that a drain can be watched
        let servers_stop = CancellationToken::new();
        let mut servers: JoinSet<&'static str> = JoinSet::new();
        servers.spawn(async move {
            watch_task.await;
            "the watch of Proxies"
        });
        if let Some(listener) = self.ops {
            let (ops, stop) = (Ops { metrics: metrics.clone(), pulse: self.pulse.clone(), synced: synced.clone() }, servers_stop.clone());
            servers.spawn(async move {
                log_error("the ops server", ops::serve(ops, listener, stop).await);
                "the ops server"
            });
        }
        if let Some((listener, token)) = self.discovery {
            let discovery = Discovery { proxies: store.clone(), desk: desk.clone(), leadership: leadership.clone(), token };
            let stop = servers_stop.clone();
            servers.spawn(async move {
                log_error("discovery", discovery::serve(Arc::new(discovery), listener, stop).await);
                "discovery"
            });
        }

        let lead = async {
            let mut elector = self.lease.clone().map(|options| Elector::new(client.clone(), options, leadership.clone()));
            if let Some(elector) = &mut elector
                && !elector.acquire(&stop).await
            {
                return Ok(());
            }
            metrics.leading(true);
            let lead_stop = CancellationToken::new();
            let parts = Parts {
                client: client.clone(),
                installation_id,
                providers: self.providers,
                leadership: leadership.clone(),
                metrics: metrics.clone(),
                desk,
                synced,
                store,
                bell,
                prober: self.prober,
                monitor: self.monitor,
                gc: self.gc,
                namespace: self.namespace.clone(),
            };
            let leading = parts.run(lead_stop.clone());
            tokio::pin!(leading);
            let ended = tokio::select! {
                part = &mut leading => Err(RunError::PartEnded(part)),
                ended = async { match &mut elector { Some(elector) => hold_until(elector, &stop).await, None => { stop.cancelled().await; Ended::Stopped } } } => match ended {
                    Ended::Stopped => Ok(()),
                    Ended::Lost => Err(RunError::Lost),
                },
            };
            metrics.leading(false);
            lead_stop.cancel();
            if ended.is_ok() {
                // work that runs is finished under the lease, which is released after it
                if tokio::time::timeout(DRAIN, &mut leading).await.is_err() {
                    tracing::warn!("not everything ended in time");
                }
                if let Some(elector) = &mut elector {
                    elector.stop().await;
                }
            }
            ended
        };
        let result = tokio::select! {
            result = lead => result,
            Some(ended) = servers.join_next() => Err(RunError::PartEnded(ended.unwrap_or("a server"))),
        };
        servers_stop.cancel();
        let drained = async { while servers.len() > 1 && servers.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(5), drained).await;
        servers.shutdown().await;
        result
    }
}

/// Keeps the lease until it is lost or the process is to stop; the lease stays held for the drain.
async fn hold_until(elector: &mut Elector, stop: &CancellationToken) -> Ended {
    tokio::select! {
        () = stop.cancelled() => Ended::Stopped,
        ended = elector.hold() => ended,
    }
}

/// The UID of kube-system: as old as the cluster, and no other cluster has it.
async fn installation(client: &Client) -> Result<String, kube::Error> {
    let namespace = Api::<Namespace>::all(client.clone()).get("kube-system").await?;
    Ok(namespace.metadata.uid.unwrap_or_default())
}

fn log_error(what: &str, result: std::io::Result<()>) {
    if let Err(e) = result {
        tracing::error!(error = %e, "{what} has failed");
    }
}

/// Tells who was touched in a way that matters, while somebody listens: a replica that does not lead keeps nothing of it.
#[derive(Debug, Default)]
struct Bell(Mutex<Option<mpsc::UnboundedSender<ObjectRef<Proxy>>>>);

impl Bell {
    fn ring(&self, proxy: ObjectRef<Proxy>) {
        if let Some(listener) = &*self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
            // nobody listens any more only at the end of the process
            let _ = listener.send(proxy);
        }
    }

    /// What happens from now on.
    fn listen(&self) -> mpsc::UnboundedReceiver<ObjectRef<Proxy>> {
        let (tell, touched) = mpsc::unbounded_channel();
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(tell);
        touched
    }
}

/// The one watch of Proxies: it fills the store and rings the bell.
fn watch_of_proxies(
    client: Client,
    synced: Arc<AtomicBool>,
    bell: Arc<Bell>,
) -> (std::pin::Pin<Box<dyn Future<Output = ()> + Send>>, Store<Proxy>) {
    let (reader, writer) = reflector::store();
    let api: Api<Proxy> = Api::all(client);
    // our own writes are no reason to reconcile: what was seen decides when to look again, and nothing shortens a wait
    let matters = predicates::generation.combine(predicates::annotations);
    let gone = bell.clone();
    let stream = watcher(api, watcher::Config::default())
        .default_backoff()
        // a third of a Proxy, and nothing here reads it
        .modify(|proxy: &mut Proxy| proxy.managed_fields_mut().clear())
        .reflect(writer)
        .inspect_ok(move |event| {
            // whatever it looked like last: it is to be forgotten
            if let watcher::Event::Delete(proxy) = event {
                gone.ring(ObjectRef::from_obj(proxy));
            }
        })
        .touched_objects()
        .predicate_filter(matters, PredicateConfig::default());
    let store = reader.clone();
    let watch = Box::pin(async move {
        let filled = async {
            if reader.wait_until_ready().await.is_ok() {
                synced.store(true, Ordering::Release);
            }
            std::future::pending::<()>().await;
        };
        let drive = stream.for_each(|item| {
            match item {
                Ok(proxy) => bell.ring(ObjectRef::from_obj(&proxy)),
                Err(e) => tracing::warn!(error = %e, "the watch of Proxies has failed and is begun anew"),
            }
            std::future::ready(())
        });
        tokio::select! {
            () = drive => {}
            () = filled => {}
        }
    });
    (watch, store)
}

/// For reconciliations, which come by the thousand: each request at a time is a connection of its own. The lease is
/// renewed past this, so that it never waits behind them.
fn bounded(client: Client) -> Client {
    let send = tower::service_fn(move |request| {
        let client = client.clone();
        async move { client.send(request).await }
    });
    Client::new(ServiceBuilder::new().concurrency_limit(API_IN_FLIGHT).timeout(API_BUDGET).service(send), "default")
}

/// What only the leader runs.
struct Parts {
    client: Client,
    installation_id: String,
    providers: Providers,
    leadership: Leadership,
    metrics: Arc<Metrics>,
    desk: Arc<LeaseDesk>,
    synced: Arc<AtomicBool>,
    store: Store<Proxy>,
    bell: Arc<Bell>,
    prober: ProberOptions,
    monitor: MonitorOptions,
    gc: GcOptions,
    namespace: String,
}

impl Parts {
    /// Runs all parts until they are stopped, and returns when all have ended; the name of the first that ended.
    async fn run(self, stop: CancellationToken) -> &'static str {
        let Self { client, installation_id, providers, leadership, metrics, desk, synced, store, bell, prober, monitor, gc, namespace } =
            self;
        let (board, names) = Board::new();
        let board = Arc::new(board);
        let reporter = Reporter { controller: "egress-operator".to_owned(), instance: std::env::var("POD_NAME").ok() };
        let recorder = Recorder::new(client.clone(), reporter.clone());
        let bounded = bounded(client.clone());
        let context = Arc::new(Context {
            client: bounded.clone(),
            providers: providers.clone(),
            installation_id: installation_id.clone(),
            leadership: leadership.clone(),
            board: board.clone(),
            addresses: AddressBook::default(),
            user_data: UserDataSource::new(bounded.clone()),
            recorder: Recorder::new(bounded, reporter.clone()),
            metrics: metrics.clone(),
            api_failures: Mutex::new(HashMap::new()),
        });
        let mut parts: JoinSet<&'static str> = JoinSet::new();
        parts.spawn(reconciler(store, bell, names, context, stop.clone()));
        let probing = Prober::new(board, prober, metrics.clone()).run(stop.clone());
        parts.spawn(async move {
            probing.await;
            "the prober"
        });
        let monitor = Monitor {
            client: client.clone(),
            providers: providers.clone(),
            leadership: leadership.clone(),
            metrics: metrics.clone(),
            options: monitor,
        };
        let monitoring = monitor.run(stop.clone());
        parts.spawn(async move {
            monitoring.await;
            "the monitor"
        });
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Namespace".to_owned()),
            name: Some(namespace.clone()),
            namespace: Some(namespace),
            ..ObjectReference::default()
        };
        let collector =
            Collector { client, providers, installation_id, leadership, recorder, about, metrics: metrics.clone(), options: gc, synced };
        let collecting = collector.run(stop.clone());
        parts.spawn(async move {
            collecting.await;
            "the collector"
        });
        parts.spawn(lease_keeper(desk, metrics, stop.clone()));
        let first = parts.join_next().await.and_then(Result::ok).unwrap_or("a part");
        stop.cancel();
        while parts.join_next().await.is_some() {}
        first
    }
}

async fn reconciler(
    store: Store<Proxy>,
    bell: Arc<Bell>,
    names: mpsc::UnboundedReceiver<String>,
    context: Arc<Context>,
    stop: CancellationToken,
) -> &'static str {
    // first of all, so that nothing falls between what is in the store then and what is told
    let touched = UnboundedReceiverStream::new(bell.listen());
    let filled = store.clone();
    let all = futures::stream::once(async move {
        // an error is the end of the watch, and with it of the process
        let _ = filled.wait_until_ready().await;
        futures::stream::iter(filled.state().into_iter().map(|proxy| ObjectRef::from_obj(proxy.as_ref())))
    });
    let asked = UnboundedReceiverStream::new(names).map(|name| match name.split_once('/') {
        Some((namespace, name)) => ObjectRef::new(name).within(namespace),
        None => ObjectRef::new(&name),
    });
    let forget = context.clone();
    Controller::for_stream(futures::stream::pending(), store)
        // calls are bounded per provider, so that a silent one holds up nobody else's Proxies
        .with_config(controller::Config::default().concurrency(0))
        .reconcile_on(all.flatten())
        .reconcile_on(touched)
        .reconcile_on(asked)
        .graceful_shutdown_on(async move { stop.cancelled().await })
        .run(reconcile::reconcile, reconcile::on_error, context)
        .for_each(|ended| {
            if let Err(controller::Error::ObjectNotFound(gone)) = ended {
                reconcile::forget(&forget, &format!("{}/{}", gone.namespace.unwrap_or_default(), gone.name));
            }
            std::future::ready(())
        })
        .await;
    "the reconciler"
}

async fn lease_keeper(desk: Arc<LeaseDesk>, metrics: Arc<Metrics>, stop: CancellationToken) -> &'static str {
    let mut loaded = false;
    loop {
        if !loaded {
            match desk.load().await {
                Ok(count) => {
                    tracing::info!(count, "leases are taken over");
                    loaded = true;
                }
                Err(e) => tracing::warn!(error = %e, "leases cannot be read; none is given until they are"),
            }
        } else {
            match desk.expire(Timestamp::now()).await {
                Ok(count) => metrics.leases(count),
                Err(e) => tracing::warn!(error = %e, "a lease that has ended cannot be removed"),
            }
        }
        tokio::select! {
            () = stop.cancelled() => return "the keeper of leases",
            () = tokio::time::sleep(if loaded { EXPIRE } else { Duration::from_secs(1) }) => {}
        }
    }
}
