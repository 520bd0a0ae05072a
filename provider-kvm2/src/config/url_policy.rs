//! Which image URLs a request may name.
//!
//! The author of a request is not the author of the configuration, yet the daemon
//! fetches what he names, from inside our network. So by default only https and
//! public addresses are fetched. `urlPolicy.allow` opens private mirrors: by exact
//! host, by `*.suffix`, by address or CIDR. Nothing opens link-local, multicast and
//! reserved addresses or a cloud's metadata service; loopback takes an entry that
//! means it (an exact host, or a network inside loopback).
//!
//! [`UrlPolicy::check_url`] looks at the URL before any look-up, and at every
//! redirect's; [`UrlPolicy::check_addr`] at every address a host name turned out to
//! have, right before it is connected to. Catalogue URLs are not asked about.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ImageUrl;
use crate::error::bounded;

/// The default allows https to public addresses only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UrlPolicy {
    pub http: PlainHttp,
    pub allow: Vec<Allowed>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlainHttp {
    /// Only for what the allow-list names by host or by literal address.
    #[default]
    AllowListed,
    Anywhere,
}

/// One entry of the allow-list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// Lower case, without a trailing dot.
    Host(String),
    /// The suffix with its leading dot: `.example.net`.
    Subdomains(String),
    Network(Cidr),
}

/// A network; bits after the prefix are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    base: IpAddr,
    prefix: u8,
}

/// Why a URL is not fetched, and what would allow it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlRefusal {
    #[error("plain http is not allowed for {host}; use https, or add the host to urlPolicy.allow")]
    PlainHttp { host: String },
    #[error("only https URLs are fetched, not {scheme}")]
    Scheme { scheme: String },
    #[error("the URL of host {host} carries a user name or password; remove it")]
    UserInfo { host: String },
    #[error("{host} has no public address but {addr} ({kind}); add the host or its network to urlPolicy.allow")]
    NotPublic { host: String, addr: IpAddr, kind: Kind },
    #[error("{host} has the address {addr} ({kind}), which is never fetched from")]
    Never { host: String, addr: IpAddr, kind: Kind },
}

/// What an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Public,
    Private,
    Loopback,
    LinkLocal,
    Metadata,
    /// Unspecified, multicast, broadcast, reserved.
    Unusable,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Public => "public",
            Self::Private => "private or special-purpose",
            Self::Loopback => "loopback",
            Self::LinkLocal => "link-local",
            Self::Metadata => "cloud metadata service",
            Self::Unusable => "unspecified, multicast or reserved",
        })
    }
}

impl UrlPolicy {
    /// Scheme, user-info and a literal address. A host name's addresses are for [`Self::check_addr`].
    pub fn check_url(&self, url: &ImageUrl) -> Result<(), UrlRefusal> {
        let url = url.url();
        let host = url.host_str().unwrap_or_default();
        if !url.username().is_empty() || url.password().is_some() {
            return Err(UrlRefusal::UserInfo { host: bounded(host) });
        }
        let literal = literal(host);
        match url.scheme() {
            "https" => {}
            "http" => {
                let listed = self.names(host).is_some() || literal.is_some_and(|a| self.network(a).is_some());
                if self.http == PlainHttp::AllowListed && !listed {
                    return Err(UrlRefusal::PlainHttp { host: bounded(host) });
                }
            }
            scheme => return Err(UrlRefusal::Scheme { scheme: bounded(scheme) }),
        }
        match literal {
            Some(addr) => self.check_addr(host, addr),
            None => Ok(()),
        }
    }

    /// Whether a literal address is one that nothing opens: link-local, a metadata service, no address of a host.
    pub fn check_never(url: &ImageUrl) -> Result<(), UrlRefusal> {
        let host = url.url().host_str().unwrap_or_default();
        literal(host).map_or(Ok(()), |addr| Self::check_never_addr(host, addr))
    }

