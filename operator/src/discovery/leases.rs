//! Leases of proxies: who has which until when. Each is a `coordination.k8s.io` Lease in the operator's namespace, and
//! a copy in memory that decisions are made by; the copy is filled from the API server when this operator takes over.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use tokio::sync::Mutex;

use super::pick::{Offer, Use, fairest};

/// Marks our Leases among others.
const LABEL: &str = "egressproxies.io/discovery-lease";
const ANNOTATION_PROXY: &str = "egressproxies.io/proxy";
const ANNOTATION_TOKEN: &str = "egressproxies.io/lease-number";
/// The shortest and longest lease.
pub const TTL: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(24 * 3600));
/// The most leases at a time.
pub const MOST: usize = 20_000;

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Held {
    /// Its id; who knows it may renew and release it.
    pub id: String,
    /// Who has it, as told.
    pub client: String,
    /// namespace/name of the Proxy.
    pub proxy: String,
    /// When it ends unless it is renewed.
    pub expires_at: Timestamp,
    /// Counts leases; orders who was served when.
    #[serde(skip)]
    pub number: u64,
}

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// No proxy fits and may be used.
    #[error("no proxy that fits is ready")]
    NoneReady,
    /// There are too many.
    #[error("{MOST} leases are held already")]
    TooMany,
    /// It has ended, was released, or never was.
    #[error("there is no such lease: it has ended or was released")]
    Unknown,
    /// The Proxy is not there or not ready any more: the client should take another.
    #[error("the proxy of this lease is not ready any more: release it and acquire another")]
    ProxyGone,
    /// This operator has just taken over.
    #[error("the leases of the operator before are not read yet")]
    NotLoaded,
    /// The API server failed.
    #[error("the lease cannot be stored")]
    Api(#[source] kube::Error),
}

/// Gives leases.
pub struct LeaseDesk {
    api: Api<Lease>,
    /// None until they are read: before, one proxy could be given twice.
    held: Mutex<Option<BTreeMap<String, Held>>>,
}

impl std::fmt::Debug for LeaseDesk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseDesk").finish_non_exhaustive()
    }
}

impl LeaseDesk {
    /// Keeps its Leases in a namespace.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), held: Mutex::default() }
    }

    /// Fills the copy from the API server: before the first lease is given.
    ///
    /// # Errors
    /// The API server failed.
    pub async fn load(&self) -> Result<usize, kube::Error> {
        let list = self.api.list(&ListParams::default().labels(LABEL)).await?;
        let mut held = self.held.lock().await;
        let all: BTreeMap<_, _> = list.items.iter().filter_map(read).map(|h| (h.id.clone(), h)).collect();
        let count = all.len();
        *held = Some(all);
        Ok(count)
    }

    /// Gives the fairest of the offers for a time.
    ///
    /// # Errors
    /// None is ready, there are too many, or the API server failed.
    pub async fn acquire(&self, client: &str, offers: &[Offer], ttl: Duration, now: Timestamp) -> Result<(Held, Offer), LeaseError> {
        let mut held = self.held.lock().await;
        let held = held.as_mut().ok_or(LeaseError::NotLoaded)?;
        if held.len() >= MOST {
            return Err(LeaseError::TooMany);
        }
        let mut used: BTreeMap<&str, Use> = BTreeMap::new();
        for lease in held.values() {
            let entry = used.entry(&lease.proxy).or_default();
            // one that has ended counts for whose turn it is only
            *entry = (entry.0 + usize::from(lease.expires_at > now), entry.1.max(lease.number));
        }
        let offer = fairest(offers, |o| used.get(full_name(o).as_str()).copied().unwrap_or_default()).ok_or(LeaseError::NoneReady)?.clone();
        let number = held.values().map(|h| h.number).max().unwrap_or(0) + 1;
        let lease = Held {
            id: uuid::Uuid::new_v4().to_string(),
            client: client.to_owned(),
            proxy: full_name(&offer),
            expires_at: end(now, ttl),
            number,
        };
        self.api.create(&PostParams::default(), &written(&lease, ttl, now)).await.map_err(LeaseError::Api)?;
        held.insert(lease.id.clone(), lease.clone());
        Ok((lease, offer))
    }

    /// Makes a lease last longer, if its proxy may still be used.
    ///
    /// # Errors
    /// It is not there, its proxy is not ready, or the API server failed.
    pub async fn renew(&self, id: &str, ttl: Duration, now: Timestamp, is_ready: impl Fn(&str) -> bool) -> Result<Held, LeaseError> {
        let mut held = self.held.lock().await;
        let held = held.as_mut().ok_or(LeaseError::NotLoaded)?;
        let lease = held.get(id).filter(|l| l.expires_at > now).cloned().ok_or(LeaseError::Unknown)?;
        if !is_ready(&lease.proxy) {
            return Err(LeaseError::ProxyGone);
        }
        let new = Held { expires_at: end(now, ttl), ..lease };
        let mut object = self.api.get_opt(&object_name(id)).await.map_err(LeaseError::Api)?.ok_or(LeaseError::Unknown)?;
        object.spec = written(&new, ttl, now).spec;
        self.api.replace(&object_name(id), &PostParams::default(), &object).await.map_err(LeaseError::Api)?;
        held.insert(id.to_owned(), new.clone());
        Ok(new)
    }

    /// Gives a lease back. One that is not there is back already.
    ///
    /// # Errors
    /// The API server failed.
    pub async fn release(&self, id: &str) -> Result<(), LeaseError> {
        let mut held = self.held.lock().await;
        let held = held.as_mut().ok_or(LeaseError::NotLoaded)?;
        self.remove(id).await.map_err(LeaseError::Api)?;
        held.remove(id);
        Ok(())
    }

    /// Removes what has ended; how many leases run.
    ///
    /// # Errors
    /// The API server failed.
    pub async fn expire(&self, now: Timestamp) -> Result<usize, kube::Error> {
        let ended: Vec<_> = {
            let held = self.held.lock().await;
            held.iter().flat_map(BTreeMap::values).filter(|l| l.expires_at <= now).map(|l| l.id.clone()).collect()
        };
        for id in ended {
            let mut held = self.held.lock().await;
            // it may have been renewed meanwhile
            if let Some(held) = held.as_mut()
                && held.get(&id).is_some_and(|l| l.expires_at <= now)
            {
                self.remove(&id).await?;
                held.remove(&id);
            }
        }
        Ok(self.held.lock().await.as_ref().map_or(0, BTreeMap::len))
    }

    /// Leases that run, oldest first.
    pub async fn list(&self, now: Timestamp) -> Vec<Held> {
        let mut all: Vec<_> = self.held.lock().await.iter().flat_map(BTreeMap::values).filter(|l| l.expires_at > now).cloned().collect();
        all.sort_by_key(|l| l.number);
        all
    }

    async fn remove(&self, id: &str) -> Result<(), kube::Error> {
        match self.api.delete(&object_name(id), &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => other.map(drop),
        }
    }
}

