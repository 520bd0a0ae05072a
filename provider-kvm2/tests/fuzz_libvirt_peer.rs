//! libvirt's socket, spoken to by a peer that is not libvirt: whatever it says costs one classified
//! error per call, within its budget, and leaves no thread, task, descriptor or memory behind.
//!
//! No host and no SSH: the peer sits behind the link's own door. What it says comes from
//! `tests/fuzz/corpus/libvirt_peer/`: a first byte that tells how it ends, then the bytes that a
//! libvirtd sent, one frame for each request. `KVM2_FUZZ_RECORD=FILE` with `KVM2_LAB` records a real one.

use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use provider_kvm2::config::HostKeys;
use provider_kvm2::domain::addresses::AddressSource;
use provider_kvm2::domain::mark::NAMESPACE;
use provider_kvm2::error::{ProviderError, Reason};
use provider_kvm2::hypervisor::libvirt::Outlook;
use provider_kvm2::hypervisor::{Budgets, CallError, CallFailure, CallResult, HostId, Hypervisor};
use provider_kvm2::link::credentials::Credentials;
use provider_kvm2::link::dial::{Dialler, Endpoint};
use provider_kvm2::link::state::{LinkKind, LinkState};
use provider_kvm2::link::tunnel::Door;
use provider_kvm2::telemetry::metrics::Metrics;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[path = "../src/fuzzing/mutate.rs"]
mod mutate;

/// Budgets of a link: for opening it and for each call.
#[derive(Debug, Clone, Copy)]
struct Patience {
    open: Duration,
    call: Duration,
}

/// A peer that falls silent uses them up.
const BRISK: Patience = Patience { open: Duration::from_secs(2), call: Duration::from_millis(500) };
/// Where the outcome is known, a machine that is busy must not make another one of it.
const PATIENT: Patience = Patience { open: Duration::from_secs(15), call: Duration::from_secs(15) };
/// What a caller of a silent host may wait at most.
const PROMISE: Duration = Duration::from_secs(20);
/// Mutations of the whole corpus; `KVM2_FUZZ_ROUNDS` asks for more.
const ROUNDS: usize = 200;
/// Peers at a time.
const AT_ONCE: usize = 8;
/// What all of it may take of memory. libvirt's client takes frames of 32 MiB at most.
const MEMORY_KIB: u64 = 256 << 10;

const REPLY: u32 = 1;
const STREAM: u32 = 3;
const CONTINUE: u32 = 2;

/// How a peer ends once it has said everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Close,
    FallSilent,
    /// The last frame again and again, asked or not.
    Endless,
    /// Everything at once without waiting to be asked, then close.
    AllAtOnce,
}

fn end_of(script: &[u8]) -> End {
    match script.first().unwrap_or(&0) % 4 {
        0 => End::Close,
        1 => End::FallSilent,
        2 => End::Endless,
        _ => End::AllAtOnce,
    }
}

fn word(frame: &[u8], n: usize) -> Option<u32> {
    Some(u32::from_be_bytes(frame.get(n * 4..n * 4 + 4)?.try_into().ok()?))
}

/// Frames by their announced lengths; what announces nonsense is one frame to the end.
fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let length = word(bytes, 0).map_or(bytes.len(), |n| (n as usize).clamp(4, bytes.len()));
        let (frame, rest) = bytes.split_at(length);
        found.push(frame);
        bytes = rest;
    }
    found
}

/// Reads one whole request; None when the client has gone.
async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).await.ok()?;
    let length = u32::from_be_bytes(head) as usize;
    let mut frame = head.to_vec();
    frame.resize(length.clamp(4, 64 << 20), 0);
    stream.read_exact(&mut frame[4..]).await.ok()?;
    Some(frame)
}

