//! Whether the watch really moves. A watch that has died without a word looks like a quiet one; but an API server sends
//! a bookmark about every minute, and a watch ends and begins anew within five. So each byte of a watch of Proxies is a
//! beat, and without one for long enough the process is not alive and gets restarted.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;
use tower::{BoxError, Layer, Service};

/// Without a beat for so long the watch is dead: the longest that a watch is quiet, and as much again.
pub const DEAD_AFTER: Duration = Duration::from_secs(600);

/// The last beat. Clones share it.
#[derive(Debug, Clone)]
pub struct Pulse {
    start: Instant,
    last: Arc<AtomicU64>,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { start: Instant::now(), last: Arc::default() }
    }
}

impl Pulse {
    fn beat(&self) {
        let since = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.fetch_max(since, Ordering::Relaxed);
    }

    /// Since the last beat, or since the start.
    #[must_use]
    pub fn quiet_for(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }
}

/// Puts a pulse on the watches of Proxies that go through a client.
#[derive(Debug, Clone)]
pub struct PulseLayer(pub Pulse);

impl<S> Layer<S> for PulseLayer {
    type Service = PulseService<S>;

    fn layer(&self, inner: S) -> PulseService<S> {
        PulseService { inner, pulse: self.0.clone() }
    }
}

/// See [`PulseLayer`].
#[derive(Debug, Clone)]
pub struct PulseService<S> {
    inner: S,
    pulse: Pulse,
}

impl<S, Q, B> Service<Request<Q>> for PulseService<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Response = Response<Beating<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let uri = request.uri();
        let is_watch = uri.path().ends_with("/proxies") && uri.query().is_some_and(|q| q.split('&').any(|p| p == "watch=true"));
        let pulse = is_watch.then(|| self.pulse.clone());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            if let Some(pulse) = pulse.as_ref().filter(|_| answer.status().is_success()) {
                pulse.beat();
            }
            Ok(answer.map(|body| Beating { body: Box::pin(body), pulse }))
        })
    }
}

/// A body whose frames are beats.
#[derive(Debug)]
pub struct Beating<B> {
    body: Pin<Box<B>>,
    pulse: Option<Pulse>,
}

impl<B: Body<Data = Bytes>> Body for Beating<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = self.body.as_mut().poll_frame(cx);
        if let (Poll::Ready(Some(Ok(_))), Some(pulse)) = (&frame, &self.pulse) {
            pulse.beat();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
