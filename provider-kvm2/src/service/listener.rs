//! Where the daemon listens: a unix socket that only its user may open, a TCP
//! address, or what systemd passed.
//!
//! A unix socket appears under its name only when it has its mode and is
//! listening: it is bound in a private directory and renamed. A socket that
//! another daemon answers on is left alone; a stale one is replaced.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::{BoxStream, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// Only the daemon's own user may connect.
const SOCKET_MODE: u32 = 0o600;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("another daemon answers on {}: stop it or choose another --socket", .path.display())]
    InUse { path: PathBuf },
    #[error("{} exists and is no socket: remove it or choose another --socket", .path.display())]
    NotASocket { path: PathBuf },
    #[error("whether a daemon answers on {} cannot be told: remove the file or choose another --socket", .path.display())]
    Undecided { path: PathBuf, source: io::Error },
    #[error("the socket {} cannot be made: its directory has to exist and be writable", .path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("cannot listen on {address}")]
    Tcp { address: SocketAddr, source: io::Error },
    #[error("the socket passed by systemd cannot be used")]
    Passed { source: io::Error },
}

/// A bound listener. Dropping it removes the unix socket that it made.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    made: Option<MadeSocket>,
}

#[derive(Debug)]
enum Kind {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The socket file, removed when dropped unless another one has its name by then.
#[derive(Debug)]
struct MadeSocket {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for MadeSocket {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|now| now == self.inode) {
            // if it stays, the next start finds it stale and replaces it
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|m| (m.dev(), m.ino()))
}

impl Listener {
    /// Binds `path`. Short file operations, done before there is anything else to wait for.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
        let wrap = |source| ListenError::Socket { path: path.to_owned(), source };
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        // two daemons that start at once take turns; the lock ends with the handle
        let lock = fs::File::open(directory).map_err(wrap)?;
        lock.lock().map_err(wrap)?;
        refuse_a_live_one(path)?;

        let private = PrivateDirectory::within(directory).map_err(wrap)?;
        let bound = private.0.join("s");
        let listener = UnixListener::bind(&bound).map_err(wrap)?;
        fs::set_permissions(&bound, fs::Permissions::from_mode(SOCKET_MODE)).map_err(wrap)?;
        let inode = inode(&bound).map_err(wrap)?;
        fs::rename(&bound, path).map_err(wrap)?;
        Ok(Self { kind: Kind::Unix(listener), made: Some(MadeSocket { path: path.to_owned(), inode }) })
    }

    pub async fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let listener = TcpListener::bind(address).await.map_err(|source| ListenError::Tcp { address, source })?;
        Ok(Self { kind: Kind::Tcp(listener), made: None })
    }

    /// The first socket that systemd passed, if it passed any; whether it is one that others can reach
    /// was decided in the unit file.
    pub fn passed() -> Result<Option<Self>, ListenError> {
        let wrap = |source| ListenError::Passed { source };
        let mut passed = listenfd::ListenFd::from_env();
        if passed.len() == 0 {
            return Ok(None);
        }
        // a descriptor of the wrong kind stays in its place, so that the next question finds it
        if let Ok(Some(unix)) = passed.take_unix_listener(0) {
            unix.set_nonblocking(true).map_err(wrap)?;
            let kind = Kind::Unix(UnixListener::from_std(unix).map_err(wrap)?);
            return Ok(Some(Self { kind, made: None }));
        }
        let Some(tcp) = passed.take_tcp_listener(0).map_err(wrap)? else { return Ok(None) };
        tcp.set_nonblocking(true).map_err(wrap)?;
        Ok(Some(Self { kind: Kind::Tcp(TcpListener::from_std(tcp).map_err(wrap)?), made: None }))
    }

    /// Where callers find it: the path of a Unix socket, or address and port.
    pub fn place(&self) -> String {
        match &self.kind {
            Kind::Unix(listener) => {
                let address = listener.local_addr().ok();
                // one of our own was bound under another name first
                let path = self.made.as_ref().map(|made| &*made.path).or_else(|| address.as_ref()?.as_pathname());
                path.map_or_else(|| "a socket without a name".to_owned(), |path| path.display().to_string())
            }
            Kind::Tcp(_) => self.local_addr().map_or_else(|| "a socket without an address".to_owned(), |a| a.to_string()),
        }
    }

    /// Of a TCP listener.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Tcp(listener) => listener.local_addr().ok(),
            Kind::Unix(_) => None,
        }
    }

    /// The connections, each cut once `closed` is cancelled. Once `no_more` is cancelled none is taken, the
    /// listener is closed and its socket file removed, but the stream does not end: its end would make
    /// tonic send every open connection away, and with it callers that are owed an answer.
    pub(super) fn incoming(self, no_more: CancellationToken, closed: CancellationToken) -> impl Stream<Item = io::Result<Conn>> {
        let made = self.made;
        let streams: BoxStream<'static, io::Result<Box<dyn Io>>> = match self.kind {
            Kind::Unix(listener) => UnixListenerStream::new(listener).map(|c| c.map(|c| Box::new(c) as Box<dyn Io>)).boxed(),
            Kind::Tcp(listener) => TcpListenerStream::new(listener)
                .map(|c| {
                    c.map(|c| {
                        // small frames go out at once; without it the connection only is slower
                        let _ = c.set_nodelay(true);
                        Box::new(c) as Box<dyn Io>
                    })
                })
                .boxed(),
        };
        let taken = streams.map(move |io| {
            let _kept = &made;
            io.map(|io| Conn { io, closed: Box::pin(closed.clone().cancelled_owned()) })
        });
        taken.take_until(no_more.cancelled_owned()).chain(futures::stream::pending())
    }
}

