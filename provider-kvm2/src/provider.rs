//! The operations, in the provider's own words. `service` turns the contract's
//! messages into these and back; nothing here knows gRPC.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, ConfigHandle, Entry};
use crate::domain::{Phase, VmName};
use crate::error::{ProviderError, Result};
use crate::hypervisor::{Connect, HostId};
use crate::image::{ImageCache, ImageStatus};
use crate::lock::KeyedLocks;

mod check;
mod create;
mod delete;
mod get;
mod images;
mod jobs;
mod leftovers;
mod list;
mod placement;
mod preflight;
mod sites;
#[cfg(test)]
mod tests;
mod types;

pub use types::*;

use jobs::{JobKey, Jobs, Progress, Step};
use sites::Sites;

/// What the mark has to agree with; empty fields agree with everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Expected {
    uid: String,
    installation_id: String,
}

/// What `service` serves: the operations of all entries. The one real
/// implementation is the provider of this module; the trait is where tests of the
/// service put a scripted one.
#[async_trait]
pub trait Operations: Send + Sync + 'static {
    async fn create(&self, request: CreateRequest) -> Result<Created>;
    async fn get(&self, entry: &str, selector: Selector) -> Result<Instance>;
    async fn delete(&self, request: DeleteRequest) -> Result<Deleted>;
    async fn list(&self, request: ListRequest) -> Result<ListPage>;
    /// One row per host in configured order, within `timeout`.
    async fn check(&self, entry: &str, timeout: Duration) -> Result<Vec<HostCheck>>;
    /// The configuration that is being served.
    fn config(&self) -> Arc<Config>;
    /// The image on one host; an empty `host` means every host of the entry.
    async fn image(&self, entry: &str, host: &str, image: &str) -> Result<Vec<ImageStatus>>;
    /// All images of the entry on all hosts, and the hosts that could not be asked.
    async fn images(&self, entry: &str) -> Result<(Vec<ImageStatus>, Vec<ProviderError>)>;
}

/// The provider of all configured entries. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Provider(Arc<Shared>);

#[derive(Debug)]
pub struct Shared {
    config: ConfigHandle,
    sites: Sites,
    images: Arc<ImageCache>,
    jobs: Jobs,
    locks: KeyedLocks<(HostId, VmName)>,
    /// Why the last Create of a name failed; gone with its success or its Delete.
    failures: Mutex<HashMap<JobKey, ProviderError>>,
    /// Who this daemon is in marks: the same after a restart, another for another replica.
    replica: String,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl std::ops::Deref for Provider {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// Names remembered at most; beyond that none is added.
const MAX_REMEMBERED: usize = 10_000;

impl Provider {
    pub fn new(config: ConfigHandle, connect: Arc<dyn Connect>, images: Arc<ImageCache>, replica: String) -> Self {
        Self(Arc::new(Shared {
            config,
            sites: Sites::new(connect),
            images,
            jobs: Jobs::default(),
            locks: KeyedLocks::default(),
            failures: Mutex::default(),
            replica,
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }))
    }

    /// Ends running work at its next step and waits for it. What is unfinished stays
    /// marked on its host, for the next Create or Delete.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Works under way, for tests and for a drain.
    pub fn running(&self) -> usize {
        self.jobs.len()
    }

    fn remember(&self, key: &JobKey, failure: Option<&ProviderError>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match failure {
            Some(error) if failures.len() < MAX_REMEMBERED || failures.contains_key(key) => {
                drop(failures.insert(key.clone(), error.clone()))
            }
            Some(_) => {}
            None => drop(failures.remove(key)),
        }
    }

    /// What this daemon knows of an unfinished instance beyond what its host says.
    fn with_progress(&self, entry: &Entry, mut instance: Instance) -> Instance {
        if instance.phase != Phase::Creating || instance.state != State::Provisioning {
            return instance;
        }
        let key = JobKey { entry: entry.name.clone(), name: instance.id.name.clone() };
        if let Some(job) = self.jobs.get(&key) {
            if let Progress::At(step) = &*job.watch().borrow() {
                instance.state_reason = match step {
                    Step::PullingImage(_) => StateReason::ImagePull,
                    Step::Starting => StateReason::Starting,
                    _ => StateReason::Creating,
                };
                instance.state_message = format!("the instance is being created: {}", step.label());
            }
        } else {
            instance.last_error = self.failures.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        }
        instance
    }
}

#[async_trait]
impl Operations for Provider {
    async fn create(&self, request: CreateRequest) -> Result<Created> {
        self.create_instance(request).await
    }

    async fn get(&self, entry: &str, selector: Selector) -> Result<Instance> {
        self.get_instance(entry, selector).await
    }

    async fn delete(&self, request: DeleteRequest) -> Result<Deleted> {
        self.delete_instance(request).await
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        self.list_instances(request).await
    }

    async fn check(&self, entry: &str, timeout: Duration) -> Result<Vec<HostCheck>> {
        self.check_hosts(entry, timeout).await
    }

    fn config(&self) -> Arc<Config> {
        self.config.current()
    }

    async fn image(&self, entry: &str, host: &str, image: &str) -> Result<Vec<ImageStatus>> {
        self.image_on(entry, host, image).await
    }

    async fn images(&self, entry: &str) -> Result<(Vec<ImageStatus>, Vec<ProviderError>)> {
        self.images_of(entry, "").await
    }
}
