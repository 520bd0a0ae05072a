use super::*;
use crate::service::fixtures;

fn valid() -> v1::CreateRequest {
    v1::CreateRequest {
        name: "web-1".into(),
        uid: "3f2b".into(),
        placement: Some(v1::Placement { machine_type: "small".into(), image: "debian-13".into(), ..Default::default() }),
        ..Default::default()
    }
}

fn broken(fault: Fault) -> Vec<(String, Reason)> {
    match fault {
        Fault::Rejected(all) => all.into_iter().map(|v| (v.field, v.reason)).collect(),
        Fault::Failed(e) => vec![(e.field().unwrap_or_default().to_owned(), e.reason())],
    }
}

fn create_of(request: v1::CreateRequest) -> Result<CreateRequest, Vec<(String, Reason)>> {
    create(&fixtures::entry("lab", &["hv1"]), request, None).map_err(broken)
}

#[test]
fn a_valid_create_keeps_its_fields_and_gets_the_default_wait() {
    let made = create_of(valid()).expect("valid");
    assert_eq!((made.entry.as_str(), made.key.name.as_str(), made.max_wait), ("lab", "web-1", Duration::from_secs(25)));
}

#[test]
fn every_violation_of_a_create_is_reported_in_one_answer() {
    let request = v1::CreateRequest {
        name: "Web_1".into(),
        uid: String::new(),
        installation_id: "a b".into(),
        placement: Some(v1::Placement {
            zone: "z".repeat(64),
            region: "r".repeat(64),
            machine_type: String::new(),
            image: "x".repeat(2049),
        }),
        cloud_init: Some(v1::CloudInit { user_data: vec![0; MAX_USER_DATA + 1] }),
        spec_hash: "ä".into(),
        max_wait: Some(prost_types::Duration { seconds: -1, nanos: 0 }),
        port: 65536,
        ..Default::default()
    };
    let fields: Vec<_> = create_of(request).expect_err("all wrong").into_iter().map(|(f, _)| f).collect();
    assert_eq!(
        fields,
        [
            "name",
            "uid",
            "installation_id",
            "placement.zone",
            "placement.region",
            "placement.machine_type",
            "placement.image",
            "cloud_init.user_data",
            "spec_hash",
            "max_wait",
            "port",
        ]
    );
}

#[test]
fn each_kind_of_field_has_its_own_reason() {
    let with = |change: fn(&mut v1::CreateRequest)| {
        let mut request = valid();
        change(&mut request);
        create_of(request).expect_err("one is wrong")
    };
    assert_eq!(with(|r| r.name.clear()), [("name".into(), Reason::NameInvalid)]);
    assert_eq!(with(|r| r.uid = "a/b".into()), [("uid".into(), Reason::UidInvalid)]);
    assert_eq!(with(|r| r.placement = None), [("placement".into(), Reason::FieldInvalid)]);
    let large = with(|r| r.cloud_init = Some(v1::CloudInit { user_data: vec![0; MAX_USER_DATA + 1] }));
    assert_eq!(large, [("cloud_init.user_data".into(), Reason::UserDataTooLarge)]);
}

#[test]
fn names_follow_the_contract() {
    for name in ["a", "web-1", "a.b", "0"] {
        assert!(create_of(v1::CreateRequest { name: name.into(), ..valid() }).is_ok(), "{name}");
    }
    let long = "a".repeat(MAX_NAME + 1);
    for name in ["", "-a", "a-", ".a", "a.", "A", "a_b", "a/b", "ä", "base-a", &long] {
        assert!(create_of(v1::CreateRequest { name: name.into(), ..valid() }).is_err(), "{name}");
    }
}

#[test]
fn the_texts_of_violations_do_not_repeat_values() {
    let mut request = valid();
    request.name = "s3nt1nel!".into();
    request.placement =
        Some(v1::Placement { machine_type: "m".into(), image: format!("https://s3nt1nel@h/\n{}", "x".repeat(9)), ..Default::default() });
    let fault = create(&fixtures::entry("lab", &["hv1"]), request, None).expect_err("two are wrong");
    assert!(!format!("{fault:?}").contains("s3nt1nel"), "{fault:?}");
}

#[test]
fn a_wait_of_zero_is_kept_and_one_of_ages_is_cut() {
    let wait = |seconds| {
        create_of(v1::CreateRequest { max_wait: Some(prost_types::Duration { seconds, nanos: 0 }), ..valid() }).expect("valid").max_wait
    };
    assert_eq!(wait(0), Duration::ZERO);
    assert_eq!(wait(i64::MAX), LONGEST_WAIT);
}

#[test]
fn an_empty_entry_is_the_only_one_and_must_be_named_among_several() {
    let one = fixtures::config(&[("lab", &["hv1"])]);
    let two = fixtures::config(&[("lab", &["hv1"]), ("home", &["hv2"])]);
    assert_eq!(entry(&one, "").expect("the only one").name, "lab");
    assert_eq!(entry(&two, "home").expect("named").name, "home");
    assert_eq!(broken(entry(&two, "").expect_err("ambiguous")), [("entry".into(), Reason::EntryRequired)]);
    assert_eq!(broken(entry(&one, "x").expect_err("unknown")), [("entry".into(), Reason::EntryUnknown)]);
}

#[test]
fn a_zone_is_a_host_of_the_entry() {
    let one = fixtures::entry("lab", &["hv1"]);
    let two = fixtures::entry("lab", &["hv1", "hv2"]);
    assert_eq!(host(&one, "").expect("the only one"), "hv1");
    assert_eq!(broken(host(&two, "").expect_err("ambiguous")), [("zone".into(), Reason::ZoneRequired)]);
    assert_eq!(broken(host(&two, "hv3").expect_err("unknown")), [("zone".into(), Reason::ZoneUnknown)]);
}

#[test]
fn selectors_are_checked_and_required() {
    assert_eq!(broken(get(None).expect_err("none")), [("selector".into(), Reason::FieldInvalid)]);
    let id = v1::get_request::Selector::Id(v1::InstanceById::default());
    assert_eq!(broken(get(Some(id)).expect_err("empty")), [("id.instance_id".into(), Reason::IdMalformed)]);
    let key = v1::get_request::Selector::Key(v1::InstanceKey { name: "a".into(), ..Default::default() });
    assert_eq!(broken(get(Some(key)).expect_err("no uid")), [("key.uid".into(), Reason::UidInvalid)]);
}

#[test]
fn a_check_takes_at_most_five_minutes_and_more_than_nothing() {
    let seconds = |s| check(Some(&prost_types::Duration { seconds: s, nanos: 0 }), None);
    assert_eq!(check(None, None).expect("default"), DEFAULT_CHECK);
    assert_eq!(seconds(300).expect("the most"), LONGEST_CHECK);
    for s in [0, -1, 301] {
        assert!(seconds(s).is_err(), "{s}");
    }
}

#[test]
fn a_page_is_cut_to_the_limit_and_not_negative() {
    let page = |page_size| list(&fixtures::entry("lab", &["hv1"]), v1::ListByTagRequest { page_size, ..Default::default() });
    assert_eq!(page(0).expect("default").page_size, 1000);
    assert_eq!(page(5000).expect("cut").page_size, 1000);
    assert_eq!(page(7).expect("kept").page_size, 7);
    assert_eq!(broken(page(-1).expect_err("negative")), [("page_size".into(), Reason::FieldInvalid)]);
}
