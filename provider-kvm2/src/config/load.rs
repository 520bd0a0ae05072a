//! load
pub fn load() {}
