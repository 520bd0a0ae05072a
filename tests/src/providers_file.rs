//! The providers file of a test: the lab's hosts under a name of the test's own, changed
//! where the test wants it. Written as JSON, which is YAML.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::lab::{Host, Lab};

/// A providers file in the making.
#[derive(Debug, Clone, Default)]
pub struct ProvidersFile {
    entries: Vec<EntryFile>,
}

/// One entry of it.
#[derive(Debug, Clone)]
pub struct EntryFile {
    name: String,
    settings: Map<String, Value>,
    known_hosts: KnownHosts,
}

#[derive(Debug, Clone)]
enum KnownHosts {
    /// Lines that the file will have.
    Lines(Vec<String>),
    /// The file is as the test says, which may be absent.
    Path(PathBuf),
}

impl ProvidersFile {
    pub fn new(entries: impl IntoIterator<Item = EntryFile>) -> Self {
        Self { entries: entries.into_iter().collect() }
    }

    /// Writes the file and what it refers to into `dir`; the path of the file.
    pub fn write(&self, dir: &Path) -> PathBuf {
        let entries: Vec<_> = self.entries.iter().map(|entry| entry.document(dir)).collect();
        let text = serde_json::to_string_pretty(&json!({ "providers": entries })).expect("a tree of plain values");
        let path = dir.join("providers.yaml");
        put(&path, &text);
        path
    }
}

impl From<EntryFile> for ProvidersFile {
    fn from(entry: EntryFile) -> Self {
        Self::new([entry])
    }
}

impl EntryFile {
    /// An entry with these hosts of the lab, the images `tiny` and `tiny-raw`, and small machines.
    pub fn of_lab(lab: &Lab, name: &str, hosts: &[impl AsRef<str>]) -> Self {
        let known = std::fs::read_to_string(&lab.known_hosts).expect("the lab's known_hosts");
        let mut entry = Self::bare(name, &lab.id_ed25519);
        entry.known_hosts = KnownHosts::Lines(known.lines().map(str::to_owned).collect());
        entry.settings.insert("hosts".into(), hosts.iter().map(|h| host_settings(lab.host(h.as_ref()))).collect());
        // with BIOS: it finds nothing to boot and halts, where UEFI would go on searching on the test's CPU time
        entry
            .lab_image(lab, "tiny")
            .image_set("tiny", "firmware", "bios")
            .lab_image(lab, "tiny-raw")
            .image_set("tiny-raw", "firmware", "bios")
    }

    /// An entry that reaches nothing: one host at an address where nobody listens.
    pub fn unreachable(name: &str, key_file: &Path) -> Self {
        let mut entry = Self::bare(name, key_file);
        entry.settings.insert(
            "hosts".into(),
            json!([{ "name": "hv1", "address": "127.0.0.1:1", "user": "nobody", "socket": "/run/libvirt/libvirt-sock", "bridge": "br0" }]),
        );
        entry.image("tiny", json!({ "url": "http://127.0.0.1:1/tiny.qcow2", "sha256": "0".repeat(64), "firmware": "bios" }))
    }

    fn bare(name: &str, key_file: &Path) -> Self {
        let settings = json!({
            "sshKeyFile": key_file,
            "diskSizeGb": 1,
            "virtType": "qemu",
            "images": {},
            "machineTypes": { "nano": { "vcpus": 1, "memoryMiB": 128 }, "small": { "vcpus": 1, "memoryMiB": 512 } },
        });
        let Value::Object(settings) = settings else { unreachable!("an object is written above") };
        Self { name: name.to_owned(), settings, known_hosts: KnownHosts::Lines(Vec::new()) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a key of the entry.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.settings.insert(key.to_owned(), value.into());
        self
    }

    /// Adds or replaces an image of the catalogue.
    #[must_use]
    pub fn image(mut self, key: &str, image: Value) -> Self {
        self.settings["images"][key] = image;
        self
    }

    /// Adds an image that the lab serves.
    #[must_use]
    pub fn lab_image(self, lab: &Lab, variant: &str) -> Self {
        let image = lab.image(variant);
        self.image(variant, json!({ "url": image.url, "sha256": image.sha256, "format": image.format, "firmware": image.firmware }))
    }

    #[must_use]
    pub fn image_set(mut self, key: &str, field: &str, value: impl Into<Value>) -> Self {
        self.settings["images"][key][field] = value.into();
        self
    }

    /// Sets a key of a host.
    #[must_use]
    pub fn host_set(mut self, host: &str, key: &str, value: impl Into<Value>) -> Self {
        self.host_mut(host)[key] = value.into();
        self
    }

    fn host_mut(&mut self, host: &str) -> &mut Value {
        let hosts = self.settings["hosts"].as_array_mut().expect("hosts is written as an array");
        hosts.iter_mut().find(|h| h["name"] == host).unwrap_or_else(|| panic!("the entry has no host {host}"))
    }

    /// Reaches a host through another address, for example a [`FaultProxy`](crate::FaultProxy)'s, with the same host keys.
    #[must_use]
    pub fn via(mut self, host: &str, address: SocketAddr) -> Self {
        let was = self.host_mut(host)["address"].as_str().map(str::to_owned).unwrap_or_default();
        let (ip, port) = was.rsplit_once(':').expect("the lab's addresses have a port");
        let (from, to) = (format!("[{ip}]:{port} "), format!("[{}]:{} ", address.ip(), address.port()));
        if let KnownHosts::Lines(lines) = &mut self.known_hosts {
            let more: Vec<_> = lines.iter().filter_map(|line| line.strip_prefix(&from)).map(|keys| format!("{to}{keys}")).collect();
            lines.extend(more);
        }
        self.host_set(host, "address", address.to_string())
    }

    /// Uses these lines as known_hosts.
    #[must_use]
    pub fn known_hosts(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.known_hosts = KnownHosts::Lines(lines.into_iter().collect());
        self
    }

    #[must_use]
    pub fn known_hosts_path(mut self, path: &Path) -> Self {
        self.known_hosts = KnownHosts::Path(path.to_owned());
        self
    }

    fn document(&self, dir: &Path) -> Value {
        let mut settings = self.settings.clone();
        let path = match &self.known_hosts {
            KnownHosts::Path(path) => path.clone(),
            KnownHosts::Lines(lines) => {
                let path = dir.join(format!("known_hosts-{}", self.name));
                put(&path, &lines.iter().map(|line| format!("{line}\n")).collect::<String>());
                path
            }
        };
        settings.insert("knownHostsFile".into(), json!(path));
        json!({ "name": self.name, "type": "kvm2", "kvm2": settings })
    }
}

/// Moves a file into place whole: a running daemon reads it at any time.
fn put(path: &Path, text: &str) {
    let new = PathBuf::from(format!("{}.new", path.display()));
    std::fs::write(&new, text).expect("writing a file of the daemon's");
    std::fs::rename(&new, path).expect("moving a file of the daemon's into place");
}

fn host_settings(host: &Host) -> Value {
    json!({
        "name": host.name,
        "address": format!("{}:{}", host.address, host.port),
        "user": host.user,
        "socket": host.socket,
        "pool": "default",
        "bridge": "br0",
    })
}
