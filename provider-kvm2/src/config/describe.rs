//! The configuration as `config check` shows it: for people, without secrets.

use std::fmt::{self, Write};

use super::url_policy::PlainHttp;
use super::{Config, DigestPolicy, Entry, Firmware, GuestAgent, HostKeys, NetworkConfig, PoolReserve};

/// Every entry with its hosts, images and machine types, and what a person should know.
pub fn describe(config: &Config) -> String {
    let mut out = String::new();
    for entry in &config.entries {
        // writing into a String does not fail
        let _ = describe_entry(&mut out, entry);
    }
    out
}

fn describe_entry(out: &mut String, e: &Entry) -> fmt::Result {
    writeln!(out, "entry {}", e.name)?;
    writeln!(out, "  ssh key file     {}", e.ssh_key_file.display())?;
    match &e.host_keys {
        HostKeys::KnownHosts(file) => writeln!(out, "  known hosts file {}", file.display())?,
        HostKeys::Ignored => writeln!(out, "  known hosts file none: host keys are not checked")?,
    }
    writeln!(out, "  virtual machines {}, cpu {}, machine {}, disk {} GiB", e.virt_type.as_str(), e.cpu_mode, e.machine, e.disk_size_gib)?;
    let agent = match e.guest_agent {
        GuestAgent::Install => "installed",
        GuestAgent::Leave => "left to the image",
    };
    let network = match e.network_config {
        NetworkConfig::Written => "written",
        NetworkConfig::Omitted => "left to the image",
    };
    let vendor = e.vendor_data.as_ref().map_or("none".to_owned(), |v| format!("{} bytes", v.len()));
    writeln!(out, "  seed             guest agent {agent}, network config {network}, vendor data {vendor}")?;
    let reserve = match e.pool_reserve {
        PoolReserve::FivePercent => "5 %".to_owned(),
        PoolReserve::Bytes(n) => format!("{} GiB", n >> 30),
    };
    writeln!(out, "  storage          {reserve} of a pool stay free, images up to {} GiB", e.max_image_bytes >> 30)?;
    let digests = match e.digests {
        DigestPolicy::Optional => "optional",
        DigestPolicy::Required => "required",
    };
    let http = match e.url_policy.http {
        PlainHttp::AllowListed => "https",
        PlainHttp::Anywhere => "https or http",
    };
    write!(out, "  images by URL    {http} from public addresses")?;
    for (n, allowed) in e.url_policy.allow.iter().enumerate() {
        write!(out, "{}{allowed}", if n == 0 { " and from " } else { ", " })?;
    }
    writeln!(out, "; digests {digests}")?;
    let b = &e.budgets;
    writeln!(
        out,
        "  budgets          dial {:?}, call {:?}, start {:?}, allocate {:?}, uploadSmall {:?}, uploadImage {:?}, settle {:?}",
        b.dial, b.call, b.start, b.allocate, b.upload_small, b.upload_image, b.settle
    )?;
    for h in &e.hosts {
        writeln!(out, "  host {}: {}@{}, socket {}, pool {}, bridge {}", h.name, h.user, h.endpoint(), h.socket, h.pool, h.bridge)?;
    }
    for (key, image) in &e.images {
        let firmware = match image.firmware {
            Firmware::Uefi => "uefi",
            Firmware::Bios => "bios",
        };
        let digest = image.sha256.as_ref().map_or("no digest".to_owned(), |d| format!("sha256 {d}"));
        writeln!(out, "  image {key}: {} ({}, {firmware}, {digest})", image.url.redacted(), image.format.as_str())?;
    }
    for (key, m) in &e.machine_types {
        writeln!(out, "  machine type {key}: {} vCPU, {} MiB", m.vcpus, m.memory_mib)?;
    }
    for warning in &e.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    Ok(())
}