/// Speaks as the script says until the client goes away, or says why it stopped.
async fn speak(door: Door, script: &[u8]) -> String {
    let Ok(stream) = door.accept().await else { return "nobody came".to_owned() };
    let (mut read, mut write) = stream.into_split();
    let said = "the peer has said everything".to_owned();
    let gone = "the client went away".to_owned();
    let all = frames(script.get(1..).unwrap_or_default());
    if end_of(script) == End::AllAtOnce {
        let _ = request(&mut read).await;
        let _ = write.write_all(&script[1..]).await;
        return said;
    }
    let mut next = 0;
    while next < all.len() {
        if request(&mut read).await.is_none() {
            return gone;
        }
        // an answer, and then the data of a stream that it opened
        loop {
            if write.write_all(all[next]).await.is_err() {
                return gone;
            }
            next += 1;
            if next == all.len() || word(all[next], 4) != Some(STREAM) || word(all[next], 6) != Some(CONTINUE) {
                break;
            }
        }
    }
    match end_of(script) {
        End::Close | End::AllAtOnce => {}
        End::FallSilent => while request(&mut read).await.is_some() {},
        End::Endless => {
            let last = all.last().copied().filter(|f| !f.is_empty()).unwrap_or(b"\0");
            while write.write_all(last).await.is_ok() {}
        }
    }
    said
}

#[derive(Debug)]
struct Blind;

#[async_trait]
impl Outlook for Blind {
    async fn has_network_interface(&self, _: &str) -> Option<bool> {
        None
    }
}

fn endpoint(patience: Patience) -> Endpoint {
    Endpoint {
        id: HostId { entry: "lab".to_owned(), host: "hv1".to_owned() },
        address: "hv1".to_owned(),
        port: 22,
        user: "nobody".to_owned(),
        socket: "/run/libvirt/libvirt-sock".to_owned(),
        key_file: PathBuf::new(),
        host_keys: HostKeys::Ignored,
        budgets: Budgets { dial: patience.open, call: patience.call, upload_small: patience.call, ..Budgets::default() },
    }
}

fn dialler(tracker: &TaskTracker) -> Dialler {
    Dialler { credentials: Credentials::default(), metrics: Metrics::new(), tracker: tracker.clone(), closing: CancellationToken::new() }
}

/// What one call came to: that it succeeded, or why not.
fn note(outcomes: &mut Vec<String>, call: &str, result: CallResult<()>) {
    outcomes.push(match result {
        Ok(()) => format!("{call}: ok"),
        Err(e) => {
            if let CallError { kind: CallFailure::BadAnswer { what }, .. } = &e {
                assert!(!what.contains("panicked"), "{call}: {what}");
            }
            let e = ProviderError::from(e);
            let text = e.chain();
            assert!(e.reason() != Reason::Internal && text.len() < 4096 && !text.contains(char::is_control), "{call}: {text:?}");
            format!("{call}: {:?}", e.reason())
        }
    });
}

/// The calls that the daemon makes, in an order that never changes: serial numbers count them.
async fn calls(hv: &dyn Hypervisor) -> Vec<String> {
    let mut all = Vec::new();
    note(&mut all, "lib_version", hv.lib_version().await.map(drop));
    note(&mut all, "hypervisor_version", hv.hypervisor_version().await.map(drop));
    note(&mut all, "hostname", hv.hostname().await.map(drop));
    note(&mut all, "node_info", hv.node_info().await.map(drop));
    note(&mut all, "domain_capabilities", hv.domain_capabilities("q35", "qemu").await.map(drop));
    note(&mut all, "has_interface", hv.has_interface("br0").await.map(drop));
    let domains = hv.list_domains().await;
    note(&mut all, "list_domains", domains.as_ref().map(|_| ()).map_err(Clone::clone));
    for domain in domains.iter().flatten().take(2) {
        note(&mut all, "domain_state", hv.domain_state(domain).await.map(drop));
        note(&mut all, "domain_xml", hv.domain_xml(domain, true).await.map(drop));
        note(&mut all, "domain_metadata", hv.domain_metadata(domain, NAMESPACE).await.map(drop));
        note(&mut all, "domain_interfaces", hv.domain_interfaces(domain, AddressSource::Lease).await.map(drop));
    }
    let pool = hv.lookup_pool("default").await;
    note(&mut all, "lookup_pool", pool.as_ref().map(|_| ()).map_err(Clone::clone));
    let Ok(pool) = pool else { return all };
    note(&mut all, "pool_info", hv.pool_info(&pool).await.map(drop));
    note(&mut all, "pool_xml", hv.pool_xml(&pool).await.map(drop));
    note(&mut all, "refresh_pool", hv.refresh_pool(&pool).await.map(drop));
    let volumes = hv.list_volumes(&pool).await;
    note(&mut all, "list_volumes", volumes.as_ref().map(|_| ()).map_err(Clone::clone));
    for volume in volumes.iter().flatten().take(1) {
        note(&mut all, "volume_info", hv.volume_info(volume).await.map(drop));
        note(&mut all, "volume_xml", hv.volume_xml(volume).await.map(drop));
        note(&mut all, "download", hv.download(volume, 1000).await.map(drop));
    }
    all
}

