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
