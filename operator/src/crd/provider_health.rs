//! `ProviderHealth` (ph): how the hosts of a configured provider are. Written by the operator, one per provider.

#![expect(unreachable_pub, reason = "KubeSchema repeats the type where nobody can name it")]
#![expect(clippy::duplicated_attributes, reason = "columns of one type are no duplicates")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Condition;

/// How a configured provider and its hosts are. The operator makes one for each provider of its configuration, of the
/// same name, and keeps it.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "egressproxies.io",
    version = "v1alpha1",
    kind = "ProviderHealth",
    plural = "providerhealths",
    singular = "providerhealth",
    shortname = "ph",
    namespaced,
    status = "ProviderHealthStatus",
    category = "egress",
    derive = "PartialEq",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.ready"),
    printcolumn(name = "Type", type_ = "string", json_path = ".status.providerType"),
    printcolumn(name = "Reason", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].reason"#),
    printcolumn(name = "Checked", type_ = "date", json_path = ".status.lastCheckTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.providerVersion", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].message"#, priority = 1)
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProviderHealthSpec {
    /// The provider of the operator's configuration that this is about.
    #[schemars(length(min = 1, max = 63))]
    pub provider: String,
}

/// What the last checks said.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderHealthStatus {
    /// Healthy hosts of all hosts, as n/m.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ready: String,
    /// Healthy hosts.
    #[serde(default)]
    pub healthy_hosts: u32,
    /// Configured hosts.
    #[serde(default)]
    pub total_hosts: u32,
    /// The type of provider, for example kvm2.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_type: String,
    /// The version of the provider's program.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_version: String,
    /// When the rows below were last written. It moves with a change, and at least once in the refresh interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_check_time: Option<Time>,
    /// One row per host, in the provider's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostHealth>,
    /// Ready: every host of the provider is healthy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// How a host is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostHealth {
    /// Its name; also the zone that selects it.
    pub host: String,
    /// Where it is reached.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// Whether everything that an instance needs is there.
    pub healthy: bool,
    /// Outcome of the check in a word, for example Reachable, Timeout or PoolNotActive.
    pub reason: String,
    /// How long the check took, in milliseconds, rounded so that it does not change all the time.
    #[serde(default)]
    pub latency_ms: u64,
    /// What failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remediation: String,
    /// What was learnt: versions, pool and space, as name: value.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub details: std::collections::BTreeMap<String, String>,
    /// What works and deserves a look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Since when reason is this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}
