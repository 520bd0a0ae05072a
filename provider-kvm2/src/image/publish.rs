//! Puts one image onto one host: volume, bytes, origin, marker, in this order.
//!
//! Everything goes over one link of its own, the finishing too, so that nobody
//! else's failure can cost a verified download. Whatever fails, the volumes made
//! here are removed once the stream is closed, and the first cause is what is
//! reported. A process that is killed leaves a base without a marker: debris, which
//! is never used and shows in listings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::bases::{MARKER, ORIGIN, base_name};
use super::feed::{DEPTH, Digests, Feed};
use super::http::Source;
use super::origin::{Origin, url_sha256};
use super::qcow2::{Kind, Sniffed, sniff};
use super::{Base, Wanted, mounted, space};
use crate::config::{ImageFormat, Sha256Hex};
use crate::error::{ProviderError, Reason, Result, unless_it_panics};
use crate::hypervisor::classify::is_pool_job;
use crate::hypervisor::{Connect, HostId, Hypervisor, PoolRef, UploadPart, VolumeRef, code};
use crate::telemetry::metrics::Metrics;

/// The two small volumes beside a base, with room to spare.
const SIDE_BYTES: u64 = 64 << 10;

/// How long a host may take to answer the abort of an upload whose budget is spent.
const ABORT_ANSWER: Duration = Duration::from_secs(10);

/// How often a refresh is tried that libvirt refuses for a running job.
const REFRESH_TRIES: u32 = 5;
const REFRESH_PAUSE: Duration = Duration::from_millis(200);

/// How far a transfer is, for others to read.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    /// 0 while it is not known: no image is empty.
    total: AtomicU64,
}

impl Progress {
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub fn total(&self) -> Option<u64> {
        Some(self.total.load(Ordering::Relaxed)).filter(|&t| t != 0)
    }
}

/// One upload that is to be made.
#[derive(Debug)]
pub(crate) struct Publish<'a> {
    pub(crate) connect: &'a dyn Connect,
    pub(crate) host: &'a HostId,
    pub(crate) wanted: &'a Wanted,
    pub(crate) source: &'a Source,
    pub(crate) metrics: &'a Metrics,
    pub(crate) progress: &'a Progress,
    /// Random part of the volume's name.
    pub(crate) id: u32,
    pub(crate) stop: &'a CancellationToken,
    /// Whether a volume of ours may exist.
    pub(crate) made: AtomicBool,
}

/// What was learnt of an image before anything was made on the host.
#[derive(Debug)]
struct Plan {
    length: u64,
    virtual_size: u64,
}

/// A base that is in place and verified, but for its marker.
#[derive(Debug)]
struct Stored {
    base: Base,
    origin: Origin,
}

/// Why the sending side stopped.
enum Stopped {
    /// Of its own accord; this is the cause of all that follows.
    Cause(ProviderError),
    /// The host takes no more; the upload's answer tells why.
    HostGone,
}

