//! Runs blocking calls on threads: a place in line, a budget, and an end when the
//! link ends. A caller that goes away leaves its call to run out by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::ffi::{Connection, LibvirtError};
use crate::error::bounded;
use crate::hypervisor::{CallError, CallFailure, CallResult};
use crate::link::state::LinkState;

/// libvirtd serves five requests of a client at a time and lets the sixth block the connection.
const IN_FLIGHT: usize = 4;

/// A guest agent may take its time; it must not take every place.
const AGENT_CALLS: usize = 2;
/// How long a call waits for such a place. When silent guests hold them the others go without their agents: most have
/// an address that another source knows.
const AGENT_PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Clone)]
pub(super) struct Worker {
    state: Arc<LinkState>,
    tracker: TaskTracker,
    all: Arc<Semaphore>,
    agent: Arc<Semaphore>,
}

/// Which places a call takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    Plain,
    Agent,
}

/// What a blocking call may end with, besides libvirt's own error.
#[derive(Debug)]
pub(super) enum Fault {
    Libvirt(LibvirtError),
    Other(CallFailure),
}

impl From<LibvirtError> for Fault {
    fn from(error: LibvirtError) -> Self {
        Self::Libvirt(error)
    }
}

impl From<LibvirtError> for CallFailure {
    fn from(LibvirtError { code, domain, message }: LibvirtError) -> Self {
        Self::Libvirt { code, domain, message }
    }
}

impl Worker {
    pub(super) fn new(state: Arc<LinkState>, tracker: TaskTracker) -> Self {
        Self { state, tracker, all: Arc::new(Semaphore::new(IN_FLIGHT)), agent: Arc::new(Semaphore::new(AGENT_CALLS)) }
    }

    pub(super) fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    pub(super) fn tracker(&self) -> &TaskTracker {
        &self.tracker
    }

    pub(super) fn error(&self, call: &'static str, kind: CallFailure) -> CallError {
        CallError { host: self.state.host().to_owned(), call, kind }
    }

    pub(super) fn dead(&self, call: &'static str) -> CallError {
        self.error(call, CallFailure::LinkDead { cause: self.state.cause() })
    }

    /// Runs `work` on a blocking thread, and ends the link if it overruns `budget`.
    /// Waiting for a place is part of the budget, but does not cost the link.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        call: &'static str,
        lane: Lane,
        budget: Duration,
        connection: Connection,
        work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> CallResult<T> {
        let deadline = Instant::now() + budget;
        let overrun = || self.error(call, CallFailure::Timeout { budget });
        let places = tokio::select! {
            biased;
            _ = self.state.died() => return Err(self.dead(call)),
            places = self.places(lane) => places.map_err(|kind| self.error(call, kind))?,
            () = tokio::time::sleep_until(deadline) => return Err(overrun()),
        };
        if !self.state.is_open() {
            return Err(self.dead(call));
        }
        let span = tracing::Span::current();
        let mut thread = self.tracker.spawn_blocking(move || {
            let _entered = span.enter();
            let result = work();
            // asked on this thread, before the connection handle may close it
            let alive = result.is_ok() || connection.is_alive();
            drop(places);
            (result, alive)
        });
        let worker = self.clone();
        // a task of its own: the caller may stop waiting, the budget goes on
        let task = self.tracker.spawn(async move {
            let (result, alive) = tokio::select! {
                biased;
                joined = &mut thread => joined.map_err(|e| {
                    let what = if e.is_panic() { "the call panicked" } else { "the call was cancelled" };
                    worker.error(call, CallFailure::BadAnswer { what: what.to_owned() })
                })?,
                _ = worker.state.died() => return Err(worker.dead(call)),
                () = tokio::time::sleep_until(deadline) => {
                    worker.state.kill(&format!("{call} did not answer within {} s", budget.as_secs()));
                    return Err(worker.error(call, CallFailure::Timeout { budget }));
                }
            };
            result.map_err(|fault| worker.judge(call, fault, alive))
        });
        match task.await {
            Ok(result) => result,
            Err(_) => Err(self.dead(call)),
        }
    }

    async fn places(&self, lane: Lane) -> Result<(Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>), CallFailure> {
        // the narrow gate first, so that a queue of agent calls holds no other place; the semaphores are never closed
        let agent = match lane {
            Lane::Plain => None,
            Lane::Agent => match timeout(AGENT_PATIENCE, self.agent.clone().acquire_owned()).await {
                Ok(place) => place.ok(),
                Err(_) => return Err(CallFailure::NotAsked { why: "the agents of other guests of the host hold every place".to_owned() }),
            },
        };
        Ok((agent, self.all.clone().acquire_owned().await.ok()))
    }

    /// Says whether an error is the host's answer or the end of the link.
    fn judge(&self, call: &'static str, fault: Fault, alive: bool) -> CallError {
        let kind = match fault {
            Fault::Libvirt(e) if !alive || e.is_lost_connection() => {
                self.state.kill(&format!("{call}: {}", e.message));
                CallFailure::LinkDead { cause: bounded(&e.message) }
            }
            Fault::Libvirt(e) => e.into(),
            // what feeds an upload lets go of it when the link dies
            Fault::Other(CallFailure::SourceAborted) if self.state.is_dead() => CallFailure::LinkDead { cause: self.state.cause() },
            Fault::Other(kind) => kind,
        };
        self.error(call, kind)
    }
}
