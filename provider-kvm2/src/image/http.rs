//! Images over HTTP: one GET, read as a stream, resumed where it breaks.
//!
//! The GET alone decides (a HEAD proves nothing). A body that breaks or stands
//! still is continued with `Range` and `If-Range`, so that what is put together is
//! one file or nothing; it is given up after [`Timing::tries`] attempts without
//! progress. A server is not trusted: what it announces is checked against what
//! it sends, and a body never gets longer than announced or allowed.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use reqwest::Response;
use reqwest::header;

use self::reach::{Reached, Rules, Wanted};
use super::space::human;
use super::{ImageRef, UrlTrust};
use crate::config::UrlPolicy;
use crate::error::{ProviderError, Reason, Result, bounded_to};

pub(crate) mod reach;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

/// Attempts over the life of one body, however much progress each makes: a server that
/// breaks off every few bytes is not worth the time.
const MAX_RESUMES: u32 = 50;

/// After so many pulls in a row that a mirror answered with 404, the image is taken as gone.
const MIRROR_MISSES: u32 = 5;

/// Sources whose mirrors are missing the image; more are not worth remembering.
const MAX_REMEMBERED: usize = 1000;

/// How long a server may take, and how often it is asked again.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Without an answer or a byte for so long, the connection is given up.
    pub stall: Duration,
    pub connect: Duration,
    /// Before the first repeated attempt; doubled for each further one, to 32 times this.
    pub backoff: Duration,
    /// Attempts in a row without a byte.
    pub tries: u32,
}

impl Default for Timing {
    fn default() -> Self {
        Self { stall: super::STALL, connect: Duration::from_secs(10), backoff: Duration::from_millis(500), tries: 5 }
    }
}

/// Where bodies come from. One for the process: it remembers mirrors that miss an image.
#[derive(Debug, Default)]
pub struct Source {
    timing: Timing,
    misses: Mutex<HashMap<String, u32>>,
    /// For configured URLs, which no policy restricts: reading the system's certificates takes its time.
    unrestricted: OnceLock<reqwest::Client>,
}

/// The body of one image as it is read.
#[derive(Debug)]
pub struct Body {
    timing: Timing,
    client: reqwest::Client,
    rules: Rules,
    image: ImageRef,
    response: Response,
    length: Option<u64>,
    validator: Option<String>,
    etag: Option<String>,
    content_type: String,
    limit: u64,
    /// Bytes handed out.
    offset: u64,
    /// Bytes of the response that were handed out before it.
    skip: u64,
    failures: u32,
    resumes: u32,
}

impl Source {
    pub fn new(timing: Timing) -> Self {
        Self { timing, ..Self::default() }
    }

    /// Asks for the image. `limit` is the longest body that is accepted, in bytes.
    pub async fn open(&self, image: &ImageRef, policy: &UrlPolicy, limit: u64) -> Result<Body> {
        let rules = Rules { trust: image.trust, policy: policy.clone() };
        let client = self.client(&rules)?;
        let reached = reach::reach(&client, &rules, &self.timing, image, &Wanted::Whole).await.map_err(|e| self.judge(image, e))?;
        self.misses().remove(image.url.as_secret_str());
        Body::new(self.timing, client, rules, image.clone(), reached, limit)
    }

    fn client(&self, rules: &Rules) -> Result<reqwest::Client> {
        if rules.trust == UrlTrust::Requested {
            return reach::client(rules, &self.timing);
        }
        if let Some(client) = self.unrestricted.get() {
            return Ok(client.clone());
        }
        let client = reach::client(rules, &self.timing)?;
        Ok(self.unrestricted.get_or_init(|| client).clone())
    }

    /// A mirror without the image may be one that is behind; after some pulls it is not.
    fn judge(&self, image: &ImageRef, error: reach::Failure) -> ProviderError {
        let reach::Failure::MirrorMiss(error) = error else { return error.into() };
        let mut misses = self.misses();
        if misses.len() >= MAX_REMEMBERED {
            misses.clear();
        }
        let count = misses.entry(image.url.as_secret_str().to_owned()).or_default();
        *count += 1;
        if *count < MIRROR_MISSES {
            return error;
        }
        let text = format!("image {} is on none of the mirrors that {} names ({count} tries); correct its URL", image.key, image.url);
        ProviderError::new(Reason::ImageNotFound, text).with_source(error)
    }

