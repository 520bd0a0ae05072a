//! The outermost ring around every RPC of the contract: a place among those in
//! flight, the caller's deadline, panics, details for statuses that tonic made
//! itself, one log line and one metric. Health and reflection pass untouched.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use egress_provider_proto::code_name;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use tower::{Layer, Service};

use super::deadline::Deadline;
use super::status::{self, Fault};
use crate::error::{ProviderError, Reason};
use crate::telemetry::metrics::Metrics;

const PROVIDER: &str = "/egressproxies.provider.v1.ProviderService/";
const IMAGES: &str = "/egressproxies.provider.v1.ImageService/";

/// The RPCs by name; names of methods become metric labels, so they come from here and not from the request.
const METHODS: [&str; 12] = [
    "GetProviderInfo",
    "Create",
    "Get",
    "Delete",
    "ListByTag",
    "Check",
    "WatchEvents",
    "PrepareImage",
    "GetImage",
    "ListImages",
    "WatchImage",
    "EvictImage",
];

/// The method of a path of the contract; `other` for one it does not have, None outside it.
pub(super) fn method(path: &str) -> Option<&'static str> {
    let name = path.strip_prefix(PROVIDER).or_else(|| path.strip_prefix(IMAGES))?;
    Some(METHODS.iter().find(|m| **m == name).copied().unwrap_or("other"))
}

/// The calls in flight: how many there may be, and whether more are taken.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    places: Arc<Semaphore>,
    limit: u32,
    draining: Arc<AtomicBool>,
}

impl Flight {
    pub(super) fn new(limit: u32) -> Self {
        Self { places: Arc::new(Semaphore::new(limit as usize)), limit, draining: Arc::default() }
    }

    fn enter(&self) -> Result<OwnedSemaphorePermit, ProviderError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ProviderError::new(Reason::ShuttingDown, "this provider is stopping: repeat the call in a moment")
                .retry_after(Duration::from_secs(2)));
        }
        Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            ProviderError::new(Reason::Overloaded, "as many calls are in flight as this provider takes: back off and repeat")
                .retry_after(Duration::from_secs(1))
        })
    }

    /// From now on calls are refused.
    pub(super) fn refuse_more(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Resolves when no call is in flight.
    pub(super) async fn idle(&self) {
        // an error would mean that the semaphore is closed, which nobody does
        let _ = self.places.acquire_many(self.limit).await;
    }
}

#[derive(Debug, Clone)]
pub(super) struct EdgeLayer {
    pub(super) flight: Flight,
    pub(super) metrics: Metrics,
}

impl<S> Layer<S> for EdgeLayer {
    type Service = Edge<S>;

    fn layer(&self, inner: S) -> Edge<S> {
        Edge { inner, shared: self.clone() }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Edge<S> {
    inner: S,
    shared: EdgeLayer,
}

impl<S> Service<Request<Body>> for Edge<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(method) = method(request.uri().path()) else { return self.inner.call(request).boxed() };
        let began = Instant::now();
        let deadline = Deadline::of(request.headers());
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(deadline);
        }
        let place = self.shared.flight.enter();
        // the inner call is lazy until it is polled, so a refused one does nothing
        let inner = self.inner.call(request);
        let metrics = self.shared.metrics.clone();
        async move {
            let answer = match place {
                Ok(_place) => answer(inner, deadline, method).await,
                Err(e) => refused(e, method),
            };
            report(&answer, method, &metrics, began.elapsed());
            Ok(answer)
        }
        .boxed()
    }
}

