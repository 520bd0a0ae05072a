//! The real daemon without any host: names at their limits, and what it says of hostile peers and broken secrets.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egress_provider_proto::v1::CreateRequest;
use egress_provider_proto::v1::{
    DeleteRequest, ErrorReason as Reason, GetProviderInfoRequest, GetRequest, InstanceKey, delete_request, get_request,
};
use lab_tests::case::request;
use lab_tests::daemon::binary;
use lab_tests::tools::ssh_key;
use lab_tests::{Daemon, EntryFile, Refusal, Sentinels, refused};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

/// Longest text that is taken over from a peer, and the longest of a status.
const MAX_FOREIGN: usize = 512;
const MAX_TEXT: usize = 1024;

fn dir() -> TempDir {
    tempfile::Builder::new().prefix("kt-input-").tempdir().expect("a temporary directory")
}

fn one_entry(dir: &Path) -> EntryFile {
    EntryFile::unreachable("home", &ssh_key(dir, "key"))
}

#[tokio::test]
async fn a_name_within_the_advertised_limit_is_tried_and_every_other_is_refused_before_any_host_is() {
    let dir = dir();
    let daemon = Daemon::start(dir.path(), &one_entry(dir.path()).into()).await;
    let clients = daemon.clients();
    let info = clients.provider.clone().get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    let limit = info.entries[0].limits.as_ref().expect("limits").max_name_length as usize;
    assert_eq!(limit, 240, "file names of 255 bytes, less what libvirt and this provider add");
    let of = |length: usize| "n".repeat(length);
    let prefix = "a-prefix-of-20-chars";
    assert_eq!(prefix.len(), 20);

    let good = [
        of(1),
        "0".to_owned(),
        of(20),
        of(63),
        of(64),
        of(limit),
        format!("{prefix}-1"),
        format!("{prefix}-2"),
        "a.b".to_owned(),
        "a..b".to_owned(),
        "a--b".to_owned(),
        "x.qcow2".to_owned(),
        "x-seed.iso".to_owned(),
        "1.2.3.4".to_owned(),
        "base".to_owned(),
        "basement-1".to_owned(),
    ];
    for name in good {
        // the host is asked, and there is none
        refused(clients.create(CreateRequest { uid: "u".into(), ..request(&name, "", "tiny") }).await, Reason::HostUnreachable);
    }
    let mut bad: Vec<String> = (limit + 1..=260).map(of).collect();
    let shaped = [
        "",
        ".",
        "..",
        "-",
        ".a",
        "a.",
        "-a",
        "a-",
        "--help",
        "A",
        "web-A",
        "a_b",
        "a b",
        " a",
        "a ",
        "a\t",
        "a\n",
        "a\r\nb",
        "a\0",
        "\0",
        "a\u{7f}",
        "a/b",
        "/",
        "../etc/passwd",
        "a\\b",
        "a'b",
        "a\"b",
        "a`b`",
        "$(id)",
        "a;b",
        "a|b",
        "a&b",
        "&amp;",
        "<a>",
        "a>b",
        "]]>",
        "a*",
        "a?",
        "a~",
        "a%2fb",
        "a:b",
        "a@b",
        "a=b",
        "a,b",
        "a+b",
        "a#b",
        "{a}",
        "[a]",
        "(a)",
        "a!",
        "ä",
        "а",
        "日本",
        "e\u{301}",
        "a\u{200b}b",
        "a\u{202e}b",
        "\u{feff}a",
        "Ａ",
        "①",
        "base-",
        "base-home-tiny-01234567",
    ];
    bad.extend(shaped.map(str::to_owned));
    // as many characters as are allowed, and twice the bytes
    bad.push("ä".repeat(limit / 2 + 1));
    bad.push(of(1 << 20));
    for name in bad {
        let said = format!("{:?} ({} bytes)", name.chars().take(40).collect::<String>(), name.len());
        let key = || InstanceKey { name: name.clone(), uid: "u".into(), ..Default::default() };
        let refusals = [
            ("name", refused(clients.create(CreateRequest { uid: "u".into(), ..request(&name, "", "tiny") }).await, Reason::NameInvalid)),
            ("key.name", refused(get(&daemon, key()).await, Reason::NameInvalid)),
            ("key.name", refused(delete(&daemon, key()).await, Reason::NameInvalid)),
        ];
        for (field, refusal) in refusals {
            assert_eq!(refusal.fields, [field], "{said}");
            // the name itself is not told back
            assert!(name.len() < 4 || !refusal.message.contains(&name), "{said}: {}", refusal.message);
            assert_fit(&refusal);
        }
    }
}

