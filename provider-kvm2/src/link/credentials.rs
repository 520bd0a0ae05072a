//! The SSH key and the known_hosts file, read again when the files change and
//! parsed once per change. No error and no log line holds anything of their content.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use russh::keys::PrivateKey;
use secrecy::{ExposeSecret, SecretString};

use super::known_hosts::KnownHosts;
use crate::error::{ProviderError, Reason, Result};

/// Far above any key; a directory of logs mounted by mistake is not read into memory.
const MAX_KEY_BYTES: u64 = 64 * 1024;

/// A known_hosts file of ten thousand hosts has about 4 MiB.
const MAX_KNOWN_HOSTS_BYTES: u64 = 16 * 1024 * 1024;

/// What the files said the last time they changed. Cloning shares it.
#[derive(Clone, Default)]
pub struct Credentials(Arc<Caches>);

#[derive(Default)]
struct Caches {
    keys: Cache<PrivateKey>,
    known_hosts: Cache<KnownHosts>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    /// Blocks on the file system.
    pub fn key(&self, path: &Path) -> Result<Arc<PrivateKey>> {
        self.0.keys.get(path, "SSH key", MAX_KEY_BYTES, parse_key)
    }

    /// Blocks on the file system.
    pub fn known_hosts(&self, path: &Path) -> Result<Arc<KnownHosts>> {
        self.0.known_hosts.get(path, "known_hosts", MAX_KNOWN_HOSTS_BYTES, |path, text| {
            let parsed = KnownHosts::parse(text);
            if parsed.malformed() > 0 {
                tracing::warn!(file = %path.display(), lines = parsed.malformed(), "known_hosts has lines that cannot be read; they are skipped");
            }
            Ok(parsed)
        })
    }
}

fn parse_key(path: &Path, text: &str) -> Result<PrivateKey> {
    let encrypted = || {
        let message = format!("the SSH key {} is protected by a passphrase; give the daemon a key without one", path.display());
        ProviderError::new(Reason::KeyEncrypted, message)
    };
    match russh::keys::decode_secret_key(text, None) {
        Ok(key) if key.is_encrypted() => Err(encrypted()),
        Ok(key) => Ok(key),
        Err(russh::keys::Error::KeyIsEncrypted) => Err(encrypted()),
        // the parser's own text may quote the file, so it is not kept
        Err(_) => Err(ProviderError::new(
            Reason::KeyUnparsable,
            format!("the SSH key {} cannot be parsed; it has to be a private key in OpenSSH or PEM form", path.display()),
        )),
    }
}

/// What a file looked like when it was read; a mounted Secret changes its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: (i64, i64),
    length: u64,
    inode: (u64, u64),
}

type Entries<T> = HashMap<PathBuf, (Stamp, Result<Arc<T>>)>;

struct Cache<T>(Mutex<Entries<T>>);

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<T> Cache<T> {
    fn get(&self, path: &Path, what: &str, limit: u64, parse: impl FnOnce(&Path, &str) -> Result<T>) -> Result<Arc<T>> {
        let unavailable = |e: std::io::Error| {
            let message =
                format!("the {what} file {} cannot be read; check that it exists and that the daemon may read it", path.display());
            ProviderError::new(Reason::CredentialsUnavailable, message).with_source(e)
        };
        let mut file = File::open(path).map_err(unavailable)?;
        let about = file.metadata().map_err(unavailable)?;
        let stamp = Stamp { modified: (about.mtime(), about.mtime_nsec()), length: about.len(), inode: (about.dev(), about.ino()) };
        if let Some((known, result)) = self.entries().get(path)
            && *known == stamp
        {
            return result.clone();
        }
        let mut bytes = Vec::with_capacity(usize::try_from(stamp.length.min(limit)).unwrap_or(0) + 1);
        Read::by_ref(&mut file).take(limit + 1).read_to_end(&mut bytes).map_err(unavailable)?;
        let result = if bytes.len() as u64 > limit {
            Err(ProviderError::new(Reason::KeyUnparsable, format!("the {what} file {} is larger than {limit} bytes", path.display())))
        } else {
            match String::from_utf8(bytes) {
                Ok(text) => {
                    let text = SecretString::from(text);
                    parse(path, text.expose_secret()).map(Arc::new)
                }
                Err(_) => Err(ProviderError::new(Reason::KeyUnparsable, format!("the {what} file {} is not text", path.display()))),
            }
        };
        self.entries().insert(path.to_owned(), (stamp, result.clone()));
        result
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use russh::keys::ssh_key::LineEnding;
    use russh::keys::{Algorithm, PrivateKey};

    const SENTINEL: &str = "sentinel-4711";

    fn generated() -> String {
        let key = PrivateKey::random(&mut russh::keys::key::safe_rng(), Algorithm::Ed25519).expect("random key");
        key.to_openssh(LineEnding::LF).expect("encodes").to_string()
    }

    #[test]
    fn a_missing_file_is_transient_and_a_key_that_appears_is_read() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("key");
        let credentials = Credentials::default();
        let e = credentials.key(&path).expect_err("no file yet");
        assert_eq!(e.reason(), Reason::CredentialsUnavailable);
        assert!(e.is_transient());
        std::fs::write(&path, generated()).expect("writes");
        credentials.key(&path).expect("there now");
    }

    #[test]
    fn a_broken_key_is_permanent_and_nothing_of_it_is_shown() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("key");
        for text in [
            SENTINEL.to_owned(),
            format!("-----BEGIN OPENSSH PRIVATE KEY-----\n{SENTINEL}\n-----END OPENSSH PRIVATE KEY-----\n"),
            format!("-----BEGIN RSA PRIVATE KEY-----\n{SENTINEL}\n-----END RSA PRIVATE KEY-----\n"),
        ] {
            std::fs::write(&path, text).expect("writes");
            let e = Credentials::default().key(&path).expect_err("no key");
            assert_eq!(e.reason(), Reason::KeyUnparsable);
            assert!(!format!("{e:?} {}", e.chain()).contains(SENTINEL));
        }
        std::fs::write(&path, b"\xff\xfe").expect("writes");
        assert_eq!(Credentials::default().key(&path).expect_err("no text").reason(), Reason::KeyUnparsable);
    }

    #[test]
    fn a_file_is_parsed_once_per_change() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("key");
        let credentials = Credentials::default();
        std::fs::write(&path, generated()).expect("writes");
        let first = credentials.key(&path).expect("a key");
        assert!(Arc::ptr_eq(&first, &credentials.key(&path).expect("a key")));
        // replaced as a mounted Secret is: another file under the same name
        let next = dir.path().join("next");
        std::fs::write(&next, generated()).expect("writes");
        std::fs::rename(&next, &path).expect("replaces");
        let second = credentials.key(&path).expect("a key");
        assert_ne!(first.public_key(), second.public_key());
    }
}
