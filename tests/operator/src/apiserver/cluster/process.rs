//! etcd and kube-apiserver, as their projects ship them, for as long as this process lives.

use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kube::config::{AuthInfo, Config};

use crate::rig::free_port;

/// Until kube-apiserver is ready; it takes some seconds.
const START: Duration = Duration::from_secs(120);
const TOKEN: &str = "of-tests-only";

/// Starts both on loopback.
///
/// # Errors
/// If they are not there or do not come up; with the end of their logs.
pub(super) async fn start(assets: &Path) -> Result<Config, String> {
    for name in ["etcd", "kube-apiserver"] {
        let there = assets.join(name).metadata().is_ok_and(|m| m.permissions().mode() & 0o111 != 0);
        if !there {
            return Err(format!("KUBEBUILDER_ASSETS is {}, where no program {name} is", assets.display()));
        }
    }
    // kept: nothing is removed while they write
    let dir = tempfile::Builder::new().prefix("kvm2-apiserver-").tempdir().expect("a directory").keep();
    let at = |name: &str| dir.join(name).display().to_string();
    let [etcd, peer, port] = [(); 3].map(|()| free_port());
    let key = rcgen::KeyPair::generate().expect("a key");
    std::fs::write(dir.join("sa.key"), key.serialize_pem()).expect("written");
    std::fs::write(dir.join("sa.pub"), key.public_key_pem()).expect("written");
    std::fs::write(dir.join("tokens"), format!("{TOKEN},test,test,system:masters\n")).expect("written");
    let mut children = Vec::new();
    let urls = [etcd, peer].map(|port| format!("http://127.0.0.1:{port}"));
    children.push(run(
        assets,
        "etcd",
        &dir,
        &[
            format!("--data-dir={}", at("etcd")),
            format!("--listen-client-urls={}", urls[0]),
            format!("--advertise-client-urls={}", urls[0]),
            format!("--listen-peer-urls={}", urls[1]),
            format!("--initial-advertise-peer-urls={}", urls[1]),
            format!("--initial-cluster=default={}", urls[1]),
            "--unsafe-no-fsync".to_owned(),
        ],
    ));
    children.push(run(
        assets,
        "kube-apiserver",
        &dir,
        &[
            format!("--etcd-servers={}", urls[0]),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--cert-dir={}", at("certs")),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", at("sa.pub")),
            format!("--service-account-signing-key-file={}", at("sa.key")),
            format!("--token-auth-file={}", at("tokens")),
            "--authorization-mode=RBAC".to_owned(),
            // there is no controller that makes default ones
            "--disable-admission-plugins=ServiceAccount".to_owned(),
        ],
    ));
    let mut config = Config::new(format!("https://127.0.0.1:{port}").parse().expect("a URL"));
    // its certificate is one that it has made for itself a moment ago
    config.accept_invalid_certs = true;
    config.auth_info = AuthInfo { token: Some(TOKEN.to_owned().into()), ..AuthInfo::default() };
    let client = kube::Client::try_from(config.clone()).expect("a client");
    let end = tokio::time::Instant::now() + START;
    loop {
        let request = axum::http::Request::get("/readyz").body(Vec::new()).expect("a request");
        match tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await {
            Ok(Ok(_)) => return Ok(config),
            other if tokio::time::Instant::now() > end => {
                return Err(format!("kube-apiserver is not ready after {START:?}: {other:?}\n{}", logs(&dir)));
            }
            _ => {}
        }
        for child in &mut children {
            if let Some(code) = child.try_wait().expect("a child of ours") {
                return Err(format!("etcd or kube-apiserver ended: {code}\n{}", logs(&dir)));
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Ends when this process does, however that ends: it dies with the thread that began it, which lasts as long.
fn run(assets: &Path, name: &str, dir: &Path, args: &[String]) -> Child {
    let log = File::create(dir.join(format!("{name}.log"))).expect("a log");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(assets.join(name)).args(args).current_dir(dir);
    command.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log);
    let (began, child) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = began.send(command.spawn());
        loop {
            std::thread::park();
        }
    });
    child.recv().expect("it was begun").unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn logs(dir: &Path) -> String {
    let mut text = String::new();
    for name in ["etcd", "kube-apiserver"] {
        let log = std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        text += &format!("{name}:\n{}\n", lines[lines.len().saturating_sub(20)..].join("\n"));
    }
    text
}
