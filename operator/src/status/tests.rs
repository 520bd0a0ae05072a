use egress_provider_proto::v1::{Address as ProtoAddress, StateReason};
use jiff::Timestamp;
use tonic::Code;

use super::*;
use crate::crd::proxy::{External, Placement, ProxySpec};

fn spec() -> ProxySpec {
    let placement = Placement { zone: "hv1".into(), machine_type: "small".into(), image: "debian".into(), ..Placement::default() };
    ProxySpec { provider: Some("p".into()), placement: Some(placement), cloud_init: None, port: 3128, external: None, provisioning: None }
}

fn view<'a>(spec: &'a ProxySpec, status: &'a ProxyStatus, second: i64) -> View<'a> {
    View {
        spec,
        status,
        generation: 1,
        deleting: false,
        finalizer: true,
        force_delete: false,
        provider_known: true,
        hash: Ok("h".into()),
        now: Timestamp::from_second(second).expect("a time"),
    }
}

const AROUND: Around<'static> = Around { health: None, shared_with: None, jitter: 0.0 };

fn running() -> Seen {
    let address =
        |ip: &str, primary| ProtoAddress { ip: ip.into(), source: AddressSource::GuestAgent.into(), primary, ..ProtoAddress::default() };
    Seen::Instance(Box::new(Instance {
        instance_id: "hosts/hv1/domains/px-1".into(),
        state: InstanceState::Running.into(),
        addresses: vec![address("10.9.9.9", false), address("10.0.0.5", true), address("not an address", false)],
        ..Instance::default()
    }))
}

fn unavailable(reason: ErrorReason) -> ProviderError {
    ProviderError { known: Some(reason), ..ProviderError::local(Code::Unavailable, reason.wire_name(), "no route") }
}

/// A Proxy that runs, with its status after that.
fn after_running() -> ProxyStatus {
    let (spec, status) = (spec(), ProxyStatus::default());
    rest(&view(&spec, &status, 10), &Rest::Seen, &running(), &AROUND).status
}

fn reason<'a>(status: &'a ProxyStatus, type_: &str) -> (ConditionStatus, &'a str, Option<u32>) {
    let c = conditions::find(&status.conditions, type_).expect("the condition");
    (c.status, &c.reason, c.attempts)
}

#[test]
fn the_intent_holds_everything_that_a_restarted_operator_needs() {
    let (spec, old) = (spec(), after_running());
    let status = intended(&view(&spec, &old, 20), "px-1", "h2", false);
    assert_eq!(
        (status.instance_name.as_deref(), status.zone.as_deref(), status.spec_hash.as_deref()),
        (Some("px-1"), Some("hv1"), Some("h2"))
    );
    assert_eq!((status.instance_id, status.address, status.phase), (None, None, Some(Phase::Provisioning)));
    assert!(status.provisioning_since.is_some());
}

#[test]
fn a_vm_that_runs_has_its_primary_address_first_and_only_addresses() {
    let status = after_running();
    assert_eq!((status.address.as_deref(), status.addresses.len(), status.phase), (Some("10.0.0.5"), 2, Some(Phase::Running)));
    assert_eq!(reason(&status, PROVISIONED), (ConditionStatus::True, "Running", None));
    assert_eq!(reason(&status, READY).1, "NotProbed");
}

#[test]
fn the_same_seen_again_is_no_change() {
    let (spec, status) = (spec(), after_running());
    let again = rest(&view(&spec, &status, 99), &Rest::Seen, &running(), &AROUND);
    assert_eq!(again.status, status);
    assert_eq!(again.again, RUNNING);
}

