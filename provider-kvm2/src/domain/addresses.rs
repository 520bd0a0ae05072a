//! A guest's addresses: which are its own, and which one a client should use.

use std::net::IpAddr;

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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    pub source: AddressSource,
    pub mac: String,
    /// The one a client should use.
    pub primary: bool,
}
