//! Prometheus metrics: one registry, one struct, labels from fixed words and
//! configured names only, so that nothing from outside can grow the series.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RpcLabels {
    method: &'static str,
    code: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    host: String,
    call: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HostCallLabels {
    host: String,
    call: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LinkLabels {
    host: String,
    kind: &'static str,
    event: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LinkGaugeLabels {
    host: String,
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HostLabels {
    host: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabels {
    entry: String,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabels {
    code: i64,
}

/// All series of the daemon. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    rpcs: Family<RpcLabels, Counter>,
    rpc_seconds: Family<MethodLabels, Histogram, fn() -> Histogram>,
    calls: Family<CallLabels, Counter>,
    call_seconds: Family<HostCallLabels, Histogram, fn() -> Histogram>,
    link_events: Family<LinkLabels, Counter>,
    links_open: Family<LinkGaugeLabels, Gauge>,
    image_bytes: Family<HostLabels, Counter>,
    cache: Family<CacheLabels, Counter>,
    unclassified: Family<CodeLabels, Counter>,
    tasks: Gauge,
}

fn rpc_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.002, 3.0, 11))
}

fn call_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 4.0, 10))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let rpcs = Family::default();
        let rpc_seconds = Family::new_with_constructor(rpc_buckets as fn() -> Histogram);
        let calls = Family::default();
        let call_seconds = Family::new_with_constructor(call_buckets as fn() -> Histogram);
        let link_events = Family::default();
        let links_open = Family::default();
        let image_bytes = Family::default();
        let cache = Family::default();
        let unclassified = Family::default();
        let tasks = Gauge::default();
        let mut registry = Registry::with_prefix("kvm2");
        registry.register("rpcs", "RPCs answered, by code and error reason", Clone::clone(&rpcs));
        registry.register_with_unit("rpc_duration", "Time from request to answer", Unit::Seconds, Clone::clone(&rpc_seconds));
        registry.register("hypervisor_calls", "libvirt calls, by outcome", Clone::clone(&calls));
        registry.register_with_unit("hypervisor_call_duration", "Time of a libvirt call", Unit::Seconds, Clone::clone(&call_seconds));
        registry.register("link_events", "Links dialled, failed to dial, dropped", Clone::clone(&link_events));
        registry.register("links_open", "Links open now", Clone::clone(&links_open));
        registry.register_with_unit("image_uploaded", "Image bytes sent to hosts", Unit::Bytes, Clone::clone(&image_bytes));
        registry.register("image_cache_lookups", "Lookups of base images: hit, miss, joined", Clone::clone(&cache));
        registry.register("unclassified_errors", "libvirt error codes that the error table does not know", Clone::clone(&unclassified));
        registry.register("tasks", "Tasks of the daemon that have not ended", tasks.clone());
        Self {
            registry: Arc::new(registry),
            rpcs,
            rpc_seconds,
            calls,
            call_seconds,
            link_events,
            links_open,
            image_bytes,
            cache,
            unclassified,
            tasks,
        }
    }

    /// `reason` is empty for an answer without an error.
    pub fn rpc(&self, method: &'static str, code: &'static str, reason: &'static str, took: Duration) {
        self.rpcs.get_or_create(&RpcLabels { method, code, reason }).inc();
        self.rpc_seconds.get_or_create(&MethodLabels { method }).observe(took.as_secs_f64());
    }

    pub fn call(&self, host: &str, call: &'static str, outcome: &'static str, took: Duration) {
        self.calls.get_or_create(&CallLabels { host: host.to_owned(), call, outcome }).inc();
        self.call_seconds.get_or_create(&HostCallLabels { host: host.to_owned(), call }).observe(took.as_secs_f64());
    }

    /// `kind` is `control` or `dedicated`; `event` is `dialled`, `dial_failed` or `dropped`.
    pub fn link(&self, host: &str, kind: &'static str, event: &'static str) {
        self.link_events.get_or_create(&LinkLabels { host: host.to_owned(), kind, event }).inc();
        let open = self.links_open.get_or_create(&LinkGaugeLabels { host: host.to_owned(), kind });
        match event {
            "dialled" => drop(open.inc()),
            "dropped" => drop(open.dec()),
            _ => {}
        }
    }

    pub fn image_bytes(&self, host: &str, bytes: u64) {
        self.image_bytes.get_or_create(&HostLabels { host: host.to_owned() }).inc_by(bytes);
    }

    /// `result` is `hit`, `miss` or `joined`.
    pub fn image_cache(&self, entry: &str, result: &'static str) {
        self.cache.get_or_create(&CacheLabels { entry: entry.to_owned(), result }).inc();
    }

    pub fn unclassified(&self, code: i32) {
        self.unclassified.get_or_create(&CodeLabels { code: code.into() }).inc();
    }

    /// The OpenMetrics text of all series.
    pub fn encode(&self) -> String {
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.tasks.set(i64::try_from(runtime.metrics().num_alive_tasks()).unwrap_or(i64::MAX));
        }
        let mut text = String::new();
        // writing into a String does not fail
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_counts_until_it_has_ended() {
        let m = Metrics::new();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let task = tokio::spawn(ended);
        assert!(m.encode().contains("kvm2_tasks 1\n"), "{}", m.encode());
        end.send(()).expect("the task waits");
        task.await.expect("the task").expect("told to end");
        assert!(m.encode().contains("kvm2_tasks 0\n"), "{}", m.encode());
    }

    #[test]
    fn a_link_that_is_dropped_is_no_longer_open() {
        let m = Metrics::new();
        m.link("hv1", "control", "dialled");
        m.link("hv1", "control", "dropped");
        let text = m.encode();
        assert!(text.contains("kvm2_links_open{host=\"hv1\",kind=\"control\"} 0"), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }
}
