//! What a host can run, from `virConnectGetDomainCapabilities`.

use super::xml::{Element, XmlFault};
use crate::config::Firmware;

/// The capabilities of one emulator for one machine and virtualisation type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DomainCapabilities {
    /// Path of the emulator on the host.
    pub emulator: String,
    /// `kvm` or `qemu`.
    pub virt_type: String,
    /// The machine that the asked one stands for, `pc-q35-10.0` for `q35`.
    pub machine: String,
    pub max_vcpus: Option<u32>,
    /// libvirt can choose a UEFI firmware by itself: a firmware descriptor for it is installed.
    pub efi: bool,
    /// Firmware files that are installed.
    pub loaders: Vec<String>,
    /// Supported CPU modes: `host-passthrough`, `host-model`, `maximum`, `custom`.
    pub cpu_modes: Vec<String>,
    /// CPU models that the host can run.
    pub cpu_models: Vec<String>,
}

impl DomainCapabilities {
    pub fn parse(xml: &str) -> Result<Self, XmlFault> {
        let root = Element::parse_document(xml, "domainCapabilities")?;
        let text = |name| root.child(name).map(Element::text).unwrap_or_default().to_owned();
        let os = root.child("os");
        let firmwares = os.into_iter().flat_map(|os| values(os, "firmware"));
        let loader = os.and_then(|os| os.child("loader")).filter(|l| is_supported(l));
        let cpu = root.child("cpu");
        let modes = || cpu.into_iter().flat_map(|cpu| cpu.children("mode")).filter(|m| is_supported(m));
        let name = |e: &Element| e.attribute("name").unwrap_or_default().to_owned();
        let models = modes().filter(|m| m.attribute("name") == Some("custom")).flat_map(|m| m.children("model"));
        Ok(Self {
            emulator: text("path"),
            virt_type: text("domain"),
            machine: text("machine"),
            max_vcpus: root.child("vcpu").and_then(|v| v.attribute("max")).and_then(|max| max.parse().ok()),
            efi: firmwares.into_iter().any(|f| f == "efi"),
            loaders: loader.map(|l| l.children("value").map(|v| v.text().to_owned()).collect()).unwrap_or_default(),
            cpu_modes: modes().map(name).collect(),
            cpu_models: models.filter(|m| m.attribute("usable") != Some("no")).map(|m| m.text().to_owned()).collect(),
        })
    }

    /// Whether a domain with this firmware can be defined; BIOS comes with the emulator.
    pub fn has_firmware(&self, firmware: Firmware) -> bool {
        match firmware {
            Firmware::Bios => true,
            Firmware::Uefi => self.efi,
        }
    }

    /// Whether the configured CPU mode or model can be had.
    pub fn has_cpu(&self, cpu_mode: &str) -> bool {
        match cpu_mode {
            "host-passthrough" | "host-model" | "maximum" => self.cpu_modes.iter().any(|m| m == cpu_mode),
            model => self.cpu_models.iter().any(|m| m == model),
        }
    }
}

fn is_supported(element: &Element) -> bool {
    element.attribute("supported") == Some("yes")
}

/// The values of `<enum name='…'>`.
fn values<'a>(element: &'a Element, name: &'a str) -> impl Iterator<Item = &'a str> {
    element.children("enum").filter(move |e| e.attribute("name") == Some(name)).flat_map(|e| e.children("value")).map(Element::text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Cut down from what libvirt 11.3 answers for TCG on a host without hardware virtualisation.
    const TCG: &str = "<domainCapabilities>
      <path>/usr/bin/qemu-system-x86_64</path><domain>qemu</domain><machine>pc-q35-10.0</machine><arch>x86_64</arch><vcpu max='4096'/>
      <os supported='yes'>
        <enum name='firmware'><value>bios</value><value>efi</value></enum>
        <loader supported='yes'><value>/usr/share/OVMF/OVMF_CODE_4M.fd</value><enum name='type'><value>pflash</value></enum></loader>
      </os>
      <cpu>
        <mode name='host-passthrough' supported='no'/>
        <mode name='maximum' supported='yes'><enum name='maximumMigratable'><value>on</value></enum></mode>
        <mode name='host-model' supported='yes'><model fallback='forbid'>EPYC</model></mode>
        <mode name='custom' supported='yes'><model usable='yes' vendor='unknown'>qemu64</model><model usable='no'>Broadwell</model></mode>
      </cpu></domainCapabilities>";

    #[test]
    fn a_host_says_what_it_can_run() {
        let host = DomainCapabilities::parse(TCG).expect("readable");
        assert_eq!((host.emulator.as_str(), host.virt_type.as_str()), ("/usr/bin/qemu-system-x86_64", "qemu"));
        assert_eq!((host.machine.as_str(), host.max_vcpus), ("pc-q35-10.0", Some(4096)));
        assert_eq!(host.loaders, ["/usr/share/OVMF/OVMF_CODE_4M.fd"]);
        assert!(host.has_firmware(Firmware::Uefi));
    }

    #[rstest]
    #[case("host-passthrough", false)]
    #[case("maximum", true)]
    #[case("host-model", true)]
    #[case("qemu64", true)]
    #[case("Broadwell", false)]
    #[case("EPYC", false)]
    fn a_cpu_that_the_host_cannot_give_is_known_before_a_start(#[case] cpu: &str, #[case] can: bool) {
        assert_eq!(DomainCapabilities::parse(TCG).expect("readable").has_cpu(cpu), can);
    }

    #[test]
    fn without_a_firmware_descriptor_there_is_no_uefi_though_files_lie_there() {
        let xml = TCG.replace("<value>efi</value>", "");
        let host = DomainCapabilities::parse(&xml).expect("readable");
        assert!(!host.has_firmware(Firmware::Uefi) && host.has_firmware(Firmware::Bios));
    }

    #[test]
    fn an_answer_without_anything_offers_nothing() {
        let host = DomainCapabilities::parse("<domainCapabilities/>").expect("well-formed");
        assert!(!host.efi && !host.has_cpu("maximum") && host.max_vcpus.is_none());
        assert!(DomainCapabilities::parse("<capabilities/>").is_err());
    }
}
