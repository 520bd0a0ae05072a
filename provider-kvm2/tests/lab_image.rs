//! The image cache against a real libvirtd: the lab, found through KVM2_LAB.
//!
//! libvirtd 11.3 dies when a stream write fails. Each test here ends with a look
//! whether it is still the same process, and whether anything was left behind.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use provider_kvm2::config::{
    Config, ConfigHandle, DigestPolicy, Entry, Firmware, GuestAgent, Host, HostKeys, ImageFormat, ImageUrl, NetworkConfig, PoolReserve,
    Sha256Hex, UrlPolicy, VirtType,
};
use provider_kvm2::error::Reason;
use provider_kvm2::hypervisor::{Budgets, Connect, HostId};
use provider_kvm2::image::cache::Patience;
use provider_kvm2::image::http::{Source, Timing};
use provider_kvm2::image::{Base, Found, ImageCache, ImageRef, ImageState, UrlTrust, Wanted};
use provider_kvm2::link::HostTable;
use provider_kvm2::telemetry::metrics::Metrics;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Large enough to show what a transfer costs.
const BIG: usize = 413 << 20;

struct Lab {
    description: Value,
    entry: Arc<Entry>,
    libvirtd: String,
    /// None in a process whose parent holds it.
    _lock: Option<File>,
}

/// None, with the reason printed, where there is no lab.
fn lab(name: &str) -> Option<Lab> {
    let (dir, description) = described()?;
    let lock = File::create(dir.join("link-tests.lock")).expect("the lab's directory can be written to");
    lock.lock().expect("a lock");
    let entry = Arc::new(entry(&description, name));
    let mut lab = Lab { description, entry, libvirtd: String::new(), _lock: Some(lock) };
    lab.sweep();
    lab.libvirtd = lab.libvirtd_now();
    Some(lab)
}

fn described() -> Option<(PathBuf, Value)> {
    let Some(dir) = std::env::var_os("KVM2_LAB").map(PathBuf::from) else {
        println!("skipped: KVM2_LAB is not set; run tests/lab/up and point it at the lab's directory");
        return None;
    };
    let text = fs::read_to_string(dir.join("lab.json")).expect("KVM2_LAB names a directory with a lab.json");
    let description = serde_json::from_str(&text).expect("lab.json is JSON");
    Some((dir, description))
}

fn text(description: &Value, pointer: &str) -> String {
    description.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("lab.json has {pointer}")).to_owned()
}

fn entry(description: &Value, name: &str) -> Entry {
    let text = |pointer: &str| text(description, pointer);
    let port = description.pointer("/hosts/0/port").and_then(Value::as_u64).and_then(|p| u16::try_from(p).ok());
    let host = Host {
        name: text("/hosts/0/name"),
        address: text("/hosts/0/address"),
        port: port.expect("a port"),
        user: text("/hosts/0/user"),
        socket: text("/hosts/0/socket"),
        pool: text("/hosts/0/pool"),
        bridge: text("/hosts/0/bridge"),
    };
    Entry {
        name: name.to_owned(),
        ssh_key_file: text("/id_ed25519").into(),
        host_keys: HostKeys::KnownHosts(text("/known_hosts").into()),
        disk_size_gib: 3,
        vendor_data: None,
        guest_agent: GuestAgent::Leave,
        network_config: NetworkConfig::Written,
        images: BTreeMap::new(),
        machine_types: BTreeMap::new(),
        hosts: vec![host],
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".to_owned(),
        machine: "q35".to_owned(),
        pool_reserve: PoolReserve::Bytes(0),
        max_image_bytes: 1 << 30,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Budgets::default(),
        warnings: Vec::new(),
    }
}

impl Lab {
    fn text(&self, pointer: &str) -> String {
        text(&self.description, pointer)
    }

