//! Requests and answers of the operations.

use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretSlice;

pub use crate::domain::addresses::Address;
use crate::domain::state;
pub use crate::domain::state::{State, StateReason};
use crate::domain::{InstanceId, Mark, Phase};
use crate::error::ProviderError;

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

impl Instance {
    /// What the mark and a state say together; addresses are the caller's to add.
    pub(super) fn of(entry: &str, id: InstanceId, mark: Mark, state: State, state_reason: StateReason) -> Self {
        Self {
            entry: entry.to_owned(),
            id,
            uid: mark.uid,
            installation_id: mark.installation_id,
            spec_hash: mark.spec_hash,
            phase: mark.phase,
            image: InstanceImage { key: mark.image_key, digest: mark.base_digest, base_volume: mark.base },
            last_error: None,
            created_at: mark.created_at,
            state,
            state_reason,
            state_message: state::describe(state, state_reason).to_owned(),
            addresses: Vec::new(),
        }
    }
}
