//! What an administrator has to do with a libvirtd that locked itself up (ADR 8): kill it and start it; guests go on.
//!
//! libvirtd 11.3 does that when a client goes in the middle of an upload, which a test that kills a daemon or resets a
//! path cannot help. What else was going on at that host then has failed for no fault of the daemon's, and is tried
//! again. Anything else that keeps libvirtd from answering is left as it is, for the test to fail.

use std::sync::Mutex;
use std::time::Instant;

use crate::lab::Host;

/// When this program restarted which host's libvirtd. Locked for as long as one is looked at.
static RESTARTS: Mutex<Vec<(String, Instant)>> = Mutex::new(Vec::new());

/// Restarts the host's libvirtd if it is locked up. Whether it was, or has been since `since`. One that does not start is
/// said; what is asked of the host next fails then.
pub fn mended(host: &Host, since: Instant) -> bool {
    let mut restarts = RESTARTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !host.libvirtd_answers() && is_locked_up(host) {
        eprintln!("{}: libvirtd locked itself up, as it may when a client goes in an upload; restarting it", host.name);
        if let Err(e) = host.try_act(&["kill-libvirtd"]).and_then(|_| host.try_act(&["start-libvirtd"])) {
            eprintln!("{}: {e}", host.name);
        }
        restarts.push((host.name.clone(), Instant::now()));
    }
    restarts.iter().any(|(name, at)| *name == host.name && *at >= since)
}

/// The main thread, which serves all clients, waits for a lock; one that is stopped or busy does not.
fn is_locked_up(host: &Host) -> bool {
    let Some(pid) = host.pid("libvirtd") else { return false };
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let sleeps = read("stat").rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'));
    sleeps && read("wchan").starts_with("futex")
}
