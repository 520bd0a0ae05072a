//! `serve`: the daemon from its command line to its end.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use sd_notify::NotifyState;
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

use super::compose::{self, Composed};
use super::{DEFAULT_SOCKET, Exit, Failure, client, harden};
use crate::error::bounded_to;
use crate::service::ServeOptions;
use crate::service::listener::Listener;
use crate::service::server::{ContractServer, Tls};
use crate::telemetry::logs::{LogFormat, LogLevels, Telemetry, TelemetryOptions};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::probe::Probe;

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("trust").args(["tls_client_ca", "insecure_loopback"])))]
pub struct ServeArgs {
    /// The providers file; watched, so that changes need no restart.
    #[arg(long, env = "KVM2_CONFIG", value_name = "FILE")]
    pub config: PathBuf,
    /// Unix socket to serve on, made with mode 0600. A socket passed by systemd comes before it.
    #[arg(long, env = "KVM2_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH")]
    pub socket: PathBuf,
    /// Serve on TCP instead; needs --tls-cert, --tls-key and --tls-client-ca, or --insecure-loopback.
    #[arg(long, env = "KVM2_LISTEN", value_name = "ADDR:PORT", requires = "trust")]
    pub listen: Option<SocketAddr>,
    /// Certificate of the daemon (PEM).
    #[arg(long, env = "KVM2_TLS_CERT", value_name = "FILE", requires = "tls_key", requires = "tls_client_ca")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the daemon (PEM).
    #[arg(long, env = "KVM2_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// CA of the clients (PEM): whoever has a certificate of it may do everything.
    #[arg(long, env = "KVM2_TLS_CLIENT_CA", value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Serve without TLS on a loopback address: every user of this machine may do everything.
    #[arg(long, env = "KVM2_INSECURE_LOOPBACK")]
    pub insecure_loopback: bool,
    /// Serve /metrics, /healthz and /readyz over plain HTTP on this loopback address.
    #[arg(long, env = "KVM2_METRICS", value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Let --metrics be an address that others reach; it shows names of hosts and entries.
    #[arg(long, env = "KVM2_METRICS_REMOTE", requires = "metrics")]
    pub metrics_remote: bool,
    /// How log lines look.
    #[arg(long, env = "KVM2_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// error, warn, info, debug or trace; a module of ours on its own as in `info,link=debug`.
    #[arg(long, env = "KVM2_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    pub log_level: LogLevels,
    /// Export spans to this OpenTelemetry collector (gRPC, http://HOST:4317).
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// How long calls in flight may go on after SIGTERM.
    #[arg(long, env = "KVM2_DRAIN_SECONDS", default_value_t = 25, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub drain_seconds: u64,
    /// Who this daemon is among others that serve the same hosts; the same after a restart. Made from
    /// host name and address if left out.
    #[arg(long, env = "KVM2_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
    /// Most calls in flight; more are told to come back.
    #[arg(long, env = "KVM2_MAX_CALLS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_calls: u32,
}

/// What the daemon is told beside its configuration.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    pub listen: Listen,
    pub metrics: Option<SocketAddr>,
    pub serve: ServeOptions,
    /// Who this daemon is in the marks of its instances.
    pub replica: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    Unix(PathBuf),
    /// With the TLS of [`ServeOptions`], or plain on loopback.
    Tcp(SocketAddr),
}

pub(super) fn run(args: ServeArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| Failure::of(Exit::Other, &e))?;
    runtime.block_on(async {
        let options =
            TelemetryOptions { format: args.log_format, levels: args.log_level.clone(), otlp_endpoint: args.otlp_endpoint.clone() };
        let telemetry = Telemetry::install(&options).map_err(|e| Failure::of(Exit::Usage, &e))?;
        harden::keep_memory_private();
        let config = args.config.clone();
        let ended = match options_of(args) {
            Ok(options) => run_daemon(config, options, signalled()).await,
            Err(e) => Err(e),
        };
        if let Err(failure) = &ended {
            tracing::error!(%failure, "the daemon ends");
        }
        // the exporter's last message needs the runtime, so it goes on while this waits
        let _ = tokio::task::spawn_blocking(|| telemetry.flush()).await;
        ended
    })
}

