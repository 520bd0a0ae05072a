//! Configurations for tests of this module.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::{
    Config, DigestPolicy, Entry, GuestAgent, Host, HostKeys, MachineType, NetworkConfig, PoolReserve, UrlPolicy, VirtType,
};

pub(crate) fn entry(name: &str, hosts: &[&str]) -> Entry {
    Entry {
        name: name.into(),
        ssh_key_file: "/nowhere/key".into(),
        host_keys: HostKeys::Ignored,
        disk_size_gib: 10,
        vendor_data: None,
        guest_agent: GuestAgent::Install,
        network_config: NetworkConfig::Written,
        images: BTreeMap::new(),
        machine_types: BTreeMap::from([("small".to_owned(), MachineType { vcpus: 1, memory_mib: 512 })]),
        hosts: hosts.iter().map(|h| host(h)).collect(),
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".into(),
        machine: "q35".into(),
        pool_reserve: PoolReserve::FivePercent,
        max_image_bytes: 20 << 30,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Default::default(),
        warnings: Vec::new(),
    }
}

fn host(name: &str) -> Host {
    Host {
        name: name.into(),
        address: "198.51.100.7".into(),
        port: 22,
        user: "kvm".into(),
        socket: "/run/libvirt/libvirt-sock".into(),
        pool: "default".into(),
        bridge: "br0".into(),
    }
}

pub(crate) fn config(entries: &[(&str, &[&str])]) -> Config {
    Config { entries: entries.iter().map(|(name, hosts)| Arc::new(entry(name, hosts))).collect() }
}