    fn virsh(&self, args: &[&str]) -> String {
        let output = Command::new("virsh").arg("-c").arg(self.text("/hosts/0/uri")).args(args).output().expect("virsh runs");
        assert!(output.status.success(), "virsh {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Which process serves the host: another one means that libvirtd has died.
    fn libvirtd_now(&self) -> String {
        let pidfile = PathBuf::from(self.text("/hosts/0/pid_dir")).join("libvirtd");
        let line = fs::read_to_string(pidfile).expect("the lab notes libvirtd's pid");
        line.split_whitespace().next().expect("a pid").to_owned()
    }

    /// libvirtd 11.3 may lock itself up when its client goes in the middle of an upload (ADR 8). Restarts it then.
    fn mend_lock_up(&mut self) {
        let answers = Command::new("timeout").args(["-k", "5", "20", "virsh", "-c", &self.text("/hosts/0/uri"), "version"]).output();
        if answers.expect("timeout runs").status.success() {
            return;
        }
        println!("libvirtd locked itself up; restarting it");
        let id = self.description["id"].to_string();
        for action in ["kill-libvirtd", "start-libvirtd"] {
            let tool = PathBuf::from(self.text("/tools_dir")).join("host");
            let status = Command::new(tool).args(["--id", &id, &self.text("/hosts/0/name"), action]).status().expect("the lab's tool runs");
            assert!(status.success(), "{action}: {status}");
        }
        self.libvirtd = self.libvirtd_now();
    }

    fn volumes(&self, pool: &str) -> Vec<String> {
        let prefix = format!("base-{}-", self.entry.name);
        let list = self.virsh(&["vol-list", pool]);
        list.lines().filter_map(|l| l.split_whitespace().next()).filter(|n| n.starts_with(&prefix)).map(str::to_owned).collect()
    }

    fn sweep(&self) {
        for pool in ["default", "small"] {
            let name = pool;
            for volume in self.volumes(name) {
                self.virsh(&["vol-delete", "--pool", name, &volume]);
            }
        }
    }

    fn table(&self) -> Arc<HostTable> {
        HostTable::new(ConfigHandle::fixed(Config { entries: vec![self.entry.clone()] }), Metrics::new())
    }

    fn cache(&self, table: &Arc<HostTable>) -> Arc<ImageCache> {
        let timing = Timing { backoff: Duration::from_millis(1), tries: 2, ..Timing::default() };
        let patience = Patience { poll: Duration::from_millis(50), stall: Duration::from_secs(5) };
        ImageCache::with(table.clone(), Metrics::new(), Source::new(timing), patience)
    }

    fn wanted(&self, url: &str, sha256: Option<Sha256Hex>) -> Wanted {
        let image = ImageRef {
            key: "big".to_owned(),
            url: ImageUrl::parse(url).expect("a URL"),
            sha256,
            format: ImageFormat::Qcow2,
            firmware: Firmware::Uefi,
            trust: UrlTrust::Configured,
        };
        Wanted { entry: self.entry.clone(), host: self.entry.hosts[0].clone(), image }
    }

    /// The base's file, as this machine sees it.
    fn file_of(&self, base: &Base) -> PathBuf {
        PathBuf::from(self.text("/hosts/0/pools/default/local_path")).join(&base.volume)
    }

    /// An image of [`BIG`] incompressible bytes, made once, at the lab's image server.
    fn big_image(&self) -> (String, Sha256Hex, u64) {
        let dir = PathBuf::from(self.text("/image_server/scratch_dir"));
        let path = dir.join("lab-image-big.qcow2");
        if !path.exists() {
            let (raw, made) = (dir.join("lab-image-big.raw"), dir.join("lab-image-big.new"));
            let script =
                format!("head -c {BIG} /dev/urandom > {raw:?} && qemu-img convert -q -f raw -O qcow2 {raw:?} {made:?} && rm {raw:?}");
            assert!(Command::new("sh").args(["-c", &script]).status().expect("sh runs").success());
            fs::rename(made, &path).expect("the image gets its name");
        }
        let length = fs::metadata(&path).expect("the image is there").len();
        (format!("{}/lab-image-big.qcow2", self.text("/image_server/scratch_url")), sha256_of(&path), length)
    }

    fn end(&self) {
        assert_eq!(self.libvirtd_now(), self.libvirtd, "libvirtd is the same process");
        let alive = fs::exists(format!("/proc/{}", self.libvirtd)).expect("/proc can be read");
        assert!(alive, "libvirtd lives");
        self.sweep();
    }
}

fn sha256_of(path: &PathBuf) -> Sha256Hex {
    let out = Command::new("sha256sum").arg(path).output().expect("sha256sum runs");
    Sha256Hex::parse(&String::from_utf8_lossy(&out.stdout)[..64]).expect("a digest")
}

/// A server that announces `length` bytes of `head` and then zeros, and closes after `sent` of them.
async fn breaking_server(head: Vec<u8>, length: usize, sent: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/x", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = head.clone();
            tokio::spawn(async move {
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.write_all(&head).await;
                let zeros = vec![0; 64 << 10];
                let mut left = sent - head.len();
                while left > 0 {
                    let n = left.min(zeros.len());
                    if stream.write_all(&zeros[..n]).await.is_err() {
                        return;
                    }
                    left -= n;
                }
            });
        }
    });
    url
}

