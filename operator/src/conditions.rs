//! Conditions: pure functions from what is there to what has to be there.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::crd::{Condition, ConditionStatus};

/// Types of conditions of a Proxy.
pub const PROVISIONED: &str = "Provisioned";
/// See [`PROVISIONED`].
pub const HEALTHY: &str = "Healthy";
/// See [`PROVISIONED`].
pub const READY: &str = "Ready";

/// What a condition is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it holds.
    pub status: ConditionStatus,
    /// CamelCase word.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Tries without success; None where nothing fails.
    pub attempts: Option<u32>,
}

impl Verdict {
    /// A verdict in which nothing is tried.
    #[must_use]
    pub fn new(status: ConditionStatus, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { status, reason: reason.into(), message: message.into(), attempts: None }
    }
}

/// The condition of a type, if there is one.
#[must_use]
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == type_)
}

/// Whether a condition is there and holds.
#[must_use]
pub fn holds(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|c| c.status == ConditionStatus::True)
}

/// Puts a verdict among the conditions. Times move only with what they are the time of: a verdict that repeats the last
/// one leaves everything as it is, so that no status is written for nothing.
pub fn set(conditions: &mut Vec<Condition>, type_: &str, verdict: Verdict, generation: Option<i64>, now: Timestamp) {
    let Verdict { status, reason, message, attempts } = verdict;
    let old = conditions.iter().position(|c| c.type_ == type_);
    let (since, last_transition_time) = match old.map(|n| &conditions[n]) {
        Some(old) => (
            if old.reason == reason && old.status == status { old.since.clone() } else { Some(Time(now)) },
            if old.status == status { old.last_transition_time.clone() } else { Time(now) },
        ),
        None => (Some(Time(now)), Time(now)),
    };
    let new = Condition {
        type_: type_.to_owned(),
        status,
        reason,
        message,
        observed_generation: generation,
        attempts,
        since,
        last_transition_time,
    };
    match old {
        Some(n) => conditions[n] = new,
        None => conditions.push(new),
    }
}

/// `POOL_SPACE` as a condition says it: `PoolSpace`. Anything that no reason can be made of is `ProviderError`.
#[must_use]
pub fn camel(reason: &str) -> String {
    let words = reason.split('_').filter(|w| !w.is_empty());
    let name: String = words
        .flat_map(|word| {
            let mut letters = word.chars();
            let first = letters.next().map(|c| c.to_ascii_uppercase());
            first.into_iter().chain(letters.map(|c| c.to_ascii_lowercase()))
        })
        .collect();
    let fits = name.len() <= 63 && name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(|c| c.is_ascii_alphanumeric());
    if fits { name } else { "ProviderError".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn a_verdict_that_repeats_changes_nothing_and_times_move_with_what_they_are_of() {
        let mut conditions = Vec::new();
        let wait = Verdict::new(ConditionStatus::False, "PoolSpace", "full");
        set(&mut conditions, PROVISIONED, wait.clone(), Some(1), at(1));
        let first = conditions.clone();
        set(&mut conditions, PROVISIONED, wait, Some(1), at(2));
        assert_eq!(conditions, first);
        set(&mut conditions, PROVISIONED, Verdict::new(ConditionStatus::False, "HostUnreachable", ""), Some(1), at(3));
        assert_eq!((conditions[0].since.clone(), conditions[0].last_transition_time.clone()), (Some(Time(at(3))), Time(at(1))));
        set(&mut conditions, PROVISIONED, Verdict::new(ConditionStatus::True, "Created", ""), Some(1), at(4));
        assert_eq!((conditions[0].since.clone(), conditions[0].last_transition_time.clone()), (Some(Time(at(4))), Time(at(4))));
        assert!(holds(&conditions, PROVISIONED) && !holds(&conditions, READY));
    }

    #[test]
    fn a_reason_is_one_word_of_letters() {
        assert_eq!(camel("POOL_SPACE"), "PoolSpace");
        assert_eq!(camel("LIBVIRT_BUSY"), "LibvirtBusy");
        for odd in ["", "___", "1ST", "PÖÖL", &"A".repeat(64)] {
            assert_eq!(camel(odd), "ProviderError", "{odd}");
        }
    }
}
