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
