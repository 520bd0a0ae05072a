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

/// Connections that wait to be accepted.
const BACKLOG: u32 = 64;
/// What a slow path reads at a time, in bytes.
const SLOW_PART: usize = 4 << 10;
/// What a slow path keeps of a connection, in bytes.
const SLOW_BUFFER: u32 = 32 << 10;

/// What happens to the bytes. Takes effect at once, for open connections as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Pass,
    /// Bytes are neither read nor written, and nothing is closed: a peer that has gone silent.
    Stall,
    /// Passes until so many bytes have come from the server on a connection, then nothing more does: silence from that
    /// byte on.
    StallAfter(u64),
    /// Passes until so many bytes have gone to the server on a connection, then closes both ends.
    CutAfter(u64),
    /// Open connections and new ones end at both ends, in order.
    Close,
    /// Open connections and new ones end with a reset.
    Reset,
    /// The server's end of open connections is gone and the client is told nothing, as of a machine that lost its power.
    /// With the next fault, or none, the client's end is reset. New connections get no answer.
    HalfOpen,
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
    /// Bytes in a second that go to the server on a connection; None is all that come.
    drain: Option<u32>,
    traffic: Arc<Traffic>,
}

/// What has gone through, over all connections.
#[derive(Debug, Default)]
struct Traffic {
    connections: AtomicU64,
    open: AtomicU64,
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
    /// Connections to the server that are open now.
    pub open: u64,
    pub to_server: u64,
    pub to_client: u64,
    /// How often the client's bytes followed the server's: round trips, when one connection is used at a time.
    pub round_trips: u64,
}

impl FaultProxy {
    pub async fn to(server: impl Into<String>) -> Self {
        Self::start(server.into(), TcpSocket::new_v4().expect("a socket"), None)
    }

    /// A path on which at most so many bytes in a second get to the server; the client notices soon, since little is
    /// kept on the way.
    pub async fn slow(server: impl Into<String>, bytes_per_second: u32) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(SLOW_BUFFER).expect("a small buffer");
        Self::start(server.into(), socket, Some(bytes_per_second))
    }

    fn start(server: String, socket: TcpSocket, drain: Option<u32>) -> Self {
        // what it leaves in TIME-WAIT keeps it from its port else, when it listens again
        socket.set_reuseaddr(true).expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let listener = socket.listen(BACKLOG).expect("listening");
        let addr = listener.local_addr().expect("a bound address");
        let controls = Controls {
            fault: Arc::new(watch::Sender::new(Fault::Pass)),
            delay: Arc::new(watch::Sender::new(Duration::ZERO)),
            drain,
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
            open: traffic.open.load(Ordering::Relaxed),
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

/// Between two tries to listen again on the port that was given up.
const BIND_AGAIN: std::time::Duration = std::time::Duration::from_millis(100);

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
            // somebody's outgoing connection may have got the port meanwhile, and gives it back
            () = tokio::time::sleep(BIND_AGAIN), if listener.is_none() && *fault.borrow() != Fault::Refuse => {}
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
    socket.listen(BACKLOG)
}

async fn connection(client: TcpStream, server: String, controls: Controls) {
    let mut fault = controls.fault.subscribe();
    // a stalled path completes no new connection to the server either
    if fault.wait_for(|fault| !matches!(fault, Fault::Stall | Fault::HalfOpen)).await.is_err() {
        return;
    }
    match *fault.borrow() {
        Fault::Reset => return drop(client.set_zero_linger()),
        Fault::Close => return,
        _ => {}
    }
    let Ok(server) = TcpStream::connect(&server).await else { return };
    let open = Open::new(controls.traffic.clone());
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    // half closes are passed on: the connection is over when both directions are; a cut or a reset ends both at once
    let _ = tokio::try_join!(
        copy(&mut client_read, &mut server_write, Direction::ToServer, controls.clone()),
        copy(&mut server_read, &mut client_write, Direction::ToClient, controls)
    );
    let last = *fault.borrow();
    if matches!(last, Fault::Reset | Fault::HalfOpen) {
        // what is closed now is closed without a goodbye, which dropping a write half would say
        let _ = (client_read.as_ref().set_zero_linger(), server_read.as_ref().set_zero_linger());
        client_write.forget();
        server_write.forget();
    }
    if last == Fault::HalfOpen {
        drop((server_read, open));
        // an error is the end of the proxy, and of this connection with it
        let _ = fault.wait_for(|fault| *fault != Fault::HalfOpen).await;
    }
}

/// A connection to the server that is open.
struct Open(Arc<Traffic>);

impl Open {
    fn new(traffic: Arc<Traffic>) -> Self {
        traffic.open.fetch_add(1, Ordering::Relaxed);
        Self(traffic)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
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
    let drain = controls.drain.filter(|_| direction == Direction::ToServer);
    let read = async move {
        let mut fault = controls.fault.subscribe();
        let mut total = 0u64;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            pass(&mut fault).await?;
            let room = match *fault.borrow() {
                Fault::StallAfter(limit) if direction == Direction::ToClient => {
                    usize::try_from(limit.saturating_sub(total)).unwrap_or(usize::MAX)
                }
                _ if drain.is_some() => SLOW_PART,
                _ => usize::MAX,
            };
            if room == 0 {
                fault.changed().await.map_err(|_| Broken)?;
                continue;
            }
            let room = room.min(buffer.len());
            let n = tokio::select! {
                n = from.read(&mut buffer[..room]) => n?,
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
            if let Some(rate) = drain {
                tokio::time::sleep(Duration::from_secs(1).mul_f64(n as f64 / f64::from(rate))).await;
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
    if matches!(now, Fault::Close | Fault::Reset | Fault::HalfOpen | Fault::Refuse) { Err(Broken) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
