//! The life of one link: dialling, open, dead. Death is final and happens once.
//!
//! [`LinkState::kill`] marks the link dead, wakes whoever waits on it and only
//! then shuts the TCP connection down. None of this waits for the peer: a host
//! that went silent costs its callers nothing but the time it took to notice.
//!
//! A link with an open stream is dead to its callers at the same moment, but its
//! connection stays for a while: see [`LINGER`].

use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch::Sender;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::bounded;
use crate::telemetry::metrics::Metrics;

/// Silence of the peer that ends a link. Three keepalives go unanswered in it, and
/// with it every caller of a host that vanished is back well within 20 s.
pub const SILENCE: Duration = Duration::from_secs(15);

/// How often an idle link is asked for a sign of life.
pub const KEEPALIVE: Duration = Duration::from_secs(5);

/// How long the connection of a dead link is kept for a stream that the host has not ended.
///
/// libvirtd 11.3 locks itself up for good when it finds its client gone while it still has data or the end of a
/// stream of that client before it. So nothing is hung up under a stream: its abort is sent, and its answer waited for.
/// A host that was frozen for longer than this is left to its luck.
pub const LINGER: Duration = Duration::from_secs(300);

/// The same once the daemon is shutting down.
pub const LAST_WORD: Duration = Duration::from_secs(5);

/// What a link is for; the label of its metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkKind {
    Control,
    Dedicated,
}

impl LinkKind {
    pub fn label(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Dedicated => "dedicated",
        }
    }
}

#[derive(Debug)]
enum Phase {
    /// The step that is under way, for the error of a dial that runs out of time.
    Dialling(&'static str),
    Open,
    /// An orderly close is under way; no new call starts.
    Closing,
    Dead(String),
}

/// Shared by everything that belongs to one link.
pub struct LinkState {
    host: String,
    kind: LinkKind,
    metrics: Metrics,
    phase: Mutex<Phase>,
    dead: CancellationToken,
    socket: Mutex<Option<Arc<TcpStream>>>,
    heard: Heard,
    /// How many streams are open on the link.
    streams: Sender<usize>,
}

/// Held by a thread from before it opens a stream until the host has answered its end.
#[derive(Debug)]
pub struct StreamGuard(Arc<LinkState>);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.streams.send_modify(|n| *n = n.saturating_sub(1));
    }
}

/// When the peer was last heard, in a form that the transport can write without a lock.
#[derive(Debug)]
pub struct Heard {
    epoch: Instant,
    millis: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self { epoch: Instant::now(), millis: AtomicU64::new(0) }
    }

    pub fn now(&self) {
        let millis = u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.millis.store(millis, Ordering::Relaxed);
    }

    pub fn last(&self) -> Instant {
        self.epoch + Duration::from_millis(self.millis.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} link to {} ({:?})", self.kind.label(), self.host, *self.phase())
    }
}

impl LinkState {
    pub fn new(host: &str, kind: LinkKind, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            host: host.to_owned(),
            kind,
            metrics,
            phase: Mutex::new(Phase::Dialling("TCP connect")),
            dead: CancellationToken::new(),
            socket: Mutex::new(None),
            heard: Heard::new(),
            streams: Sender::new(0),
        })
    }

    fn phase(&self) -> std::sync::MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> std::sync::MutexGuard<'_, Option<Arc<TcpStream>>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn kind(&self) -> LinkKind {
        self.kind
    }

    pub fn heard(&self) -> &Heard {
        &self.heard
    }

    /// Names the step of the dial that comes next.
    pub fn stage(&self, stage: &'static str) {
        let mut phase = self.phase();
        if let Phase::Dialling(current) = &mut *phase {
            *current = stage;
        }
    }

    /// The step of the dial that is or was under way.
    pub fn current_stage(&self) -> &'static str {
        match &*self.phase() {
            Phase::Dialling(stage) => stage,
            Phase::Open | Phase::Closing | Phase::Dead(_) => "dial",
        }
    }

    /// Puts the socket in the hands of [`Self::kill`]; shut down at once if the link is dead already.
    pub fn own_socket(&self, socket: Arc<TcpStream>) {
        *self.socket() = Some(socket);
        if self.dead.is_cancelled() {
            self.drop_socket();
        }
    }

    fn drop_socket(&self) {
        if let Some(socket) = self.socket().take() {
            // an error means that the connection is gone already
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// The dial succeeded. False if the link died in the meantime.
    pub fn opened(&self) -> bool {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Dialling(_)) {
            *phase = Phase::Open;
            self.metrics.link(&self.host, self.kind.label(), "dialled");
            return true;
        }
        false
    }

    /// Takes the link out of use before an orderly close. False if it was out of use already.
    pub fn begin_close(&self) -> bool {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Open) {
            *phase = Phase::Closing;
            return true;
        }
        false
    }

    /// Ends the link: dead first, then the waiters, then the transport. Only the first cause counts.
    pub fn kill(&self, cause: &str) {
        let was_open = {
            let mut phase = self.phase();
            let was_open = match *phase {
                Phase::Dead(_) => return,
                Phase::Dialling(_) => false,
                Phase::Open | Phase::Closing => true,
            };
            *phase = Phase::Dead(bounded(cause));
            was_open
        };
        self.dead.cancel();
        // with a stream the tunnel hangs up
        if *self.streams.borrow() == 0 {
            self.drop_socket();
        }
        if was_open {
            self.metrics.link(&self.host, self.kind.label(), "dropped");
            tracing::debug!(host = %self.host, kind = self.kind.label(), cause = %bounded(cause), "link dropped");
        }
    }

    /// Announces a stream.
    pub fn stream(self: &Arc<Self>) -> StreamGuard {
        self.streams.send_modify(|n| *n += 1);
        StreamGuard(self.clone())
    }

    /// Resolves when no stream is open, or when the time for that has passed, which `closing` makes short.
    pub async fn streams_ended(&self, closing: &CancellationToken) {
        let mut streams = self.streams.subscribe();
        tokio::select! {
            // the sender is a part of `self`
            _ = streams.wait_for(|n| *n == 0) => {}
            () = tokio::time::sleep(LINGER) => {}
            () = async {
                closing.cancelled().await;
                tokio::time::sleep(LAST_WORD).await;
            } => {}
        }
    }

    /// Shuts the TCP connection of a dead link down, whatever is open on it.
    pub fn hang_up(&self) {
        if self.is_dead() {
            self.drop_socket();
        }
    }

    /// True while calls may be made.
    pub fn is_open(&self) -> bool {
        matches!(*self.phase(), Phase::Open)
    }

    pub fn is_dead(&self) -> bool {
        self.dead.is_cancelled()
    }

    /// Why the link is out of use.
    pub fn cause(&self) -> String {
        match &*self.phase() {
            Phase::Dead(cause) => cause.clone(),
            Phase::Closing => "the link was closed".to_owned(),
            Phase::Dialling(_) | Phase::Open => "the link is up".to_owned(),
        }
    }

    /// Resolves when the link is dead, with the cause.
    pub async fn died(&self) -> String {
        self.dead.cancelled().await;
        self.cause()
    }
}

