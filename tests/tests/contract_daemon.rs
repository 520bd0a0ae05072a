//! The real daemon without any host: what it says about itself, and what it refuses.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use egress_provider_proto::v1::{
    Capability, CheckReason, CloudInit, CreateRequest, DeleteRequest, EvictImageRequest, GetProviderInfoRequest, GetRequest, InstanceById,
    ListByTagRequest, Placement, PrepareImageRequest, WatchEventsRequest, WatchImageRequest, delete_request, delete_response,
    evict_image_request,
};
use egress_provider_proto::v1::{DeleteResponse, ErrorReason as Reason};
use lab_tests::case::request;
use lab_tests::daemon::binary;
use lab_tests::poll::eventually_sync;
use lab_tests::tools::{call_grpcurl, grpcurl, ssh_key};
use lab_tests::{Clients, Daemon, EntryFile, ProvidersFile, refused};
use serde_json::json;
use tempfile::TempDir;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;

const PROVIDER: &str = "egressproxies.provider.v1.ProviderService";
const IMAGES: &str = "egressproxies.provider.v1.ImageService";
/// Only ends a test that would hang.
const LIMIT: Duration = Duration::from_secs(30);
/// Must turn up nowhere.
const SECRET: &str = "s3cr3t-d0-n0t-sh0w";

fn dir() -> TempDir {
    tempfile::Builder::new().prefix("kt-contract-").tempdir().expect("a temporary directory")
}

fn one_entry(dir: &Path) -> EntryFile {
    EntryFile::unreachable("home", &ssh_key(dir, "key"))
}

/// A daemon that serves one entry whose one host cannot be reached.
async fn daemon(dir: &TempDir) -> Daemon {
    Daemon::start(dir.path(), &one_entry(dir.path()).into()).await
}

#[tokio::test]
async fn a_daemon_whose_host_is_unreachable_serves_on_a_private_socket() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let mode = std::fs::metadata(daemon.socket()).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for service in ["", PROVIDER, IMAGES] {
        let answer = daemon.clients().health.check(HealthCheckRequest { service: service.to_owned() }).await.expect("health");
        assert_eq!(answer.get_ref().status(), ServingStatus::Serving, "{service:?}");
    }
}

#[tokio::test]
async fn a_second_daemon_on_a_socket_in_use_ends_and_the_first_goes_on() {
    let dir = dir();
    let first = daemon(&dir).await;
    let mut second = Daemon::spawn(dir.path(), &one_entry_again(dir.path()));
    let status = eventually_sync("the second daemon ends", LIMIT, || second.exited().ok_or_else(|| "it runs".into())).await;
    assert!(!status.success(), "{status}");
    first.clients().health.check(HealthCheckRequest::default()).await.expect("the first one serves");
}

/// The same file for a second daemon; the key is there already.
fn one_entry_again(dir: &Path) -> ProvidersFile {
    EntryFile::unreachable("home", &dir.join("key")).into()
}

#[tokio::test]
async fn a_socket_left_by_a_killed_daemon_is_replaced() {
    let dir = dir();
    let mut daemon = daemon(&dir).await;
    daemon.kill();
    assert!(daemon.socket().exists(), "a killed daemon tidies nothing");
    daemon.restart().await;
}

#[tokio::test]
async fn sigterm_ends_the_daemon_with_success_and_removes_its_socket() {
    let dir = dir();
    let mut daemon = daemon(&dir).await;
    let status = daemon.stop().await;
    assert!(status.success(), "{status}");
    assert!(!daemon.socket().exists());
}

#[tokio::test]
async fn a_broken_providers_file_ends_the_daemon_with_all_faults_named() {
    let dir = dir();
    let entry = one_entry(dir.path()).set("diskSizeGb", -1).set("maxVmss", 3).host_set("hv1", "bridge", "");
    let mut daemon = Daemon::spawn(dir.path(), &entry.into());
    let status = eventually_sync("the daemon ends", LIMIT, || daemon.exited().ok_or_else(|| "it runs".into())).await;
    assert!(!status.success(), "{status}");
    let log = daemon.log();
    for said in ["providers.yaml", "diskSizeGb", "-1", "maxVmss", "bridge"] {
        assert!(log.contains(said), "no {said:?} in:\n{log}");
    }
}

