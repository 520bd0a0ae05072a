//! One request, through its redirects, to an answer with a usable body.
//!
//! Redirects are followed by hand because each hop is admitted like the first URL.
//! For URLs of a request's author the addresses are checked where they are
//! resolved for the connection itself: a name that answers differently a second
//! time is not asked a second time.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{self, HeaderMap, HeaderName};
use reqwest::{Response, StatusCode};

use super::Timing;
use crate::config::url_policy::UrlRefusal;
use crate::config::{ImageUrl, UrlPolicy};
use crate::error::{ProviderError, Reason, Result, bounded_to};
use crate::image::{ImageRef, UrlTrust};

const MAX_REDIRECTS: usize = 5;

/// A server that wants to be left alone for longer is asked again after this all the same.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// Longer ones are as good as none.
const MAX_VALIDATOR: usize = 256;

/// Which URLs and addresses may be fetched.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) trust: UrlTrust,
    pub(crate) policy: UrlPolicy,
}

/// What is asked for.
#[derive(Debug)]
pub(super) enum Wanted {
    Whole,
    Rest { from: u64, validator: String },
}

/// An answer: 200 with the whole body, or 206 with the rest that was wanted.
#[derive(Debug)]
pub(super) struct Reached {
    pub(super) response: Response,
    /// Strong ETag, else Last-Modified: what `If-Range` takes.
    pub(super) validator: Option<String>,
    pub(super) etag: Option<String>,
    /// Of the whole file.
    pub(super) length: Option<u64>,
}

pub(super) enum Failure {
    /// 404 from another host than the one that was asked.
    MirrorMiss(ProviderError),
    Other(ProviderError),
}

impl From<ProviderError> for Failure {
    fn from(e: ProviderError) -> Self {
        Self::Other(e)
    }
}

impl From<Failure> for ProviderError {
    fn from(f: Failure) -> Self {
        match f {
            Failure::MirrorMiss(e) | Failure::Other(e) => e,
        }
    }
}

/// A client whose connections obey the rules.
pub(super) fn client(rules: &Rules, timing: &Timing) -> Result<reqwest::Client> {
    let builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(timing.connect)
        .user_agent(concat!("kvm2-providerd/", env!("CARGO_PKG_VERSION")));
    let builder = match rules.trust {
        UrlTrust::Configured => builder.dns_resolver(Arc::new(PolicyResolver(None))),
        // a proxy would resolve the name itself, and so past the policy
        UrlTrust::Requested => builder.no_proxy().dns_resolver(Arc::new(PolicyResolver(Some(rules.policy.clone())))),
    };
    builder.build().map_err(|e| ProviderError::new(Reason::Internal, "no HTTP client could be built").with_source(e.without_url()))
}

pub(super) async fn reach(
    client: &reqwest::Client,
    rules: &Rules,
    timing: &Timing,
    image: &ImageRef,
    wanted: &Wanted,
) -> Result<Reached, Failure> {
    let mut url = image.url.clone();
    admit(rules, image, &url)?;
    for _ in 0..=MAX_REDIRECTS {
        let response = send(client, timing, image, &url, wanted).await?;
        if !is_redirect(response.status()) {
            return accept(image, &url, response, wanted);
        }
        url = next_hop(rules, image, &url, text(response.headers(), header::LOCATION))?;
    }
    let text = format!("image {} at {} is behind more than {MAX_REDIRECTS} redirects; name its final URL", image.key, image.url);
    Err(ProviderError::new(Reason::ImageSourceBroken, text).into())
}

pub(crate) fn admit(rules: &Rules, image: &ImageRef, url: &ImageUrl) -> Result<()> {
    if !url.url().username().is_empty() || url.url().password().is_some() {
        let text = format!("the URL of image {} holds a user name or password, which would end up in logs; use a signed URL", image.key);
        return Err(ProviderError::new(Reason::ImageUrlForbidden, text));
    }
    let verdict = match rules.trust {
        // what an admin has written is meant, where a server then sends us is not
        UrlTrust::Configured if url.url().host_str() == image.url.url().host_str() => Ok(()),
        UrlTrust::Configured => UrlPolicy::check_never(url),
        UrlTrust::Requested => rules.policy.check_url(url),
    };
    verdict.map_err(|e| forbidden(image, url).with_source(e))
}