/// One link to a peer that speaks `script`: how its open and its calls ended.
async fn link((script, patience): (Vec<u8>, Patience)) -> Vec<String> {
    let tracker = TaskTracker::new();
    let started = Instant::now();
    let door = Door::open().expect("a temporary directory");
    let uri = door.uri();
    let state = LinkState::new("hv1", LinkKind::Dedicated, Metrics::new());
    let peer = state.clone();
    tracker.spawn(async move {
        let cause = tokio::select! { cause = speak(door, &script) => cause, _ = peer.died() => return };
        peer.kill(&cause);
    });
    let (endpoint, dialler) = (endpoint(patience), dialler(&tracker));
    let opened = tokio::time::timeout(patience.open, dialler.open(&endpoint, &state, uri, Arc::new(Blind))).await;
    let outcomes = match opened {
        Err(_) => vec!["open: no answer".to_owned()],
        Ok(Err(e)) => {
            let text = e.chain();
            assert!(e.reason() != Reason::Internal && text.len() < 4096 && !text.contains(char::is_control), "open: {text:?}");
            vec![format!("open: {:?}", e.reason())]
        }
        Ok(Ok(hv)) => {
            let outcomes = calls(&hv).await;
            hv.close();
            outcomes
        }
    };
    state.kill("over");
    tracker.close();
    tokio::time::timeout(PROMISE, tracker.wait()).await.expect("a task or a thread of the link is left");
    // each call has its own budget; none may take longer, and after the first overrun none waits
    assert!(started.elapsed() < patience.open + PROMISE, "{:?} for {outcomes:?}", started.elapsed());
    outcomes
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/libvirt_peer");
    let mut files: Vec<_> = std::fs::read_dir(dir).expect("the corpus").flatten().map(|f| f.path()).collect();
    files.sort();
    let read =
        |path: PathBuf| (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), std::fs::read(&path).expect("readable"));
    files.into_iter().map(read).collect()
}

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).expect("/proc").count()
}

/// KiB; the most that was ever used.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs scripts, some at a time, and looks at what is left when all are over.
fn run(scripts: Vec<(Vec<u8>, Patience)>) -> Vec<Vec<String>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(Duration::from_millis(50))
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        // what libvirt and the runtime keep for good is there before the count
        link((vec![0], BRISK)).await;
        let (threads, files, memory) = (count("task"), count("fd"), peak());
        let outcomes = futures::stream::iter(scripts).map(link).buffered(AT_ONCE).collect().await;
        let settled = async {
            while count("task") > threads || count("fd") > files {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let settled = tokio::time::timeout(PROMISE, settled).await;
        assert!(settled.is_ok(), "threads {threads} → {}, descriptors {files} → {}", count("task"), count("fd"));
        println!("memory: {} KiB more at most", peak() - memory);
        assert!(peak() - memory < MEMORY_KIB, "{} KiB", peak() - memory);
        outcomes
    })
}

