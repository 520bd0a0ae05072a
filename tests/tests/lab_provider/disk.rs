//! What a Create handles never lies on the daemon's disk: a daemon that has none to write to creates all the same.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use egress_provider_proto::v1::{CloudInit, CreateRequest};
use lab_tests::case::{request, uid_of};
use lab_tests::daemon::binary;
use lab_tests::scratch::ScratchImage;
use lab_tests::{Answer, Case, Clients, ImageServer, ProvidersFile, eventually};
use serde_json::json;
use tonic_health::pb::HealthCheckRequest;

const HOST: &str = "hv2";
const LIMIT: Duration = Duration::from_secs(30);
const USER_DATA: usize = 1 << 20;

/// Makes every file system read-only but one of 64 KiB in memory, where the daemon puts its sockets, and
/// becomes the daemon. $1: directory for that one; the rest: the program and its arguments.
const WITHOUT_A_DISK: &str = r#"
set -eu
room=$1; shift
mount -t tmpfs -o size=64k,mode=700 none "$room"
awk '{ print $5 }' /proc/self/mountinfo | while read -r point; do
    case $point in "$room" | /proc | /proc/* | /sys | /sys/*) continue ;; esac
    mount -o remount,bind,ro "$(printf '%b' "$point")" || true
done
for place in / /tmp /var/tmp /dev/shm /run "$HOME"; do
    if touch "$place/kt-disk" 2>/dev/null; then echo "$place can be written to" >&2; exit 1; fi
done
cd /
exec "$@"
"#;

/// A daemon in a mount namespace of its own.
struct Diskless {
    child: Child,
    room: PathBuf,
}

impl Diskless {
    fn start(dir: &Path, file: &ProvidersFile) -> Self {
        let room = dir.join("room");
        std::fs::create_dir(&room).expect("a directory");
        let log = std::fs::File::create(dir.join("daemon.log")).expect("a log");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", WITHOUT_A_DISK, "sh"]).arg(&room).arg(binary()).arg("serve");
        command.arg("--config").arg(file.write(dir)).arg("--socket").arg(room.join("d.sock")).args(["--log-level", "trace"]);
        command
            .env_clear()
            .envs(["PATH", "HOME"].iter().filter_map(|key| Some((*key, std::env::var_os(key)?))))
            .env("TMPDIR", &room)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Self { child: command.spawn().expect("unshare, of util-linux"), room }
    }

    /// A path in the daemon's own view of the file system.
    fn seen(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix("/").expect("an absolute path");
        Path::new(&format!("/proc/{}/root", self.child.id())).join(below)
    }

    fn clients(&self) -> Clients {
        Clients::on(&self.seen(&self.room.join("d.sock")))
    }

    /// Bytes in regular files of the only place that it can write to.
    fn written(&self) -> u64 {
        fn below(dir: &Path) -> u64 {
            let entries = std::fs::read_dir(dir).expect("the daemon's directory").filter_map(Result::ok);
            entries
                .map(|entry| match entry.metadata() {
                    Ok(about) if about.is_dir() => below(&entry.path()),
                    Ok(about) if about.is_file() => about.len(),
                    _ => 0,
                })
                .sum()
        }
        below(&self.seen(&self.room))
    }
}

impl Drop for Diskless {
    fn drop(&mut self) {
        // fails only for one that has ended
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_can_write_to_no_disk_pulls_an_image_and_creates_with_the_largest_user_data() {
    let Some(case) = Case::start("disk", &[HOST]) else { return };
    let image = ScratchImage::filled(case.dir(), "i.qcow2", 4, 1);
    let server = ImageServer::start().await;
    server.serve("i.qcow2", image.bytes(), [Answer::Whole]);
    let vendor = format!("#cloud-config\n# {}\n", "v".repeat(100_000));
    let entry = case.entry().image("i", json!({ "url": server.url("i.qcow2"), "sha256": image.sha256, "firmware": "bios" }));
    let daemon = Diskless::start(case.dir(), &entry.set("vendorData", vendor).into());
    let log = || std::fs::read_to_string(case.dir().join("daemon.log")).unwrap_or_default();
    let clients = daemon.clients();
    eventually("the daemon serves", LIMIT, || async {
        clients.health.clone().check(HealthCheckRequest::default()).await.map_err(|e| format!("{e}\n{}", log()))
    })
    .await;

    let vm = case.vm("a");
    let cloud_init = Some(CloudInit { user_data: vec![b'#'; USER_DATA] });
    let wanted = CreateRequest { cloud_init, ..request(&vm, HOST, "i") };
    clients.create(wanted).await.unwrap_or_else(|e| panic!("{e}\n{}", log()));
    assert_eq!(daemon.written(), 0, "sockets are all that it makes");
    let seed = case.host(HOST).volume_path("default", &format!("{vm}-seed.iso"));
    assert!(seed.metadata().expect("the seed").len() > USER_DATA as u64);
    clients.delete_by_key(&vm, &uid_of(&vm)).await.expect("deleted");
    assert_eq!(daemon.written(), 0);
}
