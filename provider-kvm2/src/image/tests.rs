//! What the tests of this module share.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::{DigestPolicy, Entry, GuestAgent, Host, HostKeys, NetworkConfig, PoolReserve, UrlPolicy, VirtType};
use crate::hypervisor::Budgets;

pub(crate) fn entry() -> Arc<Entry> {
    Arc::new(Entry {
        name: "lab".into(),
        ssh_key_file: "key".into(),
        host_keys: HostKeys::Ignored,
        disk_size_gib: 10,
        vendor_data: None,
        guest_agent: GuestAgent::Leave,
        network_config: NetworkConfig::Omitted,
        images: BTreeMap::new(),
        machine_types: BTreeMap::new(),
        hosts: vec![host()],
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".into(),
        machine: "q35".into(),
        pool_reserve: PoolReserve::FivePercent,
        max_image_bytes: 4 << 20,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Budgets::default(),
        warnings: Vec::new(),
    })
}

pub(crate) fn host() -> Host {
    Host {
        name: "hv1".into(),
        address: "192.0.2.1".into(),
        port: 22,
        user: "kvm2".into(),
        socket: "/run/libvirt/libvirt-sock".into(),
        pool: "default".into(),
        bridge: "br0".into(),
    }
}
