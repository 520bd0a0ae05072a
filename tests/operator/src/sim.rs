//! A provider in memory that keeps the contract, and slips when it is told to.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use egress_operator::provider_client::{Provider, ProviderError};
use egress_provider_proto::v1::{
    self, Address, AddressFamily, AddressSource, CheckReason, CheckResponse, CreateRequest, CreateResponse, DeleteRequest, DeleteResponse,
    ErrorReason, GetProviderInfoResponse, GetRequest, HostCheck, Instance, InstanceState, ListByTagResponse, StateReason, create_response,
    delete_request, delete_response, get_request,
};
use tonic::Code;

/// A call of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Method {
    /// Create.
    Create,
    /// Get.
    Get,
    /// Delete.
    Delete,
    /// ListByTag.
    List,
    /// Check.
    Check,
    /// GetProviderInfo.
    Info,
}

/// How a call goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slip {
    /// It is refused, and nothing is done.
    Refuse(ErrorReason),
    /// By code alone, as a proxy in between or another version would.
    Code(Code),
    /// It is done and the answer is lost.
    LostAnswer,
    /// It never answers; the client's budget ends it.
    Silent,
}

#[derive(Debug, Default)]
struct State {
    instances: BTreeMap<String, Instance>,
    slips: Vec<(Method, Slip, Option<usize>)>,
    calls: BTreeMap<Method, usize>,
    in_flight: usize,
    most_in_flight: usize,
    made: u32,
    /// Every placement and user-data length that a Create asked for.
    asked: Vec<CreateRequest>,
    no_address: bool,
    share_address: Option<String>,
    delay: Duration,
}

/// The provider. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct SimProvider(Arc<Mutex<State>>);

impl SimProvider {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no panic")
    }

    /// The next `times` calls of a method slip; None: all until [`SimProvider::mend`].
    pub fn slip(&self, method: Method, slip: Slip, times: Option<usize>) {
        self.state().slips.push((method, slip, times));
    }

    /// No call slips any more.
    pub fn mend(&self) {
        self.state().slips.clear();
    }

    /// Instances get no address.
    pub fn without_addresses(&self, on: bool) {
        self.state().no_address = on;
    }

    /// All instances get this address.
    pub fn share_address(&self, ip: Option<&str>) {
        self.state().share_address = ip.map(str::to_owned);
    }

    /// Each call takes so long.
    pub fn delay(&self, by: Duration) {
        self.state().delay = by;
    }

    /// Instances that are there, by name.
    #[must_use]
    pub fn instances(&self) -> Vec<Instance> {
        self.state().instances.values().cloned().collect()
    }

    /// Calls of a method so far.
    #[must_use]
    pub fn calls(&self, method: Method) -> usize {
        self.state().calls.get(&method).copied().unwrap_or(0)
    }

    /// The most calls that ran at a time.
    #[must_use]
    pub fn most_in_flight(&self) -> usize {
        self.state().most_in_flight
    }

    /// Every Create that got through.
    #[must_use]
    pub fn asked(&self) -> Vec<CreateRequest> {
        self.state().asked.clone()
    }

    /// Changes the instance of a name by hand.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Instance)) {
        change(self.state().instances.get_mut(name).expect("the instance"));
    }

    /// Removes one by hand.
    pub fn lose(&self, name: &str) {
        self.state().instances.remove(name);
    }

    /// Puts one there by hand.
    pub fn put(&self, instance: Instance) {
        self.state().instances.insert(instance.name.clone(), instance);
    }

    async fn call<T>(&self, method: Method, work: impl FnOnce(&mut State) -> Result<T, ProviderError>) -> Result<T, ProviderError> {
        let _flight = Flight::new(self);
        let (slip, delay) = {
            let mut state = self.state();
            *state.calls.entry(method).or_default() += 1;
            let slip = state.slips.iter_mut().find(|(m, _, times)| *m == method && *times != Some(0)).map(|(_, slip, times)| {
                if let Some(times) = times {
                    *times -= 1;
                }
                slip.clone()
            });
            (slip, state.delay)
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match slip {
            None => work(&mut self.state()),
            Some(Slip::Refuse(reason)) => Err(error(reason)),
            Some(Slip::Code(code)) => Err(ProviderError::local(code, "X", "as the test wants it")),
            Some(Slip::LostAnswer) => {
                let _ = work(&mut self.state());
                Err(ProviderError::local(Code::Unavailable, "PROVIDER_UNAVAILABLE", "the answer is lost"))
            }
            // as the gRPC client ends it
            Some(Slip::Silent) => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                Err(ProviderError::local(Code::DeadlineExceeded, "PROVIDER_SILENT", "no answer"))
            }
        }
    }
}

/// Counts a call while it runs, also when its caller drops it.
struct Flight(SimProvider);

impl Flight {
    fn new(of: &SimProvider) -> Self {
        let mut state = of.state();
        state.in_flight += 1;
        state.most_in_flight = state.most_in_flight.max(state.in_flight);
        drop(state);
        Self(of.clone())
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.state().in_flight -= 1;
    }
}

/// An error of the contract.
#[must_use]
pub fn error(reason: ErrorReason) -> ProviderError {
    ProviderError { known: Some(reason), ..ProviderError::local(reason.grpc_code(), reason.wire_name(), "as the test wants it") }
}

