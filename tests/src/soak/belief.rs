//! What a caller may believe about one of its names: everything that may be there, by all that it was told.
//!
//! ```text
//! answer ──→ Seen ──→ is any of what may be there so?  no: a violation
//!                     yes: only that may be there from now on, and what work under way may make of it
//! ```
//!
//! Work is what a call began and nobody saw the end of: a job of a daemon after its caller has left, or a request that
//! lies in a frozen pipe and is served when that thaws. It may do its effect at any time until it is known to be over.

use std::collections::BTreeSet;

use super::plan::{Uid, Vm};

/// One possible truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum There {
    Nothing,
    /// Volumes without a domain: somebody has undefined it by hand.
    Volumes,
    /// Half made, or half removed.
    Partial(Vm),
    Complete(Vm),
}

impl There {
    fn vm(self) -> Option<Vm> {
        match self {
            Self::Partial(vm) | Self::Complete(vm) => Some(vm),
            Self::Nothing | Self::Volumes => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Create(Vm),
    Delete(Uid),
}

/// Work that may not be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unfinished {
    work: Work,
    /// The daemon that may be at it; None when only its requests may be on their way.
    daemon: Option<usize>,
    /// Milliseconds since the start, when it was last known to go on.
    since: u64,
}

/// What was observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    NoDomain,
    /// A domain, whosever.
    Domain,
    Owner(Uid),
    /// Somebody else than this owner.
    NotOf(Uid),
    /// The VM of the owner, made from something else.
    OtherSpec(Vm),
    Volumes,
}

impl Seen {
    fn fits(self, there: There) -> bool {
        match self {
            Self::NoDomain => there.vm().is_none(),
            Self::Domain => there.vm().is_some(),
            Self::Owner(uid) => there.vm().is_some_and(|vm| vm.uid == uid),
            Self::NotOf(uid) => there.vm().is_some_and(|vm| vm.uid != uid),
            Self::OtherSpec(than) => there.vm().is_some_and(|vm| vm.uid == than.uid && vm.spec != than.spec),
            Self::Volumes => there == There::Volumes,
        }
    }
}

/// How a Create succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    Created,
    Joined,
    Existing,
}

/// After a request was answered as failed, its requests to the host may still be on their way until the host has been
/// whole for so long, in milliseconds.
const SETTLED_AFTER: u64 = 6_000;

#[derive(Debug, Clone)]
pub struct Belief {
    may_be: BTreeSet<There>,
    unfinished: Vec<Unfinished>,
    /// Undefined by hand while it ran: the domain is gone when it stops.
    transient: bool,
    /// Suspended by hand and not resumed; a maybe once anything else may have happened.
    pub suspended: bool,
    /// A hand may have suspended it: its command did not come back.
    pub perhaps_suspended: bool,
}

impl Default for Belief {
    fn default() -> Self {
        Self { may_be: [There::Nothing].into(), unfinished: Vec::new(), transient: false, suspended: false, perhaps_suspended: false }
    }
}

impl Belief {
    /// What may be there at this moment.
    pub fn may_be(&self) -> &BTreeSet<There> {
        &self.may_be
    }

    pub fn is_certain(&self) -> bool {
        self.unfinished.is_empty()
    }

    pub fn may_be_being_deleted(&self) -> bool {
        self.unfinished.iter().any(|u| matches!(u.work, Work::Delete(_)))
    }

    pub fn may_have_volumes_only(&self) -> bool {
        self.may_be.contains(&There::Volumes)
    }

    /// Forgets requests that cannot be on their way any more; the host has been whole since `whole_since`.
    pub fn settle(&mut self, now: u64, whole_since: Option<u64>) {
        let Some(whole_since) = whole_since else { return };
        self.unfinished.retain(|u| u.daemon.is_some() || now < u.since.max(whole_since) + SETTLED_AFTER);
    }

    /// A daemon was ended: its jobs are over, their requests perhaps not.
    pub fn daemon_ended(&mut self, daemon: usize, now: u64) {
        for work in self.unfinished.iter_mut().filter(|u| u.daemon == Some(daemon)) {
            (work.daemon, work.since) = (None, now);
        }
    }

    /// A call is made; until it is answered anything between its start and its end may be there.
    pub fn begin(&mut self, work: Work, daemon: usize, now: u64) {
        self.unfinished.push(Unfinished { work, daemon: Some(daemon), since: now });
        self.spread();
    }

