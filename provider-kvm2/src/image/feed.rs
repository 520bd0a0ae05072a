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
use super::qcow2::HEAD;
use crate::config::Sha256Hex;
use crate::error::{ProviderError, Reason, Result};

/// Pieces of a download between two stages. hyper reads at most about 400 KiB at once,
/// so this is at most about 2 MiB for each of them.
pub(crate) const DEPTH: usize = 4;

/// An image that is being read: its first bytes are known, the rest follows.
#[derive(Debug)]
pub(crate) struct Feed {
    body: Body,
    head: VecDeque<Bytes>,
    ended: bool,
    hash: Hashing,
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
    /// Reads as much as it takes to tell what the image is, and gives a copy of that.
    pub(crate) async fn open(mut body: Body) -> Result<(Self, Vec<u8>)> {
        let mut head = VecDeque::new();
        let mut copy = Vec::new();
        let mut ended = false;
        while copy.len() < HEAD {
            match body.chunk().await? {
                Some(bytes) => {
                    copy.extend_from_slice(&bytes[..bytes.len().min(HEAD - copy.len())]);
                    head.push_back(bytes);
                }
                None => {
                    ended = true;
                    break;
                }
            }
        }
        Ok((Self { body, head, ended, hash: Hashing::start() }, copy))
    }

    pub(crate) fn body(&self) -> &Body {
        &self.body
    }

    /// The next bytes for the volume; None once all were given out.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>> {
        let bytes = match self.head.pop_front() {
            Some(bytes) => bytes,
            None if self.ended => return Ok(None),
            None => match self.body.chunk().await? {
                Some(bytes) => bytes,
                None => {
                    self.ended = true;
                    return Ok(None);
                }
            },
        };
        self.hash.update(bytes.clone()).await?;
        Ok(Some(bytes))
    }

    /// After the last chunk.
    pub(crate) async fn finish(self) -> Result<Digests> {
        let digest = self.hash.finish().await?;
        Ok(Digests { download: digest.clone(), stored: digest })
    }
}

/// A sha256 on a thread of its own. Dropped, it ends.
#[derive(Debug)]
struct Hashing {
    pieces: mpsc::Sender<Bytes>,
    thread: JoinHandle<[u8; 32]>,
}

impl Hashing {
    fn start() -> Self {
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

    async fn update(&self, piece: Bytes) -> Result<()> {
        self.pieces.send(piece).await.map_err(|_| lost())
    }

    async fn finish(self) -> Result<Sha256Hex> {
        drop(self.pieces);
        Ok(Sha256Hex::of(&self.thread.await.map_err(|e| lost().with_source(e))?))
    }
}

fn lost() -> ProviderError {
    ProviderError::new(Reason::Internal, "the thread that hashes an image has ended")
}
