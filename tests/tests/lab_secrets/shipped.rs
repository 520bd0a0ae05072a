//! The built program with the loudest settings that there are.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use lab_tests::{Case, Daemon};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use super::life::{BEARER, HOST, Life, PROXY};

/// More cannot be asked for: names are those of modules of ours.
const LEVELS: &str = "trace,russh=trace,h2=trace,hyper=trace,reqwest=trace,rustls=trace,::russh=trace,log=trace";

/// A collector that keeps what it is sent, headers included.
#[derive(Debug, Clone, Default)]
struct Collector(Arc<Mutex<Vec<String>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(&self, request: Request<ExportTraceServiceRequest>) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{:?}", request.into_inner()));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start() -> (Self, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let collector = Self::default();
        let service = TraceServiceServer::new(collector.clone());
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
        (collector, address)
    }

    fn spans(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_loudest_daemon_shows_no_secret_in_logs_spans_metrics_or_answers() {
    let Some(case) = Case::start("secrets", &[HOST]) else { return };
    let life = Life::prepare(&case).await;
    for format in ["text", "json"] {
        let dir = case.dir().join(format);
        std::fs::create_dir(&dir).expect("a directory");
        let (collector, at) = Collector::start().await;
        let variables = vec![
            // what other programs listen to
            ("RUST_LOG", "trace".to_owned()),
            ("LIBVIRT_DEBUG", "1".to_owned()),
            ("OTEL_LOG_LEVEL", "debug".to_owned()),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{at}")),
            ("OTEL_EXPORTER_OTLP_HEADERS", format!("authorization=Bearer {BEARER},b d={BEARER}")),
            ("HTTPS_PROXY", format!("http://u:{PROXY}@127.0.0.1:1")),
        ];
        let mut daemon = Daemon::start_logging(&dir, &life.file, LEVELS, format, variables).await;
        let clients = daemon.clients();
        let answers = life.live(&case, &clients, daemon.config_path(), || async { daemon.log() }).await;
        let metrics = daemon.metrics_addr().expect("it says where");
        let shown = reqwest::get(format!("http://{metrics}/metrics")).await.expect("metrics").text().await.expect("text");
        let status = daemon.stop().await;
        assert!(status.success(), "{status}");

        let (log, spans) = (daemon.log(), collector.spans());
        // what is looked through is what it should be
        for (what, text) in [("link dialled", &log), ("domain document", &log), ("kvm2.define_domain", &spans), ("kvm2_rpcs_total", &shown)]
        {
            assert!(text.contains(what), "no {what:?}: {text}");
        }
        life.sentinels.assert_absent(&format!("the log ({format})"), &log);
        life.sentinels.assert_absent("a span", &spans);
        life.sentinels.assert_absent("a metric", &shown);
        life.sentinels.assert_absent("an answer", &answers.join("\n"));
    }
}
