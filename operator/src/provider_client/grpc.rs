//! The contract over gRPC: a unix socket beside the operator, or TCP with TLS.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use egress_provider_proto::v1;
use egress_provider_proto::v1::provider_service_client::ProviderServiceClient;
use opentelemetry_http::HeaderInjector;
use tokio::sync::Semaphore;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request};
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::{Provider, ProviderError};

/// How long the provider has to take a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Of a call beyond what the provider was asked to take.
const MARGIN: Duration = Duration::from_secs(15);
/// Of a Get, a Delete, a page of a listing. A Delete may have to end a running Create first.
const CALL: Duration = Duration::from_secs(60);
/// What a Create waits for an instance; the work goes on after it.
const MAX_WAIT: Duration = Duration::from_secs(25);
/// What a Check may take for all hosts together.
const CHECK: Duration = Duration::from_secs(10);
/// The most that is taken of a listing, so that no provider fills the operator's memory.
const MOST_LISTED: usize = 100_000;

/// Where a provider is and how much is asked of it.
#[derive(Debug, Clone)]
pub struct GrpcOptions {
    /// `unix:/path`, `http://127.0.0.1:port` or `https://host:port`.
    pub endpoint: String,
    /// The provider entry; empty where the provider has only one.
    pub entry: String,
    /// Calls in flight at a time; others wait for their turn.
    pub max_in_flight: usize,
    /// CA that has signed the provider's certificate, for https.
    pub tls_ca: Option<PathBuf>,
    /// The operator's certificate and key, for https.
    pub tls_identity: Option<(PathBuf, PathBuf)>,
}

/// Why a provider's options cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GrpcOptionsError {
    /// Not an address.
    #[error("endpoint {endpoint:?} is none: use unix:/path, https://host:port, or http://127.0.0.1:port")]
    Endpoint {
        /// As configured.
        endpoint: String,
    },
    /// A file of TLS.
    #[error("cannot read {path}")]
    File {
        /// As configured.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: std::io::Error,
    },
    /// TLS.
    #[error("TLS of endpoint {endpoint:?} cannot be set up")]
    Tls {
        /// As configured.
        endpoint: String,
        /// Why not.
        #[source]
        cause: tonic::transport::Error,
    },
}

/// A provider behind gRPC. Connects when first asked, and again after the provider was restarted.
#[derive(Debug, Clone)]
pub struct GrpcProvider {
    client: ProviderServiceClient<Channel>,
    entry: String,
    turns: Arc<Semaphore>,
}

impl GrpcProvider {
    /// Reads TLS files; does not connect.
    ///
    /// # Errors
    /// The endpoint is none, or a TLS file cannot be used. Plain http is taken for loopback only.
    pub fn new(options: &GrpcOptions) -> Result<Self, GrpcOptionsError> {
        let bad = || GrpcOptionsError::Endpoint { endpoint: options.endpoint.clone() };
        let text = &options.endpoint;
        let is_loopback = ["http://127.", "http://localhost:", "http://[::1]:"].iter().any(|prefix| text.starts_with(prefix));
        if !text.starts_with("unix:/") && !text.starts_with("https://") && !is_loopback {
            return Err(bad());
        }
        let mut endpoint = Endpoint::from_shared(text.clone()).map_err(|_| bad())?.connect_timeout(CONNECT);
        if text.starts_with("https://") {
            let read = |path: &PathBuf| std::fs::read(path).map_err(|cause| GrpcOptionsError::File { path: path.clone(), cause });
            let mut tls = ClientTlsConfig::new().with_enabled_roots();
            if let Some(ca) = &options.tls_ca {
                tls = tls.ca_certificate(Certificate::from_pem(read(ca)?));
            }
            if let Some((cert, key)) = &options.tls_identity {
                tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
            }
            endpoint = endpoint.tls_config(tls).map_err(|cause| GrpcOptionsError::Tls { endpoint: text.clone(), cause })?;
        }
        Ok(Self::over(endpoint.connect_lazy(), options.entry.clone(), options.max_in_flight))
    }

    /// Over a channel that exists.
    #[must_use]
    pub fn over(channel: Channel, entry: String, max_in_flight: usize) -> Self {
        let client = ProviderServiceClient::new(channel).max_decoding_message_size(16 << 20);
        Self { client, entry, turns: Arc::new(Semaphore::new(max_in_flight.max(1))) }
    }