fn forbidden(image: &ImageRef, url: &ImageUrl) -> ProviderError {
    let host = bounded_to(url.url().host_str().unwrap_or_default(), 100);
    let what_to_do = match image.trust {
        UrlTrust::Configured => {
            "it is link-local, a metadata service or no host's; correct the URL in the catalogue, or where it redirects to"
        }
        UrlTrust::Requested => "have an admin allow it with urlPolicy, or use the catalogue",
    };
    ProviderError::new(Reason::ImageUrlForbidden, format!("image {} may not be fetched from {host}; {what_to_do}", image.key))
}

async fn send(client: &reqwest::Client, timing: &Timing, image: &ImageRef, url: &ImageUrl, wanted: &Wanted) -> Result<Response> {
    // an encoded body has another length and digest than the file
    let mut request = client.get(url.url().clone()).header(header::ACCEPT_ENCODING, "identity");
    if let Wanted::Rest { from, validator } = wanted {
        request = request.header(header::RANGE, format!("bytes={from}-")).header(header::IF_RANGE, validator);
    }
    match tokio::time::timeout(timing.stall, request.send()).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(e)) if refused_by_policy(&e) => Err(forbidden(image, url).with_source(e.without_url())),
        Ok(Err(e)) => Err(unavailable(image, url, "cannot be reached").with_source(e.without_url())),
        Err(_) => Err(unavailable(image, url, &format!("did not answer within {:?}", timing.stall))),
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Where a redirect leads, if that may be fetched.
pub(crate) fn next_hop(rules: &Rules, image: &ImageRef, from: &ImageUrl, location: Option<&str>) -> Result<ImageUrl> {
    // a Location may be relative to where it was found
    let url = location.and_then(|l| from.url().join(l).ok()).and_then(|u| ImageUrl::parse(u.as_str()));
    let url = url.ok_or_else(|| {
        let text = format!("the server of image {} at {} redirects to nothing that is an http(s) URL", image.key, from);
        ProviderError::new(Reason::ImageSourceBroken, text)
    })?;
    if from.url().scheme() == "https" && url.url().scheme() == "http" {
        let text = format!("the server of image {} at {} redirects from https to plain http; name a URL that does not", image.key, from);
        return Err(ProviderError::new(Reason::ImageUrlForbidden, text));
    }
    admit(rules, image, &url)?;
    Ok(url)
}

/// Checks that the answer is what was asked for, before its body is read.
fn accept(image: &ImageRef, url: &ImageUrl, response: Response, wanted: &Wanted) -> Result<Reached, Failure> {
    let headers = response.headers();
    let broken = |what: &str| {
        let text = format!("the server of image {} at {url} {what}", image.key);
        Failure::Other(ProviderError::new(Reason::ImageSourceBroken, text))
    };
    let range = text(headers, header::CONTENT_RANGE).and_then(ContentRange::parse);
    let length = match (response.status(), wanted) {
        (StatusCode::OK, _) => text(headers, header::CONTENT_LENGTH).map(str::parse::<u64>).transpose(),
        (StatusCode::PARTIAL_CONTENT, wanted) => {
            let from = match wanted {
                Wanted::Whole => 0,
                Wanted::Rest { from, .. } => *from,
            };
            match range {
                Some(r) if r.first == from && r.last.checked_add(1) == Some(r.total) => Ok(Some(r.total)),
                _ => return Err(broken("sent another part of the file than was asked for; use another server")),
            }
        }
        _ => return Err(refusal(image, url, &response)),
    };
    let Ok(length) = length else { return Err(broken("announces a length that is no number")) };
    if let Some(encoding) = text(headers, header::CONTENT_ENCODING).filter(|e| !e.eq_ignore_ascii_case("identity")) {
        let encoding = bounded_to(encoding, 40);
        return Err(broken(&format!("encodes the body ({encoding}) although that was not asked for; switch that off for images")));
    }
    let short = |name| text(headers, name).filter(|t| t.len() <= MAX_VALIDATOR).map(str::to_owned);
    let etag = short(header::ETAG);
    let validator = etag.clone().filter(|e| e.starts_with('"')).or_else(|| short(header::LAST_MODIFIED));
    Ok(Reached { validator, etag, length, response })
}

