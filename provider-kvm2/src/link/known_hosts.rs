//! Is this the host it claims to be? known_hosts with all that OpenSSH writes into
//! it: plain and hashed names, ports, patterns and negations, several keys of one
//! type, `@revoked` and `@cert-authority`.
//!
//! Pure: text and a presented key in, a [`Verdict`] out. A line that cannot be
//! parsed is skipped and counted; it never makes another line unusable.

use hmac::{Hmac, KeyInit, Mac};
use russh::keys::ssh_key::known_hosts::{Entry, HostPatterns, Marker};
use russh::keys::ssh_key::public::KeyData;
use russh::keys::{Algorithm, Certificate, EcdsaCurve, HashAlg, PublicKeyOrCertificate};
use wildmatch::WildMatch;

const DEFAULT_PORT: u16 = 22;

/// The lines of one file.
#[derive(Debug, Default)]
pub struct KnownHosts {
    entries: Vec<Entry>,
    malformed: usize,
}

/// What the file says about a presented host key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Trusted,
    /// The file has no key of this host.
    Unknown,
    /// The file has other keys of this host.
    Changed,
    Revoked,
    /// A certificate authority of the file is meant for this host, and the certificate does not do.
    BadCertificate(&'static str),
}

/// The algorithms to ask of a host, most wanted first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub keys: Vec<Algorithm>,
    /// Empty unless the file names a certificate authority for the host: a host that may
    /// show a certificate does so, and then a plain line of its key no longer matches.
    pub certificates: Vec<Algorithm>,
}

impl KnownHosts {
    pub fn parse(text: &str) -> Self {
        let mut known = Self::default();
        for line in text.lines() {
            // the parser knows single spaces only; OpenSSH takes any white space
            let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.parse() {
                Ok(entry) => known.entries.push(entry),
                Err(_) => known.malformed += 1,
            }
        }
        known
    }

    /// How many lines could not be read.
    pub fn malformed(&self) -> usize {
        self.malformed
    }

    /// `now` is in seconds since 1970; only certificates have a lifetime.
    pub fn check(&self, host: &str, port: u16, presented: &PublicKeyOrCertificate, now: u64) -> Verdict {
        let lines = self.lines(host, port);
        match presented {
            PublicKeyOrCertificate::PublicKey { key, .. } => lines.check_key(key.key_data()),
            PublicKeyOrCertificate::Certificate(certificate) => {
                if lines.is_revoked(certificate.public_key()) || lines.is_revoked(certificate.signature_key()) {
                    return Verdict::Revoked;
                }
                match lines.check_certificate(host, certificate, now) {
                    Ok(()) => Verdict::Trusted,
                    // the host has proved that it holds the key inside, and that may be known by itself
                    Err(fault) => match lines.check_key(certificate.public_key()) {
                        Verdict::Trusted => Verdict::Trusted,
                        _ => Verdict::BadCertificate(fault),
                    },
                }
            }
        }
    }

    /// Types that the file holds for the host come first: a host has one key per type, and
    /// the one that can be verified is the one to ask for.
    pub fn wanted(&self, host: &str, port: u16) -> Wanted {
        let lines = self.lines(host, port);
        let known = |algorithm: &Algorithm| {
            lines.plain().any(|key| match (key.algorithm(), algorithm) {
                (Algorithm::Rsa { .. }, Algorithm::Rsa { .. }) => true,
                (a, b) => a == *b,
            })
        };
        let (mut keys, rest): (Vec<_>, Vec<_>) = algorithms().into_iter().partition(known);
        keys.extend(rest);
        let certificates = if lines.authorities().next().is_some() { algorithms() } else { Vec::new() };
        Wanted { keys, certificates }
    }

    fn lines(&self, host: &str, port: u16) -> Lines<'_> {
        let host = host.to_ascii_lowercase();
        let mut lines = Lines::default();
        if port == DEFAULT_PORT {
            lines.exact = self.matching(&host);
        } else {
            lines.exact = self.matching(&format!("[{host}]:{port}"));
            lines.portless = self.matching(&host);
        }
        lines
    }

    fn matching(&self, name: &str) -> Vec<&Entry> {
        self.entries.iter().filter(|entry| names(entry.host_patterns(), name)).collect()
    }
}

