//! Reconciliation of a Proxy: load → plan → act → status.
//!
//! [`plan`](mod@crate::plan) and [`status`](mod@crate::status) decide; here is what they need done. Every write carries the
//! resource version that it is based on, so that what is planned on a stale copy fails instead of undoing something.

mod act;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::json;
use tracing::Instrument as _;

use crate::address_book::AddressBook;
use crate::backoff::{Curve, spread};
use crate::conditions;
use crate::crd::{Proxy, ProxyStatus};
use crate::health::Board;
use crate::leader::{Leadership, NotLeader};
use crate::metrics::Metrics;
use crate::names::{instance_name, spec_hash};
use crate::plan::{self, Rest, Seen, Step, View, Why};
use crate::provider_client::{Provider, Providers};
use crate::status::{self, Around};
use crate::user_data::{UserData, UserDataError, UserDataSource};

/// Keeps a Proxy until its provider has said that nothing of it is left.
pub const FINALIZER: &str = "egressproxies.io/instance";
/// A person's word that a Proxy may go although something of it may be left: `egressproxies.io/force-delete: "true"`.
pub const FORCE_DELETE: &str = "egressproxies.io/force-delete";
/// No path through the plan is longer; more is a mistake of ours and would be a hot loop.
const MOST_STEPS: usize = 12;
/// Between tries when the API server fails.
const API_BACKOFF: Curve = Curve { first: Duration::from_secs(1), most: Duration::from_secs(60) };

/// What a reconciliation needs.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// Configured providers.
    pub providers: Providers,
    /// Whose instances ours are.
    pub installation_id: String,
    /// The right to act.
    pub leadership: Leadership,
    /// What the probes say, and who wants to be probed.
    pub board: Arc<Board>,
    /// Who has which address.
    pub addresses: AddressBook,
    /// User-data.
    pub user_data: UserDataSource,
    /// Where events go.
    pub recorder: Recorder,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Failures of the API server in a row, by Proxy.
    pub api_failures: Mutex<HashMap<String, u32>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("providers", &self.providers.keys()).finish_non_exhaustive()
    }
}

/// Why a reconciliation came to no end. The provider's errors are not among them: those are shown in conditions.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The API server refused or did not answer.
    #[error("the API server: {0}")]
    Api(#[from] kube::Error),
    /// Somebody else acts.
    #[error(transparent)]
    NotLeader(#[from] NotLeader),
    /// The plan led in a circle.
    #[error("the plan of this Proxy leads in a circle: this is a bug, please report it")]
    Circle,
}

impl ReconcileError {
    /// Whether somebody else has written meanwhile: nothing is wrong.
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 409)
    }
}

/// One reconciliation; what to do about an error is [`on_error`]'s.
///
/// # Errors
/// The API server failed, or this operator may not act any more.
pub async fn reconcile(proxy: Arc<Proxy>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let name = full_name(&proxy);
    let span = tracing::info_span!("reconcile", otel.name = "Reconcile Proxy", proxy = name, uid = proxy.uid().unwrap_or_default());
    let started = tokio::time::Instant::now();
    let result = Reconciliation {
        api: Api::namespaced(context.client.clone(), &proxy.namespace().unwrap_or_default()),
        context: &context,
        proxy: (*proxy).clone(),
        is_fresh: false,
    }
    .run()
    .instrument(span)
    .await;
    context.metrics.reconciled(result.is_ok(), started.elapsed());
    if result.is_ok() {
        context.api_failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&name);
    }
    result
}

/// When to come back after an error.
pub fn on_error(proxy: Arc<Proxy>, error: &ReconcileError, context: Arc<Context>) -> Action {
    let name = full_name(&proxy);
    if error.is_conflict() {
        // the newer copy is on its way to us
        return Action::requeue(spread(Duration::from_millis(500), rand::random()));
    }
    let attempts = {
        let mut failures = context.api_failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let count = failures.entry(name.clone()).or_default();
        *count = count.saturating_add(1);
        *count
    };
    tracing::warn!(proxy = name, attempts, error = %error, "reconciliation failed");
    Action::requeue(spread(API_BACKOFF.after(attempts), rand::random()))
}

/// As namespace/name.
#[must_use]
pub fn full_name(proxy: &Proxy) -> String {
    format!("{}/{}", proxy.namespace().unwrap_or_default(), proxy.name_any())
}

/// A Proxy is not there any more: nobody probes it, and its address is free.
pub fn forget(context: &Context, name: &str) {
    note_address(context, name, None);
}

fn note_address(context: &Context, name: &str, at: Option<(&str, u16)>) {
    let others = context.addresses.note(name, at);
    context.board.want(name, at.map(|(ip, port)| (ip.to_owned(), port)));
    for other in others {
        context.board.touch(&other);
    }
}

