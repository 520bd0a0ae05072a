//! Rules for single values, as pure functions.

use std::net::Ipv6Addr;
use std::time::Duration;

pub(super) const SSH_PORT: u16 = 22;

/// A unix socket's address holds 108 bytes; some room is left for what hosts put in front.
const MAX_SOCKET_PATH: usize = 100;

/// `IFNAMSIZ` without its NUL.
const MAX_INTERFACE_NAME: usize = 15;

/// Nothing here may take longer; also keeps deadlines far from any overflow.
const MAX_DURATION: Duration = Duration::from_secs(24 * 60 * 60);

/// `host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address. None for anything else.
pub(super) fn address(text: &str) -> Option<(String, u16)> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Some((text.to_owned(), SSH_PORT));
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (host, port) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        let port = if port.is_empty() { SSH_PORT } else { self::port(port.strip_prefix(':')?)? };
        return Some((host.to_owned(), port));
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, self::port(port)?),
        None => (text, SSH_PORT),
    };
    is_host_name(host).then(|| (host.to_owned(), port))
}

fn port(text: &str) -> Option<u16> {
    // parse() alone would take a plus sign
    let port: u16 = text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())??;
    (port != 0).then_some(port)
}

/// A name that DNS or a hosts file can hold; IPv4 addresses look like one.
fn is_host_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let label = |l: &str| {
        !l.is_empty() && l.len() <= 63 && !l.starts_with('-') && l.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    // all digits and dots, yet no address: a mistyped one, that no resolver should guess at
    let looks_like_v4 = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.len() <= 253 && text.split('.').all(label) && (!looks_like_v4 || text.parse::<std::net::Ipv4Addr>().is_ok())
}

pub(super) fn is_user(text: &str) -> bool {
    !text.is_empty() && text.len() <= 64 && text.bytes().all(|b| b.is_ascii_graphic())
}

pub(super) fn is_socket_path(text: &str) -> bool {
    text.starts_with('/') && text.len() <= MAX_SOCKET_PATH && !text.chars().any(char::is_control)
}

/// What the kernel takes as an interface's name, without what would need quoting.
pub(super) fn is_bridge(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= MAX_INTERFACE_NAME
        && !matches!(text, "." | "..")
        && text.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'<' | b'>' | b'&' | b'"' | b'\''))
}

/// The key of a machine type: a name of the author's, not part of any name on a host.
pub(super) fn is_machine_type(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= 128 && !text.chars().any(char::is_control)
}

/// `90s`, `20m`, `1h 30m`, or seconds as a plain number.
pub(super) fn duration(text: &str) -> Result<Duration, &'static str> {
    const ADVICE: &str = "must be a duration such as 90s, 20m or 1h30m";
    let text = text.trim();
    let found = if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        Duration::from_secs(text.parse().map_err(|_| ADVICE)?)
    } else {
        let signed: jiff::SignedDuration = text.parse().map_err(|_| ADVICE)?;
        Duration::try_from(signed).map_err(|_| "must be greater than zero")?
    };
    match found {
        Duration::ZERO => Err("must be greater than zero"),
        d if d > MAX_DURATION => Err("must be at most 24h"),
        d => Ok(d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("hv1", "hv1", 22)]
    #[case("hv1.example.net:2222", "hv1.example.net", 2222)]
    #[case("192.0.2.7", "192.0.2.7", 22)]
    #[case("192.0.2.7:22", "192.0.2.7", 22)]
    #[case("[2001:db8::7]:2222", "2001:db8::7", 2222)]
    #[case("[2001:db8::7]", "2001:db8::7", 22)]
    #[case("2001:db8::7", "2001:db8::7", 22)]
    #[case("my_host", "my_host", 22)]
    fn an_address_has_a_host_and_a_port(#[case] text: &str, #[case] host: &str, #[case] port: u16) {
        assert_eq!(address(text), Some((host.to_owned(), port)));
    }

    #[rstest]
    #[case("")]
    #[case(":22")]
    #[case("hv1:")]
    #[case("hv1:0")]
    #[case("hv1:65536")]
    #[case("hv1:+22")]
    #[case("hv1:ssh")]
    #[case("hv1:22:22")]
    #[case("[hv1]:22")]
    #[case("[2001:db8::7]22")]
    #[case("[2001:db8::7")]
    #[case("ssh://hv1")]
    #[case("user@hv1")]
    #[case("hv 1")]
    #[case("hv1\n")]
    #[case("-oProxyCommand=x")]
    #[case("192.0.2.256")]
    fn a_bad_address_is_none(#[case] text: &str) {
        assert_eq!(address(text), None);
    }

    #[test]
    fn a_bridge_is_a_kernel_interface_name() {
        for good in ["br0", "br-lan", "virbr0.100", "a@b", "fifteen-chars-x"] {
            assert!(is_bridge(good), "{good}");
        }
        for bad in ["", ".", "..", "br 0", "br/0", "br:0", "sixteen-chars-xx", "br\u{e9}", "br<0"] {
            assert!(!is_bridge(bad), "{bad}");
        }
    }

    #[test]
    fn a_socket_is_an_absolute_path_that_fits_an_address() {
        assert!(is_socket_path("/var/run/libvirt/libvirt-sock"));
        assert!(!is_socket_path("run/x") && !is_socket_path("") && !is_socket_path(&format!("/{}", "x".repeat(100))));
    }

    #[rstest]
    #[case("90", 90_000)]
    #[case("90s", 90_000)]
    #[case("20m", 1_200_000)]
    #[case("1h30m", 5_400_000)]
    #[case("1h 30m", 5_400_000)]
    #[case("250ms", 250)]
    #[case("24h", 86_400_000)]
    fn a_duration_has_a_unit_or_is_seconds(#[case] text: &str, #[case] millis: u64) {
        assert_eq!(duration(text), Ok(Duration::from_millis(millis)));
    }

    #[rstest]
    #[case("0")]
    #[case("0s")]
    #[case("-5s")]
    #[case("-5")]
    #[case("24h1s")]
    #[case("99999999999999999999")]
    #[case("9223372036854775807s")]
    #[case("soon")]
    #[case("")]
    fn a_duration_that_is_none_or_out_of_bounds_is_refused(#[case] text: &str) {
        assert!(duration(text).is_err());
    }

    proptest! {
        #[test]
        fn a_good_address_survives_being_written_again(text in "[a-z0-9.:\\[\\]_-]{0,30}") {
            if let Some((host, port)) = address(&text) {
                let again = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                prop_assert_eq!(address(&again), Some((host, port)));
            }
        }
    }
}
