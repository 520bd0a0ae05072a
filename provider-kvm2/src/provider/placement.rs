//! Placement: three catalogue keys checked before any host is asked.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::Placement;
use crate::config::{Config, DigestPolicy, Entry, Firmware, Host, ImageFormat, ImageUrl, MachineType};
use crate::error::{ProviderError, Reason, Result, bounded_to};
use crate::hypervisor::HostId;
use crate::image::{ImageRef, UrlTrust};

/// A placement whose keys all exist.
#[derive(Debug, Clone)]
pub(super) struct Resolved {
    pub entry: Arc<Entry>,
    pub host: Host,
    pub machine: MachineType,
    pub image: ImageRef,
}

impl Resolved {
    pub(super) fn host_id(&self) -> HostId {
        HostId { entry: self.entry.name.clone(), host: self.host.name.clone() }
    }
}

/// The entry of that name; an empty name means the only one there is.
pub(super) fn entry(config: &Config, name: &str) -> Result<Arc<Entry>> {
    let known = || names(config.entries.iter().map(|e| e.name.as_str()));
    if name.is_empty() {
        return match config.entries.as_slice() {
            [only] => Ok(only.clone()),
            _ => Err(ProviderError::invalid(
                Reason::EntryRequired,
                "entry",
                format!("the request names no entry and several are configured; set entry to one of {}", known()),
            )),
        };
    }
    config.entries.iter().find(|e| e.name == name).cloned().ok_or_else(|| {
        let message = format!("entry {} is not configured; this daemon serves {}", quoted(name), known());
        ProviderError::invalid(Reason::EntryUnknown, "entry", message)
    })
}

pub(super) fn resolve(entry: &Arc<Entry>, placement: &Placement) -> Result<Resolved> {
    Ok(Resolved {
        entry: entry.clone(),
        host: host(entry, &placement.zone)?.clone(),
        machine: machine(entry, &placement.machine_type)?,
        image: image(entry, &placement.image)?,
    })
}

fn host<'e>(entry: &'e Entry, zone: &str) -> Result<&'e Host> {
    let known = || names(entry.hosts.iter().map(|h| h.name.as_str()));
    if zone.is_empty() {
        return match entry.hosts.as_slice() {
            [only] => Ok(only),
            _ => Err(ProviderError::invalid(
                Reason::ZoneRequired,
                "placement.zone",
                format!("entry {} has several hosts; set placement.zone to one of {}", entry.name, known()),
            )),
        };
    }
    entry.host(zone).ok_or_else(|| {
        let message = format!("placement.zone {} is not a host of entry {}; it has {}", quoted(zone), entry.name, known());
        ProviderError::invalid(Reason::ZoneUnknown, "placement.zone", message)
    })
}

fn machine(entry: &Entry, key: &str) -> Result<MachineType> {
    entry.machine_types.get(key).copied().ok_or_else(|| {
        let known = names(entry.machine_types.keys().map(String::as_str));
        let message = format!("placement.machine_type {} is not in machineTypes of entry {}; it has {known}", quoted(key), entry.name);
        ProviderError::invalid(Reason::MachineTypeUnknown, "placement.machine_type", message)
    })
}

/// A catalogue key, or an absolute http(s) URL that the entry's policy allows.
pub(super) fn image(entry: &Entry, image: &str) -> Result<ImageRef> {
    const FIELD: &str = "placement.image";
    let found = if let Some(listed) = entry.images.get(image) {
        ImageRef {
            key: image.to_owned(),
            url: listed.url.clone(),
            sha256: listed.sha256.clone(),
            format: listed.format,
            firmware: listed.firmware,
            trust: UrlTrust::Configured,
        }
    } else if let Some(url) = ImageUrl::parse(image) {
        entry.url_policy.check_url(&url).map_err(|refusal| {
            ProviderError::invalid(
                Reason::ImageUrlForbidden,
                FIELD,
                format!("image {url} may not be fetched: {refusal}; put it into images of entry {} or into its urlPolicy", entry.name),
            )
        })?;
        ImageRef { key: url_key(&url), url, sha256: None, format: ImageFormat::Qcow2, firmware: Firmware::Uefi, trust: UrlTrust::Requested }
    } else {
        let known = names(entry.images.keys().map(String::as_str));
        let message =
            format!("placement.image {} is neither in images of entry {} ({known}) nor an http(s) URL", quoted(image), entry.name);
        return Err(ProviderError::invalid(Reason::ImageUnknown, FIELD, message));
    };
    if entry.digests == DigestPolicy::Required && found.sha256.is_none() {
        return Err(ProviderError::invalid(
            Reason::DigestRequired,
            FIELD,
            format!(
                "image {} has no sha256 and entry {} requires one (requireDigest); add it to the catalogue with its sha256",
                found.key, entry.name
            ),
        ));
    }
    Ok(found)
}

/// Cannot be a catalogue key: the prefix is reserved at load. 128 bits.
fn url_key(url: &ImageUrl) -> String {
    let digest = hex::encode(Sha256::digest(url.as_secret_str()));
    format!("url-{}", &digest[..32])
}

/// A caller's word in an error: quoted, escaped and short.
pub(super) fn quoted(text: &str) -> String {
    // what was meant as a URL may hold a password or a token: nothing from where one can begin is shown
    let text = if text.contains('@') { "…" } else { text };
    let text = text.split_once("://").map_or(text, |(scheme, _)| scheme);
    let text = text.split(['?', '#']).next().unwrap_or_default();
    format!("{:?}", bounded_to(text, 80))
}

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    let all: Vec<_> = all.collect();
    let mut text = all.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if all.len() > SHOWN {
        text.push_str(&format!(" and {} more", all.len() - SHOWN));
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_word_that_was_meant_as_a_url_nothing_secret_is_shown() {
        for text in ["ftp://u:S3NT@h/x?S3NT", "u:S3NT@h", "h/x?token=S3NT", "h/x#S3NT", "://u:S3NT@h", "?S3NT"] {
            assert!(!quoted(text).contains("S3NT"), "{text}: {}", quoted(text));
        }
        assert_eq!(quoted("huge one"), "\"huge one\"");
    }
}
