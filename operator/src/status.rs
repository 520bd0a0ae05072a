//! What the status of a Proxy says after a reconciliation, and when to look again. Pure.
//!
//! A condition is written only when it says something else than before; see [`conditions::set`].

#[cfg(test)]
mod tests;

use std::time::Duration;

use egress_provider_proto::v1::{AddressSource, ErrorReason, Instance, InstanceState};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::backoff::{next_try, spread};
use crate::conditions::{self, HEALTHY, PROVISIONED, READY, Verdict};
use crate::crd::proxy::{Address, Phase};
use crate::crd::{ConditionStatus, ProxyStatus};
use crate::plan::{self, Rest, Seen, View, Why};
use crate::provider_client::ProviderError;

/// A VM that runs is looked at this often: what happens to it meanwhile is seen by the probes.
const RUNNING: Duration = Duration::from_secs(60);
/// A VM that is on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(5);
/// A VM that a person has to do something about, or that nobody understands.
const ODD: Duration = Duration::from_secs(30);
/// Where only a change of the spec or of the configuration helps; both are noticed at once or with a restart.
const SETTLED: Duration = Duration::from_secs(600);

/// What the probes of a Proxy say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// None until the first verdict.
    pub healthy: Option<bool>,
    /// CamelCase word, such as `ConnectOk` or `ConnectionRefused`.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Failed probes in a row.
    pub failures: u32,
}

/// What is known beside the view when a status is made.
#[derive(Debug, Clone)]
pub struct Around<'a> {
    /// What the probes say; None where nothing is probed.
    pub health: Option<&'a Health>,
    /// Another Proxy that reports the same address, as namespace/name.
    pub shared_with: Option<&'a str>,
    /// In 0..1; see [`next_try`].
    pub jitter: f64,
}

/// A status and when to look again.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What to write, if it differs from what is there.
    pub status: ProxyStatus,
    /// When to look again, jitter included.
    pub again: Duration,
}

/// The status before an instance is asked for the first time, or anew.
#[must_use]
pub fn intended(view: &View<'_>, name: &str, hash: &str, vanished: bool) -> ProxyStatus {
    let mut status = view.status.clone();
    status.observed_generation = Some(view.generation);
    status.instance_name = Some(name.to_owned());
    status.zone = view.spec.placement.as_ref().map(|p| p.zone.clone());
    status.spec_hash = Some(hash.to_owned());
    status.instance_id = None;
    status.refused_generation = None;
    status.provisioning_since = Some(Time(view.now));
    status.phase = Some(Phase::Provisioning);
    without_address(&mut status);
    let (reason, message) = if vanished {
        ("InstanceVanished", "the provider has no such VM any more: another is made")
    } else {
        ("Creating", "the VM is asked for")
    };
    set(&mut status, view, PROVISIONED, Verdict::new(ConditionStatus::False, reason, message));
    ready(&mut status, view);
    status
}

/// The status while an instance is deleted so that another can take its place, or for good.
#[must_use]
pub fn deleting(view: &View<'_>, why: Why) -> ProxyStatus {
    let mut status = view.status.clone();
    let (phase, reason, message) = match why {
        Why::ProxyDeleted => (Phase::Deleting, "Deleting", "the VM is being removed"),
        Why::SpecChanged => (Phase::Replacing, "SpecChanged", "placement, image or user-data changed: the VM is replaced"),
        Why::Stopped => (Phase::Replacing, "Stopped", "the VM has stopped: it is replaced"),
        Why::Timeout => (Phase::Replacing, "ProvisioningTimeout", "the VM got no address in time: it is replaced"),
    };
    status.phase = Some(phase);
    // a Delete that is tried again keeps what the last one failed with
    let failing = conditions::find(&status.conditions, PROVISIONED).is_some_and(|c| c.attempts.is_some());
    if view.status.phase != Some(phase) || !failing {
        set(&mut status, view, PROVISIONED, Verdict::new(ConditionStatus::False, reason, message));
    }
    ready(&mut status, view);
    status
}

