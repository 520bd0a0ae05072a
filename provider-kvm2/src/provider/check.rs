//! Check: one row per host, on a link of its own, never longer than asked.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::time::Instant;

use super::{HostCheck, HostDetails, Provider, placement, preflight, sites};
use crate::config::{Entry, Firmware, Host};
use crate::error::{ProviderError, Reason, Result, bounded_to};
use crate::hypervisor::{HostId, Hypervisor, PoolInfo};
use crate::image::mounted;

/// Hosts asked at a time: a round over many hosts must not open all their sessions at once.
const FAN_OUT: usize = 16;
/// What an unset timeout means.
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

impl Provider {
    pub(super) async fn check_hosts(&self, entry: &str, timeout: Duration) -> Result<Vec<HostCheck>> {
        let entry = placement::entry(&self.config.current(), entry)?;
        let timeout = if timeout.is_zero() { DEFAULT_TIMEOUT } else { timeout };
        let deadline = Instant::now() + timeout;
        let share = share(timeout, entry.hosts.len());
        let rows = stream::iter(entry.hosts.iter().cloned())
            .map(|host| self.check_host(entry.clone(), host, share, deadline))
            .buffered(FAN_OUT)
            .collect()
            .await;
        Ok(rows)
    }

    async fn check_host(&self, entry: Arc<Entry>, host: Host, share: Duration, deadline: Instant) -> HostCheck {
        let started = Instant::now();
        let deadline = deadline.min(started + share);
        let mut details =
            HostDetails { user: host.user.clone(), pool: host.pool.clone(), warnings: entry.warnings.clone(), ..HostDetails::default() };
        let id = HostId { entry: entry.name.clone(), host: host.name.clone() };
        let mut link = None;
        let outcome = async {
            // a dial that comes to this deadline tells how far it came: the path, sshd, or only libvirtd
            let hv = link.insert(self.sites.connect().dedicated_by(&id, deadline).await?);
            tokio::time::timeout_at(deadline, probe(&**hv, &entry, &host, &mut details)).await.unwrap_or_else(|_| {
                let ms = deadline.duration_since(started).as_millis();
                let text = format!("host {} did not answer all questions within the check's {ms} ms", host.name);
                Err(ProviderError::new(Reason::CallTimeout, text))
            })
        }
        .await;
        let latency = started.elapsed();
        if let Some(hv) = link {
            hv.close();
        }
        let problem = outcome.err().map(|e| e.on_host(&host.name).during("check"));
        if let Some(error) = &problem {
            tracing::debug!(host = %host.name, reason = error.reason().wire_name(), error = %error.chain(), "kvm2 host check failed");
        }
        let remediation = problem.as_ref().map(|e| remediation(e, &host, &entry)).unwrap_or_default();
        HostCheck { host: host.name.clone(), address: host.endpoint(), latency, problem, remediation, details }
    }
}

/// What one host gets of a round, so that each has its turn however many before it are silent.
fn share(timeout: Duration, hosts: usize) -> Duration {
    let turns = u32::try_from(hosts.div_ceil(FAN_OUT)).unwrap_or(u32::MAX);
    timeout / turns.max(1)
}

async fn probe(hv: &dyn Hypervisor, entry: &Entry, host: &Host, details: &mut HostDetails) -> Result<()> {
    let (version, hypervisor, hostname, node) = tokio::join!(hv.lib_version(), hv.hypervisor_version(), hv.hostname(), hv.node_info());
    details.libvirt_version = dotted(version?);
    details.hypervisor_version = dotted(hypervisor?);
    details.hostname = bounded_to(&hostname?, 255);
    let node = node?;
    details.cpus = node.cpus;
    details.memory_mib = node.memory_kib / 1024;

    let (pool, able) = tokio::join!(probe_pool(hv, host), probe_abilities(hv, entry, host));
    let info = pool.map_err(|e| sites::pool_error(e, host));
    if let Ok(info) = &info {
        details.pool_state = pool_state(info.state).to_owned();
        details.pool_capacity_bytes = info.capacity;
        details.pool_reserve_bytes = entry.pool_reserve.bytes(info.capacity);
        // what Create can use: it leaves the reserve alone
        details.pool_available_bytes = info.available.saturating_sub(details.pool_reserve_bytes);
    }
    let (emulator, able) = able;
    details.emulator = emulator;
    let info = info?;
    if info.state != PoolInfo::RUNNING {
        return Err(ProviderError::new(Reason::PoolNotActive, sites::not_active(host)));
    }
    able?;
    require_mounted(hv, host).await?;
    if details.pool_available_bytes < entry.disk_bytes() {
        details.warnings.push(format!(
            "pool {} has no room for another VM: {} MiB available, {} MiB more kept in reserve",
            host.pool,
            details.pool_available_bytes >> 20,
            details.pool_reserve_bytes >> 20
        ));
    }
    Ok(())
}

async fn probe_pool(hv: &dyn Hypervisor, host: &Host) -> Result<PoolInfo> {
    let pool = hv.lookup_pool(&host.pool).await?;
    let info = hv.pool_info(&pool).await?;
    if info.state != PoolInfo::RUNNING {
        return Ok(info);
    }
    // the number that Create decides by is a fresh one; a pool busy with uploads keeps the last
    match hv.refresh_pool(&pool).await.map_err(ProviderError::from) {
        Ok(()) => Ok(hv.pool_info(&pool).await?),
        Err(e) if e.reason() == Reason::LibvirtBusy => Ok(info),
        Err(e) => Err(e),
    }
}