fn options_of(args: ServeArgs) -> Result<DaemonOptions, Failure> {
    let usage = |text: String| Err(Failure::new(Exit::Usage, text));
    if let Some(address) = args.metrics.filter(|a| !a.ip().is_loopback() && !args.metrics_remote) {
        return usage(format!("--metrics {address} can be reached by others: use a loopback address, or say --metrics-remote"));
    }
    let listen = args.listen.map_or(Listen::Unix(args.socket), Listen::Tcp);
    let tls = match (args.tls_cert, args.tls_key, args.tls_client_ca) {
        (Some(certificate), Some(key), Some(client_ca)) => {
            Some(Tls { certificate: client::read(&certificate)?, key: client::read(&key)?.into(), client_ca: client::read(&client_ca)? })
        }
        _ => None,
    };
    match &listen {
        Listen::Tcp(address) if tls.is_none() && !address.ip().is_loopback() => {
            return usage(format!("--listen {address} without TLS can be reached by others: use a loopback address, or --tls-*"));
        }
        Listen::Unix(_) if tls.is_some() => return usage("--tls-* needs --listen: a unix socket is not encrypted".to_owned()),
        _ => {}
    }
    let serve = ServeOptions { tls, drain: Duration::from_secs(args.drain_seconds), max_calls: args.max_calls };
    let replica = args.replica.unwrap_or_else(|| replica_of(&listen));
    Ok(DaemonOptions { listen, metrics: args.metrics, serve, replica })
}

/// The same for the same daemon after a restart, another for another daemon on this host or elsewhere
/// (of a pod the host name is the pod's).
fn replica_of(listen: &Listen) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let digest = Sha256::digest(format!("{listen:?}"));
    format!("{}-{}", bounded_to(&host, 63), hex::encode(digest.get(..4).unwrap_or_default()))
}

/// Resolves on SIGTERM or SIGINT. They are taken over by the call itself: one that comes before
/// the future is first polled would end the process where it stands.
fn signalled() -> impl Future<Output = ()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (term, int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    async move {
        let (Ok(mut term), Ok(mut int)) = (term, int) else {
            tracing::error!("signals cannot be received; the daemon can only be killed");
            return std::future::pending().await;
        };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    }
}

/// Runs the daemon of one providers file until `stop` resolves.
pub async fn run_daemon(config: PathBuf, options: DaemonOptions, stop: impl Future<Output = ()>) -> Result<(), Failure> {
    let metrics = Metrics::new();
    let stopping = CancellationToken::new();
    // whatever ends this function also ends what runs beside it
    let _stop_all = stopping.clone().drop_guard();
    let Composed { operations, background, shutdown } =
        compose::compose(&config, metrics.clone(), options.replica.clone(), stopping.clone())?;

    let passed = Listener::passed().map_err(|e| Failure::of(Exit::Other, &e))?;
    let listener = match (passed, &options.listen) {
        (Some(passed), _) => passed,
        (None, Listen::Unix(path)) => Listener::unix(path).map_err(|e| Failure::of(Exit::Other, &e))?,
        (None, Listen::Tcp(address)) => Listener::tcp(*address).await.map_err(|e| Failure::of(Exit::Other, &e))?,
    };
    let place = listener.place();
    let server = ContractServer::new(Arc::clone(&operations), metrics.clone(), options.serve.clone());
    let readiness = server.readiness();
    let probe = match options.metrics {
        None => None,
        Some(address) => {
            let probe = Probe::bind(address).await.map_err(|e| Failure::of(Exit::Other, &e).fact("address", address.to_string()))?;
            tracing::info!(address = probe.local_addr().map(|a| a.to_string()), "serving metrics");
            Some(probe.serve(metrics, Arc::new(move || readiness.is_ready()), stopping.clone().cancelled_owned()))
        }
    };
    let probing = async {
        match probe {
            Some(probe) => probe.await.map_err(|e| Failure::of(Exit::Other, &e)),
            None => std::future::pending().await,
        }
    };
    tracing::info!(listen = place, "serving");
    notify(&[NotifyState::Ready]);

    let stop = async {
        stop.await;
        notify(&[NotifyState::Stopping]);
    };
    // a part that ends before it was told to takes the daemon with it: a supervisor restarts the whole
    let ended = tokio::select! {
        ended = server.run(listener, stop) => ended.map_err(|e| Failure::of(Exit::Other, &e)),
        ended = probing => ended.and_then(|()| Err(Failure::new(Exit::Other, "the metrics server ended"))),
        () = background => Err(Failure::new(Exit::Other, "the watch of the configuration ended")),
        () = watchdog() => Err(Failure::new(Exit::Other, "the watchdog ended")),
    };
    stopping.cancel();
    shutdown.await;
    tracing::info!("stopped");
    ended
}

fn notify(states: &[NotifyState<'_>]) {
    // without a supervisor that asked for it this does nothing
    if let Err(e) = sd_notify::notify(states) {
        tracing::warn!(error = %e, "the supervisor cannot be notified");
    }
}

/// Tells the supervisor that the runtime still turns; for ever.
async fn watchdog() {
    let Some(limit) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut ticks = tokio::time::interval((limit / 2).max(Duration::from_millis(100)));
    loop {
        ticks.tick().await;
        notify(&[NotifyState::Watchdog]);
    }
}