    /// As [`Self::check_never`], of an address that `host` has.
    pub fn check_never_addr(host: &str, addr: IpAddr) -> Result<(), UrlRefusal> {
        match Kind::of(addr) {
            Kind::Public | Kind::Private | Kind::Loopback => Ok(()),
            kind @ (Kind::LinkLocal | Kind::Metadata | Kind::Unusable) => Err(UrlRefusal::Never { host: bounded(host), addr, kind }),
        }
    }

    /// An address that `host` has. Tunnelled forms count as what they lead to.
    pub fn check_addr(&self, host: &str, addr: IpAddr) -> Result<(), UrlRefusal> {
        Self::check_never_addr(host, addr)?;
        let kind = Kind::of(addr);
        let allowed = match kind {
            Kind::Public => true,
            Kind::Private => self.names(host).is_some() || self.network(addr).is_some(),
            Kind::Loopback => {
                matches!(self.names(host), Some(Allowed::Host(_)))
                    || matches!(self.network(addr), Some(Allowed::Network(n)) if Kind::of(n.base) == Kind::Loopback)
            }
            Kind::LinkLocal | Kind::Metadata | Kind::Unusable => false,
        };
        if allowed { Ok(()) } else { Err(UrlRefusal::NotPublic { host: bounded(host), addr, kind }) }
    }

    /// The entry that allows this host by name; exact ones first.
    fn names(&self, host: &str) -> Option<&Allowed> {
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let exact = self.allow.iter().find(|a| matches!(a, Allowed::Host(h) if *h == host));
        exact.or_else(|| {
            self.allow.iter().find(|a| matches!(a, Allowed::Subdomains(s) if host.len() > s.len() && host.ends_with(s.as_str())))
        })
    }

    /// The narrowest network of the list that holds this address, or the one it leads to.
    fn network(&self, addr: IpAddr) -> Option<&Allowed> {
        let inner = embedded(addr).map(IpAddr::V4);
        let prefix = |a: &&Allowed| match a {
            Allowed::Network(n) if n.contains(addr) || inner.is_some_and(|i| n.contains(i)) => Some(n.prefix),
            _ => None,
        };
        self.allow.iter().filter(|a| prefix(a).is_some()).max_by_key(prefix)
    }
}

impl Allowed {
    /// `Err` says what to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains('/') || literal(text).is_some() {
            let network = Cidr::parse(text)?;
            let kind = Kind::of(network.base);
            if kind > Kind::Loopback && network.prefix > 0 {
                return Err(format!("{kind} addresses are never fetched from; remove the entry"));
            }
            return Ok(Self::Network(network));
        }
        let (name, subdomains) = text.strip_prefix("*.").map_or((text, false), |rest| (rest, true));
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let labels = name.split('.').all(|l| {
            !l.is_empty()
                && l.len() <= 63
                && l.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
                && !l.starts_with('-')
        });
        // a URL's host that ends in a number is an address, however it is written: no name would ever match
        let number = name.rsplit('.').next().is_some_and(|l| l.bytes().all(|b| b.is_ascii_digit()));
        if !labels || number || name.len() > 253 {
            return Err("must be a host name without port, *.suffix, an address or a network such as 10.0.0.0/8".to_owned());
        }
        Ok(if subdomains { Self::Subdomains(format!(".{name}")) } else { Self::Host(name) })
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => f.write_str(host),
            Self::Subdomains(suffix) => write!(f, "*{suffix}"),
            Self::Network(n) => write!(f, "{}/{}", n.base, n.prefix),
        }
    }
}

impl Cidr {
    fn parse(text: &str) -> Result<Self, String> {
        const ADVICE: &str = "must be an address with a prefix, such as 10.0.0.0/8 or fd00::/8";
        let (addr, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let base = literal(addr).ok_or(ADVICE)?;
        let bits: u8 = if base.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => bits,
            Some(p) if !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()) => p.parse().map_err(|_| ADVICE)?,
            Some(_) => return Err(ADVICE.to_owned()),
        };
        if prefix > bits {
            return Err(ADVICE.to_owned());
        }
        let masked = mask(base, prefix);
        if masked != base {
            return Err(format!("has bits after its prefix; write {masked}/{prefix}"));
        }
        Ok(Self { base, prefix })
    }

    fn contains(self, addr: IpAddr) -> bool {
        self.base.is_ipv4() == addr.is_ipv4() && mask(addr, self.prefix) == self.base
    }
}

