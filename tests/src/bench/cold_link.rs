//! The first call to a host: TCP, SSH, socket channel, libvirt, and an answer.

use super::report::{Figure, Limit, Unit};
use super::rig::Rig;
use super::series::{Series, timed};

pub async fn measure(rig: &Rig) -> Figure {
    let rival = rig.rival();
    let (mut ours, mut theirs) = (Series::default(), Series::default());
    for round in 0..2 * rig.rounds {
        // a fresh daemon has no link and has read no key
        let daemon = rig.daemon("cold", rig.entry()).await;
        let clients = daemon.clients();
        let first = async {
            let (took, answer) = timed(clients.get_by_key("kt-bench-nobody", "nobody")).await;
            let refusal = answer.expect_err("there is no such instance");
            assert_eq!(refusal.code(), tonic::Code::NotFound, "{refusal}");
            took
        };
        let virsh = async { timed(async { rival.run(&["uri"]) }).await.0 };
        let (us, them) = if Rig::ours_first(round) {
            let us = first.await;
            (us, virsh.await)
        } else {
            let them = virsh.await;
            (first.await, them)
        };
        ours.push(us.as_secs_f64() * 1000.0);
        theirs.push(them.as_secs_f64() * 1000.0);
    }
    Figure::new("Cold link: the first Get of a fresh daemon, answered by the host")
        .line("first Get", Unit::Milliseconds, &ours)
        .line("virsh -c qemu+ssh://… uri", Unit::Milliseconds, &theirs)
        .judged("ratio", Unit::Plain, &ours.over(&theirs), Limit(0.5))
}
