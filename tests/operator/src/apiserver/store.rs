//! The objects, their history, and who watches them.

use std::collections::BTreeMap;
use std::sync::Mutex;

use egress_operator::crd::Proxy;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::sync::broadcast;

/// Events that a slow watch may be behind.
const BACKLOG: usize = 65_536;

/// A kind of objects that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `egressproxies.io/v1alpha1`.
    Proxy,
    /// `egressproxies.io/v1alpha1`.
    ProviderHealth,
    /// `coordination.k8s.io/v1`.
    Lease,
    /// `events.k8s.io/v1`.
    Event,
    /// `v1`.
    Secret,
    /// `v1`.
    ConfigMap,
    /// `v1`, without a namespace.
    Namespace,
}

impl Kind {
    pub(super) fn of(group: &str, plural: &str) -> Option<Self> {
        Some(match (group, plural) {
            ("egressproxies.io", "proxies") => Self::Proxy,
            ("egressproxies.io", "providerhealths") => Self::ProviderHealth,
            ("coordination.k8s.io", "leases") => Self::Lease,
            ("events.k8s.io", "events") => Self::Event,
            ("", "secrets") => Self::Secret,
            ("", "configmaps") => Self::ConfigMap,
            ("", "namespaces") => Self::Namespace,
            _ => return None,
        })
    }

    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Proxy => ("egressproxies.io/v1alpha1", "Proxy"),
            Self::ProviderHealth => ("egressproxies.io/v1alpha1", "ProviderHealth"),
            Self::Lease => ("coordination.k8s.io/v1", "Lease"),
            Self::Event => ("events.k8s.io/v1", "Event"),
            Self::Secret => ("v1", "Secret"),
            Self::ConfigMap => ("v1", "ConfigMap"),
            Self::Namespace => ("v1", "Namespace"),
        }
    }

    fn has_status(self) -> bool {
        matches!(self, Self::Proxy | Self::ProviderHealth)
    }
}

/// Why a request is refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

fn refused(code: u16, reason: &'static str, message: impl Into<String>) -> Refused {
    Refused { code, reason, message: message.into() }
}

/// Something that happened.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) kind: Kind,
    pub(super) namespace: String,
    pub(super) version: u64,
    pub(super) type_: &'static str,
    pub(super) object: Value,
}

/// What a watch hears.
#[derive(Debug, Clone)]
pub(super) enum Heard {
    Change(Change),
    Bookmark(u64),
    End,
}

type Key = (Kind, String, String);

#[derive(Debug, Default)]
struct State {
    version: u64,
    objects: BTreeMap<Key, Value>,
    history: Vec<Change>,
    /// Changes up to here are forgotten.
    compacted: u64,
    /// How far its clock is ahead.
    skew: SignedDuration,
}

impl State {
    fn now(&self) -> String {
        (Timestamp::now() + self.skew).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}

#[derive(Debug)]
pub(super) struct Store {
    state: Mutex<State>,
    heard: broadcast::Sender<Heard>,
}

impl Default for Store {
    fn default() -> Self {
        Self { state: Mutex::default(), heard: broadcast::channel(BACKLOG).0 }
    }
}

/// Which part of an object a write is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Main,
    Status,
}

impl Store {
    pub(super) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Result<Value, Refused> {
        let state = self.state.lock().expect("no panic");
        state
            .objects
            .get(&(kind, namespace.to_owned(), name.to_owned()))
            .cloned()
            .ok_or_else(|| refused(404, "NotFound", format!("{kind:?} {namespace}/{name} not found")))
    }

    /// Objects in the order of their names, and the version that they are of. An empty namespace: all.
    pub(super) fn list(&self, kind: Kind, namespace: &str) -> (Vec<Value>, u64) {
        let state = self.state.lock().expect("no panic");
        let items = state.objects.iter().filter(|((k, ns, _), _)| *k == kind && (namespace.is_empty() || ns == namespace));
        (items.map(|(_, v)| v.clone()).collect(), state.version)
    }

    pub(super) fn holding(&self, kind: Kind, fits: impl Fn(&Value) -> bool) -> usize {
        let state = self.state.lock().expect("no panic");
        state.objects.iter().filter(|((k, ..), object)| *k == kind && fits(object)).count()
    }

    pub(super) fn create(&self, kind: Kind, namespace: &str, mut object: Value) -> Result<Value, Refused> {
        let mut state = self.state.lock().expect("no panic");
        let version = state.version + 1;
        let name = match object["metadata"]["name"].as_str() {
            Some(name) if !name.is_empty() => name.to_owned(),
            _ => format!("{}{version:05}", object["metadata"]["generateName"].as_str().unwrap_or("x-")),
        };
        let key = (kind, namespace.to_owned(), name.clone());
        if state.objects.contains_key(&key) {
            return Err(refused(409, "AlreadyExists", format!("{name} already exists")));
        }
        validate(kind, &object, None)?;
        let metadata = &mut object["metadata"];
        metadata["name"] = json!(name);
        if !namespace.is_empty() {
            metadata["namespace"] = json!(namespace);
        }
        metadata["uid"] = json!(uuid::Uuid::new_v4().to_string());
        metadata["generation"] = json!(1);
        metadata["creationTimestamp"] = json!(state.now());
        if kind.has_status()
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
        Ok(self.put(&mut state, key, object, "ADDED"))
    }

