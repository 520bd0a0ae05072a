//! The domain document: the whole machine that a VM is, as XML.
//!
//! Every VM is alike but for the values in [`Document`]. The seed is a read-only
//! virtio disk and not a CD-ROM, since cloud kernels may lack the driver of the
//! CD-ROM's bus but never that of their own root disk. There is no graphics, USB
//! or sound: nothing that a guest does not need can break on a host.

use std::num::{NonZeroU32, NonZeroU64};

use uuid::Uuid;

use super::xml::Element;
use super::{Mark, VmName};
use crate::config::{Firmware, VirtType};

/// Device names in the document; [`disks`](super::host_xml::disks) finds the disks by them.
pub const OVERLAY_TARGET: &str = "vda";
pub const SEED_TARGET: &str = "vdb";

/// The channel at which libvirt talks to the guest agent.
const AGENT_CHANNEL: &str = "org.qemu.guest_agent.0";

/// What differs between VMs. No value can make a machine without CPU or memory.
#[derive(Debug, Clone)]
pub struct Document {
    pub name: VmName,
    pub uuid: Uuid,
    pub vcpus: NonZeroU32,
    pub memory_mib: NonZeroU64,
    pub virt_type: VirtType,
    /// `host-passthrough`, `host-model`, `maximum` or the name of a model.
    pub cpu_mode: String,
    pub machine: String,
    pub firmware: Firmware,
    /// Absolute paths on the host; the files need not exist yet.
    pub overlay_path: String,
    pub seed_path: String,
    pub bridge: String,
    pub mac: String,
    pub mark: Mark,
}

impl Document {
    pub fn to_xml(&self) -> String {
        Element::new("domain")
            .with("type", self.virt_type.as_str())
            .and(Element::leaf("name", &self.name))
            .and(Element::leaf("uuid", self.uuid))
            .and(Element::new("metadata").and(self.mark.to_tree()))
            .and(Element::leaf("memory", self.memory_mib).with("unit", "MiB"))
            .and(Element::leaf("currentMemory", self.memory_mib).with("unit", "MiB"))
            .and(Element::leaf("vcpu", self.vcpus).with("placement", "static"))
            .and(self.os())
            .and(Element::new("features").and(Element::new("acpi")).and(Element::new("apic")))
            .and(self.cpu())
            .and(clock())
            .and(Element::leaf("on_poweroff", "destroy"))
            .and(Element::leaf("on_reboot", "restart"))
            // a crashed guest ends and is seen as stopped; kept, it would hold its memory for nobody
            .and(Element::leaf("on_crash", "destroy"))
            .and(self.devices())
            .to_xml()
    }

    fn os(&self) -> Element {
        let os = Element::new("os");
        let machine = Element::leaf("type", "hvm").with("arch", "x86_64").with("machine", &self.machine);
        match self.firmware {
            Firmware::Bios => os.and(machine),
            Firmware::Uefi => {
                let without = |name| Element::new("feature").with("enabled", "no").with("name", name);
                // cloud images and those of one's own making need not be signed
                let features = Element::new("firmware").and(without("enrolled-keys")).and(without("secure-boot"));
                os.with("firmware", "efi").and(machine).and(features)
            }
        }
    }

    fn cpu(&self) -> Element {
        let cpu = Element::new("cpu");
        match self.cpu_mode.as_str() {
            mode @ ("host-passthrough" | "maximum") => cpu.with("mode", mode).with("check", "none"),
            mode @ "host-model" => cpu.with("mode", mode),
            // an unknown model is an error and not silently another one
            model => cpu.with("mode", "custom").with("match", "exact").and(Element::leaf("model", model).with("fallback", "forbid")),
        }
    }

    fn devices(&self) -> Element {
        Element::new("devices")
            .and(self.overlay())
            .and(self.seed())
            .and(Element::new("controller").with("type", "usb").with("model", "none"))
            .and(
                Element::new("interface")
                    .with("type", "bridge")
                    .and(Element::new("mac").with("address", &self.mac))
                    .and(Element::new("source").with("bridge", &self.bridge))
                    .and(Element::new("model").with("type", "virtio")),
            )
            .and(Element::new("serial").with("type", "pty"))
            .and(Element::new("console").with("type", "pty").and(Element::new("target").with("type", "serial").with("port", "0")))
            .and(
                Element::new("channel").with("type", "unix").and(Element::new("target").with("type", "virtio").with("name", AGENT_CHANNEL)),
            )
            .and(Element::new("memballoon").with("model", "virtio"))
            .and(Element::new("rng").with("model", "virtio").and(Element::leaf("backend", "/dev/urandom").with("model", "random")))
    }

    fn overlay(&self) -> Element {
        // no cache mode: the default honours the guest's flushes and works on every file system.
        // `stop`: a full pool or a failing disk pauses the guest, which can be seen and undone;
        // an error handed into the guest makes it remount its root read-only for good.
        // `unmap`: what the guest frees goes back to the pool.
        let driver = Element::new("driver")
            .with("name", "qemu")
            .with("type", "qcow2")
            .with("error_policy", "stop")
            .with("rerror_policy", "stop")
            .with("discard", "unmap");
        disk(&self.overlay_path, OVERLAY_TARGET, driver).and(Element::new("boot").with("order", "1"))
    }

    fn seed(&self) -> Element {
        let driver = Element::new("driver").with("name", "qemu").with("type", "raw");
        disk(&self.seed_path, SEED_TARGET, driver).and(Element::new("readonly"))
    }
}

