//! Which volumes of a listing are bases of an image, and which of them to use.
//!
//! Pure. Names are never taken apart: entry and key may hold dashes and dots, so
//! `base-a-b-c-…` says neither. A name is matched against the exact prefix of a
//! known entry and key, and a base of ours counts only if its origin names both.
//! (`base-a-b-01234567.qcow2` is a base of ours of entry a, key b, or the
//! predecessor's of entry a, key `b-01234567`: the origin tells.)

use std::collections::HashMap;

use crate::config::{ImageFormat, ImageUrl, Sha256Hex};
use crate::hypervisor::VolumeRef;

use super::ImageRef;
use super::origin::{Origin, url_sha256};

pub const MARKER: &str = ".sha256";
pub const ORIGIN: &str = ".origin";

/// Larger than a digest with a newline; what is longer is no marker.
pub const MARKER_MAX_BYTES: u64 = 256;

const ID_DIGITS: usize = 8;
const URL_KEY: &str = "url-";

/// The name of a base that is to be uploaded; `id` is random.
pub fn base_name(entry: &str, key: &str, id: u32, format: ImageFormat) -> String {
    format!("base-{entry}-{key}-{id:08x}.{}", format.as_str())
}

/// The first half of a base's id: which daemon uploads it.
pub(crate) fn signature(base: &str) -> Option<u16> {
    let (stem, _) = base.rsplit_once('.')?;
    let (_, id) = stem.rsplit_once('-')?;
    is_id(id).then(|| u16::from_str_radix(&id[..ID_DIGITS / 2], 16).ok()).flatten()
}

/// A volume with a base's name, and what lies beside it.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    pub base: &'a VolumeRef,
    pub origin: Option<&'a VolumeRef>,
    pub marker: Option<&'a VolumeRef>,
    pub naming: Naming,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// `base-<entry>-<key>-<id>.<format>`: immutable, with an origin.
    Ours,
    /// `base-<entry>-<key>.<format>`: the predecessor's, and the predecessor may yet replace it.
    Legacy,
}

/// What the small volumes beside a base say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub digest: Sha256Hex,
    pub origin: Option<Origin>,
}

/// All volumes named as bases of the image, complete or not, in listing order.
pub fn candidates<'a>(volumes: &'a [VolumeRef], entry: &str, image: &ImageRef) -> Vec<Candidate<'a>> {
    let by_name: HashMap<&str, &VolumeRef> = volumes.iter().map(|v| (v.name.as_str(), v)).collect();
    let prefix = format!("base-{entry}-{}-", image.key);
    let suffix = format!(".{}", image.format.as_str());
    let legacy: Vec<String> = legacy_keys(image).iter().map(|key| format!("base-{entry}-{key}{suffix}")).collect();
    let beside = |base: &VolumeRef, what: &str| by_name.get(format!("{}{what}", base.name).as_str()).copied();
    volumes
        .iter()
        .filter(|base| base.name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(&suffix)).is_some_and(is_id))
        .map(|base| (base, Naming::Ours))
        .chain(volumes.iter().filter(|v| legacy.contains(&v.name)).map(|base| (base, Naming::Legacy)))
        .map(|(base, naming)| Candidate { base, origin: beside(base, ORIGIN), marker: beside(base, MARKER), naming })
        .collect()
}

/// All bases of ours of the entry, whatever their key; [`is_of`] tells with the origin at hand.
pub fn all_ours<'a>(volumes: &'a [VolumeRef], entry: &str) -> Vec<Candidate<'a>> {
    let by_name: HashMap<&str, &VolumeRef> = volumes.iter().map(|v| (v.name.as_str(), v)).collect();
    let prefix = format!("base-{entry}-");
    let origins = volumes.iter().filter(|v| v.name.starts_with(&prefix));
    origins
        .filter_map(|origin| {
            let base = by_name.get(origin.name.strip_suffix(ORIGIN)?)?;
            let marker = by_name.get(format!("{}{MARKER}", base.name).as_str()).copied();
            Some(Candidate { base, origin: Some(origin), marker, naming: Naming::Ours })
        })
        .collect()
}

/// Whether the origin is that of a base of the entry, and of this very name.
pub fn is_of(candidate: &Candidate<'_>, origin: &Origin, entry: &str) -> bool {
    let prefix = format!("base-{entry}-{}-", origin.key);
    let id = candidate.base.name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(&origin.format)?.strip_suffix('.'));
    origin.entry == entry && id.is_some_and(is_id)
}

