use super::*;
use crate::poll::eventually;

const LIMIT: Duration = Duration::from_secs(10);

/// A server that sends back what it gets, and a proxy in front of it.
async fn echo() -> FaultProxy {
    FaultProxy::to(echo_server().await).await
}

async fn echo_server() -> String {
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
    addr.to_string()
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

#[tokio::test]
async fn close_ends_an_open_connection_in_order_and_new_ones_at_once() {
    let proxy = echo().await;
    let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
    round_trip(&mut stream).await.expect("an echo");
    assert_eq!(proxy.counts().open, 1);
    proxy.set(Fault::Close);
    for stream in [stream, TcpStream::connect(proxy.addr()).await.expect("connecting")] {
        let mut stream = stream;
        let end = tokio::time::timeout(LIMIT, stream.read(&mut [0; 8])).await.expect("in time");
        assert_eq!(end.expect("an end in order"), 0);
    }
    eventually("no connection is open", LIMIT, || async { if proxy.counts().open == 0 { Ok(()) } else { Err("one is".to_owned()) } }).await;
}

#[tokio::test]
async fn a_half_open_connection_is_gone_for_the_server_and_silent_for_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let proxy = FaultProxy::to(listener.local_addr().expect("bound").to_string()).await;
    let mut client = TcpStream::connect(proxy.addr()).await.expect("connecting");
    let (mut server, _) = listener.accept().await.expect("connected");
    client.write_all(b"ping").await.expect("the kernel takes it");
    server.read_exact(&mut [0; 4]).await.expect("it passes");
    proxy.set(Fault::HalfOpen);
    tokio::time::timeout(LIMIT, server.read_u8()).await.expect("in time").expect_err("the server's end is gone");
    client.write_all(b"ping").await.expect("the kernel takes it");
    tokio::time::timeout(Duration::from_millis(200), client.read_u8()).await.expect_err("silence");
    proxy.set(Fault::Pass);
    let error = tokio::time::timeout(LIMIT, client.read_u8()).await.expect("in time").expect_err("no byte");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_server_falls_silent_at_exactly_its_byte_until_it_passes_again() {
    let proxy = echo().await;
    proxy.set(Fault::StallAfter(6));
    let mut stream = TcpStream::connect(proxy.addr()).await.expect("connecting");
    stream.write_all(b"pingpong").await.expect("the kernel takes it");
    let mut answer = [0; 6];
    tokio::time::timeout(LIMIT, stream.read_exact(&mut answer)).await.expect("in time").expect("six bytes");
    tokio::time::timeout(Duration::from_millis(200), stream.read_u8()).await.expect_err("silence");
    assert_eq!(proxy.counts().to_client, 6);
    proxy.set(Fault::Pass);
    tokio::time::timeout(LIMIT, stream.read_u8()).await.expect("in time").expect("the seventh");
}

#[tokio::test]
async fn a_slow_path_takes_no_more_than_its_rate_and_holds_the_client_up() {
    const RATE: u32 = 64 << 10;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let proxy = FaultProxy::slow(listener.local_addr().expect("bound").to_string(), RATE).await;
    let mut client = TcpStream::connect(proxy.addr()).await.expect("connecting");
    let sending = tokio::spawn(async move { client.write_all(&vec![7; 16 << 20]).await });
    let (mut server, _) = listener.accept().await.expect("connected");
    let started = Instant::now();
    server.read_exact(&mut vec![0; RATE as usize / 2]).await.expect("half a second's worth");
    // sleeps never end early, so this is a bound and no guess; the last part's pause is not waited for
    assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
    assert!(!sending.is_finished(), "16 MiB do not fit on the way");
    sending.abort();
}
