//! What all measurements share: the lab, a provider entry of their own, how often to measure.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::case::Case;
use crate::daemon::Daemon;
use crate::lab::Host;
use crate::providers_file::{EntryFile, ProvidersFile};

use super::rival::Rival;

/// The host that is measured against.
pub const HOST: &str = "hv1";
/// A second one, for what concerns several.
pub const SECOND_HOST: &str = "hv2";

#[derive(Debug)]
pub struct Rig {
    pub case: Case,
    /// Pairs of measurements per figure.
    pub rounds: usize,
}

impl Rig {
    /// None, and a line that says why, where there is no lab.
    pub fn set_up(rounds: usize) -> Option<Self> {
        Some(Self { case: Case::start("bench", &[HOST, SECOND_HOST])?, rounds })
    }

    pub fn host(&self) -> &Host {
        self.case.host(HOST)
    }

    /// The entry on the first host alone.
    pub fn entry(&self) -> EntryFile {
        self.case.entry_on(&[HOST])
    }

    /// A daemon as it runs in production: the log says what is worth saying.
    pub async fn daemon(&self, dir: &str, file: impl Into<ProvidersFile>) -> Daemon {
        let mut daemon = Daemon::spawn_terse(&self.dir(dir), &file.into());
        daemon.ready().await;
        daemon
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.case.dir().join(name);
        std::fs::create_dir_all(&dir).expect("a directory in a temporary one");
        dir
    }

    /// virsh over SSH to the first host.
    pub fn rival(&self) -> Rival {
        Rival::to(&self.case.lab, self.host(), None, &self.dir("rival"))
    }

    /// Whether our side goes first in a round: who does may find caches colder.
    pub fn ours_first(round: usize) -> bool {
        round.is_multiple_of(2)
    }
}

/// Nothing that an earlier measurement wrote is written back at the cost of the next one.
pub fn settle_disk() {
    // where it is missing, measurements are only noisier
    let _ = Command::new("sync").stdin(Stdio::null()).status();
}
