//! An HTTP server of images that misbehaves on demand. Written on plain TCP, because what
//! an HTTP library refuses to send (wrong lengths, half bodies, resets) is what it is for.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Longest request head that is read; a client of ours sends a few hundred bytes.
const MAX_HEAD: u64 = 64 * 1024;
const PART: usize = 64 * 1024;

/// What a request for a path gets.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The body, with ranges honoured.
    Whole,
    /// The body up to a byte, though all of it is announced; then a close.
    Truncated(usize),
    /// The body up to a byte, then a reset.
    ResetAt(usize),
    /// The body up to a byte, then silence until the server is dropped.
    StallAt(usize),
    /// The body up to a byte, the rest once [`ImageServer::open_gate`] was called.
    GateAt(usize),
    /// The body in small parts with a pause before each: a server that never stands still and never gets ready.
    Trickle(usize, Duration),
    /// The body without a length, in chunks.
    Chunked,
    /// The body without a length, ended by the close.
    Unframed,
    /// The whole body under another announced length.
    Announced(u64),
    /// The whole body, ranges ignored.
    RangesRefused,
    /// 206 with the whole body, to a request without a range.
    PartialUnasked,
    /// 206 with a part that nobody asked for, from a byte on.
    PartialFrom(usize),
    /// As [`Answer::Whole`], of another file of the same length: every byte and the ETag are others.
    Replaced,
    /// The body claimed to be gzip.
    ContentEncodingGzip,
    Status(u16, Vec<(&'static str, String)>),
    Redirect(u16, String),
    /// 200 with a page where an image should be.
    Html,
}

/// A request as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub query: String,
    pub range: Option<String>,
    pub if_range: Option<String>,
}

/// Ends with its connections when dropped.
#[derive(Debug)]
pub struct ImageServer {
    addr: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    images: Mutex<HashMap<String, Image>>,
    seen: Mutex<Vec<Seen>>,
    gate: watch::Sender<Gate>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Closed,
    Open,
}

#[derive(Debug, Clone)]
struct Image {
    body: Arc<Vec<u8>>,
    etag: Option<String>,
    /// One for each GET; the last one stays.
    script: Vec<Answer>,
    /// What HEAD gets; None: the head of the GET's answer.
    head: Option<Answer>,
}

impl ImageServer {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1").await
    }

    /// Starts at another address of loopback: another host to a client.
    pub async fn start_at(address: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("a bound address");
        let state = Arc::new(State { images: Mutex::default(), seen: Mutex::default(), gate: watch::Sender::new(Gate::Closed) });
        let task = tokio::spawn(listen(listener, state.clone()));
        Self { addr, state, task }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.addr)
    }

    /// Serves `body` at a path: each GET gets the next answer, and the last one from then on.
    pub fn serve(&self, path: &str, body: Vec<u8>, script: impl IntoIterator<Item = Answer>) {
        let script: Vec<_> = script.into_iter().collect();
        assert!(!script.is_empty(), "an answer for {path}");
        let etag = Some(format!("\"{}-{}\"", path.len(), body.len()));
        self.images().insert(format!("/{path}"), Image { body: Arc::new(body), etag, script, head: None });
    }

    /// Changes the ETag of a path, or takes it away.
    pub fn set_etag(&self, path: &str, etag: Option<&str>) {
        if let Some(image) = self.images().get_mut(&format!("/{path}")) {
            image.etag = etag.map(str::to_owned);
        }
    }

    /// Gives HEAD an answer of its own.
    pub fn set_head(&self, path: &str, answer: Answer) {
        if let Some(image) = self.images().get_mut(&format!("/{path}")) {
            image.head = Some(answer);
        }
    }

    /// Lets every [`Answer::GateAt`] go on, those under way and those to come.
    pub fn open_gate(&self) {
        self.state.gate.send_replace(Gate::Open);
    }

    /// From here on they are held again.
    pub fn close_gate(&self) {
        self.state.gate.send_replace(Gate::Closed);
    }

    /// Every request so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// GETs of a path so far.
    pub fn gets(&self, path: &str) -> usize {
        let path = format!("/{path}");
        self.seen().iter().filter(|seen| seen.method == "GET" && seen.path == path).count()
    }

    fn images(&self) -> std::sync::MutexGuard<'_, HashMap<String, Image>> {
        self.state.images.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ImageServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let state = state.clone();
                // a client that goes away in the middle is the test's own doing
                connections.spawn(async move { drop(answer(stream, &state).await) });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// One request, one connection.
