//! /metrics, /livez and /readyz.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics::{CONTENT_TYPE, Metrics};
use crate::pulse::{DEAD_AFTER, Pulse};

/// What the endpoints answer from.
#[derive(Debug, Clone)]
pub struct Ops {
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Of the watch.
    pub pulse: Pulse,
    /// Whether the cache of Proxies is filled.
    pub synced: Arc<AtomicBool>,
}

/// Serves until it is stopped.
///
/// # Errors
/// The listener failed.
pub async fn serve(ops: Ops, listener: TcpListener, stop: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, router(ops)).with_graceful_shutdown(async move { stop.cancelled().await }).await
}

/// The routes.
pub fn router(ops: Ops) -> Router {
    Router::new().route("/metrics", get(metrics)).route("/livez", get(live)).route("/readyz", get(ready)).with_state(ops)
}

async fn metrics(State(ops): State<Ops>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], ops.metrics.encode()).into_response()
}

async fn live(State(ops): State<Ops>) -> (StatusCode, String) {
    let quiet = ops.pulse.quiet_for();
    if quiet < DEAD_AFTER {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("the watch of Proxies has been silent for {} s\n", quiet.as_secs()))
    }
}

async fn ready(State(ops): State<Ops>) -> (StatusCode, &'static str) {
    if ops.synced.load(Ordering::Acquire) {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the cache of Proxies is not filled yet\n")
    }
}
