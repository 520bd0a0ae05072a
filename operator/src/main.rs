//! The program `egress-operator`: parse, start telemetry, call into the library, turn the error into an exit code.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use egress_operator::config::{Args, read_providers};
use egress_operator::discovery::Token;
use egress_operator::gc::GcOptions;
use egress_operator::health::thresholds::Thresholds;
use egress_operator::health::{ProbeOptions, ProberOptions};
use egress_operator::leader::LeaseOptions;
use egress_operator::provider_client::grpc::GrpcProvider;
use egress_operator::provider_client::{Provider, Providers};
use egress_operator::provider_health::MonitorOptions;
use egress_operator::pulse::{Pulse, PulseLayer};
use egress_operator::run::Operator;
use egress_operator::telemetry;
use kube::client::ClientBuilder;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    let args = Args::parse();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("no runtime")
        .and_then(|runtime| runtime.block_on(run(args)));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("egress-operator: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    // one crypto provider in the process: the first that is installed; a second try only finds it there
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let (subscriber, telemetry) = telemetry::subscriber(args.log_level, args.log_format, args.otlp_endpoint.as_deref(), std::io::stderr)?;
    subscriber.try_init()?;
    let stop = CancellationToken::new();
    let signals = watch_signals(stop.clone())?;
    let result = operate(args, stop.clone()).await;
    stop.cancel();
    signals.await?;
    tokio::task::spawn_blocking(|| telemetry.flush()).await?;
    result
}

async fn operate(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let mut providers: Providers = BTreeMap::new();
    for (name, options) in read_providers(&args.providers_file)? {
        let provider = GrpcProvider::new(&options).with_context(|| format!("provider {name:?} of {}", args.providers_file.display()))?;
        providers.insert(name, Arc::new(provider) as Arc<dyn Provider>);
    }
    let pulse = Pulse::default();
    let config = kube::Config::infer().await.context("no API server: run in a cluster, or give KUBECONFIG")?;
    let client = ClientBuilder::try_from(config)?.with_layer(&PulseLayer(pulse.clone())).build();
    let listen = async |at: std::net::SocketAddr, what: &str| {
        TcpListener::bind(at).await.with_context(|| format!("cannot listen on {at} for {what}"))
    };
    let discovery = match (args.discovery_listen, args.discovery_token_file) {
        (Some(at), Some(token)) => Some((listen(at, "discovery").await?, Token::in_file(token))),
        _ => None,
    };
    let lease = args.leader_elect.then(|| LeaseOptions {
        namespace: args.namespace.clone(),
        name: "egress-operator".to_owned(),
        identity: format!("{}_{}", args.identity, uuid::Uuid::new_v4()),
        duration: args.lease_duration,
        renew_deadline: args.lease_duration.mul_f64(2.0 / 3.0),
        retry: (args.lease_duration / 7).max(Duration::from_millis(100)),
    });
    let operator = Operator {
        namespace: args.namespace.clone(),
        installation_id: args.installation_id,
        lease,
        providers,
        prober: ProberOptions {
            probe: ProbeOptions { target: args.probe_target, canary: args.probe_canary, timeout: args.probe_timeout },
            interval: args.probe_interval,
            in_doubt: args.probe_interval.min(Duration::from_secs(5)),
            thresholds: Thresholds { rise: args.probe_rise, fall: args.probe_fall },
            most: args.probe_concurrency,
        },
        monitor: MonitorOptions { namespace: args.namespace, interval: args.check_interval, refresh: Duration::from_secs(600) },
        gc: GcOptions { interval: args.gc_interval, minimum_age: args.gc_minimum_age, most: args.gc_most, dry_run: args.gc_dry_run },
        ops: Some(listen(args.ops_listen, "metrics").await?),
        discovery,
        pulse,
    };
    Ok(operator.run(client, stop).await?)
}

/// SIGTERM and SIGINT stop; the task ends with the first, or when it is stopped otherwise.
fn watch_signals(stop: CancellationToken) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => tracing::info!("SIGTERM: ending"),
            _ = int.recv() => tracing::info!("SIGINT: ending"),
            () = stop.cancelled() => return,
        }
        stop.cancel();
    }))
}
