//! What a host can never do for an entry, found before anything is made on it.

use crate::config::{Entry, Firmware, Host, VirtType};
use crate::domain::capabilities::DomainCapabilities;
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{Hypervisor, code};

/// Bridge, virtualisation type, machine and firmware; two calls at once.
pub(super) async fn require(hv: &dyn Hypervisor, entry: &Entry, host: &Host, firmware: Firmware) -> Result<()> {
    let (bridge, capabilities) = tokio::join!(require_bridge(hv, host), capabilities(hv, entry, host));
    require_firmware(&capabilities?, entry, host, firmware)?;
    bridge
}

pub(super) fn require_firmware(capabilities: &DomainCapabilities, entry: &Entry, host: &Host, firmware: Firmware) -> Result<()> {
    if !capabilities.has_firmware(firmware) {
        return Err(ProviderError::new(
            Reason::FirmwareUnavailable,
            format!(
                "host {} has no UEFI firmware for machine {}; install the ovmf package there, or use an image with firmware bios",
                host.name, entry.machine
            ),
        )
        .on_host(&host.name));
    }
    Ok(())
}

/// None where the host cannot tell: then starting the domain decides.
pub(super) async fn require_bridge(hv: &dyn Hypervisor, host: &Host) -> Result<()> {
    if hv.has_interface(&host.bridge).await? == Some(false) {
        return Err(bridge_missing(host));
    }
    Ok(())
}

pub(super) fn kvm_unavailable(entry: &Entry, host: &Host) -> ProviderError {
    ProviderError::new(
        Reason::KvmUnavailable,
        format!(
            "host {} cannot run KVM guests of machine {}; check that /dev/kvm works there, or set virtType: qemu to run under emulation",
            host.name, entry.machine
        ),
    )
    .on_host(&host.name)
}

pub(super) fn bridge_missing(host: &Host) -> ProviderError {
    ProviderError::new(
        Reason::BridgeMissing,
        format!("host {} has no network interface {}; create the bridge there or correct hosts[].bridge", host.name, host.bridge),
    )
    .on_host(&host.name)
    .with_meta("bridge", &host.bridge)
}

pub(super) async fn capabilities(hv: &dyn Hypervisor, entry: &Entry, host: &Host) -> Result<DomainCapabilities> {
    let asked = hv.domain_capabilities(&entry.machine, entry.virt_type.as_str()).await;
    let xml = asked.map_err(|e| {
        // libvirt answers a type or machine that its emulators do not offer with these two
        let unsupported = e.is(code::CONFIG_UNSUPPORTED) || e.is(code::INVALID_ARG);
        let error = match (unsupported, entry.virt_type) {
            (false, _) => return ProviderError::from(e),
            (true, VirtType::Kvm) => kvm_unavailable(entry, host),
            (true, VirtType::Qemu) => ProviderError::new(
                Reason::MachineUnsupported,
                format!("host {} cannot emulate machine {}; install qemu-system-x86 there or correct machine", host.name, entry.machine),
            ),
        };
        error.with_source(e).on_host(&host.name)
    })?;
    DomainCapabilities::parse(&xml).map_err(|fault| {
        ProviderError::new(Reason::HostIncompatible, format!("host {} describes its capabilities in a way that cannot be read", host.name))
            .with_source(fault)
            .on_host(&host.name)
    })
}
