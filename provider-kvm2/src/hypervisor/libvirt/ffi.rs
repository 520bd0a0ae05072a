//! libvirt's C calls, one function each: blocking, with every pointer owned by a
//! type that frees it, and every error read on the thread that got it.
//!
//! Not built on the `virt` crate's objects: those panic when a free fails or an
//! enum value is new, and leak the addresses of a domain.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::net::IpAddr;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Once};

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;
use virt_sys as sys;

use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::error::bounded;
use crate::hypervisor::classify::with_errno;
use crate::hypervisor::{NodeInfo, PoolInfo, VolumeInfo, code};

/// `virErrorDomain` of libvirt's own RPC client: the connection, not the host, failed.
const DOMAIN_RPC: i32 = 7;

/// A failed call, as libvirt reports it.
#[derive(Debug, Clone)]
pub struct LibvirtError {
    pub code: i32,
    pub domain: i32,
    /// Bounded and escaped.
    pub message: String,
}

impl LibvirtError {
    /// True for errors after which nothing can be said over the connection any more.
    pub fn is_lost_connection(&self) -> bool {
        self.domain == DOMAIN_RPC && matches!(self.code, code::SYSTEM_ERROR | code::INTERNAL_ERROR)
    }

    fn local(code: i32, message: &str) -> Self {
        Self { code, domain: 0, message: message.to_owned() }
    }

    /// The error of the call that this thread made last.
    fn last() -> Self {
        // SAFETY: returns this thread's own error or null; it stays valid until this thread's next libvirt call.
        let error = unsafe { sys::virGetLastError().as_ref() };
        let Some(error) = error else {
            return Self::local(code::INTERNAL_ERROR, "libvirt failed and did not say why");
        };
        // SAFETY: `message` is null or a string owned by the error.
        let text = unsafe { borrowed(error.message) }.unwrap_or_default();
        let message = bounded(&text);
        // for system errors libvirt carries the host's errno along, which no locale changes
        let message = if error.code == code::SYSTEM_ERROR { with_errno(message, error.int1) } else { message };
        Self { code: error.code, domain: error.domain, message }
    }
}

pub type LibvirtResult<T> = Result<T, LibvirtError>;

/// # Safety
/// `text` is null or a NUL-terminated string that lives for the call.
unsafe fn borrowed(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and terminated by the caller's word.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Takes a string that libvirt allocated for the caller.
///
/// # Safety
/// `text` is null or was allocated by libvirt and handed over.
unsafe fn owned(text: *mut c_char) -> LibvirtResult<String> {
    // SAFETY: as asked of the caller.
    let copy = unsafe { borrowed(text) };
    // SAFETY: libvirt's strings come from malloc; free(NULL) does nothing.
    unsafe { libc::free(text.cast()) };
    copy.ok_or_else(LibvirtError::last)
}

/// A static string of an object: never null for a live handle.
///
/// # Safety
/// As [`borrowed`].
unsafe fn name_of(text: *const c_char) -> LibvirtResult<String> {
    // SAFETY: as asked of the caller.
    unsafe { borrowed(text) }.ok_or_else(LibvirtError::last)
}

fn c_string(text: &str) -> LibvirtResult<CString> {
    CString::new(text).map_err(|_| LibvirtError::local(code::INVALID_ARG, "the text has a NUL byte in it"))
}

fn check(result: c_int) -> LibvirtResult<c_int> {
    if result < 0 { Err(LibvirtError::last()) } else { Ok(result) }
}

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

/// A libvirt object, with the connection it belongs to.
pub struct Object<T> {
    raw: NonNull<T>,
    free: unsafe extern "C" fn(*mut T) -> c_int,
    /// Freed after the object: the last reference to a connection closes it, which is a round trip.
    connection: Connection,
}

// SAFETY: libvirt's objects may be used from any thread, and by several at once.
unsafe impl<T> Send for Object<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Object<T> {}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer is owned; freeing it drops a local reference and asks nobody.
        unsafe { (self.free)(self.raw.as_ptr()) };
    }
}

impl<T> fmt::Debug for Object<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libvirt object")
    }
}