#[tokio::test]
async fn provider_info_tells_what_is_configured_and_only_what_is_served() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let info = daemon.clients().provider.get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    assert_eq!((info.provider_type.as_str(), info.contract_version.as_str()), ("kvm2", "egressproxies.provider.v1"));
    let [entry] = &info.entries[..] else { panic!("{:?}", info.entries) };
    assert_eq!((entry.name.as_str(), entry.disk_bytes), ("home", 1 << 30));
    assert_eq!(entry.hosts.iter().map(|h| (h.name.as_str(), h.address.as_str())).collect::<Vec<_>>(), [("hv1", "127.0.0.1:1")]);
    assert_eq!(entry.machine_types.iter().map(|m| m.key.as_str()).collect::<Vec<_>>(), ["nano", "small"]);
    assert_eq!(entry.images.iter().map(|i| i.key.as_str()).collect::<Vec<_>>(), ["tiny"]);
    let limits = entry.limits.expect("limits");
    assert!(limits.max_name_length >= 63 && limits.max_user_data_bytes >= 65536, "{limits:?}");
    for served in [Capability::Create, Capability::Get, Capability::Delete, Capability::List, Capability::Check] {
        assert!(entry.capabilities().any(|c| c == served), "{served:?}");
    }
    for not_served in not_served(&daemon.clients()).await {
        assert!(entry.capabilities().all(|c| c != not_served), "{not_served:?} is advertised and not served");
    }
}

/// The capabilities whose RPC is answered with CAPABILITY_MISSING. Each of these RPCs must answer that or be served.
async fn not_served(clients: &Clients) -> Vec<Capability> {
    let (mut provider, mut images) = (clients.provider.clone(), clients.images.clone());
    let target = Some(evict_image_request::Target::Image("tiny".into()));
    let statuses = [
        (Capability::WatchEvents, provider.watch_events(WatchEventsRequest::default()).await.err()),
        (Capability::ImagePrepare, images.prepare_image(PrepareImageRequest { image: "tiny".into(), ..Default::default() }).await.err()),
        (Capability::ImageWatch, images.watch_image(WatchImageRequest { image: "tiny".into(), ..Default::default() }).await.err()),
        (Capability::ImageEvict, images.evict_image(EvictImageRequest { target, ..Default::default() }).await.err()),
    ];
    let missing = statuses.into_iter().filter_map(|(capability, status)| {
        let status = status?;
        (status.code() == tonic::Code::Unimplemented).then(|| {
            refused::<()>(Err(status), Reason::CapabilityMissing);
            capability
        })
    });
    missing.collect()
}

