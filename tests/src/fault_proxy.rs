//! A TCP proxy that breaks what goes through it, on demand.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// What happens to the bytes. Takes effect at once, for open connections as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Pass,
    /// Bytes are neither read nor written, and nothing is closed: a peer that has gone silent.
    Stall,
    /// Passes until so many bytes have gone to the server on a connection, then closes both ends.
    CutAfter(u64),
    /// Open connections and new ones end with a reset.
    Reset,
    /// Nobody listens; open connections end.
    Refuse,
}

/// A proxy in front of one server. Ends with its connections when dropped.
#[derive(Debug)]
pub struct FaultProxy {
    addr: SocketAddr,
    controls: Controls,
    task: JoinHandle<()>,
}

#[derive(Debug, Clone)]
struct Controls {
    fault: Arc<watch::Sender<Fault>>,
    delay: Arc<watch::Sender<Duration>>,
    traffic: Arc<Traffic>,
}

/// What has gone through, over all connections.
#[derive(Debug, Default)]
struct Traffic {
    connections: AtomicU64,
    to_server: AtomicU64,
    to_client: AtomicU64,
    turns: AtomicU64,
    last: Mutex<Option<Direction>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToServer,
    ToClient,
}

/// Counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub connections: u64,
    pub to_server: u64,
    pub to_client: u64,
    /// How often the client's bytes followed the server's: round trips, when one connection is used at a time.
    pub round_trips: u64,
}