async fn require_mounted(hv: &dyn Hypervisor, host: &Host) -> Result<()> {
    let pool = hv.lookup_pool(&host.pool).await?;
    let volumes = hv.list_volumes(&pool).await?;
    mounted::require(hv, host, &pool, &volumes).await
}

async fn probe_abilities(hv: &dyn Hypervisor, entry: &Entry, host: &Host) -> (String, Result<()>) {
    // an entry whose images all boot by BIOS needs no UEFI firmware
    let uefi = entry.images.is_empty() || entry.images.values().any(|i| i.firmware == Firmware::Uefi);
    let firmware = if uefi { Firmware::Uefi } else { Firmware::Bios };
    let (bridge, capabilities) = tokio::join!(preflight::require_bridge(hv, host), preflight::capabilities(hv, entry, host));
    match capabilities {
        Ok(capabilities) => {
            let able = preflight::require_firmware(&capabilities, entry, host, firmware).and(bridge);
            (capabilities.emulator, able)
        }
        Err(e) => (String::new(), Err(e)),
    }
}

/// libvirt's packed version: major × 1,000,000 + minor × 1,000 + release.
fn dotted(version: u64) -> String {
    format!("{}.{}.{}", version / 1_000_000, version / 1_000 % 1_000, version % 1_000)
}

fn pool_state(state: i32) -> &'static str {
    match state {
        0 => "inactive",
        1 => "building",
        PoolInfo::RUNNING => "running",
        3 => "degraded",
        4 => "inaccessible",
        _ => "unknown",
    }
}

/// One sentence that a person can act on.
fn remediation(error: &ProviderError, host: &Host, entry: &Entry) -> String {
    let Host { name, user, pool, bridge, socket, .. } = host;
    let endpoint = host.endpoint();
    match error.reason() {
        Reason::HostUnreachable | Reason::LinkLost => {
            format!("See that host {name} is up and that {endpoint} answers SSH from where this daemon runs.")
        }
        Reason::SshThrottled => format!("sshd on {name} refuses more sessions: raise MaxStartups and MaxSessions in its sshd_config."),
        Reason::SshAuthRejected => {
            format!("Add the public part of {} to authorized_keys of user {user} on {name}.", entry.ssh_key_file.display())
        }
        Reason::HostKeyUnknown => format!(
            "Add the host key of {endpoint} to the known_hosts file (ssh-keyscan -p {} {}), after comparing it on the host.",
            host.port, host.address
        ),
        Reason::HostKeyChanged => {
            format!("The key of {endpoint} is not the recorded one: find out why, and only then replace it in the known_hosts file.")
        }
        Reason::HostKeyRevoked => {
            format!("The key of {endpoint} is marked @revoked: give the host a new key, or remove the mark if it was a mistake.")
        }
        Reason::CredentialsUnavailable | Reason::KeyUnparsable | Reason::KeyEncrypted => {
            "Put a usable, unencrypted private key and a known_hosts file where sshKeyFile and knownHostsFile point.".to_owned()
        }
        Reason::SocketDenied => {
            format!("Let user {user} on {name} use {socket}: add it to the group that owns the socket (usually libvirt).")
        }
        Reason::SocketMissing => format!("Start libvirtd on {name}, or correct hosts[].socket: {socket} does not exist there."),
        Reason::StreamlocalForwardingDisabled => format!(
            "Set AllowStreamLocalForwarding yes and AllowTcpForwarding local for user {user} in sshd_config on {name} (OpenSSH forwards no socket where AllowTcpForwarding is no)."
        ),
        Reason::SocketUnavailable => {
            format!(
                "On {name}: start libvirtd, let user {user} use {socket}, and set AllowStreamLocalForwarding yes and AllowTcpForwarding local in sshd_config."
            )
        }
        Reason::PoolNotFound => format!(
            "Define the pool on {name}: virsh pool-define-as {pool} dir --target DIR && virsh pool-start {pool} && virsh pool-autostart {pool}."
        ),
        Reason::PoolNotActive => {
            format!(
                "On {name}: see that the file system of pool {pool} is mounted and writable, then virsh pool-start {pool} or pool-refresh {pool}."
            )
        }
        Reason::BridgeMissing => format!("Create bridge {bridge} on {name}, or correct hosts[].bridge."),
        Reason::KvmUnavailable => {
            format!("Enable virtualisation in the firmware of {name} and load the kvm module, or set virtType: qemu for this entry.")
        }
        Reason::FirmwareUnavailable => format!("Install the ovmf package on {name}."),
        Reason::MachineUnsupported => format!("Install qemu-system-x86 on {name}, or correct machine of this entry."),
        Reason::CallTimeout if error.operation() == Some("open") => format!(
            "sshd on {name} is sound and libvirtd does not answer: if it stays so, restart libvirtd there (systemctl restart libvirtd; guests go on running)."
        ),
        Reason::CallTimeout => format!("Host {name} is slow or hung: look at its load, and at libvirtd there."),
        Reason::LibvirtRestarting | Reason::LibvirtBusy => format!("libvirtd on {name} is busy or restarting; if it stays so, restart it."),
        _ => format!("Look at the log of libvirtd on {name} for the error shown."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_version_is_shown_with_dots() {
        assert_eq!(dotted(11_003_000), "11.3.0");
        assert_eq!(dotted(10_000_002), "10.0.2");
    }
}