/// The status after an instance is gone that is going to be replaced.
#[must_use]
pub fn gone(view: &View<'_>) -> ProxyStatus {
    let mut status = view.status.clone();
    status.instance_id = None;
    status.spec_hash = None;
    status.refused_generation = None;
    status.provisioning_since = None;
    without_address(&mut status);
    status
}

/// The status of a Proxy that nobody makes.
#[must_use]
pub fn external(view: &View<'_>, around: &Around<'_>) -> Outcome {
    let mut status = view.status.clone();
    status.observed_generation = Some(view.generation);
    status.phase = Some(Phase::External);
    let address = view.spec.external.as_ref().map(|e| e.address.clone()).unwrap_or_default();
    status.addresses = vec![Address { ip: address.clone(), source: "Spec".to_owned() }];
    status.address = Some(address);
    set(&mut status, view, PROVISIONED, Verdict::new(ConditionStatus::True, "External", "given by the spec"));
    health(&mut status, view, around);
    ready(&mut status, view);
    Outcome { status, again: spread(SETTLED, around.jitter) }
}

/// The status after the last step of a reconciliation.
#[must_use]
pub fn rest(view: &View<'_>, rest: &Rest, seen: &Seen, around: &Around<'_>) -> Outcome {
    let mut status = view.status.clone();
    status.observed_generation = Some(view.generation);
    let again = match (rest, seen) {
        (Rest::Seen | Rest::Overdue, Seen::Instance(instance)) => instance_seen(&mut status, view, instance, *rest == Rest::Overdue),
        (_, Seen::CreateFailed(e)) => failed(&mut status, view, "Create", e, around.jitter),
        (_, Seen::GetFailed(e)) => get_failed(&mut status, view, e, around.jitter),
        (_, Seen::DeleteFailed(e)) => failed(&mut status, view, "Delete", e, around.jitter),
        (Rest::Refused, _) => SETTLED,
        (Rest::ProviderUnknown, _) => {
            let name = view.spec.provider.as_deref().unwrap_or_default();
            let message = format!("provider {name:?} is not configured: add it to the operator's providers file, or delete this Proxy");
            let status_of_it = if status.instance_id.is_some() { ConditionStatus::Unknown } else { ConditionStatus::False };
            set(&mut status, view, PROVISIONED, Verdict::new(status_of_it, "ProviderNotConfigured", message));
            ODD
        }
        (Rest::UserDataMissing(what), _) => {
            set(&mut status, view, PROVISIONED, Verdict::new(ConditionStatus::False, "CloudInitMissing", what.clone()));
            status.phase = Some(if status.instance_name.is_some() { Phase::Provisioning } else { Phase::Pending });
            ODD
        }
        (Rest::Done | Rest::Seen | Rest::Overdue, _) => SETTLED,
    };
    // without a call there is no failure to keep
    health(&mut status, view, around);
    ready(&mut status, view);
    let again = match plan::due_in(view).filter(|due| !due.is_zero()) {
        Some(due) => again.min(due + Duration::from_secs(1)),
        None => again,
    };
    Outcome {
        status,
        again: if matches!(seen, Seen::CreateFailed(_) | Seen::GetFailed(_) | Seen::DeleteFailed(_)) {
            again
        } else {
            spread(again, around.jitter)
        },
    }
}

