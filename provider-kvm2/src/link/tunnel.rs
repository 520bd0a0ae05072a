//! The way from libvirt's C client to the host: a private unix socket on this
//! side, a direct-streamlocal channel of the SSH session on the other.
//!
//! The socket lies in a directory of mode 0700, takes one connection, of this very
//! process, and is gone from the file system as soon as it has it. When either
//! side ends, or the link dies, both ends are closed: that is what makes a thread
//! return that sits in a libvirt call. Only under an open stream the bytes go on
//! after the link's death, until the host has answered the end of that stream.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::BytesMut;
use russh::client::Msg;
use russh::{Channel, ChannelMsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use super::state::LinkState;

/// Longest path of a unix socket that Linux takes, without its final NUL.
const MAX_SOCKET_PATH: usize = 107;

/// libvirt sends a stream in frames of 256 KiB; one read takes a whole one.
const READ_BUFFER: usize = 256 * 1024;

/// A socket that waits for one connection of this process.
#[derive(Debug)]
pub struct Door {
    directory: PathBuf,
    socket: PathBuf,
    listener: UnixListener,
}

impl Door {
    /// Makes the socket under the service manager's runtime directory, or the temporary one.
    pub fn open() -> io::Result<Self> {
        let name = format!("kvm2-{:016x}", rand::random::<u64>());
        let runtime = std::env::var_os("RUNTIME_DIRECTORY").or_else(|| std::env::var_os("XDG_RUNTIME_DIR")).map(PathBuf::from);
        let mut failure = io::Error::new(io::ErrorKind::InvalidFilename, "no directory has a path short enough for a socket");
        for base in runtime.into_iter().chain([std::env::temp_dir(), PathBuf::from("/tmp")]) {
            let directory = base.join(&name);
            if directory.as_os_str().len() + "/s".len() > MAX_SOCKET_PATH {
                continue;
            }
            match Self::open_in(directory) {
                Ok(door) => return Ok(door),
                Err(e) => failure = e,
            }
        }
        Err(failure)
    }

    fn open_in(directory: PathBuf) -> io::Result<Self> {
        std::fs::DirBuilder::new().mode(0o700).create(&directory)?;
        let socket = directory.join("s");
        match UnixListener::bind(&socket) {
            Ok(listener) => Ok(Self { directory, socket, listener }),
            Err(e) => {
                let _ = std::fs::remove_dir(&directory);
                Err(e)
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.socket
    }

    /// The libvirt URI that leads through this door.
    pub fn uri(&self) -> String {
        let mut uri = "qemu+unix:///system?socket=".to_owned();
        for byte in self.socket.as_os_str().as_bytes() {
            match byte {
                b'/' | b'-' | b'.' | b'_' | b'~' => uri.push(char::from(*byte)),
                byte if byte.is_ascii_alphanumeric() => uri.push(char::from(*byte)),
                byte => uri.push_str(&format!("%{byte:02X}")),
            }
        }
        uri
    }

    /// The first connection that this process makes; then the socket is gone.
    pub async fn accept(self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let pid = stream.peer_cred()?.pid();
            // another process of this user, or root, has no business here
            if pid.is_none_or(|pid| u32::try_from(pid) == Ok(std::process::id())) {
                return Ok(stream);
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let _ = std::fs::remove_dir(&self.directory);
    }
}

/// Carries bytes until one side ends, then ends the link; or until the link has died and its streams have ended.
pub async fn carry(door: Door, channel: Channel<Msg>, state: Arc<LinkState>, closing: CancellationToken) {
    let mut pump = std::pin::pin!(pump(door, channel));
    tokio::select! {
        cause = &mut pump => state.kill(&cause),
        _ = state.died() => tokio::select! {
            biased;
            () = state.streams_ended(&closing) => {}
            _ = &mut pump => {}
        },
    }
    state.hang_up();
}

async fn pump(door: Door, channel: Channel<Msg>) -> String {
    let local = match door.accept().await {
        Ok(local) => local,
        Err(e) => return format!("the local socket of the tunnel failed: {e}"),
    };
    let (mut local_read, mut local_write) = local.into_split();
    let (mut remote_read, remote_write) = channel.split();
    let up = async {
        let mut buffer = BytesMut::with_capacity(READ_BUFFER);
        loop {
            buffer.reserve(READ_BUFFER);
            match local_read.read_buf(&mut buffer).await {
                Ok(0) => return "the libvirt connection was closed".to_owned(),
                Ok(_) => {}
                Err(e) => return format!("the libvirt connection broke: {e}"),
            }
            if let Err(e) = remote_write.data_bytes(buffer.split().freeze()).await {
                return format!("the SSH session broke: {e}");
            }
        }
    };
    let down = async {
        loop {
            match remote_read.wait().await {
                Some(ChannelMsg::Data { data }) => {
                    if let Err(e) = local_write.write_all(&data).await {
                        return format!("the libvirt connection broke: {e}");
                    }
                }
                Some(ChannelMsg::Eof | ChannelMsg::Close) => return "libvirtd closed the connection".to_owned(),
                Some(_) => {}
                None => return "the SSH session ended".to_owned(),
            }
        }
    };
    tokio::select! { cause = up => cause, cause = down => cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn the_socket_is_private_short_and_gone_after_one_accept() {
        let door = Door::open().expect("a temporary directory");
        let path = door.path().to_owned();
        let directory = path.parent().expect("inside its directory").to_owned();
        assert!(path.as_os_str().len() <= MAX_SOCKET_PATH);
        assert_eq!(directory.metadata().expect("made").permissions().mode() & 0o777, 0o700);
        let client = UnixStream::connect(&path).await.expect("listening");
        door.accept().await.expect("our own connection");
        assert!(!directory.exists());
        drop(client);
    }

    #[tokio::test]
    async fn a_path_with_strange_characters_is_escaped_in_the_uri() {
        let base = tempfile::tempdir().expect("temporary directory");
        let door = Door::open_in(base.path().join("a b&c=%")).expect("makes it");
        let plain = base.path().to_str().expect("text");
        assert_eq!(door.uri(), format!("qemu+unix:///system?socket={plain}/a%20b%26c%3D%25/s"));
    }

    #[tokio::test]
    async fn a_door_nobody_came_through_leaves_nothing() {
        let door = Door::open().expect("a temporary directory");
        let directory = door.path().parent().expect("inside its directory").to_owned();
        drop(door);
        assert!(!directory.exists());
    }
}
