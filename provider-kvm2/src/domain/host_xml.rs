//! What is read out of the domain documents that a host answers, ours or not.

use super::xml::{Element, XmlFault};

/// A disk of a domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskSource {
    /// Device name, `vda`.
    pub target: String,
    /// The file or block device it reads and writes.
    pub path: Option<String>,
    /// For `type='volume'` disks: the pool and volume instead of a path.
    pub pool: Option<String>,
    pub volume: Option<String>,
    /// The driver's format, `qcow2`.
    pub format: Option<String>,
    pub readonly: bool,
    /// Paths below and beside it that are in use as well: the backing chain and the target of a
    /// block job. Only a live document has them.
    pub also_uses: Vec<String>,
}

impl DiskSource {
    /// Whether the domain uses this file through this disk.
    pub fn uses_path(&self, path: &str) -> bool {
        self.path.as_deref() == Some(path) || self.also_uses.iter().any(|used| used == path)
    }
}

/// The disks of a domain document, CD-ROMs included, empty drives too.
pub fn disks(xml: &str) -> Result<Vec<DiskSource>, XmlFault> {
    Ok(devices(xml, "disk")?.iter().map(disk).collect())
}

/// The MACs of a domain's interfaces, lower case; what is no MAC is left out.
pub fn nic_macs(xml: &str) -> Result<Vec<String>, XmlFault> {
    let macs = devices(xml, "interface")?;
    let macs = macs.iter().filter_map(|nic| Some(nic.child("mac")?.attribute("address")?.trim().to_ascii_lowercase()));
    Ok(macs.filter(|mac| is_mac(mac)).collect())
}

/// Six hex pairs with colons.
pub(super) fn is_mac(text: &str) -> bool {
    let mut pairs = text.split(':');
    let six = pairs.by_ref().take(6).filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit())).count();
    six == 6 && pairs.next().is_none()
}

fn devices(xml: &str, name: &str) -> Result<Vec<Element>, XmlFault> {
    let root = Element::parse_document(xml, "domain")?;
    Ok(root.children("devices").flat_map(|devices| devices.children(name)).cloned().collect())
}

fn disk(element: &Element) -> DiskSource {
    let owned = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
    let source = |name| element.find(&["source"]).and_then(|s| s.attribute(name)).and_then(owned);
    let mut also_uses = Vec::new();
    for name in ["backingStore", "mirror"] {
        element.children(name).for_each(|e| collect_paths(e, &mut also_uses));
    }
    DiskSource {
        target: element.find(&["target"]).and_then(|t| t.attribute("dev")).unwrap_or_default().to_owned(),
        path: source("file").or_else(|| source("dev")),
        pool: source("pool"),
        volume: source("volume"),
        format: element.find(&["driver"]).and_then(|d| d.attribute("type")).and_then(owned),
        readonly: element.child("readonly").is_some(),
        also_uses,
    }
}

/// Every source below an element. Recursion is bounded by the depth that the parser allows.
fn collect_paths(element: &Element, paths: &mut Vec<String>) {
    for child in element.all_children() {
        if child.name() == "source" {
            paths.extend(["file", "dev"].iter().filter_map(|name| child.attribute(name)).map(str::to_owned));
        }
        collect_paths(child, paths);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const LIVE: &str = "<domain type='kvm' id='3' xmlns:qemu='u'><name>a</name><devices>
      <emulator>/usr/bin/qemu</emulator>
      <disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/p/a.qcow2' index='2'/>
        <backingStore type='file' index='3'><format type='qcow2'/><source file='/p/snap.qcow2'/>
          <backingStore type='block' index='4'><format type='raw'/><source dev='/dev/vg/base'/><backingStore/></backingStore>
        </backingStore>
        <mirror type='file' job='copy'><format type='qcow2'/><source file='/p/copy.qcow2'/></mirror>
        <target dev='vda' bus='virtio'/></disk>
      <disk type='volume' device='disk'><driver name='qemu' type='raw'/><source pool='default' volume='a-seed.iso'/><target dev='vdb'/><readonly/></disk>
      <disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
      <disk type='network'><source protocol='rbd' name='pool/image'/><target dev='vdc'/></disk>
      <interface type='bridge'><mac address='52:AB:00:00:00:01'/></interface>
      <interface type='bridge'><mac address='nonsense'/></interface><interface type='user'/>
    </devices></domain>";

    #[test]
    fn a_live_disk_names_everything_it_uses() {
        let disks = disks(LIVE).expect("readable");
        assert_eq!(disks.len(), 4);
        assert_eq!(disks[0].also_uses, ["/p/snap.qcow2", "/dev/vg/base", "/p/copy.qcow2"]);
        for path in ["/p/a.qcow2", "/dev/vg/base", "/p/copy.qcow2"] {
            assert!(disks[0].uses_path(path), "{path}");
        }
        assert!(!disks[0].uses_path("/p/a"));
    }

    #[test]
    fn a_disk_by_pool_and_volume_an_empty_drive_and_a_network_disk_are_read() {
        let disks = disks(LIVE).expect("readable");
        assert_eq!((disks[1].pool.as_deref(), disks[1].volume.as_deref(), disks[1].readonly), (Some("default"), Some("a-seed.iso"), true));
        assert_eq!(disks[2], DiskSource { target: "sda".to_owned(), readonly: true, ..DiskSource::default() });
        assert_eq!((disks[3].target.as_str(), &disks[3].path), ("vdc", &None));
    }

    #[test]
    fn macs_are_lower_case_and_nothing_else() {
        assert_eq!(nic_macs(LIVE), Ok(vec!["52:ab:00:00:00:01".to_owned()]));
    }

    #[rstest]
    #[case("52:ab:00:00:00:01", true)]
    #[case("52:ab:00:00:00", false)]
    #[case("52:ab:00:00:00:01:02", false)]
    #[case("52:ab:00:00:00:0g", false)]
    #[case("52-ab-00-00-00-01", false)]
    #[case("", false)]
    fn a_mac_is_six_hex_pairs(#[case] text: &str, #[case] mac: bool) {
        assert_eq!(is_mac(text), mac);
    }

    #[test]
    fn another_document_and_one_too_large_are_refused() {
        assert_eq!(disks("<pool/>"), Err(XmlFault::WrongRoot { expected: "domain" }));
        let huge = format!("<domain><name>{}</name></domain>", "a".repeat(1 << 20));
        assert_eq!(disks(&huge), Err(XmlFault::TooLong { limit: 1 << 20 }));
    }

    #[test]
    fn a_backing_chain_as_deep_as_the_parser_allows_is_read() {
        let chain = 200;
        let open: String = (0..chain).map(|n| format!("<backingStore><source file='/p/{n}'/>")).collect();
        let xml = format!("<domain><devices><disk>{open}{}</disk></devices></domain>", "</backingStore>".repeat(chain));
        assert_eq!(disks(&xml).expect("readable")[0].also_uses.len(), chain);
    }

    proptest! {
        #[test]
        fn junk_never_panics(junk in "(<domain>|<devices>|<disk>|<source file='x'/>|<backingStore>|</disk>|</devices>|</domain>|\\PC){0,30}") {
            let _ = disks(&junk);
            let _ = nic_macs(&junk);
        }
    }
}
