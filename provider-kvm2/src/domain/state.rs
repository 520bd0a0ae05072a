//! libvirt's states mapped to the contract's.

/// Why an instance is in its state; the contract's enum is the one list.
pub use egress_provider_proto::v1::StateReason;

/// `virDomainState` and its reason, as numbers: an unknown one must not panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawState {
    pub state: i32,
    pub reason: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Provisioning,
    Running,
    Paused,
    Stopped,
    Deleting,
    Unknown,
}