async fn get(daemon: &Daemon, key: InstanceKey) -> Result<(), tonic::Status> {
    let wanted = GetRequest { selector: Some(get_request::Selector::Key(key)), ..Default::default() };
    daemon.clients().provider.get(wanted).await.map(|_| ())
}

async fn delete(daemon: &Daemon, key: InstanceKey) -> Result<(), tonic::Status> {
    let wanted = DeleteRequest { selector: Some(delete_request::Selector::Key(key)), ..Default::default() };
    daemon.clients().provider.delete(wanted).await.map(|_| ())
}

/// Whether a text could rewrite a terminal or a log line.
fn is_clean(text: &str) -> bool {
    !text
        .chars()
        .any(|c| c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}'))
}

#[track_caller]
fn assert_fit(refusal: &Refusal) {
    assert!(refusal.message.len() <= MAX_TEXT && is_clean(&refusal.message), "{refusal:?}");
    for value in refusal.metadata.values() {
        assert!(value.len() <= MAX_FOREIGN && is_clean(value), "{refusal:?}");
    }
}

/// What no SSH server would say, and what one might that wants to write on somebody's terminal.
fn hostile_greetings() -> Vec<Vec<u8>> {
    let noise = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{202e}".repeat(2000);
    vec![
        noise.clone().into_bytes(),
        format!("{noise}\r\n").into_bytes(),
        format!("SSH-2.0-{noise}\r\n").into_bytes(),
        format!("SSH-1.0-{noise}\r\n").into_bytes(),
        format!("{}SSH-2.0-x\r\n", "\u{1b}[31mpay here\r\n".repeat(200)).into_bytes(),
        // a disconnect instead of a key exchange: reason 2, a description of 200 bytes, no language
        disconnect(&"\u{1b}[2J\u{202e}bye ".repeat(14)),
        b"HTTP/1.1 400 Bad Request\r\nServer: \x1b[31m\r\n\r\n".to_vec(),
        vec![0xff; 70_000],
    ]
}

fn disconnect(description: &str) -> Vec<u8> {
    let mut payload = vec![1, 0, 0, 0, 2];
    payload.extend((description.len() as u32).to_be_bytes());
    payload.extend(description.as_bytes());
    payload.extend([0; 4]);
    // the length of the packet counts its padding and the byte that says how long that is
    let padding = 8 - (payload.len() + 5) % 8 + 4;
    let mut greeting = b"SSH-2.0-Hostile\r\n".to_vec();
    greeting.extend(((payload.len() + padding + 1) as u32).to_be_bytes());
    greeting.push(padding as u8);
    greeting.extend(payload);
    greeting.extend(vec![0; padding]);
    greeting
}

#[tokio::test]
async fn what_a_hostile_ssh_server_says_is_bounded_and_stripped_in_answers_and_log() {
    let dir = dir();
    let key = ssh_key(dir.path(), "key");
    for (n, greeting) in hostile_greetings().into_iter().enumerate() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let greeting = std::sync::Arc::new(greeting);
        let server = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let greeting = greeting.clone();
                tokio::spawn(async move {
                    // fails when the daemon has had enough
                    let _ = stream.write_all(&greeting).await;
                    let _ = stream.shutdown().await;
                });
            }
        });
        let home = dir.path().join(n.to_string());
        std::fs::create_dir(&home).expect("a directory");
        let entry = EntryFile::unreachable("home", &key)
            .host_set("hv1", "address", address.to_string())
            .set("budgets", serde_json::json!({ "dial": "3s" }));
        let daemon = Daemon::start_talkative(&home, &entry.into()).await;
        let clients = daemon.clients();
        let status = clients.create(request("web-1", "", "tiny")).await.expect_err("no host");
        assert_fit(&Refusal::of(&status));
        let check = clients.check().await.expect("a table");
        let row = &check.hosts[0];
        assert!(!row.healthy && row.message.len() <= MAX_TEXT && is_clean(&row.message), "{n}: {row:?}");
        let list = clients.list().await.expect("a listing with a gap");
        let error = list.unreachable_hosts[0].error.as_ref().expect("a reason");
        assert!(error.message.len() <= MAX_TEXT && is_clean(&error.message), "{n}: {error:?}");
        let log = daemon.log();
        for line in log.lines() {
            assert!(is_clean(line), "{n}: {line:?}");
            assert!(line.len() < 4096, "{n}: {} bytes: {line:.200}", line.len());
        }
        server.abort();
    }
}

