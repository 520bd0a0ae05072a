//! `hosts/<host>/domains/<name>`: the id that callers keep.

use std::fmt;

use super::VmName;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InstanceId {
    pub host: String,
    pub name: VmName,
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hosts/{}/domains/{}", self.host, self.name)
    }
}