    /// The daemon has said how its last such work ended; the requests of one that failed may be on their way.
    pub fn over(&mut self, work: Work, daemon: usize, now: u64, failed: bool) {
        let Some(at) = self.unfinished.iter().rposition(|u| u.work == work && u.daemon == Some(daemon)) else { return };
        if failed {
            (self.unfinished[at].daemon, self.unfinished[at].since) = (None, now);
        } else {
            self.unfinished.remove(at);
        }
    }

    /// An answer for which the daemon had to have the name to itself: whatever it was at before is over.
    pub fn daemon_is_through(&mut self, daemon: usize) {
        self.unfinished.retain(|u| u.daemon != Some(daemon));
    }

    /// Something was observed.
    pub fn saw(&mut self, seen: Seen) -> Result<(), String> {
        let fits: BTreeSet<_> = self.may_be.iter().copied().filter(|there| seen.fits(*there)).collect();
        if fits.is_empty() {
            return Err(format!("{seen:?}, where only {:?} may be; under way: {:?}", self.may_be, self.unfinished));
        }
        self.may_be = fits;
        self.forget_the_gone();
        self.spread();
        Ok(())
    }

    /// Whether a Create may have succeeded so, by what may have been there and what was under way beside it.
    pub fn may_make(&self, vm: Vm, made: Made) -> Result<(), String> {
        let fits = self.may_be.iter().any(|there| match made {
            Made::Created => matches!(there, There::Nothing) || *there == There::Partial(vm),
            Made::Joined => true,
            Made::Existing => there.vm() == Some(vm),
        });
        if fits { Ok(()) } else { Err(format!("{made:?} {vm:?}, where only {:?} may be; under way: {:?}", self.may_be, self.unfinished)) }
    }

    /// Nothing else went on beside it, and now this is there.
    pub fn is(&mut self, there: There) {
        self.may_be = [there].into();
        self.forget_the_gone();
        self.spread();
    }

    /// What was done to a VM by hand ends with it.
    fn forget_the_gone(&mut self) {
        if self.may_be.iter().all(|there| there.vm().is_none()) {
            (self.transient, self.suspended, self.perhaps_suspended) = (false, false, false);
        }
    }

    /// A hand may have undefined what did not run: its volumes are left, of which a half made or half removed one may have
    /// had none.
    pub fn may_have_lost_its_domain(&mut self) {
        if self.may_be.iter().any(|there| matches!(there, There::Partial(_))) {
            self.may_be.insert(There::Nothing);
        }
        self.may_be.insert(There::Volumes);
        self.spread();
    }

    pub fn undefined_by_hand(&mut self) {
        self.transient = true;
        self.spread();
    }

