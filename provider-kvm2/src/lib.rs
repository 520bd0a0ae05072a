//! `kvm2-providerd`: virtual machines on plain libvirt hosts behind the
//! `egressproxies.provider.v1` contract.
//!
//! ```text
//! main → cli → service → provider → {image, seed, domain, hypervisor} → link
//!                            │                                           │
//!                          config                                   SSH, libvirt
//! ```
//!
//! Dependencies point to the right only. `domain`, `seed` and `error` know
//! neither gRPC nor libvirt nor SSH; `service` is the only module that speaks
//! tonic; `hypervisor/libvirt.rs` is the only one that holds libvirt handles.

// first: its macro is used by the others
#[macro_use]
pub mod failpoint;

pub mod cli;
pub mod config;
pub mod domain;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod hypervisor;
pub mod image;
pub mod link;
pub mod lock;
pub mod provider;
pub mod seed;
pub mod service;
pub mod telemetry;
