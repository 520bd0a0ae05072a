//! An API server of Kubernetes in this process, for what the operator asks of one: list with pages and selectors, watch
//! with resume, bookmarks and 410, create, replace and patch with resource versions, status as a subresource,
//! finalizers, generations. Objects of known resources only; of schemas nothing but the CEL rules of a Proxy.
//!
//! It serves a `kube::Client` without a socket, or a port for another process. Faults come in between: see [`Fault`].

mod faults;
mod patch;
mod routes;
mod store;

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::SignedDuration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub use faults::{Fault, When};
pub use store::Kind;

use faults::Faults;
use store::Store;

/// The server. Clones share it.
#[derive(Debug, Clone)]
pub struct ApiServer {
    store: Arc<Store>,
    faults: Arc<Faults>,
}

/// Serves a port until it is dropped.
#[derive(Debug)]
pub struct Port {
    /// `http://127.0.0.1:port`.
    pub url: String,
    task: JoinHandle<()>,
}

impl Drop for Port {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Default for ApiServer {
    fn default() -> Self {
        let server = Self { store: Arc::default(), faults: Arc::default() };
        for name in ["kube-system", "default", "egress-proxies"] {
            let namespace = serde_json::json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
            server.store.create(Kind::Namespace, "", namespace).expect("a namespace");
        }
        server
    }
}

impl ApiServer {
    /// A client without a socket.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.router(), "default")
    }

    /// The routes, to put layers around.
    pub fn router(&self) -> axum::Router {
        routes::router(self.store.clone(), self.faults.clone())
    }

    /// Serves a free port on loopback.
    pub async fn listen(&self) -> Port {
        self.listen_on(TcpListener::bind("127.0.0.1:0").await.expect("a port"))
    }

    /// Serves a listener.
    pub fn listen_on(&self, listener: TcpListener) -> Port {
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let router = self.router();
        let task = tokio::spawn(async move {
            // ends with the task
            let _ = axum::serve(listener, router).await;
        });
        Port { url, task }
    }

    /// Answers so from now on, when it fits.
    pub fn fail(&self, when: When, fault: Fault) {
        self.faults.set(when, fault);
    }

    /// Answers everything as it should again.
    pub fn mend(&self) {
        self.faults.clear();
    }

    /// Requests so far that fit.
    #[must_use]
    pub fn count(&self, when: &When) -> usize {
        self.faults.count(when)
    }

    /// Requests so far, by method and what they were for: `PUT proxies/status`, `LIST proxies`, `WATCH proxies`.
    #[must_use]
    pub fn tally(&self) -> BTreeMap<String, usize> {
        self.faults.tally(routes::label)
    }

    /// The most requests that were being answered at a time; a watch is answered when it begins.
    #[must_use]
    pub fn most_in_flight(&self) -> usize {
        self.faults.most_in_flight()
    }

    /// How many objects fit, without a request that anybody would count.
    pub fn holding(&self, kind: Kind, fits: impl Fn(&serde_json::Value) -> bool) -> usize {
        self.store.holding(kind, fits)
    }

    /// A client whose requests meet no faults and are not counted.
    #[must_use]
    pub fn client_aside(&self) -> kube::Client {
        kube::Client::new(routes::router(self.store.clone(), Arc::default()), "default")
    }

    /// Its clock goes so far ahead of everybody else's from now on; behind if it is negative.
    pub fn skew(&self, by: SignedDuration) {
        self.store.skew(by);
    }

    /// Forgets everything that happened: a watch from before gets 410.
    pub fn compact(&self) {
        self.store.compact();
    }

    /// Ends all watches, as an API server that is rolled does.
    pub fn end_watches(&self) {
        self.store.end_watches();
    }

    /// A bookmark to all watches.
    pub fn bookmark(&self) {
        self.store.bookmark();
    }
}

/// A kubeconfig for a server at a URL.
#[must_use]
pub fn kubeconfig(url: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: c\n  cluster: {{server: \"{url}\"}}\nusers:\n- name: u\n  user: {{}}\ncontexts:\n- name: c\n  context: {{cluster: c, user: u, namespace: default}}\n"
    )
}
