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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[test]
    fn an_overlay_is_thin_and_names_the_format_of_its_base() {
        let spec =
            VolumeSpec::Overlay { name: "a.qcow2", capacity: 10 << 30, backing_path: "/p/b&c.raw", backing_format: ImageFormat::Raw };
        let read = VolumeXml::parse(&spec.to_xml()).expect("readable");
        assert_eq!((read.capacity, read.allocation), (10 << 30, 0));
        assert_eq!((read.format.as_deref(), read.backing_format.as_deref()), (Some("qcow2"), Some("raw")));
        assert_eq!(read.backing_path.as_deref(), Some("/p/b&c.raw"));
    }

    #[test]
    fn uploaded_bytes_are_allocated_to_their_exact_length() {
        let xml = VolumeSpec::Bytes { name: "a-seed.iso", length: 380_928 }.to_xml();
        let read = VolumeXml::parse(&xml).expect("readable");
        assert_eq!((read.capacity, read.allocation, read.format.as_deref()), (380_928, 380_928, Some("raw")));
        assert!(xml.contains("<mode>0600</mode>"), "a seed holds secrets: {xml}");
    }

    #[test]
    fn a_volume_of_a_host_is_read() {
        let xml = "<volume type='file'><name>a.qcow2</name><key>/p/a.qcow2</key><capacity unit='bytes'>1073741824</capacity>
          <allocation unit='bytes'>200704</allocation><physical unit='bytes'>196616</physical>
          <target><path>/p/a.qcow2</path><format type='qcow2'/>
            <timestamps><atime>1.0</atime><mtime>1767323045.25</mtime></timestamps></target>
          <backingStore><path>/p/base.raw</path><format type='raw'/></backingStore></volume>";
        let expected = VolumeXml {
            name: "a.qcow2".to_owned(),
            key: "/p/a.qcow2".to_owned(),
            capacity: 1 << 30,
            allocation: 200_704,
            physical: Some(196_616),
            path: Some("/p/a.qcow2".to_owned()),
            format: Some("qcow2".to_owned()),
            backing_path: Some("/p/base.raw".to_owned()),
            backing_format: Some("raw".to_owned()),
            modified: "2026-01-02T03:04:05.25Z".parse().ok(),
        };
        assert_eq!(VolumeXml::parse(xml), Ok(expected));
    }

    #[rstest]
    #[case("<capacity unit='KiB'>2</capacity>", Some(2048))]
    #[case("<capacity>7</capacity>", Some(7))]
    #[case("<capacity unit='GiB'>18446744073709551615</capacity>", None)]
    #[case("<capacity unit='furlong'>1</capacity>", None)]
    #[case("<capacity>-1</capacity>", None)]
    #[case("", None)]
    fn a_size_is_read_with_its_unit_and_never_wraps(#[case] capacity: &str, #[case] expected: Option<u64>) {
        let read = VolumeXml::parse(&format!("<volume><name>a</name>{capacity}</volume>"));
        assert_eq!(read.ok().map(|v| v.capacity), expected);
    }

    #[test]
    fn a_pool_says_where_its_volumes_will_be() {
        let pool = StoragePoolXml::parse("<pool type='dir'><name>default</name><target><path>/var/lib/images/</path></target></pool>")
            .expect("readable");
        assert_eq!((pool.kind.as_str(), pool.name.as_str()), ("dir", "default"));
        assert_eq!(pool.volume_path("a.qcow2"), "/var/lib/images/a.qcow2");
    }

    #[rstest]
    #[case("<pool type='dir'/>")]
    #[case("<pool type='dir'><target><path>images</path></target></pool>")]
    fn a_pool_without_an_absolute_path_is_not_usable(#[case] xml: &str) {
        assert_eq!(StoragePoolXml::parse(xml), Err(XmlFault::Missing { element: "target/path" }));
    }

    proptest! {
        #[test]
        fn junk_never_panics(mtime in "\\PC{0,20}", size in "\\PC{0,20}") {
            let xml = format!("<volume><name>a</name><capacity>{size}</capacity><target><timestamps><mtime>{mtime}</mtime></timestamps></target></volume>");
            let _ = VolumeXml::parse(&xml);
            let _ = seconds(&mtime);
        }
    }
}
