//! Waiting for what becomes true some time.

use std::future::Future;
use std::time::{Duration, Instant};

/// Between two looks: short against everything that is waited for, long against a look.
const PAUSE: Duration = Duration::from_millis(100);

/// Calls `probe` until it answers `Ok`, and returns that. The `Err` of the last look is
/// what the panic says when `limit` has passed. The limit only ends a test that would hang;
/// it is no statement about speed.
pub async fn eventually<T, F>(what: &str, limit: Duration, mut probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let start = Instant::now();
    loop {
        match probe().await {
            Ok(value) => return value,
            Err(why) if start.elapsed() > limit => panic!("{what}: not within {limit:?}; at last: {why}"),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// As [`eventually`], for a look that needs no future.
pub async fn eventually_sync<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Result<T, String>) -> T {
    eventually(what, limit, || std::future::ready(probe())).await
}
