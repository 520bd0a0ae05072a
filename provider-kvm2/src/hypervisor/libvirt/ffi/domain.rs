//! Calls on domains.

use std::ffi::c_uint;
use std::ptr;

use uuid::Uuid;
use virt_sys as sys;

use super::{Domain, LibvirtResult, borrowed, c_string, check, name_of, owned};
use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::hypervisor::code;

/// What an agent may take for an answer, in seconds; a living one takes milliseconds.
pub(in crate::hypervisor::libvirt) const AGENT_SECONDS: u8 = 5;

impl Domain {
    pub(in crate::hypervisor::libvirt) fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virDomainGetName(self.raw())) }
    }

    pub(in crate::hypervisor::libvirt) fn uuid(&self) -> LibvirtResult<Uuid> {
        let mut bytes = [0_u8; sys::VIR_UUID_BUFLEN as usize];
        // SAFETY: the handle is live, the buffer has the size that libvirt writes.
        check(unsafe { sys::virDomainGetUUID(self.raw(), bytes.as_mut_ptr()) })?;
        Ok(Uuid::from_bytes(bytes))
    }

    pub(in crate::hypervisor::libvirt) fn start(&self) -> LibvirtResult<()> {
        // virDomainCreate would ask the host a second time, for the id that its own answer lacks
        // SAFETY: the handle is live.
        check(unsafe { sys::virDomainCreateWithFlags(self.raw(), 0) }).map(drop)
    }

    pub(in crate::hypervisor::libvirt) fn destroy(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virDomainDestroy(self.raw()) }).map(drop)
    }

    /// With everything that libvirt keeps beside the definition.
    pub(in crate::hypervisor::libvirt) fn undefine(&self) -> LibvirtResult<()> {
        const ALWAYS: c_uint =
            sys::VIR_DOMAIN_UNDEFINE_NVRAM | sys::VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | sys::VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA;
        const CHECKPOINTS: c_uint = ALWAYS | sys::VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA;
        const TPM: c_uint = CHECKPOINTS | sys::VIR_DOMAIN_UNDEFINE_TPM;
        let undefine = |flags| {
            // SAFETY: the handle is live.
            check(unsafe { sys::virDomainUndefineFlags(self.raw(), flags) }).map(drop)
        };
        // a libvirtd that is older than a flag refuses the call before it does anything
        let mut result = undefine(TPM);
        for flags in [CHECKPOINTS, ALWAYS] {
            match &result {
                Err(e) if matches!(e.code, code::INVALID_ARG | code::NO_SUPPORT | code::OPERATION_UNSUPPORTED) => result = undefine(flags),
                _ => break,
            }
        }
        result
    }

    pub(in crate::hypervisor::libvirt) fn state(&self) -> LibvirtResult<RawState> {
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the handle is live, the out pointers too.
        check(unsafe { sys::virDomainGetState(self.raw(), &raw mut state, &raw mut reason, 0) })?;
        Ok(RawState { state, reason })
    }

    pub(in crate::hypervisor::libvirt) fn xml(&self, inactive: bool) -> LibvirtResult<String> {
        let flags = if inactive { sys::VIR_DOMAIN_XML_INACTIVE } else { 0 };
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virDomainGetXMLDesc(self.raw(), flags)) }
    }

    pub(in crate::hypervisor::libvirt) fn metadata(&self, uri: &str) -> LibvirtResult<Option<String>> {
        let uri = c_string(uri)?;
        let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
        // SAFETY: the handle is live, the string lives for the call; the answer is ours.
        let metadata = unsafe { owned(sys::virDomainGetMetadata(self.raw(), kind, uri.as_ptr(), sys::VIR_DOMAIN_AFFECT_CURRENT)) };
        match metadata {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.code == code::NO_DOMAIN_METADATA => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub(in crate::hypervisor::libvirt) fn set_metadata(&self, uri: &str, prefix: &str, element: &str) -> LibvirtResult<()> {
        let set = |flags| self.set_metadata_in(uri, prefix, element, flags);
        match set(sys::VIR_DOMAIN_AFFECT_CONFIG | sys::VIR_DOMAIN_AFFECT_LIVE) {
            // not running, so there is no live document to change
            Err(e) if e.code == code::OPERATION_INVALID => set(sys::VIR_DOMAIN_AFFECT_CONFIG),
            result => result,
        }
    }

    pub(in crate::hypervisor::libvirt) fn set_live_metadata(&self, uri: &str, prefix: &str, element: &str) -> LibvirtResult<()> {
        self.set_metadata_in(uri, prefix, element, sys::VIR_DOMAIN_AFFECT_LIVE)
    }

    fn set_metadata_in(&self, uri: &str, prefix: &str, element: &str, flags: c_uint) -> LibvirtResult<()> {
        let (uri, prefix, element) = (c_string(uri)?, c_string(prefix)?, c_string(element)?);
        let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
        // SAFETY: the handle is live, the strings live for the call.
        let result = unsafe { sys::virDomainSetMetadata(self.raw(), kind, element.as_ptr(), prefix.as_ptr(), uri.as_ptr(), flags) };
        check(result).map(drop)
    }

    pub(in crate::hypervisor::libvirt) fn interfaces(&self, source: AddressSource) -> LibvirtResult<Vec<GuestInterface>> {
        let source = match source {
            AddressSource::Lease => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE,
            AddressSource::Agent => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT,
            AddressSource::Arp => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP,
        };
        if source == sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT {
            // libvirtd waits for an agent's answer without end, and a guest's silence would cost the whole link; one that is
            // older than the call does without
            // SAFETY: the handle is live.
            unsafe { sys::virDomainAgentSetResponseTimeout(self.raw(), AGENT_SECONDS.into(), 0) };
        }
        let mut array: *mut sys::virDomainInterfacePtr = ptr::null_mut();
        // SAFETY: the handle is live, the out pointer too.
        let count = check(unsafe { sys::virDomainInterfaceAddresses(self.raw(), &raw mut array, source, 0) })?;
        let mut interfaces = Vec::new();
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: libvirt allocated the array with that many entries.
            let interface = unsafe { *array.add(i) };
            // SAFETY: null or an interface that is freed only below.
            if let Some(interface) = unsafe { interface.as_ref() } {
                // SAFETY: the interface's strings and addresses live as long as it does.
                interfaces.push(unsafe { guest_interface(interface) });
            }
            // SAFETY: the entry is ours; null is allowed.
            unsafe { sys::virDomainInterfaceFree(interface) };
        }
        // SAFETY: the array comes from malloc; its entries are freed.
        unsafe { libc::free(array.cast()) };
        Ok(interfaces)
    }
}

/// # Safety
/// The interface's pointers are null or valid.
unsafe fn guest_interface(interface: &sys::virDomainInterface) -> GuestInterface {
    // SAFETY: as asked of the caller.
    let (name, mac) = unsafe { (borrowed(interface.name), borrowed(interface.hwaddr)) };
    let mut addresses = Vec::new();
    for i in 0..interface.naddrs as usize {
        if interface.addrs.is_null() {
            break;
        }
        // SAFETY: libvirt allocated `naddrs` of them.
        addresses.extend(unsafe { borrowed((*interface.addrs.add(i)).addr) });
    }
    GuestInterface::reported(&name.unwrap_or_default(), &mac.unwrap_or_default(), &addresses)
}
