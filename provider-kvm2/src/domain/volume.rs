//! Volumes and pools: the XML that makes them and the XML that a host answers.

use jiff::Timestamp;

use super::xml::{Element, XmlFault};
use crate::config::ImageFormat;

/// A volume to make. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeSpec<'a> {
    /// A VM's disk: qcow2 over a base, thin.
    Overlay { name: &'a str, capacity: u64, backing_path: &'a str, backing_format: ImageFormat },
    /// Bytes that will be uploaded as they are: a base, a seed, a marker. Allocated in full, so that a
    /// lack of space shows here: a stream write that fails later kills libvirtd.
    Bytes { name: &'a str, length: u64 },
}

impl VolumeSpec<'_> {
    pub fn to_xml(&self) -> String {
        match *self {
            Self::Overlay { name, capacity, backing_path, backing_format } => {
                let target = target("qcow2").and(Element::leaf("compat", "1.1"));
                let backing = Element::new("backingStore")
                    .and(Element::leaf("path", backing_path))
                    .and(Element::new("format").with("type", backing_format.as_str()));
                volume(name, capacity, 0).and(target).and(backing).to_xml()
            }
            Self::Bytes { name, length } => volume(name, length, length).and(target("raw")).to_xml(),
        }
    }
}

fn volume(name: &str, capacity: u64, allocation: u64) -> Element {
    let size = |name, bytes: u64| Element::leaf(name, bytes).with("unit", "bytes");
    Element::new("volume").and(Element::leaf("name", name)).and(size("capacity", capacity)).and(size("allocation", allocation))
}

/// A seed holds user-data, and a guest's disk is nobody else's business either.
fn target(format: &str) -> Element {
    Element::new("target")
        .and(Element::new("format").with("type", format))
        .and(Element::new("permissions").and(Element::leaf("mode", "0600")))
}

/// A volume as a host describes it. Sizes in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeXml {
    pub name: String,
    pub key: String,
    /// What a guest sees as the disk.
    pub capacity: u64,
    pub allocation: u64,
    /// Length of the file, where it is told.
    pub physical: Option<u64>,
    /// Path of the file.
    pub path: Option<String>,
    /// As libvirt probes it: `qcow2`, `raw`, `iso`.
    pub format: Option<String>,
    /// Path of the volume it backs onto.
    pub backing_path: Option<String>,
    pub backing_format: Option<String>,
    pub modified: Option<Timestamp>,
}

impl VolumeXml {
    pub fn parse(xml: &str) -> Result<Self, XmlFault> {
        let root = Element::parse_document(xml, "volume")?;
        let text = |path: &[&str]| root.find(path).map(Element::text).filter(|t| !t.is_empty()).map(str::to_owned);
        let format = |path: &[&str]| root.find(path).and_then(|f| f.attribute("type")).map(str::to_owned);
        let size = |name| root.child(name).and_then(bytes);
        Ok(Self {
            name: text(&["name"]).ok_or(XmlFault::Missing { element: "name" })?,
            key: text(&["key"]).unwrap_or_default(),
            capacity: size("capacity").ok_or(XmlFault::Missing { element: "capacity" })?,
            allocation: size("allocation").unwrap_or_default(),
            physical: size("physical"),
            path: text(&["target", "path"]),
            format: format(&["target", "format"]),
            backing_path: text(&["backingStore", "path"]),
            backing_format: format(&["backingStore", "format"]),
            modified: text(&["target", "timestamps", "mtime"]).as_deref().and_then(seconds),
        })
    }
}

/// A pool as a host describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoragePoolXml {
    pub name: String,
    /// `dir`, `fs`, `netfs`, …
    pub kind: String,
    /// Directory of its volumes, without a slash at its end.
    pub target_path: String,
}

impl StoragePoolXml {
    pub fn parse(xml: &str) -> Result<Self, XmlFault> {
        let root = Element::parse_document(xml, "pool")?;
        let path = root.find(&["target", "path"]).map(Element::text).unwrap_or_default();
        // the path of a volume is this and its name; a relative one would be another file in each process
        if !path.starts_with('/') {
            return Err(XmlFault::Missing { element: "target/path" });
        }
        Ok(Self {
            name: root.child("name").map(Element::text).unwrap_or_default().to_owned(),
            kind: root.attribute("type").unwrap_or_default().to_owned(),
            target_path: path.trim_end_matches('/').to_owned(),
        })
    }

    /// Where the pool keeps a volume of this name, whether it exists or not.
    pub fn volume_path(&self, volume: &str) -> String {
        format!("{}/{volume}", self.target_path)
    }
}

/// libvirt writes bytes; other units are what an administrator's tools may hand through.
fn bytes(element: &Element) -> Option<u64> {
    let number: u64 = element.text().parse().ok()?;
    let factor = match element.attribute("unit").unwrap_or("bytes") {
        "b" | "B" | "byte" | "bytes" => 1,
        "k" | "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.checked_mul(factor)
}

/// `seconds.nanoseconds` since 1970.
fn seconds(text: &str) -> Option<Timestamp> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let nanoseconds = format!("{fraction:0<9}");
    Timestamp::new(seconds.parse().ok()?, nanoseconds.get(..9)?.parse().ok()?).ok()
}