fn refuse_a_live_one(path: &Path) -> Result<(), ListenError> {
    let path_of = || path.to_owned();
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(ListenError::Undecided { path: path_of(), source }),
        Ok(meta) if !meta.file_type().is_socket() => return Err(ListenError::NotASocket { path: path_of() }),
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse { path: path_of() }),
        Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => Ok(()),
        Err(source) => Err(ListenError::Undecided { path: path_of(), source }),
    }
}

/// A directory in the socket's that only this user may enter; removed when dropped.
struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    fn within(directory: &Path) -> io::Result<Self> {
        // the lock on `directory` is held, so one that is there is the debris of a crash
        let path = directory.join(".kvm2");
        let _ = fs::remove_file(path.join("s"));
        let _ = fs::remove_dir(&path);
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0.join("s"));
        let _ = fs::remove_dir(&self.0);
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// One connection. After the drain it reads as ended, which is how streams that never end by
/// themselves (a watch of the health) are closed.
pub(super) struct Conn {
    io: Box<dyn Io>,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connected for Conn {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

fn cut() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the daemon has stopped")
}

impl AsyncRead for Conn {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(cut()));
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Conn {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.closed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(cut()));
        }
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_its_users_alone_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("p.sock");
        let listener = Listener::unix(&path).expect("nothing is there");
        assert_eq!(listener.place(), path.display().to_string());
        let meta = fs::symlink_metadata(&path).expect("it is there");
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 1, "nothing else is left behind");
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_live_socket_is_refused_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("p.sock");
        let first = Listener::unix(&path).expect("nothing is there");
        assert!(matches!(Listener::unix(&path), Err(ListenError::InUse { .. })));
        assert!(path.exists(), "the refused one must not remove it");
        // what a killed daemon leaves: the file without a listener
        let Listener { kind, made } = first;
        std::mem::forget(made);
        drop(kind);
        let second = Listener::unix(&path).expect("it is stale");
        std::os::unix::net::UnixStream::connect(&path).expect("the second one listens");
        drop(second);
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("p.sock");
        fs::write(&path, "precious").expect("writable");
        assert!(matches!(Listener::unix(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
    }

    #[tokio::test]
    async fn an_old_listener_does_not_remove_the_socket_of_its_successor() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("p.sock");
        let first = Listener::unix(&path).expect("nothing is there");
        fs::remove_file(&path).expect("a person removed it");
        let _second = Listener::unix(&path).expect("nothing is there");
        drop(first);
        assert!(path.exists());
    }
}
