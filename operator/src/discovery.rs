//! What clients ask: which proxies are there, and may I have one for a while.
//!
//! Reading is answered from the cache of Proxies by every replica; leases are given by the leader only, and each is a
//! Lease object of Kubernetes, so that they survive a restart and are seen by the next leader.

pub mod api;
pub mod auth;
pub mod leases;
pub mod openapi;
pub mod pick;

pub use api::{Discovery, serve};
pub use auth::Token;
pub use leases::LeaseDesk;
