//! Resident memory of the daemon: idle with two hosts, and during four image transfers at once.

use std::time::Duration;

use crate::counters::Usage;
use futures::future::join_all;
use serde_json::json;

use super::image::pull;
use super::report::{Figure, Limit, Unit};
use super::rig::{HOST, Rig, SECOND_HOST, settle_disk};
use super::series::Series;

/// How often memory is looked at during transfers; the kernel's own high-water mark misses nothing.
const LOOK: Duration = Duration::from_millis(20);

pub async fn measure(rig: &Rig) -> Figure {
    let image = rig.case.lab.image("big");
    let keys = ["big1", "big2"];
    // one file under two keys is two images
    let entry = keys.iter().fold(rig.case.entry(), |entry, key| {
        let url = format!("{}?{key}", image.url);
        entry.image(key, json!({ "url": url, "sha256": image.sha256, "format": image.format, "firmware": "bios" }))
    });
    let (mut idle, mut busy, mut peak, mut after) = (Series::default(), Series::default(), Series::default(), Series::default());
    for round in 0..rig.rounds.min(3) {
        let daemon = rig.daemon(&format!("memory-{round}"), entry.clone()).await;
        let clients = daemon.clients();
        let checked = clients.check().await.expect("a Check");
        assert_eq!(checked.hosts.len(), 2, "{checked:?}");
        assert!(checked.hosts.iter().all(|host| host.healthy), "{checked:?}");
        idle.push(mib(Usage::of(daemon.pid()).resident_kib));

        settle_disk();
        let pairs = [HOST, SECOND_HOST].into_iter().flat_map(|zone| keys.map(|key| (zone, key)));
        let mut transfers = std::pin::pin!(join_all(pairs.map(|(zone, key)| pull(rig, &clients, zone, key, &image))));
        let mut most = 0;
        loop {
            tokio::select! {
                _ = &mut transfers => break,
                () = tokio::time::sleep(LOOK) => most = most.max(Usage::of(daemon.pid()).resident_kib),
            }
        }
        busy.push(mib(most));
        peak.push(mib(Usage::peak_kib(daemon.pid())));
        after.push(mib(Usage::of(daemon.pid()).resident_kib));
        drop(daemon);
        for host in [HOST, SECOND_HOST] {
            for volume in rig.case.bases(host) {
                rig.case.host(host).virsh(&["vol-delete", &volume, "--pool", "default"]);
            }
        }
    }
    Figure::new(format!("Resident memory, and four transfers of {} MiB at once (2 hosts × 2 images)", image.size >> 20))
        .judged("idle, after a Check of two hosts (VmRSS)", Unit::MiB, &idle, Limit(40.0))
        .line("during the transfers, most seen (VmRSS)", Unit::MiB, &busy)
        .judged("during the transfers, high-water mark (VmHWM)", Unit::MiB, &peak, Limit(90.0))
        .line("after the transfers (VmRSS)", Unit::MiB, &after)
        .note("both with all that a Create does after its transfer")
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}
