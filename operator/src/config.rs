//! What the operator is told: flags, variables, and the providers file.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::health::probe::Canary;
use crate::provider_client::grpc::GrpcOptions;

/// The most providers.
const MOST_PROVIDERS: usize = 64;
/// Calls of a provider in flight where its entry does not say.
const DEFAULT_IN_FLIGHT: usize = 16;

/// Keeps egress proxies alive: makes their VMs through providers, probes them, offers them to clients, removes them.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "egress-operator", version, about, max_term_width = 120)]
pub struct Args {
    /// The providers file: which providers there are and where (docs/operator.md).
    #[arg(long, env = "EGRESS_PROVIDERS_FILE", default_value = "/etc/egress-operator/providers.yaml")]
    pub providers_file: PathBuf,
    /// The operator's own namespace: Leases and ProviderHealth objects are there.
    #[arg(long, env = "POD_NAMESPACE", default_value = "egress-proxies")]
    pub namespace: String,
    /// Whose instances ours are; the UID of the namespace kube-system when left out. It must not change while there are
    /// instances.
    #[arg(long, env = "EGRESS_INSTALLATION_ID")]
    pub installation_id: Option<String>,
    /// Off: act without a Lease. Only where nobody else can be there.
    #[arg(long, env = "EGRESS_LEADER_ELECT", default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Who this replica is in the Lease; a random one is added.
    #[arg(long, env = "POD_NAME", default_value = "egress-operator")]
    pub identity: String,
    /// How long a Lease that is not renewed keeps others out.
    #[arg(long, default_value = "15s", value_parser = seconds)]
    pub lease_duration: Duration,
    /// host:port that every proxy is asked to connect to. It should answer fast and never be down.
    #[arg(long, env = "EGRESS_PROBE_TARGET", default_value = "www.gstatic.com:443")]
    pub probe_target: String,
    /// Plain http URL that answers with the caller's address; each probe asks it through the proxy then.
    #[arg(long, env = "EGRESS_PROBE_CANARY", value_parser = canary)]
    pub probe_canary: Option<Canary>,
    /// Between two probes of a proxy.
    #[arg(long, default_value = "30s", value_parser = seconds)]
    pub probe_interval: Duration,
    /// For a probe.
    #[arg(long, default_value = "5s", value_parser = seconds)]
    pub probe_timeout: Duration,
    /// Good probes in a row until a proxy is healthy.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub probe_rise: u32,
    /// Bad probes in a row until a proxy is not.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub probe_fall: u32,
    /// Probes at a time.
    #[arg(long, default_value_t = 512)]
    pub probe_concurrency: usize,
    /// Between two Checks of a provider.
    #[arg(long, default_value = "60s", value_parser = seconds)]
    pub check_interval: Duration,
    /// Between two sweeps for instances that no Proxy wants.
    #[arg(long, default_value = "10m", value_parser = seconds)]
    pub gc_interval: Duration,
    /// An instance that is younger is never removed as an orphan.
    #[arg(long, default_value = "1h", value_parser = seconds)]
    pub gc_minimum_age: Duration,
    /// The most orphans removed in a sweep of a provider.
    #[arg(long, default_value_t = 5)]
    pub gc_most: usize,
    /// Only say which orphans would be removed.
    #[arg(long, env = "EGRESS_GC_DRY_RUN", default_value_t = false, action = clap::ArgAction::Set)]
    pub gc_dry_run: bool,
    /// Where /metrics, /livez and /readyz are.
    #[arg(long, env = "EGRESS_OPS_LISTEN", default_value = "0.0.0.0:8080")]
    pub ops_listen: SocketAddr,
    /// Where the discovery API is; off when left out.
    #[arg(long, env = "EGRESS_DISCOVERY_LISTEN", requires = "discovery_token_file")]
    pub discovery_listen: Option<SocketAddr>,
    /// File with the bearer token of the discovery API; read again when it changes.
    #[arg(long, env = "EGRESS_DISCOVERY_TOKEN_FILE")]
    pub discovery_token_file: Option<PathBuf>,
    /// off, error, warn, info, debug or trace, of this program; other crates stay at warn.
    #[arg(long, env = "EGRESS_LOG_LEVEL", default_value = "info")]
    pub log_level: tracing::level_filters::LevelFilter,
    /// text or json.
    #[arg(long, env = "EGRESS_LOG_FORMAT", default_value = "json", value_enum)]
    pub log_format: crate::telemetry::LogFormat,
    /// Collector of spans, http://host:port; none are sent when left out.
    #[arg(long, env = "EGRESS_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

/// A duration with its unit: 500ms, 30s, 10m, 1h.
fn seconds(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(|| format!("{text:?} has no unit: write 30s, 10m or 1h"))?;
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no duration: write 30s, 10m or 1h"))?;
    let duration = match unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.saturating_mul(60)),
        "h" => Duration::from_secs(number.saturating_mul(3600)),
        _ => return Err(format!("{unit:?} is no unit: write 30s, 10m or 1h")),
    };
    if duration.is_zero() || duration > Duration::from_secs(30 * 24 * 3600) {
        return Err(format!("{text:?} is not between 1ms and 720h"));
    }
    Ok(duration)
}

/// A plain http URL: through a tunnel no name of a certificate could be checked without more than a probe needs.
fn canary(text: &str) -> Result<Canary, String> {
    let url: http::Uri = text.parse().map_err(|e| format!("{text:?} is no URL: {e}"))?;
    let (Some("http"), Some(authority)) = (url.scheme_str(), url.authority()) else { return Err(format!("{text:?} is no http:// URL")) };
    if authority.as_str().contains('@') {
        return Err("a canary takes no user or password".to_owned());
    }
    let authority = authority.port().map_or_else(|| format!("{authority}:80"), |_| authority.to_string());
    Ok(Canary { authority, path: url.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string) })
}

