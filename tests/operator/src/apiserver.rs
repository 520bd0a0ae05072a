//! An API server of Kubernetes in this process, for what the operator asks of one: list with pages and selectors, watch
//! with resume, bookmarks and 410, create, replace and patch with resource versions, status as a subresource,
//! finalizers, generations. Objects of known resources only; of schemas nothing but the CEL rules of a Proxy.
//!
//! It serves a `kube::Client` without a socket, or a port for another process. Faults come in between: see [`Fault`].
//! With `KUBEBUILDER_ASSETS` or `KUBECONFIG` set, [`ApiServer::begin`] puts the same faults before a real one.

mod cluster;
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

use cluster::{Cluster, Turn, Who};
use faults::Faults;
use store::Store;

/// The server. Clones share it.
#[derive(Debug, Clone)]
pub struct ApiServer {
    behind: Behind,
    faults: Arc<Faults>,
    _turn: Option<Arc<Turn>>,
}

/// Who answers.
#[derive(Debug, Clone)]
enum Behind {
    Memory(Arc<Store>),
    Cluster(Arc<Cluster>),
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
    /// In memory.
    fn default() -> Self {
        let store = Store::default();
        for name in ["kube-system", "default", "egress-proxies"] {
            let namespace = serde_json::json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
            store.create(Kind::Namespace, "", namespace).expect("a namespace");
        }
        Self { behind: Behind::Memory(Arc::new(store)), faults: Arc::default(), _turn: None }
    }
}

impl ApiServer {
    /// A real one where one is given, and the one in memory otherwise. Of a real one each test has its turn: whoever
    /// holds one server must not begin another.
    ///
    /// # Panics
    /// If the one that is given cannot be used.
    pub async fn begin() -> Self {
        match cluster::turn().await {
            Some((cluster, turn)) => Self { behind: Behind::Cluster(cluster), faults: Arc::default(), _turn: Some(Arc::new(turn)) },
            None => Self::default(),
        }
    }

    fn store(&self) -> &Arc<Store> {
        match &self.behind {
            Behind::Memory(store) => store,
            Behind::Cluster(_) => panic!("only the API server in memory can be made to do this"),
        }
    }

    /// A client without a socket.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        kube::Client::new(routes::router(self.behind.clone(), self.faults.clone(), Who::Test), "default")
    }

    /// Serves a free port on loopback, for an operator.
    pub async fn listen(&self) -> Port {
        self.listen_on(TcpListener::bind("127.0.0.1:0").await.expect("a port"))
    }

    /// Serves a listener, for an operator.
    pub fn listen_on(&self, listener: TcpListener) -> Port {
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let router = routes::router(self.behind.clone(), self.faults.clone(), Who::Operator);
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
        self.store().holding(kind, fits)
    }

    /// A client whose requests meet no faults and are not counted.
    #[must_use]
    pub fn client_aside(&self) -> kube::Client {
        kube::Client::new(routes::router(self.behind.clone(), Arc::default(), Who::Test), "default")
    }

    /// Its clock goes so far ahead of everybody else's from now on; behind if it is negative. In memory only.
    pub fn skew(&self, by: SignedDuration) {
        self.store().skew(by);
    }

    /// Forgets everything that happened: a watch from before gets 410. Before a real one, which keeps its history for
    /// minutes, the answer is made up.
    pub fn compact(&self) {
        match &self.behind {
            Behind::Memory(store) => store.compact(),
            Behind::Cluster(cluster) => {
                self.fail(When { watch: Some(true), times: Some(1), ..When::default() }, Fault::Status(410));
                cluster.end_watches();
            }
        }
    }

    /// Ends all watches, as an API server that is rolled does.
    pub fn end_watches(&self) {
        match &self.behind {
            Behind::Memory(store) => store.end_watches(),
            Behind::Cluster(cluster) => cluster.end_watches(),
        }
    }

    /// A bookmark to all watches. In memory only.
    pub fn bookmark(&self) {
        self.store().bookmark();
    }
}

/// A kubeconfig for a server at a URL.
#[must_use]
pub fn kubeconfig(url: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters:\n- name: c\n  cluster: {{server: \"{url}\"}}\nusers:\n- name: u\n  user: {{}}\ncontexts:\n- name: c\n  context: {{cluster: c, user: u, namespace: default}}\n"
    )
}
