//! The span of an RPC: a child of the caller's span where the request carries a
//! W3C `traceparent`. No header is recorded, since any may be a secret.

use http::Request;
use tonic::body::Body;
use tower_http::classify::{GrpcErrorsAsFailures, GrpcFailureClass, SharedClassifier};
use tower_http::trace::{MakeSpan, OnFailure, TraceLayer};
use tracing::Span;
use tracing::field::{Empty, display};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::edge;

pub(super) type Layer = TraceLayer<SharedClassifier<GrpcErrorsAsFailures>, RpcSpan, (), (), (), (), MarkFailed>;

pub(super) fn layer() -> Layer {
    TraceLayer::new_for_grpc().make_span_with(RpcSpan).on_request(()).on_response(()).on_body_chunk(()).on_eos(()).on_failure(MarkFailed)
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RpcSpan;

impl MakeSpan<Body> for RpcSpan {
    fn make_span(&mut self, request: &Request<Body>) -> Span {
        let path = request.uri().path();
        // health probes and reflection would drown the rest; the name comes from our list, never from the path
        let Some(method) = edge::method(path) else { return Span::none() };
        let span = tracing::info_span!(
            "rpc",
            otel.name = method,
            otel.kind = "server",
            rpc.system = "grpc",
            rpc.method = method,
            otel.status_code = Empty,
            otel.status_description = Empty,
            trace_id = Empty,
        );
        let parent = opentelemetry::global::get_text_map_propagator(|p| p.extract(&opentelemetry_http::HeaderExtractor(request.headers())));
        let trace_id = opentelemetry::trace::TraceContextExt::span(&parent).span_context().trace_id();
        if trace_id != opentelemetry::trace::TraceId::INVALID {
            span.record("trace_id", display(trace_id));
        }
        // fails only where no OpenTelemetry layer is installed, and then there is nothing to parent
        let _ = span.set_parent(parent);
        span
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MarkFailed;

impl OnFailure<GrpcFailureClass> for MarkFailed {
    fn on_failure(&mut self, failure: GrpcFailureClass, _: std::time::Duration, span: &Span) {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", display(failure));
    }
}
