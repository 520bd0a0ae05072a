//! What must not grow: threads, descriptors and memory of a daemon, its sessions on a host.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use crate::lab::{Host, bounded, run};

/// Memory that a daemon may keep of any amount of work, in KiB: allocators give little back.
const MEMORY_MARGIN: u64 = 32 << 10;
/// Threads for blocking calls that a daemon may keep: now and then it has use for one, and each in turn is kept by that.
const THREADS_MARGIN: u64 = 3;
/// Threads for blocking calls end when they had nothing to do for ten seconds; beyond that only what a busy machine adds.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);

/// Figures of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub threads: u64,
    pub descriptors: usize,
    pub resident_kib: u64,
}

impl Usage {
    pub fn of(pid: i32) -> Self {
        let status = status_of(pid);
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        Self { threads: field(&status, "Threads:"), descriptors, resident_kib: field(&status, "VmRSS:") }
    }

    /// The most memory that the process ever had resident.
    pub fn peak_kib(pid: i32) -> u64 {
        field(&status_of(pid), "VmHWM:")
    }
}

fn status_of(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_else(|e| panic!("process {pid}: {e}"))
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name} in {status}"));
    line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{name} {line}"))
}

/// Figures of one daemon at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaemonCounts {
    usage: Usage,
    /// Tasks of its runtime that have not ended.
    tasks: u64,
}

impl DaemonCounts {
    /// When nobody calls it and its links stand: what it is compared with later.
    pub async fn of(daemon: &Daemon) -> Self {
        let addr = daemon.metrics_addr().unwrap_or_else(|| panic!("no address of metrics in {}", daemon.log_path().display()));
        let response = reqwest::get(format!("http://{addr}/metrics")).await.expect("metrics are served");
        let text = response.text().await.expect("a body");
        let tasks = text.lines().find_map(|line| line.strip_prefix("kvm2_tasks ")?.parse().ok());
        Self { usage: Usage::of(daemon.pid()), tasks: tasks.unwrap_or_else(|| panic!("no kvm2_tasks in {text}")) }
    }

    /// What there is more of than there was, once the daemon had time to let go of what it no longer needs.
    pub async fn grown(self, daemon: &Daemon) -> Vec<String> {
        let start = Instant::now();
        loop {
            let more = self.less_than(&Self::of(daemon).await);
            if more.is_empty() || start.elapsed() > SETTLES_WITHIN {
                return more;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }

    fn less_than(&self, now: &Self) -> Vec<String> {
        let figures = [
            ("threads", self.usage.threads, now.usage.threads, THREADS_MARGIN),
            ("descriptors", self.usage.descriptors as u64, now.usage.descriptors as u64, 0),
            ("tasks", self.tasks, now.tasks, 0),
            ("KiB resident", self.usage.resident_kib, now.usage.resident_kib, MEMORY_MARGIN),
        ];
        let more = figures.into_iter().filter(|(_, before, now, margin)| *now > before + margin);
        more.map(|(what, before, now, _)| format!("{now} {what}, {before} before")).collect()
    }
}

/// Figures of one host at one moment, whoever uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCounts {
    sessions: usize,
    clients: usize,
    things: Vec<String>,
}

impl HostCounts {
    /// An error where libvirtd does not answer.
    pub fn of(host: &Host) -> Result<Self, String> {
        let mut things = host.try_virsh(&["list", "--all", "--name"])?.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        things.extend(host.volumes("default"));
        Ok(Self { sessions: ssh_sessions(host).len(), clients: libvirt_clients(host)?, things })
    }

    /// What there is more of now than there was before.
    pub fn less_than(&self, now: &Self) -> Vec<String> {
        let mut more: Vec<_> = now.things.iter().filter(|thing| !self.things.contains(thing)).cloned().collect();
        if now.sessions > self.sessions {
            more.push(format!("{} SSH processes, {} before", now.sessions, self.sessions));
        }
        if now.clients > self.clients {
            more.push(format!("{} clients of libvirtd, {} before", now.clients, self.clients));
        }
        more
    }
}

/// Processes of SSH connections to a host, its listener not counted.
pub fn ssh_sessions(host: &Host) -> Vec<i32> {
    let listener = host.pid("sshd");
    let Ok(namespace) = fs::metadata(&host.mount_ns) else { return Vec::new() };
    let processes = fs::read_dir("/proc").expect("reading /proc").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter(|pid: &i32| Some(*pid) != listener)
        .filter(|pid| fs::metadata(format!("/proc/{pid}/ns/mnt")).is_ok_and(|ns| ns.ino() == namespace.ino()))
        .filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with("sshd")))
        .collect()
}

/// Clients that libvirtd of a host has at the moment.
pub fn libvirt_clients(host: &Host) -> Result<usize, String> {
    let socket = host.uri.split_once("socket=").map(|(_, path)| Path::new(path)).ok_or("the lab's uri has a socket")?;
    let admin = socket.with_file_name("libvirt-admin-sock");
    let uri = format!("libvirtd:///system?socket={}", admin.display());
    let table = run(bounded("virt-admin").args(["-c", &uri, "client-list", "libvirtd"]))?;
    // two lines of heading
    Ok(table.lines().skip(2).filter(|line| !line.trim().is_empty()).count())
}

/// Whether a process still is there.
pub fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}