    /// One call: waits for its turn, carries the deadline and the trace, and names what failed.
    async fn call<M, A, F>(
        &self,
        method: &'static str,
        budget: Duration,
        message: M,
        call: impl FnOnce(ProviderServiceClient<Channel>, Request<M>) -> F,
    ) -> Result<A, ProviderError>
    where
        F: Future<Output = Result<tonic::Response<A>, tonic::Status>>,
    {
        let span = tracing::info_span!(
            "provider",
            otel.name = method,
            otel.kind = "client",
            rpc.system = "grpc",
            rpc.method = method,
            otel.status_code = tracing::field::Empty
        );
        let work = async {
            let _turn = self
                .turns
                .acquire()
                .await
                .map_err(|_| ProviderError::local(Code::Cancelled, "SHUTTING_DOWN", "the operator is stopping"))?;
            let mut request = Request::new(message);
            request.set_timeout(budget);
            let context = tracing::Span::current().context();
            let mut headers = http::HeaderMap::new();
            opentelemetry::global::get_text_map_propagator(|p| p.inject_context(&context, &mut HeaderInjector(&mut headers)));
            for (name, value) in &headers {
                if let (Ok(name), Ok(value)) = (
                    tonic::metadata::AsciiMetadataKey::from_bytes(name.as_str().as_bytes()),
                    tonic::metadata::AsciiMetadataValue::try_from(value.as_bytes()),
                ) {
                    request.metadata_mut().insert(name, value);
                }
            }
            // the deadline travels, and holds here as well: a provider that has stopped answering keeps nobody
            match tokio::time::timeout(budget + Duration::from_secs(1), call(self.client.clone(), request)).await {
                Ok(Ok(answer)) => Ok(answer.into_inner()),
                Ok(Err(status)) => Err(ProviderError::from_status(&status)),
                Err(_) => Err(ProviderError::local(
                    Code::DeadlineExceeded,
                    "PROVIDER_SILENT",
                    format!("the provider did not answer {method} within {budget:?}"),
                )),
            }
        };
        let result = work.instrument(span.clone()).await;
        if result.is_err() {
            span.record("otel.status_code", "ERROR");
        }
        result
    }
}

/// A duration as messages hold it.
fn duration(of: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(of).ok()
}

#[async_trait]
impl Provider for GrpcProvider {
    async fn info(&self) -> Result<v1::GetProviderInfoResponse, ProviderError> {
        let request = v1::GetProviderInfoRequest { entry: self.entry.clone() };
        self.call("GetProviderInfo", CALL, request, |mut client, request| async move { client.get_provider_info(request).await }).await
    }

    async fn create(&self, mut request: v1::CreateRequest) -> Result<v1::CreateResponse, ProviderError> {
        request.entry.clone_from(&self.entry);
        request.max_wait = duration(MAX_WAIT);
        self.call("Create", MAX_WAIT + MARGIN, request, |mut client, request| async move { client.create(request).await }).await
    }

    async fn get(&self, mut request: v1::GetRequest) -> Result<v1::Instance, ProviderError> {
        request.entry.clone_from(&self.entry);
        let answer = self.call("Get", CALL, request, |mut client, request| async move { client.get(request).await }).await?;
        answer
            .instance
            .ok_or_else(|| ProviderError::local(Code::Internal, "CONTRACT_BROKEN", "the provider answered a Get without an instance"))
    }

    async fn delete(&self, mut request: v1::DeleteRequest) -> Result<v1::DeleteResponse, ProviderError> {
        request.entry.clone_from(&self.entry);
        self.call("Delete", CALL, request, |mut client, request| async move { client.delete(request).await }).await
    }

    async fn list(&self, installation_id: &str, require_complete: bool) -> Result<v1::ListByTagResponse, ProviderError> {
        let mut all = v1::ListByTagResponse { complete: true, ..Default::default() };
        let mut page_token = String::new();
        loop {
            let request = v1::ListByTagRequest {
                entry: self.entry.clone(),
                installation_id: installation_id.to_owned(),
                page_token,
                require_complete,
                page_size: 0,
            };
            let page =
                self.call("ListByTag", CALL, request, |mut client, request| async move { client.list_by_tag(request).await }).await?;
            all.complete &= page.complete;
            all.instances.extend(page.instances);
            all.unreachable_hosts = page.unreachable_hosts;
            all.unreadable_instances = page.unreadable_instances;
            all.orphan_volumes.extend(page.orphan_volumes);
            if page.next_page_token.is_empty() {
                return Ok(all);
            }
            if all.instances.len() > MOST_LISTED {
                return Err(ProviderError::local(
                    Code::Internal,
                    "CONTRACT_BROKEN",
                    format!("the provider lists more than {MOST_LISTED} instances"),
                ));
            }
            page_token = page.next_page_token;
        }
    }

    async fn check(&self) -> Result<v1::CheckResponse, ProviderError> {
        let request = v1::CheckRequest { entry: self.entry.clone(), timeout: duration(CHECK) };
        self.call("Check", CHECK + MARGIN, request, |mut client, request| async move { client.check(request).await }).await
    }
}
