//! The HTTP of it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::cluster::Who;
use super::faults::{Fault, Faults};
use super::store::{Change, Heard, Kind, Part, Refused, Store};
use super::{Behind, patch};

/// The largest object.
pub(super) const BODY_LIMIT: usize = 3 << 20;

#[derive(Debug, Clone)]
struct Server {
    behind: Behind,
    faults: Arc<Faults>,
    who: Who,
}

pub(super) fn router(behind: Behind, faults: Arc<Faults>, who: Who) -> Router {
    Router::new().fallback(serve).with_state(Server { behind, faults, who })
}

/// What a path names.
#[derive(Debug)]
struct At {
    kind: Kind,
    namespace: String,
    name: Option<String>,
    part: Part,
}

fn at(path: &str) -> Option<At> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, rest) = match parts.as_slice() {
        ["api", "v1", rest @ ..] => ("", rest),
        ["apis", group, _version, rest @ ..] => (*group, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let (plural, name, part) = match rest {
        [plural] => (plural, None, Part::Main),
        [plural, name] => (plural, Some((*name).to_owned()), Part::Main),
        [plural, name, "status"] => (plural, Some((*name).to_owned()), Part::Status),
        _ => return None,
    };
    Some(At { kind: Kind::of(group, plural)?, namespace: namespace.to_owned(), name, part })
}

/// What a request is for, as people count them.
pub(super) fn label(method: &str, path: &str, watch: bool) -> String {
    let Some(At { kind, name, part, .. }) = at(path) else { return format!("{method} {path}") };
    let plural = format!("{kind:?}s").to_lowercase().replace("proxys", "proxies");
    match (method, name) {
        ("GET", None) if watch => format!("WATCH {plural}"),
        ("GET", None) => format!("LIST {plural}"),
        _ if part == Part::Status => format!("{method} {plural}/status"),
        _ => format!("{method} {plural}"),
    }
}

fn failure(code: u16, reason: &str, message: &str) -> Response {
    let body = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "message": message, "code": code });
    answer(code, &body)
}

fn answer(code: u16, body: &Value) -> Response {
    (StatusCode::from_u16(code).expect("a code of ours"), [("content-type", "application/json")], body.to_string()).into_response()
}

fn result(code: u16, result: Result<Value, Refused>) -> Response {
    match result {
        Ok(body) => answer(code, &body),
        Err(Refused { code, reason, message }) => failure(code, reason, &message),
    }
}

async fn serve(State(server): State<Server>, request: Request) -> Response {
    let _flight = server.faults.fly();
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let query: HashMap<String, String> = uri.query().map(form).unwrap_or_default();
    let watch = query.get("watch").is_some_and(|w| w == "true" || w == "1");
    let fault = server.faults.meet(method.as_str(), uri.path(), watch);
    match &fault {
        Some(Fault::Status(code)) => return failure(*code, reason(*code), "as the test wants it"),
        Some(Fault::Slow(by)) => tokio::time::sleep(*by).await,
        Some(Fault::Silent) => std::future::pending().await,
        Some(Fault::LostAnswer) | None => {}
    }
    let response = match &server.behind {
        Behind::Memory(store) => in_memory(store, request, &query, watch).await,
        Behind::Cluster(cluster) => cluster.forward(request, server.who).await,
    };
    if fault == Some(Fault::LostAnswer) { failure(500, "InternalError", "done, and the answer is lost") } else { response }
}

async fn in_memory(store: &Arc<Store>, request: Request, query: &HashMap<String, String>, watch: bool) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    if method == Method::GET && uri.path() == "/version" {
        return answer(
            200,
            &json!({ "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "", "platform": "" }),
        );
    }
    let Some(at) = at(uri.path()) else { return failure(404, "NotFound", &format!("{} is not served", uri.path())) };
    let content = request.headers().get("content-type").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let body = match axum::body::to_bytes(request.into_body(), BODY_LIMIT).await {
        Ok(bytes) if bytes.is_empty() => Value::Null,
        Ok(bytes) => match read(&bytes) {
            Some(value) => value,
            None => return failure(400, "BadRequest", "the body is no JSON"),
        },
        Err(_) => return failure(413, "RequestEntityTooLarge", "the body is too large"),
    };
    handle(store, &method, &at, query, &content, body, watch)
}

/// JSON; a server-side apply may come as YAML, which JSON is.
fn read(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok().or_else(|| serde_saphyr::from_slice(bytes).ok())
}

fn reason(code: u16) -> &'static str {
    match code {
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    }
}