struct Reconciliation<'a> {
    api: Api<Proxy>,
    context: &'a Context,
    proxy: Proxy,
    /// Whether the copy is what the API server answered to a write of this reconciliation, and so no older than that.
    is_fresh: bool,
}

impl Reconciliation<'_> {
    async fn run(mut self) -> Result<Action, ReconcileError> {
        self.context.leadership.check()?;
        // a copy that is older than our own last write could lack the intent of a call: deletion looks at the real thing
        if self.proxy.meta().deletion_timestamp.is_some() {
            match self.api.get_opt(&self.proxy.name_any()).await? {
                Some(live) if live.uid() == self.proxy.uid() => self.proxy = live,
                _ => return Ok(Action::await_change()),
            }
        }
        let user_data = self.user_data().await?;
        let mut seen = Seen::Nothing;
        for _ in 0..MOST_STEPS {
            let old = self.proxy.status.clone().unwrap_or_default();
            let spec = self.proxy.spec.clone();
            let view = self.view(&spec, &old, &user_data);
            let step = plan::plan(&view, &seen);
            tracing::debug!(?step, "planned");
            seen = match step {
                Step::AddFinalizer => {
                    self.set_finalizer(true).await?;
                    Seen::Nothing
                }
                Step::Intend { hash, vanished } => {
                    let name = instance_name(&self.proxy.uid().unwrap_or_default());
                    if vanished {
                        self.event(
                            EventType::Warning,
                            "InstanceVanished",
                            "Create",
                            "the provider has no such VM any more: another is made".to_owned(),
                        )
                        .await;
                    }
                    self.write(status::intended(&view, &name, &hash, vanished)).await?;
                    Seen::Nothing
                }
                Step::Create => self.create(user_data.as_ref().ok().and_then(Option::as_ref)).await?,
                Step::Get => self.get().await?,
                Step::Delete(why) => {
                    self.write(status::deleting(&view, why)).await?;
                    let seen = self.delete(why).await?;
                    if why != Why::ProxyDeleted && matches!(seen, Seen::Gone | Seen::Abandoned(_)) {
                        let old = self.proxy.status.clone().unwrap_or_default();
                        let view = self.view(&spec, &old, &user_data);
                        self.write(status::gone(&view)).await?;
                        Seen::Nothing
                    } else {
                        seen
                    }
                }
                Step::RemoveFinalizer { left_behind } => {
                    if let Some(what) = left_behind {
                        tracing::warn!(what, "a Proxy is let go of by force");
                        self.event(EventType::Warning, "LeftBehind", "Delete", format!("deleted by force; what may be left: {what}")).await;
                    }
                    self.forget();
                    self.set_finalizer(false).await?;
                    return Ok(Action::await_change());
                }
                Step::External => return self.external(&view).await,
                Step::Rest(Rest::Done) => {
                    self.forget();
                    return Ok(Action::await_change());
                }
                Step::Rest(rest) => return self.rest(&view, &rest, &seen).await,
            };
        }
        Err(ReconcileError::Circle)
    }

    fn view<'v>(&self, spec: &'v crate::crd::ProxySpec, status: &'v ProxyStatus, user_data: &Result<Option<UserData>, String>) -> View<'v> {
        let provider = spec.provider.as_deref().unwrap_or_default();
        let data = user_data.as_ref().map(|data| data.as_ref().map(|d| d.bytes().as_ref()));
        View {
            spec,
            status,
            generation: self.proxy.meta().generation.unwrap_or_default(),
            deleting: self.proxy.meta().deletion_timestamp.is_some(),
            finalizer: self.proxy.finalizers().iter().any(|f| f == FINALIZER),
            force_delete: self.proxy.annotations().get(FORCE_DELETE).is_some_and(|v| v == "true"),
            provider_known: self.context.providers.contains_key(provider),
            hash: data
                .map_err(Clone::clone)
                .map(|data| spec_hash(spec.placement.as_ref().unwrap_or(&crate::crd::proxy::Placement::default()), data)),
            now: Timestamp::now(),
        }
    }

    /// Nothing is read for a Proxy that is going away.
    async fn user_data(&self) -> Result<Result<Option<UserData>, String>, ReconcileError> {
        if self.proxy.meta().deletion_timestamp.is_some() {
            return Ok(Ok(None));
        }
        let namespace = self.proxy.namespace().unwrap_or_default();
        match self.context.user_data.of(&namespace, self.proxy.spec.cloud_init.as_ref()).await {
            Ok(data) => Ok(Ok(data)),
            Err(UserDataError::Missing(what)) => Ok(Err(what)),
            // only a person mends this, and looks at the Proxy for it
            Err(UserDataError::Api(kube::Error::Api(status))) if status.code == 403 => Ok(Err(format!(
                "the operator may not read the Secret or ConfigMap of cloudInit in namespace {namespace}: bind it a role there ({})",
                crate::provider_client::error::clean(&status.message, 512)
            ))),
            Err(UserDataError::Api(e)) => Err(e.into()),
        }
    }

    fn provider(&self) -> Option<&Arc<dyn Provider>> {
        self.context.providers.get(self.proxy.spec.provider.as_deref().unwrap_or_default())
    }

    /// Shows what was seen and says when to look again.
    async fn rest(&mut self, view: &View<'_>, rest: &Rest, seen: &Seen) -> Result<Action, ReconcileError> {
        let name = full_name(&self.proxy);
        // the address decides who shares it, and that decides the condition: so twice
        let first = status::rest(view, rest, seen, &Around { health: None, shared_with: None, jitter: 0.0 });
        self.note_address(&name, first.status.address.as_deref());
        let outcome = {
            let health = self.context.board.health(&name);
            let shared_with = self.context.addresses.shared_with(&name);
            status::rest(view, rest, seen, &Around { health: health.as_ref(), shared_with: shared_with.as_deref(), jitter: rand::random() })
        };
        self.settle(view, outcome).await
    }

    async fn external(&mut self, view: &View<'_>) -> Result<Action, ReconcileError> {
        let name = full_name(&self.proxy);
        self.note_address(&name, view.spec.external.as_ref().map(|e| e.address.as_str()));
        let health = self.context.board.health(&name);
        let shared_with = self.context.addresses.shared_with(&name);
        let outcome =
            status::external(view, &Around { health: health.as_ref(), shared_with: shared_with.as_deref(), jitter: rand::random() });
        self.settle(view, outcome).await
    }

    async fn settle(&mut self, view: &View<'_>, outcome: status::Outcome) -> Result<Action, ReconcileError> {
        self.tell(view.status, &outcome.status).await;
        self.write(outcome.status).await?;
        Ok(Action::requeue(outcome.again))
    }

    fn note_address(&self, name: &str, address: Option<&str>) {
        note_address(self.context, name, address.map(|ip| (ip, self.proxy.spec.port)));
    }

    fn forget(&self) {
        forget(self.context, &full_name(&self.proxy));
    }

    /// Events of what a person wants to know; a repeated reason is no news.
    async fn tell(&self, old: &ProxyStatus, new: &ProxyStatus) {
        for type_ in [conditions::PROVISIONED, conditions::HEALTHY] {
            let before = conditions::find(&old.conditions, type_);
            let Some(after) = conditions::find(&new.conditions, type_) else { continue };
            if before.is_some_and(|b| b.reason == after.reason && b.status == after.status) {
                continue;
            }
            let worth_it = after.attempts.is_some()
                || matches!(
                    after.reason.as_str(),
                    "Running" | "ProvisioningTimeout" | "AddressConflict" | "StateUnknown" | "CloudInitMissing" | "ProviderNotConfigured"
                )
                || new.phase == Some(crate::crd::proxy::Phase::Paused);
            if worth_it {
                let kind = if after.status == crate::crd::ConditionStatus::True { EventType::Normal } else { EventType::Warning };
                let message = if after.message.is_empty() { format!("{type_}: {}", after.reason) } else { after.message.clone() };
                self.event(kind, &after.reason, "Reconcile", message).await;
            }
        }
    }

    /// Events help people; that one is lost is no reason to fail.
    async fn event(&self, type_: EventType, reason: &str, action: &str, note: String) {
        let note = Some(crate::provider_client::error::clean(&note, 1000));
        let event = Event { type_, reason: reason.to_owned(), note, action: action.to_owned(), secondary: None };
        if let Err(e) = self.context.recorder.publish(&event, &self.proxy.object_ref(&())).await {
            tracing::debug!(error = %e, reason, "an event is lost");
        }
    }

    /// Writes the status if it says something else than the one that is there.
    async fn write(&mut self, status: ProxyStatus) -> Result<(), ReconcileError> {
        if self.proxy.status.as_ref() == Some(&status) {
            return Ok(());
        }
        self.context.leadership.check()?;
        let mut new = self.proxy.clone();
        new.status = Some(status);
        self.context.metrics.status_written();
        self.proxy = self.api.replace_status(&self.proxy.name_any(), &PostParams::default(), &new).await?;
        self.is_fresh = true;
        Ok(())
    }

    async fn set_finalizer(&mut self, on: bool) -> Result<(), ReconcileError> {
        self.context.leadership.check()?;
        let mut finalizers: Vec<_> = self.proxy.finalizers().iter().filter(|f| *f != FINALIZER).cloned().collect();
        if on {
            finalizers.push(FINALIZER.to_owned());
        }
        let patch = json!({ "metadata": { "resourceVersion": self.proxy.resource_version(), "finalizers": finalizers } });
        match self.api.patch(&self.proxy.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(new) => (self.proxy, self.is_fresh) = (new, true),
            // gone is what was wanted
            Err(kube::Error::Api(status)) if !on && status.code == 404 => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }
}
