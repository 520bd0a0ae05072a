//! Unpacks gzip, xz and zstd images while they are downloaded.
//!
//! The bytes of the file are hashed and go through a decoder on a thread of its
//! own; what comes out is stored. The digest that a person configures is that of
//! the file as it is published, so of the packed bytes. A decoder is given a bound
//! for its memory and for its output: a small file may unpack to anything.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::feed::{DEPTH, Hashing};
use super::http::Body;
use super::qcow2::Kind;
use super::space::human;
use crate::config::Sha256Hex;
use crate::error::{ProviderError, Reason, Result};

/// Size of an unpacked piece.
const PIECE: usize = 256 << 10;

/// Ample for `xz -9` (65 MiB) and for `zstd --long` (128 MiB).
const DECODER_MEMORY: u64 = 160 << 20;
const ZSTD_WINDOW_LOG: u32 = 27;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    Gzip,
    Xz,
    Zstd,
}

impl Packing {
    pub fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Gzip => Some(Self::Gzip),
            Kind::Xz => Some(Self::Xz),
            Kind::Zstd => Some(Self::Zstd),
            _ => None,
        }
    }

    fn decoder(self, packed: impl Read + 'static) -> io::Result<Box<dyn Read>> {
        let packed = BufReader::with_capacity(PIECE, packed);
        Ok(match self {
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(packed)),
            Self::Xz => {
                let stream = liblzma::stream::Stream::new_stream_decoder(DECODER_MEMORY, liblzma::stream::CONCATENATED)?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(packed, stream))
            }
            Self::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                Box::new(decoder)
            }
        })
    }
}

/// An image that is being unpacked. Dropped, it ends its task and its thread.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pieces: mpsc::Receiver<Result<Bytes>>,
    download: JoinHandle<Option<Sha256Hex>>,
    /// Why the download failed, if it did: the cause of what the decoder then says.
    failed: Arc<OnceLock<ProviderError>>,
}

impl Unpacked {
    /// `head` was read from `body` already. `limit` bounds the output, in bytes.
    pub(crate) fn start(packing: Packing, name: &str, mut head: VecDeque<Bytes>, mut body: Body, limit: u64) -> Result<Self> {
        let failed = Arc::new(OnceLock::new());
        let (packed, queue) = mpsc::channel(DEPTH);
        let (out, pieces) = mpsc::channel(DEPTH);
        let hash = Hashing::start();
        let failure = failed.clone();
        let download = tokio::spawn(async move {
            let work = async {
                loop {
                    let bytes = match head.pop_front() {
                        Some(bytes) => bytes,
                        None => match body.chunk().await? {
                            Some(bytes) => bytes,
                            None => return Ok(Some(())),
                        },
                    };
                    hash.update(bytes.clone()).await?;
                    if packed.send(bytes).await.is_err() {
                        // the decoder has stopped, and says why itself
                        return Ok(None);
                    }
                }
            };
            let digest = match work.await {
                Ok(Some(())) => hash.finish().await.map(Some),
                Ok(None) => Ok(None),
                Err(e) => Err(e),
            };
            // noted before the decoder learns that there is no more
            let digest = digest.unwrap_or_else(|e| {
                let _ = failure.set(e);
                None
            });
            drop(packed);
            digest
        });
        let name = name.to_owned();
        std::thread::Builder::new()
            .name("unpack".to_owned())
            .spawn(move || unpack(packing, &name, Queue { queue, current: Bytes::new() }, limit, &out))
            .map_err(|e| ProviderError::new(Reason::Internal, "no thread for unpacking an image could be started").with_source(e))?;
        Ok(Self { pieces, download, failed })
    }

    /// The next unpacked bytes; None once all of a whole download are unpacked.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>> {
        let next = self.pieces.recv().await;
        match (next, self.failed.get()) {
            (Some(Ok(bytes)), _) => Ok(Some(bytes)),
            (Some(Err(_)) | None, Some(cause)) => Err(cause.clone()),
            (Some(Err(e)), None) => Err(e),
            (None, None) => Ok(None),
        }
    }

    /// The digest of the file as it was downloaded, after the last chunk.
    pub(crate) async fn finish(mut self) -> Result<Sha256Hex> {
        let lost = || ProviderError::new(Reason::Internal, "an image was unpacked without its download having ended");
        match (&mut self.download).await {
            Ok(Some(digest)) => Ok(digest),
            Ok(None) => Err(self.failed.get().cloned().unwrap_or_else(lost)),
            Err(e) => Err(lost().with_source(e)),
        }
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        self.download.abort();
    }
}

fn unpack(packing: Packing, name: &str, packed: Queue, limit: u64, out: &mpsc::Sender<Result<Bytes>>) {
    let mut left = limit;
    let result = packing.decoder(packed).and_then(|mut decoder| {
        loop {
            let mut piece = vec![0; PIECE];
            let n = decoder.read(&mut piece)?;
            if n == 0 {
                return Ok(());
            }
            let Some(rest) = left.checked_sub(n as u64) else {
                let text = format!("image {name} unpacks to more than the {} that are allowed; raise maxImageGiB", human(limit));
                let _ = out.blocking_send(Err(ProviderError::new(Reason::ImageTooLarge, text)));
                return Ok(());
            };
            left = rest;
            piece.truncate(n);
            // a receiver that is gone wants no more
            if out.blocking_send(Ok(piece.into())).is_err() {
                return Ok(());
            }
        }
    });
    if let Err(e) = result {
        let text = format!("image {name} cannot be unpacked; publish it again");
        let _ = out.blocking_send(Err(ProviderError::new(Reason::ImageFormatMismatch, text).with_source(e)));
    }
}

/// The download as the decoder reads it.
struct Queue {
    queue: mpsc::Receiver<Bytes>,
    current: Bytes,
}

impl Read for Queue {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.queue.blocking_recv() {
                Some(bytes) => self.current = bytes,
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.current.len());
        buffer[..n].copy_from_slice(&self.current.split_to(n));
        Ok(n)
    }
}
