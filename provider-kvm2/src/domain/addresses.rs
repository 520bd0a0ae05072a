//! A guest's addresses: which are its own, and which one a client should use.
//!
//! A guest may have more networks than the one it was given (docker0, wg0); only
//! the NIC whose MAC we chose is its own. A source that cannot be read says
//! nothing: "could not be read" and "has none" are different answers.

use std::collections::HashSet;
use std::net::IpAddr;

use crate::error::bounded;

/// Most addresses that are reported; its own NIC's come first.
pub const MAX_ADDRESSES: usize = 64;

/// Where libvirt looks for a guest's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressSource {
    Agent,
    Lease,
    Arp,
}

/// One network interface as one source reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestInterface {
    pub name: String,
    /// As reported; compare without regard to case.
    pub mac: String,
    pub addresses: Vec<IpAddr>,
}

impl GuestInterface {
    /// From what a source says, which is anything: a guest agent's words pass through libvirt as they are.
    /// What is no address is left out, texts are bounded.
    pub fn reported(name: &str, mac: &str, addresses: &[impl AsRef<str>]) -> Self {
        // an IPv4 address in IPv6 clothes is the IPv4 address: loopback stays loopback
        let addresses = addresses.iter().filter_map(|text| Some(text.as_ref().parse::<IpAddr>().ok()?.to_canonical())).collect();
        Self { name: bounded(name), mac: bounded(mac), addresses }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    pub source: AddressSource,
    /// Lower case; empty where the source's is no MAC.
    pub mac: String,
    /// The one a client should use.
    pub primary: bool,
}

/// What the sources say together. Lists hold no loopback, link-local, unspecified, multicast or
/// broadcast address, each address once, the own NIC's first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// Its NIC has an IPv4 address; the first of the list is the primary.
    Found(Vec<Address>),
    /// The guest answered, or other addresses are known, and its NIC has no IPv4 address.
    NoIpv4(Vec<Address>),
    /// A source answered and knows nothing; `agent_failed` if the guest agent was asked in vain.
    NotYet { agent_failed: bool },
    /// No source could be read: nothing is known, least of all that it has none.
    Unreadable,
}

/// Puts readings together, best source first; None is a source that could not be read. `mac` is
/// that of the NIC we gave to the guest.
pub fn select(mac: &str, readings: &[(AddressSource, Option<Vec<GuestInterface>>)]) -> Reading {
    if readings.iter().all(|(_, reading)| reading.is_none()) {
        return Reading::Unreadable;
    }
    let mut found = Vec::new();
    for (source, interfaces) in readings.iter().filter_map(|(source, r)| Some((*source, r.as_ref()?))) {
        for interface in interfaces {
            let own = interface.mac.trim().eq_ignore_ascii_case(mac.trim());
            for ip in interface.addresses.iter().copied().filter(is_usable) {
                found.push((own, Address { ip, source, mac: mac_text(&interface.mac), primary: false }));
            }
        }
    }
    // stable: within a rank the order of the sources, and of the guest, is kept
    found.sort_by_key(|(own, address)| (!own, address.ip.is_ipv6()));
    let mut seen = HashSet::new();
    found.retain(|(_, address)| seen.insert(address.ip));
    found.truncate(MAX_ADDRESSES);

    let has_ipv4 = found.first().is_some_and(|(own, address)| *own && address.ip.is_ipv4());
    let mut addresses: Vec<Address> = found.into_iter().map(|(_, address)| address).collect();
    let agent = readings.iter().find(|(source, _)| *source == AddressSource::Agent).map(|(_, reading)| reading.is_some());
    match addresses.first_mut() {
        Some(first) if has_ipv4 => {
            first.primary = true;
            Reading::Found(addresses)
        }
        None if agent != Some(true) => Reading::NotYet { agent_failed: agent == Some(false) },
        Some(_) | None => Reading::NoIpv4(addresses),
    }
}

fn is_usable(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !(v4.is_loopback() || v4.is_link_local() || v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast()),
        IpAddr::V6(v6) => !(v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified() || v6.is_multicast()),
    }
}