/// The providers file.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProvidersFile {
    providers: Vec<ProviderEntry>,
}

/// A provider of the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderEntry {
    name: String,
    endpoint: String,
    #[serde(default)]
    entry: String,
    #[serde(default)]
    max_in_flight: Option<usize>,
    #[serde(default)]
    tls: Option<TlsFiles>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TlsFiles {
    #[serde(default)]
    ca: Option<PathBuf>,
    #[serde(default)]
    cert: Option<PathBuf>,
    #[serde(default)]
    key: Option<PathBuf>,
}

/// Why a providers file cannot be used: everything that is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("providers file {path}:\n  {}", faults.join("\n  "))]
pub struct ProvidersFileError {
    path: PathBuf,
    faults: Vec<String>,
}

/// Reads the providers file.
///
/// # Errors
/// It cannot be read, or something in it is wrong; all faults are named.
pub fn read_providers(path: &Path) -> Result<Vec<(String, GrpcOptions)>, ProvidersFileError> {
    let failed = |faults| ProvidersFileError { path: path.to_owned(), faults };
    let text = std::fs::read_to_string(path).map_err(|e| failed(vec![format!("cannot be read: {e}")]))?;
    let file: ProvidersFile = serde_saphyr::from_str(&text).map_err(|e| failed(vec![e.to_string()]))?;
    parse_providers(file).map_err(failed)
}

fn parse_providers(file: ProvidersFile) -> Result<Vec<(String, GrpcOptions)>, Vec<String>> {
    let mut faults = Vec::new();
    let mut names = BTreeSet::new();
    let mut all = Vec::new();
    if file.providers.is_empty() || file.providers.len() > MOST_PROVIDERS {
        faults.push(format!("providers: has {} of 1 to {MOST_PROVIDERS}", file.providers.len()));
    }
    for (n, provider) in file.providers.into_iter().enumerate() {
        let at = format!("providers[{n}]");
        // it becomes the name of a ProviderHealth
        let is_name = (1..=63).contains(&provider.name.len())
            && provider.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && !provider.name.starts_with('-')
            && !provider.name.ends_with('-');
        if !is_name {
            faults.push(format!("{at}.name: {:?} is not 1 to 63 of a-z, 0-9 and -", provider.name));
        }
        if !names.insert(provider.name.clone()) {
            faults.push(format!("{at}.name: {:?} is there twice", provider.name));
        }
        let max_in_flight = provider.max_in_flight.unwrap_or(DEFAULT_IN_FLIGHT);
        if !(1..=1000).contains(&max_in_flight) {
            faults.push(format!("{at}.maxInFlight: {max_in_flight} is not between 1 and 1000"));
        }
        let tls = provider.tls.unwrap_or(TlsFiles { ca: None, cert: None, key: None });
        let tls_identity = match (tls.cert, tls.key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                faults.push(format!("{at}.tls: give cert and key together"));
                None
            }
        };
        let options = GrpcOptions { endpoint: provider.endpoint, entry: provider.entry, max_in_flight, tls_ca: tls.ca, tls_identity };
        all.push((provider.name, options));
    }
    if faults.is_empty() { Ok(all) } else { Err(faults) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(text: &str) -> Result<Vec<(String, GrpcOptions)>, Vec<String>> {
        parse_providers(serde_saphyr::from_str(text).map_err(|e| vec![e.to_string()])?)
    }

    #[test]
    fn flags_are_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_file_is_read_with_its_defaults() {
        let all = parse("providers:\n- name: kvm2-home\n  endpoint: unix:/run/p.sock\n").expect("good");
        assert_eq!((all[0].0.as_str(), all[0].1.max_in_flight, all[0].1.entry.as_str()), ("kvm2-home", 16, ""));
    }

    #[test]
    fn all_faults_are_named_at_once() {
        let faults = parse(
            "providers:\n- {name: A, endpoint: x, maxInFlight: 0}\n- {name: b, endpoint: x}\n- {name: b, endpoint: x, tls: {cert: c}}\n",
        )
        .expect_err("bad");
        for part in ["providers[0].name", "providers[0].maxInFlight", "providers[2].name: \"b\" is there twice", "providers[2].tls"] {
            assert!(faults.iter().any(|f| f.contains(part)), "{part}: {faults:?}");
        }
        assert!(parse("providers: []").is_err() && parse("providers:\n- {name: a, endpoint: x, sokcet: y}\n").is_err());
    }

    #[test]
    fn durations_have_a_unit_and_bounds() {
        assert_eq!(
            (seconds("30s"), seconds("10m"), seconds("250ms")),
            (Ok(Duration::from_secs(30)), Ok(Duration::from_secs(600)), Ok(Duration::from_millis(250)))
        );
        for bad in ["30", "", "s", "-1s", "0s", "1d", "99999999999999999999s", "721h"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_canary_is_plain_http_without_a_password() {
        assert_eq!(canary("http://c.example/ip?x"), Ok(Canary { authority: "c.example:80".into(), path: "/ip?x".into() }));
        assert_eq!(canary("http://c.example:8080"), Ok(Canary { authority: "c.example:8080".into(), path: "/".into() }));
        for bad in ["https://c.example/", "c.example", "http://u:p@c.example/", "ftp://c/"] {
            assert!(canary(bad).is_err(), "{bad}");
        }
    }
}