impl FaultProxy {
    pub async fn to(server: impl Into<String>) -> Self {
        let server = server.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound address");
        let controls = Controls {
            fault: Arc::new(watch::Sender::new(Fault::Pass)),
            delay: Arc::new(watch::Sender::new(Duration::ZERO)),
            traffic: Arc::default(),
        };
        let task = tokio::spawn(listen(listener, addr, server, controls.clone()));
        Self { addr, controls, task }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn set(&self, fault: Fault) {
        self.controls.fault.send_replace(fault);
    }

    /// Each byte arrives so much later, in both directions.
    pub fn delay(&self, one_way: Duration) {
        self.controls.delay.send_replace(one_way);
    }

    pub fn counts(&self) -> Counts {
        let traffic = &self.controls.traffic;
        Counts {
            connections: traffic.connections.load(Ordering::Relaxed),
            to_server: traffic.to_server.load(Ordering::Relaxed),
            to_client: traffic.to_client.load(Ordering::Relaxed),
            round_trips: traffic.turns.load(Ordering::Relaxed),
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Traffic {
    fn passed(&self, direction: Direction, bytes: usize) {
        let counter = if direction == Direction::ToServer { &self.to_server } else { &self.to_client };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if direction == Direction::ToServer && *last == Some(Direction::ToClient) {
            self.turns.fetch_add(1, Ordering::Relaxed);
        }
        *last = Some(direction);
    }
}

async fn listen(listener: TcpListener, addr: SocketAddr, server: String, controls: Controls) {
    let mut fault = controls.fault.subscribe();
    let mut listener = Some(listener);
    // dropped with this task, which ends the connections
    let mut connections = JoinSet::new();
    loop {
        if *fault.borrow_and_update() == Fault::Refuse {
            listener = None;
        } else if listener.is_none() {
            listener = bind_again(addr).ok();
        }
        tokio::select! {
            accepted = accept(listener.as_ref()) => if let Ok(client) = accepted {
                controls.traffic.connections.fetch_add(1, Ordering::Relaxed);
                connections.spawn(connection(client, server.clone(), controls.clone()));
            },
            changed = fault.changed() => if changed.is_err() { return },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

fn bind_again(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(64)
}

async fn connection(client: TcpStream, server: String, controls: Controls) {
    let mut fault = controls.fault.subscribe();
    // a stalled path completes no new connection to the server either
    if fault.wait_for(|fault| *fault != Fault::Stall).await.is_err() {
        return;
    }
    if *fault.borrow() == Fault::Reset {
        let _ = client.set_zero_linger();
        return;
    }
    let Ok(server) = TcpStream::connect(&server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    // half closes are passed on: the connection is over when both directions are; a cut or a reset ends both at once
    let _ = tokio::try_join!(
        copy(&mut client_read, &mut server_write, Direction::ToServer, controls.clone()),
        copy(&mut server_read, &mut client_write, Direction::ToClient, controls)
    );
    if *fault.borrow() == Fault::Reset {
        // what is closed now is closed without a goodbye, which dropping a write half would say
        let _ = (client_read.as_ref().set_zero_linger(), server_read.as_ref().set_zero_linger());
        client_write.forget();
        server_write.forget();
    }
}

/// The connection is to end now, in both directions.
struct Broken;

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// How the reading of one direction ended.
enum Reading {
    AtEnd,
    Cut,
}

/// One direction. Reading goes on while bytes wait for their time, so a delay does not limit the rate.
async fn copy(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, direction: Direction, controls: Controls) -> Result<(), Broken> {
    let (due, mut waiting) = mpsc::channel::<(Instant, Bytes)>(64);
    let controls = &controls;
    let read = async move {
        let mut fault = controls.fault.subscribe();
        let mut total = 0u64;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            pass(&mut fault).await?;
            let n = tokio::select! {
                n = from.read(&mut buffer) => n?,
                // not read while stalled, and a reset must not wait for bytes
                changed = fault.changed() => { changed.map_err(|_| Broken)?; continue }
            };
            if n == 0 {
                return Ok::<_, Broken>(Reading::AtEnd);
            }
            let mut part = Bytes::copy_from_slice(&buffer[..n]);
            let limit = match *fault.borrow() {
                Fault::CutAfter(limit) if direction == Direction::ToServer => limit,
                _ => u64::MAX,
            };
            total += n as u64;
            let over = total.saturating_sub(limit);
            part.truncate(n.saturating_sub(usize::try_from(over).unwrap_or(n)));
            let when = Instant::now() + *controls.delay.borrow();
            due.send((when, part)).await.map_err(|_| Broken)?;
            if over > 0 {
                return Ok(Reading::Cut);
            }
        }
    };
    let write = async move {
        let mut fault = controls.fault.subscribe();
        while let Some((when, part)) = waiting.recv().await {
            tokio::time::sleep_until(when).await;
            fault.wait_for(|fault| *fault != Fault::Stall).await.map_err(|_| Broken)?;
            to.write_all(&part).await?;
            controls.traffic.passed(direction, part.len());
        }
        to.shutdown().await?;
        Ok::<_, Broken>(())
    };
    // what was read before a cut still arrives
    match tokio::try_join!(read, write)? {
        (Reading::AtEnd, ()) => Ok(()),
        (Reading::Cut, ()) => Err(Broken),
    }
}

/// Waits while the path is stalled; an error when it is to end.
async fn pass(fault: &mut watch::Receiver<Fault>) -> Result<(), Broken> {
    let now = *fault.wait_for(|fault| *fault != Fault::Stall).await.map_err(|_| Broken)?;
    if matches!(now, Fault::Reset | Fault::Refuse) { Err(Broken) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::eventually;

    const LIMIT: Duration = Duration::from_secs(10);

    /// A server that sends back what it gets, and a proxy in front of it.
    async fn echo() -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        FaultProxy::to(addr.to_string()).await
    }

    async fn round_trip(stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(b"ping").await?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.map(|_| ())
    }

    #[tokio::test]
    async fn without_a_fault_bytes_pass_and_round_trips_are_counted() {
        let proxy = echo().await;
        let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
        for _ in 0..3 {
            round_trip(&mut stream).await.expect("an echo");
        }
        let counts = proxy.counts();
        assert_eq!((counts.connections, counts.to_server, counts.to_client), (1, 12, 12));
        // the first ping follows nothing
        assert_eq!(counts.round_trips, 2);
    }

    #[tokio::test]
    async fn a_stalled_path_delivers_nothing_until_it_passes_again() {
        let proxy = echo().await;
        let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
        round_trip(&mut stream).await.expect("an echo");
        proxy.set(Fault::Stall);
        stream.write_all(b"pong").await.expect("the kernel takes it");
        let mut answer = [0; 4];
        tokio::time::timeout(Duration::from_millis(200), stream.read_exact(&mut answer)).await.expect_err("silence");
        proxy.set(Fault::Pass);
        tokio::time::timeout(LIMIT, stream.read_exact(&mut answer)).await.expect("in time").expect("an echo");
    }

    #[tokio::test]
    async fn a_cut_lets_exactly_its_bytes_through_and_closes() {
        let proxy = echo().await;
        proxy.set(Fault::CutAfter(6));
        let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
        stream.write_all(&[7; 100]).await.expect("the kernel takes it");
        let mut rest = Vec::new();
        // the end may be a close or a reset, since the client's bytes were not all read
        let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut rest)).await.expect("in time");
        assert_eq!(proxy.counts().to_server, 6);
    }

    #[tokio::test]
    async fn reset_ends_an_open_connection_with_a_reset() {
        let proxy = echo().await;
        let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
        round_trip(&mut stream).await.expect("an echo");
        proxy.set(Fault::Reset);
        let error = tokio::time::timeout(LIMIT, stream.read_u8()).await.expect("in time").expect_err("no byte");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn refuse_closes_the_port_and_pass_opens_it_again() {
        let proxy = echo().await;
        proxy.set(Fault::Refuse);
        eventually("the port is closed", LIMIT, || async {
            match TcpStream::connect(proxy.addr()).await {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        proxy.set(Fault::Pass);
        eventually("the port is open", LIMIT, || async {
            let mut stream = TcpStream::connect(proxy.addr()).await.map_err(|e| e.to_string())?;
            round_trip(&mut stream).await.map_err(|e| e.to_string())
        })
        .await;
    }
}