    /// Everything that work under way can make of what may be there.
    fn spread(&mut self) {
        let creates = self.unfinished.iter().filter_map(|u| if let Work::Create(vm) = u.work { Some((vm, u.daemon)) } else { None });
        let creates: Vec<_> = creates.collect();
        let deletes: Vec<_> =
            self.unfinished.iter().filter_map(|u| if let Work::Delete(uid) = u.work { Some((uid, u.daemon)) } else { None }).collect();
        // volumes made after the domain is gone: by requests on their way, or by another daemon
        let crossed = |d: Option<usize>| creates.iter().any(|(_, c)| c.is_none() || d.is_none() || *c != d);
        loop {
            let before = self.may_be.len();
            for there in self.may_be.clone() {
                for (vm, _) in &creates {
                    match there {
                        There::Nothing => self.may_be.extend([There::Partial(*vm), There::Complete(*vm)]),
                        // what a Delete has begun, a Create ends first; what cannot be completed is taken back
                        There::Partial(is) if is == *vm => self.may_be.extend([There::Nothing, There::Complete(*vm)]),
                        _ => {}
                    }
                }
                for (uid, daemon) in &deletes {
                    match there {
                        There::Complete(vm) if vm.uid == *uid => self.may_be.extend([There::Partial(vm), There::Nothing]),
                        There::Partial(vm) if vm.uid == *uid => drop(self.may_be.insert(There::Nothing)),
                        There::Volumes => drop(self.may_be.insert(There::Nothing)),
                        _ => {}
                    }
                    if (self.transient && there.vm().is_some()) || crossed(*daemon) {
                        self.may_be.insert(There::Volumes);
                    }
                }
            }
            if self.may_be.len() == before {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::plan::Spec;

    const VM: Vm = Vm { uid: Uid::A, spec: Spec::One };
    const OTHER: Vm = Vm { uid: Uid::B, spec: Spec::One };

    fn complete() -> Belief {
        let mut belief = Belief::default();
        belief.is(There::Complete(VM));
        belief
    }

    #[test]
    fn a_vm_that_is_seen_to_be_gone_is_suspended_no_more() {
        let mut belief = complete();
        belief.suspended = true;
        belief.begin(Work::Delete(Uid::A), 0, 0);
        assert!(belief.suspended, "it may be there");
        belief.saw(Seen::NoDomain).expect("deleted");
        assert!(!belief.suspended, "the next of its name is another");
    }

    #[test]
    fn what_was_made_must_be_found_and_what_was_deleted_must_not_come_back() {
        let mut belief = complete();
        belief.saw(Seen::Owner(Uid::A)).expect("it is there");
        belief.clone().saw(Seen::NoDomain).expect_err("lost");
        belief.clone().saw(Seen::Owner(Uid::B)).expect_err("of another");
        belief.is(There::Nothing);
        belief.saw(Seen::Owner(Uid::A)).expect_err("risen");
    }

    #[test]
    fn what_a_hand_takes_the_domain_of_leaves_its_volumes_if_it_had_them() {
        let mut belief = complete();
        belief.may_have_lost_its_domain();
        belief.saw(Seen::NoDomain).expect("undefined");
        belief.may_make(VM, Made::Created).expect_err("its volumes are in the way");
        belief.is(There::Partial(VM));
        belief.may_have_lost_its_domain();
        belief.saw(Seen::NoDomain).expect("undefined");
        belief.may_make(VM, Made::Created).expect("a Delete had taken its volumes");
    }

    #[test]
    fn a_complete_vm_is_not_made_twice() {
        let belief = complete();
        belief.may_make(VM, Made::Existing).expect("it exists");
        belief.may_make(VM, Made::Created).expect_err("twice");
        belief.may_make(OTHER, Made::Existing).expect_err("of another");
    }

    #[test]
    fn a_call_without_an_end_allows_both_until_something_is_seen_and_the_host_was_whole_for_a_while() {
        let mut belief = Belief::default();
        belief.begin(Work::Create(VM), 0, 0);
        belief.over(Work::Create(VM), 0, 100, true);
        belief.clone().saw(Seen::Owner(Uid::A)).expect("it may be there");
        belief.saw(Seen::NoDomain).expect("it may not");
        belief.saw(Seen::Owner(Uid::A)).expect("its request may have been on its way");
        belief.saw(Seen::NoDomain).expect("a partial one is taken back");
        belief.settle(50_000, None);
        assert!(!belief.is_certain(), "the host is broken");
        belief.settle(50_000, Some(44_001));
        assert!(!belief.is_certain(), "it is whole for too short a time");
        belief.settle(50_001, Some(44_001));
        assert!(belief.is_certain());
        belief.saw(Seen::NoDomain).expect("it may not");
        belief.saw(Seen::Owner(Uid::A)).expect_err("nothing is on its way any more");
    }

    #[test]
    fn a_job_goes_on_until_its_daemon_says_so_or_ends() {
        let mut belief = complete();
        belief.begin(Work::Delete(Uid::A), 1, 0);
        belief.settle(1_000_000, Some(0));
        assert!(!belief.is_certain());
        let mut through = belief.clone();
        through.daemon_is_through(0);
        assert!(!through.is_certain(), "that is another daemon");
        through.daemon_is_through(1);
        assert!(through.is_certain());
        belief.daemon_ended(1, 1_000_000);
        belief.settle(1_000_001, Some(0));
        assert!(!belief.is_certain());
        belief.settle(1_006_000, Some(0));
        assert!(belief.is_certain());
    }

    #[test]
    fn a_delete_touches_only_its_owners() {
        let mut belief = complete();
        belief.begin(Work::Delete(Uid::B), 0, 0);
        belief.saw(Seen::NoDomain).expect_err("not its own");
    }

    #[test]
    fn volumes_are_left_only_by_a_hand_or_by_daemons_that_cross() {
        let mut belief = complete();
        belief.begin(Work::Delete(Uid::A), 0, 0);
        assert!(!belief.may_have_volumes_only());
        let mut by_hand = belief.clone();
        by_hand.undefined_by_hand();
        assert!(by_hand.may_have_volumes_only());
        let mut same = belief.clone();
        same.begin(Work::Create(VM), 0, 0);
        assert!(!same.may_have_volumes_only());
        belief.begin(Work::Create(VM), 1, 0);
        assert!(belief.may_have_volumes_only());
    }
}
