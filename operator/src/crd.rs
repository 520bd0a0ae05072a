//! The resources of the operator. Their schemas are generated from these types (`crdgen`), field docs included, so a doc
//! comment here is what `kubectl explain` shows.

pub mod common;
pub mod provider_health;
pub mod proxy;

pub use common::{Condition, ConditionStatus};
pub use provider_health::{ProviderHealth, ProviderHealthSpec, ProviderHealthStatus};
pub use proxy::{Proxy, ProxySpec, ProxyStatus};

/// API group of both resources.
pub const GROUP: &str = "egressproxies.io";
/// Their only version.
pub const VERSION: &str = "v1alpha1";
