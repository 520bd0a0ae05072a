//! Which proxies a client is shown, and which one it is given. Pure.

use std::collections::BTreeMap;

use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use crate::conditions::{self, READY};
use crate::crd::Proxy;

/// A proxy as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Offer {
    /// Namespace of its Proxy.
    pub namespace: String,
    /// Name of its Proxy.
    pub name: String,
    /// Where it is; absent while it has no address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Its port.
    pub port: u16,
    /// Whether it may be used: the condition Ready.
    pub ready: bool,
    /// Why, in a word.
    pub reason: String,
    /// Its provider; absent for an external one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Its zone, as placed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub zone: String,
    /// Its region, as placed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub region: String,
    /// The labels of its Proxy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// What a client wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only of this namespace.
    pub namespace: Option<String>,
    /// Only of this provider.
    pub provider: Option<String>,
    /// Only in this zone.
    pub zone: Option<String>,
    /// Only in this region.
    pub region: Option<String>,
    /// Only with all of these labels.
    pub labels: Vec<(String, String)>,
    /// Also those that may not be used.
    pub all: bool,
}

/// The offer that a Proxy makes; None if it is being deleted.
#[must_use]
pub fn offer(proxy: &Proxy) -> Option<Offer> {
    if proxy.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let status = proxy.status.clone().unwrap_or_default();
    let placement = proxy.spec.placement.clone().unwrap_or_default();
    let is_ready = conditions::holds(&status.conditions, READY);
    let reason = conditions::find(&status.conditions, READY).map_or_else(|| "Pending".to_owned(), |c| c.reason.clone());
    Some(Offer {
        namespace: proxy.namespace().unwrap_or_default(),
        name: proxy.name_any(),
        ready: is_ready && status.address.is_some(),
        address: status.address,
        port: proxy.spec.port,
        reason,
        provider: proxy.spec.provider.clone(),
        zone: placement.zone,
        region: placement.region,
        labels: proxy.labels().clone(),
    })
}

/// The offers that fit, in an order that does not change.
#[must_use]
pub fn fitting(offers: impl IntoIterator<Item = Offer>, filter: &Filter) -> Vec<Offer> {
    let is = |wanted: &Option<String>, value: &str| wanted.as_deref().is_none_or(|w| w == value);
    let mut fitting: Vec<_> = offers
        .into_iter()
        .filter(|o| filter.all || o.ready)
        .filter(|o| is(&filter.namespace, &o.namespace) && is(&filter.zone, &o.zone) && is(&filter.region, &o.region))
        .filter(|o| is(&filter.provider, o.provider.as_deref().unwrap_or_default()))
        .filter(|o| filter.labels.iter().all(|(k, v)| o.labels.get(k) == Some(v)))
        .collect();
    fitting.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    fitting
}

/// How much a proxy is used: leases that run, and the number of the last one given.
pub type Use = (usize, u64);

/// The fairest choice: the fewest leases, and among those the one that has waited longest.
#[must_use]
pub fn fairest(offers: &[Offer], used: impl Fn(&Offer) -> Use) -> Option<&Offer> {
    offers.iter().filter(|o| o.ready).min_by_key(|o| used(o))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn offer(name: &str, ready: bool, zone: &str) -> Offer {
        Offer {
            namespace: "ns".into(),
            name: name.into(),
            address: Some("192.0.2.1".into()),
            port: 3128,
            ready,
            reason: "Ready".into(),
            provider: Some("p".into()),
            zone: zone.into(),
            region: String::new(),
            labels: BTreeMap::from([("team".to_owned(), name.to_owned())]),
        }
    }

    fn names(offers: &[Offer]) -> Vec<&str> {
        offers.iter().map(|o| o.name.as_str()).collect()
    }

    #[test]
    fn only_what_may_be_used_is_shown_unless_all_is_asked_for() {
        let offers = || [offer("b", true, "z1"), offer("a", false, "z1"), offer("c", true, "z2")];
        assert_eq!(names(&fitting(offers(), &Filter::default())), ["b", "c"]);
        assert_eq!(names(&fitting(offers(), &Filter { all: true, ..Filter::default() })), ["a", "b", "c"]);
        assert_eq!(names(&fitting(offers(), &Filter { zone: Some("z2".into()), ..Filter::default() })), ["c"]);
        assert_eq!(names(&fitting(offers(), &Filter { labels: vec![("team".into(), "b".into())], ..Filter::default() })), ["b"]);
        assert!(fitting(offers(), &Filter { provider: Some("q".into()), ..Filter::default() }).is_empty());
    }

    #[test]
    fn leases_are_spread_evenly_and_in_turns() {
        let offers = [offer("a", true, ""), offer("b", true, ""), offer("c", true, ""), offer("d", false, "")];
        let mut used: HashMap<String, Use> = HashMap::new();
        for n in 1..=30 {
            let pick = fairest(&offers, |o| used.get(&o.name).copied().unwrap_or_default()).expect("one is ready").name.clone();
            let entry = used.entry(pick).or_default();
            *entry = (entry.0 + 1, n);
        }
        assert_eq!((used["a"].0, used["b"].0, used["c"].0, used.contains_key("d")), (10, 10, 10, false));
        // all come back: who has waited longest goes first
        let pick = fairest(&offers, |o| (0, used.get(&o.name).map_or(0, |u| u.1))).expect("one is ready");
        assert_eq!(pick.name, "a");
    }
}
