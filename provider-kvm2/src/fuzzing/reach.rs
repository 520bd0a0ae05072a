//! What may be fetched. The input is a small script of lines:
//!
//! ```text
//! allow 10.0.0.0/8         an entry of the allow-list
//! http                     plain http is allowed anywhere
//! url https://a.test/x     a URL that a request names
//! location /y              where its server redirects
//! address 192.0.2.1        an address that its host turns out to have
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::config::url_policy::{Allowed, PlainHttp};
use crate::config::{Firmware, ImageFormat, ImageUrl, UrlPolicy};
use crate::image::http::reach::{Rules, admit, next_hop};
use crate::image::{ImageRef, UrlTrust};

/// More only makes the fuzzer slow.
const MAX_LINES: usize = 64;

pub(super) fn url_policy(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let lines: Vec<(&str, &str)> = text.split('\n').take(MAX_LINES).map(|l| l.split_once(' ').unwrap_or((l, ""))).collect();
    let mut policy = UrlPolicy::default();
    for (word, rest) in &lines {
        match *word {
            "allow" => match Allowed::parse(rest) {
                Ok(allowed) => {
                    let again = Allowed::parse(&allowed.to_string()).expect("its own spelling");
                    assert_eq!(again, allowed);
                    policy.allow.push(allowed);
                }
                Err(advice) => assert!(!advice.is_empty() && advice.len() < 300 && !advice.contains(char::is_control), "{advice:?}"),
            },
            "http" => policy.http = PlainHttp::Anywhere,
            _ => {}
        }
    }
    let rules = [UrlTrust::Requested, UrlTrust::Configured].map(|trust| Rules { trust, policy: policy.clone() });
    for rules in &rules {
        let mut at: Option<(ImageUrl, ImageRef)> = None;
        for (word, rest) in &lines {
            match (*word, &at) {
                ("url", _) => {
                    at = ImageUrl::parse(rest).map(|url| (url.clone(), image(url, rules.trust)));
                    at = at.filter(|(url, image)| admitted(rules, image, url));
                }
                ("location", Some((from, image))) => {
                    let hop = next_hop(rules, image, from, Some(rest)).ok();
                    if let Some(to) = &hop {
                        assert!(from.url().scheme() != "https" || to.url().scheme() == "https", "{from:?} → {to:?}");
                        assert!(admitted(rules, image, to), "a redirect went past the policy: {to:?}");
                    }
                    at = hop.map(|to| (to, image.clone()));
                }
                ("address", Some((url, _))) => {
                    if let Ok(addr) = rest.parse::<IpAddr>() {
                        address(&rules.policy, url.url().host_str().unwrap_or_default(), addr);
                    }
                }
                _ => {}
            }
        }
    }
}

fn image(url: ImageUrl, trust: UrlTrust) -> ImageRef {
    ImageRef { key: "url-0".to_owned(), url, sha256: None, format: ImageFormat::Qcow2, firmware: Firmware::Uefi, trust }
}

/// Whether it passes; and if so, that it had to be allowed to.
fn admitted(rules: &Rules, image: &ImageRef, url: &ImageUrl) -> bool {
    let verdict = admit(rules, image, url);
    let inner = url.url();
    if let Err(e) = &verdict {
        let text = e.chain();
        assert!(text.len() < 2048 && !text.contains(char::is_control), "{text:?}");
        if let Some(password) = inner.password().filter(|p| p.len() > 16) {
            assert!(!text.contains(password), "a password is shown");
        }
        return false;
    }
    assert!(matches!(inner.scheme(), "http" | "https"));
    assert!(inner.username().is_empty() && inner.password().is_none(), "user-info went through");
    if rules.trust == UrlTrust::Requested {
        let literal = match inner.host() {
            Some(host) => host.to_string().trim_matches(['[', ']']).parse::<IpAddr>().ok(),
            None => panic!("a URL without a host"),
        };
        if let Some(addr) = literal {
            assert!(address(&rules.policy, inner.host_str().unwrap_or_default(), addr), "{addr} went through");
        }
        if inner.scheme() == "http" {
            assert!(rules.policy.http == PlainHttp::Anywhere || !rules.policy.allow.is_empty(), "plain http went through");
        }
    }
    true
}