#[test]
fn an_unreadable_address_is_kept_and_marked_and_the_proxy_stays_in_service() {
    let (spec, status) = (spec(), after_running());
    let good = Health { healthy: Some(true), reason: "ConnectOk".into(), message: String::new(), failures: 0 };
    let around = Around { health: Some(&good), ..AROUND };
    for (error, of) in [(ErrorReason::AddressUnreadable, ConditionStatus::True), (ErrorReason::HostUnreachable, ConditionStatus::Unknown)] {
        let seen = Seen::GetFailed(unavailable(error));
        let outcome = rest(&view(&spec, &status, 20), &Rest::Seen, &seen, &around);
        assert_eq!((outcome.status.address.as_deref(), outcome.status.address_stale), (Some("10.0.0.5"), Some(true)));
        let (status_of_it, said, attempts) = reason(&outcome.status, PROVISIONED);
        assert_eq!((status_of_it, attempts), (of, Some(1)), "{said}");
        assert_eq!(reason(&outcome.status, READY), (ConditionStatus::True, "Ready", None));
    }
}

#[test]
fn no_transient_failure_is_invisible_and_its_tries_are_counted() {
    let (spec, mut status) = (spec(), ProxyStatus::default());
    let seen = Seen::CreateFailed(unavailable(ErrorReason::HostUnreachable));
    for (n, wait) in [(1, 2), (2, 4), (3, 8)] {
        let outcome = rest(&view(&spec, &status, n), &Rest::Seen, &seen, &AROUND);
        assert_eq!(
            reason(&outcome.status, PROVISIONED),
            (ConditionStatus::False, "HostUnreachable", Some(u32::try_from(n).expect("small")))
        );
        assert_eq!((outcome.again, outcome.status.refused_generation), (Duration::from_secs(wait), None));
        status = outcome.status;
    }
    let other = Seen::CreateFailed(unavailable(ErrorReason::LibvirtBusy));
    assert_eq!(
        reason(&rest(&view(&spec, &status, 9), &Rest::Seen, &other, &AROUND).status, PROVISIONED),
        (ConditionStatus::False, "LibvirtBusy", Some(1))
    );
}

#[test]
fn only_what_the_table_latches_is_latched() {
    let (spec, status) = (spec(), ProxyStatus::default());
    for reason in ErrorReason::all() {
        let e = ProviderError { known: Some(reason), ..ProviderError::local(reason.grpc_code(), reason.wire_name(), "") };
        let outcome = rest(&view(&spec, &status, 0), &Rest::Seen, &Seen::CreateFailed(e), &AROUND);
        let latched = matches!(reason.grpc_code(), Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists)
            && reason != ErrorReason::SpecConflict;
        assert_eq!(outcome.status.refused_generation.is_some(), latched, "{reason:?}");
        assert_eq!(outcome.status.phase == Some(Phase::Failed), latched, "{reason:?}");
    }
}

#[test]
fn a_paused_vm_and_one_nobody_understands_keep_their_instance() {
    let (spec, status) = (spec(), after_running());
    let seen = |state: InstanceState, reason: StateReason| {
        Seen::Instance(Box::new(Instance { state: state.into(), state_reason: reason.into(), ..Instance::default() }))
    };
    let paused = rest(&view(&spec, &status, 20), &Rest::Seen, &seen(InstanceState::Paused, StateReason::IoError), &AROUND).status;
    assert_eq!((paused.phase, reason(&paused, PROVISIONED)), (Some(Phase::Paused), (ConditionStatus::False, "IoError", None)));
    let unknown =
        rest(&view(&spec, &status, 20), &Rest::Seen, &seen(InstanceState::Unknown, StateReason::UnknownStateCode), &AROUND).status;
    assert_eq!(reason(&unknown, PROVISIONED), (ConditionStatus::Unknown, "StateUnknown", None));
    for status in [paused, unknown] {
        assert_eq!(status.instance_id.as_deref(), Some("hosts/hv1/domains/px-1"));
    }
}

#[test]
fn two_proxies_with_one_address_are_both_unhealthy_whatever_the_probes_say() {
    let (spec, status) = (spec(), after_running());
    let good = Health { healthy: Some(true), reason: "ConnectOk".into(), message: String::new(), failures: 0 };
    let around = Around { health: Some(&good), shared_with: Some("ns/other"), jitter: 0.0 };
    let status = rest(&view(&spec, &status, 20), &Rest::Seen, &running(), &around).status;
    assert_eq!(reason(&status, HEALTHY), (ConditionStatus::False, "AddressConflict", None));
    assert_eq!(reason(&status, READY), (ConditionStatus::False, "AddressConflict", None));
}