/// What a status other than success means.
fn refusal(image: &ImageRef, url: &ImageUrl, response: &Response) -> Failure {
    let status = response.status();
    let crossed = url.url().host_str() != image.url.url().host_str();
    let error = |reason, what: &str| {
        let text = format!("image {} at {url} {what} (HTTP {})", image.key, status.as_u16());
        ProviderError::new(reason, text).with_meta("http_status", status.as_u16())
    };
    match status.as_u16() {
        404 | 410 if crossed => Failure::MirrorMiss(error(Reason::ImageSourceUnavailable, "is missing on this mirror")),
        404 | 410 => error(Reason::ImageNotFound, "does not exist; correct its URL").into(),
        401 | 403 | 407 | 451 => error(Reason::ImageForbidden, "is not given to us; check its access rights").into(),
        416 => error(Reason::ImageSourceBroken, "became shorter while it was read").into(),
        408 | 429 | 500..=599 => {
            let e = error(Reason::ImageSourceUnavailable, "cannot be served at the moment");
            match text(response.headers(), header::RETRY_AFTER).and_then(retry_after) {
                Some(delay) => e.retry_after(delay).into(),
                None => e.into(),
            }
        }
        _ => error(Reason::ImageSourceBroken, "got an answer that no GET should get").into(),
    }
}

/// Seconds or a date; bounded, and at least a second.
fn retry_after(value: &str) -> Option<Duration> {
    let seconds = match value.trim().parse::<u64>() {
        Ok(n) => n,
        Err(_) => {
            let at = jiff::fmt::rfc2822::parse(value.trim()).ok()?.timestamp();
            u64::try_from(at.duration_since(jiff::Timestamp::now()).as_secs()).unwrap_or(0)
        }
    };
    Some(Duration::from_secs(seconds.max(1)).min(MAX_RETRY_AFTER))
}

