//! The hosts and their links: one shared control link per host, dialled by whoever
//! comes first and shared by all who come meanwhile; links of their own for the rest.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::credentials::Credentials;
use super::dial::{Dialler, Endpoint};
use super::state::LinkKind;
use tracing::Instrument;

use crate::config::{Config, ConfigHandle};
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::observed::Observed;
use crate::hypervisor::{Connect, HostId, Hypervisor};
use crate::telemetry::metrics::Metrics;

/// Dials of one host at a time; sshd starts to drop connections at ten that are not authenticated.
const DIALS_PER_HOST: usize = 3;

/// How long a libvirtd may be away for a restart.
const RESTART_PATIENCE: Duration = Duration::from_secs(60);

/// How long a shutdown lets links close in order.
const ORDERLY: Duration = Duration::from_secs(1);

/// How long a shutdown waits for threads that are stuck outside the network.
const LAST_WAIT: Duration = Duration::from_secs(10);

type Link = Arc<dyn Hypervisor>;
type Dial = Shared<BoxFuture<'static, Result<Link>>>;

/// All links of the daemon.
pub struct HostTable {
    config: ConfigHandle,
    dialler: Dialler,
    slots: Mutex<Slots>,
    stopping: CancellationToken,
}

struct Slots {
    /// The configuration that the slots were last compared with.
    seen: Option<Arc<Config>>,
    by_host: HashMap<HostId, Arc<Slot>>,
}

/// One host at one endpoint.
struct Slot {
    endpoint: Endpoint,
    dials: Semaphore,
    control: Mutex<Control>,
    /// When a link to it was last seen to live.
    alive: Mutex<Option<Instant>>,
}

impl Slot {
    fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, dials: Semaphore::new(DIALS_PER_HOST), control: Mutex::new(Control::Down), alive: Mutex::default() }
    }

    fn saw_it_alive(&self) {
        *lock(&self.alive) = Some(Instant::now());
    }

    /// A socket that a link went through a moment ago is not missing for good: libvirtd takes it away when it restarts.
    fn judge(&self, error: ProviderError) -> ProviderError {
        let gone = matches!(error.reason(), Reason::SocketMissing | Reason::SocketUnavailable);
        let lately = lock(&self.alive).is_some_and(|seen| seen.elapsed() < RESTART_PATIENCE);
        if !(gone && lately) {
            return error;
        }
        let host = &self.endpoint.id.host;
        let message = format!("libvirtd on host {host} is gone, and answered a moment ago; it may be restarting, try again");
        ProviderError::new(Reason::LibvirtRestarting, message).on_host(host).during("open").with_source(error)
    }
}

enum Control {
    Down,
    Dialling(Dial),
    Up(Link),
}

impl std::fmt::Debug for HostTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostTable").field("hosts", &lock(&self.slots).by_host.len()).finish_non_exhaustive()
    }
}

impl HostTable {
    /// Dials nothing until it is asked for a link.
    pub fn new(config: ConfigHandle, metrics: Metrics) -> Arc<Self> {
        let dialler =
            Dialler { credentials: Credentials::default(), metrics, tracker: TaskTracker::new(), closing: CancellationToken::new() };
        let slots = Mutex::new(Slots { seen: None, by_host: HashMap::new() });
        Arc::new(Self { config, dialler, slots, stopping: CancellationToken::new() })
    }

    /// Closes every link and waits until nothing of them runs any more.
    pub async fn shutdown(&self) {
        self.stopping.cancel();
        let slots: Vec<_> = lock(&self.slots).by_host.drain().map(|(_, slot)| slot).collect();
        for slot in &slots {
            if let Control::Up(link) = &*lock(&slot.control) {
                link.close();
            }
        }
        drop(slots);
        self.dialler.tracker.close();
        let _ = tokio::time::timeout(ORDERLY, self.dialler.tracker.wait()).await;
        self.dialler.closing.cancel();
        if tokio::time::timeout(LAST_WAIT, self.dialler.tracker.wait()).await.is_err() {
            tracing::warn!(tasks = self.dialler.tracker.len(), "tasks of links are stuck; they are left behind");
        }
    }