async fn answer<F>(inner: F, deadline: Option<Deadline>, method: &'static str) -> Response<Body>
where
    F: Future<Output = Result<Response<Body>, Infallible>>,
{
    // a panicked call is dropped whole, so no broken state of it is seen again
    let guarded = AssertUnwindSafe(inner).catch_unwind();
    let ended = match deadline {
        None => guarded.await,
        Some(deadline) => match tokio::time::timeout_at(deadline.instant(), guarded).await {
            Ok(ended) => ended,
            Err(_) => return refused(status::timed_out(), method),
        },
    };
    let response = match ended {
        Ok(Ok(response)) => response,
        Ok(Err(never)) => match never {},
        Err(_panic) => {
            // the hook has logged where; what the panic says may hold anything and goes nowhere
            return refused(ProviderError::new(Reason::Internal, "the provider met a bug in this call; its log says where"), method);
        }
    };
    match status_of(&response).and_then(|status| status::completed(&status, method)) {
        Some(completed) => completed.into_http(),
        None => response,
    }
}

fn refused(error: ProviderError, method: &'static str) -> Response<Body> {
    Fault::from(error).into_status(method, "").into_http()
}

/// The status of an answer that is nothing but a status.
fn status_of(response: &Response<Body>) -> Option<Status> {
    Status::from_header_map(response.headers())
}

fn report(answer: &Response<Body>, method: &'static str, metrics: &Metrics, took: Duration) {
    let status = status_of(answer).filter(|s| s.code() != Code::Ok);
    let Some(status) = status else {
        metrics.rpc(method, code_name(Code::Ok), "", took);
        tracing::debug!(method, code = "OK", ?took, "rpc answered");
        return;
    };
    let code = code_name(status.code());
    let details = status.get_error_details();
    let info = details.error_info();
    let reason = info.and_then(|i| Reason::from_wire_name(&i.reason)).map_or("", Reason::wire_name);
    metrics.rpc(method, code, reason, took);
    let meta = |key: &str| info.and_then(|i| i.metadata.get(key)).map(String::as_str).unwrap_or_default();
    if status.code() == Code::Internal {
        tracing::error!(
            method,
            code,
            reason,
            host = meta("host"),
            instance = meta("instance"),
            ?took,
            error = status.message(),
            "rpc failed"
        );
    } else {
        tracing::debug!(
            method,
            code,
            reason,
            host = meta("host"),
            instance = meta("instance"),
            ?took,
            error = status.message(),
            "rpc failed"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(path: &str) -> Request<Body> {
        Request::builder().uri(path).body(Body::empty()).expect("a fixed request")
    }

    async fn ask<F>(flight: &Flight, timeout: Option<&str>, f: F) -> Status
    where
        F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
    {
        let mut f = Some(f);
        let inner = tower::service_fn(move |_: Request<Body>| f.take().expect("called once"));
        let mut edge = EdgeLayer { flight: flight.clone(), metrics: Metrics::new() }.layer(inner);
        let mut request = call(&format!("{PROVIDER}Get"));
        if let Some(timeout) = timeout {
            request.headers_mut().insert("grpc-timeout", timeout.parse().expect("ascii"));
        }
        let Ok(response) = edge.call(request).await;
        status_of(&response).unwrap_or_else(|| Status::ok(""))
    }

    fn reason(status: &Status) -> String {
        status.get_error_details().error_info().map(|i| i.reason.clone()).unwrap_or_default()
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_is_answered_before_it_passes() {
        let asked = tokio::time::Instant::now();
        let status = ask(&Flight::new(1), Some("10S"), std::future::pending()).await;
        assert_eq!((status.code(), reason(&status).as_str()), (Code::DeadlineExceeded, "CALL_TIMEOUT"));
        // the clock is the paused one: it moves only to the timer that woke us
        assert!(asked.elapsed() < Duration::from_secs(10));
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_and_its_text_stays_inside() {
        let status = ask(&Flight::new(1), None, async { panic!("s3nt1nel") }).await;
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Internal, "INTERNAL"));
        assert!(!format!("{status:?}").contains("s3nt1nel"));
    }

    #[tokio::test]
    async fn a_call_beyond_the_limit_is_told_to_come_back() {
        let flight = Flight::new(1);
        let _busy = flight.enter().expect("the only place");
        let status = ask(&flight, None, std::future::pending()).await;
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "OVERLOADED"));
        assert!(status.get_error_details().retry_info().is_some());
    }

    #[tokio::test]
    async fn a_draining_provider_refuses_new_calls_and_ends_when_the_last_one_does() {
        let flight = Flight::new(2);
        let running = flight.enter().expect("a place");
        flight.refuse_more();
        let status = ask(&flight, None, std::future::pending()).await;
        assert_eq!(reason(&status), "SHUTTING_DOWN");
        assert!(flight.idle().now_or_never().is_none());
        drop(running);
        assert!(flight.idle().now_or_never().is_some());
    }

    #[test]
    fn only_the_contracts_methods_become_labels() {
        assert_eq!(method("/egressproxies.provider.v1.ProviderService/Create"), Some("Create"));
        assert_eq!(method("/egressproxies.provider.v1.ImageService/Made\nUp"), Some("other"));
        assert_eq!(method("/grpc.health.v1.Health/Check"), None);
    }
}
