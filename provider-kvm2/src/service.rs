//! The contract over gRPC: requests to operations, results and errors to answers.
//!
//! ```text
//! listener → trace span → edge (place, deadline, panic, details, metric) → handler → Operations
//! ```
//!
//! A handler validates, calls one operation and converts its result; it decides
//! nothing about virtual machines. This is the only module that knows tonic.

use std::sync::Arc;

use egress_provider_proto::v1;
use egress_provider_proto::v1::image_service_server::ImageService;
use egress_provider_proto::v1::provider_service_server::ProviderService;
use tonic::{Request, Response, Status};

use crate::error::{ProviderError, Reason};
use crate::provider::Operations;

mod answer;
mod deadline;
mod edge;
#[cfg(test)]
mod fixtures;
mod images;
pub mod listener;
mod request;
pub mod server;
mod status;
mod trace;

pub use request::{MAX_NAME, MAX_PAGE, MAX_USER_DATA};
pub use server::{ServeOptions, serve};
pub use status::{Fault, Violation};

use deadline::Deadline;

/// The handlers over one set of operations.
#[derive(Clone)]
pub struct Service {
    operations: Arc<dyn Operations>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Service")
    }
}

type Answer<T> = Result<Response<T>, Status>;

/// Never produced: the streaming RPCs are not offered.
type NoStream<T> = tokio_stream::Empty<Result<T, Status>>;

fn not_offered<T>(method: &'static str) -> Answer<T> {
    let e = ProviderError::new(
        Reason::CapabilityMissing,
        format!("this provider does not offer {method}: see the capabilities in GetProviderInfo"),
    );
    Err(Fault::from(e).into_status(method, ""))
}

fn deadline_of<T>(request: &Request<T>) -> Option<Deadline> {
    request.extensions().get().copied()
}

impl Service {
    pub fn new(operations: Arc<dyn Operations>) -> Self {
        Self { operations }
    }

    /// Of an entry that is named or the only one.
    fn entry(&self, name: &str) -> Result<Arc<crate::config::Entry>, Fault> {
        request::entry(&self.operations.config(), name)
    }
}

/// Ends a handler: a fault becomes the status of its operation.
fn end<T>(method: &'static str, entry: &str, result: Result<T, Fault>) -> Answer<T> {
    result.map(Response::new).map_err(|fault| fault.into_status(method, entry))
}

#[tonic::async_trait]
impl ProviderService for Service {
    async fn get_provider_info(&self, request: Request<v1::GetProviderInfoRequest>) -> Answer<v1::GetProviderInfoResponse> {
        let name = request.into_inner().entry;
        let config = self.operations.config();
        let known = if name.is_empty() { Ok(()) } else { request::entry(&config, &name).map(drop) };
        end("get_provider_info", "", known.map(|()| answer::info(&config, &name)))
    }

