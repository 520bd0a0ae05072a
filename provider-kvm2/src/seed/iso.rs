//! iso
