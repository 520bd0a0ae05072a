//! The daemon against real hosts.
//!
//! One program, so that what mostly waits (a guest that boots, a silent host that has to be
//! given up) goes on beside what mostly works. Each module keeps to hosts of its own:
//! `lifecycle` and `agents` to hv1, `storage`, `images`, `untrusted`, `disk`, `guests`, `storms`, `overtaken`, `slow` and `killed` to
//! hv2; `faults` breaks hv3, `pools` and `libvirtd` hv4, and each of these has one test at a time.

use lab_tests::Turn;
use tokio::sync::Mutex;

mod agents;
mod disk;
mod faults;
mod guests;
mod images;
mod killed;
mod libvirtd;
mod lifecycle;
mod overtaken;
mod pools;
mod slow;
mod storage;
mod storms;
mod untrusted;

/// The hosts that tests break; nobody else's tests use them.
const BROKEN: &str = "hv3";
const BROKEN_TOO: &str = "hv4";

/// Tests of a broken host take turns, their cleaning up included: taken before the case is started.
async fn alone(host: &str) -> Turn {
    static TURNS: [Mutex<()>; 2] = [const { Mutex::const_new(()) }; 2];
    Turn::take(&TURNS[usize::from(host == BROKEN_TOO)]).await
}
