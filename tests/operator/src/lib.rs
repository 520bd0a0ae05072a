//! What the operator's tests run against: an API server and a provider of VMs, both in this process, both with faults;
//! and [`rig`], an operator between them.

pub mod apiserver;
pub mod grpc;
pub mod rig;
pub mod sim;

pub use apiserver::{ApiServer, Fault, When};
pub use rig::{Rig, Settings};
pub use sim::{Method, SimProvider, Slip};
