//! `Proxy` (px): an egress proxy, made by a provider or given from outside.

#![expect(unreachable_pub, reason = "KubeSchema repeats the type where nobody can name it")]
#![expect(clippy::duplicated_attributes, reason = "columns of one type are no duplicates")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Condition;

/// An egress proxy that is kept alive: a VM that a provider makes, or an address that exists already. It is probed through
/// its proxy port and offered to clients while it is healthy.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "egressproxies.io",
    version = "v1alpha1",
    kind = "Proxy",
    plural = "proxies",
    shortname = "px",
    namespaced,
    status = "ProxyStatus",
    category = "egress",
    derive = "PartialEq",
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.address"),
    printcolumn(name = "Port", type_ = "integer", json_path = ".spec.port"),
    printcolumn(name = "Provider", type_ = "string", json_path = ".spec.provider"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].reason"#),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.placement.zone", priority = 1),
    printcolumn(name = "Machine", type_ = "string", json_path = ".spec.placement.machineType", priority = 1),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.placement.image", priority = 1),
    printcolumn(name = "Instance", type_ = "string", json_path = ".status.instanceId", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].message"#, priority = 1)
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("has(self.provider) != has(self.external)").message("give either provider or external"))]
#[x_kube(validation = Rule::new("has(self.provider) == has(self.placement)").message("placement goes with provider: give both or neither"))]
#[x_kube(validation = Rule::new("has(self.provider) || !has(self.cloudInit)").message("cloudInit goes with provider: an external proxy is not made"))]
#[x_kube(validation = Rule::new("has(self.provider) || !has(self.provisioning)").message("provisioning goes with provider: an external proxy is not made"))]
#[x_kube(validation = Rule::new("has(self.provider) == has(oldSelf.provider) && (!has(self.provider) || self.provider == oldSelf.provider)").message("provider cannot be changed: delete the Proxy and make another"))]
pub struct ProxySpec {
    /// The provider that makes the VM: a name of the operator's providers file. Cannot be changed. Exactly one of
    /// provider and external is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub provider: Option<String>,
    /// Where the VM is made and of what. Given exactly when provider is. A change replaces the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// What the VM is configured with at its first boot. A change replaces the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// The TCP port of the proxy. A change replaces nothing: the new port is probed and offered.
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// A proxy that exists already: it is only probed and offered. Exactly one of provider and external is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<External>,
    /// How long a VM may take to get its address, and what happens then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning: Option<Provisioning>,
}

/// Where a VM is made and of what. The words are those of the provider's catalogue: `kvm2-providerd info` lists them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// The zone, for kvm2 the name of a host. May be left out where the provider has only one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub zone: String,
    /// The region, for providers that have regions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub region: String,
    /// A key of the provider's machine types.
    #[schemars(length(min = 1, max = 63))]
    pub machine_type: String,
    /// A key of the provider's images, or an absolute http or https URL without user-info where the provider allows one.
    #[schemars(length(min = 1, max = 2048))]
    pub image: String,
}

/// Where the user-data comes from: exactly one of the three. It reaches the guest byte for byte and appears in no log.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("(has(self.inline) ? 1 : 0) + (has(self.secretKeyRef) ? 1 : 0) + (has(self.configMapKeyRef) ? 1 : 0) == 1").message("give exactly one of inline, secretKeyRef and configMapKeyRef"))]
pub struct CloudInit {
    /// The user-data itself. Everybody who can read the Proxy can read it: secrets belong into a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 262144))]
    pub inline: Option<String>,
    /// A key of a Secret in the namespace of the Proxy. A changed value replaces the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// A key of a ConfigMap in the namespace of the Proxy, of its data or binaryData. A changed value replaces the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
}

/// A key of a Secret or ConfigMap.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeyRef {
    /// Name of the object, in the namespace of the Proxy.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key within it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// A proxy that exists already.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct External {
    /// IP address or DNS name of the proxy, without port.
    #[schemars(length(min = 1, max = 253), pattern(r"^[0-9A-Za-z:.\-]+$"))]
    pub address: String,
}

/// How long a VM may take to get its address.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Provisioning {
    /// Seconds from the wish for a VM until it must have an address; waiting for an image counts. The operator's
    /// default (900) when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30, max = 86400))]
    pub deadline_seconds: Option<u32>,
    /// What happens after the deadline. Report says so in a condition and an Event and goes on waiting; Replace deletes
    /// the VM and makes another.
    #[serde(default)]
    pub on_timeout: OnTimeout,
}

/// What happens to a VM that does not get its address in time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnTimeout {
    /// It is reported and kept.
    #[default]
    Report,
    /// It is deleted and made again.
    Replace,
}

/// What the operator has seen. Nobody else writes it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProxyStatus {
    /// The generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Where the Proxy is in its life, in a word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The provider's id of the VM; absent until the first Create has answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The name of the VM at its provider, derived from the UID of the Proxy. Written before the first Create.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_name: Option<String>,
    /// The zone that the VM was asked for. Written before the first Create; empty where none was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Digest of placement and user-data that the VM was asked for with; another one replaces the VM. Written before the
    /// first Create.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec_hash: Option<String>,
    /// The address that is probed and offered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Every address of the VM, the probed one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<Address>,
    /// Present and true while the VM runs and its address cannot be read: the last known one is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_stale: Option<bool>,
    /// Since when the VM is wanted that has no address yet; the provisioning deadline counts from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning_since: Option<Time>,
    /// The spec generation that was refused for good; nothing is tried until spec or user-data change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_generation: Option<i64>,
    /// Provisioned, Healthy and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Where a Proxy is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Nothing was asked of the provider.
    Pending,
    /// A VM is asked for and has no address yet.
    Provisioning,
    /// The VM runs and has an address.
    Running,
    /// The VM is paused. It is left alone.
    Paused,
    /// The VM is being replaced by another.
    Replacing,
    /// The provider refuses the spec for good.
    Failed,
    /// The Proxy is being removed.
    Deleting,
    /// Not made by a provider.
    External,
}

/// An address of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Address {
    /// The address.
    pub ip: String,
    /// Who told it: GuestAgent, DhcpLease, Arp, Spec or Unknown.
    pub source: String,
}