#[test]
fn whatever_a_peer_says_costs_one_error_and_nothing_is_left() {
    if let Some(file) = std::env::var_os("KVM2_FUZZ_RECORD") {
        return record(Path::new(&file));
    }
    let seed = number("KVM2_FUZZ_SEED").unwrap_or(0x6b76_6d32);
    let rounds = number("KVM2_FUZZ_ROUNDS").map_or(ROUNDS, |n| n as usize);
    println!("KVM2_FUZZ_SEED={seed} KVM2_FUZZ_ROUNDS={rounds}");
    let kept = corpus();
    let mut mutator = mutate::Mutator::new(seed);
    let patience = |name: &str| if outcome_of(name).is_some() || name == RECORDED { PATIENT } else { BRISK };
    let mut scripts: Vec<_> = kept.iter().map(|(name, script)| (script.clone(), patience(name))).collect();
    for _ in 0..rounds {
        let (input, other) = (mutator.below(kept.len()), mutator.below(kept.len()));
        scripts.push((mutator.mutate(&kept[input].1, &kept[other].1), BRISK));
    }
    let outcomes = run(scripts);
    for ((name, _), outcome) in kept.iter().zip(&outcomes) {
        println!("{name}: {outcome:?}");
        if let Some(expected) = outcome_of(name) {
            assert_eq!(outcome[..], [expected.to_owned()], "{name}");
        }
        if name == RECORDED {
            // it plays to its end, or all that is made of it would only be refused at its first frames
            let good = outcome.iter().filter(|o| o.ends_with(": ok")).count();
            assert!(outcome.last().is_some_and(|o| o == "download: ok") && good + 1 == outcome.len(), "{outcome:?}");
        }
    }
}

/// What a libvirtd said; of a domain that does not run, so that its agent cannot be asked.
const RECORDED: &str = "recorded";

/// Where every libvirt has to end alike.
fn outcome_of(name: &str) -> Option<&'static str> {
    match name {
        "huge" | "text" => Some("open: HostIncompatible"),
        "nothing" | "short" => Some("open: LibvirtRestarting"),
        _ => None,
    }
}

/// Writes down what a real libvirtd of the lab answers to [`calls`].
fn record(file: &Path) {
    let lab = std::env::var("KVM2_LAB").expect("KVM2_LAB names a lab");
    let socket = format!("{lab}/hv1/libvirt/libvirt-sock");
    // it falls silent at its end: a peer that closes would race with the last answer
    let said = Arc::new(Mutex::new(vec![1_u8]));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let (tracker, state) = (TaskTracker::new(), LinkState::new("hv1", LinkKind::Dedicated, Metrics::new()));
        let door = Door::open().expect("a temporary directory");
        let uri = door.uri();
        let keep = said.clone();
        tokio::spawn(async move {
            let (mut here, mut here_write) = door.accept().await.expect("our own client").into_split();
            let there = StdStream::connect(socket).expect("libvirtd listens");
            there.set_nonblocking(true).expect("a socket");
            let (mut there, mut there_write) = UnixStream::from_std(there).expect("a socket").into_split();
            let up = tokio::io::copy(&mut here, &mut there_write);
            let down = async {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(n @ 1..) = there.read(&mut buffer).await {
                    keep.lock().expect("not poisoned").extend(&buffer[..n]);
                    here_write.write_all(&buffer[..n]).await.expect("the client reads");
                }
            };
            tokio::select! { _ = up => {}, () = down => {} }
        });
        let hv = dialler(&tracker).open(&endpoint(PATIENT), &state, uri, Arc::new(Blind)).await.expect("opens");
        println!("{:?}", calls(&hv).await);
    });
    let said = said.lock().expect("not poisoned");
    let replies = frames(&said[1..]).iter().filter(|f| word(f, 4) == Some(REPLY)).count();
    println!("{replies} replies, {} bytes", said.len());
    std::fs::write(file, &*said).expect("writes");
}
