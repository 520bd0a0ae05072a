//! What must not grow: threads, descriptors and memory of a daemon, its sessions on a host.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::lab::{Host, bounded, run};

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