#[tokio::test]
async fn every_bad_request_is_refused_with_its_own_reason() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let clients = daemon.clients();
    let good = || request("web-1", "", "tiny");
    let placed = |change: fn(&mut Placement)| {
        let mut request = good();
        change(request.placement.as_mut().expect("a placement"));
        request
    };
    let cases: Vec<(CreateRequest, Reason, &str)> = vec![
        (CreateRequest { name: String::new(), ..good() }, Reason::NameInvalid, "name"),
        (CreateRequest { name: "no_underscore".into(), ..good() }, Reason::NameInvalid, "name"),
        (CreateRequest { name: "../etc".into(), ..good() }, Reason::NameInvalid, "name"),
        (CreateRequest { name: "base-home-tiny".into(), ..good() }, Reason::NameInvalid, "name"),
        (CreateRequest { name: "x".repeat(300), ..good() }, Reason::NameInvalid, "name"),
        (CreateRequest { uid: String::new(), ..good() }, Reason::UidInvalid, "uid"),
        (CreateRequest { uid: "a b".into(), ..good() }, Reason::UidInvalid, "uid"),
        (CreateRequest { placement: None, ..good() }, Reason::FieldInvalid, "placement"),
        (CreateRequest { spec_hash: "x".repeat(129), ..good() }, Reason::FieldInvalid, "spec_hash"),
        (CreateRequest { port: 65536, ..good() }, Reason::FieldInvalid, "port"),
        (CreateRequest { max_wait: seconds_below_zero(), ..good() }, Reason::FieldInvalid, "max_wait"),
        (CreateRequest { entry: "elsewhere".into(), ..good() }, Reason::EntryUnknown, "entry"),
        (placed(|p| p.zone = "hv9".into()), Reason::ZoneUnknown, "placement.zone"),
        (placed(|p| p.machine_type = "huge".into()), Reason::MachineTypeUnknown, "placement.machine_type"),
        (placed(|p| p.image = "windows".into()), Reason::ImageUnknown, "placement.image"),
        (placed(|p| p.image = "ftp://images.example/x".into()), Reason::ImageUnknown, "placement.image"),
        (placed(|p| p.image = "http://169.254.169.254/x".into()), Reason::ImageUrlForbidden, "placement.image"),
        (placed(|p| p.image = "https://user:pw@images.example/x".into()), Reason::ImageUrlForbidden, "placement.image"),
    ];
    for (request, reason, field) in cases {
        let said = format!("{request:?}");
        let refusal = refused(clients.create(request).await, reason);
        assert!(refusal.fields.iter().any(|f| f == field), "{field} is not among {:?} for {said}", refusal.fields);
    }
    refused(clients.get("hosts/hv1/web-1", "").await, Reason::IdMalformed);
    refused(clients.delete("hosts/hv1/domains/web-1/x", "").await, Reason::IdMalformed);
    refused(clients.provider.clone().get(GetRequest::default()).await, Reason::FieldInvalid);
    let token = ListByTagRequest { page_token: "made-up".into(), ..Default::default() };
    refused(clients.provider.clone().list_by_tag(token).await, Reason::PageTokenInvalid);
}

fn seconds_below_zero() -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds: -1, nanos: 0 })
}

#[tokio::test]
async fn one_request_with_several_bad_fields_is_told_all_of_them() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let bad = CreateRequest { name: String::new(), uid: String::new(), placement: None, ..Default::default() };
    let refusal = lab_tests::Refusal::of(&daemon.clients().create(bad).await.expect_err("refused"));
    for field in ["name", "uid", "placement"] {
        assert!(refusal.fields.iter().any(|f| f == field), "no {field} in {:?}", refusal.fields);
    }
}

#[tokio::test]
async fn user_data_above_the_advertised_limit_is_refused_and_never_shown() {
    let dir = dir();
    let daemon = Daemon::start_talkative(dir.path(), &one_entry(dir.path()).into()).await;
    let clients = daemon.clients();
    let info = clients.provider.clone().get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    let limit = usize::try_from(info.entries[0].limits.expect("limits").max_user_data_bytes).expect("a limit that fits");
    let mut user_data = SECRET.as_bytes().to_vec();
    user_data.resize(limit + 1, b'#');
    let too_large = CreateRequest { cloud_init: Some(CloudInit { user_data: user_data.clone() }), ..request("web-1", "", "tiny") };
    let refusal = refused(clients.create(too_large).await, Reason::UserDataTooLarge);
    assert!(!refusal.message.contains(SECRET));
    user_data.truncate(limit);
    let just_fits = CreateRequest { cloud_init: Some(CloudInit { user_data }), ..request("web-1", "", "tiny") };
    let refusal = refused(clients.create(just_fits).await, Reason::HostUnreachable);
    assert!(!refusal.message.contains(SECRET));
    assert!(!daemon.log().contains(SECRET), "user-data in the log");
}

#[tokio::test]
async fn what_was_left_empty_is_asked_for_when_there_is_a_choice() {
    let dir = dir();
    let home = one_entry(dir.path());
    let host = |name: &str| json!({ "name": name, "address": "127.0.0.1:1", "user": "nobody", "bridge": "br0" });
    let away = EntryFile::unreachable("away", &dir.path().join("key")).set("hosts", json!([host("hv1"), host("hv2")]));
    let daemon = Daemon::start(dir.path(), &ProvidersFile::new([home, away])).await;
    let clients = daemon.clients();
    refused(clients.create(request("web-1", "", "tiny")).await, Reason::EntryRequired);
    refused(clients.check().await, Reason::EntryRequired);
    refused(clients.list().await, Reason::EntryRequired);
    let without_zone = CreateRequest { entry: "away".into(), ..request("web-1", "", "tiny") };
    refused(clients.create(without_zone).await, Reason::ZoneRequired);
}

