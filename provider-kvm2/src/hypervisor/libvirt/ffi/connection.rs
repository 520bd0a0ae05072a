//! Connections: opening, closing away from the threads that must not block, and the calls on them.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use virt_sys as sys;

use super::{Domain, LibvirtError, LibvirtResult, Object, Pool, c_string, check, owned};
use crate::error::bounded;
use crate::hypervisor::NodeInfo;

unsafe extern "C" fn stay_silent(_: *mut c_void, _: sys::virErrorPtr) {}

fn initialise() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: no arguments; safe to call from any thread, and more than once.
        unsafe { sys::virInitialize() };
        // without a handler libvirt prints every error to stderr, past log level and redaction
        // SAFETY: the handler is a static function that ignores its arguments.
        unsafe { sys::virSetErrorFunc(ptr::null_mut(), Some(stay_silent)) };
    });
}

/// An open connection; closed when the last clone and the last object of it are gone.
#[derive(Clone)]
pub struct Connection(Arc<OpenConnection>);

struct OpenConnection {
    raw: NonNull<sys::virConnect>,
    closed: CancellationToken,
    tracker: TaskTracker,
}

// SAFETY: libvirt's connections may be used from any thread, and by several at once.
unsafe impl Send for OpenConnection {}
// SAFETY: as above.
unsafe impl Sync for OpenConnection {}

struct Closing(NonNull<sys::virConnect>);
// SAFETY: the last owner moves the pointer to the thread that closes it.
unsafe impl Send for Closing {}

impl Closing {
    fn close(self) {
        // SAFETY: the pointer is owned and not used again.
        unsafe { sys::virConnectClose(self.0.as_ptr()) };
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let closing = Closing(self.raw);
        let closed = self.closed.clone();
        // closing is a round trip, so it is kept off the threads that must not block
        if tokio::runtime::Handle::try_current().is_ok() {
            self.tracker.spawn_blocking(move || {
                closing.close();
                closed.cancel();
            });
        } else {
            closing.close();
            closed.cancel();
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libvirt connection")
    }
}

impl Connection {
    /// Connects through the socket of `uri`. `tracker` gets the task that closes the connection one day.
    pub fn open(uri: &str, tracker: TaskTracker) -> LibvirtResult<Self> {
        initialise();
        let uri = c_string(uri)?;
        // SAFETY: the string lives for the call.
        let raw = unsafe { sys::virConnectOpen(uri.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(LibvirtError::last)?;
        Ok(Self(Arc::new(OpenConnection { raw, closed: CancellationToken::new(), tracker })))
    }

    pub(super) fn raw(&self) -> *mut sys::virConnect {
        self.0.raw.as_ptr()
    }

    /// True for the same connection, however often it was cloned.
    pub(in crate::hypervisor::libvirt) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Fires once the connection is closed for good.
    pub(in crate::hypervisor::libvirt) fn closed(&self) -> CancellationToken {
        self.0.closed.clone()
    }

    /// False once libvirt's client has seen the connection end. Asks nobody.
    pub(in crate::hypervisor::libvirt) fn is_alive(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { sys::virConnectIsAlive(self.raw()) == 1 }
    }

    pub(in crate::hypervisor::libvirt) fn lib_version(&self) -> LibvirtResult<u64> {
        let mut version = 0;
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virConnectGetLibVersion(self.raw(), &raw mut version) })?;
        Ok(version)
    }

    pub(in crate::hypervisor::libvirt) fn hypervisor_version(&self) -> LibvirtResult<u64> {
        let mut version = 0;
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virConnectGetVersion(self.raw(), &raw mut version) })?;
        Ok(version)
    }

    pub(in crate::hypervisor::libvirt) fn hostname(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virConnectGetHostname(self.raw())) }
    }

    pub(in crate::hypervisor::libvirt) fn node_info(&self) -> LibvirtResult<NodeInfo> {
        // SAFETY: a plain C struct of numbers and characters, for which zeros are valid.
        let mut info: sys::virNodeInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virNodeGetInfo(self.raw(), &raw mut info) })?;
        let model: Vec<u8> = info.model.iter().map(|c| c.cast_unsigned()).take_while(|c| *c != 0).collect();
        Ok(NodeInfo { model: bounded(&String::from_utf8_lossy(&model)), memory_kib: info.memory, cpus: info.cpus })
    }

    pub(in crate::hypervisor::libvirt) fn domain_capabilities(&self, machine: &str, virt_type: &str) -> LibvirtResult<String> {
        let (machine, virt_type) = (c_string(machine)?, c_string(virt_type)?);
        // SAFETY: the handle is live, the strings live for the call; the answer is ours.
        unsafe {
            owned(sys::virConnectGetDomainCapabilities(
                self.raw(),
                ptr::null(),
                c"x86_64".as_ptr(),
                machine.as_ptr(),
                virt_type.as_ptr(),
                0,
            ))
        }
    }

    /// Fails with `NO_INTERFACE` or, where libvirtd has no interface driver, `NO_SUPPORT`.
    pub(in crate::hypervisor::libvirt) fn lookup_interface(&self, name: &str) -> LibvirtResult<()> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virInterfaceLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virInterfaceFree, self).map(drop)
    }

    pub(in crate::hypervisor::libvirt) fn lookup_domain(&self, name: &str) -> LibvirtResult<Domain> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virDomainLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virDomainFree, self)
    }

    pub(in crate::hypervisor::libvirt) fn list_domains(&self) -> LibvirtResult<Vec<Domain>> {
        let mut array = ptr::null_mut();
        // SAFETY: the handle is live, the out pointer too; flags 0 means all domains.
        let count = check(unsafe { sys::virConnectListAllDomains(self.raw(), &raw mut array, 0) })?;
        // SAFETY: libvirt allocated the array with that many handles.
        unsafe { Object::take_array(array, count, sys::virDomainFree, self) }
    }

    pub(in crate::hypervisor::libvirt) fn define_domain(&self, xml: &str) -> LibvirtResult<Domain> {
        let xml = c_string(xml)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virDomainDefineXMLFlags(self.raw(), xml.as_ptr(), sys::VIR_DOMAIN_DEFINE_VALIDATE) };
        Object::new(raw, sys::virDomainFree, self)
    }

    pub(in crate::hypervisor::libvirt) fn lookup_pool(&self, name: &str) -> LibvirtResult<Pool> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStoragePoolLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virStoragePoolFree, self)
    }
}
