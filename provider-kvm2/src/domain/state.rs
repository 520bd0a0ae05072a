//! libvirt's states mapped to the contract's.
//!
//! Only [`State::Stopped`] may lead a caller to replace a VM, so it is the answer
//! only where libvirt itself says that the guest no longer runs. A guest that has
//! been asked to shut down still runs; a paused one is never stopped; a number
//! that this build does not know is unknown.

/// Why an instance is in its state; the contract's enum is the one list.
pub use egress_provider_proto::v1::StateReason;

use super::Phase;

/// `virDomainState` and its reason, as numbers: an unknown one must not panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawState {
    pub state: i32,
    pub reason: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Provisioning,
    Running,
    Paused,
    Stopped,
    Deleting,
    Unknown,
}

/// `virDomainState`.
pub mod raw {
    pub const NO_STATE: i32 = 0;
    pub const RUNNING: i32 = 1;
    pub const BLOCKED: i32 = 2;
    pub const PAUSED: i32 = 3;
    pub const SHUTDOWN: i32 = 4;
    pub const SHUTOFF: i32 = 5;
    pub const CRASHED: i32 = 6;
    pub const PM_SUSPENDED: i32 = 7;
}

impl RawState {
    /// The guest may have a process: start would be refused, destroy would end something. A crashed
    /// guest that is kept for a dump has one, and of an unknown code nothing may be concluded.
    pub fn is_active(self) -> bool {
        self.state != raw::SHUTOFF
    }

    pub fn is_running(self) -> bool {
        matches!(self.state, raw::RUNNING | raw::BLOCKED)
    }
}

/// What libvirt and the mark say together. Whether a running guest has an address, and whether an
/// operation of this daemon works on it, the caller adds.
pub fn map(raw: RawState, phase: Phase) -> (State, StateReason) {
    let mapped = map_raw(raw);
    match (phase, mapped.0) {
        // a Delete that was cut off: what is left is no instance any more, and is never replaced
        (Phase::Deleting, _) => (State::Deleting, StateReason::Unspecified),
        // defined by a Create that did not come to starting it
        (Phase::Creating, State::Stopped) => (State::Provisioning, StateReason::CreateIncomplete),
        (Phase::Creating | Phase::Ready, _) => mapped,
    }
}

/// The state in a few words, for a person.
pub fn describe(state: State, reason: StateReason) -> &'static str {
    let why = match reason {
        StateReason::Creating => "the instance is being created",
        StateReason::CreateIncomplete => "its Create did not finish; call Create again or Delete",
        StateReason::ImagePull => "its image is being fetched",
        StateReason::Starting => "it is being started",
        StateReason::WaitingForAgent => "it runs; its guest agent does not answer yet",
        StateReason::NoIpv4Address => "it runs; its network card has no IPv4 address yet",
        StateReason::AddressUnreadable => "it runs; its addresses cannot be read now",
        StateReason::IoError => "paused by QEMU on a disk error; look for a full pool on its host, then virsh resume",
        StateReason::PausedByAdmin => "paused by someone on its host; virsh resume lets it go on",
        StateReason::Migrating => "it is being migrated",
        StateReason::Snapshotting => "a snapshot of it is being made",
        StateReason::Saving => "its memory is being saved",
        StateReason::GuestSuspended => "suspended by the guest itself",
        StateReason::Watchdog => "paused by its watchdog",
        StateReason::PausedOther => "paused for a reason that its host does not tell",
        StateReason::ShuttingDown => "it is shutting down",
        StateReason::GuestShutdown => "shut down from inside",
        StateReason::Destroyed => "stopped by someone on its host",
        StateReason::Crashed => "the guest or its QEMU crashed",
        StateReason::StartFailed => "its host could not start it",
        StateReason::Saved => "saved to disk by someone on its host",
        StateReason::MigratedAway => "migrated to another host",
        StateReason::StoppedOther => "stopped for a reason that its host does not tell",
        StateReason::DeleteRunning => "it is being deleted",
        StateReason::NoState => "its host does not know its state yet",
        StateReason::UnknownStateCode => "its host reports a state that this version does not know",
        StateReason::Unspecified => "",
    };
    match (why, state) {
        ("", State::Running) => "it runs",
        ("", State::Deleting) => "its Delete did not finish; call Delete again",
        (why, _) => why,
    }
}

fn map_raw(RawState { state, reason }: RawState) -> (State, StateReason) {
    match state {
        raw::NO_STATE => (State::Provisioning, StateReason::NoState),
        raw::RUNNING | raw::BLOCKED => (State::Running, StateReason::Unspecified),
        raw::PAUSED => paused(reason),
        raw::PM_SUSPENDED => (State::Paused, StateReason::GuestSuspended),
        // its process exists and may refuse to end; the next state is shutoff
        raw::SHUTDOWN => (State::Running, StateReason::ShuttingDown),
        raw::SHUTOFF => (State::Stopped, shutoff(reason)),
        raw::CRASHED => (State::Stopped, StateReason::Crashed),
        _ => (State::Unknown, StateReason::UnknownStateCode),
    }
}

