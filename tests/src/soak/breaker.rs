//! Breaks hosts, images and daemons, holds that for a while, and mends it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use crate::fault_proxy::Fault as PathFault;
use crate::image_server::Answer;
use crate::lab::Host;
use crate::lockup;
use crate::providers_file::{EntryFile, ProvidersFile};

use super::course::{Course, POOL};
use super::plan::{DaemonFault, HOSTS, HostFault, ImageFault};
use super::weather::Fault;

/// How far an image is sent before it breaks, in bytes.
const BREAKS_AT: usize = 40_000;

/// Commands on the lab's hosts block.
pub async fn on_host<T: Send + 'static>(course: &Arc<Course>, host: usize, work: impl FnOnce(&Host) -> T + Send + 'static) -> T {
    let course = course.clone();
    tokio::task::spawn_blocking(move || work(course.host(host))).await.expect("a command on a host does not panic")
}

async fn act(course: &Arc<Course>, host: usize, args: &'static [&'static str]) -> Result<(), String> {
    on_host(course, host, move |host| host.try_act(args).map(drop)).await
}

async fn virsh(course: &Arc<Course>, host: usize, args: &'static [&'static str]) -> Result<(), String> {
    on_host(course, host, move |host| host.try_virsh(args).map(drop)).await
}

/// Holds for a time, less when the soak is over.
async fn hold(course: &Course, ms: u64) {
    let _ = tokio::time::timeout(Duration::from_millis(ms), course.until_over()).await;
}

pub async fn break_host(course: &Arc<Course>, host: usize, fault: HostFault, hold_ms: u64) -> Result<String, String> {
    let begun = course.weather.begin(Fault::Host(host, fault));
    let broken = break_one(course, host, fault).await;
    hold(course, hold_ms).await;
    let mended = mend_one(course, host, fault).await;
    let locked_up = mend_lock_up(course, host).await;
    course.weather.end(begun);
    // a pool with an upload in it cannot be stopped, and such a fault just does not come
    let broken = match fault {
        HostFault::PoolInactive => broken.map_or_else(|_| "could not be broken", |()| "mended"),
        _ => broken.map(|()| "mended")?,
    };
    mended?;
    Ok(if locked_up { "mended; libvirtd had locked itself up".to_owned() } else { broken.to_owned() })
}

async fn break_one(course: &Arc<Course>, host: usize, fault: HostFault) -> Result<(), String> {
    let proxy = &course.proxies[host];
    match fault {
        HostFault::PathStalled => proxy.set(PathFault::Stall),
        HostFault::PathReset => proxy.set(PathFault::Reset),
        HostFault::PathRefused => proxy.set(PathFault::Refuse),
        HostFault::PathSlow => proxy.delay(Duration::from_millis(40)),
        HostFault::SessionsFrozen => act(course, host, &["freeze-sessions"]).await?,
        HostFault::SessionsKilled => act(course, host, &["kill-sessions"]).await?,
        HostFault::SshdFrozen => act(course, host, &["freeze-sshd"]).await?,
        HostFault::SshdNarrow => act(course, host, &["sshd-config", "MaxSessions", "2", "MaxStartups", "2"]).await?,
        HostFault::LibvirtdFrozen => act(course, host, &["freeze-libvirtd"]).await?,
        HostFault::LibvirtdRestarted => act(course, host, &["restart-libvirtd"]).await?,
        HostFault::LibvirtdKilled => act(course, host, &["kill-libvirtd"]).await?,
        HostFault::LibvirtdNarrow => act(course, host, &["libvirtd-config", "max_clients", "5", "max_anonymous_clients", "5"]).await?,
        HostFault::PoolFull => act(course, host, &["fill-pool", POOL]).await?,
        HostFault::PoolInactive => virsh(course, host, &["pool-destroy", POOL]).await?,
    }
    Ok(())
}

async fn mend_one(course: &Arc<Course>, host: usize, fault: HostFault) -> Result<(), String> {
    let proxy = &course.proxies[host];
    match fault {
        HostFault::PathStalled | HostFault::PathReset | HostFault::PathRefused => proxy.set(PathFault::Pass),
        HostFault::PathSlow => proxy.delay(Duration::ZERO),
        HostFault::SessionsFrozen => act(course, host, &["thaw-sessions"]).await?,
        HostFault::SshdFrozen => act(course, host, &["thaw-sshd"]).await?,
        HostFault::SshdNarrow => act(course, host, &["sshd-config"]).await?,
        HostFault::LibvirtdFrozen => act(course, host, &["thaw-libvirtd"]).await?,
        HostFault::LibvirtdKilled => act(course, host, &["start-libvirtd"]).await?,
        HostFault::LibvirtdNarrow => act(course, host, &["libvirtd-config"]).await?,
        HostFault::PoolFull => act(course, host, &["unfill-pool", POOL]).await?,
        // fails for one that is active
        HostFault::PoolInactive => drop(virsh(course, host, &["pool-start", POOL]).await),
        HostFault::SessionsKilled | HostFault::LibvirtdRestarted => {}
    }
    Ok(())
}

