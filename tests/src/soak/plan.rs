//! What each actor of a soak does, step by step, as a pure function of the seed.

use serde::{Deserialize, Serialize};

use super::dice::Dice;

/// Callers; each has names of its own, so that it knows what must be there.
pub const CALLERS: usize = 4;
/// Names of each caller.
pub const NAMES: usize = 3;
/// Daemons of one entry. The first is never restarted: what leaks shows there.
pub const DAEMONS: usize = 2;
pub const HOSTS: [&str; 2] = ["hv1", "hv2"];
/// Images that the soak serves itself, and breaks.
pub const IMAGES: [&str; 3] = ["i0", "i1", "i2"];
/// Images that the lab serves; they never fail.
const SOUND_IMAGES: [&str; 2] = ["tiny", "tiny-raw"];

/// Who acts. Actors go on side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actor {
    Caller(usize),
    /// Breaks a host and mends it.
    Host(usize),
    /// Breaks the image server and mends it.
    Images,
    /// Ends and starts daemons and changes their configuration.
    Daemons,
}

impl Actor {
    pub fn all() -> impl Iterator<Item = Self> {
        let callers = (0..CALLERS).map(Self::Caller);
        callers.chain((0..HOSTS.len()).map(Self::Host)).chain([Self::Images, Self::Daemons])
    }

    fn stream(self) -> u64 {
        match self {
            Self::Caller(n) => 100 + n as u64,
            Self::Host(n) => 200 + n as u64,
            Self::Images => 300,
            Self::Daemons => 400,
        }
    }
}

/// One step, and how long the actor rests before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub rest_ms: u64,
    pub act: Act,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Act {
    Call(Call),
    /// Breaks, holds, mends.
    BreakHost {
        fault: HostFault,
        hold_ms: u64,
    },
    BreakImage {
        image: usize,
        fault: ImageFault,
        hold_ms: u64,
    },
    BreakDaemon {
        daemon: usize,
        fault: DaemonFault,
        hold_ms: u64,
    },
}

impl Act {
    /// What the summary counts it as.
    pub fn kind(&self) -> String {
        let said = match self {
            Self::Call(call) => format!("{call:?}"),
            Self::BreakHost { fault, .. } => format!("{fault:?}"),
            Self::BreakImage { fault, .. } => format!("image {fault:?}"),
            Self::BreakDaemon { fault, .. } => format!("daemon {fault:?}"),
        };
        said.split(" {").next().unwrap_or_default().to_owned()
    }
}

/// Two owners of each name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Uid {
    A,
    B,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spec {
    One,
    Two,
}

/// Whose, and made from what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Vm {
    pub uid: Uid,
    pub spec: Spec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Selector {
    Id,
    Key,
}