/// `virDomainPausedReason`
fn paused(reason: i32) -> (State, StateReason) {
    let why = match reason {
        1 => StateReason::PausedByAdmin,
        // migration, post-copy, failed post-copy
        2 | 12 | 13 => StateReason::Migrating,
        // save, dump
        3 | 4 => StateReason::Saving,
        5 => StateReason::IoError,
        6 => StateReason::Watchdog,
        // restored from a snapshot, making one
        7 | 9 => StateReason::Snapshotting,
        8 => return (State::Running, StateReason::ShuttingDown),
        10 => StateReason::Crashed,
        // libvirt starts every guest paused and lets it go on when all is set up
        11 => return (State::Provisioning, StateReason::Starting),
        // 0 unknown, 14 API error
        _ => StateReason::PausedOther,
    };
    (State::Paused, why)
}

/// `virDomainShutoffReason`
fn shutoff(reason: i32) -> StateReason {
    match reason {
        1 => StateReason::GuestShutdown,
        2 => StateReason::Destroyed,
        3 => StateReason::Crashed,
        4 => StateReason::MigratedAway,
        5 => StateReason::Saved,
        6 => StateReason::StartFailed,
        // 0 unknown, 7 from a snapshot, 8 the host's libvirtd lost it
        _ => StateReason::StoppedOther,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn ready(state: i32, reason: i32) -> (State, StateReason) {
        map(RawState { state, reason }, Phase::Ready)
    }

    #[rstest]
    #[case::no_state(0, 0, State::Provisioning, StateReason::NoState)]
    #[case::running(1, 1, State::Running, StateReason::Unspecified)]
    #[case::blocked(2, 0, State::Running, StateReason::Unspecified)]
    #[case::suspended_by_virsh(3, 1, State::Paused, StateReason::PausedByAdmin)]
    #[case::migration(3, 2, State::Paused, StateReason::Migrating)]
    #[case::save(3, 3, State::Paused, StateReason::Saving)]
    #[case::dump(3, 4, State::Paused, StateReason::Saving)]
    #[case::pool_full(3, 5, State::Paused, StateReason::IoError)]
    #[case::watchdog(3, 6, State::Paused, StateReason::Watchdog)]
    #[case::from_snapshot(3, 7, State::Paused, StateReason::Snapshotting)]
    #[case::paused_on_its_way_down(3, 8, State::Running, StateReason::ShuttingDown)]
    #[case::snapshot(3, 9, State::Paused, StateReason::Snapshotting)]
    #[case::panic_kept(3, 10, State::Paused, StateReason::Crashed)]
    #[case::starting_up(3, 11, State::Provisioning, StateReason::Starting)]
    #[case::post_copy(3, 12, State::Paused, StateReason::Migrating)]
    #[case::post_copy_failed(3, 13, State::Paused, StateReason::Migrating)]
    #[case::api_error(3, 14, State::Paused, StateReason::PausedOther)]
    #[case::paused_for_an_unknown_reason(3, 99, State::Paused, StateReason::PausedOther)]
    #[case::asked_to_shut_down(4, 1, State::Running, StateReason::ShuttingDown)]
    #[case::guest_shut_down(5, 1, State::Stopped, StateReason::GuestShutdown)]
    #[case::destroyed(5, 2, State::Stopped, StateReason::Destroyed)]
    #[case::emulator_crashed(5, 3, State::Stopped, StateReason::Crashed)]
    #[case::migrated(5, 4, State::Stopped, StateReason::MigratedAway)]
    #[case::saved(5, 5, State::Stopped, StateReason::Saved)]
    #[case::start_failed(5, 6, State::Stopped, StateReason::StartFailed)]
    #[case::lost_by_the_daemon(5, 8, State::Stopped, StateReason::StoppedOther)]
    #[case::crashed(6, 1, State::Stopped, StateReason::Crashed)]
    #[case::asleep(7, 0, State::Paused, StateReason::GuestSuspended)]
    fn a_ready_instance_is_what_libvirt_says(#[case] raw: i32, #[case] reason: i32, #[case] state: State, #[case] why: StateReason) {
        assert_eq!(ready(raw, reason), (state, why));
    }

    #[test]
    fn a_shut_off_domain_that_is_being_created_is_not_stopped() {
        for reason in 0..=9 {
            let raw = RawState { state: raw::SHUTOFF, reason };
            assert_eq!(map(raw, Phase::Creating), (State::Provisioning, StateReason::CreateIncomplete));
        }
        assert_eq!(map(RawState { state: raw::PAUSED, reason: 5 }, Phase::Creating), (State::Paused, StateReason::IoError));
    }

    proptest! {
        #[test]
        fn an_unknown_code_is_never_stopped(state in prop_oneof![i32::MIN..0, 8..i32::MAX], reason: i32) {
            prop_assert_eq!(ready(state, reason), (State::Unknown, StateReason::UnknownStateCode));
            let raw = RawState { state, reason };
            prop_assert!(raw.is_active());
        }

        #[test]
        fn stopped_means_that_libvirt_said_shut_off_or_crashed(state in -2..20, reason in -2..20, phase in prop_oneof![Just(Phase::Ready), Just(Phase::Creating), Just(Phase::Deleting)]) {
            let (mapped, _) = map(RawState { state, reason }, phase);
            if mapped == State::Stopped {
                prop_assert!(phase == Phase::Ready && (state == raw::SHUTOFF || state == raw::CRASHED));
            }
            if phase == Phase::Deleting {
                prop_assert_eq!(mapped, State::Deleting);
            }
        }
    }
}