/// Restarts a libvirtd that locked itself up, and notes it; whether that was needed.
pub async fn mend_lock_up(course: &Arc<Course>, host: usize) -> bool {
    let since = course.weather.now();
    let locked_up = on_host(course, host, |host| lockup::mended(host, Instant::now())).await;
    if locked_up {
        // when it happened is not known: it has been so since the fault before this look at the latest
        course.weather.past(Fault::LockedUp(host), since.saturating_sub(30_000));
    }
    locked_up
}

pub async fn break_image(course: &Course, image: usize, fault: ImageFault, hold_ms: u64) -> String {
    let begun = course.weather.begin(Fault::Image(fault));
    let served = course.served().clone();
    let (path, length) = (served.path(image), served.body.len());
    let answer = match fault {
        ImageFault::Truncated => Answer::Truncated(BREAKS_AT.min(length / 2)),
        ImageFault::Reset => Answer::ResetAt(BREAKS_AT.min(length / 2)),
        ImageFault::Silent => Answer::StallAt(BREAKS_AT.min(length / 2)),
        ImageFault::Chunked => Answer::Chunked,
        ImageFault::WrongLength => Answer::Announced(length as u64 + 4096),
        ImageFault::RangesRefused => Answer::RangesRefused,
        ImageFault::Html => Answer::Html,
        ImageFault::NotFound => Answer::Status(404, Vec::new()),
        ImageFault::Busy => Answer::Status(429, vec![("Retry-After", "1".to_owned())]),
        ImageFault::Unavailable => Answer::Status(503, Vec::new()),
    };
    course.images.serve(&path, served.body.clone(), [answer]);
    hold(course, hold_ms).await;
    course.images.serve(&path, served.body, [Answer::Whole]);
    course.weather.end(begun);
    "mended".to_owned()
}

pub async fn break_daemon(
    course: &Course,
    daemons: &mut [Daemon],
    entry: &mut EntryFile,
    which: usize,
    fault: DaemonFault,
    hold_ms: u64,
) -> Result<String, String> {
    let begun = course.weather.begin(Fault::Daemon(which, fault));
    let daemon = &mut daemons[which];
    let said = match fault {
        DaemonFault::Killed => {
            daemon.kill();
            course.endings[which].fetch_add(1, Ordering::SeqCst);
            hold(course, hold_ms).await;
            daemon.restart().await;
            Ok("killed and started".to_owned())
        }
        DaemonFault::Stopped => {
            let status = daemon.stop().await;
            course.endings[which].fetch_add(1, Ordering::SeqCst);
            hold(course, hold_ms).await;
            daemon.restart().await;
            if status.success() { Ok("stopped and started".to_owned()) } else { Err(format!("SIGTERM ended daemon {which} with {status}")) }
        }
        DaemonFault::Reloaded => {
            let next = course.served().next(&course.case, &course.images);
            *entry = next.in_entry(entry.clone(), &course.images);
            *course.served() = next;
            daemons.iter().for_each(|daemon| configure(daemon, entry.clone()));
            hold(course, hold_ms).await;
            Ok("reloaded".to_owned())
        }
        DaemonFault::Misconfigured => {
            configure(daemon, entry.clone().set("machineTypes", serde_json::json!({})));
            hold(course, hold_ms).await;
            configure(daemon, entry.clone());
            Ok("refused and mended".to_owned())
        }
    };
    course.weather.end(begun);
    said
}

/// The daemon watches its file.
fn configure(daemon: &Daemon, entry: EntryFile) {
    let dir = daemon.config_path().parent().expect("a file in a directory");
    ProvidersFile::from(entry).write(dir);
}

/// Whatever may still be broken is mended; problems in doing so.
pub async fn mend_all(course: &Arc<Course>) -> Vec<String> {
    let mut problems = Vec::new();
    for host in 0..HOSTS.len() {
        course.proxies[host].delay(Duration::ZERO);
        course.proxies[host].set(PathFault::Pass);
        for args in
            [&["thaw-sessions"][..], &["thaw-sshd"], &["thaw-libvirtd"], &["start-libvirtd"], &["start-sshd"], &["unfill-pool", POOL]]
        {
            if let Err(e) = act(course, host, args).await {
                problems.push(e);
            }
        }
        let _ = virsh(course, host, &["pool-start", POOL]).await;
        mend_lock_up(course, host).await;
    }
    problems
}