    /// Changes an object by a function of it; `expected` is the resource version that the caller knows.
    pub(super) fn change(
        &self,
        kind: Kind,
        namespace: &str,
        name: &str,
        part: Part,
        change: impl FnOnce(&mut Value) -> Result<(), Refused>,
    ) -> Result<Value, Refused> {
        let mut state = self.state.lock().expect("no panic");
        let key = (kind, namespace.to_owned(), name.to_owned());
        let old = state.objects.get(&key).cloned().ok_or_else(|| refused(404, "NotFound", format!("{name} not found")))?;
        let mut new = old.clone();
        change(&mut new)?;
        let expected = new["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if !expected.is_empty() && Some(expected) != old["metadata"]["resourceVersion"].as_str() {
            return Err(refused(
                409,
                "Conflict",
                format!("{name} has been changed: the version is {}, not {expected}", old["metadata"]["resourceVersion"]),
            ));
        }
        if new["metadata"]["uid"].as_str().is_some_and(|uid| !uid.is_empty() && Some(uid) != old["metadata"]["uid"].as_str()) {
            return Err(refused(409, "Conflict", "the uid is another"));
        }
        let mut kept = old.clone();
        match part {
            Part::Status => kept["status"] = new["status"].take(),
            Part::Main => {
                let status = old.get("status").cloned();
                kept = new;
                for field in ["uid", "creationTimestamp", "generation", "deletionTimestamp", "name", "namespace"] {
                    match old["metadata"].get(field) {
                        Some(value) => kept["metadata"][field] = value.clone(),
                        None => drop(kept["metadata"].as_object_mut().map(|m| m.remove(field))),
                    }
                }
                if kind.has_status() {
                    match status {
                        Some(status) => kept["status"] = status,
                        None => drop(kept.as_object_mut().map(|o| o.remove("status"))),
                    }
                }
                validate(kind, &kept, Some(&old))?;
                if kept.get("spec") != old.get("spec") {
                    kept["metadata"]["generation"] = json!(old["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
                }
            }
        }
        kept["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
        if kept == old {
            return Ok(old);
        }
        if !kept["metadata"]["deletionTimestamp"].is_null() && !has_finalizers(&kept) {
            return Ok(self.take(&mut state, &key, kept));
        }
        Ok(self.put(&mut state, key, kept, "MODIFIED"))
    }

    pub(super) fn delete(&self, kind: Kind, namespace: &str, name: &str, uid: Option<&str>) -> Result<Value, Refused> {
        let mut state = self.state.lock().expect("no panic");
        let key = (kind, namespace.to_owned(), name.to_owned());
        let mut object = state.objects.get(&key).cloned().ok_or_else(|| refused(404, "NotFound", format!("{name} not found")))?;
        if uid.is_some_and(|uid| Some(uid) != object["metadata"]["uid"].as_str()) {
            return Err(refused(409, "Conflict", "the uid in the precondition is another"));
        }
        if !has_finalizers(&object) {
            return Ok(self.take(&mut state, &key, object));
        }
        if object["metadata"]["deletionTimestamp"].is_null() {
            object["metadata"]["deletionTimestamp"] = json!(state.now());
            object["metadata"]["generation"] = json!(object["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
            return Ok(self.put(&mut state, key, object, "MODIFIED"));
        }
        Ok(object)
    }

    fn put(&self, state: &mut State, key: Key, mut object: Value, type_: &'static str) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let (api_version, kind) = key.0.names();
        object["apiVersion"] = json!(api_version);
        object["kind"] = json!(kind);
        self.tell(state, key.0, &key.1, type_, object.clone());
        state.objects.insert(key, object.clone());
        object
    }

    fn take(&self, state: &mut State, key: &Key, mut object: Value) -> Value {
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        state.objects.remove(key);
        self.tell(state, key.0, &key.1, "DELETED", object.clone());
        object
    }

    fn tell(&self, state: &mut State, kind: Kind, namespace: &str, type_: &'static str, object: Value) {
        let change = Change { kind, namespace: namespace.to_owned(), version: state.version, type_, object };
        // events of no one are of interest to nobody later
        if kind != Kind::Event {
            state.history.push(change.clone());
        }
        // nobody may be watching
        let _ = self.heard.send(Heard::Change(change));
    }

    /// What happened after a version, and what is going to; None if it is forgotten.
    pub(super) fn watch(&self, after: u64) -> Option<(Vec<Change>, broadcast::Receiver<Heard>)> {
        let state = self.state.lock().expect("no panic");
        if after < state.compacted {
            return None;
        }
        Some((state.history.iter().filter(|c| c.version > after).cloned().collect(), self.heard.subscribe()))
    }

    pub(super) fn skew(&self, by: SignedDuration) {
        self.state.lock().expect("no panic").skew = by;
    }

    pub(super) fn compact(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.history.clear();
        // also for who is up to date: as if the storage had been restored
        state.version += 1;
        state.compacted = state.version;
        let _ = self.heard.send(Heard::End);
    }

    pub(super) fn end_watches(&self) {
        let _ = self.heard.send(Heard::End);
    }

    pub(super) fn bookmark(&self) {
        let version = self.state.lock().expect("no panic").version;
        let _ = self.heard.send(Heard::Bookmark(version));
    }
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|f| !f.is_empty())
}

/// The rules that the definition of a Proxy brings along.
fn validate(kind: Kind, new: &Value, old: Option<&Value>) -> Result<(), Refused> {
    if kind != Kind::Proxy {
        return Ok(());
    }
    let parse = |value: &Value| serde_json::from_value::<Proxy>(value.clone()).map_err(|e| refused(422, "Invalid", format!("spec: {e}")));
    let proxy = parse(new)?;
    let verdict = match old {
        Some(old) => kube::core::cel::validate_cel_update(&proxy, &parse(old)?),
        None => kube::core::cel::validate_cel(&proxy),
    };
    verdict.map_err(|errors| refused(422, "Invalid", errors.to_string()))
}
