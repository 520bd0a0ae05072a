//! Streams into and out of volumes.

use std::fmt;

use virt_sys as sys;

use super::{Connection, LibvirtResult, Object, Stream, Volume, check};

/// A stream that is aborted unless it was finished.
pub(in crate::hypervisor::libvirt) struct OpenStream {
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
    pub(in crate::hypervisor::libvirt) fn upload(volume: &Volume, length: u64) -> LibvirtResult<Self> {
        let mut open = Self::new(volume.connection())?;
        // SAFETY: both handles are live.
        check(unsafe { sys::virStorageVolUpload(volume.raw(), open.stream.raw(), 0, length, 0) })?;
        open.done = false;
        Ok(open)
    }

    /// A stream of the first `length` bytes of the volume.
    pub(in crate::hypervisor::libvirt) fn download(volume: &Volume, length: u64) -> LibvirtResult<Self> {
        let mut open = Self::new(volume.connection())?;
        // SAFETY: both handles are live.
        check(unsafe { sys::virStorageVolDownload(volume.raw(), open.stream.raw(), 0, length, 0) })?;
        open.done = false;
        Ok(open)
    }

    /// Sends some of `data` and says how much.
    pub(in crate::hypervisor::libvirt) fn send(&mut self, data: &[u8]) -> LibvirtResult<usize> {
        // SAFETY: the handle is live, the buffer has that length.
        let sent = check(unsafe { sys::virStreamSend(self.stream.raw(), data.as_ptr().cast(), data.len()) })?;
        Ok(usize::try_from(sent).unwrap_or(0).min(data.len()))
    }

    /// Fills the start of `buffer`; 0 is the end of the stream.
    pub(in crate::hypervisor::libvirt) fn receive(&mut self, buffer: &mut [u8]) -> LibvirtResult<usize> {
        // SAFETY: the handle is live, the buffer has that length.
        let got = check(unsafe { sys::virStreamRecv(self.stream.raw(), buffer.as_mut_ptr().cast(), buffer.len()) })?;
        Ok(usize::try_from(got).unwrap_or(0).min(buffer.len()))
    }

    /// Ends the stream well; its error is the last word on the transfer.
    pub(in crate::hypervisor::libvirt) fn finish(mut self) -> LibvirtResult<()> {
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
