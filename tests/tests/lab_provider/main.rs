//! The daemon against real hosts.
//!
//! One program, so that what mostly waits (a guest that boots, a silent host that has to be
//! given up) goes on beside what mostly works. Each module keeps to hosts of its own:
//! `lifecycle` and `agents` to hv1, `storage`, `images`, `untrusted`, `disk`, `guests`, `storms`, `slow` and `killed` to
//! hv2; `faults`, `pools` and `libvirtd` break hv3, one test at a time.

use tokio::sync::{Mutex, MutexGuard};

mod agents;
mod disk;
mod faults;
mod guests;
mod images;
mod killed;
mod libvirtd;
mod lifecycle;
mod pools;
mod slow;
mod storage;
mod storms;
mod untrusted;

/// The host that tests break; nobody else's tests use it.
const BROKEN: &str = "hv3";

/// Tests of the broken host take turns, their cleaning up included: taken before the case is started.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}