#[tokio::test]
async fn an_unreachable_host_is_unavailable_to_create_and_get_and_a_row_for_check_and_list() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let clients = daemon.clients();
    let refusal = refused(clients.create(request("web-1", "", "tiny")).await, Reason::HostUnreachable);
    assert_eq!(refusal.metadata.get("host").map(String::as_str), Some("hv1"));
    refused(clients.get("hosts/hv1/domains/web-1", "").await, Reason::HostUnreachable);
    refused(clients.delete("hosts/hv1/domains/web-1", "").await, Reason::HostUnreachable);
    let check = clients.check().await.expect("check never fails for a host");
    let [row] = &check.hosts[..] else { panic!("{check:?}") };
    assert_eq!((row.healthy, row.reason(), row.error_reason.as_str()), (false, CheckReason::Unreachable, "HOST_UNREACHABLE"));
    assert!(!row.remediation.is_empty(), "{row:?}");
    let list = clients.list().await.expect("a listing with a gap");
    assert!(!list.complete && list.unreachable_hosts.iter().any(|h| h.host == "hv1"), "{list:?}");
    refused(clients.list_complete().await, Reason::ListingIncomplete);
}

#[tokio::test]
async fn an_instance_on_a_host_that_is_not_configured_is_given_up_only_on_demand() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let clients = daemon.clients();
    let id = "hosts/retired/domains/web-1";
    refused(clients.get(id, "").await, Reason::HostNotConfigured);
    refused(clients.delete(id, "uid").await, Reason::HostNotConfigured);
    let selector = delete_request::Selector::Id(InstanceById { instance_id: id.into(), uid: "uid".into(), ..Default::default() });
    let abandon = DeleteRequest { selector: Some(selector), abandon_unknown_host: true, ..Default::default() };
    let answer: DeleteResponse = clients.provider.clone().delete(abandon).await.expect("abandoned").into_inner();
    assert_eq!(answer.outcome(), delete_response::Outcome::Abandoned);
}

#[tokio::test]
async fn an_absent_key_is_transient_and_a_broken_one_permanent_and_its_text_never_shown() {
    let dir = dir();
    let key = dir.path().join("key");
    let daemon = Daemon::start_talkative(dir.path(), &EntryFile::unreachable("home", &key).into()).await;
    let clients = daemon.clients();
    refused(clients.create(request("web-1", "", "tiny")).await, Reason::CredentialsUnavailable);
    std::fs::write(&key, format!("-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----\n")).expect("a file");
    let refusal = refused(clients.create(request("web-1", "", "tiny")).await, Reason::KeyUnparsable);
    assert!(!refusal.message.contains(SECRET));
    let check = clients.check().await.expect("a table");
    assert_eq!(check.hosts[0].reason(), CheckReason::CredentialsUnavailable);
    assert!(!daemon.log().contains(SECRET), "key material in the log");
}

#[tokio::test]
async fn the_query_of_an_image_url_is_shown_nowhere() {
    let dir = dir();
    let url = format!("http://127.0.0.1:1/tiny.qcow2?token={SECRET}");
    let entry = one_entry(dir.path())
        .image_set("tiny", "url", url.clone())
        .set("urlPolicy", json!({ "allow": ["127.0.0.0/8"], "allowHttp": true }));
    let daemon = Daemon::start_talkative(dir.path(), &entry.into()).await;
    let clients = daemon.clients();
    let info = clients.provider.clone().get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    assert!(!format!("{info:?}").contains(SECRET), "{info:?}");
    let refusal = refused(clients.create(request("web-1", "", &url)).await, Reason::HostUnreachable);
    assert!(!refusal.message.contains(SECRET) && !format!("{:?}", refusal.metadata).contains(SECRET), "{refusal:?}");
    assert!(!daemon.log().contains(SECRET), "the query in the log");
}