pub type Domain = Object<sys::virDomain>;
pub type Pool = Object<sys::virStoragePool>;
pub type Volume = Object<sys::virStorageVol>;
pub(super) type Stream = Object<sys::virStream>;

impl<T> Object<T> {
    fn new(raw: *mut T, free: unsafe extern "C" fn(*mut T) -> c_int, connection: &Connection) -> LibvirtResult<Self> {
        NonNull::new(raw).map(|raw| Self { raw, free, connection: connection.clone() }).ok_or_else(LibvirtError::last)
    }

    pub(super) fn raw(&self) -> *mut T {
        self.raw.as_ptr()
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Takes over an array of handles that libvirt allocated.
    ///
    /// # Safety
    /// `array` is null, or holds `count` handles and was allocated by libvirt for the caller.
    unsafe fn take_array(
        array: *mut *mut T,
        count: c_int,
        free: unsafe extern "C" fn(*mut T) -> c_int,
        connection: &Connection,
    ) -> LibvirtResult<Vec<Self>> {
        let count = usize::try_from(count).unwrap_or(0);
        let mut objects = Vec::with_capacity(count);
        for i in 0..count {
            // SAFETY: within the array, by the caller's word.
            let raw = unsafe { *array.add(i) };
            if let Some(raw) = NonNull::new(raw) {
                objects.push(Self { raw, free, connection: connection.clone() });
            }
        }
        // SAFETY: the array comes from malloc, its handles have moved out; free(NULL) does nothing.
        unsafe { libc::free(array.cast()) };
        Ok(objects)
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
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Fires once the connection is closed for good.
    pub fn closed(&self) -> CancellationToken {
        self.0.closed.clone()
    }

    /// False once libvirt's client has seen the connection end. Asks nobody.
    pub fn is_alive(&self) -> bool {
        // SAFETY: the handle is live.
        unsafe { sys::virConnectIsAlive(self.raw()) == 1 }
    }

    pub fn lib_version(&self) -> LibvirtResult<u64> {
        let mut version = 0;
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virConnectGetLibVersion(self.raw(), &raw mut version) })?;
        Ok(version)
    }

    pub fn hypervisor_version(&self) -> LibvirtResult<u64> {
        let mut version = 0;
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virConnectGetVersion(self.raw(), &raw mut version) })?;
        Ok(version)
    }

    pub fn hostname(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virConnectGetHostname(self.raw())) }
    }

    pub fn node_info(&self) -> LibvirtResult<NodeInfo> {
        // SAFETY: a plain C struct of numbers and characters, for which zeros are valid.
        let mut info: sys::virNodeInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virNodeGetInfo(self.raw(), &raw mut info) })?;
        let model: Vec<u8> = info.model.iter().map(|c| c.cast_unsigned()).take_while(|c| *c != 0).collect();
        Ok(NodeInfo { model: bounded(&String::from_utf8_lossy(&model)), memory_kib: info.memory, cpus: info.cpus })
    }

    pub fn domain_capabilities(&self, machine: &str, virt_type: &str) -> LibvirtResult<String> {
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
    pub fn lookup_interface(&self, name: &str) -> LibvirtResult<()> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virInterfaceLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virInterfaceFree, self).map(drop)
    }

    pub fn lookup_domain(&self, name: &str) -> LibvirtResult<Domain> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virDomainLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virDomainFree, self)
    }

    pub fn list_domains(&self) -> LibvirtResult<Vec<Domain>> {
        let mut array = ptr::null_mut();
        // SAFETY: the handle is live, the out pointer too; flags 0 means all domains.
        let count = check(unsafe { sys::virConnectListAllDomains(self.raw(), &raw mut array, 0) })?;
        // SAFETY: libvirt allocated the array with that many handles.
        unsafe { Object::take_array(array, count, sys::virDomainFree, self) }
    }

    pub fn define_domain(&self, xml: &str) -> LibvirtResult<Domain> {
        let xml = c_string(xml)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virDomainDefineXMLFlags(self.raw(), xml.as_ptr(), sys::VIR_DOMAIN_DEFINE_VALIDATE) };
        Object::new(raw, sys::virDomainFree, self)
    }

    pub fn lookup_pool(&self, name: &str) -> LibvirtResult<Pool> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStoragePoolLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virStoragePoolFree, self)
    }
}

