//! The built program with the loudest settings that there are.

use lab_tests::{Case, Collector, Daemon};

use super::life::{BEARER, HOST, Life, PROXY};

/// More cannot be asked for: names are those of modules of ours.
const LEVELS: &str = "trace,russh=trace,h2=trace,hyper=trace,reqwest=trace,rustls=trace,::russh=trace,log=trace";

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

        let (log, spans) = (daemon.log(), collector.text());
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
