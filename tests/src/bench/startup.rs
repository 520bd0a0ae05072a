//! From exec to the first answer that says SERVING.

use std::time::{Duration, Instant};

use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::daemon::Daemon;
use crate::providers_file::ProvidersFile;

use super::report::{Figure, Limit, Unit};
use super::rig::Rig;
use super::series::Series;

/// How often the daemon is asked: short against the limit.
const LOOK: Duration = Duration::from_millis(1);
/// Only ends a measurement that hangs.
const GIVE_UP: Duration = Duration::from_secs(20);

pub async fn measure(rig: &Rig) -> Figure {
    let file = ProvidersFile::from(rig.case.entry());
    let mut ready = Series::default();
    for round in 0..2 * rig.rounds {
        let dir = rig.dir(&format!("start-{round}"));
        let start = Instant::now();
        let daemon = Daemon::spawn_terse(&dir, &file);
        let clients = daemon.clients();
        loop {
            let answer = clients.health.clone().check(HealthCheckRequest::default()).await;
            if answer.is_ok_and(|answer| answer.get_ref().status() == ServingStatus::Serving) {
                break;
            }
            assert!(start.elapsed() < GIVE_UP, "the daemon does not serve:\n{}", daemon.log());
            tokio::time::sleep(LOOK).await;
        }
        ready.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    Figure::new("Ready to serve, from exec to a health check that says SERVING").judged(
        "ready after",
        Unit::Milliseconds,
        &ready,
        Limit(100.0),
    )
}
