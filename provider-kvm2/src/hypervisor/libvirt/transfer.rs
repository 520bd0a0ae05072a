//! Uploads and downloads. libvirtd 11.3 dies when a stream write fails on its side
//! or when it gets more bytes than were declared, so neither may happen: data past
//! the declared length stays here, and a source that ends early aborts the stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::ffi::{OpenStream, Volume};
use super::worker::Fault;
use crate::hypervisor::{CallFailure, UploadPart};
use crate::link::state::LinkState;

/// The largest payload that every libvirt since 1.0 takes in one message.
const CHUNK: usize = 262_120;

/// Chunks that wait for the thread that sends; more would only be memory.
const QUEUE: usize = 4;

/// How long the host may take for one chunk before it counts as hung.
const SINK_STALL: Duration = Duration::from_secs(60);

/// Hands parts to the blocking side, a chunk at a time, and lets go of it when the link dies or hangs.
pub(super) fn feed(mut parts: mpsc::Receiver<UploadPart>, state: &Arc<LinkState>, tracker: &TaskTracker) -> mpsc::Receiver<UploadPart> {
    let (to_thread, from_source) = mpsc::channel(QUEUE);
    let state = state.clone();
    tracker.spawn(async move {
        loop {
            let part = tokio::select! {
                part = parts.recv() => part,
                _ = state.died() => return,
                // the thread ended the upload by itself
                () = to_thread.closed() => return,
            };
            match part {
                Some(UploadPart::Data(mut data)) => {
                    while data.has_remaining() {
                        let chunk = data.split_to(data.len().min(CHUNK));
                        if !hand_over(&to_thread, UploadPart::Data(chunk), &state).await {
                            return;
                        }
                    }
                }
                Some(end) => {
                    hand_over(&to_thread, end, &state).await;
                    return;
                }
                None => return,
            }
        }
    });
    from_source
}

/// False once there is nobody to hand anything to.
async fn hand_over(to_thread: &mpsc::Sender<UploadPart>, part: UploadPart, state: &LinkState) -> bool {
    tokio::select! {
        sent = to_thread.send(part) => sent.is_ok(),
        _ = state.died() => false,
        () = tokio::time::sleep(SINK_STALL) => {
            state.kill(&format!("an upload made no progress for {} s", SINK_STALL.as_secs()));
            false
        }
    }
}

/// Blocks until the upload is over; answers how many bytes were sent.
///
/// On a link that has died meanwhile the stream is aborted, however long the host takes to answer that.
pub(super) fn upload(volume: &Volume, length: u64, mut parts: mpsc::Receiver<UploadPart>, state: &Arc<LinkState>) -> Result<u64, Fault> {
    // before the stream, so that it is dropped after it
    let _open = state.stream();
    // a stream of length 0 would take everything
    let mut stream = if length == 0 { None } else { Some(OpenStream::upload(volume, length)?) };
    let mut sent = 0_u64;
    loop {
        let part = parts.blocking_recv();
        if state.is_dead() {
            return Err(Fault::Other(CallFailure::SourceAborted));
        }
        match part {
            Some(UploadPart::Data(mut data)) => {
                if data.len() as u64 > length - sent {
                    let what = format!("the source has more than the {length} bytes it announced");
                    return Err(Fault::Other(CallFailure::BadAnswer { what }));
                }
                let Some(stream) = &mut stream else { continue };
                while data.has_remaining() {
                    let n = stream.send(&data[..data.len().min(CHUNK)])?;
                    if n == 0 {
                        return Err(Fault::Other(CallFailure::BadAnswer { what: "the stream takes nothing".to_owned() }));
                    }
                    data.advance(n);
                    sent += n as u64;
                }
            }
            Some(UploadPart::Finish) => {
                if let Some(stream) = stream {
                    stream.finish()?;
                }
                return Ok(sent);
            }
            // dropping the stream aborts it
            Some(UploadPart::Abort) | None => return Err(Fault::Other(CallFailure::SourceAborted)),
        }
    }
}

/// Blocks until the first `limit` bytes, or all of the volume, are read.
pub(super) fn download(volume: &Volume, limit: u64, state: &Arc<LinkState>) -> Result<Bytes, Fault> {
    let limit_bytes = usize::try_from(limit).unwrap_or(usize::MAX);
    if limit == 0 {
        return Ok(Bytes::new());
    }
    let _open = state.stream();
    let mut stream = OpenStream::download(volume, limit)?;
    let mut content = BytesMut::new();
    let mut buffer = vec![0; CHUNK.min(limit_bytes)];
    while content.len() < limit_bytes {
        let room = buffer.len().min(limit_bytes - content.len());
        let n = stream.receive(&mut buffer[..room])?;
        if n == 0 {
            stream.finish()?;
            return Ok(content.freeze());
        }
        content.extend_from_slice(&buffer[..n]);
    }
    Ok(content.freeze())
}