impl Domain {
    pub fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virDomainGetName(self.raw())) }
    }

    pub fn uuid(&self) -> LibvirtResult<Uuid> {
        let mut bytes = [0_u8; sys::VIR_UUID_BUFLEN as usize];
        // SAFETY: the handle is live, the buffer has the size that libvirt writes.
        check(unsafe { sys::virDomainGetUUID(self.raw(), bytes.as_mut_ptr()) })?;
        Ok(Uuid::from_bytes(bytes))
    }

    pub fn start(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virDomainCreate(self.raw()) }).map(drop)
    }

    pub fn destroy(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virDomainDestroy(self.raw()) }).map(drop)
    }

    /// With everything that libvirt keeps beside the definition.
    pub fn undefine(&self) -> LibvirtResult<()> {
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

    pub fn state(&self) -> LibvirtResult<RawState> {
        let (mut state, mut reason) = (0, 0);
        // SAFETY: the handle is live, the out pointers too.
        check(unsafe { sys::virDomainGetState(self.raw(), &raw mut state, &raw mut reason, 0) })?;
        Ok(RawState { state, reason })
    }

    pub fn xml(&self, inactive: bool) -> LibvirtResult<String> {
        let flags = if inactive { sys::VIR_DOMAIN_XML_INACTIVE } else { 0 };
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virDomainGetXMLDesc(self.raw(), flags)) }
    }

    pub fn metadata(&self, uri: &str) -> LibvirtResult<Option<String>> {
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

    pub fn set_metadata(&self, uri: &str, prefix: &str, element: &str) -> LibvirtResult<()> {
        let (uri, prefix, element) = (c_string(uri)?, c_string(prefix)?, c_string(element)?);
        let set = |flags| {
            let kind = sys::VIR_DOMAIN_METADATA_ELEMENT.cast_signed();
            // SAFETY: the handle is live, the strings live for the call.
            let result = unsafe { sys::virDomainSetMetadata(self.raw(), kind, element.as_ptr(), prefix.as_ptr(), uri.as_ptr(), flags) };
            check(result).map(drop)
        };
        match set(sys::VIR_DOMAIN_AFFECT_CONFIG | sys::VIR_DOMAIN_AFFECT_LIVE) {
            // not running, so there is no live document to change
            Err(e) if e.code == code::OPERATION_INVALID => set(sys::VIR_DOMAIN_AFFECT_CONFIG),
            result => result,
        }
    }

    pub fn interfaces(&self, source: AddressSource) -> LibvirtResult<Vec<GuestInterface>> {
        let source = match source {
            AddressSource::Lease => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE,
            AddressSource::Agent => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT,
            AddressSource::Arp => sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP,
        };
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
        let address = unsafe { borrowed((*interface.addrs.add(i)).addr) };
        // what is no address is left out: a guest agent may say anything
        addresses.extend(address.and_then(|text| text.parse::<IpAddr>().ok()));
    }
    GuestInterface { name: bounded(&name.unwrap_or_default()), mac: bounded(&mac.unwrap_or_default()), addresses }
}

impl Pool {
    pub fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStoragePoolGetName(self.raw())) }
    }

    pub fn xml(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virStoragePoolGetXMLDesc(self.raw(), 0)) }
    }

    pub fn info(&self) -> LibvirtResult<PoolInfo> {
        let mut info = sys::virStoragePoolInfo { state: 0, capacity: 0, allocation: 0, available: 0 };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virStoragePoolGetInfo(self.raw(), &raw mut info) })?;
        Ok(PoolInfo { state: info.state, capacity: info.capacity, allocation: info.allocation, available: info.available })
    }

    pub fn refresh(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virStoragePoolRefresh(self.raw(), 0) }).map(drop)
    }

    pub fn volumes(&self) -> LibvirtResult<Vec<Volume>> {
        let mut array = ptr::null_mut();
        // SAFETY: the handle is live, the out pointer too.
        let count = check(unsafe { sys::virStoragePoolListAllVolumes(self.raw(), &raw mut array, 0) })?;
        // SAFETY: libvirt allocated the array with that many handles.
        unsafe { Object::take_array(array, count, sys::virStorageVolFree, self.connection()) }
    }

    pub fn lookup_volume(&self, name: &str) -> LibvirtResult<Volume> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStorageVolLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virStorageVolFree, self.connection())
    }

    pub fn create_volume(&self, xml: &str) -> LibvirtResult<Volume> {
        let xml = c_string(xml)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStorageVolCreateXML(self.raw(), xml.as_ptr(), 0) };
        Object::new(raw, sys::virStorageVolFree, self.connection())
    }
}

