//! The real server over a real socket, with scripted operations behind it.

mod contract_service {
    pub(crate) mod collector;
    pub(crate) mod double;
}

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract_service::collector::Collector;
use contract_service::double::{Double, config, instance};
use egress_provider_proto::ERROR_DOMAIN;
use egress_provider_proto::v1::image_service_client::ImageServiceClient;
use egress_provider_proto::v1::provider_service_client::ProviderServiceClient;
use egress_provider_proto::v1::{self, ErrorReason};
use provider_kvm2::error::ProviderError;
use provider_kvm2::service::listener::{ListenError, Listener};
use provider_kvm2::service::server::Tls;
use provider_kvm2::service::{MAX_USER_DATA, ServeOptions, serve};
use provider_kvm2::telemetry::logs::{LogFormat, Telemetry, TelemetryOptions};
use provider_kvm2::telemetry::metrics::Metrics;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt as _;

const SENTINEL: &str = "s3nt1nel-user-data";

/// A server on a socket in a directory of its own.
struct Served {
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    ended: JoinHandle<Result<(), provider_kvm2::service::server::ServeError>>,
    metrics: Metrics,
    _directory: tempfile::TempDir,
}

impl Served {
    fn start(double: &Double) -> Self {
        Self::with(double, ServeOptions::default())
    }

    fn with(double: &Double, options: ServeOptions) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("p.sock");
        let listener = Listener::unix(&socket).expect("nothing is there");
        let (stop, stopped) = oneshot::channel();
        let metrics = Metrics::new();
        let served = serve(Arc::new(double.clone()), metrics.clone(), listener, options, async { stopped.await.unwrap_or_default() });
        Self { socket, stop: Some(stop), ended: tokio::spawn(served), metrics, _directory: directory }
    }

    async fn channel(&self) -> Channel {
        let uri = format!("unix:{}", self.socket.display());
        Endpoint::from_shared(uri).expect("a path").connect().await.expect("it serves")
    }

    async fn provider(&self) -> ProviderServiceClient<Channel> {
        ProviderServiceClient::new(self.channel().await)
    }

    fn stop(&mut self) {
        self.stop.take().expect("stopped once").send(()).expect("it runs");
    }

    async fn end(mut self) {
        if self.stop.is_some() {
            self.stop();
        }
        self.ended.await.expect("no panic").expect("a clean end");
    }
}

fn get() -> v1::GetRequest {
    let id = v1::InstanceById { instance_id: "hosts/hv1/domains/web-1".into(), ..Default::default() };
    v1::GetRequest { entry: String::new(), selector: Some(v1::get_request::Selector::Id(id)) }
}

fn create() -> v1::CreateRequest {
    v1::CreateRequest {
        name: "web-1".into(),
        uid: "u-1".into(),
        placement: Some(v1::Placement { machine_type: "small".into(), image: "debian-13".into(), ..Default::default() }),
        cloud_init: Some(v1::CloudInit { user_data: SENTINEL.into() }),
        ..Default::default()
    }
}

fn reason(status: &Status) -> String {
    let infos: Vec<_> = status
        .get_error_details_vec()
        .into_iter()
        .filter_map(|d| match d {
            tonic_types::ErrorDetail::ErrorInfo(info) => Some(info),
            _ => None,
        })
        .collect();
    let [info] = &infos[..] else { panic!("exactly one ErrorInfo: {status:?}") };
    assert_eq!(info.domain, ERROR_DOMAIN);
    info.reason.clone()
}

#[tokio::test]
async fn every_reason_arrives_with_its_code_and_details() {
    let double = Double::new();
    let served = Served::start(&double);
    let mut client = served.provider().await;
    for wanted in ErrorReason::all() {
        double.fail_get(ProviderError::new(wanted, "it failed").on_host("hv1").retry_after(Duration::from_secs(4)));
        let status = client.get(get()).await.expect_err("it is told to fail");
        assert_eq!(status.code(), wanted.grpc_code(), "{wanted:?}");
        assert_eq!(reason(&status), wanted.wire_name());
        let details = status.get_error_details();
        assert_eq!(details.retry_info().and_then(|r| r.retry_delay), Some(Duration::from_secs(4)));
        assert_eq!(details.error_info().expect("checked").metadata["host"], "hv1");
    }
    served.end().await;
}

#[tokio::test]
async fn a_request_with_many_faults_names_all_of_them_and_reaches_no_operation() {
    let double = Double::new();
    let served = Served::start(&double);
    let bad = v1::CreateRequest { name: "NO".into(), uid: String::new(), placement: None, port: 70000, ..create() };
    let status = served.provider().await.create(bad).await.expect_err("four fields are wrong");
    let details = status.get_error_details();
    let fields: Vec<_> = details.bad_request().expect("it has one").field_violations.iter().map(|v| v.field.as_str()).collect();
    assert_eq!((status.code(), &fields[..]), (Code::InvalidArgument, &["name", "uid", "placement", "port"][..]));
    assert_eq!(double.calls(), Vec::<String>::new());
    served.end().await;
}