/// By path and not by pool and volume: libvirt's AppArmor profiles know only paths.
fn disk(path: &str, target: &str, driver: Element) -> Element {
    Element::new("disk")
        .with("type", "file")
        .with("device", "disk")
        .and(driver)
        .and(Element::new("source").with("file", path))
        .and(Element::new("target").with("dev", target).with("bus", "virtio"))
}

/// UTC, and no timer whose lost ticks a guest would have to catch up with one by one.
fn clock() -> Element {
    let timer = |name| Element::new("timer").with("name", name);
    Element::new("clock")
        .with("offset", "utc")
        .and(timer("rtc").with("tickpolicy", "catchup"))
        .and(timer("pit").with("tickpolicy", "delay"))
        .and(timer("hpet").with("present", "no"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::domain::Phase;
    use crate::domain::host_xml::{disks, nic_macs};
    use crate::domain::mark::{Claim, NAMESPACE};
    use rstest::rstest;

    const MAC: &str = "52:4b:9c:85:46:03";

    fn mark() -> Mark {
        Mark {
            claim: Claim::Managed,
            uid: "uid-1".to_owned(),
            created_at: "2026-01-02T03:04:05Z".parse().ok(),
            phase: Phase::Creating,
            installation_id: "cluster-1".to_owned(),
            spec_hash: "0f".to_owned(),
            entry: "home".to_owned(),
            image_key: "debian".to_owned(),
            base: "base-home-debian-0a1b2c3d.qcow2".to_owned(),
            base_digest: "ab".repeat(32),
            owner: "replica-1".to_owned(),
            attempt_at: "2026-01-02T03:04:06Z".parse().ok(),
        }
    }

    fn document(firmware: Firmware, virt_type: VirtType, cpu_mode: &str) -> Document {
        Document {
            name: VmName::parse("egress-1").expect("a valid name"),
            uuid: Uuid::from_u128(0xc6862fef_6315_54b4_9aa4_c584378b5e2a),
            vcpus: NonZeroU32::new(2).expect("not zero"),
            memory_mib: NonZeroU64::new(512).expect("not zero"),
            virt_type,
            cpu_mode: cpu_mode.to_owned(),
            machine: "q35".to_owned(),
            firmware,
            overlay_path: "/pool/egress-1.qcow2".to_owned(),
            seed_path: "/pool/egress-1-seed.iso".to_owned(),
            bridge: "br0".to_owned(),
            mac: MAC.to_owned(),
            mark: mark(),
        }
    }

    #[test]
    fn the_document_is_the_one_that_was_reviewed() {
        insta::assert_snapshot!("uefi_qemu", document(Firmware::Uefi, VirtType::Qemu, "maximum").to_xml());
        insta::assert_snapshot!("bios_kvm", document(Firmware::Bios, VirtType::Kvm, "host-passthrough").to_xml());
    }

    /// Against the schema that libvirt ships, where its tool is installed.
    #[rstest]
    fn the_document_fits_libvirts_schema(
        #[values(Firmware::Uefi, Firmware::Bios)] firmware: Firmware,
        #[values(VirtType::Kvm, VirtType::Qemu)] virt_type: VirtType,
        #[values("host-passthrough", "host-model", "maximum", "Skylake-Server")] cpu_mode: &str,
    ) {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(document(firmware, virt_type, cpu_mode).to_xml().as_bytes()).expect("written");
        let run = Command::new("virt-xml-validate").arg(file.path()).arg("domain").stdin(Stdio::null()).output();
        let Ok(output) = run else {
            eprintln!("skipped: virt-xml-validate is not installed");
            return;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn hostile_values_stay_values() {
        let mut hostile = document(Firmware::Bios, VirtType::Kvm, "maximum");
        hostile.bridge = "br0'/></interface><!-- &".to_owned();
        hostile.overlay_path = "/pool/\"<x>&'\n\u{1}".to_owned();
        hostile.mark.uid = "</uid><managed>".to_owned();
        let xml = hostile.to_xml();
        let root = Element::parse_document(&xml, "domain").expect("well-formed");
        let bridge = root.find(&["devices", "interface", "source"]).and_then(|s| s.attribute("bridge"));
        assert_eq!(bridge, Some(hostile.bridge.as_str()));
        assert_eq!(root.find(&["metadata", "instance", "uid"]).map(Element::text), Some("</uid><managed>"));
        // XML 1.0 has no way to write U+0001
        assert_eq!(disks(&xml).expect("readable")[0].path.as_deref(), Some("/pool/\"<x>&'\n\u{fffd}"));
    }

    #[test]
    fn the_mark_and_the_devices_can_be_read_back() {
        let xml = document(Firmware::Uefi, VirtType::Kvm, "maximum").to_xml();
        assert!(xml.contains(&format!("<instance xmlns=\"{NAMESPACE}\">")));
        assert_eq!(nic_macs(&xml), Ok(vec![MAC.to_owned()]));
        let found = disks(&xml).expect("readable");
        let seen: Vec<_> = found.iter().map(|d| (d.target.as_str(), d.path.as_deref(), d.format.as_deref(), d.readonly)).collect();
        assert_eq!(
            seen,
            [
                (OVERLAY_TARGET, Some("/pool/egress-1.qcow2"), Some("qcow2"), false),
                (SEED_TARGET, Some("/pool/egress-1-seed.iso"), Some("raw"), true)
            ]
        );
    }
}
