//! A real API server behind the faults: that of a kubeconfig, or one that is started from etcd and kube-apiserver.
//!
//! The operator's requests are made as its ServiceAccount, with the rules of deploy/ and no others. Tests take turns,
//! since an operator looks at all namespaces; each begins with nothing there.

mod process;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use egress_operator::crd::{ProviderHealth, Proxy};
use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::{Mutex, OnceCell, OwnedMutexGuard, broadcast};

use super::routes::BODY_LIMIT;

/// Of the operator.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:egress-proxies:egress-operator";
/// Says that what is in the cluster was made by these tests and may go.
const MARK: &str = "operator-tests";
/// Where tests make things.
const NAMESPACES: [&str; 2] = ["default", "egress-proxies"];
/// For what takes a moment: a definition that is to be served, the removal of what a test has left.
const SOON: Duration = Duration::from_secs(30);

/// Whose requests are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Tests, which may do anything.
    Test,
    /// The operator.
    Operator,
}

/// What was given, for as long as this process lives.
#[derive(Debug)]
struct Given {
    config: Config,
    turn: Arc<Mutex<()>>,
}

/// A failure is kept, too: what cannot be used now is not begun anew by each test.
static GIVEN: OnceCell<Result<Option<Given>, String>> = OnceCell::const_new();

/// One test's turn at a cluster.
pub(super) struct Cluster {
    client: Client,
    open: AtomicBool,
    ends: broadcast::Sender<()>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("open", &self.open).finish_non_exhaustive()
    }
}

/// Until it is dropped nobody else has a turn.
#[derive(Debug)]
pub(super) struct Turn {
    cluster: Arc<Cluster>,
    _turn: OwnedMutexGuard<()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // an operator that a test left running reaches nothing from here on
        self.cluster.open.store(false, Ordering::SeqCst);
        let _ = self.cluster.ends.send(());
    }
}

/// The cluster that was given by `KUBEBUILDER_ASSETS` or `KUBECONFIG`, with nothing of earlier tests in it.
pub(super) async fn turn() -> Option<(Arc<Cluster>, Turn)> {
    let given = GIVEN.get_or_init(given).await.as_ref().unwrap_or_else(|why| panic!("the API server: {why}")).as_ref()?;
    let turn = given.turn.clone().lock_owned().await;
    // a client of its own: the connections of one end with the runtime of its test
    let client = Client::try_from(given.config.clone()).expect("a client");
    wipe(&client).await;
    let cluster = Arc::new(Cluster { client, open: AtomicBool::new(true), ends: broadcast::channel(1).0 });
    Some((cluster.clone(), Turn { cluster, _turn: turn }))
}

async fn given() -> Result<Option<Given>, String> {
    let named = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let (config, what) = if let Some(assets) = named("KUBEBUILDER_ASSETS") {
        (process::start(&assets).await?, format!("etcd and kube-apiserver of {}", assets.display()))
    } else if let Some(file) = named("KUBECONFIG") {
        (Config::infer().await.map_err(|e| e.to_string())?, format!("the cluster of {}", file.display()))
    } else {
        say("in memory (neither KUBEBUILDER_ASSETS nor KUBECONFIG is set)");
        return Ok(None);
    };
    let client = Client::try_from(config.clone()).expect("a client");
    let version = client.apiserver_version().await.map_err(|e| format!("{what} does not answer: {e}"))?;
    say(&format!("{} of {what}", version.git_version));
    prepare(&client).await?;
    Ok(Some(Given { config, turn: Arc::default() }))
}

/// Past the test runner, which shows nothing of tests that pass. tests/run repeats it.
fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "API SERVER {what}");
}

/// Installs what deploy/ has for a cluster: namespace, definitions, rules.
async fn prepare(client: &Client) -> Result<(), String> {
    let marks: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    if marks.get_opt(MARK).await.map_err(|e| e.to_string())?.is_none() {
        let there = Api::<Proxy>::all(client.clone()).list(&ListParams::default().limit(1)).await;
        if there.is_ok_and(|l| !l.items.is_empty()) {
            let why = "the cluster has Proxies that these tests have not made, and they remove all: give them another one";
            return Err(why.to_owned());
        }
    }
    let mark = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": MARK, "namespace": "default" } });
    let bind = |name: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": MARK, "namespace": "default" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": "egress-operator", "namespace": "egress-proxies" }],
        })
    };
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "egress-proxies" } });
    let documents = |text: &str| -> Vec<Value> {
        let parts = text.split("\n---\n").map(|part| part.trim_start_matches("---\n"));
        parts.map(|part| serde_saphyr::from_str(part).expect("YAML of ours")).collect()
    };
    let mut all = vec![mark, namespace];
    all.extend(documents(include_str!("../../../../deploy/crd/crds.yaml")));
    all.extend(documents(include_str!("../../../../deploy/base/rbac.yaml")));
    all.push(bind("egress-operator-user-data"));
    for object in all {
        apply(client, object).await?;
    }
    lab_tests::eventually("Proxies and ProviderHealths are served", SOON, || async {
        let first = ListParams::default().limit(1);
        Api::<Proxy>::all(client.clone()).list(&first).await.map_err(|e| e.to_string())?;
        Api::<ProviderHealth>::all(client.clone()).list(&first).await.map_err(|e| e.to_string())?;
        Ok(())
    })
    .await;
    Ok(())
}

