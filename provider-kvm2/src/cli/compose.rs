//! The daemon put together: configuration → host table → image cache → provider.
//! The only place that knows all of them.

use std::path::Path;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::{Exit, Failure};
use crate::config::Config;
use crate::provider::Operations;
use crate::telemetry::metrics::Metrics;

/// The parts of a daemon that `serve` runs.
pub(super) struct Composed {
    pub(super) operations: Arc<dyn Operations>,
    /// Runs beside the server until the token is cancelled: the watch of the configuration.
    pub(super) background: BoxFuture<'static, ()>,
    /// Ends work and closes links, after the last call was answered.
    pub(super) shutdown: BoxFuture<'static, ()>,
}

/// Reads the providers file. The second part are notes for a person.
pub(super) fn load(file: &Path) -> Result<(Config, Vec<String>), Failure> {
    Err(Failure::new(Exit::Other, format!("this build cannot read {}: the configuration is not part of it", file.display())))
}

pub(super) fn describe(config: &Config) -> String {
    config.entries.iter().map(|e| format!("entry {}: {} hosts", e.name, e.hosts.len())).collect::<Vec<_>>().join("\n")
}

pub(super) fn compose(file: &Path, _metrics: Metrics, _replica: String, _stop: CancellationToken) -> Result<Composed, Failure> {
    let (_config, _notes) = load(file)?;
    Err(Failure::new(Exit::Other, "this build has no operations"))
}
