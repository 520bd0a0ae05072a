//! Counters and gauges for Prometheus. Labels come from our own lists, never from text of others.

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::provider_client::ProviderError;

/// Content type of [`Metrics::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    outcome: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderLabels {
    provider: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// Everything that the operator counts.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    reconciles: Family<OutcomeLabels, Counter>,
    reconcile_seconds: Histogram,
    status_writes: Counter,
    calls: Family<CallLabels, Counter>,
    probes: Family<ReasonLabels, Counter>,
    orphans: Family<ProviderLabels, Gauge<i64, AtomicI64>>,
    orphans_deleted: Family<ProviderLabels, Counter<u64, AtomicU64>>,
    collector_frozen: Family<ProviderLabels, Gauge<i64, AtomicI64>>,
    leader: Gauge<i64, AtomicI64>,
    leases: Gauge<i64, AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("egress_operator");
        let new = Self {
            reconciles: Family::default(),
            reconcile_seconds: Histogram::new(exponential_buckets(0.001, 4.0, 9)),
            status_writes: Counter::default(),
            calls: Family::default(),
            probes: Family::default(),
            orphans: Family::default(),
            orphans_deleted: Family::default(),
            collector_frozen: Family::default(),
            leader: Gauge::default(),
            leases: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("reconciles", "Reconciliations of Proxies", new.reconciles.clone());
        registry.register("reconcile_seconds", "Time of a reconciliation, calls included", new.reconcile_seconds.clone());
        registry.register("status_writes", "Statuses of Proxies written", new.status_writes.clone());
        registry.register("provider_calls", "Calls of providers by method and reason", new.calls.clone());
        registry.register("probes", "Probes of proxies by what they found", new.probes.clone());
        registry.register("orphans", "Instances that no Proxy wants", new.orphans.clone());
        registry.register("orphans_deleted", "Instances removed by the collector", new.orphans_deleted.clone());
        registry.register(
            "collector_frozen",
            "1 while the collector does nothing because something is in doubt",
            new.collector_frozen.clone(),
        );
        registry.register("leader", "1 while this operator acts", new.leader.clone());
        registry.register("discovery_leases", "Leases of proxies that run", new.leases.clone());
        Self { registry, ..new }
    }
}

impl Metrics {
    /// A reconciliation has ended.
    pub fn reconciled(&self, ok: bool, took: Duration) {
        self.reconciles.get_or_create(&OutcomeLabels { outcome: if ok { "ok" } else { "error" } }).inc();
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    /// A status was written.
    pub fn status_written(&self) {
        self.status_writes.inc();
    }

    /// A provider was called. A reason that this build does not know counts as its code, so that no provider makes series.
    pub fn called(&self, method: &'static str, error: Option<&ProviderError>) {
        let outcome = match error {
            None => "OK".to_owned(),
            Some(e) if e.known.is_some() => e.reason.clone(),
            Some(e) => format!("{:?}", e.code),
        };
        self.calls.get_or_create(&CallLabels { method, outcome }).inc();
    }

    /// A probe has ended.
    pub fn probed(&self, reason: &'static str) {
        self.probes.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// What a sweep of a provider has found.
    pub fn swept(&self, provider: &str, orphans: usize, frozen: bool) {
        let labels = ProviderLabels { provider: provider.to_owned() };
        self.orphans.get_or_create(&labels).set(i64::try_from(orphans).unwrap_or(i64::MAX));
        self.collector_frozen.get_or_create(&labels).set(i64::from(frozen));
    }

    /// The collector has removed an instance.
    pub fn orphan_deleted(&self, provider: &str) {
        self.orphans_deleted.get_or_create(&ProviderLabels { provider: provider.to_owned() }).inc();
    }

    /// Whether this operator acts.
    pub fn leading(&self, is: bool) {
        self.leader.set(i64::from(is));
    }

    /// How many leases run.
    pub fn leases(&self, count: usize) {
        self.leases.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Everything, in OpenMetrics text.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // writing into a String does not fail
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}
