//! What a caller of the contract has: clients on a unix socket, and short ways to say usual requests.

use std::path::Path;
use std::time::Duration;

use egress_provider_proto::v1::image_service_client::ImageServiceClient;
use egress_provider_proto::v1::provider_service_client::ProviderServiceClient;
use egress_provider_proto::v1::{
    CheckRequest, CheckResponse, CreateRequest, CreateResponse, DeleteRequest, DeleteResponse, GetRequest, Instance, InstanceById,
    InstanceKey, ListByTagRequest, ListByTagResponse, delete_request, get_request,
};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Result, Status};
use tonic_health::pb::health_client::HealthClient;

#[derive(Debug, Clone)]
pub struct Clients {
    pub provider: ProviderServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
    pub health: HealthClient<Channel>,
}

impl Clients {
    /// Connects when first used, and again after the daemon was restarted.
    pub fn on(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }));
        Self::over(channel)
    }

    pub fn over(channel: Channel) -> Self {
        Self {
            provider: ProviderServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel.clone()),
            health: HealthClient::new(channel),
        }
    }

    pub async fn create(&self, request: CreateRequest) -> Result<CreateResponse, Status> {
        self.provider.clone().create(request).await.map(tonic::Response::into_inner)
    }

    pub async fn get(&self, instance_id: &str, uid: &str) -> Result<Instance, Status> {
        let id = InstanceById { instance_id: instance_id.to_owned(), uid: uid.to_owned(), ..Default::default() };
        self.get_selected(get_request::Selector::Id(id)).await
    }

    pub async fn get_by_key(&self, name: &str, uid: &str) -> Result<Instance, Status> {
        self.get_selected(get_request::Selector::Key(key(name, uid))).await
    }

    async fn get_selected(&self, selector: get_request::Selector) -> Result<Instance, Status> {
        let request = GetRequest { selector: Some(selector), ..Default::default() };
        let answer = self.provider.clone().get(request).await?.into_inner();
        answer.instance.ok_or_else(|| Status::internal("GetResponse without an instance breaks the contract"))
    }

    pub async fn delete(&self, instance_id: &str, uid: &str) -> Result<DeleteResponse, Status> {
        let id = InstanceById { instance_id: instance_id.to_owned(), uid: uid.to_owned(), ..Default::default() };
        self.delete_selected(delete_request::Selector::Id(id)).await
    }

    pub async fn delete_by_key(&self, name: &str, uid: &str) -> Result<DeleteResponse, Status> {
        self.delete_selected(delete_request::Selector::Key(key(name, uid))).await
    }

    async fn delete_selected(&self, selector: delete_request::Selector) -> Result<DeleteResponse, Status> {
        let request = DeleteRequest { selector: Some(selector), ..Default::default() };
        self.provider.clone().delete(request).await.map(tonic::Response::into_inner)
    }

    /// The whole listing in one page; gaps are in the answer.
    pub async fn list(&self) -> Result<ListByTagResponse, Status> {
        self.provider.clone().list_by_tag(ListByTagRequest::default()).await.map(tonic::Response::into_inner)
    }

    pub async fn list_complete(&self) -> Result<ListByTagResponse, Status> {
        let request = ListByTagRequest { require_complete: true, ..Default::default() };
        self.provider.clone().list_by_tag(request).await.map(tonic::Response::into_inner)
    }

    pub async fn check(&self) -> Result<CheckResponse, Status> {
        self.provider.clone().check(CheckRequest::default()).await.map(tonic::Response::into_inner)
    }
}

fn key(name: &str, uid: &str) -> InstanceKey {
    InstanceKey { name: name.to_owned(), uid: uid.to_owned(), ..Default::default() }
}

/// A duration as the contract's messages hold it.
pub fn seconds(n: u64) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(Duration::from_secs(n)).ok()
}