#[tokio::test]
async fn user_data_beyond_the_limit_is_refused_by_name_whatever_its_size() {
    let served = Served::start(&Double::new());
    let mut client = served.provider().await;
    for size in [MAX_USER_DATA + 1, 5 << 20] {
        let large = v1::CreateRequest { cloud_init: Some(v1::CloudInit { user_data: vec![b'x'; size] }), ..create() };
        let status = client.create(large).await.expect_err("it is too large");
        assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "USER_DATA_TOO_LARGE"), "{size}");
    }
    let largest = v1::CreateRequest { cloud_init: Some(v1::CloudInit { user_data: vec![b'x'; MAX_USER_DATA] }), ..create() };
    client.create(largest).await.expect("it just fits");
    served.end().await;
}

#[tokio::test]
async fn what_is_not_offered_says_so_and_is_not_advertised() {
    let served = Served::start(&Double::new());
    let mut provider = served.provider().await;
    let mut images = ImageServiceClient::new(served.channel().await);
    let refusals = [
        provider.watch_events(v1::WatchEventsRequest::default()).await.map(drop),
        images.prepare_image(v1::PrepareImageRequest::default()).await.map(drop),
        images.watch_image(v1::WatchImageRequest::default()).await.map(drop),
        images.evict_image(v1::EvictImageRequest::default()).await.map(drop),
    ];
    for refusal in refusals {
        let status = refusal.expect_err("it is not offered");
        assert_eq!((status.code(), reason(&status).as_str()), (Code::Unimplemented, "CAPABILITY_MISSING"));
    }
    let info = provider.get_provider_info(v1::GetProviderInfoRequest::default()).await.expect("no host is asked").into_inner();
    assert!(!info.entries[0].capabilities.contains(&v1::Capability::WatchEvents.into()));
    served.end().await;
}

#[tokio::test]
async fn a_deadline_ends_the_wait_with_a_reason_and_the_daemon_lives() {
    let double = Double::new();
    double.hang();
    let served = Served::start(&double);
    let mut client = served.provider().await;
    let mut request = Request::new(get());
    request.set_timeout(Duration::from_secs(1));
    let status = client.get(request).await.expect_err("it hangs");
    assert_eq!((status.code(), reason(&status).as_str()), (Code::DeadlineExceeded, "CALL_TIMEOUT"));
    double.answer();
    client.get(get()).await.expect("it serves on");
    served.end().await;
}

#[tokio::test]
async fn a_create_waits_no_longer_than_its_caller() {
    let double = Double::new();
    let served = Served::start(&double);
    let mut request = Request::new(create());
    request.set_timeout(Duration::from_secs(10));
    served.provider().await.create(request).await.expect("it answers at once");
    let wait = double.last_max_wait().expect("it was asked");
    assert!(wait < Duration::from_secs(10), "{wait:?}");
    served.end().await;
}

#[tokio::test]
async fn a_panic_in_an_operation_fails_one_call() {
    let double = Double::new();
    double.panic_once();
    let served = Served::start(&double);
    let mut client = served.provider().await;
    let status = client.get(get()).await.expect_err("it panics");
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Internal, "INTERNAL"));
    assert!(!status.message().contains(SENTINEL));
    client.get(get()).await.expect("it serves on");
    assert!(served.metrics.encode().contains(r#"kvm2_rpcs_total{method="Get",code="INTERNAL",reason="INTERNAL"} 1"#));
    served.end().await;
}

#[tokio::test]
async fn on_stop_health_flips_before_calls_in_flight_end_and_new_ones_are_refused() {
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let double = Double::new();
    let mut served = Served::start(&double);
    let mut client = served.provider().await;
    let mut health = HealthClient::new(served.channel().await).watch(HealthCheckRequest::default()).await.expect("it serves").into_inner();
    assert_eq!(health.message().await.expect("open").expect("a state").status(), ServingStatus::Serving);

    double.hang();
    let mut caller = client.clone();
    let in_flight = tokio::spawn(async move { caller.get(get()).await });
    double.entered().await;
    served.stop();
    assert_eq!(health.message().await.expect("open").expect("a state").status(), ServingStatus::NotServing);
    assert!(!in_flight.is_finished());
    let refused = client.get(get()).await.expect_err("it takes no more calls");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unavailable, "SHUTTING_DOWN"));
    assert!(!served.socket.exists(), "a successor may have the name");

    double.answer();
    in_flight.await.expect("no panic").expect("it was in flight");
    served.ended.await.expect("no panic").expect("a watch of the health does not hold the end up");
}

