//! One CONNECT through one proxy.
//!
//! The proxy and everything behind it are untrusted: an answer is read up to a limit and within a time, and of its text
//! only a status code and an address are ever shown.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a proxy's log shows of a probe; a proxy may leave it out of its access log by this.
pub const USER_AGENT: &str = "egress-operator-probe/1";
/// The most of an answer's head that is read.
const HEAD_LIMIT: usize = 8 << 10;
/// The most of a canary's body that is read: an address is short.
const BODY_LIMIT: usize = 256;

/// How a proxy is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeOptions {
    /// `host:port` that the proxy is asked to connect to.
    pub target: String,
    /// Plain HTTP target behind the proxy that answers with the caller's address: `host:port` and path. Asked through
    /// the tunnel when given.
    pub canary: Option<Canary>,
    /// For the whole probe.
    pub timeout: Duration,
}

/// Who tells the egress address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Canary {
    /// `host:port`.
    pub authority: String,
    /// With its leading slash.
    pub path: String,
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// The proxy connected; its egress address if a canary told it.
    Good {
        /// As the canary saw it.
        egress: Option<IpAddr>,
    },
    /// Nobody listens on the port.
    Refused,
    /// The address is not reached: no route, host down.
    Unreachable,
    /// Not over within the time.
    Timeout,
    /// The connection ended in the middle of the answer.
    Broken,
    /// The proxy answered with another status than 200.
    Answered(u16),
    /// What answers speaks no HTTP.
    NotAProxy,
    /// The proxy connects, and the canary behind it gave no address.
    CanaryFailed,
}

impl Finding {
    /// Whether it speaks for the proxy.
    #[must_use]
    pub fn is_good(&self) -> bool {
        matches!(self, Self::Good { .. })
    }

    /// For the condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Good { .. } => "ConnectOk",
            Self::Refused => "ConnectionRefused",
            Self::Unreachable => "Unreachable",
            Self::Timeout => "ProbeTimeout",
            Self::Broken => "ConnectionBroken",
            Self::Answered(407) => "ProxyAuthRequired",
            Self::Answered(403) => "ProxyForbids",
            Self::Answered(502..=504) => "TargetUnreachable",
            Self::Answered(_) => "UnexpectedAnswer",
            Self::NotAProxy => "NotAProxy",
            Self::CanaryFailed => "CanaryFailed",
        }
    }

    /// For people, with what to do.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Good { egress: None } => String::new(),
            Self::Good { egress: Some(ip) } => format!("egress address {ip}"),
            Self::Refused => "nothing listens on the proxy port: the proxy has not started, or spec.port is another".to_owned(),
            Self::Unreachable => "the address cannot be reached from the operator: look at routes and firewalls".to_owned(),
            Self::Timeout => "the proxy did not answer in time: it hangs, or packets to it are dropped".to_owned(),
            Self::Broken => "the proxy closed the connection without an answer".to_owned(),
            Self::Answered(407) => "the proxy asks for a password (407): the operator probes without one".to_owned(),
            Self::Answered(403) => "the proxy forbids the probe (403): allow CONNECT to the probe target".to_owned(),
            Self::Answered(code @ 502..=504) => format!("the proxy cannot reach the probe target ({code}): look at its way out and at DNS"),
            Self::Answered(code) => format!("the proxy answered CONNECT with status {code}"),
            Self::NotAProxy => "what listens on the port speaks no HTTP".to_owned(),
            Self::CanaryFailed => "the proxy connects, and the canary behind it told no address".to_owned(),
        }
    }
}

/// Probes a proxy. Ends within the timeout.
pub async fn probe(address: &str, port: u16, options: &ProbeOptions) -> Finding {
    match tokio::time::timeout(options.timeout, attempt(address, port, options)).await {
        Ok(finding) => finding,
        Err(_) => Finding::Timeout,
    }
}

async fn attempt(address: &str, port: u16, options: &ProbeOptions) -> Finding {
    let first = options.canary.as_ref().map_or(&options.target, |canary| &canary.authority);
    let (mut stream, finding) = match connect(address, port, first).await {
        Ok(stream) => (stream, Finding::Good { egress: None }),
        Err(finding) => return finding,
    };
    let Some(canary) = &options.canary else { return finding };
    match ask(&mut stream, canary).await {
        Some(ip) => Finding::Good { egress: Some(ip) },
        None => Finding::CanaryFailed,
    }
}

/// A tunnel through the proxy.
async fn connect(address: &str, port: u16, target: &str) -> Result<TcpStream, Finding> {
    let mut stream = TcpStream::connect((address, port)).await.map_err(|e| match e.kind() {
        io::ErrorKind::ConnectionRefused => Finding::Refused,
        io::ErrorKind::TimedOut => Finding::Timeout,
        _ => Finding::Unreachable,
    })?;
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: {USER_AGENT}\r\nProxy-Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(|_| Finding::Broken)?;
    let head = head(&mut stream).await?;
    match status(&head) {
        Some(200..=299) => Ok(stream),
        Some(code) => Err(Finding::Answered(code)),
        None => Err(Finding::NotAProxy),
    }
}