impl Volume {
    pub fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStorageVolGetName(self.raw())) }
    }

    pub fn key(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStorageVolGetKey(self.raw())) }
    }

    pub fn info(&self) -> LibvirtResult<VolumeInfo> {
        let mut info = sys::virStorageVolInfo { type_: 0, capacity: 0, allocation: 0 };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virStorageVolGetInfo(self.raw(), &raw mut info) })?;
        Ok(VolumeInfo { capacity: info.capacity, allocation: info.allocation })
    }

    pub fn xml(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virStorageVolGetXMLDesc(self.raw(), 0)) }
    }

    pub fn delete(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virStorageVolDelete(self.raw(), 0) }).map(drop)
    }
}

/// A stream that is aborted unless it was finished.
pub struct OpenStream {
    stream: Stream,
    done: bool,
}

impl fmt::Debug for OpenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libvirt stream")
    }
}

impl OpenStream {
    fn new(connection: &Connection) -> LibvirtResult<Self> {
        // SAFETY: the handle is live; flags 0 asks for a stream that blocks.
        let raw = unsafe { sys::virStreamNew(connection.raw(), 0) };
        // `done`: there is nothing to abort until the call that starts the stream succeeded
        Ok(Self { stream: Object::new(raw, sys::virStreamFree, connection)?, done: true })
    }

    /// A stream into the volume, for `length` bytes.
    pub fn upload(volume: &Volume, length: u64) -> LibvirtResult<Self> {
        let mut open = Self::new(volume.connection())?;
        // SAFETY: both handles are live.
        check(unsafe { sys::virStorageVolUpload(volume.raw(), open.stream.raw(), 0, length, 0) })?;
        open.done = false;
        Ok(open)
    }

    /// A stream of the first `length` bytes of the volume.
    pub fn download(volume: &Volume, length: u64) -> LibvirtResult<Self> {
        let mut open = Self::new(volume.connection())?;
        // SAFETY: both handles are live.
        check(unsafe { sys::virStorageVolDownload(volume.raw(), open.stream.raw(), 0, length, 0) })?;
        open.done = false;
        Ok(open)
    }

    /// Sends some of `data` and says how much.
    pub fn send(&mut self, data: &[u8]) -> LibvirtResult<usize> {
        // SAFETY: the handle is live, the buffer has that length.
        let sent = check(unsafe { sys::virStreamSend(self.stream.raw(), data.as_ptr().cast(), data.len()) })?;
        Ok(usize::try_from(sent).unwrap_or(0).min(data.len()))
    }

    /// Fills the start of `buffer`; 0 is the end of the stream.
    pub fn receive(&mut self, buffer: &mut [u8]) -> LibvirtResult<usize> {
        // SAFETY: the handle is live, the buffer has that length.
        let got = check(unsafe { sys::virStreamRecv(self.stream.raw(), buffer.as_mut_ptr().cast(), buffer.len()) })?;
        Ok(usize::try_from(got).unwrap_or(0).min(buffer.len()))
    }

    /// Ends the stream well; its error is the last word on the transfer.
    pub fn finish(mut self) -> LibvirtResult<()> {
        self.done = true;
        // SAFETY: the handle is live.
        check(unsafe { sys::virStreamFinish(self.stream.raw()) }).map(drop)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        if !self.done {
            // SAFETY: the handle is live. An error here means that the stream or the link is gone already.
            unsafe { sys::virStreamAbort(self.stream.raw()) };
        }
    }
}