/// Kills the link once the peer was silent for `silence`, or when `closing` fires.
/// Runs beside everything else, so a write that stalls cannot keep it from looking.
pub async fn watch(state: Arc<LinkState>, silence: Duration, closing: CancellationToken) {
    loop {
        let limit = state.heard.last() + silence;
        tokio::select! {
            () = state.dead.cancelled() => return,
            () = closing.cancelled() => return state.kill("the daemon is shutting down"),
            () = tokio::time::sleep_until(limit) => {
                if state.heard.last() + silence <= Instant::now() {
                    return state.kill(&format!("the host was silent for {} s", silence.as_secs()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn state() -> Arc<LinkState> {
        LinkState::new("hv1", LinkKind::Control, Metrics::new())
    }

    #[tokio::test]
    async fn a_link_dies_once_and_keeps_its_first_cause() {
        let state = state();
        assert!(state.opened());
        state.kill("first");
        state.kill("second");
        assert_eq!(state.died().await, "first");
        assert!(!state.opened() && !state.is_open());
    }

    #[tokio::test]
    async fn a_socket_that_arrives_after_death_is_shut_down() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
        let (mut peer, _) = listener.accept().expect("connected");
        let state = state();
        state.kill("gone");
        state.own_socket(Arc::new(socket));
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut peer, &mut rest).expect("a clean end");
        assert!(rest.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_link_is_hung_up_when_its_streams_have_ended_or_had_their_time() {
        let state = state();
        assert!(state.opened());
        let stream = state.stream();
        state.kill("no answer");
        let calm = CancellationToken::new();
        let mut ended = Box::pin(state.streams_ended(&calm));
        assert!(ended.as_mut().now_or_never().is_none(), "its stream is open");
        drop(stream);
        ended.await;

        let _stream = state.stream();
        let began = Instant::now();
        state.streams_ended(&calm).await;
        assert_eq!(began.elapsed(), LINGER);
        let began = Instant::now();
        calm.cancel();
        state.streams_ended(&calm).await;
        assert_eq!(began.elapsed(), LAST_WORD);
    }

    #[tokio::test]
    async fn a_connection_stays_under_a_stream_until_it_is_hung_up() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
        let (mut peer, _) = listener.accept().expect("connected");
        let state = state();
        state.own_socket(Arc::new(socket.try_clone().expect("another descriptor")));
        let _stream = state.stream();
        state.kill("no answer");
        std::io::Write::write_all(&mut &socket, b"abort").expect("it stands");
        state.hang_up();
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut peer, &mut rest).expect("a clean end");
        assert_eq!(rest, b"abort");
    }

    #[tokio::test]
    async fn silence_kills_and_a_sign_of_life_does_not() {
        let state = state();
        assert!(state.opened());
        state.heard.now();
        let mut calm = Box::pin(watch(state.clone(), SILENCE, CancellationToken::new()));
        assert!(calm.as_mut().now_or_never().is_none() && state.is_open());
        watch(state.clone(), Duration::ZERO, CancellationToken::new()).await;
        assert!(state.cause().contains("silent"));
        calm.await;
    }

    #[tokio::test]
    async fn only_an_open_link_counts_as_dropped() {
        let metrics = Metrics::new();
        let never_open = LinkState::new("hv1", LinkKind::Control, metrics.clone());
        never_open.kill("no route");
        assert!(!metrics.encode().contains("event=\"dropped\""));
        let open = LinkState::new("hv1", LinkKind::Control, metrics.clone());
        open.opened();
        open.kill("silence");
        assert!(metrics.encode().contains("event=\"dropped\"} 1"));
    }
}
