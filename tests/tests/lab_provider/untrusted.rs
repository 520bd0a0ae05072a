//! What callers and image servers send, at its edges: images that name other files, names, user-data.

use std::fs::{File, FileTimes, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use egress_provider_proto::v1::{CloudInit, CreateRequest, ErrorReason as Reason, GetProviderInfoRequest};
use lab_tests::case::{request, uid_of};
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, Clients, FaultProxy, Host, ImageServer, refused};
use serde_json::json;
use tokio::net::TcpListener;

const HOST: &str = "hv2";
/// What the file on the host holds, again and again.
const SENTINEL: &[u8] = b"host-file-that-no-guest-may-read\n";
const SECRET_BYTES: usize = 1 << 20;
/// The longest name that the contract takes, as `GetProviderInfo` says.
const LONGEST: usize = 240;

fn id(vm: &str) -> String {
    format!("hosts/{HOST}/domains/{vm}")
}

/// A file of the host that its QEMU could read, if anybody told it to.
struct HostFile {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl HostFile {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("kt-host-").tempdir().expect("a temporary directory");
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("a directory of ours");
        let path = dir.path().join("secret");
        let content: Vec<u8> = SENTINEL.iter().copied().cycle().take(SECRET_BYTES).collect();
        std::fs::write(&path, content).expect("writing a temporary file");
        Self { _dir: dir, path }
    }

    /// From here on a read shows: a kernel moves the time of the last access on when it is older than a day.
    fn arm(&self) {
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        File::options().write(true).open(&self.path).and_then(|f| f.set_times(FileTimes::new().set_accessed(long_ago))).expect("a time");
    }

    fn was_read(&self) -> bool {
        let accessed = self.path.metadata().and_then(|m| m.accessed()).expect("a time of access");
        accessed > SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_001)
    }
}

/// What a header may name beside a file: somebody who listens. Counts those who come.
struct Listener {
    address: String,
    callers: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let callers = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&callers);
        let task = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { address, callers, task }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An image that names something of the host, and the format that it is declared as.
struct Pointing {
    key: &'static str,
    bytes: Vec<u8>,
    declared: &'static str,
    /// As what a tool that trusts it reads it; None where that is no proof of anything.
    real: Option<&'static str>,
    reason: Reason,
}

