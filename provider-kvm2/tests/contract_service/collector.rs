//! An OpenTelemetry collector in this process.

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

#[derive(Debug, Clone, Default)]
struct Received(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Received {
    async fn export(&self, request: Request<ExportTraceServiceRequest>) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().expect("no handler panics").push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Ends with its test's runtime.
pub(crate) struct Collector {
    received: Received,
    address: std::net::SocketAddr,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let received = Received::default();
        let service = TraceServiceServer::new(received.clone());
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
        Self { received, address }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let received = self.received.0.lock().expect("no handler panics");
        received.iter().flat_map(|r| &r.resource_spans).flat_map(|r| &r.scope_spans).flat_map(|s| s.spans.clone()).collect()
    }
}