#[tokio::test]
async fn a_call_that_outlives_the_drain_is_cut() {
    let double = Double::new();
    double.hang();
    let mut served = Served::with(&double, ServeOptions { drain: Duration::ZERO, ..Default::default() });
    let mut caller = served.provider().await;
    let in_flight = tokio::spawn(async move { caller.get(get()).await });
    double.entered().await;
    served.stop();
    served.ended.await.expect("no panic").expect("it ends although a call hangs");
    in_flight.await.expect("no panic").expect_err("its connection is gone");
}

#[tokio::test]
async fn more_calls_than_places_are_told_to_come_back() {
    let double = Double::new();
    double.hang();
    let served = Served::with(&double, ServeOptions { max_calls: 1, ..Default::default() });
    let mut client = served.provider().await;
    let mut caller = client.clone();
    let busy = tokio::spawn(async move { caller.get(get()).await });
    double.entered().await;
    let status = client.get(get()).await.expect_err("the only place is taken");
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "OVERLOADED"));
    double.answer();
    busy.await.expect("no panic").expect("it had the place");
    served.end().await;
}

#[tokio::test]
async fn the_socket_is_private_and_a_second_daemon_is_refused() {
    let served = Served::start(&Double::new());
    let mode = std::fs::metadata(&served.socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(Listener::unix(&served.socket), Err(ListenError::InUse { .. })));
    served.provider().await.get(get()).await.expect("the first one was not disturbed");
    served.end().await;
}

/// A CA and a certificate of it for `localhost`: (CA, certificate, key), all PEM.
fn certificates() -> (String, String, String) {
    let ca_key = rcgen::KeyPair::generate().expect("a key");
    let mut ca = rcgen::CertificateParams::new(Vec::new()).expect("no names");
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).expect("a CA").pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    (ca_pem, certificate.pem(), key.serialize_pem())
}

#[tokio::test]
async fn over_tcp_only_clients_with_a_certificate_are_served() {
    use tonic::transport::{Certificate, ClientTlsConfig, Identity};
    let (ca, certificate, key) = certificates();
    let tls = Tls { certificate: certificate.clone().into(), key: key.clone().into_bytes().into(), client_ca: ca.clone().into() };
    let listener = Listener::tcp(([127, 0, 0, 1], 0).into()).await.expect("a free port");
    let uri = format!("https://localhost:{}", listener.local_addr().expect("it is TCP").port());
    let (stop, stopped) = oneshot::channel::<()>();
    let options = ServeOptions { tls: Some(tls), ..Default::default() };
    let serving =
        tokio::spawn(serve(Arc::new(Double::new()), Metrics::new(), listener, options, async { stopped.await.unwrap_or_default() }));

    let trusting = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca));
    let with = trusting.clone().identity(Identity::from_pem(&certificate, &key));
    let endpoint = |tls| Endpoint::from_shared(uri.clone()).expect("a URI").tls_config(tls).expect("good PEM");
    let known = endpoint(with).connect().await.expect("its certificate is of the CA");
    ProviderServiceClient::new(known).get(get()).await.expect("it is served");
    // with TLS 1.3 the refusal may arrive only with the first call
    let unknown = match endpoint(trusting).connect().await {
        Ok(channel) => ProviderServiceClient::new(channel).get(get()).await.map(drop).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    assert!(unknown.is_err(), "a client without a certificate was served");
    stop.send(()).expect("it runs");
    serving.await.expect("no panic").expect("a clean end");
}

#[tokio::test]
async fn reflection_lists_the_services_in_both_versions() {
    let served = Served::start(&Double::new());
    let channel = served.channel().await;
    let mut names = Vec::new();
    {
        use tonic_reflection::pb::v1::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient, server_reflection_request::MessageRequest,
            server_reflection_response::MessageResponse,
        };
        for ask in [MessageRequest::ListServices(String::new()), MessageRequest::FileContainingSymbol("google.rpc.ErrorInfo".into())] {
            let request = ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
            let mut client = ServerReflectionClient::new(channel.clone());
            let mut answers = client.server_reflection_info(tokio_stream::once(request)).await.expect("v1").into_inner();
            match answers.message().await.expect("open").expect("an answer").message_response {
                Some(MessageResponse::ListServicesResponse(list)) => names.extend(list.service.into_iter().map(|s| s.name)),
                Some(MessageResponse::FileDescriptorResponse(_)) => names.push("google.rpc.ErrorInfo".into()),
                other => panic!("{other:?}"),
            }
        }
    }
    for name in [
        "egressproxies.provider.v1.ProviderService",
        "egressproxies.provider.v1.ImageService",
        "grpc.health.v1.Health",
        "google.rpc.ErrorInfo",
    ] {
        assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
    }
    {
        use tonic_reflection::pb::v1alpha::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient, server_reflection_request::MessageRequest,
        };
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(MessageRequest::ListServices(String::new())) };
        let mut client = ServerReflectionClient::new(channel);
        let mut answers = client.server_reflection_info(tokio_stream::once(request)).await.expect("v1alpha").into_inner();
        assert!(answers.message().await.expect("open").is_some());
    }
    served.end().await;
}

