//! The hosts as they were before: SSH sessions as sshd sees them, clients as libvirtd does, domains and volumes.
//!
//! Matrices run side by side on the same hosts, so nothing can be said of one of them alone. Whenever none of them runs,
//! the last has cleaned up, and then there must be no more than there was before the first.

use std::time::{Duration, Instant};

use lab_tests::counters::HostCounts;
use lab_tests::{Case, Lab, Outcome, Summary};
use tokio::sync::Mutex;

/// How long sshd and libvirtd may take to notice that a daemon has gone, on a busy machine.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);

struct Matrices {
    running: usize,
    before: Vec<(String, HostCounts)>,
}

static MATRICES: Mutex<Matrices> = Mutex::const_new(Matrices { running: 0, before: Vec::new() });

/// One matrix that runs. One that fails before its end is simply not looked at.
pub(crate) struct Running(Option<Lab>);

/// To be called once the case has swept what an earlier run left, and before its first daemon.
pub(crate) async fn enter(case: &Case) -> Running {
    let mut matrices = MATRICES.lock().await;
    if matrices.running == 0 {
        let counts = case.lab.hosts.iter().map(|host| (host.name.clone(), HostCounts::of(host).expect("the host answers")));
        matrices.before = counts.collect();
    }
    matrices.running += 1;
    Running(Some(case.lab.clone()))
}

impl Running {
    /// To be called when the matrix has no daemon and no case any more.
    pub(crate) async fn leave(mut self, summary: &mut Summary) {
        // nobody enters before the last look is over
        let mut matrices = MATRICES.lock().await;
        let Some(lab) = self.0.take() else { return };
        matrices.running -= 1;
        if matrices.running > 0 {
            return;
        }
        let mut outcome = Outcome::default();
        let start = Instant::now();
        for (name, before) in &matrices.before {
            let host = lab.host(name);
            loop {
                let more = HostCounts::of(host).map(|now| before.less_than(&now)).unwrap_or_else(|e| vec![e]);
                if more.is_empty() {
                    break;
                }
                if start.elapsed() > SETTLES_WITHIN {
                    outcome.leaked.extend(more.into_iter().map(|what| format!("{name}: {what}")));
                    break;
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
        summary.add("the hosts are as they were", outcome);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.is_some() {
            tokio::task::block_in_place(|| MATRICES.blocking_lock().running -= 1);
        }
    }
}