/// Whether a complete base may serve the image.
pub fn usable(naming: Naming, facts: &Facts, entry: &str, image: &ImageRef) -> bool {
    let from_here = match (naming, &facts.origin) {
        (Naming::Ours, None) => false,
        (Naming::Ours, Some(o)) => o.entry == entry && o.key == image.key && o.format == image.format.as_str(),
        (Naming::Legacy, None) => true,
        // with an origin it is a base of ours, of another key that ends in what looks like an id
        (Naming::Legacy, Some(_)) => false,
    };
    let same_content = match (&image.sha256, &facts.origin) {
        (Some(wanted), _) => *wanted == facts.digest,
        (None, Some(o)) => o.url_sha256 == url_sha256(&image.url),
        (None, None) => true,
    };
    from_here && same_content
}

/// The one that every process agrees on: the oldest; the predecessor's came before all.
pub fn oldest<'a, T>(usable: impl IntoIterator<Item = (&'a str, &'a Facts, T)>) -> Option<T> {
    let age = |name: &'a str, facts: &'a Facts| (facts.origin.as_ref().map(|o| o.time), name);
    usable.into_iter().min_by(|a, b| age(a.0, a.1).cmp(&age(b.0, b.1))).map(|(_, _, t)| t)
}

/// Bases of the entry that have no marker, not even an empty one.
pub fn without_marker<'a>(volumes: &'a [VolumeRef], entry: &str) -> Vec<&'a VolumeRef> {
    let names: std::collections::HashSet<&str> = volumes.iter().map(|v| v.name.as_str()).collect();
    let prefix = format!("base-{entry}-");
    let is_base = |name: &str| name.starts_with(&prefix) && (name.ends_with(".qcow2") || name.ends_with(".raw"));
    volumes.iter().filter(|v| is_base(&v.name) && !names.contains(format!("{}{MARKER}", v.name).as_str())).collect()
}

fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The predecessor named an image that was given as a URL by 16 digits of the URL's digest.
fn legacy_keys(image: &ImageRef) -> Vec<String> {
    let mut keys = vec![image.key.clone()];
    if image.key.starts_with(URL_KEY) {
        keys.push(url_sha256(&image.url)[..16].to_owned());
    }
    keys
}

