//! The daemon put together: configuration → host table → image cache → provider.
//! The only place that knows all of them.

use std::path::Path;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::{Exit, Failure};
use crate::config::{self, Config};
use crate::image::ImageCache;
use crate::link::HostTable;
use crate::provider::{Operations, Provider};
use crate::telemetry::metrics::Metrics;

/// The parts of a daemon that `serve` runs.
pub(super) struct Composed {
    pub(super) operations: Arc<dyn Operations>,
    /// Runs beside the server until the token is cancelled: the watch of the configuration.
    pub(super) background: BoxFuture<'static, ()>,
    /// Ends work and closes links, after the last call was answered.
    pub(super) shutdown: BoxFuture<'static, ()>,
}

/// The overrides of the environment. A variable that is no text cannot be one of ours.
fn environment() -> Vec<(String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect()
}

/// Reads the providers file. The second part are notes for a person.
pub(super) fn load(file: &Path) -> Result<(Config, Vec<String>), Failure> {
    config::load(file, environment()).map_err(|report| Failure::of(Exit::Permanent, &report))
}

/// `replica` is who this daemon is in the marks of its instances; `stop` ends the background.
pub(super) fn compose(file: &Path, metrics: Metrics, replica: String, stop: CancellationToken) -> Result<Composed, Failure> {
    let (config, notes) = load(file)?;
    for note in notes {
        tracing::info!("{note}");
    }
    for entry in &config.entries {
        for warning in &entry.warnings {
            tracing::warn!(entry = entry.name, "{warning}");
        }
    }
    let (handle, watching) = config::watch::watch(file.to_owned(), environment(), config, stop);
    let table = HostTable::new(handle.clone(), metrics.clone());
    let images = ImageCache::of_replica(table.clone(), metrics, &replica);
    let provider = Provider::new(handle, table.clone(), Arc::clone(&images), replica);
    let operations: Arc<dyn Operations> = Arc::new(provider.clone());
    let shutdown = async move {
        // from the outside in: work first, then what it stands on
        provider.shutdown().await;
        images.shutdown().await;
        table.shutdown().await;
    };
    Ok(Composed { operations, background: Box::pin(watching), shutdown: Box::pin(shutdown) })
}
