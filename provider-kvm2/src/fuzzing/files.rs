//! Files: the providers file, known_hosts, the head of an image, and the origin that lies beside a base.

use std::path::Path;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use russh::keys::ssh_key::certificate::{Builder, CertType};
use russh::keys::ssh_key::private::Ed25519Keypair;
use russh::keys::{PrivateKey, PublicKey, PublicKeyOrCertificate};

use crate::config::{describe, is_identifier, load};
use crate::image::origin::{MAX_BYTES, Origin};
use crate::image::qcow2::{HEAD, Sniffed, sniff};
use crate::link::known_hosts::{KnownHosts, Verdict, algorithms};

pub(super) fn qcow2(input: &[u8]) {
    let head = &input[..input.len().min(HEAD)];
    let sniffed = sniff(head);
    assert_eq!(sniff(input), sniffed, "more than the head was looked at");
    let magic = head.starts_with(b"QFI\xfb");
    let Sniffed::Qcow2(header) = sniffed else {
        return assert!(!magic || sniffed != Sniffed::Raw, "qcow2 would be kept as a raw disk");
    };
    assert!(magic);
    let Ok(size) = header.check() else { return };
    // told from the bytes alone: QEMU opens no other file for it
    let number = |at: usize, length: usize| head[at..at + length].iter().fold(0_u64, |n, b| n << 8 | u64::from(*b));
    let version = number(4, 4);
    assert!(version == 2 || version == 3);
    assert_eq!(number(8, 8), 0, "a backing file");
    assert_eq!(number(32, 4), 0, "encrypted");
    if version == 3 {
        assert_eq!(number(72, 8) & !0b1_1001, 0, "an external data file, or features that are not known");
    }
    assert!(size == number(24, 8) && size > 0 && size <= 65_536 << 30);
}

pub(super) fn origin(input: &[u8]) {
    let Some(origin) = Origin::parse(input) else { return };
    assert!(input.len() as u64 <= MAX_BYTES);
    let json = origin.to_json();
    if json.len() as u64 <= MAX_BYTES {
        let again = Origin::parse(&json).expect("own output is readable");
        assert_eq!(Origin::parse(&again.to_json()), Some(again));
    }
}

/// The file, and after a NUL byte `NAME=value` lines of the environment.
pub(super) fn config(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let (file, variables) = text.split_once('\0').unwrap_or((&text, ""));
    let environment = || variables.lines().filter_map(|l| l.split_once('=')).map(|(n, v)| (n.to_owned(), v.to_owned()));
    let path = Path::new("providers.yaml");
    let outcome = load::parse(path, file, environment());
    assert_eq!(outcome, load::parse(path, file, environment()), "one file, one meaning");
    match outcome {
        Ok((config, notes)) => {
            assert!(!config.entries.is_empty() && notes.len() <= file.len());
            for entry in &config.entries {
                assert!(is_identifier(&entry.name) && !entry.hosts.is_empty() && !entry.machine_types.is_empty());
                assert!((1..=65_536).contains(&entry.disk_size_gib) && entry.max_image_bytes > 0);
                for (i, host) in entry.hosts.iter().enumerate() {
                    assert!(is_identifier(&host.name) && is_identifier(&host.pool) && host.port > 0, "{host:?}");
                    assert!(host.socket.starts_with('/') && !host.socket.contains('\0') && host.socket.len() <= 100, "{host:?}");
                    assert!((1..=15).contains(&host.bridge.len()), "{host:?}");
                    assert!(entry.hosts[..i].iter().all(|h| h.name != host.name), "two hosts {}", host.name);
                }
            }
            readable(&describe(&config));
        }
        Err(report) => {
            assert!(!report.faults().is_empty());
            readable(&report.to_string());
        }
    }
}

/// What a terminal shows as it is, in lines that end.
fn readable(text: &str) {
    for line in text.split('\n') {
        assert_eq!(line.chars().find(|c| c.is_control()), None, "{line:?}");
        assert!(line.len() <= 8 << 10, "a line of {} bytes", line.len());
    }
}

/// Two host keys, and a certificate of the first that the second has signed.
struct Keys {
    host: PublicKey,
    authority: PublicKey,
    certified: PublicKeyOrCertificate,
}

const NOW: u64 = 1_700_000_000;

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let private = |seed| PrivateKey::from(Ed25519Keypair::from_seed(&[seed; 32]));
    let (host, authority) = (private(1).public_key().clone(), private(9));
    let mut builder = Builder::new([1_u8; 16], host.clone(), NOW - 10, NOW + 10).expect("valid times");
    builder.cert_type(CertType::Host).expect("set once");
    builder.valid_principal("hv1").expect("a name");
    let certified = builder.sign(&authority).expect("signs").into();
    Keys { host, authority: authority.public_key().clone(), certified }
});

pub(super) fn known_hosts(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let known = KnownHosts::parse(&text);
    assert!(known.malformed() <= text.lines().count());
    let keys = &*KEYS;
    let plain = PublicKeyOrCertificate::from(keys.host.clone());
    let names = |key: &PublicKey| {
        // the last 43 digits are the key itself; white space in them would make it another word
        let blob = BASE64.encode(key.to_bytes().expect("encodes"));
        text.contains(&blob[blob.len() - 40..])
    };
    let with = |line: String| KnownHosts::parse(&format!("{line}\n{text}"));
    let revoking_all = with(format!("@revoked * {}", keys.host.to_openssh().expect("encodes")));
    let with_junk = with("hv1 ssh-ed25519 AAAAbroken\n\u{feff}\n|1|x|y z".to_owned());
    for (host, port) in [("hv1", 22), ("HV1", 2222), ("127.0.0.1", 2222), ("fd00::1", 22)] {
        let wanted = known.wanted(host, port);
        let mut asked: Vec<String> = wanted.keys.iter().map(ToString::to_string).collect();
        let mut all: Vec<String> = algorithms().iter().map(ToString::to_string).collect();
        asked.sort();
        all.sort();
        assert_eq!(asked, all, "an order of all algorithms, none of them twice");
        assert!(wanted.certificates.is_empty() || text.contains("@cert-authority"));
        for shown in [&plain, &keys.certified] {
            let verdict = known.check(host, port, shown, NOW);
            if verdict == Verdict::Trusted {
                assert!(names(&keys.host) || names(&keys.authority), "trusted for nothing");
            }
            assert_eq!(revoking_all.check(host, port, shown, NOW), Verdict::Revoked);
            assert_eq!(with_junk.check(host, port, shown, NOW), verdict, "a broken line changed another one");
        }
        if known.check(host, port, &plain, NOW) == Verdict::Trusted {
            assert!(names(&keys.host), "trusted for another key");
        }
    }
}
