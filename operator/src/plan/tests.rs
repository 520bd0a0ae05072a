use egress_provider_proto::v1::ErrorReason;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rstest::rstest;
use tonic::Code;

use super::*;
use crate::crd::proxy::{External, Placement, Provisioning};

/// A Proxy of which everything is known; each test changes what it is about.
#[derive(Debug, Clone)]
struct Known {
    spec: ProxySpec,
    status: ProxyStatus,
    deleting: bool,
    finalizer: bool,
    force_delete: bool,
    provider_known: bool,
    hash: Result<String, String>,
    now: i64,
}

impl Known {
    /// As somebody has just applied it.
    fn applied() -> Self {
        let placement = Placement { machine_type: "small".into(), image: "debian".into(), ..Placement::default() };
        let spec = ProxySpec {
            provider: Some("p".into()),
            placement: Some(placement),
            cloud_init: None,
            port: 3128,
            external: None,
            provisioning: None,
        };
        Self {
            spec,
            status: ProxyStatus::default(),
            deleting: false,
            finalizer: false,
            force_delete: false,
            provider_known: true,
            hash: Ok("h1".into()),
            now: 0,
        }
    }

    /// With its intent written.
    fn intended() -> Self {
        let mut known = Self::applied();
        known.finalizer = true;
        known.status.instance_name = Some("px-1".into());
        known.status.spec_hash = Some("h1".into());
        known.status.provisioning_since = Some(Time(Timestamp::UNIX_EPOCH));
        known
    }

    /// With an instance.
    fn created() -> Self {
        let mut known = Self::intended();
        known.status.instance_id = Some("hosts/hv1/domains/px-1".into());
        known
    }

    fn deleted(mut self) -> Self {
        self.deleting = true;
        self
    }

    fn plan(&self, seen: &Seen) -> Step {
        let view = View {
            spec: &self.spec,
            status: &self.status,
            generation: 1,
            deleting: self.deleting,
            finalizer: self.finalizer,
            force_delete: self.force_delete,
            provider_known: self.provider_known,
            hash: self.hash.clone(),
            now: Timestamp::from_second(self.now).expect("a time"),
        };
        plan(&view, seen)
    }
}

fn instance(state: InstanceState, reason: StateReason) -> Seen {
    Seen::Instance(Box::new(Instance { state: state.into(), state_reason: reason.into(), ..Instance::default() }))
}

fn error(code: Code, reason: Option<ErrorReason>) -> ProviderError {
    ProviderError { known: reason, ..ProviderError::local(code, "X", "x") }
}

#[test]
fn the_finalizer_is_there_before_the_intent_and_the_intent_before_the_first_call() {
    let mut known = Known::applied();
    assert_eq!(known.plan(&Seen::Nothing), Step::AddFinalizer);
    known.finalizer = true;
    assert_eq!(known.plan(&Seen::Nothing), Step::Intend { hash: "h1".into(), vanished: false });
    assert_eq!(Known::intended().plan(&Seen::Nothing), Step::Create);
    assert_eq!(Known::created().plan(&Seen::Nothing), Step::Get);
}

#[rstest]
#[case::running(InstanceState::Running, StateReason::Unspecified, Step::Rest(Rest::Seen))]
#[case::booting(InstanceState::Provisioning, StateReason::WaitingForAgent, Step::Rest(Rest::Seen))]
#[case::cut_off(InstanceState::Provisioning, StateReason::CreateIncomplete, Step::Create)]
#[case::stopped(InstanceState::Stopped, StateReason::GuestShutdown, Step::Delete(Why::Stopped))]
#[case::paused(InstanceState::Paused, StateReason::IoError, Step::Rest(Rest::Seen))]
#[case::paused_by_hand(InstanceState::Paused, StateReason::PausedByAdmin, Step::Rest(Rest::Seen))]
#[case::unknown(InstanceState::Unknown, StateReason::UnknownStateCode, Step::Rest(Rest::Seen))]
#[case::deleting(InstanceState::Deleting, StateReason::DeleteRunning, Step::Rest(Rest::Seen))]
#[case::not_said(InstanceState::Unspecified, StateReason::Unspecified, Step::Rest(Rest::Seen))]
fn only_a_stopped_instance_is_replaced_for_its_state(#[case] state: InstanceState, #[case] reason: StateReason, #[case] step: Step) {
    assert_eq!(Known::created().plan(&instance(state, reason)), step);
}