impl Publish<'_> {
    pub(crate) async fn run(&self) -> Result<(Base, Origin)> {
        let deadline = Instant::now() + self.wanted.entry.budgets.upload_image;
        let (feed, plan, link) = self.until(deadline, self.prepare()).await?;
        let work = async {
            let stored = self.upload(&*link, feed, &plan, deadline).await?;
            self.finish_or_redial(&*link, stored).await
        };
        // whatever happens in it: what was made is removed
        let outcome = unless_it_panics("the upload of an image", work).await;
        if outcome.is_err() && self.made.load(Ordering::Relaxed) {
            self.clean_up(&*link).await;
        }
        link.close();
        outcome.map_err(|e| e.on_host(&self.host.host))
    }

    /// Ends the work early for a shutdown or a spent budget; only for work that leaves nothing behind.
    async fn until<T>(&self, deadline: Instant, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            e = self.interrupted(deadline) => Err(e),
        }
    }

    async fn interrupted(&self, deadline: Instant) -> ProviderError {
        tokio::select! {
            () = self.stop.cancelled() => ProviderError::new(Reason::ShuttingDown, format!("the pull of image {} was ended by a shutdown", self.key())),
            () = sleep_until(deadline) => {
                let budget = self.wanted.entry.budgets.upload_image;
                let came = self.progress.done();
                let text = format!(
                    "image {} was not on host {} within {budget:?}, of which {came} bytes went there; raise budgets.uploadImage or name a faster server",
                    self.key(),
                    self.host.host
                );
                ProviderError::new(Reason::CallTimeout, text).during("image_pull")
            }
        }
    }

    fn key(&self) -> &str {
        &self.wanted.image.key
    }

    fn name(&self) -> String {
        base_name(&self.wanted.entry.name, self.key(), self.id, self.wanted.image.format)
    }

    /// Opens the source and reads what decides: kind, size, length. The link is dialled meanwhile: source
    /// and host are often both far away. A failure of one drops the other, which closes it.
    async fn prepare(&self) -> Result<(Feed, Plan, Arc<dyn Hypervisor>)> {
        let ((feed, head), link) = tokio::try_join!(self.open(), self.connect.dedicated(self.host))?;
        let format = self.wanted.image.format;
        let virtual_size = self.virtual_size(&head, feed.content_type())?;
        let (feed, length) = match feed.length() {
            Some(length) => (feed, length),
            None => self.measured(feed).await?,
        };
        self.progress.total.store(length, Ordering::Relaxed);
        let virtual_size = match format {
            ImageFormat::Qcow2 => virtual_size,
            ImageFormat::Raw => length,
        };
        Ok((feed, Plan { length, virtual_size }, link))
    }

    async fn open(&self) -> Result<(Feed, Vec<u8>)> {
        let entry = &self.wanted.entry;
        let body = self.source.open(&self.wanted.image, &entry.url_policy, entry.max_image_bytes).await?;
        Feed::open(body, self.key(), entry.max_image_bytes).await
    }

    /// The length of an image that nobody announces, as of any packed one: read once to be counted, then again to be stored.
    ///
    /// A volume must have room for all of it before the first byte (libvirtd dies of a write without
    /// room), and room for the largest allowed image would stay taken. A wrong digest shows here too.
    async fn measured(&self, mut first: Feed) -> Result<(Feed, u64)> {
        let mut length = 0;
        while let Some(bytes) = first.chunk().await? {
            length += bytes.len() as u64;
        }
        self.verify(&first.finish().await?.download)?;
        Ok((self.open().await?.0, length))
    }

    /// 0 for a raw image, whose length decides.
    fn virtual_size(&self, head: &[u8], content_type: &str) -> Result<u64> {
        let image = &self.wanted.image;
        let mismatch = |is: String, advice: &str| {
            let served = if content_type.is_empty() { String::new() } else { format!(" (served as {content_type})") };
            let text =
                format!("image {} at {} is declared as {}, but it is {is}{served}; {advice}", image.key, image.url, image.format.as_str());
            Err(ProviderError::new(Reason::ImageFormatMismatch, text))
        };
        match (sniff(head), image.format) {
            (Sniffed::Qcow2(header), ImageFormat::Qcow2) => header.check().map_err(|fault| {
                let text = format!("image {} at {} is not used because {fault}", image.key, image.url);
                ProviderError::new(Reason::ImageUnsafe, text)
            }),
            (Sniffed::Raw, ImageFormat::Raw) => Ok(0),
            (Sniffed::Qcow2(_), ImageFormat::Raw) => mismatch("a qcow2 image".to_owned(), "correct its format"),
            (Sniffed::Raw, ImageFormat::Qcow2) => mismatch("no image of a known kind".to_owned(), "correct its format or its URL"),
            (Sniffed::Other(kind @ (Kind::Gzip | Kind::Xz | Kind::Zstd | Kind::Bzip2 | Kind::Zip | Kind::Tar)), _) => {
                mismatch(kind.to_string(), "name the URL of the image itself, plain or packed once with gzip, xz or zstd")
            }
            (Sniffed::Other(kind @ (Kind::Html | Kind::Xml | Kind::Empty | Kind::CutQcow2)), _) => {
                mismatch(kind.to_string(), "correct its URL")
            }
            (Sniffed::Other(kind), _) => mismatch(kind.to_string(), "convert it with `qemu-img convert -O qcow2`"),
        }
    }

    fn verify(&self, digest: &Sha256Hex) -> Result<()> {
        let image = &self.wanted.image;
        match &image.sha256 {
            Some(wanted) if wanted != digest => {
                let text = format!(
                    "image {} at {} has the sha256 {digest}, configured is {wanted}; correct the configuration, or distrust the server",
                    image.key, image.url
                );
                Err(ProviderError::new(Reason::DigestMismatch, text).with_meta("digest", digest).with_meta("wanted_digest", wanted))
            }
            _ => Ok(()),
        }
    }

    /// Makes the volume, fully allocated, and fills it.
    async fn upload(&self, link: &dyn Hypervisor, feed: Feed, plan: &Plan, deadline: Instant) -> Result<Stored> {
        let pool = link.lookup_pool(&self.wanted.host.pool).await?;
        let info = space::fresh_info(link, &pool).await?;
        mounted::require(link, &self.wanted.host, &pool, &link.list_volumes(&pool).await?).await?;
        let entry = &self.wanted.entry;
        space::check(&self.host.host, &pool.name, &info, entry.pool_reserve, plan.length.saturating_add(SIDE_BYTES))?;
        let etag = feed.etag().map(str::to_owned);
        let name = self.name();
        failpoint!("publish.before_volume");
        let volume = match link.create_volume(&pool, &volume_xml(&name, plan.length)).await {
            Ok(volume) => volume,
            Err(e) => {
                // refused: nothing was made, and what has the name is someone else's. Unanswered: it may exist
                self.made.store(e.code().is_none(), Ordering::Relaxed);
                return Err(e.into());
            }
        };
        self.made.store(true, Ordering::Relaxed);
        failpoint!("publish.after_volume");
        let digests = self.transfer(link, &volume, feed, plan.length, deadline).await?;
        let image = &self.wanted.image;
        let origin = Origin {
            entry: entry.name.clone(),
            key: image.key.clone(),
            url: image.url.redacted(),
            url_sha256: url_sha256(&image.url),
            etag,
            length: plan.length,
            virtual_size: plan.virtual_size,
            format: image.format.as_str().to_owned(),
            time: jiff::Timestamp::now(),
            stored_sha256: digests.stored.to_string(),
        };
        let base = Base { volume: name, path: volume.key, format: image.format, virtual_size: plan.virtual_size, digest: digests.download };
        Ok(Stored { base, origin })
    }

    async fn transfer(&self, link: &dyn Hypervisor, volume: &VolumeRef, feed: Feed, length: u64, deadline: Instant) -> Result<Digests> {
        let (parts, queue) = mpsc::channel(DEPTH);
        // the sending side ends first and says whose fault it is; the host only has to answer the abort
        let budget = deadline.saturating_duration_since(Instant::now()) + ABORT_ANSWER;
        let (taken, sent) = tokio::join!(link.upload(volume, length, queue, budget), self.pump(feed, parts, length, deadline));
        self.metrics.image_bytes(&self.host.host, self.progress.done());
        match (sent, taken) {
            (Ok(digests), Ok(n)) if n == length => Ok(digests),
            (Err(Stopped::Cause(e)), _) => Err(e),
            (_, Err(e)) => Err(e.into()),
            (_, Ok(n)) => {
                let text = format!("host {} took {n} of the {length} bytes of image {}", self.host.host, self.key());
                Err(ProviderError::new(Reason::Internal, text).during("upload"))
            }
        }
    }

    /// Feeds the upload. `Finish` is sent only for a whole and verified image; the queue is dropped
    /// without it otherwise, which aborts the stream.
    async fn pump(&self, mut feed: Feed, parts: mpsc::Sender<UploadPart>, length: u64, deadline: Instant) -> Result<Digests, Stopped> {
        let work = async {
            let mut sent = 0u64;
            while let Some(bytes) = feed.chunk().await.map_err(Stopped::Cause)? {
                let n = bytes.len() as u64;
                if sent + n > length {
                    return Err(Stopped::Cause(self.changed(length)));
                }
                parts.send(UploadPart::Data(bytes)).await.map_err(|_| Stopped::HostGone)?;
                sent += n;
                failpoint!("publish.in_body", Stopped::Cause);
                self.progress.done.store(sent, Ordering::Relaxed);
            }
            if sent != length {
                return Err(Stopped::Cause(self.changed(length)));
            }
            let digests = feed.finish().await.map_err(Stopped::Cause)?;
            self.verify(&digests.download).map_err(Stopped::Cause)?;
            failpoint!("publish.before_finish", Stopped::Cause);
            parts.send(UploadPart::Finish).await.map_err(|_| Stopped::HostGone)?;
            Ok(digests)
        };
        tokio::select! {
            done = work => done,
            () = parts.closed() => Err(Stopped::HostGone),
            e = self.interrupted(deadline) => Err(Stopped::Cause(e)),
        }
    }

    fn changed(&self, length: u64) -> ProviderError {
        let image = &self.wanted.image;
        let text = format!("image {} at {} has no longer the {length} bytes that it had a moment ago", image.key, image.url);
        ProviderError::new(Reason::ImageSourceBroken, text)
    }

    /// A link that is lost between the last byte and the marker does not cost the download.
    async fn finish_or_redial(&self, link: &dyn Hypervisor, stored: Stored) -> Result<(Base, Origin)> {
        match self.finish(link, &stored).await {
            Err(e) if e.reason() == Reason::LinkLost && !self.stop.is_cancelled() => {
                tracing::info!(host = %self.host.host, volume = %stored.base.volume, error = %e.chain(), "link lost while finishing an image; redialling");
                let second = self.connect.dedicated(self.host).await.map_err(|_| e)?;
                let outcome = self.finish(&*second, &stored).await;
                second.close();
                outcome?;
            }
            outcome => outcome?,
        }
        Ok((stored.base, stored.origin))
    }

    /// Origin, a look at what libvirt makes of the volume, and last the marker. Can be repeated.
    async fn finish(&self, link: &dyn Hypervisor, stored: &Stored) -> Result<()> {
        let pool = link.lookup_pool(&self.wanted.host.pool).await?;
        let base = &stored.base;
        failpoint!("publish.after_body");
        self.put(link, &pool, &format!("{}{ORIGIN}", base.volume), stored.origin.to_json()).await?;
        failpoint!("publish.after_origin");
        if refresh(link, &pool).await? {
            let seen = link.volume_info(&link.lookup_volume(&pool, &base.volume).await?).await?.capacity;
            if seen != base.virtual_size {
                let text = format!(
                    "host {} sees {seen} bytes in image {}, its header says {}: the volume {} is not what was uploaded",
                    self.host.host,
                    self.key(),
                    base.virtual_size,
                    base.volume
                );
                return Err(ProviderError::new(Reason::Internal, text));
            }
        }
        failpoint!("publish.before_marker");
        self.put(link, &pool, &format!("{}{MARKER}", base.volume), base.digest.as_str().into()).await?;
        failpoint!("publish.after_marker");
        Ok(())
    }

    /// Writes a small volume. One of that name can only be ours, from before a lost link.
    async fn put(&self, link: &dyn Hypervisor, pool: &PoolRef, name: &str, content: Vec<u8>) -> Result<()> {
        let xml = volume_xml(name, content.len() as u64);
        let volume = match link.create_volume(pool, &xml).await {
            Err(e) if e.is(code::STORAGE_VOL_EXIST) => {
                link.delete_volume(&link.lookup_volume(pool, name).await?).await?;
                link.create_volume(pool, &xml).await?
            }
            created => created?,
        };
        if name.ends_with(MARKER) {
            failpoint!("publish.in_marker");
        } else {
            failpoint!("publish.in_origin");
        }
        let (parts, queue) = mpsc::channel(2);
        let length = content.len() as u64;
        // both fit into the queue
        let _ = parts.try_send(UploadPart::Data(Bytes::from(content)));
        let _ = parts.try_send(UploadPart::Finish);
        link.upload(&volume, length, queue, self.wanted.entry.budgets.upload_small).await?;
        Ok(())
    }

    /// Removes what was made, the marker first, so that at no time the rest looks complete.
    async fn clean_up(&self, link: &dyn Hypervisor) {
        let result = if link.is_alive() {
            self.remove(link).await
        } else {
            match self.connect.dedicated(self.host).await {
                Ok(second) => {
                    let result = self.remove(&*second).await;
                    second.close();
                    result
                }
                Err(e) => Err(e),
            }
        };
        if let Err(e) = result {
            let (host, volume) = (&self.host.host, self.name());
            tracing::warn!(%host, %volume, error = %e.chain(), "an incomplete base could not be removed; it is listed until it is evicted");
        }
    }

    async fn remove(&self, link: &dyn Hypervisor) -> Result<()> {
        let pool = link.lookup_pool(&self.wanted.host.pool).await?;
        let base = self.name();
        for name in [format!("{base}{MARKER}"), format!("{base}{ORIGIN}"), base] {
            match link.lookup_volume(&pool, &name).await {
                Ok(volume) => link.delete_volume(&volume).await?,
                Err(e) if e.is(code::NO_STORAGE_VOL) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// Raw, whatever the content will be: for any other format libvirt would write a header of its own.
/// Fully allocated: a lack of room shows here, where it is answered, and not in a stream write.
fn volume_xml(name: &str, length: u64) -> String {
    let name = quick_xml::escape::escape(name);
    format!(
        "<volume><name>{name}</name><capacity unit='bytes'>{length}</capacity><allocation unit='bytes'>{length}</allocation>\
         <target><format type='raw'/></target></volume>"
    )
}

/// False if libvirt did not refresh because of a running job, for as long as that is worth waiting for.
async fn refresh(link: &dyn Hypervisor, pool: &PoolRef) -> Result<bool> {
    for attempt in 0..REFRESH_TRIES {
        match link.refresh_pool(pool).await {
            Ok(()) => return Ok(true),
            Err(e) if is_pool_job(&e) => {
                tokio::time::sleep(REFRESH_PAUSE * 2u32.pow(attempt)).await;
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(false)
}