fn handle(
    store: &Arc<Store>,
    method: &Method,
    at: &At,
    query: &HashMap<String, String>,
    content: &str,
    body: Value,
    watch: bool,
) -> Response {
    let (kind, namespace) = (at.kind, at.namespace.as_str());
    match (method, &at.name) {
        (&Method::GET, None) if watch => watching(store, at, query),
        (&Method::GET, None) => list(store, at, query),
        (&Method::GET, Some(name)) => result(200, store.get(kind, namespace, name)),
        (&Method::POST, None) => result(201, store.create(kind, namespace, body)),
        (&Method::PUT, Some(name)) => result(
            200,
            store.change(kind, namespace, name, at.part, |object| {
                *object = body;
                Ok(())
            }),
        ),
        (&Method::PATCH, Some(name)) => {
            let apply = content.contains("apply-patch");
            if apply && store.get(kind, namespace, name).is_err() {
                return result(201, store.create(kind, namespace, body));
            }
            let change = |object: &mut Value| {
                // the version that the object has is no version that the caller expects
                if let Some(metadata) = object["metadata"].as_object_mut() {
                    metadata.remove("resourceVersion");
                }
                if content.contains("json-patch") {
                    patch::json(object, &body).map_err(|message| Refused { code: 422, reason: "Invalid", message })
                } else {
                    patch::merge(object, &body);
                    Ok(())
                }
            };
            result(200, store.change(kind, namespace, name, at.part, change))
        }
        (&Method::DELETE, Some(name)) => result(200, store.delete(kind, namespace, name, body["preconditions"]["uid"].as_str())),
        _ => failure(405, "MethodNotAllowed", "this is not served"),
    }
}

fn fits(object: &Value, query: &HashMap<String, String>) -> bool {
    let labels = query.get("labelSelector").is_none_or(|selector| {
        selector.split(',').all(|part| match part.split_once('=') {
            Some((k, v)) => object["metadata"]["labels"][k.trim_end_matches('=')].as_str() == Some(v.trim_start_matches('=')),
            None => !object["metadata"]["labels"][part].is_null(),
        })
    });
    let fields = query.get("fieldSelector").is_none_or(|selector| match selector.split_once("metadata.name=") {
        Some((_, name)) => object["metadata"]["name"].as_str() == Some(name.trim_start_matches('=')),
        None => true,
    });
    labels && fields
}

fn list(store: &Store, at: &At, query: &HashMap<String, String>) -> Response {
    let (all, version) = store.list(at.kind, &at.namespace);
    let fitting: Vec<Value> = all.into_iter().filter(|object| fits(object, query)).collect();
    let skip: usize = query.get("continue").and_then(|token| token.parse().ok()).unwrap_or(0);
    let limit: usize = query.get("limit").and_then(|n| n.parse().ok()).filter(|n| *n > 0).unwrap_or(usize::MAX);
    let page: Vec<&Value> = fitting.iter().skip(skip).take(limit).collect();
    let mut metadata = json!({ "resourceVersion": version.to_string() });
    if skip.saturating_add(page.len()) < fitting.len() {
        metadata["continue"] = json!((skip + page.len()).to_string());
    }
    let (api_version, kind) = at.kind.names();
    answer(200, &json!({ "apiVersion": api_version, "kind": format!("{kind}List"), "metadata": metadata, "items": page }))
}

/// A stream of events, a line each.
fn watching(store: &Arc<Store>, at: &At, query: &HashMap<String, String>) -> Response {
    let after = query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
    let Some((past, heard)) = store.watch(after) else {
        // as the watch cache of a real one says it: in the stream, and not by the status of the answer
        let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Expired", "message": "too old resource version", "code": 410 });
        return answer(200, &json!({ "type": "ERROR", "object": status }));
    };
    let watch = Watch { kind: at.kind, namespace: at.namespace.clone(), query: query.clone(), past: past.into_iter(), heard };
    let seconds = query.get("timeoutSeconds").and_then(|s| s.parse().ok()).unwrap_or(290);
    let end = tokio::time::Instant::now() + Duration::from_secs(seconds);
    let lines = futures::stream::unfold(watch, move |mut watch| async move {
        let line = tokio::time::timeout_at(end, watch.next()).await.ok().flatten()?;
        Some((Ok::<_, Infallible>(format!("{line}\n")), watch))
    });
    ([("content-type", "application/json")], Body::from_stream(lines)).into_response()
}

struct Watch {
    kind: Kind,
    namespace: String,
    query: HashMap<String, String>,
    past: std::vec::IntoIter<Change>,
    heard: Receiver<Heard>,
}

impl Watch {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(change) = self.past.next() {
                if let Some(line) = self.line(change) {
                    return Some(line);
                }
                continue;
            }
            match self.heard.recv().await {
                Ok(Heard::Change(change)) => {
                    if let Some(line) = self.line(change) {
                        return Some(line);
                    }
                }
                Ok(Heard::Bookmark(version)) => {
                    let (api_version, kind) = self.kind.names();
                    let object = json!({ "apiVersion": api_version, "kind": kind, "metadata": { "resourceVersion": version.to_string() } });
                    return Some(json!({ "type": "BOOKMARK", "object": object }));
                }
                // a watch that is too far behind is ended, as a real one is
                Ok(Heard::End) | Err(RecvError::Closed | RecvError::Lagged(_)) => return None,
            }
        }
    }

    fn line(&self, change: Change) -> Option<Value> {
        let is_ours = change.kind == self.kind
            && (self.namespace.is_empty() || self.namespace == change.namespace)
            && fits(&change.object, &self.query);
        is_ours.then(|| json!({ "type": change.type_, "object": change.object }))
    }
}

fn form(query: &str) -> HashMap<String, String> {
    serde_urlencoded::from_str::<Vec<(String, String)>>(query).unwrap_or_default().into_iter().collect()
}
