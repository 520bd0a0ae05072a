//! What to do next for a Proxy. Pure: from what is known to one step.
//!
//! A reconciliation asks for a step, takes it, and asks again with what it has seen, until the step is to rest. Every
//! step can be the last before the operator is killed: what is needed to go on is in the status before a call is made.
//!
//! ```text
//!            ┌────────── Delete ◀── other spec hash, STOPPED, timeout with Replace, SPEC_CONFLICT
//!            ▼                                              ▲
//! AddFinalizer ─▶ Intend ─▶ Create ─▶ Get ─▶ Rest ──────────┤
//!                   ▲         ▲        │                    │
//!                   │         └────────┤ CREATE_INCOMPLETE  │
//!                   └── not there ─────┘                    │
//! deleted: Delete ─▶ RemoveFinalizer ◀──────────────────────┘
//! ```
//! PAUSED and UNKNOWN lead nowhere: only STOPPED, an absent instance and a changed spec do.

#[cfg(test)]
mod tests;

use std::time::Duration;

use egress_provider_proto::v1::{ErrorReason, Instance, InstanceState, StateReason};
use jiff::Timestamp;

use crate::crd::proxy::OnTimeout;
use crate::crd::{ProxySpec, ProxyStatus};
use crate::provider_client::{ProviderError, Verdict};

/// Until a VM must have its address, where the spec does not say.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(900);

/// What is known of a Proxy before anybody was asked.
#[derive(Debug, Clone)]
pub struct View<'a> {
    /// What is wanted.
    pub spec: &'a ProxySpec,
    /// What was written last.
    pub status: &'a ProxyStatus,
    /// Generation of the spec.
    pub generation: i64,
    /// Whether the Proxy is being deleted.
    pub deleting: bool,
    /// Whether our finalizer is on it.
    pub finalizer: bool,
    /// Whether a person asked to let go of what cannot be deleted.
    pub force_delete: bool,
    /// Whether the provider of the spec is configured.
    pub provider_known: bool,
    /// The digest of what is wanted; an error if the user-data cannot be had: what is missing, for people.
    pub hash: Result<String, String>,
    /// Now.
    pub now: Timestamp,
}

/// What a provider has said in this reconciliation.
#[derive(Debug, Clone)]
pub enum Seen {
    /// Nobody was asked.
    Nothing,
    /// The instance as it is, from a Get or a Create.
    Instance(Box<Instance>),
    /// The provider has no such instance.
    Absent,
    /// A Create failed.
    CreateFailed(ProviderError),
    /// A Get failed.
    GetFailed(ProviderError),
    /// A Delete failed.
    DeleteFailed(ProviderError),
    /// A Delete ended: nothing of ours is there.
    Gone,
    /// A Delete was let go of: what may be left, for people.
    Abandoned(String),
}

/// Why an instance is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The Proxy is.
    ProxyDeleted,
    /// Placement or user-data changed.
    SpecChanged,
    /// It has stopped.
    Stopped,
    /// It had no address in time, and the Proxy says Replace.
    Timeout,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing is made for this Proxy.
    External,
    /// Before anything is asked of a provider.
    AddFinalizer,
    /// Write what is going to be asked for.
    Intend {
        /// Its digest.
        hash: String,
        /// Whether an instance was there before and has vanished.
        vanished: bool,
    },
    /// Ask for the instance.
    Create,
    /// Ask how it is.
    Get,
    /// Ask to remove it.
    Delete(Why),
    /// Let the Proxy go; what may be left of it, for people.
    RemoveFinalizer {
        /// None: nothing is left.
        left_behind: Option<String>,
    },
    /// Show what was seen, and wait.
    Rest(Rest),
}

/// Why there is nothing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rest {
    /// What was seen says it all.
    Seen,
    /// The provider refused this spec for good.
    Refused,
    /// The provider is not configured.
    ProviderUnknown,
    /// The user-data cannot be had: what is missing.
    UserDataMissing(String),
    /// The instance has no address and its time is up.
    Overdue,
    /// Deleted and nothing of ours on it.
    Done,
}