#[tokio::test]
async fn a_serving_process_dumps_no_core_and_is_hidden_from_its_own_user() {
    const NOBODY: u32 = 65534;
    let dir = dir();
    let config = lab_tests::ProvidersFile::from(one_entry(dir.path())).write(dir.path());
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("tests run as root");
    // where the program lies is not for everybody to look into, so it is opened here
    let program = std::fs::File::open(binary()).expect("the program");
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    let socket = dir.path().join("d.sock");
    command.arg("serve").arg("--config").arg(&config).arg("--socket").arg(&socket).uid(NOBODY).gid(NOBODY).env_clear();
    let mut child = command.env("TMPDIR", dir.path()).stderr(std::process::Stdio::null()).spawn().expect("running the daemon");
    let clients = lab_tests::Clients::on(&socket);
    lab_tests::eventually("the daemon serves", Duration::from_secs(20), || async { clients.check().await.map_err(|e| e.to_string()) })
        .await;
    let proc = |file: &str| format!("/proc/{}/{file}", child.id());
    let limits = std::fs::read_to_string(proc("limits")).expect("the process");
    let core: Vec<_> = limits.lines().find(|l| l.starts_with("Max core file size")).expect("a limit").split_whitespace().collect();
    assert_eq!(core[4..6], ["0", "0"], "{limits}");
    let status = std::fs::read_to_string(proc("status")).expect("the process");
    assert!(status.contains("Uid:\t65534\t65534"), "{status}");
    // of a process that may not be dumped, so may not be traced either, they belong to root
    for file in ["environ", "mem", "maps"] {
        assert_eq!(std::fs::metadata(proc(file)).expect("the process").uid(), 0, "{file}");
    }
    // not SIGQUIT: a shell makes its background jobs ignore that one
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGABRT).expect("a child");
    let ended = child.wait().expect("a child");
    assert_eq!((ended.signal(), ended.core_dumped()), (Some(nix::sys::signal::Signal::SIGABRT as i32), false), "{ended}");
}

#[test]
fn a_broken_tls_key_ends_the_daemon_and_is_not_shown() {
    const WORD: &str = "kt5ecret-broken-tls-key";
    let mut sentinels = Sentinels::default();
    sentinels.add_word("TLS key", WORD);
    let dir = dir();
    let config = lab_tests::ProvidersFile::from(one_entry(dir.path())).write(dir.path());
    let pem = dir.path().join("key.pem");
    for text in [
        WORD.to_owned(),
        format!("-----BEGIN PRIVATE KEY-----\n{WORD}\n-----END PRIVATE KEY-----\n"),
        format!("-----BEGIN {WORD}-----\nAAAA\n-----END {WORD}-----\n"),
    ] {
        std::fs::write(&pem, text).expect("a file");
        let mut command = Command::new(binary());
        command.arg("serve").arg("--config").arg(&config).args(["--listen", "127.0.0.1:0", "--log-level", "trace"]);
        for flag in ["--tls-cert", "--tls-key", "--tls-client-ca"] {
            command.arg(flag).arg(&pem);
        }
        let output = command.env_clear().output().expect("running the daemon");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success() && !said.is_empty(), "{said}");
        sentinels.assert_absent("the daemon's last word", &said);
    }
}