fn qcow2_header() -> Vec<u8> {
    let mut h = vec![0; 512];
    h[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    h[23] = 16;
    h[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
    h[103] = 104;
    h
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_big_image_arrives_whole_and_another_process_waits_for_it() {
    let Some(lab) = lab("img-a") else { return };
    let (url, digest, length) = lab.big_image();
    let (one, two) = (lab.table(), lab.table());
    let (first, second) = (lab.cache(&one), lab.cache(&two));
    let began = Instant::now();
    let pull = first.pull(lab.wanted(&url, Some(digest.clone())));
    while pull.status().bytes_done == 0 && pull.outcome().is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let late = second.pull(lab.wanted(&url, Some(digest.clone())));
    let mut waited = false;
    let base = loop {
        waited |= late.status().state == ImageState::PulledElsewhere;
        if let Some(outcome) = pull.outcome() {
            break outcome.expect("the pull succeeds");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let took = began.elapsed();
    println!("pulled {length} bytes in {took:?}: {} MB/s", length as u128 / took.as_micros().max(1));
    assert_eq!(late.wait().await.expect("the other process gets it too").volume, base.volume);
    assert!(waited, "it waited for the upload and did not make its own");
    assert_eq!(sha256_of(&lab.file_of(&base)), digest);
    assert_eq!(base.virtual_size, BIG as u64);
    assert_eq!(lab.volumes("default").len(), 3, "base, origin, marker");
    let hv = two.control(&HostId { entry: "img-a".to_owned(), host: lab.entry.hosts[0].name.clone() }).await.expect("a link");
    let pool = hv.lookup_pool("default").await.expect("the pool");
    let volumes = hv.list_volumes(&pool).await.expect("a listing");
    let found = second.find(&*hv, &pool, &volumes, &lab.wanted(&url, None)).await.expect("a look");
    assert!(matches!(found, Found::Complete(b) if b == base));
    assert_eq!(second.list_on_host(&*hv, &pool, &lab.entry).await.expect("a listing").len(), 1);
    one.shutdown().await;
    two.shutdown().await;
    lab.end();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_that_break_leave_libvirtd_alive_and_nothing_behind() {
    let Some(lab) = lab("img-b") else { return };
    let url = breaking_server(qcow2_header(), 64 << 20, 40 << 20).await;
    let table = lab.table();
    let cache = lab.cache(&table);
    let mut files = 0;
    for round in 0..40 {
        let e = cache.pull(lab.wanted(&url, None)).wait().await.expect_err("the source breaks");
        assert_eq!(e.reason(), Reason::ImageSourceBroken, "{e:?}");
        if round == 9 {
            files = open_files();
        }
    }
    // 30 rounds lie between the two counts: one file lost in each is far more than the runtime of a test that began meanwhile
    assert!(open_files() <= files + 10, "{files} files were open, {} are", open_files());
    assert_eq!(lab.volumes("default"), Vec::<String>::new());
    table.shutdown().await;
    lab.end();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_digest_and_a_pool_without_room_leave_nothing() {
    let Some(lab) = lab("img-c") else { return };
    let (url, _, _) = lab.big_image();
    let table = lab.table();
    let cache = lab.cache(&table);
    let wrong = Sha256Hex::parse(&"0".repeat(64));
    let e = cache.pull(lab.wanted(&url, wrong)).wait().await.expect_err("the digest is wrong");
    assert_eq!(e.reason(), Reason::DigestMismatch, "{e:?}");
    let mut small = lab.wanted(&url, None);
    small.host.pool = "small".to_owned();
    let e = cache.pull(small).wait().await.expect_err("the pool is too small");
    assert_eq!(e.reason(), Reason::PoolSpace, "{e:?}");
    assert_eq!(lab.volumes("default").len() + lab.volumes("small").len(), 0);
    table.shutdown().await;
    lab.end();
}

/// Fills the pool `small` behind libvirt's back but for so many KiB that a process that is not root may use.
struct FullPool<'a>(&'a Lab);

impl<'a> FullPool<'a> {
    fn but_for(lab: &'a Lab, kib: &str) -> Self {
        let full = Self(lab);
        full.act(&["fill-pool", "small", kib]);
        full
    }

    fn act(&self, args: &[&str]) {
        let script = PathBuf::from(self.0.text("/tools_dir")).join("host");
        let id = self.0.description["id"].to_string();
        let done = Command::new(script).args(["--id", &id, &self.0.text("/hosts/0/name")]).args(args).stdout(Stdio::null()).status();
        assert!(done.is_ok_and(|status| status.success()), "{args:?}");
    }
}

impl Drop for FullPool<'_> {
    fn drop(&mut self) {
        self.act(&["unfill-pool", "small"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_only_root_could_use_of_a_pool_is_not_taken_for_an_image() {
    let Some(mut lab) = lab("img-e") else { return };
    let length = 5 << 20;
    let url = breaking_server(qcow2_header(), length, length).await;
    let pull = async |lab: &Lab| {
        let table = lab.table();
        let mut wanted = lab.wanted(&url, None);
        wanted.host.pool = "small".to_owned();
        let outcome = lab.cache(&table).pull(wanted).wait().await;
        table.shutdown().await;
        outcome
    };
    Arc::make_mut(&mut lab.entry).pool_reserve = PoolReserve::FivePercent;
    let full = FullPool::but_for(&lab, "1024");
    let e = pull(&lab).await.expect_err("only root has room for it");
    assert_eq!(e.reason(), Reason::PoolSpace, "{e:?}");
    assert_eq!(lab.volumes("small"), Vec::<String>::new());
    drop(full);
    pull(&lab).await.expect("there is room again, and nobody told libvirt");

    // the reserve it was, and not a lack of room for libvirtd, which is root
    lab.sweep();
    Arc::make_mut(&mut lab.entry).pool_reserve = PoolReserve::Bytes(0);
    let full = FullPool::but_for(&lab, "1024");
    pull(&lab).await.expect("root has room for it");
    drop(full);
    lab.end();
}

/// What the next test kills: the same test in a process of its own. It says on stdout when it is in the middle.
async fn pull_until_killed() {
    let (_, description) = described().expect("the parent has a lab");
    let entry = Arc::new(entry(&description, "img-d"));
    let lab = Lab { description, entry, libvirtd: String::new(), _lock: None };
    let (url, digest, _) = lab.big_image();
    let table = lab.table();
    let pull = lab.cache(&table).pull(lab.wanted(&url, Some(digest)));
    while pull.status().bytes_done < 50 << 20 && pull.outcome().is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    println!("{IN_THE_MIDDLE}");
    let _ = pull.wait().await;
}

/// Set for the process that is killed.
const KILLED: &str = "KVM2_TEST_TO_BE_KILLED";
const IN_THE_MIDDLE: &str = "the upload is in the middle";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_killed_in_the_upload_leaves_debris_that_is_not_used() {
    if std::env::var_os(KILLED).is_some() {
        return pull_until_killed().await;
    }
    let Some(mut lab) = lab("img-d") else { return };
    let (url, digest, _) = lab.big_image();
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_process_that_is_killed_in_the_upload_leaves_debris_that_is_not_used", "--nocapture"])
        .env(KILLED, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program runs");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    assert!(output.lines().map_while(Result::ok).any(|line| line.contains(IN_THE_MIDDLE)), "it got to the middle");
    child.kill().expect("it is killed");
    child.wait().expect("it is dead");
    lab.mend_lock_up();
    assert_eq!(lab.volumes("default").len(), 1, "a base without origin and marker");
    let table = lab.table();
    let base = lab.cache(&table).pull(lab.wanted(&url, Some(digest.clone()))).wait().await.expect("a pull of its own");
    assert_eq!(sha256_of(&lab.file_of(&base)), digest);
    assert_eq!(lab.volumes("default").len(), 4, "base, origin, marker and the debris");
    table.shutdown().await;
    lab.end();
}
