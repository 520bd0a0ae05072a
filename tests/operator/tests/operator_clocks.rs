//! Clocks that disagree: the API server's, the provider's, and those of other replicas.

use std::time::Duration;

use egress_operator::conditions::{PROVISIONED, READY};
use egress_operator::gc::GcOptions;
use egress_operator::names::instance_name;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use operator_tests::rig::{SOON, answering_proxy, is, managed};
use operator_tests::{ApiServer, Method, Rig, Settings, SimProvider, When};

const DAY: SignedDuration = SignedDuration::from_hours(24);

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_whose_clock_is_a_day_off_changes_nothing_in_a_life() {
    let (port, proxy) = answering_proxy("200 OK").await;
    for skew in [DAY, -DAY] {
        // in memory: nobody sets the clock of a real one
        let server = ApiServer::default();
        server.skew(skew);
        let settings = Settings { leader_elect: true, ..Settings::default() };
        let mut rig = Rig::between(server, SimProvider::default(), settings.clone()).await;
        rig.apply("a", managed(port)).await;
        rig.until("a", "Ready", |p| is(p, READY)).await;
        rig.end().await.expect("it was asked to");
        // and one that takes over meets the other way round
        rig.server.skew(-skew);
        let again = rig.again(settings).await;
        again.delete("a").await;
        again.until_gone("a").await;
        assert!(again.sim.instances().is_empty(), "{skew}");
        assert_eq!(again.sim.calls(Method::Create), 1, "{skew}");
    }
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_collector_believes_no_clock_that_makes_an_instance_older_than_it_has_seen_it() {
    // an hour cannot pass here, so that only a clock that is believed could make anything old enough
    let hour = Duration::from_secs(3600);
    let gc = GcOptions { interval: Duration::from_millis(50), minimum_age: hour, most: 5, dry_run: false };
    for (of_the_api_server, of_the_provider) in [(DAY, -DAY), (-DAY, -DAY), (-DAY, DAY)] {
        // in memory: nobody sets the clock of a real one
        let server = ApiServer::default();
        server.skew(of_the_api_server);
        let rig = Rig::between(server, SimProvider::default(), Settings { gc: gc.clone(), ..Settings::default() }).await;
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        put_orphan(&rig, of_the_provider);
        until_sweeps(&rig, 8).await;
        assert_eq!(rig.sim.instances().len(), 2, "{of_the_api_server} {of_the_provider}");
        assert_eq!(rig.metric("egress_operator_orphans").await, 1, "it is seen, and said");
    }
    // by our own clock it has been one for long enough: then a provider whose clock is behind holds nothing up, and one
    // whose clock is ahead keeps what it says is young
    let gc = GcOptions { minimum_age: Duration::from_millis(300), ..gc };
    for (of_the_provider, left) in [(-DAY, 1), (DAY, 2)] {
        let rig = Rig::between(ApiServer::begin().await, SimProvider::default(), Settings { gc: gc.clone(), ..Settings::default() }).await;
        rig.apply("a", managed(1)).await;
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        put_orphan(&rig, of_the_provider);
        until_sweeps(&rig, 20).await;
        lab_tests::eventually("what is old is gone", SOON, || async {
            let there = rig.sim.instances().len();
            if there == left { Ok(()) } else { Err(format!("{there} instances")) }
        })
        .await;
    }
}

/// Made just now, as a provider says it whose clock is so far ahead.
fn put_orphan(rig: &Rig, ahead: SignedDuration) {
    let mut orphan = rig.sim.instances()[0].clone();
    orphan.uid = "left".to_owned();
    orphan.name = instance_name("left");
    orphan.instance_id = format!("hosts/sim/domains/{}", orphan.name);
    let seconds = (Timestamp::now() + ahead).as_second();
    orphan.created_at = Some(prost_types::Timestamp { seconds, nanos: 0 });
    rig.sim.put(orphan);
}

async fn until_sweeps(rig: &Rig, count: usize) {
    let before = rig.sim.calls(Method::List);
    lab_tests::eventually("some sweeps", SOON, || async {
        let sweeps = rig.sim.calls(Method::List) - before;
        if sweeps > count { Ok(()) } else { Err(format!("{sweeps} sweeps")) }
    })
    .await;
}

/// The Lease as another replica writes it whose clock says `now`.
fn lease_of_another(now: Timestamp) -> Lease {
    Lease {
        metadata: ObjectMeta { name: Some("egress-operator".to_owned()), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: Some("another".to_owned()),
            lease_duration_seconds: Some(4),
            acquire_time: Some(MicroTime(now)),
            renew_time: Some(MicroTime(now)),
            ..LeaseSpec::default()
        }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_renewed_is_respected_and_one_that_is_not_is_taken_whatever_its_times_say() {
    for skew in [-DAY, DAY] {
        let server = ApiServer::begin().await;
        let api: Api<Lease> = Api::namespaced(server.client(), "egress-proxies");
        let mut lease = api.create(&PostParams::default(), &lease_of_another(Timestamp::now() + skew)).await.expect("made");
        let rig = Rig::between(server, SimProvider::default(), Settings { leader_elect: true, ..Settings::default() }).await;
        rig.apply("a", managed(1)).await;
        // for longer than its duration, by a clock that is a day off; ours looks at it ten times in three seconds
        let looks = || rig.server.count(&When { method: "GET", path: "/leases/egress-operator", ..When::default() });
        let (first, lease) = (looks(), tokio::sync::Mutex::new(&mut lease));
        lab_tests::eventually("it was looked at for longer than it lasts", SOON, || async {
            let mut lease = lease.lock().await;
            lease.spec = lease_of_another(Timestamp::now() + skew).spec;
            **lease = api.replace("egress-operator", &PostParams::default(), &lease).await.expect("nobody else has written it");
            if looks() >= first + 20 { Ok(()) } else { Err(format!("{} looks", looks() - first)) }
        })
        .await;
        assert_eq!((rig.metric("egress_operator_leader").await, rig.sim.calls(Method::Create)), (0, 0), "{skew}");
        // the other one is gone
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
        assert_eq!(rig.sim.calls(Method::Create), 1, "{skew}");
    }
}