    fn misses(&self) -> std::sync::MutexGuard<'_, HashMap<String, u32>> {
        self.misses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Body {
    fn new(timing: Timing, client: reqwest::Client, rules: Rules, image: ImageRef, reached: Reached, limit: u64) -> Result<Self> {
        let Reached { response, validator, etag, length } = reached;
        if length.is_some_and(|l| l > limit) {
            return Err(too_large(&image, length, limit));
        }
        if length == Some(0) {
            return Err(broken(&image, "is empty".to_owned()));
        }
        let framed = response.version() >= reqwest::Version::HTTP_2 || response.headers().contains_key(header::TRANSFER_ENCODING);
        if length.is_none() && !framed {
            let what = "comes without a length and ends with the connection, so that a cut body looks whole; have its server send a Content-Length";
            return Err(broken(&image, what.to_owned()));
        }
        let content_type = response.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let content_type = bounded_to(content_type, 100);
        Ok(Self {
            timing,
            client,
            rules,
            image,
            response,
            length,
            validator,
            etag,
            content_type,
            limit,
            offset: 0,
            skip: 0,
            failures: 0,
            resumes: 0,
        })
    }

    /// The length of the body that is being streamed; None where the server sends it in chunks.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    pub fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    /// As the server says, bounded; empty if it does not.
    pub fn content_type(&self) -> &str {
        &self.content_type
    }

    /// The next bytes, never an empty piece; None at the end of a whole body.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        loop {
            let cause = match tokio::time::timeout(self.timing.stall, self.response.chunk()).await {
                Ok(Ok(Some(bytes))) => {
                    let bytes = self.without_skipped(bytes);
                    if bytes.is_empty() {
                        continue;
                    }
                    self.admit(bytes.len() as u64)?;
                    self.failures = 0;
                    return Ok(Some(bytes));
                }
                Ok(Ok(None)) if self.skip == 0 && self.length.is_none_or(|l| l == self.offset) => return Ok(None),
                Ok(Ok(None)) => self.interrupted("ends early"),
                Ok(Err(e)) => self.interrupted("broke off").with_source(e.without_url()),
                Err(_) => self.interrupted(&format!("stood still for {:?}", self.timing.stall)),
            };
            self.resume(cause).await?;
        }
    }

    fn without_skipped(&mut self, mut bytes: Bytes) -> Bytes {
        let skipped = self.skip.min(bytes.len() as u64);
        self.skip -= skipped;
        // not more than the length of `bytes`, which is a usize
        bytes.split_off(usize::try_from(skipped).unwrap_or(usize::MAX))
    }

    fn admit(&mut self, more: u64) -> Result<()> {
        let end = self.offset.saturating_add(more);
        if self.length.is_some_and(|l| end > l) {
            return Err(broken(&self.image, "sends more than it announced".to_owned()));
        }
        if end > self.limit {
            return Err(too_large(&self.image, None, self.limit));
        }
        self.offset = end;
        Ok(())
    }

    /// Takes up the body where it broke, or says why not.
    async fn resume(&mut self, cause: ProviderError) -> Result<()> {
        let mut last = cause;
        loop {
            self.failures += 1;
            self.resumes += 1;
            if self.failures > self.timing.tries || self.resumes > MAX_RESUMES {
                return Err(last);
            }
            let wanted = match (&self.validator, self.offset) {
                (_, 0) => Wanted::Whole,
                (Some(v), from) => Wanted::Rest { from, validator: v.clone() },
                // without a validator the rest might be that of another file
                (None, _) => return Err(last),
            };
            tracing::debug!(image = %self.image.key, offset = self.offset, attempt = self.failures, error = %last.chain(), "image download resumed");
            tokio::time::sleep(self.timing.backoff * 2u32.pow((self.failures - 1).min(5))).await;
            match reach::reach(&self.client, &self.rules, &self.timing, &self.image, &wanted).await {
                Ok(reached) => return self.take_over(reached),
                Err(e) => {
                    let e = ProviderError::from(e);
                    if !e.is_transient() {
                        return Err(e);
                    }
                    last = e;
                }
            }
        }
    }

    fn take_over(&mut self, reached: Reached) -> Result<()> {
        // a Last-Modified says nothing about two servers, but the length of both files does
        let same = reached.validator == self.validator && (self.length.is_none() || reached.length == self.length);
        if !same {
            return Err(broken(&self.image, "was replaced while it was read; the next attempt reads the new file".to_owned()));
        }
        // a server without ranges sends all of it again
        self.skip = if reached.response.status() == reqwest::StatusCode::PARTIAL_CONTENT { 0 } else { self.offset };
        self.response = reached.response;
        Ok(())
    }

    fn interrupted(&self, how: &str) -> ProviderError {
        let total = self.length.map_or_else(|| "an unknown length".to_owned(), |l| l.to_string());
        let text = format!("the download of image {} from {} {how} after {} of {total} bytes", self.image.key, self.image.url, self.offset);
        ProviderError::new(Reason::ImageSourceBroken, text)
    }
}

fn broken(image: &ImageRef, what: String) -> ProviderError {
    ProviderError::new(Reason::ImageSourceBroken, format!("image {} at {} {what}", image.key, image.url))
}

fn too_large(image: &ImageRef, length: Option<u64>, limit: u64) -> ProviderError {
    let size = length.map_or_else(|| "more".to_owned(), human);
    let text = format!("image {} at {} is too large: {size}, allowed are {}; raise maxImageGiB", image.key, image.url, human(limit));
    ProviderError::new(Reason::ImageTooLarge, text)
}
