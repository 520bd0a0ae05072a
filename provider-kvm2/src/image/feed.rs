//! The bytes of an image as they go into the volume, hashed beside the stream.
//!
//! Hashing costs more than sending on a fast link, so it runs on a thread of its
//! own; the pieces are shared, not copied. What is in flight is bounded by
//! [`DEPTH`] pieces per stage.

use std::collections::VecDeque;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::http::Body;
use super::qcow2::{HEAD, Sniffed, sniff};
use super::unpack::{Packing, Unpacked};
use crate::config::Sha256Hex;
use crate::error::{ProviderError, Reason, Result};

/// Pieces of a download between two stages. hyper reads at most about 400 KiB at once,
/// so this is at most about 2 MiB for each of them.
pub(crate) const DEPTH: usize = 4;

/// An image that is being read: its first bytes are known, the rest follows.
#[derive(Debug)]
pub(crate) struct Feed {
    origin: Origin,
    head: VecDeque<Bytes>,
    ended: bool,
    stored: Hashing,
    length: Option<u64>,
    etag: Option<String>,
    content_type: String,
}

#[derive(Debug)]
enum Origin {
    Plain(Box<Body>),
    Unpacked(Unpacked),
}

/// Digests of one whole image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Digests {
    /// Of the file as it was downloaded: what a person configures and what the marker says.
    pub(crate) download: Sha256Hex,
    /// Of the bytes in the volume.
    pub(crate) stored: Sha256Hex,
}

impl Feed {
    /// Reads as much as it takes to tell what the image is, and gives a copy of that. A packed
    /// image is unpacked from here on, to `limit` bytes at most.
    pub(crate) async fn open(body: Body, name: &str, limit: u64) -> Result<(Self, Vec<u8>)> {
        let (etag, content_type, length) = (body.etag().map(str::to_owned), body.content_type().to_owned(), body.length());
        let stored = Hashing::start();
        let mut feed =
            Self { origin: Origin::Plain(Box::new(body)), head: VecDeque::new(), ended: false, stored, length, etag, content_type };
        let mut copy = feed.fill().await?;
        if let Sniffed::Other(kind) = sniff(&copy)
            && let Some(packing) = Packing::of(kind)
            && let Origin::Plain(body) = feed.origin
        {
            // how much it unpacks to is known only afterwards
            feed.length = None;
            feed.ended = false;
            feed.origin = Origin::Unpacked(Unpacked::start(packing, name, std::mem::take(&mut feed.head), *body, limit)?);
            copy = feed.fill().await?;
        }
        Ok((feed, copy))
    }

    async fn fill(&mut self) -> Result<Vec<u8>> {
        let mut copy = Vec::new();
        while copy.len() < HEAD {
            let Some(bytes) = self.read().await? else { break };
            copy.extend_from_slice(&bytes[..bytes.len().min(HEAD - copy.len())]);
            self.head.push_back(bytes);
        }
        Ok(copy)
    }

    async fn read(&mut self) -> Result<Option<Bytes>> {
        if self.ended {
            return Ok(None);
        }
        let next = match &mut self.origin {
            Origin::Plain(body) => body.chunk().await?,
            Origin::Unpacked(unpacked) => unpacked.chunk().await?,
        };
        self.ended = next.is_none();
        Ok(next)
    }

    /// Of what goes into the volume; None where that shows only at the end.
    pub(crate) fn length(&self) -> Option<u64> {
        self.length
    }

    pub(crate) fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    pub(crate) fn content_type(&self) -> &str {
        &self.content_type
    }

    /// The next bytes for the volume; None once all were given out.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>> {
        let bytes = match self.head.pop_front() {
            Some(bytes) => bytes,
            None => match self.read().await? {
                Some(bytes) => bytes,
                None => return Ok(None),
            },
        };
        self.stored.update(bytes.clone()).await?;
        Ok(Some(bytes))
    }

    /// After the last chunk.
    pub(crate) async fn finish(self) -> Result<Digests> {
        let stored = self.stored.finish().await?;
        let download = match self.origin {
            Origin::Plain(_) => stored.clone(),
            Origin::Unpacked(unpacked) => unpacked.finish().await?,
        };
        Ok(Digests { download, stored })
    }
}

/// A sha256 on a thread of its own. Dropped, it ends.
#[derive(Debug)]
pub(super) struct Hashing {
    pieces: mpsc::Sender<Bytes>,
    thread: JoinHandle<[u8; 32]>,
}

impl Hashing {
    pub(super) fn start() -> Self {
        let (pieces, mut queue) = mpsc::channel::<Bytes>(DEPTH);
        let thread = tokio::task::spawn_blocking(move || {
            let mut hash = Sha256::new();
            while let Some(piece) = queue.blocking_recv() {
                hash.update(&piece);
            }
            hash.finalize().into()
        });
        Self { pieces, thread }
    }

    pub(super) async fn update(&self, piece: Bytes) -> Result<()> {
        self.pieces.send(piece).await.map_err(|_| lost())
    }

    pub(super) async fn finish(self) -> Result<Sha256Hex> {
        drop(self.pieces);
        Ok(Sha256Hex::of(&self.thread.await.map_err(|e| lost().with_source(e))?))
    }
}

fn lost() -> ProviderError {
    ProviderError::new(Reason::Internal, "the thread that hashes an image has ended")
}
