//! The calls that a reconciliation makes of a provider.

use egress_provider_proto::v1::{
    self, CloudInit, CreateRequest, DeleteRequest, GetRequest, InstanceById, InstanceKey, delete_request, delete_response, get_request,
};
use kube::ResourceExt;
use kube::runtime::events::EventType;
use tonic::Code;

use super::{FORCE_DELETE, ReconcileError, Reconciliation};
use crate::plan::{Seen, Why};
use crate::provider_client::ProviderError;
use crate::user_data::UserData;

impl Reconciliation<'_> {
    /// Asks for the instance that the status says.
    pub(super) async fn create(&mut self, user_data: Option<&UserData>) -> Result<Seen, ReconcileError> {
        // a copy from before a deletion must not bring an instance back that nobody would ever remove
        if !self.is_fresh {
            match self.api.get_opt(&self.proxy.name_any()).await? {
                Some(live) if live.uid() == self.proxy.uid() && live.meta_is(&self.proxy) => {}
                _ => return Err(stale()),
            }
        }
        self.context.leadership.check()?;
        let status = self.proxy.status.clone().unwrap_or_default();
        let placement = self.proxy.spec.placement.clone().unwrap_or_default();
        let request = CreateRequest {
            entry: String::new(),
            name: status.instance_name.unwrap_or_default(),
            uid: self.proxy.uid().unwrap_or_default(),
            installation_id: self.context.installation_id.clone(),
            placement: Some(v1::Placement {
                zone: placement.zone,
                region: placement.region,
                machine_type: placement.machine_type,
                image: placement.image,
            }),
            cloud_init: user_data.map(|data| CloudInit { user_data: data.bytes().clone().into() }),
            spec_hash: status.spec_hash.unwrap_or_default(),
            max_wait: None,
            port: self.proxy.spec.port.into(),
        };
        let Some(provider) = self.provider() else { return Ok(Seen::Nothing) };
        let answer = provider.create(request).await;
        self.context.metrics.called("Create", answer.as_ref().err());
        match answer {
            Ok(answer) => {
                let instance = answer.instance.unwrap_or_default();
                if instance.instance_id.is_empty() {
                    return Ok(Seen::CreateFailed(ProviderError::local(
                        Code::Internal,
                        "CONTRACT_BROKEN",
                        "the provider answered a Create without an instance",
                    )));
                }
                // its id is written with what is seen of it: until then it is found by its key, by Create and by Delete
                self.event(EventType::Normal, "Created", "Create", format!("the VM is {} on {}", instance.instance_id, instance.host))
                    .await;
                Ok(Seen::Instance(Box::new(instance)))
            }
            Err(e) => Ok(Seen::CreateFailed(e)),
        }
    }

    /// Asks how the instance is.
    pub(super) async fn get(&self) -> Result<Seen, ReconcileError> {
        let status = self.proxy.status.clone().unwrap_or_default();
        let id = self.by_id(status.instance_id.unwrap_or_default());
        let Some(provider) = self.provider() else { return Ok(Seen::Nothing) };
        let answer = provider.get(GetRequest { entry: String::new(), selector: Some(get_request::Selector::Id(id)) }).await;
        self.context.metrics.called("Get", answer.as_ref().err());
        Ok(match answer {
            Ok(instance) => Seen::Instance(Box::new(instance)),
            Err(e) if e.code == Code::NotFound => Seen::Absent,
            Err(e) => Seen::GetFailed(e),
        })
    }

    /// Asks to remove the instance: by id if there is one, else by key, so that one whose Create never answered goes too.
    pub(super) async fn delete(&self, why: Why) -> Result<Seen, ReconcileError> {
        self.context.leadership.check()?;
        let status = self.proxy.status.clone().unwrap_or_default();
        let Some(provider) = self.provider() else { return Ok(Seen::Nothing) };
        let force = why == Why::ProxyDeleted && self.proxy.annotations().get(FORCE_DELETE).is_some_and(|v| v == "true");
        let selector = match status.instance_id {
            Some(id) => delete_request::Selector::Id(self.by_id(id)),
            None => delete_request::Selector::Key(InstanceKey {
                name: status.instance_name.clone().unwrap_or_default(),
                uid: self.proxy.uid().unwrap_or_default(),
                installation_id: self.context.installation_id.clone(),
                zone: status.zone.unwrap_or_default(),
            }),
        };
        let what = format!("{selector:?}");
        let answer = provider.delete(DeleteRequest { entry: String::new(), selector: Some(selector), abandon_unknown_host: force }).await;
        self.context.metrics.called("Delete", answer.as_ref().err());
        Ok(match answer {
            Ok(answer) if answer.outcome() == delete_response::Outcome::Abandoned => {
                tracing::warn!(what, "the provider has given an instance up");
                Seen::Abandoned(format!("the instance {}, whose host is not configured any more", status.instance_name.unwrap_or_default()))
            }
            Ok(_) => {
                if why != Why::ProxyDeleted {
                    self.event(EventType::Normal, "Replacing", "Delete", format!("the VM is removed to be replaced: {why:?}")).await;
                }
                Seen::Gone
            }
            Err(e) => Seen::DeleteFailed(e),
        })
    }

    fn by_id(&self, instance_id: String) -> InstanceById {
        InstanceById { instance_id, uid: self.proxy.uid().unwrap_or_default(), installation_id: self.context.installation_id.clone() }
    }
}

/// Whether a live object is still what was planned on.
trait Same {
    fn meta_is(&self, planned: &Self) -> bool;
}

impl Same for crate::crd::Proxy {
    fn meta_is(&self, planned: &Self) -> bool {
        self.metadata.generation == planned.metadata.generation && self.metadata.deletion_timestamp.is_none()
    }
}

/// As the API server says it about a write on an old copy.
fn stale() -> ReconcileError {
    kube::Error::Api(Box::new(kube::core::Status::failure("the Proxy has changed meanwhile", "Conflict").with_code(409))).into()
}
