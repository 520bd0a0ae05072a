//! libvirt
