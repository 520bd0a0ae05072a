//! Which instances are orphans, and which of them may go. Pure.
//!
//! An orphan is ours (installation, name made of its uid), and neither its uid, nor its name, nor its id belongs to any
//! Proxy. It may go when it was one in two sweeps in a row and is older than the minimum age by its own record and by
//! our clock since we first saw it. Everything that looks odd is a [`Doubt`], and then nothing goes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use egress_provider_proto::v1::Instance;
use jiff::Timestamp;

use crate::names::instance_name;

/// What is known of a Proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// Its UID.
    pub uid: String,
    /// From its status.
    pub instance_name: Option<String>,
    /// From its status.
    pub instance_id: Option<String>,
}

/// An instance that no Proxy wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// The provider's id.
    pub instance_id: String,
    /// The uid in its mark.
    pub uid: String,
    /// Whether this sweep is the first to see it.
    pub is_new: bool,
}

/// What a sweep found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sweep {
    /// All orphans.
    pub orphans: Vec<Orphan>,
    /// Those that may go.
    pub ripe: Vec<Orphan>,
}

/// Why nothing is done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// Somebody else acts.
    #[error("this operator is not the leader")]
    NotLeader,
    /// The operator has just started.
    #[error("the cache of Proxies is not filled yet")]
    NotSynced,
    /// No list of Proxies.
    #[error("the Proxies cannot be listed: {0}")]
    ApiServer(String),
    /// No complete list of instances.
    #[error("the instances cannot be listed completely: {0}")]
    Provider(String),
    /// Something made those instances: a wrong cluster, a lost CRD, a backup that is not restored yet.
    #[error("there is no Proxy at all, and {0} instances are of this installation")]
    NoProxies(usize),
    /// Most instances at once: rather a mistake than a clean-up.
    #[error("{orphans} of {all} instances would be orphans")]
    TooMany {
        /// Orphans.
        orphans: usize,
        /// Instances.
        all: usize,
    },
}

/// What earlier sweeps of a provider have seen.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// By id and uid: when it was first seen as an orphan, since the start of the operator.
    seen: BTreeMap<(String, String), Duration>,
}

impl Memory {
    /// What was seen before a doubt does not count.
    pub fn forget(&mut self) {
        self.seen.clear();
    }
}

/// Both clocks.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Of the wall, to compare with what is recorded at an instance.
    pub wall: Timestamp,
    /// Monotonic.
    pub since_start: Duration,
}

/// Fewer instances than this are never too many at once.
const A_FEW: usize = 5;

/// One sweep of a provider.
///
/// # Errors
/// Something is in doubt.
pub fn sweep(
    memory: &mut Memory,
    proxies: &[Known],
    instances: &[Instance],
    installation: &str,
    minimum_age: Duration,
    now: Now,
) -> Result<Sweep, Doubt> {
    let uids: BTreeSet<String> = proxies.iter().map(|p| p.uid.to_lowercase()).collect();
    let names: BTreeSet<&str> = proxies.iter().filter_map(|p| p.instance_name.as_deref()).collect();
    let ids: BTreeSet<&str> = proxies.iter().filter_map(|p| p.instance_id.as_deref()).collect();
    let ours = |i: &&Instance| {
        !installation.is_empty() && i.installation_id == installation && !i.uid.is_empty() && i.name == instance_name(&i.uid)
    };
    let wanted =
        |i: &&Instance| uids.contains(&i.uid.to_lowercase()) || names.contains(i.name.as_str()) || ids.contains(i.instance_id.as_str());
    let all: Vec<_> = instances.iter().filter(ours).collect();
    if proxies.is_empty() && !all.is_empty() {
        return Err(Doubt::NoProxies(all.len()));
    }
    let orphans: Vec<_> = all.iter().filter(|i| !wanted(i)).collect();
    if orphans.len() > A_FEW && orphans.len() * 2 > all.len() {
        return Err(Doubt::TooMany { orphans: orphans.len(), all: all.len() });
    }
    let mut seen = BTreeMap::new();
    let mut found = Sweep::default();
    for instance in orphans {
        let key = (instance.instance_id.clone(), instance.uid.clone());
        let before = memory.seen.get(&key).copied();
        let orphan = Orphan { instance_id: instance.instance_id.clone(), uid: instance.uid.clone(), is_new: before.is_none() };
        seen.insert(key, before.unwrap_or(now.since_start));
        if before.is_some_and(|first| now.since_start.saturating_sub(first) >= minimum_age) && is_old(instance, minimum_age, now.wall) {
            found.ripe.push(orphan.clone());
        }
        found.orphans.push(orphan);
    }
    memory.seen = seen;
    Ok(found)
}