async fn apply(client: &Client, mut object: Value) -> Result<(), String> {
    let text = |v: &Value| v.as_str().expect("text").to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
    let name = text(&object["metadata"]["name"]);
    let api: Api<DynamicObject> = match kind.as_str() {
        "Role" | "RoleBinding" | "ServiceAccount" | "ConfigMap" => {
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or("egress-proxies").to_owned();
            object["metadata"]["namespace"] = json!(namespace);
            Api::namespaced_with(client.clone(), &namespace, &resource)
        }
        _ => Api::all_with(client.clone(), &resource),
    };
    let how = PatchParams::apply(MARK).force();
    api.patch(&name, &how, &Patch::Apply(&object)).await.map(drop).map_err(|e| format!("{kind} {name}: {e}"))
}

/// Removes what a test has left.
async fn wipe(client: &Client) {
    let (delete, all) = (DeleteParams::default(), ListParams::default());
    let proxies = Api::<Proxy>::all(client.clone());
    lab_tests::eventually("the Proxies of an earlier test are gone", SOON, || async {
        let left = proxies.list(&all).await.map_err(|e| e.to_string())?.items;
        for proxy in &left {
            let (api, name) = (Api::<Proxy>::namespaced(client.clone(), &proxy.namespace().unwrap_or_default()), proxy.name_any());
            // one that is gone by now is what is wanted
            let _ = api.delete(&name, &delete).await;
            let none = json!({ "metadata": { "finalizers": null } });
            let _ = api.patch(&name, &PatchParams::default(), &Patch::Merge(&none)).await;
        }
        if left.is_empty() { Ok(()) } else { Err(format!("{} are there", left.len())) }
    })
    .await;
    for namespace in NAMESPACES {
        let events = Api::<Event>::namespaced(client.clone(), namespace).delete_collection(&delete, &all).await;
        events.expect("events can be deleted");
    }
    let of_ours = "egress-proxies";
    Api::<ProviderHealth>::namespaced(client.clone(), of_ours).delete_collection(&delete, &all).await.expect("ProviderHealths go");
    Api::<Lease>::namespaced(client.clone(), of_ours).delete_collection(&delete, &all).await.expect("Leases go");
    // as operator_life calls it
    let gone = Api::<Secret>::namespaced(client.clone(), "default").delete("squid", &delete).await;
    assert!(gone.is_ok() || gone.is_err_and(|e| matches!(e, kube::Error::Api(s) if s.code == 404)), "a Secret can be deleted");
}

impl Cluster {
    /// Ends all watches.
    pub(super) fn end_watches(&self) {
        let _ = self.ends.send(());
    }

    /// Asks the API server.
    pub(super) async fn forward(&self, request: Request, who: Who) -> Response {
        let unavailable = |why: String| (axum::http::StatusCode::BAD_GATEWAY, why).into_response();
        if !self.open.load(Ordering::SeqCst) {
            return unavailable("this test is over".to_owned());
        }
        let ends = self.ends.subscribe();
        let (mut parts, body) = request.into_parts();
        let Ok(body) = axum::body::to_bytes(body, BODY_LIMIT).await else { return unavailable("the body is too large".to_owned()) };
        for name in [header::HOST, header::AUTHORIZATION, header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH] {
            parts.headers.remove(name);
        }
        if who == Who::Operator {
            parts.headers.insert("impersonate-user", HeaderValue::from_static(SERVICE_ACCOUNT));
            for group in ["system:serviceaccounts", "system:serviceaccounts:egress-proxies", "system:authenticated"] {
                parts.headers.append("impersonate-group", HeaderValue::from_static(group));
            }
        }
        // the client puts the server before it
        parts.uri = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default().parse().expect("a path");
        match self.client.send(Request::from_parts(parts, body.to_vec().into())).await {
            Ok(response) => {
                let (mut parts, body) = response.into_parts();
                for name in [header::CONNECTION, header::TRANSFER_ENCODING] {
                    parts.headers.remove(name);
                }
                let ended = async move {
                    let mut ends = ends;
                    let _ = ends.recv().await;
                };
                let frames = Body::new(body).into_data_stream().take_until(Box::pin(ended));
                Response::from_parts(parts, Body::from_stream(frames))
            }
            Err(e) => unavailable(e.to_string()),
        }
    }
}
