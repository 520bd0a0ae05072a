//! A cold image: HTTP → hash → host, marker written, against an upload of a local file.

use std::time::Duration;

use egress_provider_proto::v1::PrepareImageRequest;

use crate::clients::{Clients, seconds};

use super::report::{Figure, Limit, Unit};
use super::rig::{HOST, Rig, settle_disk};
use super::series::{Series, timed};

/// Only ends a measurement that hangs.
const PULL_LIMIT_SECONDS: u64 = 300;
const RIVAL_VOLUME: &str = "kt-bench-rival.raw";

pub async fn measure(rig: &Rig) -> Figure {
    let image = rig.case.lab.image("big");
    let daemon = rig.daemon("image", rig.entry().lab_image(&rig.case.lab, "big")).await;
    let clients = daemon.clients();
    // the link and the HTTP client stand, as they do in a daemon that serves
    prepare(&clients, HOST, "tiny").await;
    let rival = rig.rival();
    let (size, path) = (image.size.to_string(), image.path.to_string_lossy().into_owned());
    // both read it from memory
    std::fs::read(&image.path).expect("reading the image");

    let (mut ours, mut theirs) = (Series::default(), Series::default());
    for round in 0..rig.rounds {
        let us = async {
            settle_disk();
            let (took, ()) = timed(prepare(&clients, HOST, "big")).await;
            remove_bases(rig, "big");
            took
        };
        let virsh = async {
            rig.host().virsh(&["vol-create-as", "default", RIVAL_VOLUME, &size, "--format", "raw", "--allocation", &size]);
            settle_disk();
            let took = timed(async { rival.run(&["vol-upload", RIVAL_VOLUME, &path, "--pool", "default"]) }).await.0;
            rig.host().virsh(&["vol-delete", RIVAL_VOLUME, "--pool", "default"]);
            took
        };
        let (us, them) = if Rig::ours_first(round) {
            let us = us.await;
            (us, virsh.await)
        } else {
            let them = virsh.await;
            (us.await, them)
        };
        ours.push_seconds(us);
        theirs.push_seconds(them);
    }
    let rate = |series: &Series| image.size as f64 / (1 << 20) as f64 / series.median();
    Figure::new(format!("Cold image of {} MiB: HTTP → hash → host, marker written", image.size >> 20))
        .line("PrepareImage until the marker is there", Unit::Seconds, &ours)
        .line("virsh vol-upload of the same bytes, no hash", Unit::Seconds, &theirs)
        .judged("ratio", Unit::Plain, &ours.over(&theirs), Limit(0.75))
        .note(format!("{:.0} MiB/s against {:.0} MiB/s", rate(&ours), rate(&theirs)))
}

/// Pulls the image to the host, all of it.
pub(super) async fn prepare(clients: &Clients, zone: &str, image: &str) {
    let request = PrepareImageRequest {
        zone: zone.to_owned(),
        image: image.to_owned(),
        max_wait: seconds(PULL_LIMIT_SECONDS),
        ..PrepareImageRequest::default()
    };
    let mut request = tonic::Request::new(request);
    request.set_timeout(Duration::from_secs(PULL_LIMIT_SECONDS));
    clients.images.clone().prepare_image(request).await.unwrap_or_else(|e| panic!("image {image} on {zone}: {e}"));
}

fn remove_bases(rig: &Rig, image: &str) {
    let prefix = format!("base-{}-{image}-", rig.case.entry_name());
    let bases: Vec<_> = rig.case.bases(HOST).into_iter().filter(|volume| volume.starts_with(&prefix)).collect();
    assert!(bases.iter().any(|volume| volume.ends_with(".sha256")), "no marker among {bases:?}");
    for volume in bases {
        rig.host().virsh(&["vol-delete", &volume, "--pool", "default"]);
    }
}
