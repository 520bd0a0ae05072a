//! Keeps a `ProviderHealth` for each configured provider: Check on a schedule, written when something has changed.

pub mod rows;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::backoff::spread;
use crate::crd::{ProviderHealth, ProviderHealthSpec};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::provider_client::{Provider, Providers};

/// How the monitor works.
#[derive(Debug, Clone)]
pub struct MonitorOptions {
    /// Where the objects are.
    pub namespace: String,
    /// Between two checks of a provider.
    pub interval: Duration,
    /// An object whose rows have not changed is written again after this, so that a stale one can be told.
    pub refresh: Duration,
}

/// The monitor.
pub struct Monitor {
    /// The API server.
    pub client: Client,
    /// Configured providers.
    pub providers: Providers,
    /// The right to act.
    pub leadership: Leadership,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// How it works.
    pub options: MonitorOptions,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Monitor {
    /// Checks every provider on its own until it is stopped: a silent one delays no other.
    pub async fn run(self, stop: CancellationToken) {
        let monitor = Arc::new(self);
        let mut tasks = JoinSet::new();
        for (name, provider) in monitor.providers.clone() {
            let (monitor, stop) = (monitor.clone(), stop.clone());
            tasks.spawn(async move {
                loop {
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = monitor.round(&name, provider.as_ref()) => {}
                    }
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(spread(monitor.options.interval, rand::random())) => {}
                    }
                }
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    /// One check of one provider.
    pub async fn round(&self, name: &str, provider: &dyn Provider) {
        let answer = provider.check().await;
        self.metrics.called("Check", answer.as_ref().err());
        let info = provider.info().await;
        self.metrics.called("GetProviderInfo", info.as_ref().err());
        let info = info.ok();
        if self.leadership.check().is_err() {
            return;
        }
        if let Err(e) = self.write(name, info.as_ref(), &answer).await {
            tracing::warn!(provider = name, error = %e, "the ProviderHealth cannot be written");
        }
    }

    async fn write(
        &self,
        name: &str,
        info: Option<&egress_provider_proto::v1::GetProviderInfoResponse>,
        answer: &Result<egress_provider_proto::v1::CheckResponse, crate::provider_client::ProviderError>,
    ) -> Result<(), kube::Error> {
        let api: Api<ProviderHealth> = Api::namespaced(self.client.clone(), &self.options.namespace);
        let mut object = match api.get_opt(name).await? {
            Some(object) => object,
            None => {
                let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
                let new = ProviderHealth { metadata, spec: ProviderHealthSpec { provider: name.to_owned() }, status: None };
                api.create(&PostParams::default(), &new).await?
            }
        };
        if object.spec.provider != name {
            let patch = serde_json::json!({ "spec": { "provider": name } });
            object = api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        }
        let old = object.status.clone().unwrap_or_default();
        let new = rows::status(&old, info, answer, Timestamp::now());
        if let Some(new) = rows::worth_writing(&old, new, self.options.refresh) {
            object.status = Some(new);
            api.replace_status(name, &PostParams::default(), &object).await?;
        }
        Ok(())
    }
}
