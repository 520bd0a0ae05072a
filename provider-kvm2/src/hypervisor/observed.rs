//! Every call of the seam with its span, its log line and its metric.
//!
//! Documents go to the log at trace level; bodies of uploads and downloads never.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use super::{
    CallError, CallFailure, CallResult, DomainRef, Hypervisor, NodeInfo, PoolInfo, PoolRef, UploadPart, VolumeInfo, VolumeRef, classify,
};
use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::error::{bounded, bounded_to};
use crate::telemetry::metrics::Metrics;

/// Longest value of a field of a span, in bytes; no name of ours is longer.
const MAX_SHOWN: usize = 255;

/// A hypervisor that is watched.
#[derive(Debug)]
pub struct Observed {
    inner: Arc<dyn Hypervisor>,
    metrics: Metrics,
}

impl Observed {
    pub fn new(inner: Arc<dyn Hypervisor>, metrics: Metrics) -> Self {
        Self { inner, metrics }
    }

    async fn watch<T>(&self, call: &'static str, span: Span, work: impl Future<Output = CallResult<T>> + Send) -> CallResult<T> {
        let started = Instant::now();
        let result = work.instrument(span.clone()).await;
        let took = started.elapsed();
        let outcome = match &result {
            Ok(_) => "ok",
            Err(e) => outcome(e),
        };
        self.metrics.call(self.inner.host(), call, outcome, took);
        if let Some(code) = result.as_ref().err().and_then(classify::unknown_code) {
            self.metrics.unclassified(code);
        }
        let _entered = span.enter();
        let ms = took.as_secs_f64() * 1000.0;
        match &result {
            Ok(_) => tracing::debug!(rpc = call, ms, "libvirt call"),
            Err(e) => {
                if let Some(code) = e.code() {
                    span.record("kvm2.libvirt_code", code);
                }
                span.record("otel.status_code", "ERROR");
                tracing::debug!(rpc = call, ms, outcome, code = e.code(), error = %bounded(&e.kind.to_string()), "libvirt call");
            }
        }
        result
    }
}

/// The metric's word for a failure.
fn outcome(error: &CallError) -> &'static str {
    match error.kind {
        CallFailure::Libvirt { .. } => "error",
        CallFailure::LinkDead { .. } => "link_dead",
        CallFailure::Timeout { .. } => "timeout",
        CallFailure::SourceAborted => "aborted",
        CallFailure::NotAsked { .. } => "not_asked",
        CallFailure::BadAnswer { .. } => "bad_answer",
    }
}

/// One call: its span (the name has to be a literal), then the call inside it.
macro_rules! watched {
    ($self:ident, $call:literal, { $($field:ident = $value:expr),* }, $work:expr) => {{
        let span = tracing::info_span!(
            concat!("kvm2.", $call),
            kvm2.host = %$self.inner.host(),
            // names of foreign domains and volumes are text from the host
            $(kvm2.$field = %bounded_to(&$value.to_string(), MAX_SHOWN),)*
            kvm2.libvirt_code = tracing::field::Empty,
            otel.status_code = tracing::field::Empty,
        );
        $self.watch($call, span, $work).await
    }};
}

#[async_trait]
impl Hypervisor for Observed {
    fn host(&self) -> &str {
        self.inner.host()
    }

    fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }

    async fn lib_version(&self) -> CallResult<u64> {
        watched!(self, "lib_version", {}, self.inner.lib_version())
    }

    async fn hypervisor_version(&self) -> CallResult<u64> {
        watched!(self, "hypervisor_version", {}, self.inner.hypervisor_version())
    }

    async fn hostname(&self) -> CallResult<String> {
        watched!(self, "hostname", {}, self.inner.hostname())
    }

    async fn node_info(&self) -> CallResult<NodeInfo> {
        watched!(self, "node_info", {}, self.inner.node_info())
    }

    async fn domain_capabilities(&self, machine: &str, virt_type: &str) -> CallResult<String> {
        watched!(self, "domain_capabilities", { machine = machine, virt_type = virt_type }, self.inner.domain_capabilities(machine, virt_type))
    }

    async fn has_interface(&self, name: &str) -> CallResult<Option<bool>> {
        watched!(self, "has_interface", { interface = name }, self.inner.has_interface(name))
    }

    async fn lookup_domain(&self, name: &str) -> CallResult<DomainRef> {
        watched!(self, "lookup_domain", { domain = name }, self.inner.lookup_domain(name))
    }

    async fn list_domains(&self) -> CallResult<Vec<DomainRef>> {
        watched!(self, "list_domains", {}, self.inner.list_domains())
    }

    async fn define_domain(&self, xml: &str) -> CallResult<DomainRef> {
        watched!(self, "define_domain", {}, async {
            tracing::trace!(xml, "domain document");
            self.inner.define_domain(xml).await
        })
    }

    async fn start_domain(&self, domain: &DomainRef) -> CallResult<()> {
        watched!(self, "start_domain", { domain = domain.name }, self.inner.start_domain(domain))
    }

    async fn destroy_domain(&self, domain: &DomainRef) -> CallResult<()> {
        watched!(self, "destroy_domain", { domain = domain.name }, self.inner.destroy_domain(domain))
    }

    async fn undefine_domain(&self, domain: &DomainRef) -> CallResult<()> {
        watched!(self, "undefine_domain", { domain = domain.name }, self.inner.undefine_domain(domain))
    }

    async fn domain_state(&self, domain: &DomainRef) -> CallResult<RawState> {
        watched!(self, "domain_state", { domain = domain.name }, self.inner.domain_state(domain))
    }

    async fn domain_xml(&self, domain: &DomainRef, inactive: bool) -> CallResult<String> {
        watched!(self, "domain_xml", { domain = domain.name }, self.inner.domain_xml(domain, inactive))
    }

    async fn domain_metadata(&self, domain: &DomainRef, uri: &str) -> CallResult<Option<String>> {
        watched!(self, "domain_metadata", { domain = domain.name }, self.inner.domain_metadata(domain, uri))
    }

    async fn domains_metadata(&self, domains: &[DomainRef], uri: &str) -> CallResult<Vec<CallResult<Option<String>>>> {
        watched!(self, "domains_metadata", { domains = domains.len() }, self.inner.domains_metadata(domains, uri))
    }

    async fn set_domain_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()> {
        watched!(self, "set_domain_metadata", { domain = domain.name }, async {
            tracing::trace!(element, "metadata element");
            self.inner.set_domain_metadata(domain, uri, prefix, element).await
        })
    }

    async fn set_live_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()> {
        watched!(self, "set_live_metadata", { domain = domain.name }, self.inner.set_live_metadata(domain, uri, prefix, element))
    }

    async fn domain_interfaces(&self, domain: &DomainRef, source: AddressSource) -> CallResult<Vec<GuestInterface>> {
        let source_name = match source {
            AddressSource::Agent => "agent",
            AddressSource::Lease => "lease",
            AddressSource::Arp => "arp",
        };
        watched!(self, "domain_interfaces", { domain = domain.name, source = source_name }, self.inner.domain_interfaces(domain, source))
    }

    async fn lookup_pool(&self, name: &str) -> CallResult<PoolRef> {
        watched!(self, "lookup_pool", { pool = name }, self.inner.lookup_pool(name))
    }

    async fn pool_xml(&self, pool: &PoolRef) -> CallResult<String> {
        watched!(self, "pool_xml", { pool = pool.name }, self.inner.pool_xml(pool))
    }

    async fn pool_info(&self, pool: &PoolRef) -> CallResult<PoolInfo> {
        watched!(self, "pool_info", { pool = pool.name }, self.inner.pool_info(pool))
    }

    async fn refresh_pool(&self, pool: &PoolRef) -> CallResult<()> {
        watched!(self, "refresh_pool", { pool = pool.name }, self.inner.refresh_pool(pool))
    }

    async fn list_volumes(&self, pool: &PoolRef) -> CallResult<Vec<VolumeRef>> {
        watched!(self, "list_volumes", { pool = pool.name }, self.inner.list_volumes(pool))
    }

    async fn lookup_volume(&self, pool: &PoolRef, name: &str) -> CallResult<VolumeRef> {
        watched!(self, "lookup_volume", { pool = pool.name, volume = name }, self.inner.lookup_volume(pool, name))
    }

    async fn volume_info(&self, volume: &VolumeRef) -> CallResult<VolumeInfo> {
        watched!(self, "volume_info", { volume = volume.name }, self.inner.volume_info(volume))
    }

    async fn volume_xml(&self, volume: &VolumeRef) -> CallResult<String> {
        watched!(self, "volume_xml", { volume = volume.name }, self.inner.volume_xml(volume))
    }

    async fn create_volume(&self, pool: &PoolRef, xml: &str) -> CallResult<VolumeRef> {
        watched!(self, "create_volume", { pool = pool.name }, async {
            tracing::trace!(xml, "volume document");
            self.inner.create_volume(pool, xml).await
        })
    }

    async fn delete_volume(&self, volume: &VolumeRef) -> CallResult<()> {
        watched!(self, "delete_volume", { volume = volume.name }, self.inner.delete_volume(volume))
    }

    async fn upload(&self, volume: &VolumeRef, length: u64, parts: mpsc::Receiver<UploadPart>, budget: Duration) -> CallResult<u64> {
        watched!(self, "upload", { volume = volume.name, bytes = length }, self.inner.upload(volume, length, parts, budget))
    }

    async fn download(&self, volume: &VolumeRef, limit: u64) -> CallResult<Bytes> {
        watched!(self, "download", { volume = volume.name, limit = limit }, self.inner.download(volume, limit))
    }

    fn close(&self) {
        self.inner.close();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use super::*;
    use crate::hypervisor::memory::MemoryHost;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no writer panics").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn names_that_a_host_made_up_are_bounded_and_stripped_in_spans_and_lines() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_ansi(false).with_writer(move || writer.clone()).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        let hypervisor = Observed::new(MemoryHost::new("hv1").link(), Metrics::new());
        let name = format!("\u{1b}[2J\u{202e}\n{}", "x".repeat(1000));
        hypervisor.lookup_domain(&name).await.expect_err("there is none");
        let text = String::from_utf8(lines.0.lock().expect("no writer panics").clone()).expect("text");
        let [line] = &text.lines().collect::<Vec<_>>()[..] else { panic!("one line: {text:?}") };
        assert!(line.contains("lookup_domain") && !line.contains(['\u{1b}', '\u{202e}']), "{line:?}");
        let span = line.split("kvm2.domain=").nth(1).expect("its field").split(" kvm2.libvirt_code=").next().expect("the next");
        assert!(span.len() <= MAX_SHOWN, "{span}");
    }
}
