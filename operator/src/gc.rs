//! Removes instances that no Proxy wants: what is left when a Proxy went without its finalizer, or an API server was
//! restored from a backup. It is the one part that deletes what nobody asked it to, so any doubt stops it.
//!
//! [`sweep`] decides and is pure; here is who gives it what it needs and does what it says.

pub mod sweep;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use egress_provider_proto::v1::{DeleteRequest, InstanceById, delete_request};
use jiff::Timestamp;
use kube::api::ListParams;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::backoff::spread;
use crate::crd::{Proxy, ProxyStatus};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::provider_client::{Provider, Providers};
use sweep::{Doubt, Known, Memory, Orphan, Sweep};

/// Proxies in a page of a list.
const PAGE: u32 = 500;
/// For listing the Proxies.
const LIST_BUDGET: Duration = Duration::from_secs(60);

/// How the collector works.
#[derive(Debug, Clone)]
pub struct GcOptions {
    /// Between two sweeps.
    pub interval: Duration,
    /// An instance that is younger, by its own record or by our clock, is left alone.
    pub minimum_age: Duration,
    /// The most that is removed in a sweep of a provider.
    pub most: usize,
    /// Only say what would be removed.
    pub dry_run: bool,
}

/// The collector.
pub struct Collector {
    /// The API server.
    pub client: Client,
    /// Configured providers.
    pub providers: Providers,
    /// Whose instances are ours.
    pub installation_id: String,
    /// The right to act.
    pub leadership: Leadership,
    /// Where events go; they are about the object that [`Collector::about`] names.
    pub recorder: Recorder,
    /// What events are about: an orphan has no object of its own.
    pub about: k8s_openapi::api::core::v1::ObjectReference,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// How it works.
    pub options: GcOptions,
    /// Whether the cache of Proxies is filled.
    pub synced: Arc<std::sync::atomic::AtomicBool>,
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Collector {
    /// Sweeps until it is stopped.
    pub async fn run(self, stop: CancellationToken) {
        let start = Instant::now();
        let mut memories: BTreeMap<String, Memory> = BTreeMap::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(spread(self.options.interval, rand::random())) => {}
            }
            for (name, provider) in &self.providers {
                let memory = memories.entry(name.clone()).or_default();
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = self.sweep(name, provider.as_ref(), memory, start) => {}
                }
            }
        }
    }

    /// One sweep of one provider.
    pub async fn sweep(&self, name: &str, provider: &dyn Provider, memory: &mut Memory, start: Instant) {
        let sweep = self.gather(provider).await.and_then(|(proxies, instances)| {
            let now = sweep::Now { wall: Timestamp::now(), since_start: start.elapsed() };
            sweep::sweep(memory, &proxies, &instances, &self.installation_id, self.options.minimum_age, now)
        });
        let Sweep { orphans, ripe } = match sweep {
            Ok(sweep) => sweep,
            Err(doubt) => {
                memory.forget();
                tracing::warn!(provider = name, %doubt, "the collector does nothing: something is in doubt");
                self.metrics.swept(name, 0, true);
                return;
            }
        };
        self.metrics.swept(name, orphans.len(), false);
        for orphan in orphans.iter().filter(|o| o.is_new) {
            self.tell(name, "OrphanFound", orphan, "no Proxy wants it").await;
        }
        for orphan in ripe.into_iter().take(self.options.most) {
            if self.options.dry_run {
                tracing::info!(provider = name, instance = orphan.instance_id, "dry run: this instance would be removed");
                continue;
            }
            if !self.remove(name, provider, &orphan).await {
                return;
            }
        }
    }

    /// What is there on both sides, both asked now. The provider first: an instance that comes after is not seen at all,
    /// and a Proxy that comes after its instance was seen is in the list.
    async fn gather(&self, provider: &dyn Provider) -> Result<(Vec<Known>, Vec<egress_provider_proto::v1::Instance>), Doubt> {
        self.leadership.check().map_err(|_| Doubt::NotLeader)?;
        if !self.synced.load(std::sync::atomic::Ordering::Acquire) {
            return Err(Doubt::NotSynced);
        }
        let list = provider.list(&self.installation_id, true).await.map_err(|e| Doubt::Provider(e.to_string()))?;
        if !list.complete {
            return Err(Doubt::Provider("its list is not complete".to_owned()));
        }
        let proxies = tokio::time::timeout(LIST_BUDGET, self.proxies())
            .await
            .map_err(|_| Doubt::ApiServer("it did not answer in time".to_owned()))?;
        Ok((proxies.map_err(|e| Doubt::ApiServer(e.to_string()))?, list.instances))
    }

    /// Every Proxy, from the API server and not from a cache.
    async fn proxies(&self) -> Result<Vec<Known>, kube::Error> {
        let api: Api<Proxy> = Api::all(self.client.clone());
        let mut params = ListParams::default().limit(PAGE);
        let mut all = Vec::new();
        loop {
            let page = api.list(&params).await?;
            all.extend(page.items.iter().map(known));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(all),
            }
        }
    }

    /// Removes an orphan; false if the sweep has to end.
    async fn remove(&self, name: &str, provider: &dyn Provider, orphan: &Orphan) -> bool {
        if self.leadership.check().is_err() {
            return false;
        }
        // the uid goes along, so that an instance that is another by now stays
        let id = InstanceById {
            instance_id: orphan.instance_id.clone(),
            uid: orphan.uid.clone(),
            installation_id: self.installation_id.clone(),
        };
        let answer = provider.delete(DeleteRequest { selector: Some(delete_request::Selector::Id(id)), ..DeleteRequest::default() }).await;
        self.metrics.called("Delete", answer.as_ref().err());
        match answer {
            Ok(_) => {
                self.metrics.orphan_deleted(name);
                self.tell(name, "OrphanDeleted", orphan, "no Proxy wanted it").await;
                true
            }
            Err(e) => {
                tracing::warn!(provider = name, instance = orphan.instance_id, error = %e, "an orphan could not be removed");
                true
            }
        }
    }

    async fn tell(&self, provider: &str, reason: &str, orphan: &Orphan, why: &str) {
        tracing::warn!(provider, instance = orphan.instance_id, uid = orphan.uid, reason, "orphan");
        let note = format!("instance {} of uid {} at provider {provider}: {why}", orphan.instance_id, orphan.uid);
        let event =
            Event { type_: EventType::Warning, reason: reason.to_owned(), note: Some(note), action: "Collect".to_owned(), secondary: None };
        if let Err(e) = self.recorder.publish(&event, &self.about).await {
            tracing::debug!(error = %e, reason, "an event is lost");
        }
    }
}

fn known(proxy: &Proxy) -> Known {
    let ProxyStatus { instance_name, instance_id, .. } = proxy.status.clone().unwrap_or_default();
    Known { uid: proxy.uid().unwrap_or_default(), instance_name, instance_id }
}