fn mask(addr: IpAddr, prefix: u8) -> IpAddr {
    match addr {
        IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits() & u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0))),
        IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits() & u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0))),
    }
}

/// The address that a host is written as, with or without brackets.
fn literal(host: &str) -> Option<IpAddr> {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host).parse().ok()
}

impl Kind {
    pub fn of(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(a) => Self::of_v4(a),
            IpAddr::V6(a) => Self::of_v6(a),
        }
    }

    fn of_v4(a: Ipv4Addr) -> Self {
        match a.octets() {
            // services of clouds outside link-local: Azure, Oracle, Alibaba
            [168, 63, 129, 16] | [192, 0, 0, 192] | [100, 100, 100, 200] => Self::Metadata,
            [0, ..] | [224..=255, ..] => Self::Unusable,
            [127, ..] => Self::Loopback,
            [169, 254, ..] => Self::LinkLocal,
            // the special-purpose registry: private, carrier NAT, protocol, documentation, 6to4 relays, benchmarks
            [10, ..]
            | [100, 64..=127, ..]
            | [172, 16..=31, ..]
            | [192, 0, 0 | 2, _]
            | [192, 88, 99, _]
            | [192, 168, ..]
            | [198, 18 | 19, ..]
            | [198, 51, 100, _]
            | [203, 0, 113, _] => Self::Private,
            _ => Self::Public,
        }
    }

    fn of_v6(a: Ipv6Addr) -> Self {
        if a.is_unspecified() || a.is_multicast() {
            return Self::Unusable;
        }
        if a.is_loopback() {
            return Self::Loopback;
        }
        // Amazon's metadata service
        if a == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254) {
            return Self::Metadata;
        }
        if let Some(inner) = embedded(IpAddr::V6(a)) {
            return Self::of_v4(inner);
        }
        match a.segments() {
            [0xfe80..=0xfebf, ..] => Self::LinkLocal,
            // protocol assignments with Teredo, documentation (twice), and all that is no global unicast
            [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Self::Private,
            [0x2000..=0x3fff, ..] => Self::Public,
            _ => Self::Private,
        }
    }
}