#[test]
fn what_the_probes_last_said_holds_until_they_say_something_and_only_for_the_same_address_and_spec() {
    let (spec, status) = (spec(), after_running());
    let good = Health { healthy: Some(true), reason: "ConnectOk".into(), message: String::new(), failures: 0 };
    let before = rest(&view(&spec, &status, 20), &Rest::Seen, &running(), &Around { health: Some(&good), ..AROUND }).status;
    let undecided = Health { healthy: None, reason: String::new(), message: String::new(), failures: 0 };
    for health in [None, Some(&undecided)] {
        let around = Around { health, ..AROUND };
        let after = rest(&view(&spec, &before, 30), &Rest::Seen, &running(), &around).status;
        assert_eq!(after, before, "an operator that has just started writes nothing");
        let moved = ProxyStatus { address: Some("10.0.0.6".into()), ..before.clone() };
        let elsewhere = rest(&view(&spec, &moved, 30), &Rest::Seen, &running(), &around).status;
        assert_eq!(reason(&elsewhere, HEALTHY).1, "NotProbed", "another address");
        let other = View { generation: 2, ..view(&spec, &before, 30) };
        assert_eq!(reason(&rest(&other, &Rest::Seen, &running(), &around).status, HEALTHY).1, "NotProbed", "perhaps another port");
        let shared = rest(&view(&spec, &before, 30), &Rest::Seen, &running(), &Around { shared_with: Some("ns/other"), ..around }).status;
        let alone = rest(&view(&spec, &shared, 40), &Rest::Seen, &running(), &Around { health, ..AROUND }).status;
        assert_eq!(reason(&alone, HEALTHY).1, "NotProbed", "no probe said that it was shared");
    }
}

#[test]
fn an_external_proxy_is_probed_at_its_own_address() {
    let spec = ProxySpec { provider: None, placement: None, external: Some(External { address: "192.0.2.7".into() }), ..spec() };
    let status = ProxyStatus::default();
    let outcome = external(&view(&spec, &status, 0), &AROUND);
    assert_eq!((outcome.status.address.as_deref(), outcome.status.phase), (Some("192.0.2.7"), Some(Phase::External)));
}

#[test]
fn the_deadline_is_looked_at_when_it_comes() {
    let (spec, status) = (spec(), ProxyStatus { provisioning_since: Some(Time(Timestamp::UNIX_EPOCH)), ..ProxyStatus::default() });
    let booting = Seen::Instance(Box::new(Instance { state: InstanceState::Provisioning.into(), ..Instance::default() }));
    assert_eq!(rest(&view(&spec, &status, 898), &Rest::Seen, &booting, &AROUND).again, Duration::from_secs(3));
    let overdue = rest(&view(&spec, &status, 900), &Rest::Overdue, &booting, &AROUND);
    assert_eq!(reason(&overdue.status, PROVISIONED).1, "ProvisioningTimeout");
}

#[test]
fn a_delete_that_fails_again_keeps_its_tries() {
    let (spec, status) = (spec(), after_running());
    let start = deleting(&view(&spec, &status, 1), Why::ProxyDeleted);
    let seen = Seen::DeleteFailed(unavailable(ErrorReason::HostUnreachable));
    let first = rest(&view(&spec, &start, 2), &Rest::Seen, &seen, &AROUND).status;
    let again = deleting(&view(&spec, &first, 3), Why::ProxyDeleted);
    assert_eq!(again, first, "no status is written for a second try");
    let second = rest(&view(&spec, &again, 4), &Rest::Seen, &seen, &AROUND).status;
    assert_eq!(reason(&second, PROVISIONED), (ConditionStatus::False, "HostUnreachable", Some(2)));
}
