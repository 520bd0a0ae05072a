//! Short texts of callers and guests.

use std::collections::HashSet;
use std::net::IpAddr;

use serde_json::Value;

use crate::config::is_identifier;
use crate::domain::addresses::{AddressSource, GuestInterface, MAX_ADDRESSES, Reading, select};
use crate::domain::names::VolumeRole;
use crate::domain::{InstanceId, VmName};
use crate::error::MAX_FOREIGN_TEXT;

/// One id, or name of a volume, a line.
pub(super) fn instance_id(input: &[u8]) {
    for line in String::from_utf8_lossy(input).split('\n') {
        if let Ok(id) = InstanceId::parse(line) {
            assert_eq!(id.to_string(), line, "an id has one spelling");
            assert!(is_identifier(&id.host));
            name(id.name.as_str());
        }
        if let Some((vm, role)) = VmName::of_volume(line) {
            name(vm.as_str());
            let volume = match role {
                VolumeRole::Overlay => vm.overlay_volume(),
                VolumeRole::Seed => vm.seed_volume(),
            };
            assert_eq!(volume, line, "a volume leads to the VM that has it");
        }
        if let Ok(new) = VmName::parse_new(line) {
            assert!(!new.as_str().bytes().any(|b| b.is_ascii_uppercase() || b == b'_'));
        }
    }
}

/// Fit for a file name and for one segment of a path, whoever puts it there.
fn name(text: &str) {
    assert!((1..=240).contains(&text.len()), "{} bytes", text.len());
    assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)), "{text:?}");
    assert!(!text.starts_with(['.', '-', '_']) && !text.ends_with(['.', '-', '_']) && !text.starts_with("base-"), "{text:?}");
}

/// The answer of a guest agent to `guest-network-get-interfaces`, as libvirt passes it on.
pub(super) fn agent_reply(input: &[u8]) {
    const MAC: &str = "52:00:00:aa:bb:01";
    let reply: Value = serde_json::from_slice(input).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(input).into_owned()));
    let agent = match reply.get("return").and_then(Value::as_array) {
        Some(interfaces) => interfaces.iter().map(interface).collect(),
        // libvirt would not let it pass; still, every text may be any of the three
        None => {
            let text = String::from_utf8_lossy(input);
            let lines: Vec<&str> = text.split('\n').collect();
            vec![GuestInterface::reported(lines[0], lines.get(1).unwrap_or(&MAC), &lines)]
        }
    };
    for interface in &agent {
        for text in [&interface.name, &interface.mac] {
            assert!(text.len() <= MAX_FOREIGN_TEXT && !text.chars().any(char::is_control), "{text:?}");
        }
    }
    let lease = vec![GuestInterface::reported("vnet0", MAC, &["192.168.1.5/24", "192.168.1.5"])];
    for readings in [
        vec![(AddressSource::Agent, Some(agent.clone()))],
        vec![(AddressSource::Agent, Some(agent.clone())), (AddressSource::Lease, Some(lease)), (AddressSource::Arp, None)],
    ] {
        match select(MAC, &readings) {
            Reading::Found(list) => {
                assert!(list[0].primary && list[0].ip.is_ipv4() && list[0].mac == MAC, "{:?}", list[0]);
                assert_eq!(list.iter().filter(|a| a.primary).count(), 1);
                addresses(list.into_iter().map(|a| (a.ip, a.mac)).collect());
            }
            Reading::NoIpv4(list) => {
                assert!(list.iter().all(|a| !a.primary && (a.ip.is_ipv6() || a.mac != MAC)), "{list:?}");
                addresses(list.into_iter().map(|a| (a.ip, a.mac)).collect());
            }
            other => panic!("the agent answered, yet: {other:?}"),
        }
    }
}

fn interface(reported: &Value) -> GuestInterface {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let addresses = reported.get("ip-addresses").and_then(Value::as_array).into_iter().flatten();
    let addresses: Vec<String> = addresses.map(|a| text(a.get("ip-address"))).collect();
    GuestInterface::reported(&text(reported.get("name")), &text(reported.get("hardware-address")), &addresses)
}

fn addresses(list: Vec<(IpAddr, String)>) {
    assert!(list.len() <= MAX_ADDRESSES);
    let mut seen = HashSet::new();
    for (ip, mac) in list {
        assert!(seen.insert(ip), "{ip} is listed twice");
        // an IPv4 address in IPv6 clothes is the same address
        let usable = match ip.to_canonical() {
            IpAddr::V4(a) => !(a.is_loopback() || a.is_link_local() || a.is_unspecified() || a.is_multicast() || a.is_broadcast()),
            IpAddr::V6(a) => !(a.is_loopback() || a.is_unicast_link_local() || a.is_unspecified() || a.is_multicast()),
        };
        assert!(usable, "{ip} leads nowhere");
        assert!(mac.is_empty() || mac.len() == 17 && mac.bytes().all(|b| b.is_ascii_hexdigit() || b == b':'), "{mac:?}");
    }
}
