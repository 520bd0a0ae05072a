//! Running Creates: work that belongs to the daemon and that callers join.
//!
//! A Create of (entry, name) is one job. A caller's deadline or disconnect ends
//! only its wait. A Delete cancels the job, which ends at its next step.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Created, Key};
use crate::domain::VmName;
use crate::error::Result;
use crate::hypervisor::HostId;
use crate::image::cache::Pull;

/// What identifies the job among all of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct JobKey {
    pub entry: String,
    pub name: VmName,
}

/// What a caller must agree on to join.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub key: Key,
    pub spec_hash: String,
    pub host: HostId,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Queued,
    Connecting,
    Inspecting,
    Defining,
    /// The one step that a caller does not wait for without limit.
    PullingImage(Pull),
    CreatingVolumes,
    Starting,
}

impl Step {
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Connecting => "connecting",
            Self::Inspecting => "inspecting",
            Self::Defining => "defining",
            Self::PullingImage(_) => "pulling image",
            Self::CreatingVolumes => "creating volumes",
            Self::Starting => "starting",
        }
    }
}

#[derive(Debug, Clone)]
pub(super) enum Progress {
    At(Step),
    Done(Box<Result<Created>>),
}

#[derive(Debug)]
pub(super) struct Job {
    pub terms: Terms,
    pub cancel: CancellationToken,
    progress: watch::Sender<Progress>,
}

impl Job {
    pub(super) fn step(&self, step: Step) {
        tracing::debug!(step = step.label(), "create step");
        self.progress.send_replace(Progress::At(step));
    }

    pub(super) fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Jobs(Arc<Mutex<HashMap<JobKey, Arc<Job>>>>);

pub(super) enum Entered {
    /// A running job; whether its terms fit is the caller's to judge.
    Running(Arc<Job>),
    /// A new job, to be run and then finished.
    New(Arc<Job>),
}

impl Jobs {
    pub(super) fn enter(&self, key: &JobKey, terms: Terms, stop: &CancellationToken) -> Entered {
        let mut jobs = self.lock();
        if let Some(job) = jobs.get(key) {
            return Entered::Running(job.clone());
        }
        let job = Arc::new(Job { terms, cancel: stop.child_token(), progress: watch::channel(Progress::At(Step::Queued)).0 });
        jobs.insert(key.clone(), job.clone());
        Entered::New(job)
    }

    pub(super) fn get(&self, key: &JobKey) -> Option<Arc<Job>> {
        self.lock().get(key).cloned()
    }

    /// Forgets the job first, so that nobody joins one that has an answer already.
    pub(super) fn finish(&self, key: &JobKey, job: &Job, result: Result<Created>) {
        self.lock().remove(key);
        job.progress.send_replace(Progress::Done(Box::new(result)));
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<JobKey, Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
