//! Logs on stderr and spans to an OpenTelemetry collector. Only this crate can be made more talkative than `warn`: other
//! crates log headers and bodies at their lower levels, and a Secret may be in one.

use std::io;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;

/// Name of this crate in the targets of its spans and lines.
const OWN: &str = "egress_operator";

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object per line.
    Json,
}

/// Why telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Not an endpoint that could work.
    #[error("the OTLP endpoint has to be http://HOST:PORT, without user and password")]
    Endpoint,
    /// The exporter.
    #[error("the OTLP exporter cannot be made")]
    Exporter(#[source] opentelemetry_otlp::ExporterBuildError),
}

/// What has to be flushed at the end.
#[derive(Debug)]
#[must_use = "spans that are not flushed are lost"]
pub struct Telemetry(Option<SdkTracerProvider>);

impl Telemetry {
    /// Sends what has not been sent. Blocks for up to a few seconds.
    pub fn flush(self) {
        if let Some(tracers) = self.0 {
            let _ = tracers.shutdown();
        }
    }
}

/// A subscriber that writes to `writer`. Within a tokio runtime where spans are exported.
///
/// # Errors
/// The endpoint is none.
pub fn subscriber<W>(
    level: LevelFilter,
    format: LogFormat,
    otlp: Option<&str>,
    writer: W,
) -> Result<(impl tracing::Subscriber + Send + Sync + use<W>, Telemetry), TelemetryError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    opentelemetry::global::set_text_map_propagator(opentelemetry_sdk::propagation::TraceContextPropagator::new());
    let tracers = otlp.map(tracers).transpose()?;
    let spans = tracers.as_ref().map(|t| {
        let filter = Targets::new().with_target(OWN, LevelFilter::DEBUG);
        tracing_opentelemetry::layer().with_tracer(t.tracer(OWN)).with_location(false).with_threads(false).with_filter(filter)
    });
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let filter = Targets::new().with_default(level.min(LevelFilter::WARN)).with_target(OWN, level);
    Ok((tracing_subscriber::registry().with(spans).with(lines.with_filter(filter)), Telemetry(tracers)))
}

fn tracers(endpoint: &str) -> Result<SdkTracerProvider, TelemetryError> {
    if !endpoint.starts_with("http://") || endpoint.contains('@') {
        return Err(TelemetryError::Endpoint);
    }
    let exporter =
        opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(TelemetryError::Exporter)?;
    let resource = opentelemetry_sdk::Resource::builder()
        .with_service_name("egress-operator")
        .with_attribute(opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}
