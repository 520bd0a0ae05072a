//! A provider of VMs as the operator sees it: the calls of the contract, and errors that say what to do.
//!
//! [`Provider`] is the seam: the gRPC client is one implementation, a provider in memory for tests another.

pub mod error;
pub mod grpc;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use egress_provider_proto::v1;

pub use error::{ProviderError, Verdict};

/// The calls of the contract, for one entry of one provider. Every call ends within the budget of the implementation.
#[async_trait]
pub trait Provider: Debug + Send + Sync + 'static {
    /// What the provider is and is configured with.
    async fn info(&self) -> Result<v1::GetProviderInfoResponse, ProviderError>;
    /// Makes an instance or joins its making.
    async fn create(&self, request: v1::CreateRequest) -> Result<v1::CreateResponse, ProviderError>;
    /// The instance as it is.
    async fn get(&self, request: v1::GetRequest) -> Result<v1::Instance, ProviderError>;
    /// Removes an instance and everything of it.
    async fn delete(&self, request: v1::DeleteRequest) -> Result<v1::DeleteResponse, ProviderError>;
    /// Every instance of an installation, all pages; a gap is an error when `require_complete`.
    async fn list(&self, installation_id: &str, require_complete: bool) -> Result<v1::ListByTagResponse, ProviderError>;
    /// How the hosts are.
    async fn check(&self) -> Result<v1::CheckResponse, ProviderError>;
}

/// The configured providers by name.
pub type Providers = BTreeMap<String, Arc<dyn Provider>>;
