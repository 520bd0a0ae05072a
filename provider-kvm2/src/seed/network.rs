//! `meta-data` and `network-config`: who the guest is and how its NIC is set up.

use sha2::{Digest as _, Sha256};

use crate::domain::VmName;

/// Longest host name that Linux takes as one label.
const MAX_LABEL: usize = 63;
/// Hex digits that keep two shortened names apart.
const SUFFIX: usize = 8;

/// Instance id and host name. The instance id never changes, so a reboot is never taken for a new
/// instance. Both are quoted: a name like `1e3` is no number.
pub fn meta_data(name: &VmName) -> String {
    format!("instance-id: \"{name}\"\nlocal-hostname: \"{}\"\n", hostname(name))
}

/// Netplan version 2: our NIC by its MAC, DHCP, and a client id made of that MAC, since clones of an
/// image with a baked machine-id otherwise share one and get one address. IPv6 is left to router
/// advertisements, which are on unless told otherwise.
pub fn config(mac: &str) -> String {
    // the key is the device name for renderers that cannot match by MAC; it renames nothing
    format!("version: 2\nethernets:\n  eth0:\n    match:\n      macaddress: \"{mac}\"\n    dhcp4: true\n    dhcp-identifier: mac\n")
}

/// The name where it is a host name of one label; else made one, with a hash so that two names stay
/// two. A dot would make the rest a domain, and `a.x` and `a.y` one host for DHCP.
fn hostname(name: &VmName) -> String {
    let name = name.as_str();
    let label: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
    if label == name && label.len() <= MAX_LABEL {
        return label;
    }
    let stem: String = label.chars().take(MAX_LABEL - SUFFIX - 1).collect();
    let mut hash = hex::encode(Sha256::digest(name.as_bytes()));
    hash.truncate(SUFFIX);
    format!("{}-{hash}", stem.trim_end_matches('-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> VmName {
        VmName::parse(text).expect("a valid name")
    }

    #[test]
    fn an_ordinary_name_is_instance_id_and_host_name() {
        assert_eq!(meta_data(&name("egress-1")), "instance-id: \"egress-1\"\nlocal-hostname: \"egress-1\"\n");
    }

    #[test]
    fn names_that_yaml_takes_for_something_else_stay_text() {
        for text in ["123", "1e3", "null", "true", "0x1f"] {
            let yaml: serde_json::Value = serde_saphyr::from_str(&meta_data(&name(text))).expect("YAML");
            assert_eq!(yaml["instance-id"], serde_json::json!(text));
            assert_eq!(yaml["local-hostname"], serde_json::json!(text));
        }
    }

    #[test]
    fn names_that_differ_after_a_dot_or_late_are_different_hosts() {
        let long = "a".repeat(70);
        let hosts: Vec<_> = ["a.x", "a.y", "a-x", "A-x", &format!("{long}1"), &format!("{long}2")].map(|n| hostname(&name(n))).into();
        let unique: std::collections::HashSet<_> = hosts.iter().collect();
        assert_eq!(unique.len(), hosts.len(), "{hosts:?}");
    }

    #[test]
    fn the_network_configuration_matches_our_nic_and_identifies_by_mac() {
        let yaml: serde_json::Value = serde_saphyr::from_str(&config("52:00:00:00:00:01")).expect("YAML");
        let expected = serde_json::json!({"version": 2, "ethernets": {"eth0": {
            "match": {"macaddress": "52:00:00:00:00:01"}, "dhcp4": true, "dhcp-identifier": "mac"}}});
        assert_eq!(yaml, expected);
    }

    proptest! {
        #[test]
        fn a_host_name_is_one_label(text in "[a-zA-Z0-9]([a-zA-Z0-9._-]{0,238}[a-zA-Z0-9])?") {
            let Ok(name) = VmName::parse(&text) else { return Ok(()) };
            let host = hostname(&name);
            prop_assert!(!host.is_empty() && host.len() <= MAX_LABEL);
            prop_assert!(host.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'), "{}", host);
            prop_assert!(!host.starts_with('-') && !host.ends_with('-'));
        }
    }
}
