//! An OpenTelemetry collector in this process, for spans of programs under test.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Keeps what it is sent. Ends with its test's runtime; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(&self, request: Request<ExportTraceServiceRequest>) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let collector = Self::default();
        let service = TraceServiceServer::new(collector.clone());
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, address)
    }

    /// Everything that was sent, to look for what must not be in it.
    pub fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|request| format!("{request:?}\n")).collect()
    }

    /// All spans, each with the name of the service that it is of.
    pub fn spans(&self) -> Vec<(String, Span)> {
        let mut all = Vec::new();
        for of in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().flat_map(|request| &request.resource_spans) {
            let attributes = of.resource.iter().flat_map(|r| &r.attributes);
            let service = attributes.filter(|a| a.key == "service.name").find_map(|a| match a.value.as_ref()?.value.as_ref()? {
                Value::StringValue(name) => Some(name.clone()),
                _ => None,
            });
            let spans = of.scope_spans.iter().flat_map(|s| &s.spans);
            all.extend(spans.map(|span| (service.clone().unwrap_or_default(), span.clone())));
        }
        all
    }
}
