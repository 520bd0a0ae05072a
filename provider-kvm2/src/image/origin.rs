//! `<base>.origin`: where a base came from, as JSON beside it.
//!
//! It is read back from a host, so it is untrusted: bounded, unknown fields
//! ignored, and wrong content makes a base unusable, never more. The URL itself may
//! hold a secret; only its redacted form and its digest are written.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::{ImageUrl, Sha256Hex};
use crate::error::bounded_to;

/// More is not read, and not written.
pub const MAX_BYTES: u64 = 8 << 10;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    pub entry: String,
    pub key: String,
    /// For a person; without user-info and query.
    pub url: String,
    /// Digest of the exact URL: how a later lookup knows it again.
    pub url_sha256: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Bytes in the volume.
    pub length: u64,
    pub virtual_size: u64,
    pub format: String,
    /// When the upload was complete, by the clock of the daemon that made it.
    pub time: jiff::Timestamp,
    /// Digest of the bytes in the volume. Differs from the marker's, which is the
    /// download's, where the image was unpacked on the way.
    pub stored_sha256: String,
}

impl Origin {
    /// None unless it is one whole, small JSON object of this shape.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() as u64 > MAX_BYTES {
            return None;
        }
        serde_json::from_slice(bytes).ok()
    }

    pub fn to_json(&self) -> Vec<u8> {
        let mut origin = self.clone();
        // the only texts whose length others choose
        origin.url = bounded_to(&origin.url, 2048);
        origin.etag = origin.etag.map(|e| bounded_to(&e, 256));
        let mut json = serde_json::to_vec_pretty(&origin).expect("strings and numbers have a JSON form");
        json.push(b'\n');
        json
    }
}

/// The digest by which a URL is known again without being written down.
pub fn url_sha256(url: &ImageUrl) -> String {
    Sha256Hex::of(&Sha256::digest(url.as_secret_str()).into()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn origin() -> Origin {
        let url = ImageUrl::parse("https://images.test/debian.qcow2?token=SENTINEL").unwrap();
        Origin {
            entry: "lab".into(),
            key: "debian".into(),
            url: url.redacted(),
            url_sha256: url_sha256(&url),
            etag: Some("\"abc\"".into()),
            length: 10,
            virtual_size: 3 << 30,
            format: "qcow2".into(),
            time: "2026-01-02T03:04:05Z".parse().unwrap(),
            stored_sha256: "0".repeat(64),
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_holds_no_secret() {
        let json = origin().to_json();
        assert!(!String::from_utf8_lossy(&json).contains("SENTINEL"));
        assert_eq!(Origin::parse(&json), Some(origin()));
    }

    #[test]
    fn unknown_fields_are_ignored_and_zeros_or_excess_are_refused() {
        let text = String::from_utf8(origin().to_json()).unwrap().replacen('{', "{\"later\": [1],", 1);
        assert!(Origin::parse(text.as_bytes()).is_some());
        assert_eq!(Origin::parse(&vec![0; text.len()]), None);
        let padded = text + &" ".repeat(MAX_BYTES as usize);
        assert_eq!(Origin::parse(padded.as_bytes()), None);
    }

    #[test]
    fn long_foreign_texts_do_not_make_it_unreadable() {
        let mut o = origin();
        o.url = format!("https://images.test/{}", "é".repeat(50_000));
        o.etag = Some("x".repeat(50_000));
        assert!(Origin::parse(&o.to_json()).is_some());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Origin::parse(&bytes);
        }
    }
}
