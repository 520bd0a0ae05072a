//! The mark: the metadata element that says a domain is ours.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Creating,
    Ready,
    Deleting,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    pub phase: Phase,
}
