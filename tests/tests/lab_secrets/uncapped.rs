//! The daemon of the library under a subscriber that lets everything of every crate pass, as no user can make it.
//!
//! Neither our own crates nor any other shows a secret then, in the versions of the lock file. The daemon all the
//! same never lets others say what is below `warn` (`telemetry/logs.rs`): the next version of one may.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use lab_tests::{Case, Clients};
use provider_kvm2::cli::serve::{DaemonOptions, Listen, run_daemon};
use provider_kvm2::service::ServeOptions;
use provider_kvm2::service::server::Tls;
use tokio::sync::oneshot;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::life::{BEARER, HOST, Life};

/// Ours.
const OWN: [&str; 2] = ["provider_kvm2", "egress_provider_proto"];

/// Says a secret on purpose, to see that it would be found.
const CONTROL: &str = "control";

/// All that was said, by crate and level.
#[derive(Clone)]
struct Watch(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    said: BTreeMap<(String, Level), String>,
    own: String,
}

/// The fields of a span or an event as one text.
#[derive(Default)]
struct Text {
    text: String,
    /// Of a record of the `log` crate, which comes under one target for all.
    log_target: Option<String>,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "log.target" {
            self.log_target = Some(value.to_owned());
        }
        let _ = write!(self.text, "{}={value} ", field.name());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.text, "{}={value:?} ", field.name());
    }
}

impl Watch {
    fn heard(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, about: &Metadata<'_>, Text { text, log_target }: Text) {
        let target = log_target.as_deref().unwrap_or(about.target());
        let name = target.split("::").next().unwrap_or_default().to_owned();
        let mut heard = self.heard();
        if OWN.contains(&name.as_str()) {
            heard.own.push_str(&text);
            heard.own.push('\n');
        }
        let said = heard.said.entry((name, *about.level())).or_default();
        said.push_str(&text);
        said.push('\n');
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Watch {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut text = Text::default();
        attributes.record(&mut text);
        self.hear(attributes.metadata(), text);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut text = Text::default();
        values.record(&mut text);
        self.hear(context.metadata(id).expect("a span that was made"), text);
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        self.hear(event.metadata(), text);
    }
}

/// A CA, and a certificate and key of it, as PEM; the DER of the certificate last.
fn certificates() -> (String, String, String, Vec<u8>) {
    let ca_key = rcgen::KeyPair::generate().expect("a key");
    let mut ca = rcgen::CertificateParams::new(Vec::new()).expect("no names");
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_pem = ca.self_signed(&ca_key).expect("a CA").pem();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    (ca_pem, certificate.pem(), key.serialize_pem(), certificate.der().to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_every_crate_at_trace_none_shows_a_secret() {
    let Some(case) = Case::start("uncapped", &[HOST]) else { return };
    let mut life = Life::prepare(&case).await;
    let (ca, certificate, key, der) = certificates();
    life.sentinels.add_pem("TLS key", &key, &der);
    let watch = Watch(Arc::default());
    tracing_subscriber::registry().with(watch.clone()).try_init().expect("the only test of the program that sets one");

    let address = tokio::net::TcpListener::bind("127.0.0.1:0").await.and_then(|l| l.local_addr()).expect("a free port");
    let tls = Tls { certificate: certificate.clone().into(), key: key.clone().into_bytes().into(), client_ca: ca.clone().into() };
    let serve = ServeOptions { tls: Some(tls), ..ServeOptions::default() };
    let options = DaemonOptions { listen: Listen::Tcp(address), metrics: None, serve, replica: "kt-uncapped".to_owned() };
    let config = life.file.write(case.dir());
    let (stop, stopped) = oneshot::channel::<()>();
    let daemon = tokio::spawn(run_daemon(config.clone(), options, async { stopped.await.unwrap_or_default() }));

    let trust = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca)).identity(Identity::from_pem(&certificate, &key));
    let endpoint =
        Endpoint::from_shared(format!("https://localhost:{}", address.port())).expect("a URI").tls_config(trust).expect("good PEM");
    let channel = lab_tests::eventually("the daemon serves", std::time::Duration::from_secs(30), || async {
        endpoint.connect().await.map_err(|e| e.to_string())
    })
    .await;
    let answers = life.live(&case, &Clients::over(channel), &config, || async { watch.heard().own.clone() }).await;
    tracing::trace!(target: CONTROL, "{:?}", BEARER.as_bytes());
    stop.send(()).expect("it runs");
    daemon.await.expect("no panic").expect("a clean end");

    let heard = watch.heard();
    // the cap is lifted: the layers below ours have spoken
    for name in ["provider_kvm2", "russh", "h2", "hyper_util", "reqwest", "rustls"] {
        assert!(heard.said.keys().any(|(n, _)| n == name), "{name} said nothing: {:?}", heard.said.keys());
    }
    life.sentinels.assert_absent("an answer", &answers.join("\n"));
    let mut found: BTreeMap<_, _> = heard
        .said
        .iter()
        .map(|(who, text)| (who.0.as_str(), life.sentinels.found_in(text)))
        .filter(|(_, found)| !found.is_empty())
        .collect();
    assert!(found.remove(CONTROL).is_some(), "what is said is not looked through");
    assert!(found.is_empty(), "{found:#?}");
}