fn find<'a>(state: &'a State, name: &str, uid: &str) -> Result<Option<&'a Instance>, ProviderError> {
    match state.instances.get(name) {
        Some(instance) if instance.uid != uid => Err(error(ErrorReason::UidMismatch)),
        other => Ok(other),
    }
}

fn name_of_id(id: &str) -> String {
    id.rsplit('/').next().unwrap_or_default().to_owned()
}

#[async_trait]
impl Provider for SimProvider {
    async fn info(&self) -> Result<GetProviderInfoResponse, ProviderError> {
        self.call(Method::Info, |_| {
            Ok(GetProviderInfoResponse { provider_type: "sim".into(), provider_version: "1".into(), ..GetProviderInfoResponse::default() })
        })
        .await
    }

    async fn create(&self, request: CreateRequest) -> Result<CreateResponse, ProviderError> {
        self.call(Method::Create, |state| {
            if let Some(there) = state.instances.get(&request.name) {
                if there.uid != request.uid {
                    return Err(error(ErrorReason::NameOwnedByOtherUid));
                }
                if there.spec_hash != request.spec_hash {
                    return Err(error(ErrorReason::SpecConflict));
                }
                return Ok(CreateResponse { instance: Some(there.clone()), outcome: create_response::Outcome::Existing.into() });
            }
            state.made += 1;
            let n = state.made;
            let ip = state.share_address.clone().unwrap_or_else(|| format!("127.{}.{}.{}", 100 + n / 62_500, (n / 250) % 250, n % 250 + 1));
            let address = Address {
                ip,
                family: AddressFamily::Ipv4.into(),
                source: AddressSource::GuestAgent.into(),
                primary: true,
                ..Address::default()
            };
            let instance = Instance {
                instance_id: format!("hosts/sim/domains/{}", request.name),
                name: request.name.clone(),
                uid: request.uid.clone(),
                installation_id: request.installation_id.clone(),
                spec_hash: request.spec_hash.clone(),
                state: if state.no_address { InstanceState::Provisioning } else { InstanceState::Running }.into(),
                state_reason: if state.no_address { StateReason::NoIpv4Address } else { StateReason::Unspecified }.into(),
                addresses: if state.no_address { Vec::new() } else { vec![address] },
                created_at: Some(prost_types::Timestamp { seconds: jiff::Timestamp::now().as_second(), nanos: 0 }),
                host: "sim".into(),
                ..Instance::default()
            };
            state.instances.insert(request.name.clone(), instance.clone());
            state.asked.push(request);
            Ok(CreateResponse { instance: Some(instance), outcome: create_response::Outcome::Created.into() })
        })
        .await
    }

    async fn get(&self, request: GetRequest) -> Result<Instance, ProviderError> {
        self.call(Method::Get, |state| {
            let (name, uid) = match request.selector {
                Some(get_request::Selector::Id(id)) => (name_of_id(&id.instance_id), id.uid),
                Some(get_request::Selector::Key(key)) => (key.name, key.uid),
                None => return Err(error(ErrorReason::FieldInvalid)),
            };
            find(state, &name, &uid)?.cloned().ok_or_else(|| error(ErrorReason::InstanceNotFound))
        })
        .await
    }

    async fn delete(&self, request: DeleteRequest) -> Result<DeleteResponse, ProviderError> {
        self.call(Method::Delete, |state| {
            let (name, uid) = match request.selector {
                Some(delete_request::Selector::Id(id)) => (name_of_id(&id.instance_id), id.uid),
                Some(delete_request::Selector::Key(key)) => (key.name, key.uid),
                None => return Err(error(ErrorReason::FieldInvalid)),
            };
            let was_there = find(state, &name, &uid)?.is_some();
            state.instances.remove(&name);
            let outcome = if was_there { delete_response::Outcome::Deleted } else { delete_response::Outcome::AlreadyAbsent };
            Ok(DeleteResponse { outcome: outcome.into(), ..DeleteResponse::default() })
        })
        .await
    }

    async fn list(&self, installation_id: &str, _require_complete: bool) -> Result<ListByTagResponse, ProviderError> {
        self.call(Method::List, |state| {
            let instances = state.instances.values().filter(|i| i.installation_id == installation_id).cloned().collect();
            Ok(ListByTagResponse { instances, complete: true, ..ListByTagResponse::default() })
        })
        .await
    }

    async fn check(&self) -> Result<CheckResponse, ProviderError> {
        self.call(Method::Check, |_| {
            let host = HostCheck {
                host: "sim".into(),
                healthy: true,
                reason: CheckReason::Reachable.into(),
                latency: v1_duration(5),
                ..HostCheck::default()
            };
            Ok(CheckResponse { hosts: vec![host] })
        })
        .await
    }
}

fn v1_duration(millis: u64) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(Duration::from_millis(millis)).ok()
}

/// A request's user-data.
#[must_use]
pub fn user_data(request: &CreateRequest) -> &[u8] {
    request.cloud_init.as_ref().map(|v1::CloudInit { user_data }| user_data.as_ref()).unwrap_or_default()
}