/// How long a caller waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Patience {
    UntilDone,
    /// `max_wait` zero.
    NotAtAll,
    /// A deadline of the RPC.
    DeadlineMs(u64),
    /// The caller goes away.
    GoneAfterMs(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    Create {
        name: usize,
        vm: Vm,
        image: String,
        daemon: usize,
        patience: Patience,
    },
    /// The same key twice at once.
    CreateTwice {
        name: usize,
        vm: Vm,
        image: String,
        daemons: [usize; 2],
    },
    /// A Create, and a Delete of its key a moment later.
    DeleteDuringCreate {
        name: usize,
        vm: Vm,
        image: String,
        after_ms: u64,
        daemons: [usize; 2],
    },
    Delete {
        name: usize,
        uid: Uid,
        by: Selector,
        daemon: usize,
        patience: Patience,
    },
    Get {
        name: usize,
        uid: Uid,
        by: Selector,
        daemon: usize,
    },
    List {
        complete: bool,
        daemon: usize,
    },
    Check {
        daemon: usize,
    },
    /// An administrator on the host.
    ByHand {
        name: usize,
        hand: Hand,
    },
    /// Create, Get and Delete of a name that a foreign domain has.
    Foreign {
        host: usize,
        daemon: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hand {
    Suspend,
    Resume,
    /// Pulls the plug.
    Destroy,
    /// Takes the configuration; what runs goes on running.
    Undefine,
    /// Destroy and undefine: volumes stay.
    Vanish,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostFault {
    PathStalled,
    PathReset,
    PathRefused,
    PathSlow,
    SessionsFrozen,
    SessionsKilled,
    SshdFrozen,
    /// `MaxSessions 2`, `MaxStartups 2`.
    SshdNarrow,
    LibvirtdFrozen,
    LibvirtdRestarted,
    LibvirtdKilled,
    /// `max_clients 5`.
    LibvirtdNarrow,
    PoolFull,
    PoolInactive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFault {
    Truncated,
    Reset,
    Silent,
    Chunked,
    WrongLength,
    RangesRefused,
    Html,
    NotFound,
    Busy,
    Unavailable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonFault {
    /// kill -9, down for a while, started.
    Killed,
    /// SIGTERM, down for a while, started.
    Stopped,
    /// A providers file with other images of the same names, for every daemon: each base is cold again.
    Reloaded,
    /// A providers file that cannot be used.
    Misconfigured,
}

/// The steps of one actor, without end.
#[derive(Debug, Clone)]
pub struct Plan {
    actor: Actor,
    dice: Dice,
}

impl Plan {
    pub fn of(seed: u64, actor: Actor) -> Self {
        Self { actor, dice: Dice::new(seed, actor.stream()) }
    }
}

impl Iterator for Plan {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let dice = &mut self.dice;
        Some(match self.actor {
            Actor::Caller(_) => Step { rest_ms: dice.between(0, 700), act: Act::Call(call(dice)) },
            // calm between two faults: what is definite then is told
            Actor::Host(_) => {
                let (fault, longest) = host_fault(dice);
                Step { rest_ms: dice.between(5_000, 16_000), act: Act::BreakHost { fault, hold_ms: dice.between(500, longest) } }
            }
            Actor::Images => Step { rest_ms: dice.between(500, 6_000), act: image_fault(dice) },
            Actor::Daemons => Step { rest_ms: dice.between(2_000, 12_000), act: daemon_fault(dice) },
        })
    }
}

fn call(dice: &mut Dice) -> Call {
    #[derive(Clone, Copy)]
    enum Kind {
        Create,
        Twice,
        During,
        Delete,
        Get,
        List,
        Check,
        Hand,
        Foreign,
    }
    let kind = dice.weighted(&[
        (26, Kind::Create),
        (6, Kind::Twice),
        (6, Kind::During),
        (18, Kind::Delete),
        (18, Kind::Get),
        (8, Kind::List),
        (3, Kind::Check),
        (8, Kind::Hand),
        (2, Kind::Foreign),
    ]);
    let name = dice.index(NAMES);
    let daemon = dice.index(DAEMONS);
    match kind {
        Kind::Create => Call::Create { name, vm: vm(dice), image: image(dice), daemon, patience: patience(dice) },
        Kind::Twice => {
            let other = if dice.percent(50) { daemon } else { 1 - daemon };
            Call::CreateTwice { name, vm: vm(dice), image: image(dice), daemons: [daemon, other] }
        }
        Kind::During => {
            let other = if dice.percent(70) { daemon } else { 1 - daemon };
            Call::DeleteDuringCreate { name, vm: vm(dice), image: image(dice), after_ms: dice.between(0, 1_500), daemons: [daemon, other] }
        }
        Kind::Delete => {
            Call::Delete { name, uid: if dice.percent(70) { Uid::A } else { Uid::B }, by: selector(dice), daemon, patience: patience(dice) }
        }
        Kind::Get => Call::Get { name, uid: uid(dice), by: selector(dice), daemon },
        Kind::List => Call::List { complete: dice.percent(40), daemon },
        Kind::Check => Call::Check { daemon },
        Kind::Hand => {
            let hand = dice.weighted(&[(3, Hand::Suspend), (3, Hand::Resume), (4, Hand::Destroy), (2, Hand::Undefine), (2, Hand::Vanish)]);
            Call::ByHand { name, hand }
        }
        Kind::Foreign => Call::Foreign { host: dice.index(HOSTS.len()), daemon },
    }
}

fn vm(dice: &mut Dice) -> Vm {
    Vm { uid: uid(dice), spec: if dice.percent(90) { Spec::One } else { Spec::Two } }
}

fn uid(dice: &mut Dice) -> Uid {
    if dice.percent(93) { Uid::A } else { Uid::B }
}

fn selector(dice: &mut Dice) -> Selector {
    if dice.percent(55) { Selector::Id } else { Selector::Key }
}

fn image(dice: &mut Dice) -> String {
    let all = [&SOUND_IMAGES[..], &IMAGES[..]].concat();
    all[dice.index(all.len())].to_owned()
}

fn patience(dice: &mut Dice) -> Patience {
    match dice.index(10) {
        0 => Patience::NotAtAll,
        1 => Patience::DeadlineMs(dice.between(1, 3_000)),
        2 => Patience::GoneAfterMs(dice.between(0, 2_000)),
        _ => Patience::UntilDone,
    }
}

/// A fault, and the longest that it is held, in milliseconds: some outlast the silence that a link is allowed.
fn host_fault(dice: &mut Dice) -> (HostFault, u64) {
    dice.weighted(&[
        (4, (HostFault::PathStalled, 25_000)),
        (4, (HostFault::PathReset, 3_000)),
        (3, (HostFault::PathRefused, 8_000)),
        (3, (HostFault::PathSlow, 12_000)),
        (3, (HostFault::SessionsFrozen, 25_000)),
        (3, (HostFault::SessionsKilled, 1_000)),
        (2, (HostFault::SshdFrozen, 15_000)),
        (2, (HostFault::SshdNarrow, 10_000)),
        (3, (HostFault::LibvirtdFrozen, 20_000)),
        (3, (HostFault::LibvirtdRestarted, 1_000)),
        (3, (HostFault::LibvirtdKilled, 4_000)),
        (2, (HostFault::LibvirtdNarrow, 10_000)),
        (3, (HostFault::PoolFull, 10_000)),
        (3, (HostFault::PoolInactive, 8_000)),
    ])
}

fn image_fault(dice: &mut Dice) -> Act {
    let fault = dice.weighted(&[
        (3, ImageFault::Truncated),
        (3, ImageFault::Reset),
        (2, ImageFault::Silent),
        (2, ImageFault::Chunked),
        (2, ImageFault::WrongLength),
        (2, ImageFault::RangesRefused),
        (2, ImageFault::Html),
        (2, ImageFault::NotFound),
        (2, ImageFault::Busy),
        (2, ImageFault::Unavailable),
    ]);
    Act::BreakImage { image: dice.index(IMAGES.len()), fault, hold_ms: dice.between(1_000, 12_000) }
}

fn daemon_fault(dice: &mut Dice) -> Act {
    let fault =
        dice.weighted(&[(4, DaemonFault::Killed), (3, DaemonFault::Stopped), (6, DaemonFault::Reloaded), (2, DaemonFault::Misconfigured)]);
    let daemon = match fault {
        DaemonFault::Killed | DaemonFault::Stopped => DAEMONS - 1,
        DaemonFault::Reloaded | DaemonFault::Misconfigured => dice.index(DAEMONS),
    };
    Act::BreakDaemon { daemon, fault, hold_ms: dice.between(0, 3_000) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn steps(seed: u64, actor: Actor) -> Vec<Step> {
        Plan::of(seed, actor).take(500).collect()
    }

    #[test]
    fn a_seed_is_a_plan_and_another_seed_or_actor_another() {
        for actor in Actor::all() {
            assert_eq!(steps(7, actor), steps(7, actor));
            assert_ne!(steps(7, actor), steps(8, actor));
        }
        assert_ne!(steps(7, Actor::Caller(0)), steps(7, Actor::Caller(1)));
    }

    #[test]
    fn every_kind_of_step_comes_up_and_survives_the_journal() {
        let mut kinds = BTreeSet::new();
        for step in Actor::all().flat_map(|actor| steps(3, actor)) {
            let line = serde_json::to_string(&step).expect("a step is plain values");
            assert_eq!(serde_json::from_str::<Step>(&line).expect("what was written"), step);
            kinds.insert(step.act.kind());
        }
        assert_eq!(kinds.len(), 9 + 14 + 10 + 4, "{kinds:?}");
    }

    #[test]
    fn only_the_last_daemon_is_ever_ended() {
        for step in steps(5, Actor::Daemons) {
            let Act::BreakDaemon { daemon, fault, .. } = step.act else { panic!("{step:?}") };
            assert!(daemon == DAEMONS - 1 || !matches!(fault, DaemonFault::Killed | DaemonFault::Stopped));
        }
    }
}