/// The IPv4 address that an IPv6 address leads to: mapped, compatible, NAT64, 6to4.
fn embedded(addr: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(a) = addr else { return None };
    let join = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match a.segments() {
        [0, 0, 0, 0, 0, 0xffff | 0, high, low] if !a.is_loopback() && !a.is_unspecified() => Some(join(high, low)),
        // translated (RFC 2765) and the well-known NAT64 prefix; its local-use sibling
        [0, 0, 0, 0, 0xffff, 0, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 1, .., high, low] => {
            Some(join(high, low))
        }
        [0x2002, high, low, ..] => Some(join(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn policy(allow: &[&str]) -> UrlPolicy {
        UrlPolicy { http: PlainHttp::AllowListed, allow: allow.iter().map(|a| Allowed::parse(a).expect(a)).collect() }
    }

    fn url(text: &str) -> ImageUrl {
        ImageUrl::parse(text).expect(text)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect(text)
    }

    #[rstest]
    #[case("8.8.8.8", Kind::Public)]
    #[case("192.0.1.1", Kind::Public)]
    #[case("172.32.0.1", Kind::Public)]
    #[case("10.1.2.3", Kind::Private)]
    #[case("172.31.255.255", Kind::Private)]
    #[case("192.168.1.1", Kind::Private)]
    #[case("100.64.0.1", Kind::Private)]
    #[case("198.19.0.1", Kind::Private)]
    #[case("127.8.8.8", Kind::Loopback)]
    #[case("169.254.169.254", Kind::LinkLocal)]
    #[case("168.63.129.16", Kind::Metadata)]
    #[case("100.100.100.200", Kind::Metadata)]
    #[case("0.0.0.0", Kind::Unusable)]
    #[case("0.1.2.3", Kind::Unusable)]
    #[case("224.0.0.1", Kind::Unusable)]
    #[case("255.255.255.255", Kind::Unusable)]
    #[case("2606:4700::1111", Kind::Public)]
    #[case("fd12::1", Kind::Private)]
    #[case("fec0::1", Kind::Private)]
    #[case("2001:db8::1", Kind::Private)]
    #[case("2001:0:4136::1", Kind::Private)]
    #[case("100::1", Kind::Private)]
    #[case("4000::1", Kind::Private)]
    #[case("::1", Kind::Loopback)]
    #[case("::", Kind::Unusable)]
    #[case("ff02::1", Kind::Unusable)]
    #[case("fe80::1", Kind::LinkLocal)]
    #[case("febf::1", Kind::LinkLocal)]
    #[case("fd00:ec2::254", Kind::Metadata)]
    #[case::mapped("::ffff:169.254.169.254", Kind::LinkLocal)]
    #[case::mapped("::ffff:127.0.0.1", Kind::Loopback)]
    #[case::mapped("::ffff:8.8.8.8", Kind::Public)]
    #[case::compatible("::10.0.0.1", Kind::Private)]
    #[case::nat64("64:ff9b::169.254.169.254", Kind::LinkLocal)]
    #[case::nat64("64:ff9b::8.8.8.8", Kind::Public)]
    #[case::nat64_local("64:ff9b:1::10.0.0.1", Kind::Private)]
    #[case::six_to_four("2002:7f00:1::", Kind::Loopback)]
    #[case::six_to_four("2002:a9fe:a9fe::1", Kind::LinkLocal)]
    #[case::translated("::ffff:0:169.254.1.1", Kind::LinkLocal)]
    fn an_address_is_what_it_leads_to(#[case] addr: &str, #[case] kind: Kind) {
        assert_eq!(Kind::of(ip(addr)), kind);
    }

    #[test]
    fn without_a_list_only_https_and_public_addresses_pass() {
        let p = UrlPolicy::default();
        assert_eq!(p.check_url(&url("https://example.net/x")), Ok(()));
        assert!(matches!(p.check_url(&url("http://example.net/x")), Err(UrlRefusal::PlainHttp { .. })));
        assert!(matches!(p.check_url(&url("https://u:p@example.net/x")), Err(UrlRefusal::UserInfo { .. })));
        assert!(matches!(p.check_url(&url("https://10.0.0.1/x")), Err(UrlRefusal::NotPublic { .. })));
        assert!(matches!(p.check_url(&url("https://[::1]/x")), Err(UrlRefusal::NotPublic { .. })));
        assert!(matches!(p.check_addr("example.net", ip("10.0.0.1")), Err(UrlRefusal::NotPublic { .. })));
        assert_eq!(p.check_addr("example.net", ip("8.8.8.8")), Ok(()));
    }

    /// The URL parser turns every spelling of an address into the one that is judged.
    #[rstest]
    #[case("https://2130706433/")]
    #[case("https://0x7f.1/")]
    #[case("https://0177.0.0.1/")]
    #[case("https://[::ffff:7f00:1]/")]
    #[case("https://127.1/")]
    fn other_spellings_of_loopback_are_loopback(#[case] text: &str) {
        let refusal = UrlPolicy::default().check_url(&url(text));
        assert!(matches!(refusal, Err(UrlRefusal::NotPublic { kind: Kind::Loopback, .. })), "{refusal:?}");
    }

    #[test]
    fn a_listed_host_may_be_private_and_plain() {
        let p = policy(&["Mirror.lan.", "*.corp.example", "10.20.0.0/16", "fd00:1::/32"]);
        assert_eq!(p.check_url(&url("http://mirror.lan/x")), Ok(()));
        assert_eq!(p.check_addr("MIRROR.lan.", ip("192.168.0.9")), Ok(()));
        assert_eq!(p.check_addr("a.b.corp.example", ip("10.9.9.9")), Ok(()));
        assert_eq!(p.check_addr("anything.example", ip("10.20.3.4")), Ok(()));
        assert_eq!(p.check_addr("anything.example", ip("64:ff9b::10.20.3.4")), Ok(()));
        assert_eq!(p.check_addr("anything.example", ip("fd00:1::5")), Ok(()));
        assert_eq!(p.check_url(&url("http://10.20.0.1/x")), Ok(()));
        assert!(p.check_addr("corp.example", ip("10.9.9.9")).is_err(), "a suffix is not its own subdomain");
        assert!(p.check_addr("notcorp.example", ip("10.9.9.9")).is_err());
        assert!(p.check_url(&url("http://other.example/x")).is_err());
    }

    #[test]
    fn loopback_takes_an_entry_that_means_it() {
        let local = ip("127.0.0.1");
        assert!(policy(&["*.example"]).check_addr("a.example", local).is_err());
        assert!(policy(&["0.0.0.0/0"]).check_addr("a.example", local).is_err());
        assert_eq!(policy(&["a.example"]).check_addr("a.example", local), Ok(()));
        assert_eq!(policy(&["0.0.0.0/0", "127.0.0.0/8"]).check_addr("a.example", local), Ok(()));
        assert_eq!(policy(&["127.0.0.1"]).check_url(&url("http://127.0.0.1:8080/x")), Ok(()));
        assert_eq!(policy(&["::1"]).check_url(&url("http://[::1]:8080/x")), Ok(()));
    }

    #[test]
    fn nothing_opens_link_local_and_metadata() {
        let p = policy(&["a.example", "*.a.example", "0.0.0.0/0", "::/0"]);
        for addr in ["169.254.169.254", "fe80::1", "fd00:ec2::254", "168.63.129.16", "64:ff9b::a9fe:a9fe", "224.0.0.1", "0.0.0.0"] {
            assert!(matches!(p.check_addr("a.example", ip(addr)), Err(UrlRefusal::Never { .. })), "{addr}");
        }
    }

    #[test]
    fn plain_http_can_be_opened_without_opening_private_addresses() {
        let p = UrlPolicy { http: PlainHttp::Anywhere, allow: Vec::new() };
        assert_eq!(p.check_url(&url("http://example.net/x")), Ok(()));
        assert!(p.check_url(&url("http://10.0.0.1/x")).is_err());
    }

    #[rstest]
    #[case("")]
    #[case("*")]
    #[case("*.")]
    #[case("a b")]
    #[case("host:80")]
    #[case("https://host")]
    #[case("10.0.0.0/33")]
    #[case("10.0.0.0/")]
    #[case("10.0.0.0/+8")]
    #[case("10.0.0.1/8")]
    #[case("169.254.0.0/16")]
    #[case("fe80::/10")]
    #[case("169.254.169.254")]
    #[case("bücher.example")]
    #[case::address_with_a_dot("10.0.0.0.")]
    #[case::suffix_of_an_address("*.10.0.0.0")]
    #[case::part_of_an_address("10.0.0")]
    fn a_bad_entry_is_refused(#[case] text: &str) {
        assert!(Allowed::parse(text).is_err());
    }

    proptest! {
        #[test]
        fn an_entry_is_shown_as_it_is_read(text in "[a-z*.:/0-9-]{0,24}") {
            if let Ok(entry) = Allowed::parse(&text) {
                prop_assert_eq!(Allowed::parse(&entry.to_string()), Ok(entry));
            }
        }

        #[test]
        fn a_network_holds_exactly_the_addresses_that_share_its_prefix(base: u32, other: u32, prefix in 0u8..=32) {
            let n = Cidr { base: mask(Ipv4Addr::from_bits(base).into(), prefix), prefix };
            let shared = (base ^ other).leading_zeros() >= u32::from(prefix);
            prop_assert_eq!(n.contains(Ipv4Addr::from_bits(other).into()), shared);
        }

        #[test]
        fn whatever_is_tunnelled_is_never_more_public_than_itself(v4: u32) {
            let inner = Ipv4Addr::from_bits(v4);
            let (high, low) = ((v4 >> 16) as u16, v4 as u16);
            for outer in [inner.to_ipv6_mapped(), Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low), Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1)] {
                prop_assert_eq!(Kind::of(outer.into()), Kind::of(inner.into()));
            }
        }
    }
}
