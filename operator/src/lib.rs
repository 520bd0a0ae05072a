//! The operator: a `Proxy` in Kubernetes becomes a healthy egress proxy, and stays one.
//!
//! ```text
//! main → config → reconcile ─▶ plan, status (pure)     Proxy: load → plan → act → status
//!                 provider_health                      Check on a schedule → ProviderHealth
//!                 gc                                   instances that no Proxy wants
//!                 health                               CONNECT through every proxy
//!                 discovery                            what clients ask; leases
//!                 leader                               one operator acts at a time
//!        all of them ─▶ provider_client ─▶ the contract;  crd, conditions, names, metrics below
//! ```
//!
//! Of a provider it knows the contract (`egress-provider-proto`) and nothing else.

pub mod address_book;
pub mod backoff;
pub mod conditions;
pub mod config;
pub mod crd;
pub mod discovery;
pub mod gc;
pub mod health;
pub mod leader;
pub mod metrics;
pub mod names;
pub mod ops;
pub mod plan;
pub mod provider_client;
pub mod provider_health;
pub mod pulse;
pub mod reconcile;
pub mod run;
pub mod status;
pub mod telemetry;
pub mod user_data;
