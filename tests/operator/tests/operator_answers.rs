//! A provider over gRPC that answers each call with a code of gRPC's own, as another version or a proxy in between does:
//! what it means is shown where a person looks, nothing is latched or removed for it, and all goes on when it is over.

use std::sync::Arc;
use std::time::Duration;

use egress_operator::conditions::{PROVISIONED, READY};
use egress_operator::crd::{ConditionStatus, ProviderHealth, Proxy};
use egress_operator::gc::GcOptions;
use egress_operator::names::instance_name;
use egress_operator::provider_client::Provider;
use egress_operator::provider_client::grpc::{GrpcOptions, GrpcProvider};
use egress_operator::reconcile::FINALIZER;
use kube::{Api, ResourceExt as _};
use operator_tests::rig::{SOON, answering_proxy, condition, is, managed};
use operator_tests::{ApiServer, Method, Rig, Settings, SimProvider, Slip, grpc};
use tonic::Code;

const CODES: [(Code, &str); 2] = [(Code::Unimplemented, "Unimplemented"), (Code::DeadlineExceeded, "DeadlineExceeded")];

/// A rig whose provider is asked over its socket.
struct Remote {
    rig: Rig,
    served: tokio::task::JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.served.abort();
    }
}

async fn remote(settings: Settings) -> Remote {
    remote_to(SimProvider::default(), settings).await
}

async fn remote_to(sim: SimProvider, settings: Settings) -> Remote {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("p.sock");
    let served = grpc::serve(sim.clone(), &socket);
    let options = GrpcOptions {
        endpoint: format!("unix:{}", socket.display()),
        entry: String::new(),
        max_in_flight: 16,
        tls_ca: None,
        tls_identity: None,
    };
    let provider = Arc::new(GrpcProvider::new(&options).expect("an endpoint")) as Arc<dyn Provider>;
    let rig = Rig::with(ApiServer::begin().await, sim, [("sim".to_owned(), provider)].into(), settings).await;
    Remote { rig, served, _dir: dir }
}

