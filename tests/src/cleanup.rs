//! Nothing that a test made on a host outlives it, whether it passes, panics or was killed the last time.

use crate::lab::Host;

/// Removes, now and when dropped, every domain whose name begins with a prefix, the volumes of
/// such domains, and the base images of one provider entry, on some hosts.
#[derive(Debug)]
pub struct Cleanup {
    hosts: Vec<Host>,
    prefix: String,
    base_prefix: String,
}

impl Cleanup {
    /// Sweeps what an earlier run left before it promises to sweep what this one leaves.
    pub fn of(hosts: Vec<Host>, prefix: &str, entry: &str) -> Self {
        let cleanup = Self { hosts, prefix: prefix.to_owned(), base_prefix: format!("base-{entry}-") };
        cleanup.sweep();
        cleanup
    }

    /// Goes on after each failure: what can be removed is.
    fn sweep(&self) {
        for host in &self.hosts {
            if let Err(why) = self.sweep_host(host) {
                eprintln!("cleanup of {}: {why}", host.name);
            }
        }
    }

    fn sweep_host(&self, host: &Host) -> Result<(), String> {
        for domain in host.try_virsh(&["list", "--all", "--name"])?.split_whitespace().filter(|d| d.starts_with(&self.prefix)) {
            // fails for one that does not run
            let _ = host.try_virsh(&["destroy", domain]);
            // fails for one that was transient and is gone
            let _ = host.try_virsh(&[
                "undefine",
                domain,
                "--nvram",
                "--managed-save",
                "--snapshots-metadata",
                "--checkpoints-metadata",
                "--tpm",
            ]);
        }
        for pool in host.try_virsh(&["pool-list", "--name"])?.split_whitespace() {
            let _ = host.try_virsh(&["pool-refresh", pool]);
            for volume in host.try_virsh(&["vol-list", pool])?.lines().filter_map(|line| line.split_whitespace().next()) {
                if volume.starts_with(&self.prefix) || volume.starts_with(&self.base_prefix) {
                    host.try_virsh(&["vol-delete", volume, "--pool", pool])?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        self.sweep();
    }
}
