//! An image is finished over the link of its upload: what becomes of the link that others share costs it nothing.

use egress_provider_proto::v1::ErrorReason;
use lab_tests::counters::ssh_sessions;
use lab_tests::scratch::sha256_of;
use lab_tests::{Answer, Case, Refusal};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{By, HOST, Rig, have_volumes};
use crate::support::in_turn;

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_link_that_is_lost_in_a_pull_costs_it_neither_its_download_nor_its_link() {
    // no session of the host is anybody else's
    let _turn = in_turn().await;
    let Some(case) = Case::start("mothers", &[HOST]) else { return };
    let rig = Rig::start(case).await;
    let (host, vm) = (rig.host(), rig.vm(0));
    let others = async || {
        let request = egress_provider_proto::v1::CheckRequest { entry: rig.entries[&By::Plain].clone(), ..Default::default() };
        rig.clients.provider.clone().check(request).await.expect("check never fails for a host");
        let list = egress_provider_proto::v1::ListByTagRequest { entry: rig.entries[&By::Plain].clone(), ..Default::default() };
        rig.clients.provider.clone().list_by_tag(list).await.expect("a listing").into_inner().complete
    };
    assert!(others().await, "the shared link stands");
    let shared = ssh_sessions(host);
    rig.server.serve("i0", rig.bytes.clone(), [Answer::GateAt(rig.bytes.len() / 2)]);
    let lose_the_shared_link = async {
        have_volumes(&rig, By::Plain, 1).await;
        let of_the_upload: Vec<_> = ssh_sessions(host).into_iter().filter(|pid| !shared.contains(pid)).collect();
        assert!(!of_the_upload.is_empty(), "the upload has a link of its own");
        for pid in &shared {
            // a session is two processes, and the first takes the second with it
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        others().await;
        assert!(ssh_sessions(host).iter().any(|pid| of_the_upload.contains(pid)), "its link is as it was");
        rig.server.open_gate();
    };
    let (created, ()) = tokio::join!(rig.create(By::Plain, &vm, "i0"), lose_the_shared_link);
    // what the Create itself has to ask of the shared link may be lost with it, and the image not
    if let Err(e) = created {
        assert_eq!(Refusal::of(&e).reason, ErrorReason::LinkLost);
        rig.create(By::Plain, &vm, "i0").await.expect("created");
    }
    let base = rig.bases(By::Plain).into_iter().find(|v| v.ends_with(".qcow2")).expect("its base");
    assert_eq!(sha256_of(&rig.volume_path(By::Plain, &base)), rig.image.sha256);
    assert_eq!(rig.server.gets("i0"), 1, "and was downloaded once");
    assert!(!rig.daemon.log().contains("redialling"), "over the one link");
}
