//! Harness for tests against the real daemon, and against the lab: real libvirtd,
//! real sshd, real VMs.
//!
//! A test starts a [`Case`]: its own names on the lab's hosts, and the promise that
//! nothing with those names is left at its end, however it ends. A [`Daemon`] is the
//! built program on a socket of its own, a [`ProvidersFile`] what it is configured
//! with, [`Clients`] what a caller has. [`FaultProxy`] and [`ImageServer`] stand
//! between the daemon and the world and break it on demand; [`eventually`] waits
//! for what becomes true some time.
//!
//! ```text
//! tests/run → tests/lab/up → lab.json → Lab ─┐
//!                                            ├→ Case → ProvidersFile → Daemon → Clients
//!                          built binary ─────┘
//! ```

pub mod bench;
pub mod case;
pub mod cleanup;
pub mod clients;
pub mod collector;
pub mod counters;
pub mod daemon;
pub mod failpoints;
pub mod fault_proxy;
pub mod image_server;
pub mod lab;
mod limit;
pub mod lockup;
pub mod poll;
pub mod providers_file;
pub mod refusal;
pub mod scratch;
pub mod sentinel;
pub mod soak;
pub mod summary;
pub mod tools;

pub use case::Case;
pub use cleanup::Cleanup;
pub use clients::Clients;
pub use collector::Collector;
pub use daemon::Daemon;
pub use failpoints::{Hold, Places};
pub use fault_proxy::{Fault, FaultProxy};
pub use image_server::{Answer, ImageServer};
pub use lab::{Host, Lab};
pub use limit::Turn;
pub use poll::eventually;
pub use providers_file::{EntryFile, ProvidersFile};
pub use refusal::{Refusal, refused};
pub use sentinel::Sentinels;
pub use summary::{Outcome, Summary};