fn replaced(mut bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at: Vec<_> = bytes.windows(from.len()).enumerate().filter(|(_, w)| *w == from.as_bytes()).map(|(at, _)| at).collect();
    assert!(!at.is_empty(), "{from} is not in the image");
    for at in at {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

/// Every way in which `qemu-img` can make an image point at `secret`, or at `listener`.
fn pointing_at(dir: &Path, secret: &Path, listener: &str) -> Vec<Pointing> {
    let secret = secret.to_str().expect("a path of letters");
    let backed = |name: &str, format: &str, backing: &str, backing_format: &str| {
        ScratchImage::by_qemu_img(dir, name, &["-f", format, "-u", "-b", backing, "-F", backing_format], "1M").bytes()
    };
    let plain = backed("plain", "qcow2", secret, "raw");
    let json = format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{secret}"}}}}"#);
    let nbd = format!("nbd://{listener}/disk");
    // made beside the secret and then renamed in the image: the tool would write to what it is told
    let stand_in = secret.replace("secret", "outfit");
    let options = format!("data_file={stand_in},data_file_raw=on,preallocation=metadata");
    let external = ScratchImage::by_qemu_img(dir, "external", &["-f", "qcow2", "-o", &options], "1M").bytes();
    let external = replaced(external, &stand_in, secret);
    // the same name, in an extension that no feature bit announces
    let mut unannounced = external.clone();
    unannounced[79] &= !0b100;
    unannounced[95] &= !0b10;
    let nbd_extension = replaced(unannounced.clone(), secret, &format!("{nbd:/<0$}", secret.len()));
    ScratchImage::by_qemu_img(dir, "flat.vmdk", &["-f", "vmdk", "-o", "subformat=monolithicFlat"], "1M");
    let flat =
        String::from_utf8(std::fs::read(dir.join("flat.vmdk")).expect("the descriptor")).expect("text").replace("flat-flat.vmdk", secret);
    let gzip = {
        std::fs::write(dir.join("packed"), &plain).expect("writing a scratch file");
        let packed = Command::new("gzip").arg("-c").arg(dir.join("packed")).stdin(Stdio::null()).output().expect("gzip");
        packed.stdout
    };
    let case = |key, bytes, declared, real, reason| Pointing { key, bytes, declared, real, reason };
    vec![
        case("backing", plain.clone(), "qcow2", Some("qcow2"), Reason::ImageUnsafe),
        case("version2", backed_in_version_2(dir, secret), "qcow2", Some("qcow2"), Reason::ImageUnsafe),
        case("json", backed("json", "qcow2", &json, "raw"), "qcow2", Some("qcow2"), Reason::ImageUnsafe),
        case("nbd", backed("nbd", "qcow2", &nbd, "raw"), "qcow2", Some("qcow2"), Reason::ImageUnsafe),
        case("external", external, "qcow2", Some("qcow2"), Reason::ImageUnsafe),
        case("extension", unannounced, "qcow2", None, Reason::ImageUnsafe),
        case("nbdextension", nbd_extension, "qcow2", None, Reason::ImageUnsafe),
        case("packed", gzip, "qcow2", None, Reason::ImageUnsafe),
        case("asraw", plain, "raw", Some("qcow2"), Reason::ImageFormatMismatch),
        case("qed", backed("qed", "qed", secret, "raw"), "raw", Some("qed"), Reason::ImageFormatMismatch),
        case("vmdk", flat.into_bytes(), "raw", Some("vmdk"), Reason::ImageFormatMismatch),
    ]
}

fn backed_in_version_2(dir: &Path, secret: &str) -> Vec<u8> {
    let options = ["-f", "qcow2", "-o", "compat=0.10", "-u", "-b", secret, "-F", "raw"];
    ScratchImage::by_qemu_img(dir, "version2", &options, "1M").bytes()
}

/// The disk that a guest would see; None where it cannot be opened.
fn as_a_guest_sees(dir: &Path, bytes: &[u8], format: &str) -> Option<Vec<u8>> {
    let (from, to) = (dir.join("from"), dir.join("to"));
    std::fs::write(&from, bytes).expect("writing a scratch file");
    let mut convert = Command::new("timeout");
    convert.args(["20", "qemu-img", "convert", "-f", format, "-O", "raw"]).arg(&from).arg(&to);
    let done = convert.stdin(Stdio::null()).output().expect("qemu-img");
    done.status.success().then(|| std::fs::read(&to).expect("the disk"))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_points_at_the_host_never_reaches_qemu() {
    let Some(case) = Case::start("pointing", &[HOST]) else { return };
    let (secret, listener) = (HostFile::new(), Listener::start().await);
    let images = pointing_at(case.dir(), &secret.path, &listener.address);
    // what is tried here is no straw man: whoever trusts such a header gets at the host
    for image in &images {
        let Some(real) = image.real else { continue };
        let callers = listener.callers.load(Ordering::SeqCst);
        let disk = as_a_guest_sees(case.dir(), &image.bytes, real);
        if disk.is_some_and(|d| d.starts_with(SENTINEL)) {
            continue;
        }
        // the caller has gone, and its coming may not have been counted yet
        lab_tests::eventually(&format!("{} leads to the host", image.key), std::time::Duration::from_secs(20), || async {
            if listener.callers.load(Ordering::SeqCst) > callers { Ok(()) } else { Err("nobody came".to_owned()) }
        })
        .await;
    }
    secret.arm();
    assert!(!secret.was_read());
    let callers = listener.callers.load(Ordering::SeqCst);

    let server = ImageServer::start().await;
    let mut entry = case.entry().set("urlPolicy", json!({ "allow": ["127.0.0.1"] }));
    for image in &images {
        server.serve(image.key, image.bytes.clone(), [Answer::Whole]);
        entry = entry.image(image.key, json!({ "url": server.url(image.key), "format": image.declared, "firmware": "bios" }));
    }
    let daemon = case.daemon(entry).await;
    let (clients, host) = (daemon.clients(), case.host(HOST));
    // by a key of the catalogue, and by a URL of the caller's own
    for (image, name) in images.iter().flat_map(|i| [(i, i.key.to_owned()), (i, server.url(i.key))]) {
        let vm = case.vm(&format!("{}-{}", image.key, name.len()));
        let status = clients.create(request(&vm, HOST, &name)).await.expect_err(image.key);
        let refusal = lab_tests::Refusal::of(&status);
        // a URL has no declared format: the bytes are then what the entry's own image would have to be
        let by_url = name != image.key;
        let expected = refusal.reason == image.reason || (by_url && refusal.reason == Reason::ImageUnsafe);
        assert!(expected, "{}: {refusal:?}", image.key);
        assert!(!host.is_active(&vm), "{vm} runs");
        assert!(!host.qemu_log(&vm).exists(), "{vm} was started");
        clients.delete(&id(&vm), &uid_of(&vm)).await.expect("deleted");
    }
    assert_eq!((case.left(HOST), case.bases(HOST)), (Vec::new(), Vec::new()), "nothing is left, so no disk holds anything");
    assert_eq!(listener.callers.load(Ordering::SeqCst), callers, "nobody followed a URL");
    assert!(!secret.was_read(), "somebody opened the host's file");
    // the watch sees what it is there for, and so does the look at QEMU's logs
    std::fs::read(&secret.path).expect("the file");
    assert!(secret.was_read(), "times of access are not kept here");
    let vm = case.vm("harmless");
    clients.create(case.request(&vm, HOST)).await.expect("created");
    assert!(host.qemu_log(&vm).exists());
}

/// Domain and volumes of a VM, as the host shows them.
fn parts(host: &Host, vm: &str) -> (bool, bool, bool, bool) {
    let volumes = host.volumes("default");
    let has = |suffix: &str| volumes.contains(&format!("{vm}{suffix}"));
    (host.domains().iter().any(|d| d == vm), host.is_active(vm), has(".qcow2"), has("-seed.iso"))
}

const ALL_THERE: (bool, bool, bool, bool) = (true, true, true, true);
const ALL_GONE: (bool, bool, bool, bool) = (false, false, false, false);

#[tokio::test(flavor = "multi_thread")]
async fn names_at_the_edges_of_the_limit_live_side_by_side_and_go_alone() {
    let Some(case) = Case::start("edges", &[HOST]) else { return };
    let uefi = case.lab.image("tiny");
    let uefi = json!({ "url": uefi.url, "sha256": uefi.sha256, "format": uefi.format, "firmware": "uefi" });
    let daemon = case.daemon(case.entry().image("uefi", uefi)).await;
    let (clients, host) = (daemon.clients(), case.host(HOST));
    let info = clients.provider.clone().get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    assert_eq!(info.entries[0].limits.as_ref().expect("limits").max_name_length as usize, LONGEST);

    let filled = |end: &str| format!("{:x<1$}{end}", case.vm("long"), LONGEST - end.len());
    let stem = case.vm("x");
    let names = [
        // outside the names that the case sweeps: deleted here, and by the next run of this test
        "q".to_owned(),
        // libvirt cuts a name to its first 20 characters where it makes directories of it
        filled("1"),
        filled("2"),
        case.vm("dots.in..it"),
        case.vm("dash--in--it"),
        // names that are names of volumes of others
        stem.clone(),
        format!("{stem}.qcow2"),
        format!("{stem}-seed.iso"),
    ];
    assert_eq!(names[1].len(), LONGEST);
    assert_eq!(names[1][..LONGEST - 1], names[2][..LONGEST - 1]);
    // a uid is shorter than the longest name
    let uid = |n: usize| if names[n] == "q" { uid_of("q") } else { format!("uid-{n}") };
    clients.delete_by_key("q", &uid_of("q")).await.expect("whatever an earlier run left");
    for (n, name) in names.iter().enumerate() {
        // UEFI keeps its variables in one more file of the VM's name
        let image = if name.len() == LONGEST { "uefi" } else { "tiny" };
        let wanted = CreateRequest { uid: uid(n), ..request(name, HOST, image) };
        clients.create(wanted).await.unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for name in &names {
        assert_eq!(parts(host, name), ALL_THERE, "{name}");
    }
    for (n, name) in names.iter().enumerate() {
        let got = clients.get(&id(name), &uid(n)).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(&got.name, name);
    }
    for (n, name) in names.iter().enumerate() {
        clients.delete(&id(name), &uid(n)).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(parts(host, name), ALL_GONE, "{name}");
        for other in &names[n + 1..] {
            assert_eq!(parts(host, other), ALL_THERE, "{other}, after {name} was deleted");
        }
    }
    assert_eq!(case.left(HOST), Vec::<String>::new());
}

/// A file of a seed, by another reader than our own writer.
fn read_iso(dir: &Path, iso: &Path, file: &str) -> Vec<u8> {
    let out = dir.join("extracted");
    // it refuses to write over what is there
    let _ = std::fs::remove_file(&out);
    let mut xorriso = Command::new("xorriso");
    xorriso.args(["-report_about", "WARNING", "-osirrox", "on", "-indev"]).arg(iso).arg("-extract").arg(file).arg(&out);
    let done = xorriso.stdin(Stdio::null()).output().expect("xorriso, which the lab installs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    std::fs::read(&out).expect("what was extracted")
}

fn user_data_of_every_kind(limit: usize) -> Vec<(&'static str, Vec<u8>)> {
    let gzip = {
        // the header of gzip, and then bytes of every value
        let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        packed.extend(0..=255_u8);
        packed
    };
    let mime = b"Content-Type: multipart/mixed; boundary=\"==B==\"\nMIME-Version: 1.0\n\n--==B==\nContent-Type: text/cloud-config\n\n\
        #cloud-config\n{}\n--==B==\nContent-Type: text/x-shellscript\n\n#!/bin/sh\n:\n--==B==--\n";
    vec![
        ("empty", Vec::new()),
        ("byte", b"#".to_vec()),
        ("limit", (0..limit).map(|n| (n % 251) as u8).collect()),
        ("crlf", b"#cloud-config\r\n{}\r\n".to_vec()),
        ("noend", b"#cloud-config\n{}".to_vec()),
        ("nul", b"#cloud-config\n\0\0a: \0\n".to_vec()),
        ("latin1", b"#cloud-config\n# caf\xe9 \xff\xfe\n".to_vec()),
        ("bom", b"\xef\xbb\xbf#cloud-config\n{}\n".to_vec()),
        ("jinja", b"## template: jinja\n#cloud-config\nhostname: {{ v1.local_hostname }}\n{% raw %}{}{% endraw %}\n".to_vec()),
        ("mime", mime.to_vec()),
        ("gzip", gzip),
    ]
}

async fn create_with(clients: &Clients, vm: &str, user_data: Vec<u8>) -> Result<(), tonic::Status> {
    let wanted = CreateRequest { cloud_init: Some(CloudInit { user_data }), ..request(vm, HOST, "tiny") };
    clients.create(wanted).await.map(|_| ())
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_of_any_bytes_up_to_the_limit_is_in_the_seed_as_it_was_given() {
    let Some(case) = Case::start("userdata", &[HOST]) else { return };
    let host = case.host(HOST);
    let proxy = FaultProxy::to(format!("{}:{}", host.address, host.port)).await;
    let daemon = case.daemon(case.entry().via(HOST, proxy.addr())).await;
    let clients = daemon.clients();
    let info = clients.provider.clone().get_provider_info(GetProviderInfoRequest::default()).await.expect("info").into_inner();
    let limit = usize::try_from(info.entries[0].limits.as_ref().expect("limits").max_user_data_bytes).expect("a limit that fits");
    refused(create_with(&clients, &case.vm("over"), vec![b'#'; limit + 1]).await, Reason::UserDataTooLarge);
    assert_eq!(proxy.counts().connections, 0, "the host was not even dialled");
    for (kind, user_data) in user_data_of_every_kind(limit) {
        let vm = case.vm(kind);
        create_with(&clients, &vm, user_data.clone()).await.unwrap_or_else(|e| panic!("{kind}: {e}"));
        let found = read_iso(case.dir(), &host.volume_path("default", &format!("{vm}-seed.iso")), "/user-data");
        assert!(found == user_data, "{kind}: {} bytes became {} others", user_data.len(), found.len());
    }
}