async fn answer(mut stream: TcpStream, state: &State) -> io::Result<()> {
    let Some(seen) = read_request(&mut stream).await? else { return Ok(()) };
    let (method, path) = (seen.method.clone(), seen.path.clone());
    let (range, if_range) = (seen.range.clone(), seen.if_range.clone());
    state.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    let found = {
        let mut images = state.images.lock().unwrap_or_else(PoisonError::into_inner);
        images.get_mut(&path).map(|image| {
            let answer = match (&method[..], &image.head) {
                ("HEAD", Some(head)) => head.clone(),
                ("GET", _) if image.script.len() > 1 => image.script.remove(0),
                _ => image.script[0].clone(),
            };
            (image.body.clone(), image.etag.clone(), answer)
        })
    };
    let Some((body, etag, answer)) = found else {
        return stream.write_all(&head(404, &[], Some(0))).await;
    };
    let (body, etag) = match answer {
        Answer::Replaced => (Arc::new(body.iter().map(|byte| !byte).collect()), etag.map(|etag| etag.replacen('"', "\"other-", 1))),
        _ => (body, etag),
    };
    let mut reply = Reply { stream, body: body.clone(), with_body: method == "GET", etag: etag.clone(), gate: state.gate.subscribe() };
    let from = range.filter(|_| if_range.is_none() || if_range == etag).and_then(|range| first_byte(&range)).filter(|at| *at < body.len());
    reply.send(answer, from).await
}

struct Reply {
    stream: TcpStream,
    body: Arc<Vec<u8>>,
    with_body: bool,
    etag: Option<String>,
    gate: watch::Receiver<Gate>,
}

impl Reply {
    async fn send(&mut self, answer: Answer, from: Option<usize>) -> io::Result<()> {
        let total = self.body.len();
        match answer {
            Answer::Whole | Answer::Replaced => self.range(from, total).await,
            Answer::Truncated(at) => self.range(from, at).await,
            Answer::ResetAt(at) => {
                self.range(from, at).await?;
                self.stream.set_zero_linger()
            }
            Answer::StallAt(at) => {
                self.range(from, at).await?;
                std::future::pending().await
            }
            Answer::GateAt(at) => {
                self.range(from, at).await?;
                let _ = self.gate.wait_for(|gate| *gate == Gate::Open).await;
                self.bytes(from.unwrap_or(0).max(at), total).await
            }
            Answer::Trickle(part, pause) => {
                self.range(from, 0).await?;
                for at in (from.unwrap_or(0)..total).step_by(part.max(1)) {
                    tokio::time::sleep(pause).await;
                    self.bytes(at, at + part).await?;
                }
                Ok(())
            }
            Answer::Chunked => self.chunked().await,
            Answer::Unframed => {
                self.head(200, &[], None).await?;
                self.bytes(0, total).await
            }
            Answer::Announced(length) => {
                self.head(200, &[], Some(length)).await?;
                self.bytes(0, total).await
            }
            Answer::RangesRefused => self.range(None, total).await,
            Answer::PartialUnasked => {
                let content_range = format!("bytes 0-{}/{total}", total.saturating_sub(1));
                self.head(206, &[("Content-Range", content_range)], Some(total as u64)).await?;
                self.bytes(0, total).await
            }
            Answer::PartialFrom(at) => {
                let content_range = format!("bytes {at}-{}/{total}", total.saturating_sub(1));
                self.head(206, &[("Content-Range", content_range)], Some((total - at) as u64)).await?;
                self.bytes(at, total).await
            }
            Answer::ContentEncodingGzip => {
                self.head(200, &[("Content-Encoding", "gzip".to_owned())], Some(total as u64)).await?;
                self.bytes(0, total).await
            }
            Answer::Status(code, headers) => self.head(code, &headers, Some(0)).await,
            Answer::Redirect(code, to) => self.head(code, &[("Location", to)], Some(0)).await,
            Answer::Html => {
                let page = b"<!DOCTYPE html><html><body>Please log in</body></html>";
                self.head(200, &[("Content-Type", "text/html".to_owned())], Some(page.len() as u64)).await?;
                if self.with_body { self.stream.write_all(page).await } else { Ok(()) }
            }
        }
    }

    /// All of the body or its end is announced, and sent up to `until`.
    async fn range(&mut self, from: Option<usize>, until: usize) -> io::Result<()> {
        let total = self.body.len();
        match from {
            Some(from) => {
                let content_range = format!("bytes {from}-{}/{total}", total - 1);
                self.head(206, &[("Content-Range", content_range)], Some((total - from) as u64)).await?;
            }
            None => self.head(200, &[("Accept-Ranges", "bytes".to_owned())], Some(total as u64)).await?,
        }
        self.bytes(from.unwrap_or(0), until).await
    }

    async fn chunked(&mut self) -> io::Result<()> {
        self.head(200, &[("Transfer-Encoding", "chunked".to_owned())], None).await?;
        if !self.with_body {
            return Ok(());
        }
        let body = self.body.clone();
        for part in body.chunks(PART) {
            self.stream.write_all(format!("{:x}\r\n", part.len()).as_bytes()).await?;
            self.stream.write_all(part).await?;
            self.stream.write_all(b"\r\n").await?;
        }
        self.stream.write_all(b"0\r\n\r\n").await
    }

