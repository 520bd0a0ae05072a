//! Which errors are plausible in which weather. What a name's own history explains is not judged here but against the
//! caller's belief.

use std::collections::BTreeSet;

use egress_provider_proto::v1::ErrorReason as Reason;

use super::plan::{DaemonFault, HostFault, ImageFault, Patience};
use super::weather::Fault;

/// How long before a call a fault may have begun its work on it, in milliseconds: a link is given up after 15 s of
/// silence, and a Create that is joined may be older than its caller.
pub const AFTERMATH: u64 = 30_000;

/// How a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    Refused(Reason),
    /// The client itself gave up, or lost the daemon.
    NoAnswer,
    /// What no client of the contract can read.
    Unreadable,
}

/// A failed call and what it was.
#[derive(Debug, Clone)]
pub struct Failed {
    pub failure: Failure,
    /// The hosts that it had to do with.
    pub hosts: Vec<usize>,
    pub daemon: usize,
    pub patience: Patience,
    /// A Delete of the same name went on beside it.
    pub crossed: bool,
}

/// Whether the faults of the time explain the failure.
pub fn is_plausible(failed: &Failed, weather: &BTreeSet<Fault>) -> bool {
    let host = |fits: &dyn Fn(HostFault) -> bool| {
        weather.iter().any(|fault| match fault {
            Fault::Host(h, fault) => failed.hosts.contains(h) && fits(*fault),
            _ => false,
        })
    };
    let locked_up = weather.iter().any(|fault| matches!(fault, Fault::LockedUp(h) if failed.hosts.contains(h)));
    let image = |fits: &dyn Fn(ImageFault) -> bool| weather.iter().any(|fault| matches!(fault, Fault::Image(fault) if fits(*fault)));
    let daemon = |fits: &dyn Fn(DaemonFault) -> bool| {
        weather.iter().any(|fault| matches!(fault, Fault::Daemon(d, fault) if *d == failed.daemon && fits(*fault)))
    };
    let ended = daemon(&|f| matches!(f, DaemonFault::Killed | DaemonFault::Stopped));
    let impatient = failed.patience != Patience::UntilDone;
    let reason = match failed.failure {
        Failure::Unreadable => return false,
        Failure::NoAnswer => return impatient || ended,
        Failure::Refused(reason) => reason,
    };
    match reason {
        // others are at work on the same thing, in every weather
        Reason::OperationInProgress
        | Reason::StateChanged
        | Reason::CreateCancelled
        | Reason::LibvirtBusy
        | Reason::ImagePullInProgress
        | Reason::ImageInUse => true,
        Reason::CallTimeout => impatient || locked_up || host(&is_slow),
        Reason::HostUnreachable | Reason::LinkLost | Reason::SshThrottled => locked_up || host(&breaks_links),
        // another daemon may have ended a guest that was starting
        Reason::StartFailed => failed.crossed || locked_up || host(&ends_libvirtd),
        Reason::LibvirtRestarting | Reason::LibvirtError => locked_up || host(&|f| ends_libvirtd(f) || is_of_pool(f)),
        Reason::ListingIncomplete | Reason::AddressUnreadable => locked_up || host(&|f| breaks_links(f) || is_slow(f) || is_of_pool(f)),
        Reason::PoolNotActive => host(&|f| f == HostFault::PoolInactive || ends_libvirtd(f)),
        Reason::PoolSpace => host(&|f| f == HostFault::PoolFull),
        Reason::SocketMissing | Reason::SocketUnavailable => locked_up || host(&ends_libvirtd),
        Reason::ImageSourceUnavailable | Reason::ImageSourceBroken => image(&|f| f != ImageFault::Chunked),
        Reason::ImageNotFound => image(&|f| f == ImageFault::NotFound),
        Reason::ImageFormatMismatch | Reason::DigestMismatch => image(&|f| matches!(f, ImageFault::Html | ImageFault::WrongLength)),
        Reason::ShuttingDown => daemon(&|f| f == DaemonFault::Stopped),
        _ => false,
    }
}

fn is_slow(fault: HostFault) -> bool {
    !matches!(fault, HostFault::PoolFull | HostFault::PoolInactive)
}

fn breaks_links(fault: HostFault) -> bool {
    !is_of_pool(fault)
}

fn is_of_pool(fault: HostFault) -> bool {
    matches!(fault, HostFault::PoolFull | HostFault::PoolInactive)
}

fn ends_libvirtd(fault: HostFault) -> bool {
    matches!(fault, HostFault::LibvirtdKilled | HostFault::LibvirtdRestarted | HostFault::LibvirtdNarrow)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(reason: Reason, weather: &[Fault]) -> bool {
        let failed = Failed { failure: Failure::Refused(reason), hosts: vec![0], daemon: 0, patience: Patience::UntilDone, crossed: false };
        is_plausible(&failed, &weather.iter().copied().collect())
    }

    #[test]
    fn a_permanent_error_needs_its_own_fault() {
        let path = [Fault::Host(0, HostFault::PathStalled)];
        assert!(judged(Reason::LinkLost, &path));
        for permanent in [Reason::PoolNotActive, Reason::SocketUnavailable, Reason::ImageNotFound, Reason::SshAuthRejected] {
            assert!(!judged(permanent, &path), "{permanent:?}");
        }
        assert!(judged(Reason::PoolNotActive, &[Fault::Host(0, HostFault::PoolInactive)]));
    }

    #[test]
    fn the_fault_of_another_host_or_daemon_explains_nothing() {
        assert!(!judged(Reason::LinkLost, &[Fault::Host(1, HostFault::PathStalled)]));
        assert!(!judged(Reason::ShuttingDown, &[Fault::Daemon(1, DaemonFault::Stopped)]));
    }

    #[test]
    fn nothing_explains_a_defect_of_the_daemon() {
        let all = [Fault::LockedUp(0), Fault::Host(0, HostFault::LibvirtdKilled), Fault::Daemon(0, DaemonFault::Killed)];
        assert!(!judged(Reason::Internal, &all));
        assert!(!judged(Reason::MarkCorrupt, &all));
    }

    #[test]
    fn no_answer_needs_an_impatient_caller_or_a_daemon_that_ended() {
        let failed = |patience| Failed { failure: Failure::NoAnswer, hosts: vec![0], daemon: 1, patience, crossed: false };
        assert!(!is_plausible(&failed(Patience::UntilDone), &BTreeSet::new()));
        assert!(is_plausible(&failed(Patience::GoneAfterMs(3)), &BTreeSet::new()));
        assert!(is_plausible(&failed(Patience::UntilDone), &[Fault::Daemon(1, DaemonFault::Killed)].into()));
    }
}