    fn slot(&self, host: &HostId) -> Result<Arc<Slot>> {
        if self.stopping.is_cancelled() {
            return Err(ProviderError::new(Reason::ShuttingDown, "the daemon is shutting down; try again elsewhere").on_host(&host.host));
        }
        let config = self.config.current();
        let endpoint = endpoint(&config, host)?;
        let mut slots = lock(&self.slots);
        if !slots.seen.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, &config)) {
            // a link to an endpoint that is gone ends with its last user
            slots.by_host.retain(|id, slot| self::endpoint(&config, id).is_ok_and(|current| current == slot.endpoint));
            slots.seen = Some(config);
        }
        let slot = slots.by_host.entry(host.clone()).or_insert_with(|| Arc::new(Slot::new(endpoint)));
        Ok(slot.clone())
    }

    /// A task of its own: a caller that leaves does not take the dial away from the others.
    fn start_control_dial(&self, slot: Arc<Slot>) -> Dial {
        let (done, result) = oneshot::channel();
        let dialler = self.dialler.clone();
        let work = async move {
            let outcome = dial(&dialler, &slot, LinkKind::Control, None).await;
            // before the waiters wake: an error is theirs alone, the next caller dials again
            *lock(&slot.control) = match &outcome {
                Ok(link) => Control::Up(link.clone()),
                Err(_) => Control::Down,
            };
            let _ = done.send(outcome);
        };
        // under the span of the caller that was first
        self.dialler.tracker.spawn(work.in_current_span());
        let cut_short = || ProviderError::new(Reason::ShuttingDown, "the dial was cut short; try again");
        result.map(move |r| r.unwrap_or_else(|_| Err(cut_short()))).boxed().shared()
    }
}

#[async_trait]
impl Connect for HostTable {
    async fn control(&self, host: &HostId) -> Result<Link> {
        let slot = self.slot(host)?;
        let dial = {
            let mut control = lock(&slot.control);
            match &*control {
                Control::Up(link) if link.is_alive() => {
                    slot.saw_it_alive();
                    return Ok(link.clone());
                }
                Control::Dialling(dial) => dial.clone(),
                Control::Up(_) | Control::Down => {
                    let dial = self.start_control_dial(slot.clone());
                    *control = Control::Dialling(dial.clone());
                    dial
                }
            }
        };
        dial.await
    }

    async fn dedicated(&self, host: &HostId) -> Result<Link> {
        let slot = self.slot(host)?;
        dial(&self.dialler, &slot, LinkKind::Dedicated, None).await
    }

    async fn dedicated_by(&self, host: &HostId, deadline: Instant) -> Result<Link> {
        let slot = self.slot(host)?;
        dial(&self.dialler, &slot, LinkKind::Dedicated, Some(deadline)).await
    }
}

/// Within the dial budget, and no longer than `deadline`.
async fn dial(dialler: &Dialler, slot: &Slot, kind: LinkKind, deadline: Option<Instant>) -> Result<Link> {
    let endpoint = &slot.endpoint;
    let budget = Instant::now() + endpoint.budgets.dial;
    let deadline = deadline.map_or(budget, |deadline| deadline.min(budget));
    let Ok(Ok(_place)) = timeout_at(deadline, slot.dials.acquire()).await else {
        dialler.metrics.link(&endpoint.id.host, kind.label(), "dial_failed");
        let message = format!("other dials of host {} took the whole time; try again", endpoint.id.host);
        return Err(ProviderError::new(Reason::HostUnreachable, message).on_host(&endpoint.id.host));
    };
    let link = dialler.dial(endpoint, kind, deadline).await.map_err(|e| slot.judge(e))?;
    slot.saw_it_alive();
    Ok(Arc::new(Observed::new(Arc::new(link), dialler.metrics.clone())))
}

fn endpoint(config: &Config, id: &HostId) -> Result<Endpoint> {
    let entry = config.entries.iter().find(|e| e.name == id.entry);
    let Some((entry, host)) = entry.and_then(|e| Some((e, e.host(&id.host)?))) else {
        let message = format!("host {} of entry {} is not configured; bring it back or abandon what is on it", id.host, id.entry);
        return Err(ProviderError::new(Reason::HostNotConfigured, message).on_host(&id.host));
    };
    Ok(Endpoint {
        id: id.clone(),
        address: host.address.clone(),
        port: host.port,
        user: host.user.clone(),
        socket: host.socket.clone(),
        key_file: entry.ssh_key_file.clone(),
        host_keys: entry.host_keys.clone(),
        budgets: entry.budgets,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