/// Whether it passes; and if so, that the registries of special addresses have nothing against it.
fn address(policy: &UrlPolicy, host: &str, addr: IpAddr) -> bool {
    let passes = policy.check_addr(host, addr).is_ok();
    if passes {
        match class(addr) {
            Class::Public => {}
            Class::Private => assert!(!policy.allow.is_empty(), "private {addr} went through"),
            Class::Loopback => {
                let means_it = |allowed: &Allowed| match allowed {
                    Allowed::Host(name) => host.trim_end_matches('.').eq_ignore_ascii_case(name),
                    Allowed::Subdomains(_) => false,
                    Allowed::Network(_) => {
                        let text = allowed.to_string();
                        let base = text.split('/').next().and_then(|a| a.parse().ok()).expect("an address");
                        class(base) == Class::Loopback
                    }
                };
                assert!(policy.allow.iter().any(means_it), "loopback {addr} went through");
            }
            Class::Never => panic!("{addr} went through"),
        }
    }
    passes
}

#[derive(PartialEq, Eq)]
enum Class {
    Public,
    Private,
    Loopback,
    Never,
}

/// The same registries as `config::url_policy` reads, written as a table: the last line that fits counts.
fn class(addr: IpAddr) -> Class {
    const V4: [(Ipv4Addr, u32, Class); 17] = [
        (Ipv4Addr::new(0, 0, 0, 0), 8, Class::Never),
        (Ipv4Addr::new(10, 0, 0, 0), 8, Class::Private),
        (Ipv4Addr::new(100, 64, 0, 0), 10, Class::Private),
        (Ipv4Addr::new(100, 100, 100, 200), 32, Class::Never),
        (Ipv4Addr::new(127, 0, 0, 0), 8, Class::Loopback),
        (Ipv4Addr::new(168, 63, 129, 16), 32, Class::Never),
        (Ipv4Addr::new(169, 254, 0, 0), 16, Class::Never),
        (Ipv4Addr::new(172, 16, 0, 0), 12, Class::Private),
        (Ipv4Addr::new(192, 0, 0, 0), 24, Class::Private),
        (Ipv4Addr::new(192, 0, 0, 192), 32, Class::Never),
        (Ipv4Addr::new(192, 0, 2, 0), 24, Class::Private),
        (Ipv4Addr::new(192, 88, 99, 0), 24, Class::Private),
        (Ipv4Addr::new(192, 168, 0, 0), 16, Class::Private),
        (Ipv4Addr::new(198, 18, 0, 0), 15, Class::Private),
        (Ipv4Addr::new(198, 51, 100, 0), 24, Class::Private),
        (Ipv4Addr::new(203, 0, 113, 0), 24, Class::Private),
        (Ipv4Addr::new(224, 0, 0, 0), 3, Class::Never),
    ];
    let v4 = |a: Ipv4Addr| {
        let fits = |(base, bits, _): &&(Ipv4Addr, u32, Class)| (a.to_bits() ^ base.to_bits()) >> (32 - bits) == 0;
        match V4.iter().rev().find(fits) {
            None => Class::Public,
            Some((_, _, Class::Private)) => Class::Private,
            Some((_, _, Class::Loopback)) => Class::Loopback,
            Some(_) => Class::Never,
        }
    };
    let a = match addr {
        IpAddr::V4(a) => return v4(a),
        IpAddr::V6(a) => a,
    };
    let bits = a.to_bits();
    let within = |base: &str, length: u32| {
        let base: Ipv6Addr = base.parse().expect("an address");
        (bits ^ base.to_bits()) >> (128 - length) == 0
    };
    let low = Ipv4Addr::from_bits(bits as u32);
    let leads_to = [("::ffff:0:0", 96), ("::ffff:0:0:0", 96), ("64:ff9b::", 96), ("64:ff9b:1::", 48)];
    if bits == 1 {
        Class::Loopback
    } else if bits == 0 || within("ff00::", 8) || within("fe80::", 10) || a == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254) {
        Class::Never
    } else if leads_to.iter().any(|(base, length)| within(base, *length)) || within("::", 96) {
        v4(low)
    } else if within("2002::", 16) {
        v4(Ipv4Addr::from_bits((bits >> 80) as u32))
    } else if within("2001::", 23) || within("2001:db8::", 32) || within("3fff::", 20) || !within("2000::", 3) {
        Class::Private
    } else {
        Class::Public
    }
}
