//! A cold image: HTTP → hash → host, marker written, against an upload of a local file.

use std::time::{Duration, Instant};

use crate::case::{request, uid_of};
use crate::clients::Clients;
use crate::lab::LabImage;

use super::report::{Figure, Limit, Unit};
use super::rig::{HOST, Rig, settle_disk};
use super::series::{Series, timed};

/// How often the host is looked at for the marker; short against a transfer.
const LOOK: Duration = Duration::from_millis(2);
const RIVAL_VOLUME: &str = "kt-bench-rival.raw";

pub async fn measure(rig: &Rig) -> Figure {
    let image = rig.case.lab.image("big");
    let daemon = rig.daemon("image", rig.entry().lab_image(&rig.case.lab, "big").image_set("big", "firmware", "bios")).await;
    let clients = daemon.clients();
    // the link and the HTTP client stand, as they do in a daemon that serves
    pull(rig, &clients, HOST, "tiny", &rig.case.lab.image("tiny")).await;
    let rival = rig.rival();
    let (size, path) = (image.size.to_string(), image.path.to_string_lossy().into_owned());
    // both read it from memory
    std::fs::read(&image.path).expect("reading the image");

    let (mut ours, mut theirs) = (Series::default(), Series::default());
    for round in 0..rig.rounds {
        let us = async {
            settle_disk();
            let took = pull(rig, &clients, HOST, "big", &image).await;
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
        .line("Create until the image's marker is on the host", Unit::Seconds, &ours)
        .line("virsh vol-upload of the same bytes, no hash", Unit::Seconds, &theirs)
        .judged("ratio", Unit::Plain, &ours.over(&theirs), Limit(0.75))
        .note(format!("{:.0} MiB/s against {:.0} MiB/s", rate(&ours), rate(&theirs)))
}

/// Has an instance created of the image, and waits until the digest is in the marker on the host: from
/// then on any Create finds the image. Then for the rest of the Create, and removes the instance.
pub(super) async fn pull(rig: &Rig, clients: &Clients, zone: &str, key: &str, image: &LabImage) -> Duration {
    let vm = rig.case.vm(&format!("{zone}-{key}"));
    let prefix = format!("base-{}-{key}-", rig.case.entry_name());
    let host = rig.case.host(zone);
    let is_marked = || {
        let marker = host.volumes("default").into_iter().find(|volume| volume.starts_with(&prefix) && volume.ends_with(".sha256"));
        marker.is_some_and(|marker| std::fs::read(host.volume_path("default", &marker)).is_ok_and(|text| text == image.sha256.as_bytes()))
    };
    let start = Instant::now();
    let mut create = std::pin::pin!(clients.create(request(&vm, zone, key)));
    let mut took = None;
    let created = loop {
        tokio::select! {
            created = &mut create => break created,
            () = tokio::time::sleep(LOOK), if took.is_none() => if is_marked() { took = Some(start.elapsed()) },
        }
    };
    created.unwrap_or_else(|e| panic!("{vm}: {e}"));
    clients.delete_by_key(&vm, &uid_of(&vm)).await.unwrap_or_else(|e| panic!("{vm}: {e}"));
    took.unwrap_or_else(|| panic!("{vm} was created and its base has no marker"))
}

fn remove_bases(rig: &Rig, image: &str) {
    let prefix = format!("base-{}-{image}-", rig.case.entry_name());
    let bases: Vec<_> = rig.case.bases(HOST).into_iter().filter(|volume| volume.starts_with(&prefix)).collect();
    assert!(bases.iter().any(|volume| volume.ends_with(".sha256")), "no marker among {bases:?}");
    for volume in bases {
        rig.host().virsh(&["vol-delete", &volume, "--pool", "default"]);
    }
}