    async fn create(&self, request: Request<v1::CreateRequest>) -> Answer<v1::CreateResponse> {
        let deadline = deadline_of(&request);
        let request = request.into_inner();
        let name = request.entry.clone();
        let result = async {
            let entry = self.entry(&request.entry)?;
            let wanted = request::create(&entry, request, deadline)?;
            Ok(answer::created(self.operations.create(wanted).await?))
        };
        end("create", &name, result.await)
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Answer<v1::GetResponse> {
        let v1::GetRequest { entry: name, selector } = request.into_inner();
        let result = async {
            let entry = self.entry(&name)?;
            let instance = self.operations.get(&entry.name, request::get(selector)?).await?;
            Ok(v1::GetResponse { instance: Some(answer::instance(instance)) })
        };
        end("get", &name, result.await)
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Answer<v1::DeleteResponse> {
        let request = request.into_inner();
        let name = request.entry.clone();
        let result = async {
            let entry = self.entry(&request.entry)?;
            Ok(answer::deleted(self.operations.delete(request::delete(&entry, request)?).await?))
        };
        end("delete", &name, result.await)
    }

    async fn list_by_tag(&self, request: Request<v1::ListByTagRequest>) -> Answer<v1::ListByTagResponse> {
        let request = request.into_inner();
        let name = request.entry.clone();
        let result = async {
            let entry = self.entry(&request.entry)?;
            let page = self.operations.list(request::list(&entry, request)?).await?;
            Ok(answer::page(page, &entry.name))
        };
        end("list", &name, result.await)
    }

    async fn check(&self, request: Request<v1::CheckRequest>) -> Answer<v1::CheckResponse> {
        let deadline = deadline_of(&request);
        let v1::CheckRequest { entry: name, timeout } = request.into_inner();
        let result = async {
            let entry = self.entry(&name)?;
            let timeout = request::check(timeout.as_ref(), deadline)?;
            let rows = self.operations.check(&entry.name, timeout).await?;
            Ok(v1::CheckResponse { hosts: rows.into_iter().map(answer::host_check).collect() })
        };
        end("check", &name, result.await)
    }

    type WatchEventsStream = NoStream<v1::WatchEventsResponse>;

    async fn watch_events(&self, _: Request<v1::WatchEventsRequest>) -> Answer<Self::WatchEventsStream> {
        not_offered("WatchEvents")
    }
}

#[tonic::async_trait]
impl ImageService for Service {
    async fn prepare_image(&self, _: Request<v1::PrepareImageRequest>) -> Answer<v1::PrepareImageResponse> {
        not_offered("PrepareImage")
    }

    async fn get_image(&self, request: Request<v1::GetImageRequest>) -> Answer<v1::GetImageResponse> {
        let v1::GetImageRequest { entry: name, zone, image } = request.into_inner();
        let result = async {
            let entry = self.entry(&name)?;
            request::image(&zone, &image)?;
            let host = request::host(&entry, &zone)?;
            let found = self.operations.image(&entry.name, &host, &image).await?.into_iter().find(|i| i.host == host);
            let found = found.ok_or_else(|| {
                ProviderError::new(Reason::ImageNotCached, "the host has no base of this image and none is being pulled; a Create pulls it")
                    .on_host(&host)
            })?;
            Ok(v1::GetImageResponse { image: Some(answer::image(found, &entry)) })
        };
        end("get_image", &name, result.await)
    }

    async fn list_images(&self, request: Request<v1::ListImagesRequest>) -> Answer<v1::ListImagesResponse> {
        let request = request.into_inner();
        let result = async {
            let entry = self.entry(&request.entry)?;
            let size = request::image_page(&request)?;
            request::known_zone(&entry, &request.zone)?;
            let (all, mut failed) = self.operations.images(&entry.name).await?;
            failed.retain(|e| request.zone.is_empty() || e.host().is_none_or(|host| host == request.zone));
            if let Some(first) = failed.first().filter(|_| request.require_complete) {
                let e = ProviderError::new(Reason::ListingIncomplete, "a host could not be listed: act on nothing and repeat")
                    .on_host(first.host().unwrap_or_default())
                    .with_source(first.clone());
                return Err(e.into());
            }
            let (images, next_page_token) = images::page(&entry, &request.zone, &request.page_token, size, all)?;
            Ok(v1::ListImagesResponse {
                images,
                complete: failed.is_empty(),
                unreachable_hosts: answer::unreachable(&failed),
                next_page_token,
            })
        };
        end("list_images", &request.entry, result.await)
    }

    type WatchImageStream = NoStream<v1::WatchImageResponse>;

    async fn watch_image(&self, _: Request<v1::WatchImageRequest>) -> Answer<Self::WatchImageStream> {
        not_offered("WatchImage")
    }

    async fn evict_image(&self, _: Request<v1::EvictImageRequest>) -> Answer<v1::EvictImageResponse> {
        not_offered("EvictImage")
    }
}
