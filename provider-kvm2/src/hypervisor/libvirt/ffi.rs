//! libvirt's C calls, one function each: blocking, with every pointer owned by a
//! type that frees it, and every error read on the thread that got it.
//!
//! Not built on the `virt` crate's objects: those panic when a free fails or an
//! enum value is new, and leak the addresses of a domain.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::ptr::NonNull;

use virt_sys as sys;

use crate::error::bounded;
use crate::hypervisor::classify::with_errno;
use crate::hypervisor::code;

mod connection;
mod domain;
mod storage;
mod stream;

pub use connection::Connection;
pub(super) use domain::AGENT_SECONDS;
pub(super) use stream::OpenStream;

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

type LibvirtResult<T> = Result<T, LibvirtError>;

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

/// A libvirt object, with the connection it belongs to.
pub(super) struct Object<T> {
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

pub(super) type Domain = Object<sys::virDomain>;
pub(super) type Pool = Object<sys::virStoragePool>;
pub(super) type Volume = Object<sys::virStorageVol>;
type Stream = Object<sys::virStream>;

impl<T> Object<T> {
    fn new(raw: *mut T, free: unsafe extern "C" fn(*mut T) -> c_int, connection: &Connection) -> LibvirtResult<Self> {
        NonNull::new(raw).map(|raw| Self { raw, free, connection: connection.clone() }).ok_or_else(LibvirtError::last)
    }

    fn raw(&self) -> *mut T {
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