fn mac_text(reported: &str) -> String {
    let mac = reported.trim().to_ascii_lowercase();
    if super::host_xml::is_mac(&mac) { mac } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const MAC: &str = "52:00:00:00:00:01";

    fn nic(name: &str, mac: &str, addresses: &[&str]) -> GuestInterface {
        let addresses = addresses.iter().map(|a| a.parse().expect("an address")).collect();
        GuestInterface { name: name.to_owned(), mac: mac.to_owned(), addresses }
    }

    fn ips(addresses: &[Address]) -> Vec<String> {
        addresses.iter().map(|a| format!("{}{}", a.ip, if a.primary { "*" } else { "" })).collect()
    }

    fn agent(interfaces: Vec<GuestInterface>) -> Reading {
        select(MAC, &[(AddressSource::Agent, Some(interfaces)), (AddressSource::Arp, Some(vec![]))])
    }

    #[test]
    fn the_primary_is_on_the_own_nic_though_others_come_first() {
        let reading = agent(vec![
            nic("lo", "00:00:00:00:00:00", &["127.0.0.1", "::1"]),
            nic("docker0", "02:42:00:00:00:01", &["172.17.0.1"]),
            nic("enp1s0", &MAC.to_ascii_uppercase(), &["fe80::1", "2001:db8::5", "169.254.1.1", "192.168.1.5", "192.168.1.6"]),
            nic("wg0", "", &["10.0.0.1"]),
        ]);
        let Reading::Found(addresses) = reading else { panic!("{reading:?}") };
        assert_eq!(ips(&addresses), ["192.168.1.5*", "192.168.1.6", "2001:db8::5", "172.17.0.1", "10.0.0.1"]);
        assert_eq!(addresses[0].mac, MAC);
        assert_eq!(addresses[4].mac, "");
    }

    #[test]
    fn an_ipv4_address_in_ipv6_clothes_is_what_it_is() {
        let reported =
            GuestInterface::reported("enp1s0", MAC, &["::ffff:127.0.0.1", "::ffff:169.254.0.1", "::ffff:192.168.1.5", "192.168.1.5", "x"]);
        let Reading::Found(addresses) = agent(vec![reported]) else { panic!("it has an address") };
        assert_eq!(ips(&addresses), ["192.168.1.5*"]);
    }

    #[test]
    fn only_foreign_addresses_are_no_address() {
        let reading = agent(vec![nic("docker0", "02:42:00:00:00:01", &["172.17.0.1"])]);
        let Reading::NoIpv4(addresses) = reading else { panic!("{reading:?}") };
        assert_eq!(ips(&addresses), ["172.17.0.1"]);
    }

    #[test]
    fn an_ipv6_only_guest_has_no_primary() {
        let reading = agent(vec![nic("enp1s0", MAC, &["2001:db8::5"])]);
        let Reading::NoIpv4(addresses) = reading else { panic!("{reading:?}") };
        assert_eq!(ips(&addresses), ["2001:db8::5"]);
    }

    #[test]
    fn an_address_of_two_sources_is_listed_once_from_the_better_one() {
        let own = || vec![nic("vnet0", MAC, &["192.168.1.5"])];
        let reading = select(MAC, &[(AddressSource::Agent, None), (AddressSource::Lease, Some(own())), (AddressSource::Arp, Some(own()))]);
        let expected =
            Address { ip: "192.168.1.5".parse().expect("an address"), source: AddressSource::Lease, mac: MAC.to_owned(), primary: true };
        assert_eq!(reading, Reading::Found(vec![expected]));
    }

    #[rstest]
    #[case::booting(&[(AddressSource::Agent, false), (AddressSource::Arp, true)], Reading::NotYet { agent_failed: true })]
    #[case::agent_not_asked(&[(AddressSource::Arp, true)], Reading::NotYet { agent_failed: false })]
    #[case::agent_answers(&[(AddressSource::Agent, true), (AddressSource::Arp, false)], Reading::NoIpv4(vec![]))]
    #[case::all_failed(&[(AddressSource::Agent, false), (AddressSource::Lease, false), (AddressSource::Arp, false)], Reading::Unreadable)]
    #[case::nothing_asked(&[], Reading::Unreadable)]
    fn no_address_has_its_cause(#[case] sources: &[(AddressSource, bool)], #[case] expected: Reading) {
        let readings: Vec<_> = sources.iter().map(|(source, read)| (*source, read.then(Vec::new))).collect();
        assert_eq!(select(MAC, &readings), expected);
    }

    #[test]
    fn the_own_address_is_kept_when_the_list_is_cut() {
        let mut interfaces: Vec<_> = (0..200).map(|n| nic("veth", "02:00:00:00:00:02", &[&format!("10.0.0.{n}")])).collect();
        interfaces.push(nic("enp1s0", MAC, &["192.168.1.5"]));
        let Reading::Found(addresses) = agent(interfaces) else { panic!("its own address was lost") };
        assert_eq!((addresses.len(), addresses[0].ip.to_string()), (MAX_ADDRESSES, "192.168.1.5".to_owned()));
    }

    proptest! {
        #[test]
        fn a_primary_is_an_ipv4_of_the_own_nic(foreign in proptest::collection::vec(any::<IpAddr>(), 0..8), own in proptest::collection::vec(any::<IpAddr>(), 0..8)) {
            let interfaces = vec![
                GuestInterface { name: "x".to_owned(), mac: "02:00:00:00:00:09".to_owned(), addresses: foreign },
                GuestInterface { name: "y".to_owned(), mac: MAC.to_owned(), addresses: own.clone() },
            ];
            match agent(interfaces) {
                Reading::Found(list) => {
                    prop_assert!(list[0].primary && list[0].ip.is_ipv4() && own.contains(&list[0].ip));
                    prop_assert_eq!(list.iter().filter(|a| a.primary).count(), 1);
                }
                Reading::NoIpv4(list) => prop_assert!(list.iter().all(|a| !a.primary)),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
