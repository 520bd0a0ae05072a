//! The bearer token of the discovery API, from a file that may change.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// How long a file that was read is taken for the present one.
const FRESH: Duration = Duration::from_secs(10);
/// A token has at least this many bytes: what is shorter can be guessed.
pub const SHORTEST: usize = 16;
/// And no more than this.
const LONGEST: usize = 4096;

/// The token that callers have to give.
pub struct Token {
    path: PathBuf,
    read: Mutex<Option<(Instant, Option<[u8; 32]>)>>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Token {
    /// The first line of a file. It is read again when it may have changed.
    #[must_use]
    pub fn in_file(path: PathBuf) -> Self {
        Self { path, read: Mutex::default() }
    }

    /// Whether the value of an `Authorization` header is the token. Digests are compared, so the time that takes says
    /// nothing about the token. Nobody is let in while the file cannot be read or is too short.
    #[must_use]
    pub fn admits(&self, authorization: Option<&str>) -> bool {
        let given = authorization.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let Some((_, given)) = given.filter(|(_, token)| token.len() <= LONGEST) else { return false };
        let given: [u8; 32] = Sha256::digest(given.trim()).into();
        let Some(ours) = self.digest() else { return false };
        // no early end, beside that a digest tells nothing
        given.iter().zip(ours).fold(0_u8, |differs, (a, b)| differs | (a ^ b)) == 0
    }

    fn digest(&self) -> Option<[u8; 32]> {
        let mut read = self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((when, digest)) = *read
            && when.elapsed() < FRESH
            && digest.is_some()
        {
            return digest;
        }
        let digest = match std::fs::read_to_string(&self.path) {
            Ok(text) => {
                let token = text.lines().next().unwrap_or_default().trim();
                let fits = (SHORTEST..=LONGEST).contains(&token.len());
                if !fits {
                    tracing::error!(path = %self.path.display(), "the token of the discovery API must have {SHORTEST} to {LONGEST} bytes: nobody is let in");
                }
                fits.then(|| Sha256::digest(token).into())
            }
            Err(e) => {
                tracing::error!(path = %self.path.display(), error = %e, "the token of the discovery API cannot be read: nobody is let in");
                None
            }
        };
        *read = Some((Instant::now(), digest));
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_is_let_in_and_a_bad_file_lets_nobody_in() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("token");
        let admits = |content: &str, header: Option<&str>| {
            std::fs::write(&path, content).expect("written");
            Token::in_file(path.clone()).admits(header)
        };
        let good = "0123456789abcdef";
        assert!(admits(&format!("{good}\n"), Some("Bearer 0123456789abcdef")));
        assert!(admits(good, Some("bearer 0123456789abcdef")));
        for header in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer "),
            Some("Bearer 0123456789abcdeF"),
            Some("Basic 0123456789abcdef"),
            Some("Bearer 0123456789abcdef0"),
        ] {
            assert!(!admits(good, header), "{header:?}");
        }
        for content in ["", "\n", "short"] {
            assert!(!admits(content, Some("Bearer ")) && !admits(content, Some("Bearer short")), "{content:?}");
        }
        assert!(!Token::in_file(dir.path().join("none")).admits(Some("Bearer 0123456789abcdef")));
    }

    #[test]
    fn a_token_that_is_put_there_later_is_taken() {
        let dir = tempfile::tempdir().expect("a directory");
        let token = Token::in_file(dir.path().join("token"));
        assert!(!token.admits(Some("Bearer 0123456789abcdef")));
        std::fs::write(dir.path().join("token"), "0123456789abcdef").expect("written");
        assert!(token.admits(Some("Bearer 0123456789abcdef")));
        assert!(!format!("{token:?}").contains("0123"));
    }
}
