//! From the answer of a Check to the status of a `ProviderHealth`. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_provider_proto::v1::{CheckResponse, GetProviderInfoResponse, HostCheck, HostDetails};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::conditions::{self, READY, Verdict};
use crate::crd::provider_health::HostHealth;
use crate::crd::{ConditionStatus, ProviderHealthStatus};
use crate::provider_client::ProviderError;
use crate::provider_client::error::clean;

/// The most hosts that are shown: an object has a size limit.
const MOST_HOSTS: usize = 256;
/// Space is shown in steps of this, so that a growing file does not write a status every minute.
const SPACE_STEP: u64 = 1 << 30;

/// The status after a Check.
#[must_use]
pub fn status(
    old: &ProviderHealthStatus,
    info: Option<&GetProviderInfoResponse>,
    answer: &Result<CheckResponse, ProviderError>,
    now: Timestamp,
) -> ProviderHealthStatus {
    let mut new = old.clone();
    if let Some(info) = info {
        new.provider_type = clean(&info.provider_type, 63);
        new.provider_version = clean(&info.provider_version, 63);
    }
    let verdict = match answer {
        Ok(answer) => {
            new.hosts = answer.hosts.iter().take(MOST_HOSTS).map(|check| row(check, &old.hosts, now)).collect();
            new.total_hosts = u32::try_from(answer.hosts.len()).unwrap_or(u32::MAX);
            new.healthy_hosts = u32::try_from(answer.hosts.iter().filter(|h| h.healthy).count()).unwrap_or(u32::MAX);
            match answer.hosts.iter().find(|h| !h.healthy) {
                None => Verdict::new(ConditionStatus::True, "AllHealthy", ""),
                Some(bad) => Verdict::new(
                    ConditionStatus::False,
                    reason(bad),
                    format!("{}: {} {}", bad.host, clean(&bad.message, 400), clean(&bad.remediation, 400)),
                ),
            }
        }
        Err(e) => {
            new.healthy_hosts = 0;
            let attempts = conditions::find(&old.conditions, READY).and_then(|c| c.attempts).unwrap_or(0);
            let mut verdict = Verdict::new(ConditionStatus::Unknown, conditions::camel(&e.reason), format!("Check: {}", e.message));
            // a count that grows for ever would be a write in every round
            verdict.attempts = Some(attempts.saturating_add(1).min(10));
            verdict
        }
    };
    new.ready = format!("{}/{}", new.healthy_hosts, new.total_hosts);
    conditions::set(&mut new.conditions, READY, verdict, None, now);
    new.last_check_time = Some(Time(now));
    new
}

/// The new status if it says something else, or if the old one is so old that it could be taken for dead.
#[must_use]
pub fn worth_writing(old: &ProviderHealthStatus, new: ProviderHealthStatus, refresh: Duration) -> Option<ProviderHealthStatus> {
    let said = |status: &ProviderHealthStatus| {
        let mut said = status.clone();
        said.last_check_time = None;
        for host in &mut said.hosts {
            host.latency_ms = 0;
        }
        said
    };
    let age = match (&old.last_check_time, &new.last_check_time) {
        // one of the future was written by a clock that went ahead: it would look fresh for as long
        (Some(old), Some(new)) => Duration::try_from(new.0.duration_since(old.0)).unwrap_or(Duration::MAX),
        _ => Duration::MAX,
    };
    (said(old) != said(&new) || age >= refresh).then_some(new)
}

fn reason(check: &HostCheck) -> String {
    conditions::camel(check.reason().as_str_name().trim_start_matches("CHECK_REASON_"))
}

fn row(check: &HostCheck, old: &[HostHealth], now: Timestamp) -> HostHealth {
    let reason = reason(check);
    let since = old.iter().find(|o| o.host == check.host && o.reason == reason).and_then(|o| o.since.clone());
    let latency = check.latency.and_then(|d| Duration::try_from(d).ok()).unwrap_or_default();
    HostHealth {
        host: clean(&check.host, 63),
        address: clean(&check.address, 255),
        healthy: check.healthy,
        reason,
        latency_ms: u64::try_from(latency.as_millis()).unwrap_or(u64::MAX).next_multiple_of(10),
        message: clean(&check.message, 1024),
        remediation: clean(&check.remediation, 1024),
        details: check.details.as_ref().map(details).unwrap_or_default(),
        warnings: check.details.as_ref().map(|d| d.warnings.iter().take(20).map(|w| clean(w, 512)).collect()).unwrap_or_default(),
        since: since.or(Some(Time(now))),
    }
}

