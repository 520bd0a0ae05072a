//! The provider in memory behind the contract's own gRPC, for an operator that is another process.

use std::collections::HashMap;
use std::path::Path;
use std::pin::Pin;

use egress_operator::provider_client::{Provider, ProviderError};
use egress_provider_proto::ERROR_DOMAIN;
use egress_provider_proto::v1::provider_service_server::{ProviderService, ProviderServiceServer};
use egress_provider_proto::v1::{
    CheckRequest, CheckResponse, CreateRequest, CreateResponse, DeleteRequest, DeleteResponse, GetProviderInfoRequest,
    GetProviderInfoResponse, GetRequest, GetResponse, ListByTagRequest, ListByTagResponse, WatchEventsRequest, WatchEventsResponse,
};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::sim::SimProvider;

/// Instances in a page of a listing.
const PAGE: usize = 500;

/// Serves the provider on a socket until the task is aborted.
pub fn serve(provider: SimProvider, socket: &Path) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let server = tonic::transport::Server::builder()
        .add_service(ProviderServiceServer::new(Sim(provider)))
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(async move { server.await.expect("it serves") })
}

#[derive(Debug)]
struct Sim(SimProvider);

fn answer<T>(result: Result<T, ProviderError>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|e| {
        // a code alone, as a proxy in between or another version answers
        if e.known.is_none() {
            return Status::new(e.code, e.message);
        }
        let details = ErrorDetails::with_error_info(e.reason, ERROR_DOMAIN, e.metadata.into_iter().collect::<HashMap<_, _>>());
        Status::with_error_details(e.code, e.message, details)
    })
}

#[tonic::async_trait]
impl ProviderService for Sim {
    async fn get_provider_info(&self, _: Request<GetProviderInfoRequest>) -> Result<Response<GetProviderInfoResponse>, Status> {
        answer(self.0.info().await)
    }

    async fn create(&self, request: Request<CreateRequest>) -> Result<Response<CreateResponse>, Status> {
        answer(self.0.create(request.into_inner()).await)
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let instance = self.0.get(request.into_inner()).await;
        answer(instance.map(|instance| GetResponse { instance: Some(instance) }))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        answer(self.0.delete(request.into_inner()).await)
    }

    async fn list_by_tag(&self, request: Request<ListByTagRequest>) -> Result<Response<ListByTagResponse>, Status> {
        let request = request.into_inner();
        let skip: usize = request.page_token.parse().unwrap_or(0);
        let all = self.0.list(&request.installation_id, request.require_complete).await;
        answer(all.map(|mut all| {
            let is_last = all.instances.len() <= skip.saturating_add(PAGE);
            all.instances = all.instances.into_iter().skip(skip).take(PAGE).collect();
            all.next_page_token = if is_last { String::new() } else { (skip + PAGE).to_string() };
            all
        }))
    }

    async fn check(&self, _: Request<CheckRequest>) -> Result<Response<CheckResponse>, Status> {
        answer(self.0.check().await)
    }

    type WatchEventsStream = Pin<Box<dyn futures::Stream<Item = Result<WatchEventsResponse, Status>> + Send>>;

    async fn watch_events(&self, _: Request<WatchEventsRequest>) -> Result<Response<Self::WatchEventsStream>, Status> {
        Err(Status::unimplemented("not offered here"))
    }
}
