//! Measurements against what a user would run instead: `virsh` over SSH.
//!
//! Each figure is a ratio of two things measured in turns in one run, so that the
//! machine and whatever else it does weigh on both. The program is
//! `tests/src/bin/bench.rs`, run by `tests/bench`.

pub mod cold_link;
pub mod image;
pub mod listing;
pub mod memory;
pub mod report;
pub mod rig;
pub mod rival;
pub mod series;
pub mod startup;
pub mod warm_create;

pub use report::{Figure, Limit};
pub use rig::Rig;
pub use series::Series;