/// What is asked for when the file has no say; SHA-1 signatures are never.
pub fn algorithms() -> Vec<Algorithm> {
    vec![
        Algorithm::Ed25519,
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 },
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 },
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP521 },
        Algorithm::Rsa { hash: Some(HashAlg::Sha512) },
        Algorithm::Rsa { hash: Some(HashAlg::Sha256) },
    ]
}

fn names(patterns: &HostPatterns, name: &str) -> bool {
    match patterns {
        HostPatterns::HashedName { salt, hash } => {
            Hmac::<sha1::Sha1>::new_from_slice(salt).is_ok_and(|mac| mac.chain_update(name).verify_slice(hash).is_ok())
        }
        HostPatterns::Patterns(patterns) => {
            let hit = |pattern: &str| WildMatch::new(&pattern.to_ascii_lowercase()).matches(name);
            // a negation that hits takes the host off the line, whatever else is on it
            patterns.iter().any(|p| !p.starts_with('!') && hit(p)) && !patterns.iter().filter_map(|p| p.strip_prefix('!')).any(hit)
        }
    }
}

/// The lines that concern one host.
#[derive(Default)]
struct Lines<'a> {
    exact: Vec<&'a Entry>,
    /// Lines of the name alone, for a host at another port than 22: their keys are good there too,
    /// as they are for OpenSSH, but another key there is unknown and not changed.
    portless: Vec<&'a Entry>,
}

impl<'a> Lines<'a> {
    fn all(&self) -> impl Iterator<Item = &'a Entry> + '_ {
        self.exact.iter().chain(&self.portless).copied()
    }

    fn plain(&self) -> impl Iterator<Item = &'a KeyData> + '_ {
        self.all().filter(|e| e.marker().is_none()).map(|e| e.public_key().key_data())
    }

    fn authorities(&self) -> impl Iterator<Item = &'a KeyData> + '_ {
        self.all().filter(|e| e.marker() == Some(&Marker::CertAuthority)).map(|e| e.public_key().key_data())
    }

    fn is_revoked(&self, key: &KeyData) -> bool {
        self.all().any(|e| e.marker() == Some(&Marker::Revoked) && e.public_key().key_data() == key)
    }

    fn check_key(&self, key: &KeyData) -> Verdict {
        if self.is_revoked(key) {
            Verdict::Revoked
        } else if self.plain().any(|known| known == key) {
            Verdict::Trusted
        } else if self.exact.iter().any(|e| e.marker().is_none()) {
            Verdict::Changed
        } else {
            Verdict::Unknown
        }
    }

    fn check_certificate(&self, host: &str, certificate: &Certificate, now: u64) -> Result<(), &'static str> {
        if !self.authorities().any(|ca| ca == certificate.signature_key()) {
            return Err("it is signed by an authority that known_hosts does not name for this host");
        }
        if !certificate.cert_type().is_host() {
            return Err("it is no host certificate");
        }
        if matches!(certificate.signature().algorithm(), Algorithm::Rsa { hash: None } | Algorithm::Dsa) {
            return Err("its signature uses SHA-1");
        }
        if !certificate.critical_options().is_empty() {
            return Err("it has a critical option that is not known");
        }
        let host = host.to_ascii_lowercase();
        // an empty list would mean every host of that authority
        if !certificate.valid_principals().iter().any(|p| WildMatch::new(&p.to_ascii_lowercase()).matches(&host)) {
            return Err("it is made out to another host name");
        }
        if now < certificate.valid_after() || now >= certificate.valid_before() {
            return Err("it is not valid at this time");
        }
        let authority = certificate.signature_key().fingerprint(HashAlg::Sha256);
        certificate.validate_at(now, [&authority]).map_err(|_| "its signature is wrong")
    }
}

#[cfg(test)]
mod tests;
