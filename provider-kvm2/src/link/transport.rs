//! The TCP stream under an SSH session: acknowledges at once, remembers when the
//! peer was last heard, and can be shut down from outside at any moment.

use std::io;
use std::os::linux::net::TcpStreamExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::state::LinkState;

pub struct Transport {
    stream: TcpStream,
    /// The same socket under another descriptor, for options and for the shutdown.
    twin: Arc<std::net::TcpStream>,
    state: Arc<LinkState>,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "transport of the {:?}", self.state)
    }
}

impl Transport {
    /// Takes the connection over on behalf of the link.
    pub fn new(stream: TcpStream, state: Arc<LinkState>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let stream = stream.into_std()?;
        let twin = Arc::new(stream.try_clone()?);
        state.own_socket(twin.clone());
        state.heard().now();
        Ok(Self { stream: TcpStream::from_std(stream)?, twin, state })
    }
}

impl AsyncRead for Transport {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.state.heard().now();
            // The kernel leaves this mode by itself, so it is asked for again after every read:
            // a delayed acknowledgement costs 40 ms while the socket channel opens.
            let _ = self.twin.set_quickack(true);
        }
        polled
    }
}

impl AsyncWrite for Transport {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // a peer that is gone makes this fail, and the failure would hide the session's own error
        Pin::new(&mut self.stream).poll_shutdown(cx).map(|_| Ok(()))
    }
}
