//! Calls on pools and volumes.

use std::ptr;

use virt_sys as sys;

use super::{LibvirtResult, Object, Pool, Volume, c_string, check, name_of, owned};
use crate::hypervisor::{PoolInfo, VolumeInfo};

impl Pool {
    pub(in crate::hypervisor::libvirt) fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStoragePoolGetName(self.raw())) }
    }

    pub(in crate::hypervisor::libvirt) fn xml(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virStoragePoolGetXMLDesc(self.raw(), 0)) }
    }

    pub(in crate::hypervisor::libvirt) fn info(&self) -> LibvirtResult<PoolInfo> {
        let mut info = sys::virStoragePoolInfo { state: 0, capacity: 0, allocation: 0, available: 0 };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virStoragePoolGetInfo(self.raw(), &raw mut info) })?;
        Ok(PoolInfo { state: info.state, capacity: info.capacity, allocation: info.allocation, available: info.available })
    }

    pub(in crate::hypervisor::libvirt) fn refresh(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virStoragePoolRefresh(self.raw(), 0) }).map(drop)
    }

    pub(in crate::hypervisor::libvirt) fn volumes(&self) -> LibvirtResult<Vec<Volume>> {
        let mut array = ptr::null_mut();
        // SAFETY: the handle is live, the out pointer too.
        let count = check(unsafe { sys::virStoragePoolListAllVolumes(self.raw(), &raw mut array, 0) })?;
        // SAFETY: libvirt allocated the array with that many handles.
        unsafe { Object::take_array(array, count, sys::virStorageVolFree, self.connection()) }
    }

    pub(in crate::hypervisor::libvirt) fn lookup_volume(&self, name: &str) -> LibvirtResult<Volume> {
        let name = c_string(name)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStorageVolLookupByName(self.raw(), name.as_ptr()) };
        Object::new(raw, sys::virStorageVolFree, self.connection())
    }

    pub(in crate::hypervisor::libvirt) fn create_volume(&self, xml: &str) -> LibvirtResult<Volume> {
        let xml = c_string(xml)?;
        // SAFETY: the handle is live, the string lives for the call.
        let raw = unsafe { sys::virStorageVolCreateXML(self.raw(), xml.as_ptr(), 0) };
        Object::new(raw, sys::virStorageVolFree, self.connection())
    }
}

impl Volume {
    pub(in crate::hypervisor::libvirt) fn name(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStorageVolGetName(self.raw())) }
    }

    pub(in crate::hypervisor::libvirt) fn key(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live and owns the string.
        unsafe { name_of(sys::virStorageVolGetKey(self.raw())) }
    }

    pub(in crate::hypervisor::libvirt) fn info(&self) -> LibvirtResult<VolumeInfo> {
        let mut info = sys::virStorageVolInfo { type_: 0, capacity: 0, allocation: 0 };
        // SAFETY: the handle is live, the out pointer too.
        check(unsafe { sys::virStorageVolGetInfo(self.raw(), &raw mut info) })?;
        Ok(VolumeInfo { capacity: info.capacity, allocation: info.allocation })
    }

    pub(in crate::hypervisor::libvirt) fn xml(&self) -> LibvirtResult<String> {
        // SAFETY: the handle is live; the answer is ours.
        unsafe { owned(sys::virStorageVolGetXMLDesc(self.raw(), 0)) }
    }

    pub(in crate::hypervisor::libvirt) fn delete(&self) -> LibvirtResult<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::virStorageVolDelete(self.raw(), 0) }).map(drop)
    }
}
