//! Logs on stderr and spans to an OpenTelemetry collector.
//!
//! Levels follow the tiers of the provider: `debug` is one line per call and per
//! outcome, `trace` adds documents and addresses. Only this crate can be made
//! more talkative than `warn`: what others log at their lower levels, headers
//! and packets among it, is theirs to change, and nothing secret may pass here.

use std::fmt;
use std::io;
use std::str::FromStr;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Name of this crate in the targets of its spans and lines.
const OWN: &str = "provider_kvm2";

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// `info`, or `info,link=debug` to make one module of ours more or less talkative.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLevels {
    default: LevelFilter,
    modules: Vec<(String, LevelFilter)>,
}

impl FromStr for LogLevels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let level = |word: &str| {
            word.parse::<LevelFilter>().map_err(|_| format!("{word:?} is no level: use off, error, warn, info, debug or trace"))
        };
        let mut levels = Self { default: LevelFilter::INFO, modules: Vec::new() };
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            match part.split_once('=') {
                None => levels.default = level(part)?,
                Some((module, word)) if module.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':')) => {
                    levels.modules.push((module.to_owned(), level(word)?));
                }
                Some((module, _)) => return Err(format!("{module:?} is no module")),
            }
        }
        Ok(levels)
    }
}

impl LogLevels {
    fn filter(&self) -> Targets {
        let others = self.default.min(LevelFilter::WARN);
        let own = Targets::new().with_default(others).with_target(OWN, self.default);
        self.modules.iter().fold(own, |t, (module, level)| t.with_target(format!("{OWN}::{module}"), *level))
    }
}

#[derive(Debug, Clone)]
pub struct TelemetryOptions {
    pub format: LogFormat,
    pub levels: LogLevels,
    /// `http://host:4317`; None: no spans leave the process.
    pub otlp_endpoint: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("the OTLP endpoint has to be http://HOST:PORT: run a collector beside this daemon")]
    Endpoint,
    #[error("the OTLP exporter cannot be made")]
    Exporter(#[source] opentelemetry_otlp::ExporterBuildError),
    #[error("logging is set up already")]
    Twice(#[source] tracing_subscriber::util::TryInitError),
}

/// What has to be flushed at the end of the process.
#[must_use = "spans that are not flushed are lost"]
pub struct Telemetry {
    tracers: Option<SdkTracerProvider>,
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry").field("exports", &self.tracers.is_some()).finish()
    }
}

impl Telemetry {
    /// Sets logging and tracing up for the whole process. Within a tokio runtime where spans are exported.
    pub fn install(options: &TelemetryOptions) -> Result<Self, TelemetryError> {
        let (subscriber, telemetry) = Self::subscriber(options, io::stderr)?;
        subscriber.try_init().map_err(TelemetryError::Twice)?;
        std::panic::set_hook(Box::new(log_panic));
        Ok(telemetry)
    }

    /// As [`install`](Self::install), for whoever wants to choose the writer and set the subscriber themselves.
    pub fn subscriber<W>(options: &TelemetryOptions, writer: W) -> Result<(impl Subscriber + Send + Sync + use<W>, Self), TelemetryError>
    where
        W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
    {
        opentelemetry::global::set_text_map_propagator(opentelemetry_sdk::propagation::TraceContextPropagator::new());
        let tracers = options.otlp_endpoint.as_deref().map(tracers).transpose()?;
        // spans are exported whatever the level of the log is, but never what only trace may tell
        let spans = tracers.as_ref().map(|t| {
            let filter = Targets::new().with_target(OWN, LevelFilter::DEBUG);
            tracing_opentelemetry::layer().with_tracer(t.tracer(OWN)).with_location(false).with_threads(false).with_filter(filter)
        });
        let lines = tracing_subscriber::fmt::layer().with_writer(writer);
        let lines = match options.format {
            LogFormat::Text => lines.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).boxed(),
            LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).boxed(),
        };
        let subscriber = tracing_subscriber::registry().with(spans).with(lines.with_filter(options.levels.filter()));
        Ok((subscriber, Self { tracers }))
    }

    /// Sends what has not been sent. Blocks for up to a few seconds.
    pub fn flush(self) {
        if let Some(tracers) = self.tracers {
            // at the end of the process there is nobody left to tell
            let _ = tracers.shutdown();
        }
    }
}