/// The head of an answer, byte by byte: what follows belongs to the tunnel.
async fn head(stream: &mut TcpStream) -> Result<Vec<u8>, Finding> {
    let mut head = Vec::with_capacity(256);
    while !head.ends_with(b"\r\n\r\n") {
        // nothing that is no HTTP is read to its end
        if head.len() >= HEAD_LIMIT || (head.len() >= 5 && !head.starts_with(b"HTTP/")) {
            return Err(Finding::NotAProxy);
        }
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && status(&head).is_some() => break,
            Err(_) if head.is_empty() => return Err(Finding::Broken),
            Err(_) => return Err(if head.starts_with(b"HTTP/") { Finding::Broken } else { Finding::NotAProxy }),
        }
    }
    Ok(head)
}

/// The status code of an HTTP/1 answer.
fn status(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.")?;
    let code = rest.get(2..5).filter(|_| rest.get(1) == Some(&b' '))?;
    std::str::from_utf8(code).ok()?.parse().ok().filter(|code| (100..=599).contains(code))
}

/// The address that a canary tells; anything but an address is none.
async fn ask(stream: &mut TcpStream, canary: &Canary) -> Option<IpAddr> {
    let Canary { authority, path } = canary;
    let request =
        format!("GET {path} HTTP/1.0\r\nHost: {authority}\r\nUser-Agent: {USER_AGENT}\r\nAccept: text/plain\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let head = head(stream).await.ok()?;
    if status(&head) != Some(200) {
        return None;
    }
    let mut body = Vec::new();
    stream.take(BODY_LIMIT as u64).read_to_end(&mut body).await.ok()?;
    std::str::from_utf8(&body).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// A proxy that reads a request head and answers so.
    async fn answering(answers: &'static [&'static str]) -> (String, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                for answer in answers {
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        let Ok(byte) = stream.read_u8().await else { break };
                        request.push(byte);
                    }
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        });
        (at.ip().to_string(), at.port())
    }

    fn options() -> ProbeOptions {
        ProbeOptions { target: "example.org:443".to_owned(), canary: None, timeout: Duration::from_secs(20) }
    }

    async fn found(answer: &'static [&'static str]) -> Finding {
        let (ip, port) = answering(answer).await;
        probe(&ip, port, &options()).await
    }

    #[tokio::test]
    async fn each_way_to_fail_has_its_reason() {
        assert_eq!(found(&["HTTP/1.1 200 Connection established\r\n\r\n"]).await, Finding::Good { egress: None });
        for (answer, reason) in [
            (&["HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"], "ProxyAuthRequired"),
            (&["HTTP/1.1 403 Forbidden\r\n\r\n"], "ProxyForbids"),
            (&["HTTP/1.1 503 Service Unavailable\r\n\r\n"], "TargetUnreachable"),
            (&["HTTP/1.0 500 Oops\r\n\r\n"], "UnexpectedAnswer"),
            (&["SSH-2.0-OpenSSH_9.2\r\n"], "NotAProxy"),
            (&[""], "ConnectionBroken"),
            (&["HTTP/1.1"], "ConnectionBroken"),
            (&["HTTP/1.1 999 x\r\n\r\n"], "NotAProxy"),
        ] {
            assert_eq!(found(answer).await.reason(), reason, "{answer:?}");
        }
    }

    #[tokio::test]
    async fn a_port_where_nobody_listens_is_refused_and_silence_is_a_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let silent = ProbeOptions { timeout: Duration::from_millis(50), ..options() };
        assert_eq!(probe("127.0.0.1", port, &silent).await, Finding::Timeout);
        drop(listener);
        assert_eq!(probe("127.0.0.1", port, &options()).await, Finding::Refused);
    }

    #[tokio::test]
    async fn an_endless_head_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a caller");
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nx: ").await;
            while stream.write_all(&[b'a'; 4096]).await.is_ok() {}
        });
        assert_eq!(probe("127.0.0.1", port, &options()).await, Finding::NotAProxy);
    }

    #[tokio::test]
    async fn a_canary_tells_an_address_or_nothing() {
        let with_canary = ProbeOptions { canary: Some(Canary { authority: "c:80".into(), path: "/ip".into() }), ..options() };
        let told = answering(&["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n203.0.113.9\n"]).await;
        assert_eq!(probe(&told.0, told.1, &with_canary).await, Finding::Good { egress: Some("203.0.113.9".parse().expect("an address")) });
        let odd = answering(&["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n<html>"]).await;
        assert_eq!(probe(&odd.0, odd.1, &with_canary).await, Finding::CanaryFailed);
    }
}
