//! A pool with a file system of its own that has room for a VM, and that can be filled: the lab's `small` has not.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use lab_tests::lab::Host;

pub(super) const POOL: &str = "kt-room";
const PATH: &str = "/var/lib/libvirt/kt-room";
/// Above what a VM of the tests may take, 1 GiB.
const SIZE: &str = "size=1300m,mode=711";

/// Gone when dropped, with all that is in it.
#[derive(Debug)]
pub(super) struct Room(Host);

impl Room {
    pub(super) fn on(host: &Host) -> Self {
        let room = Self(host.clone());
        // what a killed test left
        room.remove();
        for command in [&["mkdir", "-p", PATH][..], &["mount", "-t", "tmpfs", "-o", SIZE, POOL, PATH]] {
            assert!(room.in_host(command), "{command:?}");
        }
        room.0.virsh(&["pool-define-as", POOL, "dir", "--target", PATH]);
        room.0.virsh(&["pool-start", POOL]);
        room
    }

    fn in_host(&self, command: &[&str]) -> bool {
        let mut nsenter = Command::new("nsenter");
        nsenter.arg(format!("--mount={}", self.0.mount_ns.display())).args(command);
        nsenter.output().is_ok_and(|done| done.status.success())
    }

    fn remove(&self) {
        for action in ["pool-destroy", "pool-undefine"] {
            let _ = self.0.try_virsh(&[action, POOL]);
        }
        self.in_host(&["umount", PATH]);
    }

    /// A file of the pool as this machine sees it.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{PATH}/{name}", self.0.pid("libvirtd").expect("libvirtd runs")))
    }

    /// Takes all the room there is, behind libvirt's back, until dropped.
    pub(super) fn fill(&self) -> Filled {
        let path = self.path("filler");
        let mut file = File::create(&path).expect("a file in the pool");
        let filled = Filled(path);
        for part in [1 << 20, 4 << 10] {
            let zeros = vec![0; part];
            // the error is that there is no more room
            while file.write_all(&zeros).is_ok() {}
        }
        filled
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.remove();
    }
}

#[derive(Debug)]
pub(super) struct Filled(PathBuf);

impl Drop for Filled {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.0) {
            eprintln!("{}: {e}", self.0.display());
        }
    }
}