/// The key of an image that is named by its URL; no catalogue key begins so.
pub fn url_key(url: &ImageUrl) -> String {
    format!("{URL_KEY}{}", &url_sha256(url)[..32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Firmware;
    use crate::image::UrlTrust;
    use proptest::prelude::*;

    fn volumes(names: &[&str]) -> Vec<VolumeRef> {
        names.iter().map(|&n| VolumeRef { name: n.to_owned(), key: format!("/pools/default/{n}"), handle: None }).collect()
    }

    fn image(key: &str, sha256: Option<char>) -> ImageRef {
        ImageRef {
            key: key.into(),
            url: ImageUrl::parse("https://images.test/a.qcow2").unwrap(),
            sha256: sha256.map(digest),
            format: ImageFormat::Qcow2,
            firmware: Firmware::Uefi,
            trust: UrlTrust::Configured,
        }
    }

    fn digest(c: char) -> Sha256Hex {
        Sha256Hex::parse(&c.to_string().repeat(64)).unwrap()
    }

    fn facts(c: char, key: &str, url: &str, time: &str) -> Facts {
        let url = ImageUrl::parse(url).unwrap();
        let origin = Origin {
            entry: "lab".into(),
            key: key.into(),
            url: url.redacted(),
            url_sha256: url_sha256(&url),
            etag: None,
            length: 1,
            virtual_size: 1,
            format: "qcow2".into(),
            time: time.parse().unwrap(),
            stored_sha256: digest(c).to_string(),
        };
        Facts { digest: digest(c), origin: Some(origin) }
    }

    const URL: &str = "https://images.test/a.qcow2";
    const EARLY: &str = "2026-01-01T00:00:00Z";

    #[test]
    fn only_exact_names_of_the_entry_and_key_are_candidates() {
        let all = volumes(&[
            "base-lab-debian-0123abcd.qcow2",
            "base-lab-debian-0123abcd.qcow2.origin",
            "base-lab-debian-0123abcd.qcow2.sha256",
            "base-lab-debian-12-0123abcd.qcow2",
            "base-lab-debian-0123ABCD.qcow2",
            "base-lab-debian-0123abc.qcow2",
            "base-lab-debian-0123abcd.raw",
            "base-lab-debian.qcow2",
            "base-debian.qcow2",
            "base-lab-debian-99999999.qcow2",
        ]);
        let found = candidates(&all, "lab", &image("debian", None));
        let names: Vec<_> = found.iter().map(|c| (c.base.name.as_str(), c.naming, c.origin.is_some(), c.marker.is_some())).collect();
        assert_eq!(
            names,
            [
                ("base-lab-debian-0123abcd.qcow2", Naming::Ours, true, true),
                ("base-lab-debian-99999999.qcow2", Naming::Ours, false, false),
                ("base-lab-debian.qcow2", Naming::Legacy, false, false),
            ]
        );
    }

    #[test]
    fn a_url_images_legacy_name_is_found() {
        let mut wanted = image("", None);
        wanted.key = url_key(&wanted.url);
        let name = format!("base-lab-{}.qcow2", &url_sha256(&wanted.url)[..16]);
        let all = volumes(&[&name]);
        assert_eq!(candidates(&all, "lab", &wanted).len(), 1);
        assert_eq!(wanted.key.len(), 4 + 32);
    }

    #[test]
    fn with_a_digest_the_digest_decides_and_without_one_the_url() {
        let ours = facts('a', "debian", URL, EARLY);
        let use_it = |facts: &Facts, sha| usable(Naming::Ours, facts, "lab", &image("debian", sha));
        assert!(use_it(&ours, Some('a')) && use_it(&ours, None));
        assert!(!use_it(&ours, Some('b')), "another digest is another base");
        let moved = facts('a', "debian", "https://images.test/b.qcow2", EARLY);
        assert!(use_it(&moved, Some('a')), "the same content from another place");
        assert!(!use_it(&moved, None));
        assert!(!use_it(&facts('a', "debian-12", URL, EARLY), Some('a')), "another key's base");
        assert!(!use_it(&Facts { digest: digest('a'), origin: None }, Some('a')), "ours without an origin is not complete");
        assert!(!usable(Naming::Ours, &ours, "lab2", &image("debian", None)));
    }

    #[test]
    fn a_legacy_base_is_used_by_digest_or_where_nothing_speaks_against_it() {
        let legacy = Facts { digest: digest('a'), origin: None };
        let use_it = |facts: &Facts, sha| usable(Naming::Legacy, facts, "lab", &image("debian", sha));
        assert!(use_it(&legacy, Some('a')) && use_it(&legacy, None));
        assert!(!use_it(&legacy, Some('b')));
        assert!(!use_it(&facts('a', "debian", URL, EARLY), None), "an origin means that it is a base of ours of another key");
    }

    #[test]
    fn the_oldest_is_chosen_and_the_predecessors_came_first() {
        let (late, early) = (facts('a', "debian", URL, "2026-02-01T00:00:00Z"), facts('a', "debian", URL, EARLY));
        let legacy = Facts { digest: digest('a'), origin: None };
        assert_eq!(oldest([("x", &late, 1), ("z", &early, 2), ("y", &early, 3)]), Some(3));
        assert_eq!(oldest([("x", &early, 1), ("z", &legacy, 2)]), Some(2));
        assert_eq!(oldest::<u8>([]), None);
    }

    #[test]
    fn the_id_of_a_base_tells_whose_upload_it_is() {
        assert_eq!(signature(&base_name("lab", "debian-13", 0xabcd_0102, ImageFormat::Qcow2)), Some(0xabcd));
        for stranger in ["base-lab-debian.qcow2", "base-lab-x-ABCD0102.raw", "base-lab-x-abcd0102", "", "é-ééééé.raw"] {
            assert_eq!(signature(stranger), None, "{stranger}");
        }
    }

    #[test]
    fn bases_without_a_marker_are_incomplete() {
        let all = volumes(&["base-lab-a-00000001.qcow2", "base-lab-a-00000001.qcow2.origin", "base-lab-a-00000002.raw", "vm.qcow2"]);
        let found = |all: &[VolumeRef]| without_marker(all, "lab").iter().map(|v| v.name.clone()).collect::<Vec<_>>();
        assert_eq!(found(&all), ["base-lab-a-00000001.qcow2", "base-lab-a-00000002.raw"]);
        let done = volumes(&["base-lab-a-00000001.qcow2", "base-lab-a-00000001.qcow2.sha256"]);
        assert!(found(&done).is_empty());
    }

    proptest! {
        #[test]
        fn a_base_of_ours_is_a_candidate_of_its_own_key(entry in "[a-z0-9][a-z0-9.-]{0,10}", key in "[a-z0-9][a-z0-9.-]{0,10}", id in any::<u32>()) {
            let name = base_name(&entry, &key, id, ImageFormat::Qcow2);
            let all = volumes(&[&name]);
            let found = candidates(&all, &entry, &image(&key, None));
            prop_assert_eq!(found.iter().filter(|c| c.naming == Naming::Ours).count(), 1);
        }

        #[test]
        fn no_name_makes_it_panic(names in proptest::collection::vec("\\PC{0,40}", 0..8)) {
            let all = volumes(&names.iter().map(String::as_str).collect::<Vec<_>>());
            let _ = candidates(&all, "lab", &image("debian", None));
            let _ = without_marker(&all, "lab");
        }
    }
}
