//! The life of a Proxy, from being applied to being gone, over an API server and a provider in this process.

use std::sync::atomic::Ordering;

use egress_operator::conditions::{HEALTHY, PROVISIONED, READY};
use egress_operator::crd::ConditionStatus;
use egress_operator::crd::proxy::{CloudInit, KeyRef, OnTimeout, Phase, Provisioning};
use egress_operator::names::instance_name;
use egress_operator::reconcile::{FINALIZER, FORCE_DELETE};
use egress_provider_proto::v1::{ErrorReason, InstanceState, StateReason};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use operator_tests::rig::{NAMESPACE, SOON, answering_proxy, condition, counting_proxy, external, is, managed};
use operator_tests::sim::user_data;
use operator_tests::{Method, Rig, Slip, When};
use serde_json::json;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_is_made_probed_ready_and_removed_without_a_trace() {
    let rig = Rig::start().await;
    let (port, proxy) = answering_proxy("200 OK").await;
    let made = rig.apply("a", managed(port)).await;
    let ready = rig.until("a", "Ready", |p| is(p, READY)).await;
    let status = ready.status.clone().expect("a status");
    assert_eq!(status.instance_name.as_deref(), Some(instance_name(&made.uid().expect("a uid")).as_str()));
    assert_eq!((status.phase, status.observed_generation), (Some(Phase::Running), ready.metadata.generation));
    assert!(ready.finalizers().iter().any(|f| f == FINALIZER) && status.address.is_some() && status.spec_hash.is_some());
    assert_eq!((condition(&ready, PROVISIONED).1.as_str(), condition(&ready, HEALTHY).1.as_str()), ("Running", "ConnectOk"));
    let installation = rig.sim.instances()[0].installation_id.clone();
    let kube_system = Api::<k8s_openapi::api::core::v1::Namespace>::all(rig.client.clone()).get("kube-system").await.expect("there");
    assert_eq!(Some(installation), kube_system.uid());
    rig.delete("a").await;
    rig.until_gone("a").await;
    assert!(rig.sim.instances().is_empty());
    assert!(rig.events("a").await.iter().any(|e| e == "Created"));
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_image_replaces_the_vm_one_at_a_time() {
    let rig = Rig::start().await;
    rig.apply("a", managed(1)).await;
    let before = rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await.status.expect("a status");
    let patch = json!({ "spec": { "placement": { "image": "other" } } });
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patched");
    rig.until("a", "replaced", |p| p.status.as_ref().is_some_and(|s| s.spec_hash != before.spec_hash) && is(p, PROVISIONED)).await;
    let images: Vec<_> = rig.sim.asked().into_iter().map(|r| r.placement.expect("a placement").image).collect();
    assert_eq!(images, ["debian", "other"]);
    assert_eq!((rig.sim.instances().len(), rig.sim.calls(Method::Delete)), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_of_a_secret_reaches_the_provider_and_a_missing_one_is_shown() {
    let rig = Rig::start().await;
    let mut spec = managed(1);
    let key = KeyRef { name: "squid".into(), key: "user-data".into() };
    spec.cloud_init = Some(CloudInit { secret_key_ref: Some(key), ..CloudInit::default() });
    rig.apply("a", spec).await;
    let waiting = rig.until("a", "CloudInitMissing", |p| condition(p, PROVISIONED).1 == "CloudInitMissing").await;
    assert_eq!((rig.sim.calls(Method::Create), waiting.status.and_then(|s| s.phase)), (0, Some(Phase::Pending)));
    assert!(rig.events("a").await.iter().any(|e| e == "CloudInitMissing"));
    let bytes = [0_u8, 255, 13, 10, 1];
    let secret = Secret {
        metadata: ObjectMeta { name: Some("squid".into()), ..ObjectMeta::default() },
        data: Some([("user-data".to_owned(), ByteString(bytes.to_vec()))].into()),
        ..Secret::default()
    };
    Api::<Secret>::namespaced(rig.client.clone(), NAMESPACE).create(&PostParams::default(), &secret).await.expect("made");
    // what a person does who does not want to wait for the next look
    lab_tests::eventually("the Secret is read", SOON, || async {
        rig.look_again("a").await;
        if rig.sim.calls(Method::Create) > 0 { Ok(()) } else { Err("no Create".to_owned()) }
    })
    .await;
    rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
    assert_eq!(user_data(&rig.sim.asked()[0]), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_vm_is_replaced_and_a_paused_or_unknown_one_never() {
    let rig = Rig::start().await;
    rig.apply("a", managed(1)).await;
    let name = rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await.status.and_then(|s| s.instance_name).expect("a name");
    let look = |n: u32| json!({ "metadata": { "annotations": { "look": format!("{n}") } } });
    for (n, state, reason) in [(1, InstanceState::Paused, StateReason::IoError), (2, InstanceState::Unknown, StateReason::UnknownStateCode)]
    {
        rig.sim.change(&name, |i| (i.state, i.state_reason) = (state.into(), reason.into()));
        rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&look(n))).await.expect("patched");
        rig.until("a", "no longer Provisioned", |p| !is(p, PROVISIONED) && !condition(p, PROVISIONED).1.is_empty()).await;
        assert_eq!(rig.sim.calls(Method::Delete), 0, "{state:?}");
        rig.sim.change(&name, |i| (i.state, i.state_reason) = (InstanceState::Running.into(), 0));
        rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&look(n + 10))).await.expect("patched");
        rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
    }
    rig.sim.change(&name, |i| i.state = InstanceState::Stopped.into());
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&look(3))).await.expect("patched");
    lab_tests::eventually("it is replaced", SOON, || async {
        if rig.sim.asked().len() == 2 { Ok(()) } else { Err(format!("{} Creates", rig.sim.asked().len())) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_cannot_be_read_is_kept_and_the_proxy_stays_ready() {
    let rig = Rig::start().await;
    let (port, proxy) = answering_proxy("200 OK").await;
    rig.apply("a", managed(port)).await;
    let before = rig.until("a", "Ready", |p| is(p, READY)).await.status.and_then(|s| s.address);
    rig.sim.slip(Method::Get, Slip::Refuse(ErrorReason::AddressUnreadable), None);
    rig.proxies()
        .patch("a", &PatchParams::default(), &Patch::Merge(&json!({ "metadata": { "annotations": { "look": "again" } } })))
        .await
        .expect("patched");
    let stale = rig.until("a", "stale", |p| p.status.as_ref().is_some_and(|s| s.address_stale == Some(true))).await;
    assert_eq!((stale.status.clone().and_then(|s| s.address), is(&stale, READY)), (before, true));
    rig.sim.mend();
    rig.until("a", "fresh again", |p| p.status.as_ref().is_some_and(|s| s.address_stale.is_none())).await;
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_provider_refuses_for_good_is_latched_until_the_spec_changes() {
    let rig = Rig::start().await;
    rig.sim.slip(Method::Create, Slip::Refuse(ErrorReason::MachineTypeUnknown), Some(1));
    rig.apply("a", managed(1)).await;
    let failed = rig.until("a", "refused", |p| condition(p, PROVISIONED).1 == "MachineTypeUnknown").await;
    assert_eq!(failed.status.as_ref().and_then(|s| s.phase), Some(Phase::Failed));
    for n in 0..3 {
        let touch = json!({ "metadata": { "annotations": { "n": n.to_string() } } });
        rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&touch)).await.expect("patched");
        tokio::task::yield_now().await;
    }
    let patch = json!({ "spec": { "placement": { "machineType": "large" } } });
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.expect("patched");
    rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
    assert_eq!(rig.sim.calls(Method::Create), 2, "nothing was tried in between");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_of_a_call_is_shown_and_healed_from() {
    for slip in [
        Slip::Refuse(ErrorReason::HostUnreachable),
        Slip::Refuse(ErrorReason::ImagePullInProgress),
        Slip::Refuse(ErrorReason::OperationInProgress),
        Slip::Code(Code::DeadlineExceeded),
        Slip::Code(Code::Unknown),
        Slip::LostAnswer,
        Slip::Silent,
    ] {
        let rig = Rig::start().await;
        rig.sim.slip(Method::Create, slip.clone(), Some(1));
        rig.apply("a", managed(1)).await;
        let shown = rig
            .until("a", "a failure that is shown", |p| condition(p, PROVISIONED).0 == ConditionStatus::False && attempts(p) == Some(1))
            .await;
        assert_eq!(shown.status.as_ref().and_then(|s| s.refused_generation), None, "{slip:?}");
        rig.until("a", "healed", |p| is(p, PROVISIONED)).await;
        assert_eq!(rig.sim.instances().len(), 1, "{slip:?}");
        rig.sim.slip(Method::Delete, slip.clone(), Some(1));
        rig.delete("a").await;
        rig.until_gone("a").await;
        assert!(rig.sim.instances().is_empty(), "{slip:?}");
    }
}

fn attempts(proxy: &egress_operator::crd::Proxy) -> Option<u32> {
    proxy.status.as_ref()?.conditions.iter().find(|c| c.type_ == PROVISIONED)?.attempts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_is_away_keeps_the_finalizer_until_a_person_forces_it() {
    let rig = Rig::start().await;
    rig.apply("a", managed(1)).await;
    rig.until("a", "Provisioned", |p| is(p, PROVISIONED)).await;
    rig.sim.slip(Method::Delete, Slip::Refuse(ErrorReason::HostNotConfigured), None);
    rig.delete("a").await;
    let stuck = rig.until("a", "its failure", |p| condition(p, PROVISIONED).1 == "HostNotConfigured").await;
    assert!(stuck.finalizers().iter().any(|f| f == FINALIZER));
    let force = json!({ "metadata": { "annotations": { FORCE_DELETE: "true" } } });
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&force)).await.expect("patched");
    rig.until_gone("a").await;
    assert!(rig.events("a").await.iter().any(|e| e == "LeftBehind"));
    assert_eq!(rig.sim.instances().len(), 1, "it is left behind, and said so");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_without_an_address_is_reported_after_its_deadline_and_replaced_only_if_asked() {
    let rig = Rig::start().await;
    rig.sim.without_addresses(true);
    let mut spec = managed(1);
    spec.provisioning = Some(Provisioning { deadline_seconds: Some(30), on_timeout: OnTimeout::Report });
    rig.apply("a", spec).await;
    rig.until("a", "on its way", |p| condition(p, PROVISIONED).1 == "NoIpv4Address").await;
    // as if it had been asked for a minute ago
    let mut proxy = rig.proxies().get("a").await.expect("there");
    let status = proxy.status.as_mut().expect("a status");
    let ago = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(60);
    status.provisioning_since = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(ago));
    rig.proxies().replace_status("a", &PostParams::default(), &proxy).await.expect("written");
    let touch = |n: u32| json!({ "metadata": { "annotations": { "n": n.to_string() } } });
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&touch(1))).await.expect("patched");
    rig.until("a", "overdue", |p| condition(p, PROVISIONED).1 == "ProvisioningTimeout").await;
    assert_eq!(rig.sim.calls(Method::Delete), 0);
    let replace = json!({ "spec": { "provisioning": { "onTimeout": "Replace" } } });
    rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&replace)).await.expect("patched");
    lab_tests::eventually("it is replaced", SOON, || async { if rig.sim.asked().len() == 2 { Ok(()) } else { Err("not yet".to_owned()) } })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_vms_with_one_address_are_both_unhealthy_until_it_is_over() {
    let rig = Rig::start().await;
    let (port, proxy) = answering_proxy("200 OK").await;
    rig.sim.share_address(Some("127.0.0.77"));
    rig.apply("a", managed(port)).await;
    rig.until("a", "Ready", |p| is(p, READY)).await;
    rig.apply("b", managed(port)).await;
    for name in ["a", "b"] {
        rig.until(name, "the conflict", |p| condition(p, HEALTHY).1 == "AddressConflict" && !is(p, READY)).await;
    }
    rig.delete("b").await;
    rig.until("a", "Ready again", |p| is(p, READY)).await;
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_external_proxy_is_only_probed_and_offered() {
    let rig = Rig::start().await;
    let (port, proxy) = answering_proxy("200 OK").await;
    rig.apply("a", external("127.0.0.1", port)).await;
    let ready = rig.until("a", "Ready", |p| is(p, READY)).await;
    assert!(ready.finalizers().is_empty() && rig.sim.calls(Method::Create) == 0);
    proxy.abort();
    rig.until("a", "unhealthy", |p| condition(p, HEALTHY).1 == "ConnectionRefused" && !is(p, READY)).await;
    rig.delete("a").await;
    rig.until_gone("a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_external_proxy_that_is_gone_is_not_probed_any_more_and_leaves_its_address_to_others() {
    let rig = Rig::start().await;
    let (port, proxy, seen) = counting_proxy("200 OK").await;
    rig.apply("a", external("127.0.0.1", port)).await;
    rig.until("a", "Ready", |p| is(p, READY)).await;
    rig.delete("a").await;
    rig.until_gone("a").await;
    // no finalizer is on it: nothing tells the operator but its watch, and that only some time
    rig.apply("b", external("127.0.0.1", port)).await;
    rig.until("b", "Ready", |p| is(p, READY)).await;
    rig.delete("b").await;
    rig.until_gone("b").await;
    // how often one that is there is probed meanwhile says that its turn would have come
    let (other, another, clock) = counting_proxy("200 OK").await;
    rig.apply("c", external("127.0.0.2", other)).await;
    rig.until("c", "Ready", |p| is(p, READY)).await;
    lab_tests::eventually("what is gone is not probed", SOON, || async {
        let (before, start) = (seen.load(Ordering::SeqCst), clock.load(Ordering::SeqCst));
        lab_tests::eventually("the other one is probed", SOON, || async {
            if clock.load(Ordering::SeqCst) >= start + 4 { Ok(()) } else { Err("not yet".to_owned()) }
        })
        .await;
        let after = seen.load(Ordering::SeqCst);
        if before == after { Ok(()) } else { Err(format!("{before} and then {after} probes")) }
    })
    .await;
    proxy.abort();
    another.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_starts_takes_no_proxy_out_of_service_and_writes_nothing() {
    let mut rig = Rig::start().await;
    let (port, proxy) = answering_proxy("200 OK").await;
    for name in ["a", "b", "c"] {
        rig.apply(name, managed(port)).await;
        rig.until(name, "Ready", |p| is(p, READY)).await;
    }
    rig.end().await.expect("it was asked to");
    let writes = || rig.server.count(&When { method: "PUT", path: "/status", ..When::default() });
    let (before, asked) = (writes(), rig.sim.calls(Method::Get));
    let again = rig.again(operator_tests::Settings::default()).await;
    lab_tests::eventually("all were looked at, and probed until a verdict", SOON, || async {
        let (gets, probes) = (again.sim.calls(Method::Get) - asked, again.metric("egress_operator_probes_total").await);
        if gets >= 6 && probes >= 6 { Ok(()) } else { Err(format!("{gets} looks, {probes} probes")) }
    })
    .await;
    assert_eq!(writes(), before, "nothing has changed, so nothing is written");
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_and_nobody_is_asked_while_nothing_changes() {
    let rig = Rig::start().await;
    let (port, proxy, seen) = counting_proxy("200 OK").await;
    rig.apply("a", managed(port)).await;
    rig.until("a", "Ready", |p| is(p, READY)).await;
    let writes = || rig.server.count(&When { method: "PUT", path: "/proxies/a/status", ..When::default() });
    let (before, calls) = (writes(), rig.sim.calls(Method::Get));
    let probed = seen.load(Ordering::SeqCst);
    lab_tests::eventually("it is probed again and again", SOON, || async {
        if seen.load(Ordering::SeqCst) >= probed + 6 { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    assert_eq!((writes(), rig.sim.calls(Method::Get)), (before, calls));
    assert!(before <= 8, "{before} status writes until Ready");
    proxy.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_rules_forbid_is_not_taken() {
    let rig = Rig::start().await;
    let mut both = managed(1);
    both.external = external("192.0.2.1", 1).external;
    let mut neither = managed(1);
    (neither.provider, neither.placement) = (None, None);
    for (name, spec) in [("both", both), ("neither", neither)] {
        let refused =
            rig.proxies().create(&PostParams::default(), &egress_operator::crd::Proxy::new(name, spec)).await.expect_err("refused");
        assert!(refused.to_string().contains("either provider or external"), "{refused}");
    }
    rig.apply("a", managed(1)).await;
    let other = json!({ "spec": { "provider": "other" } });
    let refused = rig.proxies().patch("a", &PatchParams::default(), &Patch::Merge(&other)).await.expect_err("refused");
    assert!(refused.to_string().contains("provider cannot be changed"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_may_not_be_read_is_shown_at_the_proxy() {
    let rig = Rig::start().await;
    rig.server.fail(When { path: "/secrets/", ..When::default() }, operator_tests::Fault::Status(403));
    let mut spec = managed(1);
    let key = KeyRef { name: "squid".into(), key: "user-data".into() };
    spec.cloud_init = Some(CloudInit { secret_key_ref: Some(key), ..CloudInit::default() });
    rig.apply("a", spec).await;
    let shown = rig.until("a", "CloudInitMissing", |p| condition(p, PROVISIONED).1 == "CloudInitMissing").await;
    let conditions = shown.status.expect("a status").conditions;
    assert!(conditions.iter().any(|c| c.message.contains("may not read")), "{conditions:?}");
    assert_eq!(rig.sim.calls(Method::Create), 0);
}