fn refused(proxy: &Proxy) -> Option<i64> {
    proxy.status.as_ref().and_then(|s| s.refused_generation)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_is_answered_so_is_shown_not_latched_and_made_when_it_is_over() {
    for (code, reason) in CODES {
        let remote = remote(Settings::default()).await;
        let rig = &remote.rig;
        rig.sim.slip(Method::Create, Slip::Code(code), None);
        rig.apply("a", managed(1)).await;
        let shown = rig.until("a", reason, |p| condition(p, PROVISIONED) == (ConditionStatus::False, reason.to_owned())).await;
        assert_eq!(refused(&shown), None, "{code:?}");
        rig.sim.mend();
        rig.look_again("a").await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        assert_eq!(rig.sim.instances().len(), 1, "{code:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_get_that_is_answered_so_takes_no_working_proxy_out_of_service() {
    let (port, proxy) = answering_proxy("200 OK").await;
    for (code, reason) in CODES {
        let remote = remote(Settings::default()).await;
        let rig = &remote.rig;
        rig.apply("a", managed(port)).await;
        let before = rig.until("a", "Ready", |p| is(p, READY)).await.status.and_then(|s| s.address);
        rig.sim.slip(Method::Get, Slip::Code(code), None);
        rig.look_again("a").await;
        let shown = rig.until("a", reason, |p| condition(p, PROVISIONED) == (ConditionStatus::Unknown, reason.to_owned())).await;
        assert!(is(&shown, READY), "{code:?}");
        let status = shown.status.as_ref().expect("a status");
        assert_eq!((status.address.clone(), status.address_stale, refused(&shown)), (before, Some(true), None), "{code:?}");
        rig.sim.mend();
        rig.look_again("a").await;
        rig.until("a", "known again", |p| is(p, PROVISIONED) && p.status.as_ref().is_some_and(|s| s.address_stale.is_none())).await;
        assert_eq!((rig.sim.calls(Method::Create), rig.sim.calls(Method::Delete)), (1, 0), "{code:?}");
    }
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_that_is_answered_so_keeps_the_finalizer_until_the_vm_is_gone() {
    for (code, reason) in CODES {
        let remote = remote(Settings::default()).await;
        let rig = &remote.rig;
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        rig.sim.slip(Method::Delete, Slip::Code(code), None);
        rig.delete("a").await;
        let shown = rig.until("a", reason, |p| condition(p, PROVISIONED) == (ConditionStatus::False, reason.to_owned())).await;
        assert!(shown.finalizers().iter().any(|f| f == FINALIZER), "{code:?}");
        assert_eq!(rig.sim.instances().len(), 1, "{code:?}");
        rig.sim.mend();
        rig.look_again("a").await;
        rig.until_gone("a").await;
        assert!(rig.sim.instances().is_empty(), "{code:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_is_answered_so_freezes_the_collector_until_it_is_over() {
    for (code, _) in CODES {
        let gc = GcOptions { interval: Duration::from_millis(50), minimum_age: Duration::from_millis(100), most: 5, dry_run: false };
        let remote = remote(Settings { gc, ..Settings::default() }).await;
        let rig = &remote.rig;
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        rig.sim.slip(Method::List, Slip::Code(code), None);
        let mut orphan = rig.sim.instances()[0].clone();
        orphan.uid = "left".to_owned();
        orphan.name = instance_name("left");
        orphan.instance_id = format!("hosts/sim/domains/{}", orphan.name);
        orphan.created_at = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
        rig.sim.put(orphan);
        let lists = rig.sim.calls(Method::List);
        lab_tests::eventually("some sweeps, and a collector that says that it is frozen", SOON, || async {
            let (sweeps, frozen) = (rig.sim.calls(Method::List) - lists, rig.metric("egress_operator_collector_frozen").await);
            if sweeps > 6 && frozen == 1 { Ok(()) } else { Err(format!("{sweeps} sweeps, frozen {frozen}")) }
        })
        .await;
        assert_eq!(rig.sim.instances().len(), 2, "{code:?}");
        rig.sim.mend();
        lab_tests::eventually("the orphan goes", SOON, || async {
            let (left, frozen) = (rig.sim.instances().len(), rig.metric("egress_operator_collector_frozen").await);
            if left == 1 && frozen == 0 { Ok(()) } else { Err(format!("{left} instances, frozen {frozen}")) }
        })
        .await;
    }
}

async fn until_health(rig: &Rig, what: &str, fits: impl Fn(&ProviderHealth) -> bool) -> ProviderHealth {
    let api: Api<ProviderHealth> = Api::namespaced(rig.client.clone(), "egress-proxies");
    lab_tests::eventually(what, SOON, || async {
        match api.get_opt("sim").await {
            Ok(Some(health)) if fits(&health) => Ok(health),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

fn ready(health: &ProviderHealth) -> Option<(ConditionStatus, &str)> {
    let status = health.status.as_ref()?;
    status.conditions.iter().find(|c| c.type_ == READY).map(|c| (c.status, c.reason.as_str()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_is_answered_so_makes_the_provider_unknown_and_keeps_its_rows() {
    for (code, reason) in CODES {
        let remote = remote(Settings { check_interval: Duration::from_millis(100), ..Settings::default() }).await;
        let rig = &remote.rig;
        until_health(rig, "healthy", |h| ready(h) == Some((ConditionStatus::True, "AllHealthy"))).await;
        rig.sim.slip(Method::Check, Slip::Code(code), None);
        let shown = until_health(rig, reason, |h| ready(h) == Some((ConditionStatus::Unknown, reason))).await;
        assert_eq!(shown.status.map(|s| (s.ready, s.hosts.len())), Some(("0/1".to_owned(), 1)), "{code:?}");
        // a provider that cannot be checked can still be asked for VMs
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        rig.sim.mend();
        until_health(rig, "healthy again", |h| ready(h) == Some((ConditionStatus::True, "AllHealthy"))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_says_nothing_about_itself_so_is_checked_all_the_same() {
    for (code, _) in CODES {
        // before the operator asks for the first time: what it was once told, it keeps
        let sim = SimProvider::default();
        sim.slip(Method::Info, Slip::Code(code), None);
        let remote = remote_to(sim, Settings { check_interval: Duration::from_millis(100), ..Settings::default() }).await;
        let rig = &remote.rig;
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        lab_tests::eventually("it was asked, and that it failed is counted", SOON, || async {
            let text = reqwest::get(format!("{}/metrics", rig.ops)).await.expect("an answer").text().await.expect("text");
            let line = format!("egress_operator_provider_calls_total{{method=\"GetProviderInfo\",outcome=\"{code:?}\"}}");
            if text.contains(&line) { Ok(()) } else { Err(text) }
        })
        .await;
        let shown = until_health(rig, "healthy", |h| ready(h) == Some((ConditionStatus::True, "AllHealthy"))).await;
        assert_eq!(shown.status.map(|s| s.provider_type), Some(String::new()), "{code:?}");
        rig.sim.mend();
        until_health(rig, "its type", |h| h.status.as_ref().is_some_and(|s| s.provider_type == "sim")).await;
    }
}