fn unavailable(image: &ImageRef, url: &ImageUrl, what: &str) -> ProviderError {
    ProviderError::new(Reason::ImageSourceUnavailable, format!("the server of image {} at {url} {what}", image.key))
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

#[derive(Debug, PartialEq, Eq)]
struct ContentRange {
    first: u64,
    last: u64,
    total: u64,
}

impl ContentRange {
    /// None for a range of unknown total: it could not be told from a shorter file.
    fn parse(value: &str) -> Option<Self> {
        let (range, total) = value.trim().strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some(Self { first: first.trim().parse().ok()?, last: last.trim().parse().ok()?, total: total.trim().parse().ok()? })
    }
}

/// Resolves names to those of their addresses that the policy allows; without one, to all but those that no policy opens.
struct PolicyResolver(Option<UrlPolicy>);

#[derive(Debug, thiserror::Error)]
#[error("none of the addresses of {host} is allowed")]
struct NoAllowedAddress {
    host: String,
    #[source]
    first: Option<UrlRefusal>,
}

impl Resolve for PolicyResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = self.0.clone();
        Box::pin(async move {
            let host = name.as_str().to_owned();
            let (mut allowed, mut first) = (Vec::new(), None);
            for address in tokio::net::lookup_host((host.as_str(), 0)).await? {
                let verdict = match &policy {
                    Some(policy) => policy.check_addr(&host, address.ip()),
                    None => UrlPolicy::check_never_addr(&host, address.ip()),
                };
                match verdict {
                    Ok(()) => allowed.push(address),
                    Err(refusal) => first = first.or(Some(refusal)),
                }
            }
            if allowed.is_empty() {
                return Err(NoAllowedAddress { host, first }.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

fn refused_by_policy(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(c) = cause {
        if c.is::<NoAllowedAddress>() {
            return true;
        }
        cause = c.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn image_of(url: &ImageUrl) -> ImageRef {
        ImageRef {
            key: "debian".into(),
            url: url.clone(),
            sha256: None,
            format: crate::config::ImageFormat::Raw,
            firmware: crate::config::Firmware::Uefi,
            trust: UrlTrust::Configured,
        }
    }

    #[rstest]
    #[case("bytes 5-9/10", Some(ContentRange { first: 5, last: 9, total: 10 }))]
    #[case("bytes 5-9/*", None)]
    #[case("bytes */10", None)]
    #[case("items 0-1/2", None)]
    #[case("bytes 5-99999999999999999999/10", None)]
    fn a_content_range_is_read_whole_or_not_at_all(#[case] value: &str, #[case] expected: Option<ContentRange>) {
        assert_eq!(ContentRange::parse(value), expected);
    }

    #[rstest]
    #[case("https://a.test/x", "http://a.test/y", None)]
    #[case("https://a.test/x", "//b.test/y", Some("https://b.test/y"))]
    #[case("http://a.test/x", "https://b.test/y", Some("https://b.test/y"))]
    #[case("https://a.test/d/x", "y?z", Some("https://a.test/d/y?z"))]
    fn a_redirect_never_leaves_https(#[case] from: &str, #[case] location: &str, #[case] to: Option<&str>) {
        let from = ImageUrl::parse(from).unwrap();
        let image = image_of(&from);
        let rules = Rules { trust: image.trust, policy: crate::image::tests::entry().url_policy.clone() };
        let hop = next_hop(&rules, &image, &from, Some(location));
        assert_eq!(hop.ok(), to.map(|t| ImageUrl::parse(t).unwrap()));
    }

    #[rstest]
    #[case("http://192.168.0.9/y", true)]
    #[case("http://127.0.0.1/y", true)]
    #[case("http://169.254.169.254/latest/meta-data", false)]
    #[case("http://[fe80::1]/y", false)]
    #[case("http://[::ffff:169.254.169.254]/y", false)]
    #[case("http://168.63.129.16/y", false)]
    #[case("http://0.0.0.0/y", false)]
    fn a_server_of_the_catalogue_sends_us_to_no_metadata_service(#[case] location: &str, #[case] passes: bool) {
        let from = ImageUrl::parse("http://mirror.lan/x").unwrap();
        let image = image_of(&from);
        let rules = Rules { trust: image.trust, policy: crate::image::tests::entry().url_policy.clone() };
        let hop = next_hop(&rules, &image, &from, Some(location));
        assert_eq!(hop.map_err(|e| e.reason()).err(), (!passes).then_some(Reason::ImageUrlForbidden));
        // and what the admin has written there is meant
        let direct = ImageUrl::parse(location).unwrap();
        assert!(admit(&rules, &image_of(&direct), &direct).is_ok());
    }

    #[tokio::test]
    async fn a_name_of_the_catalogue_leads_to_no_address_that_is_no_hosts() {
        let resolver = PolicyResolver(None);
        // as getaddrinfo reads them: no look-up, so that no name server is needed
        for (name, passes) in [("127.0.0.1", true), ("169.254.169.254", false), ("168.63.129.16", false)] {
            let found = resolver.resolve(name.parse().unwrap()).await;
            assert_eq!(found.is_ok(), passes, "{name}");
        }
    }

    #[rstest]
    #[case("0", Some(1))]
    #[case("17", Some(17))]
    #[case("99999999", Some(600))]
    #[case("Sun, 06 Nov 1994 08:49:37 GMT", Some(1))]
    #[case("Sat, 06 Nov 2393 08:49:37 GMT", Some(600))]
    #[case("soon", None)]
    fn a_retry_after_is_bounded(#[case] value: &str, #[case] seconds: Option<u64>) {
        assert_eq!(retry_after(value), seconds.map(Duration::from_secs));
    }
}