#[test]
fn a_state_of_a_newer_contract_replaces_nothing() {
    let seen = Seen::Instance(Box::new(Instance { state: 99, ..Instance::default() }));
    assert_eq!(Known::created().plan(&seen), Step::Rest(Rest::Seen));
}

#[test]
fn another_spec_deletes_first_and_asks_afterwards() {
    let mut known = Known::created();
    known.hash = Ok("h2".into());
    assert_eq!(known.plan(&Seen::Nothing), Step::Delete(Why::SpecChanged));
    assert_eq!(known.plan(&instance(InstanceState::Running, StateReason::Unspecified)), Step::Delete(Why::SpecChanged));
    // what a Delete leaves
    known.status.spec_hash = None;
    known.status.instance_id = None;
    assert_eq!(known.plan(&Seen::Gone), Step::Intend { hash: "h2".into(), vanished: false });
}

#[test]
fn a_create_whose_answer_was_lost_is_deleted_by_key_when_the_spec_changes() {
    let mut known = Known::intended();
    known.hash = Ok("h2".into());
    assert_eq!(known.plan(&Seen::Nothing), Step::Delete(Why::SpecChanged));
}

#[test]
fn an_instance_that_has_vanished_is_asked_for_anew() {
    assert_eq!(Known::created().plan(&Seen::Absent), Step::Intend { hash: "h1".into(), vanished: true });
}

#[rstest]
#[case(Seen::CreateFailed(error(Code::Unavailable, Some(ErrorReason::HostUnreachable))))]
#[case(Seen::GetFailed(error(Code::Unavailable, Some(ErrorReason::AddressUnreadable))))]
#[case(Seen::GetFailed(error(Code::DeadlineExceeded, None)))]
#[case(Seen::DeleteFailed(error(Code::Internal, None)))]
#[case(Seen::CreateFailed(error(Code::InvalidArgument, Some(ErrorReason::ZoneUnknown))))]
fn an_error_is_shown_and_changes_nothing(#[case] seen: Seen) {
    assert_eq!(Known::created().plan(&seen), Step::Rest(Rest::Seen));
}

#[test]
fn our_own_instance_of_another_spec_is_deleted_and_somebody_elses_is_not() {
    let conflict = |reason| Seen::CreateFailed(error(Code::AlreadyExists, Some(reason)));
    assert_eq!(Known::intended().plan(&conflict(ErrorReason::SpecConflict)), Step::Delete(Why::SpecChanged));
    assert_eq!(Known::intended().plan(&conflict(ErrorReason::NameOwnedByOtherUid)), Step::Rest(Rest::Seen));
    assert_eq!(Known::intended().plan(&conflict(ErrorReason::NameNotManaged)), Step::Rest(Rest::Seen));
}

#[test]
fn what_was_refused_is_tried_again_only_with_another_spec_or_other_user_data() {
    let mut known = Known::intended();
    known.status.refused_generation = Some(1);
    assert_eq!(known.plan(&Seen::Nothing), Step::Rest(Rest::Refused));
    known.hash = Ok("h2".into());
    assert_eq!(known.plan(&Seen::Nothing), Step::Delete(Why::SpecChanged));
    known.hash = Ok("h1".into());
    known.status.refused_generation = Some(0);
    assert_eq!(known.plan(&Seen::Nothing), Step::Create);
}

#[test]
fn a_missing_secret_stops_a_create_and_not_a_vm_that_runs() {
    let mut known = Known::intended();
    known.hash = Err("no Secret s".into());
    assert_eq!(known.plan(&Seen::Nothing), Step::Rest(Rest::UserDataMissing("no Secret s".into())));
    known.status = Known::created().status;
    assert_eq!(known.plan(&Seen::Nothing), Step::Get);
    assert_eq!(known.plan(&Seen::Absent), Step::Rest(Rest::UserDataMissing("no Secret s".into())));
}