/// The next step.
#[must_use]
pub fn plan(view: &View<'_>, seen: &Seen) -> Step {
    if view.deleting {
        return plan_deletion(view, seen);
    }
    if view.spec.external.is_some() {
        return if view.finalizer { Step::RemoveFinalizer { left_behind: None } } else { Step::External };
    }
    if !view.finalizer {
        return Step::AddFinalizer;
    }
    if !view.provider_known {
        return Step::Rest(Rest::ProviderUnknown);
    }
    match seen {
        Seen::CreateFailed(e) if e.is(ErrorReason::SpecConflict) => return Step::Delete(Why::SpecChanged),
        Seen::CreateFailed(_) | Seen::GetFailed(_) | Seen::DeleteFailed(_) => return Step::Rest(Rest::Seen),
        Seen::Nothing | Seen::Instance(_) | Seen::Absent | Seen::Gone | Seen::Abandoned(_) => {}
    }
    let intended = view.status.spec_hash.as_deref();
    match (&view.hash, intended) {
        // what runs goes on running when its Secret has gone
        (Err(_), Some(_)) if view.status.instance_id.is_some() => {}
        (Err(missing), _) => return Step::Rest(Rest::UserDataMissing(missing.clone())),
        (Ok(hash), None) => return Step::Intend { hash: hash.clone(), vanished: false },
        (Ok(hash), Some(intended)) if hash != intended => return Step::Delete(Why::SpecChanged),
        (Ok(_), Some(_)) => {}
    }
    if view.status.refused_generation == Some(view.generation) {
        return Step::Rest(Rest::Refused);
    }
    match seen {
        Seen::Instance(instance) => plan_seen(view, instance),
        Seen::Absent => match &view.hash {
            Ok(hash) => Step::Intend { hash: hash.clone(), vanished: true },
            Err(missing) => Step::Rest(Rest::UserDataMissing(missing.clone())),
        },
        _ if view.status.instance_id.is_none() => Step::Create,
        _ => Step::Get,
    }
}

fn plan_seen(view: &View<'_>, instance: &Instance) -> Step {
    match instance.state() {
        InstanceState::Stopped => Step::Delete(Why::Stopped),
        InstanceState::Provisioning if instance.state_reason() == StateReason::CreateIncomplete => Step::Create,
        InstanceState::Provisioning if is_overdue(view) => match on_timeout(view.spec) {
            OnTimeout::Replace => Step::Delete(Why::Timeout),
            OnTimeout::Report => Step::Rest(Rest::Overdue),
        },
        InstanceState::Provisioning
        | InstanceState::Running
        | InstanceState::Paused
        | InstanceState::Deleting
        | InstanceState::Unknown
        | InstanceState::Unspecified => Step::Rest(Rest::Seen),
    }
}

fn plan_deletion(view: &View<'_>, seen: &Seen) -> Step {
    if !view.finalizer {
        return Step::Rest(Rest::Done);
    }
    // nothing was ever asked of a provider: the intent is written first
    if view.status.instance_name.is_none() {
        return Step::RemoveFinalizer { left_behind: None };
    }
    if !view.provider_known {
        return if view.force_delete {
            Step::RemoveFinalizer {
                left_behind: Some(format!(
                    "the instance at provider {:?}, which is not configured",
                    view.spec.provider.as_deref().unwrap_or_default()
                )),
            }
        } else {
            Step::Rest(Rest::ProviderUnknown)
        };
    }
    match seen {
        Seen::Gone => Step::RemoveFinalizer { left_behind: None },
        Seen::Abandoned(what) => Step::RemoveFinalizer { left_behind: Some(what.clone()) },
        Seen::DeleteFailed(e) if is_not_ours(e) => Step::RemoveFinalizer { left_behind: None },
        Seen::DeleteFailed(e) if view.force_delete => {
            Step::RemoveFinalizer { left_behind: Some(format!("the instance, which could not be deleted: {e}")) }
        }
        Seen::DeleteFailed(_) => Step::Rest(Rest::Seen),
        Seen::Nothing | Seen::Instance(_) | Seen::Absent | Seen::CreateFailed(_) | Seen::GetFailed(_) => Step::Delete(Why::ProxyDeleted),
    }
}

/// A Delete that met somebody else's: a name is unique on a host, so nothing of ours is there.
#[must_use]
pub fn is_not_ours(e: &ProviderError) -> bool {
    e.is(ErrorReason::UidMismatch) || e.is(ErrorReason::NotManaged)
}

/// Whether the time to get an address is up.
#[must_use]
pub fn is_overdue(view: &View<'_>) -> bool {
    due_in(view).is_some_and(|left| left.is_zero())
}

/// How long until the provisioning deadline; None while nothing is awaited.
#[must_use]
pub fn due_in(view: &View<'_>) -> Option<Duration> {
    let since = view.status.provisioning_since.as_ref()?.0;
    let deadline =
        view.spec.provisioning.as_ref().and_then(|p| p.deadline_seconds).map_or(DEFAULT_DEADLINE, |s| Duration::from_secs(s.into()));
    let waited = Duration::try_from(view.now.duration_since(since)).unwrap_or_default();
    Some(deadline.saturating_sub(waited))
}

fn on_timeout(spec: &ProxySpec) -> OnTimeout {
    spec.provisioning.as_ref().map(|p| p.on_timeout).unwrap_or_default()
}

/// Whether an error latches the Proxy: nothing is tried until its spec changes.
#[must_use]
pub fn latches(e: &ProviderError) -> bool {
    e.verdict() == Verdict::Latch && !e.is(ErrorReason::SpecConflict)
}