/// namespace/name of an offer's Proxy.
#[must_use]
pub fn full_name(offer: &Offer) -> String {
    format!("{}/{}", offer.namespace, offer.name)
}

fn end(now: Timestamp, ttl: Duration) -> Timestamp {
    SignedDuration::try_from(ttl.clamp(TTL.0, TTL.1)).ok().and_then(|d| now.checked_add(d).ok()).unwrap_or(now)
}

/// An id comes from a client: only what we may have made becomes a name.
fn object_name(id: &str) -> String {
    let id = uuid::Uuid::parse_str(id).unwrap_or_default();
    format!("px-lease-{id}")
}

fn written(lease: &Held, ttl: Duration, now: Timestamp) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: Some(object_name(&lease.id)),
            labels: Some(BTreeMap::from([(LABEL.to_owned(), "true".to_owned())])),
            annotations: Some(BTreeMap::from([
                (ANNOTATION_PROXY.to_owned(), lease.proxy.clone()),
                (ANNOTATION_TOKEN.to_owned(), lease.number.to_string()),
            ])),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(lease.client.clone()),
            lease_duration_seconds: i32::try_from(ttl.clamp(TTL.0, TTL.1).as_secs()).ok(),
            renew_time: Some(MicroTime(now)),
            ..LeaseSpec::default()
        }),
    }
}

/// A lease as it was written; None for what is none of ours.
fn read(object: &Lease) -> Option<Held> {
    let id = object.name_any().strip_prefix("px-lease-")?.to_owned();
    let spec = object.spec.as_ref()?;
    let seconds = u64::try_from(spec.lease_duration_seconds?).ok()?;
    Some(Held {
        id,
        client: spec.holder_identity.clone().unwrap_or_default(),
        proxy: object.annotations().get(ANNOTATION_PROXY)?.clone(),
        expires_at: end(spec.renew_time.as_ref()?.0, Duration::from_secs(seconds)),
        number: object.annotations().get(ANNOTATION_TOKEN)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let now = Timestamp::from_second(1_000).expect("a time");
        let lease = Held {
            id: uuid::Uuid::new_v4().to_string(),
            client: "c".into(),
            proxy: "ns/a".into(),
            expires_at: Timestamp::from_second(1_060).expect("a time"),
            number: 7,
        };
        assert_eq!(read(&written(&lease, Duration::from_secs(60), now)), Some(lease));
    }

    #[test]
    fn an_id_never_becomes_another_name() {
        for id in ["../secrets/x", "", "a/b", "px-lease-1"] {
            assert_eq!(object_name(id), "px-lease-00000000-0000-0000-0000-000000000000", "{id}");
        }
    }
}
