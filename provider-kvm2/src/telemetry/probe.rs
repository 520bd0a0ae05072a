//! Metrics and probes over plain HTTP: `/metrics`, `/healthz`, `/readyz`.

use std::future::Future;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;

use super::metrics::Metrics;

/// What the content of `/metrics` is, with the escapes that Prometheus looks for.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers whether the daemon takes calls.
pub type IsReady = std::sync::Arc<dyn Fn() -> bool + Send + Sync>;

/// A bound probe server.
#[derive(Debug)]
pub struct Probe(TcpListener);

impl Probe {
    pub async fn bind(address: SocketAddr) -> std::io::Result<Self> {
        TcpListener::bind(address).await.map(Self)
    }

    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.local_addr().ok()
    }

    pub async fn serve(self, metrics: Metrics, is_ready: IsReady, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
        let app = Router::new()
            .route("/metrics", get(|State(m): State<Metrics>| async move { ([(header::CONTENT_TYPE, OPEN_METRICS)], m.encode()) }))
            .route("/healthz", get(|| async { "ok\n" }))
            .route(
                "/readyz",
                get(move || async move {
                    if is_ready() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "stopping\n") }
                }),
            )
            .with_state(metrics);
        axum::serve(self.0, app).with_graceful_shutdown(stop).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn metrics_are_served_and_readiness_follows_the_daemon() {
        let probe = Probe::bind(([127, 0, 0, 1], 0).into()).await.expect("a free port");
        let base = format!("http://{}", probe.local_addr().expect("bound"));
        let metrics = Metrics::new();
        metrics.rpc("Get", "OK", "", Duration::from_millis(3));
        let ready = Arc::new(AtomicBool::new(true));
        let seen = Arc::clone(&ready);
        let serving = tokio::spawn(probe.serve(metrics, Arc::new(move || seen.load(Ordering::SeqCst)), std::future::pending()));
        let response = reqwest::get(format!("{base}/metrics")).await.expect("it serves");
        assert_eq!(response.headers()["content-type"], OPEN_METRICS);
        let text = response.text().await.expect("a body");
        assert!(text.contains(r#"kvm2_rpcs_total{method="Get",code="OK",reason=""} 1"#), "{text}");
        assert_eq!(reqwest::get(format!("{base}/readyz")).await.expect("it serves").status(), 200);
        ready.store(false, Ordering::SeqCst);
        assert_eq!(reqwest::get(format!("{base}/readyz")).await.expect("it serves").status(), 503);
        assert_eq!(reqwest::get(format!("{base}/healthz")).await.expect("it serves").status(), 200);
        serving.abort();
    }
}
