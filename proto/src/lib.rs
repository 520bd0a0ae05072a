//! The `egressproxies.provider.v1` contract: messages, clients, servers and the table of errors.
//!
//! The `.proto` files beside this crate are the contract; [`v1`] is generated from them and committed,
//! so that a build needs neither `protoc` nor a build script. After an edit:
//!
//! ```text
//! cargo run -p egress-provider-proto --example generate
//! UPDATE_DOCS=1 cargo test -p egress-provider-proto
//! ```
//!
//! What the generator cannot know is written by hand: which gRPC code goes with which reason
//! ([`v1::ErrorReason::grpc_code`]), and a `Debug` without secrets for the messages that carry some.
//! The crate knows nothing of a hypervisor or of Kubernetes.

mod code;
mod error_reason;
mod redact;

pub use code::code_name;

/// Messages, clients and servers.
pub mod v1 {
    include!("gen/egressproxies.provider.v1.rs");
}

/// Every file of the contract with its imports and comments, encoded: what gRPC reflection serves.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/descriptor.bin");

/// `domain` of every `google.rpc.ErrorInfo` of this contract.
pub const ERROR_DOMAIN: &str = "provider.egressproxies.io";
