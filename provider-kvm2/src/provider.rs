//! The operations, in the provider's own words. `service` turns the contract's
//! messages into these and back; nothing here knows gRPC.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use secrecy::SecretSlice;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, ConfigHandle, Entry};
pub use crate::domain::addresses::Address;
pub use crate::domain::state::{State, StateReason};
use crate::domain::{InstanceId, Phase, VmName};
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

use jobs::{JobKey, Jobs, Progress, Step};
use sites::Sites;

/// What identifies an instance for its caller.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pub name: String,
    pub uid: String,
    pub installation_id: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    pub zone: String,
    /// Not used for placing; part of the caller's spec hash.
    pub region: String,
    pub machine_type: String,
    pub image: String,
}

/// A Create as asked for. `user_data` is opaque and secret.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    pub entry: String,
    pub key: Key,
    pub placement: Placement,
    pub user_data: Arc<SecretSlice<u8>>,
    pub spec_hash: String,
    /// How long the caller waits for a cold image.
    pub max_wait: Duration,
}

#[derive(Debug, Clone)]
pub struct Created {
    pub instance: Instance,
    pub outcome: CreateOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateOutcome {
    /// Made, or completed from what an earlier attempt had left.
    Created,
    /// Another caller's running Create of the same key made it.
    Joined,
    /// It existed and was started or left as it was.
    Existing,
}

/// Which instance a Get or Delete means.
#[derive(Debug, Clone)]
pub enum Selector {
    /// The opaque id as text; an empty `expected_uid` or `expected_installation` checks nothing.
    Id { id: String, expected_uid: String, expected_installation: String },
    /// `zone` may be empty: then every host of the entry is looked at.
    Key { key: Key, zone: String },
}

/// What the mark has to agree with; empty fields agree with everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Expected {
    uid: String,
    installation_id: String,
}

#[derive(Debug, Clone)]
pub struct DeleteRequest {
    pub entry: String,
    pub selector: Selector,
    pub unknown_host: UnknownHost,
}

/// What Delete does with an instance on a host that is no longer configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownHost {
    Refuse,
    Abandon,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deleted {
    pub outcome: DeleteOutcome,
    pub removed: Vec<Removed>,
    /// A running Create of the key was ended by this Delete.
    pub create_cancelled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteOutcome {
    Deleted,
    AlreadyAbsent,
    /// Left behind on a host that is no longer configured, as the caller asked.
    Abandoned,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    pub kind: RemovedKind,
    pub host: String,
    /// Empty for a domain.
    pub pool: String,
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovedKind {
    Domain,
    Overlay,
    Seed,
}

/// One instance as it is.
#[derive(Debug, Clone)]
pub struct Instance {
    pub entry: String,
    pub id: InstanceId,
    pub uid: String,
    pub installation_id: String,
    pub spec_hash: String,
    pub phase: Phase,
    /// What the mark says of the base; empty for a domain of the predecessor.
    pub image: InstanceImage,
    /// Why the last attempt to create it failed, while this daemon remembers.
    pub last_error: Option<ProviderError>,
    /// None where the mark holds no readable time.
    pub created_at: Option<jiff::Timestamp>,
    pub state: State,
    pub state_reason: StateReason,
    /// For a person; bounded.
    pub state_message: String,
    pub addresses: Vec<Address>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstanceImage {
    pub key: String,
    pub digest: String,
    pub base_volume: String,
}

#[derive(Debug, Clone)]
pub struct ListRequest {
    pub entry: String,
    /// Empty: every installation's.
    pub installation_id: String,
    /// 0: the default of 500; at most 1000.
    pub page_size: u32,
    pub page_token: String,
    pub completeness: Completeness,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// A host that cannot be listed fails the call.
    Required,
    /// It is named in the answer.
    BestEffort,
}

#[derive(Debug, Clone, Default)]
pub struct ListPage {
    /// State and addresses are not read by a listing.
    pub instances: Vec<ListedInstance>,
    /// Domains that carry our mark but cannot be read.
    pub unreadable: Vec<UnreadableInstance>,
    pub orphan_volumes: Vec<OrphanVolume>,
    /// One error per host that could not be listed; its `host()` is set.
    pub unreachable: Vec<ProviderError>,
    pub next_page_token: String,
}

#[derive(Debug, Clone)]
pub struct ListedInstance {
    pub id: InstanceId,
    /// The entry it was made for; empty for one of the predecessor.
    pub entry: String,
    pub uid: String,
    pub installation_id: String,
    pub spec_hash: String,
    pub created_at: Option<jiff::Timestamp>,
    pub phase: Phase,
    pub image: InstanceImage,
}

#[derive(Debug, Clone)]
pub struct UnreadableInstance {
    pub host: String,
    pub name: String,
    pub error: ProviderError,
}

/// A volume with a name of ours that no domain uses.
#[derive(Debug, Clone)]
pub struct OrphanVolume {
    pub host: String,
    pub pool: String,
    pub name: String,
    pub kind: OrphanKind,
    pub capacity_bytes: u64,
    pub allocation_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrphanKind {
    Overlay,
    Seed,
    IncompleteBase,
}

/// One host's row of a Check; always an answer, never an error of the call.
#[derive(Debug, Clone)]
pub struct HostCheck {
    pub host: String,
    pub address: String,
    /// Without the time it takes to close the connection.
    pub latency: Duration,
    /// None: the host can run VMs of this entry.
    pub problem: Option<ProviderError>,
    /// One sentence a person can act on; empty if there is nothing to do.
    pub remediation: String,
    pub details: HostDetails,
}

/// What was learnt before the check ended, for good or ill.
#[derive(Debug, Clone, Default)]
pub struct HostDetails {
    pub user: String,
    pub hostname: String,
    pub libvirt_version: String,
    pub hypervisor_version: String,
    pub pool: String,
    pub pool_state: String,
    pub pool_capacity_bytes: u64,
    pub pool_available_bytes: u64,
    pub pool_reserve_bytes: u64,
    pub emulator: String,
    pub cpus: u32,
    pub memory_mib: u64,
    pub warnings: Vec<String>,
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
    /// Domains that have had an address while they ran.
    addressed: Mutex<HashSet<uuid::Uuid>>,
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

/// Names and domains remembered at most; beyond that none is added.
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
            addressed: Mutex::default(),
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
