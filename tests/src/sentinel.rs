//! Secrets that are looked for where they must not turn up, in the forms that a log gives them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Bytes of a key that are looked for as one; a multiple of three, for base64.
const WINDOW: usize = 18;

/// Secrets and all their forms.
#[derive(Debug, Default)]
pub struct Sentinels {
    forms: Vec<Form>,
}

#[derive(Debug)]
struct Form {
    of: String,
    text: String,
}

impl Sentinels {
    /// A word that is a secret as a whole.
    pub fn add_word(&mut self, of: &str, word: &str) {
        assert!(word.len() >= 12, "{of}: too short to be told from other text");
        self.add_forms(of, word.as_bytes());
    }

    /// Bytes of which no part may turn up, but for parts that `public` has as well.
    pub fn add_bytes(&mut self, of: &str, secret: &[u8], public: &[u8]) {
        let before = self.forms.len();
        for window in secret.chunks_exact(WINDOW).step_by(2) {
            let dull = window.iter().all(|b| *b < 32);
            if !dull && !public.windows(WINDOW).any(|w| w == window) {
                self.add_forms(of, window);
            }
        }
        assert!(self.forms.len() > before, "nothing of {of} is looked for");
    }

    /// The private part of a key file of `ssh-keygen` or OpenSSL that has no passphrase.
    pub fn add_key_file(&mut self, of: &str, path: &Path) {
        let public = Command::new("ssh-keygen").arg("-y").arg("-f").arg(path).stdin(Stdio::null()).output().expect("ssh-keygen");
        assert!(public.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&public.stderr));
        let public = String::from_utf8(public.stdout).expect("text");
        let public = STANDARD.decode(public.split_whitespace().nth(1).expect("a key")).expect("base64");
        self.add_pem(of, &std::fs::read_to_string(path).expect("a key file"), &public);
    }

    /// What is between the lines of a PEM file.
    pub fn add_pem(&mut self, of: &str, pem: &str, public: &[u8]) {
        let body: String = pem.lines().filter(|l| !l.starts_with("-----") && !l.contains(':')).collect();
        self.add_bytes(of, &STANDARD.decode(body.trim()).expect("base64"), public);
    }

    fn add_forms(&mut self, of: &str, secret: &[u8]) {
        let mut add = |form: &str, text: String| self.forms.push(Form { of: format!("{of} ({form})"), text });
        // of what is ASCII this is the text itself
        add("plain", secret.escape_ascii().to_string());
        let each = |f: fn(u8) -> String, between: &str| secret.iter().map(|b| f(*b)).collect::<Vec<_>>().join(between);
        add("hex", each(|b| format!("{b:02x}"), ""));
        add("HEX", each(|b| format!("{b:02X}"), ""));
        add("hex with spaces", each(|b| format!("{b:02x}"), " "));
        add("hex with colons", each(|b| format!("{b:02x}"), ":"));
        add("URL", each(|b| format!("%{b:02X}"), ""));
        add("array", each(|b| b.to_string(), ", "));
        add("JSON array", each(|b| b.to_string(), ","));
        add("hex array", each(|b| format!("{b:x}"), ", "));
        for shift in 0..3 {
            let shifted: Vec<u8> = std::iter::repeat_n(0, shift).chain(secret.iter().copied()).collect();
            // only characters that no neighbour has a part in
            let whole = (shift * 8).div_ceil(6)..shifted.len() * 8 / 6;
            add("base64", STANDARD_NO_PAD.encode(&shifted)[whole.clone()].to_owned());
            add("base64 of URLs", URL_SAFE_NO_PAD.encode(&shifted)[whole].to_owned());
        }
    }

    /// Which secrets a text shows, and where. By grep, since a log is large and a test is not built for speed.
    pub fn found_in(&self, text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (patterns, place) = (dir.path().join("patterns"), dir.path().join("text"));
        let lines: String = self.forms.iter().map(|form| format!("{}\n", form.text)).collect();
        std::fs::write(&patterns, lines).and_then(|()| std::fs::write(&place, text)).expect("writing temporary files");
        let mut grep = Command::new("grep");
        grep.args(["-a", "-o", "-b", "-F", "-f"]).arg(&patterns).arg(&place).env("LC_ALL", "C").stdin(Stdio::null());
        let output = grep.output().expect("grep");
        assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
        let mut found = BTreeMap::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let (at, secret) = line.split_once(':').expect("an offset");
            let of = self.forms.iter().find(|form| form.text == secret).map_or("an unknown form", |form| &form.of);
            let at: usize = at.parse().expect("an offset");
            // the way up to it, without the secret itself
            let before = String::from_utf8_lossy(&text.as_bytes()[at.saturating_sub(120)..at]).into_owned();
            found.entry(of).or_insert(before);
        }
        found.into_iter().map(|(of, before)| format!("{of} after …{before}")).collect()
    }

    /// Fails with what a text shows.
    #[track_caller]
    pub fn assert_absent(&self, place: &str, text: &str) {
        let found = self.found_in(text);
        assert!(found.is_empty(), "{place} shows {found:#?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORD: &str = "Zx9-quite-secret";

    #[test]
    fn a_word_is_found_in_every_form() {
        let mut sentinels = Sentinels::default();
        sentinels.add_word("word", WORD);
        let debug = format!("{:?}", WORD.as_bytes());
        let hex: String = WORD.bytes().map(|b| format!("{b:02x}")).collect();
        let in_base64 = |before: &str| STANDARD.encode(format!("{before}{WORD} and more"));
        for text in [&format!("a {WORD} b"), &debug, &hex, &hex.to_uppercase(), &in_base64(""), &in_base64("1"), &in_base64("12")] {
            assert!(!sentinels.found_in(text).is_empty(), "{text}");
            assert!(!sentinels.found_in(text)[0].contains(WORD));
        }
        assert!(sentinels.found_in("Zx9-quite-secre").is_empty());
    }

    #[test]
    fn of_a_key_only_what_is_not_public_is_a_secret() {
        let secret: Vec<u8> = (0..108).map(|n| n * 2 + 1).collect();
        let mut sentinels = Sentinels::default();
        sentinels.add_bytes("key", &secret, &secret[..60]);
        assert!(sentinels.found_in(&format!("{:?}", &secret[..60])).is_empty());
        assert!(!sentinels.found_in(&format!("{:?}", &secret[40..])).is_empty());
    }
}
