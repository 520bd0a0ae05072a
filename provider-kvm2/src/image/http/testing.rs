//! A web server whose every answer a test decides, down to the last byte and how
//! the connection ends. Well-behaved servers cannot be told to break.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::Timing;
use crate::config::{Firmware, ImageFormat, ImageUrl};
use crate::image::{ImageRef, UrlTrust};

/// Short enough for a test, long enough for a busy machine.
pub(crate) const QUICK: Timing =
    Timing { stall: Duration::from_millis(300), connect: Duration::from_secs(5), backoff: Duration::from_millis(1), tries: 3 };

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    headers: BTreeMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What is written, and what happens then.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    bytes: Vec<u8>,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Close,
    /// The connection stays open and silent.
    Hold,
}

impl Reply {
    pub(crate) fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let mut head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n");
        headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        head.push_str("\r\n");
        Self { bytes: [head.as_bytes(), body].concat(), end: End::Close }
    }

    /// With its length.
    pub(crate) fn whole(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        let length = body.len().to_string();
        Self::new(status, &[headers, &[("content-length", length.as_str())]].concat(), body)
    }

    pub(crate) fn chunked(headers: &[(&str, &str)], body: &[u8]) -> Self {
        let mut framed = Vec::new();
        for piece in body.chunks(1000) {
            framed.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            framed.extend_from_slice(piece);
            framed.extend_from_slice(b"\r\n");
        }
        framed.extend_from_slice(b"0\r\n\r\n");
        Self::new(200, &[headers, &[("transfer-encoding", "chunked")]].concat(), &framed)
    }

    pub(crate) fn redirect(to: &str) -> Self {
        Self::whole(302, &[("location", to)], b"")
    }

    /// No answer at all.
    pub(crate) fn silence() -> Self {
        Self { bytes: Vec::new(), end: End::Hold }
    }

    /// Only so many bytes of the body, then the end of the connection.
    pub(crate) fn cut(mut self, body_bytes: usize) -> Self {
        let head = self.bytes.windows(4).position(|w| w == b"\r\n\r\n").map_or(0, |p| p + 4);
        self.bytes.truncate(head + body_bytes);
        self
    }

    /// As [`Self::cut`], then silence.
    pub(crate) fn stalled(self, body_bytes: usize) -> Self {
        Self { end: End::Hold, ..self.cut(body_bytes) }
    }
}

/// Answers with `200`, or `206` to a range whose `If-Range` still holds.
pub(crate) fn file(request: &Request, content: &[u8], etag: &str) -> Reply {
    let range = request.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    match range {
        Some(from) if request.header("if-range") == Some(etag) && from < content.len() => {
            let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
            Reply::whole(206, &[("etag", etag), ("content-range", &range)], &content[from..])
        }
        _ => Reply::whole(200, &[("etag", etag)], content),
    }
}

type Answer = Box<dyn FnMut(&Request) -> Reply + Send>;

/// Ends with its value.
pub(crate) struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(answer: impl FnMut(&Request) -> Reply + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let answer: Arc<Mutex<Answer>> = Arc::new(Mutex::new(Box::new(answer)));
        let log = seen.clone();
        let task = tokio::spawn(async move {
            // connections end with the server
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, answer.clone(), log.clone()));
            }
        });
        Self { address, seen, task }
    }

    /// The replies in order; the last one for every further request.
    pub(crate) async fn scripted(replies: impl IntoIterator<Item = Reply>) -> Self {
        let mut replies: VecDeque<Reply> = replies.into_iter().collect();
        Self::start(move |_| if replies.len() > 1 { replies.pop_front() } else { replies.front().cloned() }.expect("a reply")).await
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// By a name rather than an address, which makes it another host.
    pub(crate) fn url_by_name(&self, path: &str) -> String {
        format!("http://localhost:{}{path}", self.address.port())
    }

    /// An image at `/image`, as the catalogue would name it.
    pub(crate) fn image(&self, format: ImageFormat) -> ImageRef {
        ImageRef {
            key: "debian".into(),
            url: ImageUrl::parse(&self.url("/image?token=SENTINEL")).expect("a URL"),
            sha256: None,
            format,
            firmware: Firmware::Uefi,
            trust: UrlTrust::Configured,
        }
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        lock(&self.seen).clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, answer: Arc<Mutex<Answer>>, log: Arc<Mutex<Vec<Request>>>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let text = String::from_utf8_lossy(&head);
    let mut lines = text.lines();
    let path = lines.next().and_then(|l| l.split(' ').nth(1)).unwrap_or_default().to_owned();
    let headers = lines.filter_map(|l| l.split_once(": ")).map(|(n, v)| (n.to_ascii_lowercase(), v.to_owned())).collect();
    let request = Request { path, headers };
    let reply = lock(&answer)(&request);
    lock(&log).push(request);
    if stream.write_all(&reply.bytes).await.is_err() {
        return;
    }
    match reply.end {
        End::Hold => std::future::pending().await,
        End::Close => {
            // a close with unread data would be a reset that overtakes the answer
            let _ = stream.shutdown().await;
            let _ = stream.read_u8().await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