fn details(of: &HostDetails) -> BTreeMap<String, String> {
    let gib = |bytes: u64| format!("{} GiB", bytes / SPACE_STEP);
    let text = |value: &String| (!value.is_empty()).then(|| clean(value, 255));
    let number = |value: u64| (value > 0).then(|| value.to_string());
    [
        ("user", text(&of.user)),
        ("hostname", text(&of.hostname)),
        ("libvirt", text(&of.libvirt_version)),
        ("hypervisor", text(&of.hypervisor_version)),
        ("emulator", text(&of.emulator)),
        ("pool", text(&of.pool)),
        ("poolState", text(&of.pool_state)),
        ("poolCapacity", (of.pool_capacity_bytes > 0).then(|| gib(of.pool_capacity_bytes))),
        ("poolAvailable", of.pool_available_bytes.map(gib)),
        ("cpus", number(of.cpu_count.into())),
        ("memoryMiB", number(of.memory_mib)),
    ]
    .into_iter()
    .filter_map(|(name, value)| value.map(|value| (name.to_owned(), value)))
    .collect()
}

#[cfg(test)]
mod tests {
    use egress_provider_proto::v1::CheckReason;
    use tonic::Code;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn check(host: &str, reason: CheckReason, millis: u64) -> HostCheck {
        HostCheck {
            host: host.to_owned(),
            healthy: reason == CheckReason::Reachable,
            reason: reason.into(),
            message: if reason == CheckReason::Reachable { String::new() } else { "the pool is not active".to_owned() },
            remediation: if reason == CheckReason::Reachable { String::new() } else { "start it".to_owned() },
            latency: prost_types::Duration::try_from(Duration::from_millis(millis)).ok(),
            details: Some(HostDetails { pool_available_bytes: Some(3 << 30), ..HostDetails::default() }),
            ..HostCheck::default()
        }
    }

    const REFRESH: Duration = Duration::from_secs(300);

    #[test]
    fn n_of_m_and_the_first_broken_host_are_shown() {
        let answer = Ok(CheckResponse { hosts: vec![check("a", CheckReason::Reachable, 12), check("b", CheckReason::PoolNotActive, 30)] });
        let status = status(&ProviderHealthStatus::default(), None, &answer, at(0));
        assert_eq!((status.ready.as_str(), status.hosts[1].reason.as_str(), status.hosts[0].latency_ms), ("1/2", "PoolNotActive", 20));
        let ready = conditions::find(&status.conditions, READY).expect("a condition");
        assert_eq!((ready.status, ready.reason.as_str()), (ConditionStatus::False, "PoolNotActive"));
        assert!(ready.message.contains("b: the pool is not active start it"), "{}", ready.message);
        assert_eq!(status.hosts[0].details["poolAvailable"], "3 GiB");
    }

    #[test]
    fn what_says_the_same_is_written_only_to_show_that_somebody_looks() {
        let answer = |millis| Ok(CheckResponse { hosts: vec![check("a", CheckReason::Reachable, millis)] });
        let first = status(&ProviderHealthStatus::default(), None, &answer(12), at(0));
        assert!(worth_writing(&ProviderHealthStatus::default(), first.clone(), REFRESH).is_some());
        let other_latency = status(&first, None, &answer(99), at(30));
        assert_eq!(worth_writing(&first, other_latency, REFRESH), None);
        let of_the_future = ProviderHealthStatus { last_check_time: Some(Time(at(99_999))), ..first.clone() };
        assert!(worth_writing(&of_the_future, status(&first, None, &answer(12), at(30)), REFRESH).is_some());
        let later = status(&first, None, &answer(12), at(300));
        assert!(worth_writing(&first, later, REFRESH).is_some());
        let broken = status(&first, None, &Ok(CheckResponse { hosts: vec![check("a", CheckReason::Timeout, 1)] }), at(30));
        assert!(worth_writing(&first, broken, REFRESH).is_some());
    }

    #[test]
    fn a_provider_that_cannot_be_asked_keeps_its_rows_and_says_so() {
        let good = status(
            &ProviderHealthStatus::default(),
            None,
            &Ok(CheckResponse { hosts: vec![check("a", CheckReason::Reachable, 1)] }),
            at(0),
        );
        let down = Err(ProviderError::local(Code::Unavailable, "PROVIDER_UNAVAILABLE", "no socket"));
        let mut status_now = good.clone();
        for second in 1..=20 {
            status_now = status(&status_now, None, &down, at(second));
        }
        let ready = conditions::find(&status_now.conditions, READY).expect("a condition");
        assert_eq!((ready.status, ready.reason.as_str(), ready.attempts), (ConditionStatus::Unknown, "ProviderUnavailable", Some(10)));
        assert_eq!((status_now.ready.as_str(), status_now.hosts.len()), ("0/1", 1));
    }

    #[test]
    fn since_moves_with_the_reason() {
        let answer = |reason| Ok(CheckResponse { hosts: vec![check("a", reason, 1)] });
        let first = status(&ProviderHealthStatus::default(), None, &answer(CheckReason::Timeout), at(5));
        let second = status(&first, None, &answer(CheckReason::Timeout), at(6));
        assert_eq!(second.hosts[0].since, Some(Time(at(5))));
        let third = status(&second, None, &answer(CheckReason::Reachable), at(7));
        assert_eq!(third.hosts[0].since, Some(Time(at(7))));
    }
}
