//! What both resources share.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// It is not known.
    Unknown,
}

/// One aspect of the state of a resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which aspect: Provisioned, Healthy or Ready.
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// Why, in one word for programs; docs/operations.md lists all of them.
    #[schemars(length(min = 1, max = 63))]
    pub reason: String,
    /// Why, for people, and what to do. At most 1024 bytes, without secrets.
    #[schemars(length(max = 1024))]
    #[serde(default)]
    pub message: String,
    /// The generation of the resource that this was seen for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How often what failed has been tried without success since the reason last changed; absent when nothing fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// Since when the reason is this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// When the status last changed.
    pub last_transition_time: Time,
}