fn tracers(endpoint: &str) -> Result<SdkTracerProvider, TelemetryError> {
    // without TLS in the exporter an https endpoint would fail later and silently
    if !endpoint.starts_with("http://") || endpoint.contains('@') {
        return Err(TelemetryError::Endpoint);
    }
    let exporter =
        opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(TelemetryError::Exporter)?;
    let resource = opentelemetry_sdk::Resource::builder()
        .with_service_name("kvm2-providerd")
        .with_attribute(opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// Logs where a panic happened. Of its text only a literal is shown: a formatted one may hold anything.
fn log_panic(info: &std::panic::PanicHookInfo<'_>) {
    let at = info.location().map(ToString::to_string).unwrap_or_default();
    let text = info.payload().downcast_ref::<&'static str>().copied().unwrap_or("(text withheld)");
    tracing::error!(at, text, "panic: this is a bug, please report it");
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no writer panics").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(levels: &str, format: LogFormat, log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let options = TelemetryOptions { format, levels: levels.parse().expect("levels"), otlp_endpoint: None };
        let writer = lines.clone();
        let (subscriber, _telemetry) = Telemetry::subscriber(&options, move || writer.clone()).expect("no exporter");
        tracing::subscriber::with_default(subscriber, log);
        String::from_utf8(lines.0.lock().expect("no writer panics").clone()).expect("text")
    }

    #[test]
    fn other_crates_stay_at_warn_whatever_is_asked_for() {
        let text = logged("trace", LogFormat::Text, || {
            for_other_crates();
            tracing::trace!(target: "provider_kvm2::link", "ours at trace");
        });
        assert!(text.contains("ours at trace") && text.contains("theirs at warn"), "{text}");
        assert!(!text.contains("s3nt1nel"), "{text}");
    }

    fn for_other_crates() {
        tracing::info!(target: "russh::client", "s3nt1nel");
        tracing::trace!(target: "h2::codec", "s3nt1nel");
        tracing::debug!(target: "hyper_util", "s3nt1nel");
        tracing::warn!(target: "russh::client", "theirs at warn");
    }

    #[test]
    fn one_module_can_be_made_talkative() {
        let text = logged("warn,link=debug", LogFormat::Text, || {
            tracing::debug!(target: "provider_kvm2::link::dial", "dialled");
            tracing::info!(target: "provider_kvm2::image", "quiet");
        });
        assert!(text.contains("dialled") && !text.contains("quiet"), "{text}");
    }

    #[test]
    fn a_json_line_is_an_object_with_its_fields_and_spans() {
        let text = logged("debug", LogFormat::Json, || {
            let _span = tracing::info_span!(target: "provider_kvm2::service", "rpc", rpc.method = "Get").entered();
            tracing::debug!(target: "provider_kvm2::service", code = "OK", "rpc answered");
        });
        let line: serde_json::Value = serde_json::from_str(text.trim()).expect("one object");
        assert_eq!((line["code"].as_str(), line["message"].as_str()), (Some("OK"), Some("rpc answered")));
        assert_eq!(line["spans"][0]["rpc.method"], "Get");
    }

    #[test]
    fn bad_levels_are_refused_by_name() {
        for text in ["loud", "link=loud", "a b=info"] {
            assert!(text.parse::<LogLevels>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_endpoint_that_could_only_fail_later_is_refused() {
        for endpoint in ["https://c:4317", "c:4317", "http://user:pw@c:4317"] {
            assert!(matches!(tracers(endpoint), Err(TelemetryError::Endpoint)), "{endpoint}");
        }
    }
}