fn instance_seen(status: &mut ProxyStatus, view: &View<'_>, instance: &Instance, overdue: bool) -> Duration {
    if !instance.instance_id.is_empty() {
        status.instance_id = Some(instance.instance_id.clone());
    }
    let state = instance.state();
    let words = instance.state_reason().as_str_name().trim_start_matches("STATE_REASON_");
    let reason = match words {
        "UNSPECIFIED" => conditions::camel(state.as_str_name().trim_start_matches("INSTANCE_STATE_")),
        words => conditions::camel(words),
    };
    let said = if instance.state_message.is_empty() {
        String::new()
    } else {
        format!(": {}", crate::provider_client::error::clean(&instance.state_message, 512))
    };
    let verdict = |status: &mut ProxyStatus, of: ConditionStatus, reason: &str, message: String| {
        set(status, view, PROVISIONED, Verdict::new(of, reason, message));
    };
    match state {
        InstanceState::Running => {
            status.phase = Some(Phase::Running);
            status.provisioning_since = None;
            take_addresses(status, instance);
            verdict(status, ConditionStatus::True, "Running", String::new());
            RUNNING
        }
        InstanceState::Provisioning => {
            status.phase = Some(Phase::Provisioning);
            if status.provisioning_since.is_none() {
                status.provisioning_since = Some(Time(view.now));
            }
            without_address(status);
            if overdue {
                let message = format!(
                    "the VM has no address although its time is up ({reason}{said}): look at its console, at DHCP on its bridge and at its guest agent"
                );
                verdict(status, ConditionStatus::False, "ProvisioningTimeout", message);
            } else {
                verdict(status, ConditionStatus::False, &reason, format!("the VM is on its way{said}"));
            }
            ON_ITS_WAY
        }
        InstanceState::Paused => {
            status.phase = Some(Phase::Paused);
            verdict(
                status,
                ConditionStatus::False,
                &reason,
                format!("the VM is paused{said}: it is left alone; mend the cause and resume it on its host"),
            );
            ODD
        }
        InstanceState::Stopped => {
            verdict(status, ConditionStatus::False, &reason, format!("the VM has stopped{said}"));
            ON_ITS_WAY
        }
        InstanceState::Deleting => {
            verdict(status, ConditionStatus::False, "DeletingAtProvider", "the provider is removing the VM".to_owned());
            ON_ITS_WAY
        }
        InstanceState::Unknown | InstanceState::Unspecified => {
            verdict(
                status,
                ConditionStatus::Unknown,
                "StateUnknown",
                format!("the provider does not know the state of the VM{said}; nothing is done about it"),
            );
            ODD
        }
    }
}

/// A Create or a Delete that failed. Whatever the class, it is shown; only what the table latches is latched.
fn failed(status: &mut ProxyStatus, view: &View<'_>, what: &str, e: &ProviderError, jitter: f64) -> Duration {
    let attempts = attempts(view, e);
    let mut verdict = Verdict::new(ConditionStatus::False, conditions::camel(&e.reason), format!("{what}: {}", e.message));
    verdict.attempts = Some(attempts);
    set(status, view, PROVISIONED, verdict);
    if what == "Create" && plan::latches(e) {
        status.phase = Some(Phase::Failed);
        status.refused_generation = Some(view.generation);
        return SETTLED;
    }
    // a Delete is never given up
    next_try(e, attempts, jitter).unwrap_or(SETTLED)
}

/// A Get that failed says nothing about the VM: its address is kept, and marked.
fn get_failed(status: &mut ProxyStatus, view: &View<'_>, e: &ProviderError, jitter: f64) -> Duration {
    let attempts = attempts(view, e);
    let known = status.address.is_some();
    if known {
        status.address_stale = Some(true);
    }
    let of = match conditions::find(&view.status.conditions, PROVISIONED).map(|c| c.status) {
        _ if !known => ConditionStatus::False,
        // it runs: only its address could not be read
        Some(ConditionStatus::True) if e.is(ErrorReason::AddressUnreadable) => ConditionStatus::True,
        _ => ConditionStatus::Unknown,
    };
    let mut verdict = Verdict::new(of, conditions::camel(&e.reason), format!("Get: {}", e.message));
    verdict.attempts = Some(attempts);
    set(status, view, PROVISIONED, verdict);
    next_try(e, attempts, jitter).unwrap_or(SETTLED)
}

/// How often in a row this error has come.
fn attempts(view: &View<'_>, e: &ProviderError) -> u32 {
    let before = conditions::find(&view.status.conditions, PROVISIONED).filter(|c| c.reason == conditions::camel(&e.reason));
    before.and_then(|c| c.attempts).unwrap_or(0).saturating_add(1)
}

