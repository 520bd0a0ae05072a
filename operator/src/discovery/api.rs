//! The HTTP of discovery. Every body is bounded, every error is JSON with a code and a sentence.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, RawQuery, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use jiff::Timestamp;
use kube::runtime::reflector::Store;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::auth::Token;
use super::leases::{Held, LeaseDesk, LeaseError, TTL, full_name};
use super::pick::{Filter, Offer, fitting, offer};
use crate::crd::Proxy;
use crate::leader::Leadership;

/// The most of a request's body.
const BODY_LIMIT: usize = 16 << 10;
/// For a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a lease is when nobody says.
const DEFAULT_TTL: Duration = Duration::from_secs(300);

/// What discovery answers from.
pub struct Discovery {
    /// The cache of Proxies.
    pub proxies: Store<Proxy>,
    /// Leases.
    pub desk: Arc<LeaseDesk>,
    /// Only the leader gives leases.
    pub leadership: Leadership,
    /// Who may ask.
    pub token: Token,
}

impl fmt::Debug for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discovery").field("token", &self.token).finish_non_exhaustive()
    }
}

/// Serves until it is stopped; requests that run are answered.
///
/// # Errors
/// The listener failed.
pub async fn serve(discovery: Arc<Discovery>, listener: TcpListener, stop: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, router(discovery)).with_graceful_shutdown(async move { stop.cancelled().await }).await
}

/// The routes.
pub fn router(discovery: Arc<Discovery>) -> Router {
    let guarded = Router::new()
        .route("/v1/proxies", get(proxies))
        .route("/v1/leases", get(leases).post(acquire))
        .route("/v1/leases/{id}", delete(release))
        .route("/v1/leases/{id}/renew", post(renew))
        .layer(middleware::from_fn_with_state(discovery.clone(), authorized));
    Router::new()
        .route("/openapi.json", get(|| async { Json(super::openapi::document()) }))
        .merge(guarded)
        .fallback(|| async { Refusal::new(StatusCode::NOT_FOUND, "NOT_FOUND", "there is no such path: /openapi.json lists all") })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(middleware::from_fn(bounded))
        .with_state(discovery)
}

/// An error as clients see it.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(json!({ "error": { "code": self.code, "message": self.message } }))).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("5"));
        }
        response
    }
}

impl From<LeaseError> for Refusal {
    fn from(e: LeaseError) -> Self {
        let (status, code) = match &e {
            LeaseError::NoneReady => (StatusCode::SERVICE_UNAVAILABLE, "NONE_READY"),
            LeaseError::TooMany => (StatusCode::TOO_MANY_REQUESTS, "TOO_MANY_LEASES"),
            LeaseError::Unknown => (StatusCode::NOT_FOUND, "LEASE_UNKNOWN"),
            LeaseError::ProxyGone => (StatusCode::CONFLICT, "PROXY_NOT_READY"),
            LeaseError::NotLoaded => (StatusCode::SERVICE_UNAVAILABLE, "NOT_LEADER"),
            LeaseError::Api(cause) => {
                tracing::warn!(error = %cause, "a lease cannot be stored");
                (StatusCode::SERVICE_UNAVAILABLE, "STORE_UNAVAILABLE")
            }
        };
        Self::new(status, code, e.to_string())
    }
}

async fn bounded(request: Request, next: Next) -> Response {
    match tokio::time::timeout(TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "TIMEOUT", "the answer took too long").into_response(),
    }
}

async fn authorized(State(discovery): State<Arc<Discovery>>, request: Request, next: Next) -> Response {
    let value = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    if discovery.token.admits(value) {
        next.run(request).await
    } else {
        Refusal::new(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", "give the token: Authorization: Bearer TOKEN").into_response()
    }
}

impl Discovery {
    fn offers(&self) -> Vec<Offer> {
        self.proxies.state().iter().filter_map(|proxy| offer(proxy)).collect()
    }

    fn leads(&self) -> Result<(), Refusal> {
        self.leadership.check().map_err(|_| {
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "NOT_LEADER", "this replica gives no leases: ask again, or another replica")
        })
    }
}