#[tokio::test]
async fn an_instance_arrives_whole_and_its_image_list_without_secrets() {
    let double = Double::new();
    let served = Served::start(&double);
    let got = served.provider().await.get(get()).await.expect("it answers").into_inner().instance.expect("it has one");
    let wanted = instance();
    assert_eq!((got.instance_id, got.name, got.entry), (wanted.id.to_string(), "web-1".into(), "lab".into()));
    assert_eq!(got.state, i32::from(v1::InstanceState::Running));
    assert!(got.addresses[0].primary && got.addresses[0].ip == "192.0.2.7", "{:?}", got.addresses);
    assert_eq!(config().entries.len(), 1);
    let mut images = ImageServiceClient::new(served.channel().await);
    let listed = images.list_images(v1::ListImagesRequest::default()).await.expect("it answers").into_inner();
    assert!(listed.complete && listed.images.is_empty());
    let absent = v1::GetImageRequest { image: "debian-13".into(), ..Default::default() };
    assert_eq!(reason(&images.get_image(absent).await.expect_err("nothing is cached")), "IMAGE_NOT_CACHED");
    served.end().await;
}

/// Everything that was logged, as one text.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no writer panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One test for logs and spans: the subscriber is the process's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_are_the_callers_children_and_nothing_secret_leaves_the_process() {
    let collector = Collector::start().await;
    let lines = Lines::default();
    let options =
        TelemetryOptions { format: LogFormat::Json, levels: "trace".parse().expect("a level"), otlp_endpoint: Some(collector.endpoint()) };
    let writer = lines.clone();
    let (subscriber, telemetry) = Telemetry::subscriber(&options, move || writer.clone()).expect("a collector");
    tracing::subscriber::set_global_default(subscriber).expect("the only test that sets one");

    let double = Double::new();
    let served = Served::start(&double);
    let mut client = served.provider().await;
    // other tests of this process are traced as well: each call is known by its trace
    let (traced_create, traced_get) = ("0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736");
    let parent = |trace: &str| format!("00-{trace}-b7ad6b7169203331-01").parse().expect("ascii");
    let mut request = Request::new(create());
    let metadata = request.metadata_mut();
    metadata.insert("traceparent", parent(traced_create));
    metadata.insert("authorization", format!("Bearer {SENTINEL}").parse().expect("ascii"));
    metadata.insert("x-token", SENTINEL.parse().expect("ascii"));
    client.create(request).await.expect("it answers");
    double.fail_get(ProviderError::new(ErrorReason::BridgeMissing, "no bridge br0 on host hv1").on_host("hv1"));
    let mut request = Request::new(get());
    request.metadata_mut().insert("traceparent", parent(traced_get));
    let status = client.get(request).await.expect_err("it is told to fail");
    let mut large = create();
    large.placement.as_mut().expect("set").image = format!("https://user:{SENTINEL}@h/\n");
    let rejected = client.create(large).await.expect_err("a control character");
    served.end().await;
    tokio::task::spawn_blocking(|| telemetry.flush()).await.expect("no panic");

    let spans = collector.spans();
    let of = |name: &str, trace: &str| spans.iter().find(|s| s.name == name && hex::encode(&s.trace_id) == trace).expect("it was exported");
    assert_eq!(hex::encode(&of("Create", traced_create).parent_span_id), "b7ad6b7169203331");
    let failed = of("Get", traced_get);
    assert_eq!(failed.status.as_ref().map(|s| s.code), Some(2), "{failed:?}");

    let log = String::from_utf8(lines.0.lock().expect("no writer panics").clone()).expect("text");
    assert!(log.contains(r#""code":"FAILED_PRECONDITION","reason":"BRIDGE_MISSING","host":"hv1""#), "{log}");
    assert!(log.contains(traced_create), "{log}");
    for text in [log, format!("{spans:?}"), format!("{status:?}"), format!("{rejected:?}")] {
        assert!(!text.contains(SENTINEL), "{text}");
    }
}