fn take_addresses(status: &mut ProxyStatus, instance: &Instance) {
    let mut addresses: Vec<_> = instance.addresses.iter().filter(|a| a.ip.parse::<std::net::IpAddr>().is_ok()).take(32).collect();
    addresses.sort_by_key(|a| !a.primary);
    status.address = addresses.first().map(|a| a.ip.clone());
    status.addresses = addresses.iter().map(|a| Address { ip: a.ip.clone(), source: source(a.source()).to_owned() }).collect();
    status.address_stale = None;
}

fn source(source: AddressSource) -> &'static str {
    match source {
        AddressSource::GuestAgent => "GuestAgent",
        AddressSource::DhcpLease => "DhcpLease",
        AddressSource::Arp => "Arp",
        AddressSource::Unspecified => "Unknown",
    }
}

fn without_address(status: &mut ProxyStatus) {
    status.address = None;
    status.addresses.clear();
    status.address_stale = None;
}

fn health(status: &mut ProxyStatus, view: &View<'_>, around: &Around<'_>) {
    let verdict = match (&status.address, around.shared_with, around.health) {
        (None, _, _) => Verdict::new(ConditionStatus::Unknown, "NoAddress", "there is no address to probe"),
        (Some(address), Some(other), _) => Verdict::new(
            ConditionStatus::False,
            "AddressConflict",
            format!("{address} is the address of {other} as well: neither is offered; most often clones ask DHCP under one identity"),
        ),
        (Some(_), None, None | Some(Health { healthy: None, .. })) => match last_verdict(status, view) {
            // an operator that has just started knows less than the one before: it takes no proxy out of service for that
            Some(last) => last,
            None => Verdict::new(ConditionStatus::Unknown, "NotProbed", "no probe has decided yet"),
        },
        (Some(_), None, Some(health)) => Verdict {
            status: if health.healthy == Some(true) { ConditionStatus::True } else { ConditionStatus::False },
            reason: health.reason.clone(),
            message: health.message.clone(),
            attempts: None,
        },
    };
    set(status, view, HEALTHY, verdict);
}

/// What the probes last said of this very address and port.
fn last_verdict(status: &ProxyStatus, view: &View<'_>) -> Option<Verdict> {
    let last = conditions::find(&view.status.conditions, HEALTHY)?;
    let is_of_this = status.address == view.status.address && last.observed_generation == Some(view.generation);
    let is_of_a_probe = last.status != ConditionStatus::Unknown && last.reason != "AddressConflict";
    (is_of_this && is_of_a_probe).then(|| Verdict {
        status: last.status,
        reason: last.reason.clone(),
        message: last.message.clone(),
        attempts: None,
    })
}

/// Ready: there is an address and the probes pass. That a host cannot be asked takes no working proxy out of service.
fn ready(status: &mut ProxyStatus, view: &View<'_>) {
    let provisioned = conditions::find(&status.conditions, PROVISIONED).cloned();
    let healthy = conditions::find(&status.conditions, HEALTHY).cloned();
    let blocks = provisioned.as_ref().is_none_or(|c| c.status == ConditionStatus::False);
    let verdict = match (blocks, provisioned, healthy) {
        (true, Some(p), _) => Verdict { status: ConditionStatus::False, reason: p.reason, message: p.message, attempts: None },
        (false, _, Some(h)) if h.status == ConditionStatus::True && status.address.is_some() => {
            Verdict::new(ConditionStatus::True, "Ready", "")
        }
        (false, _, Some(h)) => Verdict { status: ConditionStatus::False, reason: h.reason, message: h.message, attempts: None },
        (_, _, None) | (true, None, _) => Verdict::new(ConditionStatus::False, "Pending", ""),
    };
    set(status, view, READY, verdict);
}

fn set(status: &mut ProxyStatus, view: &View<'_>, type_: &str, verdict: Verdict) {
    conditions::set(&mut status.conditions, type_, verdict, Some(view.generation), view.now);
}
