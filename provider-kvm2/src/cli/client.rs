//! A connection to a daemon, as the client verbs use it.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use egress_provider_proto::v1::image_service_client::ImageServiceClient;
use egress_provider_proto::v1::provider_service_client::ProviderServiceClient;
use tonic::Request;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{ClientArgs, Exit, Failure, Output};

/// How long a client waits for the daemon to take its connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Time of a call beyond what the provider was asked to take.
pub(super) const MARGIN: Duration = Duration::from_secs(15);
/// Time of a call that asks a host or two.
pub(super) const CALL: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Client {
    pub provider: ProviderServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
    pub entry: String,
    pub output: Output,
}

/// Runs a verb to its end on this thread.
pub(super) fn run(verb: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    super::harden::keep_memory_private();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| Failure::of(Exit::Other, &e))?;
    runtime.block_on(verb)
}

impl Client {
    pub async fn connect(args: &ClientArgs) -> Result<Self, Failure> {
        let channel = endpoint(args)?.connect().await.map_err(|e| {
            let cause = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
            Failure::new(Exit::Transient, format!("no daemon answers on {}: {cause}", args.socket))
                .fact("what to do", "start the daemon, or name its socket with --socket or KVM2_SOCKET")
        })?;
        Ok(Self {
            provider: ProviderServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
            entry: args.entry.clone(),
            output: args.output,
        })
    }
}

/// A request that the daemon has to answer within `timeout`.
pub(super) fn within<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

fn endpoint(args: &ClientArgs) -> Result<Endpoint, Failure> {
    let usage = |e: &(dyn std::error::Error + 'static)| Failure::of(Exit::Usage, e);
    let is_url = args.socket.starts_with("http://") || args.socket.starts_with("https://");
    let uri = if is_url || args.socket.starts_with("unix:") { args.socket.clone() } else { format!("unix:{}", args.socket) };
    let mut endpoint = Endpoint::from_shared(uri).map_err(|e| usage(&e))?.connect_timeout(CONNECT);
    if args.socket.starts_with("https://") {
        let mut tls = ClientTlsConfig::new();
        if let Some(ca) = &args.tls_ca {
            tls = tls.ca_certificate(Certificate::from_pem(read(ca)?));
        }
        if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        endpoint = endpoint.tls_config(tls).map_err(|e| usage(&e))?;
    }
    Ok(endpoint)
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|e| Failure::new(Exit::Usage, format!("cannot read {}: {e}", path.display())))
}