#[tokio::test]
async fn grpcurl_lists_describes_and_calls_without_proto_files() {
    let Some(grpcurl) = grpcurl("grpcurl_lists_describes_and_calls_without_proto_files") else { return };
    let dir = dir();
    let daemon = daemon(&dir).await;
    let call = |flags: &[&str], target: &[&str]| call_grpcurl(&grpcurl, &daemon.socket(), flags, target);
    let list = call(&[], &["list"]);
    for service in [PROVIDER, IMAGES, "grpc.health.v1.Health"] {
        assert!(list.stdout.lines().any(|line| line == service), "{list:?}");
    }
    let describe = call(&[], &["describe", PROVIDER]);
    assert!(describe.stdout.contains("rpc Create"), "{describe:?}");
    let info = call(&[], &[&format!("{PROVIDER}/GetProviderInfo")]);
    assert!(info.success && info.stdout.contains("\"providerType\": \"kvm2\""), "{info:?}");
}

#[tokio::test]
async fn a_failing_call_by_grpcurl_can_be_read_by_a_person() {
    let Some(grpcurl) = grpcurl("a_failing_call_by_grpcurl_can_be_read_by_a_person") else { return };
    let dir = dir();
    let daemon = daemon(&dir).await;
    let request = r#"{"name": "web-1", "uid": "u1", "placement": {"machine_type": "huge", "image": "tiny"}}"#;
    let said = call_grpcurl(&grpcurl, &daemon.socket(), &["-d", request], &[&format!("{PROVIDER}/Create")]);
    assert!(!said.success, "{said:?}");
    for part in ["Code: InvalidArgument", "huge", "MACHINE_TYPE_UNKNOWN"] {
        assert!(said.stderr.contains(part), "no {part:?} in {}", said.stderr);
    }
}

#[tokio::test]
async fn a_changed_providers_file_is_served_without_a_restart_and_a_broken_one_is_not() {
    let dir = dir();
    let daemon = daemon(&dir).await;
    let mut provider = daemon.clients().provider;
    let machines = async |provider: &mut egress_provider_proto::v1::provider_service_client::ProviderServiceClient<_>| {
        let info = provider.get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
        info.entries[0].machine_types.iter().map(|m| m.key.clone()).collect::<Vec<_>>()
    };
    let entry = || EntryFile::unreachable("home", &dir.path().join("key"));
    let large = json!({ "large": { "vcpus": 4, "memoryMiB": 8192 } });
    daemon.reconfigure(&entry().set("machineTypes", large.clone()).into(), "large").await;
    assert_eq!(machines(&mut provider).await, ["large"]);
    daemon.reconfigure(&entry().set("machineTypes", json!({})).into(), "machineTypes").await;
    assert_eq!(machines(&mut provider).await, ["large"], "a broken file changes nothing");
}

#[tokio::test]
async fn a_check_repeats_what_is_unsafe_in_the_configuration() {
    let dir = dir();
    let plain = json!({ "url": "http://127.0.0.1:1/plain.qcow2", "firmware": "bios" });
    let daemon = Daemon::start(dir.path(), &one_entry(dir.path()).image("plain", plain).into()).await;
    assert!(daemon.log().contains("image plain comes over plain http"), "{}", daemon.log());
    let rows = daemon.clients().check().await.expect("a table").hosts;
    let [warning] = &rows[0].details.as_ref().expect("details").warnings[..] else { panic!("{rows:?}") };
    assert!(warning.contains("image plain comes over plain http"), "{warning}");
}

#[test]
fn config_check_says_what_a_file_means_or_everything_that_is_wrong() {
    let dir = dir();
    let check = |path: &Path| {
        let output =
            std::process::Command::new(binary()).args(["config", "check"]).arg(path).env_clear().output().expect("running the daemon");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (good, said) = check(&ProvidersFile::from(one_entry(dir.path())).write(dir.path()));
    assert!(good && said.contains("home") && said.contains("hv1"), "{said}");
    let broken = one_entry_broken(dir.path());
    let (good, said) = check(&broken.write(dir.path()));
    assert!(!good && said.contains("sshKeyfile") && said.contains("0x"), "{said}");
}

/// An unknown key and a bad value.
fn one_entry_broken(dir: &Path) -> ProvidersFile {
    EntryFile::unreachable("home", &dir.join("key")).set("sshKeyfile", "x").image_set("tiny", "sha256", "0x").into()
}
