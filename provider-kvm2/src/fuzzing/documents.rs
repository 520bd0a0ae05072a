//! XML that a host answers. libvirt hands bytes over; what is no UTF-8 is replaced first, as there.

use std::time::Duration;

use jiff::{Timestamp, Unit};

use super::assert_kept;
use crate::config::{Firmware, ImageFormat};
use crate::domain::capabilities::DomainCapabilities;
use crate::domain::host_xml::{disks, nic_macs};
use crate::domain::mark::MarkFault;
use crate::domain::volume::{StoragePoolXml, VolumeSpec, VolumeXml};
use crate::domain::{Mark, XmlFault};

pub(super) fn domain_xml(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let found = disks(&text);
    let macs = nic_macs(&text);
    assert_eq!(found.as_ref().err(), macs.as_ref().err(), "one document, one verdict");
    let (Ok(found), Ok(macs)) = (found, macs) else { return };
    let own = found.iter().flat_map(|d| {
        let options = [&d.path, &d.pool, &d.volume, &d.format];
        options.into_iter().flatten().chain([&d.target]).chain(&d.also_uses)
    });
    assert_kept(own.map(String::as_str), &text);
    for disk in &found {
        for path in disk.path.iter().chain(&disk.also_uses) {
            assert!(disk.uses_path(path));
        }
    }
    for mac in &macs {
        assert!(mac.len() == 17 && mac.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b':')), "{mac:?}");
    }
    // what stands beside the root changes nothing
    assert_eq!(disks(&format!("<?xml version='1.0'?>\n<!-- -->{text}")), Ok(found));
}

pub(super) fn volume_xml(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let Ok(volume) = VolumeXml::parse(&text) else { return };
    assert!(!volume.name.is_empty());
    let options = [&volume.path, &volume.format, &volume.backing_path, &volume.backing_format];
    assert_kept(options.into_iter().flatten().chain([&volume.name, &volume.key]).map(String::as_str), &text);
    // what was read can be asked of a host, and is read back the same
    let backing_path = volume.backing_path.as_deref().unwrap_or("/base");
    let spec =
        VolumeSpec::Overlay { name: &volume.name, capacity: volume.capacity, backing_path, backing_format: ImageFormat::Qcow2 }.to_xml();
    let again = VolumeXml::parse(&spec).expect("own output is readable");
    assert_eq!((again.name, again.capacity, again.backing_path.as_deref()), (volume.name, volume.capacity, Some(backing_path)));
}

pub(super) fn pool_xml(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let Ok(pool) = StoragePoolXml::parse(&text) else { return };
    assert_kept([pool.name.as_str(), &pool.kind, &pool.target_path], &text);
    let path = pool.volume_path("a.qcow2");
    assert!(path.starts_with('/') && path.ends_with("/a.qcow2") && !path.ends_with("//a.qcow2"), "{path:?}");
}

pub(super) fn capabilities_xml(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let Ok(found) = DomainCapabilities::parse(&text) else { return };
    let lists = found.loaders.iter().chain(&found.cpu_modes).chain(&found.cpu_models);
    assert_kept(lists.chain([&found.emulator, &found.virt_type, &found.machine]).map(String::as_str), &text);
    assert!(found.has_firmware(Firmware::Bios));
    assert_eq!(found.has_firmware(Firmware::Uefi), found.efi);
    for mode in ["host-passthrough", "host-model", "maximum"] {
        assert_eq!(found.has_cpu(mode), found.cpu_modes.iter().any(|m| m == mode), "a model is no mode: {mode}");
    }
}

pub(super) fn mark(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let now: Timestamp = "2026-01-02T03:04:05Z".parse().expect("a time");
    let mark = match Mark::parse(&text, now) {
        Ok(mark) => mark,
        Err(MarkFault::Xml(XmlFault::TooLong { limit })) => return assert!(text.len() > limit),
        Err(_) => return,
    };
    let values =
        [&mark.uid, &mark.installation_id, &mark.spec_hash, &mark.entry, &mark.image_key, &mark.base, &mark.base_digest, &mark.owner];
    for value in values {
        assert!(value.len() <= 255 && value.bytes().all(|b| b.is_ascii_graphic()), "{value:?}");
    }
    assert!(mark.created_at.is_none_or(|at| at <= now), "created in the future");
    assert!(mark.has_uid(&mark.uid) && !mark.has_other_uid(&mark.uid));
    assert!(mark.is_of_installation(&mark.installation_id));
    assert!(!mark.is_fresh(now, Duration::ZERO));
    // written and read again it is the same mark, but for fractions of seconds
    let whole = |at: Option<Timestamp>| at.map(|at| at.round(Unit::Second).unwrap_or(at));
    let expected = Mark { created_at: whole(mark.created_at), attempt_at: whole(mark.attempt_at), ..mark };
    assert_eq!(Mark::parse(&expected.to_element(), now).as_ref(), Ok(&expected));
    assert_eq!(Mark::parse(&expected.to_metadata(), now).as_ref(), Ok(&expected));
}