/// By its own record. One without a record, or of the future, is not old.
fn is_old(instance: &Instance, minimum_age: Duration, now: Timestamp) -> bool {
    let Some(created) = instance.created_at.and_then(|t| Timestamp::new(t.seconds, t.nanos).ok()) else { return false };
    Duration::try_from(now.duration_since(created)).is_ok_and(|age| age >= minimum_age)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const UID: &str = "11111111-2222-3333-4444-555555555555";
    const AGE: Duration = Duration::from_secs(3600);

    fn instance(uid: &str) -> Instance {
        Instance {
            instance_id: format!("hosts/h/domains/px-{uid}"),
            name: instance_name(uid),
            uid: uid.to_owned(),
            installation_id: "cluster".to_owned(),
            created_at: Some(prost_types::Timestamp { seconds: 0, nanos: 0 }),
            ..Instance::default()
        }
    }

    fn proxy(uid: &str) -> Known {
        Known { uid: uid.to_owned(), ..Known::default() }
    }

    fn at(seconds: u64) -> Now {
        Now {
            wall: Timestamp::from_second(i64::try_from(seconds).expect("small")).expect("a time"),
            since_start: Duration::from_secs(seconds),
        }
    }

    /// Ids that may go after a first sweep at 10 000 s and a second at `second`.
    fn ripe(proxies: &[Known], instances: &[Instance], second: u64) -> usize {
        let mut memory = Memory::default();
        let first = sweep(&mut memory, proxies, instances, "cluster", AGE, at(10_000)).expect("no doubt");
        assert!(first.ripe.is_empty(), "nothing goes that was seen once");
        sweep(&mut memory, proxies, instances, "cluster", AGE, at(second)).expect("no doubt").ripe.len()
    }

    #[test]
    fn an_orphan_goes_in_a_second_sweep_when_it_is_old_by_both_clocks() {
        let other = [proxy("other")];
        assert_eq!(ripe(&other, &[instance(UID)], 13_600), 1);
        assert_eq!(ripe(&other, &[instance(UID)], 13_599), 0, "not seen long enough by our clock");
        let young = Instance { created_at: Some(prost_types::Timestamp { seconds: 12_000, nanos: 0 }), ..instance(UID) };
        assert_eq!(ripe(&other, &[young], 13_600), 0, "young by its own record");
        let future = Instance { created_at: Some(prost_types::Timestamp { seconds: 99_999, nanos: 0 }), ..instance(UID) };
        assert_eq!(ripe(&other, &[future], 13_600), 0, "of the future");
        let undated = Instance { created_at: None, ..instance(UID) };
        assert_eq!(ripe(&other, &[undated], 13_600), 0, "without a record");
    }

    #[rstest]
    #[case::of_a_proxy(Known { uid: UID.to_uppercase(), ..Known::default() }, instance(UID))]
    #[case::named_by_a_proxy(Known { uid: "x".into(), instance_name: Some(instance_name(UID)), instance_id: None }, instance(UID))]
    #[case::with_the_id_of_a_proxy(Known { uid: "x".into(), instance_name: None, instance_id: Some(format!("hosts/h/domains/px-{UID}")) }, instance(UID))]
    #[case::of_another_installation(proxy("x"), Instance { installation_id: "other".into(), ..instance(UID) })]
    #[case::of_no_installation(proxy("x"), Instance { installation_id: String::new(), ..instance(UID) })]
    #[case::made_by_hand(proxy("x"), Instance { name: "squid".into(), ..instance(UID) })]
    #[case::without_a_uid(proxy("x"), Instance { uid: String::new(), ..instance(UID) })]
    fn what_might_be_somebodys_stays(#[case] proxy: Known, #[case] instance: Instance) {
        assert_eq!(ripe(&[proxy], &[instance], 20_000), 0);
    }

    #[test]
    fn no_proxy_at_all_is_a_doubt_from_the_start_and_for_ever() {
        let mut memory = Memory::default();
        for second in [0, 10, 99_999] {
            assert_eq!(sweep(&mut memory, &[], &[instance(UID)], "cluster", AGE, at(second)), Err(Doubt::NoProxies(1)));
        }
        // an empty cluster with empty hosts is in order
        assert_eq!(sweep(&mut memory, &[], &[], "cluster", AGE, at(0)), Ok(Sweep::default()));
    }

    #[test]
    fn most_instances_at_once_are_a_doubt_and_a_few_are_not() {
        let many: Vec<_> = (0..10).map(|n| instance(&format!("u{n}"))).collect();
        let proxies = [proxy("u0"), proxy("u1")];
        let doubt = sweep(&mut Memory::default(), &proxies, &many, "cluster", AGE, at(0));
        assert_eq!(doubt, Err(Doubt::TooMany { orphans: 8, all: 10 }));
        assert!(sweep(&mut Memory::default(), &proxies, &many[..5], "cluster", AGE, at(0)).is_ok());
    }

    #[test]
    fn a_doubt_in_between_starts_the_count_anew() {
        let mut memory = Memory::default();
        let proxies = [proxy("x")];
        sweep(&mut memory, &proxies, &[instance(UID)], "cluster", AGE, at(10_000)).expect("no doubt");
        memory.forget();
        let again = sweep(&mut memory, &proxies, &[instance(UID)], "cluster", AGE, at(20_000)).expect("no doubt");
        assert!(again.ripe.is_empty() && again.orphans[0].is_new);
    }

    #[test]
    fn one_that_was_wanted_in_between_starts_anew() {
        let mut memory = Memory::default();
        let run = |memory: &mut Memory, known: Known, second| {
            sweep(memory, &[known], &[instance(UID)], "cluster", AGE, at(second)).expect("no doubt")
        };
        run(&mut memory, proxy("x"), 10_000);
        run(&mut memory, proxy(UID), 12_000);
        run(&mut memory, proxy("x"), 13_000);
        assert!(run(&mut memory, proxy("x"), 14_000).ripe.is_empty());
    }

    #[test]
    fn without_an_installation_of_ones_own_nothing_is_ours() {
        let mut memory = Memory::default();
        let nobody = Instance { installation_id: String::new(), ..instance(UID) };
        let found = sweep(&mut memory, &[proxy("x")], &[nobody], "", AGE, at(0)).expect("no doubt");
        assert!(found.orphans.is_empty());
    }
}
