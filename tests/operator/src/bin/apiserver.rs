//! The API server as a program, for the demo: prints the path of a kubeconfig and serves until it is told to stop.

use operator_tests::apiserver::{ApiServer, kubeconfig};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(at), Some(file), None) = (args.next(), args.next(), args.next()) else {
        eprintln!(
            "usage: apiserver ADDRESS:PORT KUBECONFIG\nServes the part of the Kubernetes API that the operator uses, in memory, and writes KUBECONFIG."
        );
        return Err(std::io::Error::other("two arguments are needed"));
    };
    let server = ApiServer::default();
    let port = server.listen_on(tokio::net::TcpListener::bind(&at).await?);
    std::fs::write(&file, kubeconfig(&port.url))?;
    println!("{}", port.url);
    let mut minute = tokio::time::interval(std::time::Duration::from_secs(30));
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    loop {
        tokio::select! {
            // as a real one does, so that a client knows that its watch is alive
            _ = minute.tick() => server.bookmark(),
            _ = term.recv() => return Ok(()),
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}