async fn proxies(State(discovery): State<Arc<Discovery>>, RawQuery(query): RawQuery, headers: HeaderMap) -> Result<Response, Refusal> {
    let filter = filter_of(query.as_deref().unwrap_or_default())?;
    let body = serde_json::to_vec(&json!({ "items": fitting(discovery.offers(), &filter) }))
        .map_err(|_| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL", "the answer cannot be written"))?;
    let etag = format!("\"{}\"", &hex::encode(Sha256::digest(&body))[..32]);
    let known = headers
        .get(header::IF_NONE_MATCH)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|tags| tags.split(',').any(|tag| tag.trim().trim_start_matches("W/") == etag || tag.trim() == "*"));
    let head =
        [(header::ETAG, etag), (header::CACHE_CONTROL, "no-cache".to_owned()), (header::CONTENT_TYPE, "application/json".to_owned())];
    Ok(if known { (StatusCode::NOT_MODIFIED, head).into_response() } else { (head, body).into_response() })
}

/// The filters of a query string.
fn filter_of(query: &str) -> Result<Filter, Refusal> {
    let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, "QUERY_INVALID", message);
    let mut filter = Filter::default();
    let pairs: Vec<(String, String)> = serde_urlencoded::from_str(query).map_err(|_| bad("the query cannot be read".to_owned()))?;
    for (name, value) in pairs {
        match name.as_str() {
            "namespace" => filter.namespace = Some(value),
            "provider" => filter.provider = Some(value),
            "zone" => filter.zone = Some(value),
            "region" => filter.region = Some(value),
            "label" => {
                let (k, v) = value.split_once('=').ok_or_else(|| bad(format!("label {value:?} is not key=value")))?;
                filter.labels.push((k.to_owned(), v.to_owned()));
            }
            "all" if value == "true" || value == "false" => filter.all = value == "true",
            "all" => return Err(bad("all is true or false".to_owned())),
            other => return Err(bad(format!("there is no filter {other:?}: use namespace, provider, zone, region, label, all"))),
        }
    }
    Ok(filter)
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Wish {
    client: String,
    ttl_seconds: Option<u64>,
    namespace: Option<String>,
    provider: Option<String>,
    zone: Option<String>,
    region: Option<String>,
    labels: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct Given {
    lease: Held,
    proxy: Offer,
}

fn ttl_of(seconds: Option<u64>) -> Result<Duration, Refusal> {
    let ttl = seconds.map_or(DEFAULT_TTL, Duration::from_secs);
    if ttl < TTL.0 || ttl > TTL.1 {
        let message = format!("ttlSeconds is between {} and {}", TTL.0.as_secs(), TTL.1.as_secs());
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "TTL_INVALID", message));
    }
    Ok(ttl)
}

/// JSON of a body; an empty one is all defaults.
fn parse<T: Default + for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, Refusal> {
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(body)
        .map_err(|e| Refusal::new(StatusCode::BAD_REQUEST, "BODY_INVALID", format!("the body is not what is wanted: {e}")))
}

async fn acquire(State(discovery): State<Arc<Discovery>>, body: axum::body::Bytes) -> Result<Response, Refusal> {
    discovery.leads()?;
    let wish: Wish = parse(&body)?;
    if wish.client.is_empty() || wish.client.len() > 253 || wish.client.chars().any(char::is_control) {
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "CLIENT_INVALID", "client says who you are, in 1 to 253 bytes"));
    }
    let ttl = ttl_of(wish.ttl_seconds)?;
    let filter = Filter {
        namespace: wish.namespace,
        provider: wish.provider,
        zone: wish.zone,
        region: wish.region,
        labels: wish.labels.into_iter().collect(),
        all: false,
    };
    let offers = fitting(discovery.offers(), &filter);
    let (lease, proxy) = discovery.desk.acquire(&wish.client, &offers, ttl, Timestamp::now()).await?;
    Ok((StatusCode::CREATED, Json(Given { lease, proxy })).into_response())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Renewal {
    ttl_seconds: Option<u64>,
}

async fn renew(State(discovery): State<Arc<Discovery>>, Path(id): Path<String>, body: axum::body::Bytes) -> Result<Json<Held>, Refusal> {
    discovery.leads()?;
    let ttl = ttl_of(parse::<Renewal>(&body)?.ttl_seconds)?;
    let offers = discovery.offers();
    let is_ready = |proxy: &str| offers.iter().any(|o| o.ready && full_name(o) == proxy);
    Ok(Json(discovery.desk.renew(&id, ttl, Timestamp::now(), is_ready).await?))
}

async fn release(State(discovery): State<Arc<Discovery>>, Path(id): Path<String>) -> Result<StatusCode, Refusal> {
    discovery.leads()?;
    discovery.desk.release(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn leases(State(discovery): State<Arc<Discovery>>) -> Result<Json<serde_json::Value>, Refusal> {
    discovery.leads()?;
    Ok(Json(json!({ "items": discovery.desk.list(Timestamp::now()).await })))
}
