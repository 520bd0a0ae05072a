//! What a process that holds keys and user-data does at its start.

use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};

/// No core file and no reading of our memory by other processes of the same user: both would hold SSH
/// keys and user-data. Where the system refuses, the daemon still serves.
pub(super) fn keep_memory_private() {
    if let Err(e) = setrlimit(Resource::RLIMIT_CORE, 0, 0) {
        tracing::warn!(error = %e, "core dumps cannot be switched off");
    }
    if let Err(e) = prctl::set_dumpable(false) {
        tracing::warn!(error = %e, "the process cannot be made undumpable");
    }
}
