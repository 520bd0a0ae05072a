//! The server: everything that is served on one listener, and how it stops.
//!
//! ```text
//! serving ──stop──▶ draining: health says NOT_SERVING, no connection is taken, new calls are told to come back
//!         ──no call in flight, or the drain time is up──▶ closing: connections are sent away, then cut
//! ```

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::FILE_DESCRIPTOR_SET;
use egress_provider_proto::v1::image_service_server::ImageServiceServer;
use egress_provider_proto::v1::provider_service_server::ProviderServiceServer;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::edge::{EdgeLayer, Flight};
use super::listener::Listener;
use super::{Service, trace};
use crate::provider::Operations;
use crate::telemetry::metrics::Metrics;

/// Largest request. Above [`super::MAX_USER_DATA`], so that a user-data that is somewhat too large gets
/// an error that names its field; beyond it tonic does not read on.
const MAX_REQUEST: usize = 4 << 20;
/// Streams of one connection; callers have one connection and tens of calls.
const MAX_STREAMS: u32 = 256;
/// How long connections may take to close by themselves once they are sent away.
const CLOSING: Duration = Duration::from_millis(300);

#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Mutual TLS; None on a unix socket and where loopback was asked for.
    pub tls: Option<Tls>,
    /// How long calls in flight may go on after the stop.
    pub drain: Duration,
    /// Most calls in flight; more are told to come back.
    pub max_calls: u32,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { tls: None, drain: Duration::from_secs(25), max_calls: 256 }
    }
}

/// PEM texts of a server that asks its clients for certificates.
#[derive(Clone)]
pub struct Tls {
    pub certificate: Vec<u8>,
    pub key: secrecy::SecretSlice<u8>,
    pub client_ca: Vec<u8>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("the TLS certificate, key or client CA cannot be used")]
    Tls(#[source] tonic::transport::Error),
    #[error("the descriptors of the contract cannot be served")]
    Reflection(#[source] tonic_reflection::server::Error),
    #[error("the server failed")]
    Transport(#[source] tonic::transport::Error),
}

/// Whether the daemon takes calls, for a readiness probe.
#[derive(Debug, Clone)]
pub struct Readiness(Flight);

impl Readiness {
    pub fn is_ready(&self) -> bool {
        !self.0.is_draining()
    }
}

/// A server that is put together and not yet serving.
#[derive(Debug)]
pub struct ContractServer {
    service: Service,
    metrics: Metrics,
    options: ServeOptions,
    flight: Flight,
}

/// Serves `operations` on `listener` until `stop` resolves and the drain is over.
pub async fn serve(
    operations: Arc<dyn Operations>,
    metrics: Metrics,
    listener: Listener,
    options: ServeOptions,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    ContractServer::new(operations, metrics, options).run(listener, stop).await
}

impl ContractServer {
    pub fn new(operations: Arc<dyn Operations>, metrics: Metrics, options: ServeOptions) -> Self {
        let flight = Flight::new(options.max_calls);
        Self { service: Service::new(operations), metrics, options, flight }
    }

    pub fn readiness(&self) -> Readiness {
        Readiness(self.flight.clone())
    }

    pub async fn run(self, listener: Listener, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let Self { service, metrics, options, flight } = self;
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<ProviderServiceServer<Service>>().await;
        health.set_serving::<ImageServiceServer<Service>>().await;

        let mut server = Server::builder().max_concurrent_streams(MAX_STREAMS).http2_keepalive_interval(Some(Duration::from_secs(60)));
        if let Some(tls) = &options.tls {
            server = server.tls_config(tls_config(tls)).map_err(ServeError::Tls)?;
        }
        let router = server
            .layer(trace::layer())
            .layer(EdgeLayer { flight: flight.clone(), metrics })
            .add_service(health_service)
            .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
            // grpcurl before 1.8.8 knows only this one
            .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?)
            .add_service(ProviderServiceServer::new(service.clone()).max_decoding_message_size(MAX_REQUEST))
            .add_service(ImageServiceServer::new(service).max_decoding_message_size(MAX_REQUEST));

        let (no_more, away, closed) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let incoming = listener.incoming(no_more.clone(), closed.clone());
        let serving = router.serve_with_incoming_shutdown(incoming, away.clone().cancelled_owned());
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return ended.map_err(ServeError::Transport),
            () = stop => {}
        }

        tracing::info!(drain_seconds = options.drain.as_secs(), "stopping: no more calls are taken");
        health.set_not_serving::<ProviderServiceServer<Service>>().await;
        health.set_not_serving::<ImageServiceServer<Service>>().await;
        health.set_service_status("", tonic_health::ServingStatus::NotServing).await;
        flight.refuse_more();
        no_more.cancel();
        tokio::select! {
            ended = &mut serving => return ended.map_err(ServeError::Transport),
            () = flight.idle() => {}
            () = tokio::time::sleep(options.drain) => tracing::warn!("calls are in flight at the end of the drain; their work goes on with the next start"),
        }
        away.cancel();
        if let Ok(ended) = tokio::time::timeout(CLOSING, &mut serving).await {
            return ended.map_err(ServeError::Transport);
        }
        // what is left are watches of the health, which never end, and calls that outlived the drain
        closed.cancel();
        // cut connections end at once; one that somehow does not is not waited for
        tokio::time::timeout(CLOSING, serving).await.unwrap_or(Ok(())).map_err(ServeError::Transport)
    }
}

/// The contract, health, and the error details, so that grpcurl shows them readable.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
}

fn tls_config(tls: &Tls) -> ServerTlsConfig {
    use secrecy::ExposeSecret as _;
    ServerTlsConfig::new()
        .identity(Identity::from_pem(&tls.certificate, tls.key.expose_secret()))
        .client_ca_root(Certificate::from_pem(&tls.client_ca))
}
