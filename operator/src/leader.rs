//! One operator acts at a time: a Lease, by the rules of client-go, and a fence for who has lost it.
//!
//! - Nobody's wall clock is trusted: a lease of another counts as expired when its record has not changed for its
//!   duration, by our own monotonic clock.
//! - A leader that cannot renew stops acting before anybody else may start: [`Leadership`] holds until the start of
//!   the last good renewal plus the renew deadline, which is shorter than the lease.
//! - Writes carry the resource version, so of two that take an expired lease one fails.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How a lease is held.
#[derive(Debug, Clone)]
pub struct LeaseOptions {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Who we are; another value for every process.
    pub identity: String,
    /// How long a lease that is not renewed keeps others out.
    pub duration: Duration,
    /// How long a leader may fail to renew and still act; less than `duration`.
    pub renew_deadline: Duration,
    /// Between two tries.
    pub retry: Duration,
}

/// The right to act. Everybody who writes or calls a provider asks first.
#[derive(Debug, Clone, Default)]
pub struct Leadership(Arc<Mutex<Until>>);

#[derive(Debug, Clone, Copy, Default)]
enum Until {
    #[default]
    Not,
    At(Instant),
    /// Nobody else can be there.
    Always,
}

/// The right to act is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this operator is not the leader")]
pub struct NotLeader;

impl Leadership {
    /// Where leader election is off.
    #[must_use]
    pub fn always() -> Self {
        Self(Arc::new(Mutex::new(Until::Always)))
    }

    /// Whether this process may act.
    ///
    /// # Errors
    /// It may not: it has never led, or could not renew in time.
    pub fn check(&self) -> Result<(), NotLeader> {
        match *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Until::Always => Ok(()),
            Until::At(end) if Instant::now() < end => Ok(()),
            Until::At(_) | Until::Not => Err(NotLeader),
        }
    }

    fn set(&self, until: Until) {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = until;
    }
}

/// How an election ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to.
    Stopped,
    /// It led and could not renew in time: the process has to end.
    Lost,
}

/// What was seen of somebody else's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Observed {
    record: (Option<String>, Option<i32>, Option<MicroTime>),
    since: Instant,
}

/// Takes part in the election.
#[derive(Debug)]
pub struct Elector {
    api: Api<Lease>,
    options: LeaseOptions,
    leadership: Leadership,
    observed: Option<Observed>,
}

impl Elector {
    /// Of a lease; `leadership` is what others look at.
    #[must_use]
    pub fn new(client: Client, options: LeaseOptions, leadership: Leadership) -> Self {
        Self { api: Api::namespaced(client, &options.namespace), options, leadership, observed: None }
    }

    /// Waits until this process leads; false when it was stopped before.
    pub async fn acquire(&mut self, stop: &CancellationToken) -> bool {
        loop {
            if self.try_once().await {
                tracing::info!(lease = self.options.name, identity = self.options.identity, "leading");
                return true;
            }
            tokio::select! {
                () = stop.cancelled() => return false,
                () = tokio::time::sleep(self.options.retry) => {}
            }
        }
    }

    /// Gives the right back, and lets the next one in at once.
    pub async fn stop(&mut self) {
        self.leadership.set(Until::Not);
        self.release().await;
    }

    /// Renews until the right is lost. May be dropped at any time; the lease stays held then until it runs out.
    pub async fn hold(&mut self) -> Ended {
        loop {
            tokio::time::sleep(self.options.retry).await;
            // a try never outlives the deadline: a silent API server is no leave to act on
            let try_once = tokio::time::timeout(self.options.renew_deadline, self.try_once()).await;
            if !matches!(try_once, Ok(true)) && self.leadership.check().is_err() {
                self.leadership.set(Until::Not);
                tracing::error!(lease = self.options.name, "leadership is lost: it could not be renewed in time");
                return Ended::Lost;
            }
        }
    }

    /// Takes or renews the lease; true when it is ours.
    async fn try_once(&mut self) -> bool {
        let start = Instant::now();
        match self.take().await {
            Ok(true) => {
                self.leadership.set(Until::At(start + self.options.renew_deadline));
                true
            }
            Ok(false) => false,
            Err(e) => {
                tracing::warn!(lease = self.options.name, error = %e, "the lease cannot be taken or renewed");
                false
            }
        }
    }

    async fn take(&mut self) -> Result<bool, kube::Error> {
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.api.get_opt(&self.options.name).await? else {
            let metadata = ObjectMeta { name: Some(self.options.name.clone()), ..ObjectMeta::default() };
            let new = Lease { metadata, spec: Some(self.spec(&LeaseSpec::default(), now)) };
            return self.api.create(&PostParams::default(), &new).await.map(|_| true);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let is_ours = spec.holder_identity.as_deref() == Some(&self.options.identity);
        let is_free = spec.holder_identity.as_deref().is_none_or(str::is_empty);
        if !is_ours && !is_free && !self.has_stood_still(&spec) {
            return Ok(false);
        }
        lease.spec = Some(self.spec(&spec, now));
        // with the resource version of what was read: who comes second fails
        self.api.replace(&self.options.name, &PostParams::default(), &lease).await.map(|_| true)
    }

    fn has_stood_still(&mut self, spec: &LeaseSpec) -> bool {
        let record = (spec.holder_identity.clone(), spec.lease_transitions, spec.renew_time.clone());
        match &self.observed {
            Some(seen) if seen.record == record => {
                let theirs =
                    spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).map_or(self.options.duration, Duration::from_secs);
                seen.since.elapsed() > theirs
            }
            _ => {
                self.observed = Some(Observed { record, since: Instant::now() });
                false
            }
        }
    }

    fn spec(&self, old: &LeaseSpec, now: MicroTime) -> LeaseSpec {
        let is_ours = old.holder_identity.as_deref() == Some(&self.options.identity);
        LeaseSpec {
            holder_identity: Some(self.options.identity.clone()),
            lease_duration_seconds: i32::try_from(self.options.duration.as_secs()).ok(),
            acquire_time: if is_ours { old.acquire_time.clone() } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!is_ours && old.holder_identity.is_some())),
            ..LeaseSpec::default()
        }
    }

    /// Lets the next one in at once.
    async fn release(&self) {
        let give_up = async {
            let Some(mut lease) = self.api.get_opt(&self.options.name).await? else { return Ok(()) };
            if let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_deref() == Some(&self.options.identity)) {
                spec.holder_identity = Some(String::new());
                spec.lease_duration_seconds = Some(1);
                self.api.replace(&self.options.name, &PostParams::default(), &lease).await?;
            }
            Ok::<_, kube::Error>(())
        };
        match tokio::time::timeout(self.options.retry, give_up).await {
            Ok(Ok(())) => tracing::info!(lease = self.options.name, "the lease is released"),
            Ok(Err(e)) => tracing::warn!(lease = self.options.name, error = %e, "the lease is not released and runs out by itself"),
            Err(_) => tracing::warn!(lease = self.options.name, "the lease is not released and runs out by itself"),
        }
    }
}
