//! The host table.

#[derive(Debug)]
pub struct HostTable;