    async fn bytes(&mut self, from: usize, until: usize) -> io::Result<()> {
        let until = until.min(self.body.len());
        if !self.with_body || from >= until {
            return Ok(());
        }
        let body = self.body.clone();
        self.stream.write_all(&body[from..until]).await?;
        self.stream.flush().await
    }

    async fn head(&mut self, code: u16, headers: &[(&str, String)], length: Option<u64>) -> io::Result<()> {
        let etag = self.etag.as_ref().map(|etag| ("ETag", etag.clone()));
        let headers: Vec<_> = headers.iter().cloned().chain(etag).collect();
        self.stream.write_all(&head(code, &headers, length)).await
    }
}

fn head(code: u16, headers: &[(&str, String)], length: Option<u64>) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {code} Of The Test\r\nConnection: close\r\n");
    let length = length.map(|n| ("Content-Length", n.to_string()));
    for (name, value) in headers.iter().cloned().chain(length) {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// None for a connection that was closed without a request.
async fn read_request(stream: &mut TcpStream) -> io::Result<Option<Seen>> {
    let mut lines = BufReader::new(stream.take(MAX_HEAD)).lines();
    let Some(first) = lines.next_line().await? else { return Ok(None) };
    let mut words = first.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut seen = Seen { method, path: path.to_owned(), query: query.to_owned(), range: None, if_range: None };
    while let Some(line) = lines.next_line().await? {
        let Some((name, value)) = line.split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => seen.range = Some(value.trim().to_owned()),
            "if-range" => seen.if_range = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    Ok(Some(seen))
}

/// The start of `bytes=N-` or `bytes=N-M`; the end is not needed by what is tested.
fn first_byte(range: &str) -> Option<usize> {
    range.strip_prefix("bytes=")?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn get(url: String, range: Option<&str>) -> reqwest::Result<(u16, Vec<u8>)> {
        let mut request = reqwest::Client::new().get(url);
        if let Some(range) = range {
            request = request.header("range", range);
        }
        let answer = request.send().await?;
        let code = answer.status().as_u16();
        Ok((code, answer.bytes().await?.to_vec()))
    }

    #[tokio::test]
    async fn a_script_is_followed_and_its_last_answer_stays() {
        let server = ImageServer::start().await;
        let body: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
        server.serve("i", body.clone(), [Answer::Status(503, vec![]), Answer::Truncated(1000), Answer::Whole]);
        assert_eq!(get(server.url("i"), None).await.expect("an answer").0, 503);
        get(server.url("i"), None).await.expect_err("half a body");
        for _ in 0..2 {
            assert_eq!(get(server.url("i"), None).await.expect("an answer"), (200, body.clone()));
        }
        assert_eq!(server.gets("i"), 4);
    }

    #[tokio::test]
    async fn a_range_gets_the_rest_of_the_body() {
        let server = ImageServer::start().await;
        server.serve("i", vec![1, 2, 3, 4], [Answer::Whole]);
        assert_eq!(get(server.url("i"), Some("bytes=1-")).await.expect("an answer"), (206, vec![2, 3, 4]));
        assert_eq!(server.seen()[0].range.as_deref(), Some("bytes=1-"));
    }

    #[tokio::test]
    async fn a_replaced_file_has_the_length_and_neither_the_bytes_nor_the_etag_of_the_first() {
        let server = ImageServer::start().await;
        server.serve("i", vec![1, 2, 3, 4], [Answer::Truncated(2), Answer::Replaced]);
        let first = reqwest::get(server.url("i")).await.expect("a head");
        let etag = first.headers()["etag"].clone();
        let rest = reqwest::Client::new().get(server.url("i")).header("range", "bytes=2-").header("if-range", &etag);
        let rest = rest.send().await.expect("a head");
        assert_eq!(rest.status().as_u16(), 200, "its range is of another file");
        assert_ne!(rest.headers()["etag"], etag);
        assert_eq!(rest.bytes().await.expect("a body").to_vec(), [!1, !2, !3, !4]);
    }

    #[tokio::test]
    async fn a_trickle_is_the_whole_body_in_the_end() {
        let server = ImageServer::start().await;
        server.serve("i", (0..=250).collect(), [Answer::Trickle(100, Duration::from_millis(1))]);
        assert_eq!(get(server.url("i"), None).await.expect("an answer").1.len(), 251);
    }

    #[tokio::test]
    async fn a_gate_holds_the_rest_back_until_it_is_opened() {
        let server = ImageServer::start().await;
        server.serve("i", vec![9; 10], [Answer::GateAt(4)]);
        let mut answer = reqwest::get(server.url("i")).await.expect("a head");
        assert_eq!(answer.chunk().await.expect("a part").map(|part| part.len()), Some(4));
        server.open_gate();
        assert_eq!(answer.bytes().await.expect("the rest").len(), 6);
    }
}
