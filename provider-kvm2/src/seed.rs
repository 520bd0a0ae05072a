//! The NoCloud seed: an ISO image labelled `cidata`, built in memory.
//!
//! `user-data` are the caller's bytes as they came; nothing here parses or logs
//! them, and they never touch the daemon's disk.

pub mod agent;
pub mod iso;
pub mod network;
pub mod vendor;