#[test]
fn after_the_deadline_a_vm_without_an_address_is_reported_or_replaced_as_asked() {
    let booting = instance(InstanceState::Provisioning, StateReason::NoIpv4Address);
    let mut known = Known::created();
    known.now = 899;
    assert_eq!(known.plan(&booting), Step::Rest(Rest::Seen));
    known.now = 900;
    assert_eq!(known.plan(&booting), Step::Rest(Rest::Overdue));
    known.spec.provisioning = Some(Provisioning { deadline_seconds: Some(60), on_timeout: OnTimeout::Replace });
    known.now = 59;
    assert_eq!(known.plan(&booting), Step::Rest(Rest::Seen));
    known.now = 60;
    assert_eq!(known.plan(&booting), Step::Delete(Why::Timeout));
    assert_eq!(
        known.plan(&instance(InstanceState::Paused, StateReason::IoError)),
        Step::Rest(Rest::Seen),
        "a paused one is never replaced"
    );
    known.now = -5;
    assert_eq!(known.plan(&booting), Step::Rest(Rest::Seen), "a clock that went back replaces nothing");
}

#[test]
fn an_external_proxy_is_made_by_nobody() {
    let mut known = Known::applied();
    known.spec = ProxySpec { provider: None, placement: None, external: Some(External { address: "192.0.2.1".into() }), ..known.spec };
    assert_eq!(known.plan(&Seen::Nothing), Step::External);
}

#[test]
fn a_provider_that_is_not_configured_is_shown_and_latches_nothing() {
    let mut known = Known::created();
    known.provider_known = false;
    assert_eq!(known.plan(&Seen::Nothing), Step::Rest(Rest::ProviderUnknown));
}

#[test]
fn the_finalizer_goes_only_when_the_provider_says_gone() {
    let known = Known::created().deleted();
    assert_eq!(known.plan(&Seen::Nothing), Step::Delete(Why::ProxyDeleted));
    assert_eq!(known.plan(&Seen::Gone), Step::RemoveFinalizer { left_behind: None });
    for code in [Code::Unavailable, Code::FailedPrecondition, Code::Internal, Code::InvalidArgument, Code::Unimplemented, Code::NotFound] {
        assert_eq!(known.plan(&Seen::DeleteFailed(error(code, None))), Step::Rest(Rest::Seen), "{code:?}");
    }
}

#[test]
fn a_delete_that_meets_somebody_elses_instance_has_nothing_left_to_do() {
    for reason in [ErrorReason::UidMismatch, ErrorReason::NotManaged] {
        let seen = Seen::DeleteFailed(error(Code::FailedPrecondition, Some(reason)));
        assert_eq!(Known::created().deleted().plan(&seen), Step::RemoveFinalizer { left_behind: None });
    }
}

#[test]
fn a_proxy_that_never_asked_for_anything_goes_without_a_call() {
    let mut known = Known::applied().deleted();
    assert_eq!(known.plan(&Seen::Nothing), Step::Rest(Rest::Done));
    known.finalizer = true;
    known.provider_known = false;
    assert_eq!(known.plan(&Seen::Nothing), Step::RemoveFinalizer { left_behind: None });
}

#[test]
fn force_lets_go_after_one_try_and_says_what_may_be_left() {
    let mut known = Known::created().deleted();
    known.force_delete = true;
    assert_eq!(known.plan(&Seen::Nothing), Step::Delete(Why::ProxyDeleted));
    let step = known.plan(&Seen::DeleteFailed(error(Code::Unavailable, None)));
    assert!(matches!(&step, Step::RemoveFinalizer { left_behind: Some(what) } if what.contains('x')), "{step:?}");
    let step = known.plan(&Seen::Abandoned("the instance on host hv9".into()));
    assert_eq!(step, Step::RemoveFinalizer { left_behind: Some("the instance on host hv9".into()) });
    known.provider_known = false;
    assert!(matches!(known.plan(&Seen::Nothing), Step::RemoveFinalizer { left_behind: Some(_) }));
    known.force_delete = false;
    assert_eq!(known.plan(&Seen::Nothing), Step::Rest(Rest::ProviderUnknown));
}
