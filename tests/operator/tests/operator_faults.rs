//! The operator on bad days: an API server that fails, operators that are killed at any step or fight for the lead.

use std::time::Duration;

use egress_operator::conditions::PROVISIONED;
use egress_operator::gc::GcOptions;
use egress_operator::run::RunError;
use operator_tests::rig::{SOON, is, managed};
use operator_tests::{ApiServer, Fault, Method, Rig, Settings, SimProvider, When};

const PROXIES: usize = 5;

async fn apply_all(rig: &Rig) {
    for n in 0..PROXIES {
        rig.apply(&format!("p{n}"), managed(1)).await;
    }
}

async fn until_all_are_there(rig: &Rig) {
    for n in 0..PROXIES {
        rig.until(&format!("p{n}"), "Provisioned", |p| is(p, PROVISIONED)).await;
    }
    assert_eq!(rig.sim.instances().len(), PROXIES);
}

async fn remove_all(rig: &Rig) {
    for n in 0..PROXIES {
        rig.delete(&format!("p{n}")).await;
    }
    for n in 0..PROXIES {
        rig.until_gone(&format!("p{n}")).await;
    }
    assert!(rig.sim.instances().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_the_api_server_answers_for_a_while_everything_is_made_once_and_removed() {
    let few = |method: &'static str, path: &'static str| When { method, path, watch: Some(false), times: Some(4) };
    for (when, fault) in [
        (few("PUT", "/status"), Fault::Status(409)),
        (few("PUT", "/status"), Fault::Status(500)),
        (few("PUT", "/status"), Fault::LostAnswer),
        (few("PATCH", "/proxies/"), Fault::Status(500)),
        (few("PATCH", "/proxies/"), Fault::LostAnswer),
        (few("", ""), Fault::Status(503)),
        (few("", ""), Fault::Status(403)),
        (few("GET", "/proxies/"), Fault::Status(500)),
        (few("POST", "/events"), Fault::Status(403)),
        (few("", ""), Fault::Slow(Duration::from_millis(300))),
    ] {
        let what = format!("{when:?} {fault:?}");
        let server = ApiServer::begin().await;
        let rig = Rig::between(server, SimProvider::default(), Settings::default()).await;
        apply_all(&rig).await;
        rig.server.fail(when.clone(), fault.clone());
        until_all_are_there(&rig).await;
        rig.server.mend();
        rig.server.fail(when, fault);
        for n in 0..PROXIES {
            // the test's own calls meet the fault, too
            while rig
                .proxies()
                .delete(&format!("p{n}"), &kube::api::DeleteParams::default())
                .await
                .is_err_and(|e| !e.to_string().contains("NotFound"))
            {}
        }
        for n in 0..PROXIES {
            rig.until_gone(&format!("p{n}")).await;
        }
        assert!(rig.sim.instances().is_empty(), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_expired_ended_or_refused_is_begun_anew_and_misses_nothing() {
    let rig = Rig::start().await;
    rig.apply("p0", managed(1)).await;
    rig.until("p0", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.server.end_watches();
    rig.apply("p1", managed(1)).await;
    rig.until("p1", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.server.compact();
    rig.apply("p2", managed(1)).await;
    rig.until("p2", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.server.fail(When { path: "/proxies", watch: Some(true), times: Some(3), ..When::default() }, Fault::Status(500));
    rig.server.end_watches();
    rig.apply("p3", managed(1)).await;
    rig.delete("p0").await;
    rig.until("p3", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.until_gone("p0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_is_killed_anywhere_loses_and_doubles_nothing() {
    // each request of a life is where one operator ends: its answer never comes, and the next operator goes on
    for nth in 1..=14 {
        let mut rig = Rig::start().await;
        let any = When { path: "/proxies/", watch: Some(false), ..When::default() };
        // the first is the one that applies the Proxy
        let before = rig.server.count(&any);
        rig.server.fail(When { times: Some(nth), ..any.clone() }, Fault::Slow(Duration::from_millis(1)));
        rig.server.fail(When { times: Some(1), ..any.clone() }, Fault::Silent);
        rig.apply("p0", managed(1)).await;
        lab_tests::eventually("the operator stands, or is done", SOON, || async {
            let seen = rig.server.count(&any);
            if seen > before + nth || !rig.sim.instances().is_empty() { Ok(()) } else { Err(format!("{seen} of {}", before + nth + 1)) }
        })
        .await;
        rig.kill().await;
        rig.server.mend();
        let again = rig.again(Settings::default()).await;
        again.until("p0", "Provisioned", |p| is(p, PROVISIONED)).await;
        assert_eq!(again.sim.instances().len(), 1, "killed at request {nth}");
        assert_eq!(again.sim.asked().len(), 1, "killed at request {nth}");
        again.delete("p0").await;
        again.until_gone("p0").await;
        assert!(again.sim.instances().is_empty(), "killed at request {nth}");
    }
}

fn elected() -> Settings {
    Settings { leader_elect: true, ..Settings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_operators_one_acts_and_the_other_goes_on_when_it_ends() {
    let mut first = Rig::between(ApiServer::begin().await, SimProvider::default(), elected()).await;
    first.apply("p0", managed(1)).await;
    first.until("p0", "Provisioned", |p| is(p, PROVISIONED)).await;
    let mut second = first.again(elected()).await;
    first.apply("p1", managed(1)).await;
    first.until("p1", "Provisioned", |p| is(p, PROVISIONED)).await;
    first.end().await.expect("it was asked to");
    second.apply("p2", managed(1)).await;
    second.until("p2", "Provisioned", |p| is(p, PROVISIONED)).await;
    assert_eq!(second.sim.asked().len(), 3);
    second.end().await.expect("it was asked to");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_cannot_renew_ends_and_does_nothing_more() {
    let mut rig = Rig::between(ApiServer::begin().await, SimProvider::default(), elected()).await;
    rig.apply("p0", managed(1)).await;
    rig.until("p0", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.server.fail(When { path: "/leases", ..When::default() }, Fault::Status(503));
    assert!(matches!(rig.ended().await, Err(RunError::Lost)));
    let calls = rig.sim.calls(Method::Create);
    rig.apply("p1", managed(1)).await;
    // and when the API server is back another one takes over what it held
    rig.server.mend();
    let again = rig.again(elected()).await;
    again.until("p1", "Provisioned", |p| is(p, PROVISIONED)).await;
    assert_eq!(rig.sim.calls(Method::Create), calls + 1, "the one that has lost made nothing of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_stands_still_holds_up_nobody_elses_proxies() {
    let (slow, quick) = (SimProvider::default(), SimProvider::default());
    slow.delay(Duration::from_secs(3600));
    let providers = [("sim", slow), ("quick", quick.clone())]
        .map(|(name, p)| (name.to_owned(), std::sync::Arc::new(p) as std::sync::Arc<dyn egress_operator::provider_client::Provider>));
    let rig = Rig::with(ApiServer::begin().await, quick, providers.into(), Settings::default()).await;
    for n in 0..100 {
        rig.apply(&format!("slow{n}"), managed(1)).await;
    }
    let mut spec = managed(1);
    spec.provider = Some("quick".into());
    rig.apply("quick", spec).await;
    rig.until("quick", "Provisioned", |p| is(p, PROVISIONED)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_proxies_at_once_ask_a_slow_api_server_only_a_few_things_at_a_time() {
    let rig = Rig::start().await;
    rig.server.fail(When { method: "PUT", path: "/status", ..When::default() }, Fault::Slow(Duration::from_millis(100)));
    for n in 0..200 {
        rig.apply(&format!("p{n:03}"), managed(1)).await;
    }
    for n in 0..200 {
        rig.until(&format!("p{n:03}"), "Provisioned", |p| is(p, PROVISIONED)).await;
    }
    // those of reconciliations, and a few of everything else, the test's own among them
    let most = rig.server.most_in_flight();
    assert!(most <= 40, "{most} requests at a time");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_goes_after_two_sweeps_and_nothing_goes_while_something_is_in_doubt() {
    let gc = GcOptions { interval: Duration::from_millis(100), minimum_age: Duration::from_millis(300), most: 5, dry_run: false };
    let rig = Rig::between(ApiServer::begin().await, SimProvider::default(), Settings { gc, ..Settings::default() }).await;
    rig.apply("p0", managed(1)).await;
    rig.until("p0", "Provisioned", |p| is(p, PROVISIONED)).await;
    let orphan = |uid: &str| {
        let mut orphan = rig.sim.instances()[0].clone();
        orphan.uid = uid.to_owned();
        orphan.name = egress_operator::names::instance_name(uid);
        orphan.instance_id = format!("hosts/sim/domains/{}", orphan.name);
        orphan.created_at = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
        orphan
    };
    // the API server does not list: nothing goes, however long
    rig.server
        .fail(When { method: "GET", path: "/apis/egressproxies.io/v1alpha1/proxies", watch: Some(false), times: None }, Fault::Status(500));
    rig.sim.put(orphan("left-1"));
    let lists = rig.sim.calls(Method::List);
    lab_tests::eventually("some sweeps", SOON, || async {
        if rig.sim.calls(Method::List) > lists + 8 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    assert_eq!(rig.sim.instances().len(), 2);
    rig.server.mend();
    lab_tests::eventually("the orphan goes", SOON, || async {
        if rig.sim.instances().len() == 1 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    assert_eq!(rig.sim.instances()[0].uid, kube::ResourceExt::uid(&rig.proxies().get("p0").await.expect("there")).expect("a uid"));
    remove_one(&rig).await;
    apply_all(&rig).await;
    until_all_are_there(&rig).await;
    remove_all(&rig).await;
}

async fn remove_one(rig: &Rig) {
    rig.delete("p0").await;
    rig.until_gone("p0").await;
}
