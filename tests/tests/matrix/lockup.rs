//! Ways in which the connection of an upload comes to its end, and whether libvirtd answers afterwards.
//!
//! libvirtd 11.3 can lock itself up for good when it finds its client gone with data of a stream, or its end, still
//! before it: docs/adr/0008-streams-end-before-connections.md. Where the daemon decides when the connection ends it must
//! not happen. Where the daemon or the path is gone at once it may, and is only counted.

use std::path::PathBuf;
use std::time::Duration;

use egress_provider_proto::v1::ErrorClass;
use lab_tests::case::request;
use lab_tests::counters::{is_alive, ssh_sessions};
use lab_tests::lab::Broken;
use lab_tests::scratch::ScratchImage;
use lab_tests::summary::is_full;
use lab_tests::{Answer, Case, Daemon, Fault, FaultProxy, ImageServer, Outcome, Refusal, Summary, eventually};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::in_turn;

const HOST: &str = "hv1";
const MIB: usize = 1 << 20;
/// Only tells what is stuck.
const SOON: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// libvirtd is frozen until the upload has spent its budget, then goes on.
    LibvirtdFrozen,
    /// The SSH session is frozen until the link is given up for its silence, then goes on.
    SessionFrozen,
    /// The same of the path.
    PathStalled,
    /// The source breaks off.
    SourceFails,
    /// The daemon is told to end.
    Terminated,
    /// The daemon is killed.
    Killed,
    /// The connection is reset.
    Reset,
}

impl Way {
    /// Whether the daemon has a say in it.
    fn is_ours(self) -> bool {
        !matches!(self, Self::Killed | Self::Reset)
    }

    fn tries(self) -> usize {
        match (is_full(), self) {
            (true, Self::SessionFrozen | Self::PathStalled) => 5,
            (true, _) => 20,
            (false, Self::LibvirtdFrozen | Self::Terminated) => 1,
            (false, _) => 0,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_the_daemon_ends_never_locks_libvirtd_up() {
    let _turn = in_turn().await;
    let Some(case) = Case::start("mlockup", &[HOST]) else { return };
    let small = ScratchImage::filled(case.dir(), "small.qcow2", 8, 1).path;
    let large = ScratchImage::filled(case.dir(), "large.qcow2", 64, 2).path;
    let mut summary = Summary::of("lockup");
    use Way::*;
    for way in [LibvirtdFrozen, SessionFrozen, PathStalled, SourceFails, Terminated, Killed, Reset] {
        let mut locked_up = 0;
        for n in 0..way.tries() {
            // the other ways need a stream that is busy
            let image = if way == SourceFails { &small } else { &large };
            let mut outcome = upload(&case, image, &format!("{way:?}{n}").to_lowercase(), way, n).await;
            if !case.host(HOST).libvirtd_answers() {
                locked_up += 1;
                // as an administrator has to
                case.host(HOST).act(&["kill-libvirtd"]);
                case.host(HOST).act(&["start-libvirtd"]);
                if way.is_ours() {
                    outcome.wrong.push("libvirtd has locked itself up".to_owned());
                }
            }
            summary.add(format!("{way:?} {n}"), outcome);
        }
        if way.tries() > 0 {
            eprintln!("lockup: {way:?}: libvirtd locked itself up in {locked_up} of {} tries", way.tries());
        }
    }
    drop(case);
    summary.close();
}

/// One upload that ends so.
async fn upload(case: &Case, image: &PathBuf, name: &str, way: Way, n: usize) -> Outcome {
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let server = ImageServer::start().await;
    let image = std::fs::read(image).expect("the image");
    let half = image.len() / 2;
    let script = match way {
        Way::SourceFails => vec![Answer::Truncated(half + n * 4096), Answer::Status(404, vec![])],
        _ => vec![Answer::Whole],
    };
    server.serve("i", image, script);
    let entry = case
        .other_entry(name)
        .via(HOST, proxy.addr())
        .image("i", json!({ "url": server.url("i"), "firmware": "bios" }))
        .set("budgets", json!({ "dial": "4s", "call": "6s", "uploadImage": if way == Way::LibvirtdFrozen { "8s" } else { "60s" } }));
    let prefix = format!("base-{}-", entry.name());
    let mut daemon = case.daemon_in(name, entry).await;
    if let Err(e) = daemon.clients().list().await {
        return Outcome::wrong(format!("a sound host: {}", e.message()));
    }
    let shared = ssh_sessions(host);
    let (clients, request) = (daemon.clients(), request(&case.vm(name), HOST, "i"));
    let pull = tokio::spawn(async move { clients.create(request).await });
    let mut outcome = Outcome::default();
    if way == Way::Reset {
        // where in the body is all the difference
        proxy.set(Fault::CutAfter((4 * MIB + n * 3 * MIB) as u64));
    } else if way != Way::SourceFails {
        eventually("the upload has its volume", SOON, || async {
            if host.volumes("default").iter().any(|v| v.starts_with(&prefix)) { Ok(()) } else { Err("none".to_owned()) }
        })
        .await;
    }
    let link: Vec<_> = ssh_sessions(host).into_iter().filter(|pid| !shared.contains(pid)).collect();
    let broken = match way {
        Way::LibvirtdFrozen => Some(Broken::by(host, &["freeze-libvirtd"], &["thaw-libvirtd"])),
        Way::SessionFrozen => Some(Broken::by(host, &["freeze-sessions"], &["thaw-sessions"])),
        Way::PathStalled => {
            proxy.set(Fault::Stall);
            None
        }
        Way::Terminated => {
            end(&mut outcome, &mut daemon).await;
            None
        }
        Way::Killed => {
            daemon.kill();
            None
        }
        Way::SourceFails | Way::Reset => None,
    };
    match tokio::time::timeout(SOON, pull).await {
        Err(_) => outcome.stuck.push(format!("the Create is not over within {SOON:?}")),
        Ok(Err(e)) => outcome.wrong.push(format!("the caller: {e}")),
        // a source that fails is the only one whose error says so; with a new link the Create may even succeed
        Ok(Ok(Err(e))) if !matches!(way, Way::Killed | Way::Terminated | Way::SourceFails) => {
            let refusal = Refusal::of(&e);
            if refusal.reason.class() != ErrorClass::Transient {
                outcome.wrong.push(format!("{refusal:?}"));
            }
        }
        Ok(Ok(_)) => {}
    }
    // the caller is back, and the connection waits for libvirtd
    if way == Way::LibvirtdFrozen && !link.iter().any(|pid| is_alive(*pid)) {
        outcome.wrong.push("the connection was ended under its stream".to_owned());
    }
    drop(broken);
    proxy.set(Fault::Pass);
    if way == Way::LibvirtdFrozen {
        eventually("the connection ends once libvirtd has answered", SOON, || async {
            let left: Vec<_> = link.iter().filter(|pid| is_alive(**pid)).collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }
    outcome
}

async fn end(outcome: &mut Outcome, daemon: &mut Daemon) {
    daemon.signal(Signal::SIGTERM);
    if let Err(e) = daemon.ends(SOON).await {
        outcome.stuck.push(e);
    }
}
