//! The lab as `tests/lab/up` describes it in its `lab.json`, and the commands that act on it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde::Deserialize;

/// Directory of a running lab (the one with `lab.json`), set by `tests/run`.
const LAB_DIR: &str = "KVM2_LAB";
/// Number of a lab to bring up or join, for a test that is run by hand.
const LAB_ID: &str = "KVM2_LAB_ID";
/// Set by `tests/run`: a test that finds no lab fails instead of being skipped.
const LAB_REQUIRED: &str = "KVM2_LAB_REQUIRED";
/// Ends a command that hangs, so that a test fails with its name instead of never.
const COMMAND_SECONDS: &str = "90";

#[derive(Debug, Clone, Deserialize)]
pub struct Lab {
    pub id: u8,
    pub run_dir: PathBuf,
    /// Where the lab's scripts are.
    pub tools_dir: PathBuf,
    pub known_hosts: PathBuf,
    pub id_ed25519: PathBuf,
    pub id_rsa: PathBuf,
    pub image_server: LabImageServer,
    pub images: BTreeMap<String, LabImage>,
    pub hosts: Vec<Host>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct LabImageServer {
    pub scratch_url: String,
    pub scratch_dir: PathBuf,
    pub access_log: PathBuf,
}

/// An image that the lab has built and serves.
#[derive(Debug, Clone, Deserialize)]
pub struct LabImage {
    pub url: String,
    pub path: PathBuf,
    pub sha256: String,
    pub format: String,
    pub firmware: String,
    pub size: u64,
}

/// What was broken on a host, mended when this is dropped: also when the test fails.
#[derive(Debug)]
pub struct Broken<'a> {
    host: &'a Host,
    mend: &'static [&'static str],
}

impl<'a> Broken<'a> {
    /// Breaks with one action of `tests/lab/host`, and mends with another.
    pub fn by(host: &'a Host, act: &[&str], mend: &'static [&'static str]) -> Self {
        let broken = Self { host, mend };
        host.act(act);
        broken
    }
}

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        if let Err(why) = self.host.try_act(self.mend) {
            eprintln!("mending {}: {why}", self.host.name);
        }
    }
}

/// A hypervisor of the lab.
#[derive(Debug, Clone, Deserialize)]
pub struct Host {
    /// Not in `lab.json`; set after reading, for the scripts.
    #[serde(skip)]
    lab_id: u8,
    #[serde(skip)]
    tools_dir: PathBuf,
    pub name: String,
    pub address: String,
    pub port: u16,
    pub user: String,
    /// A user with a shell.
    pub exec_user: String,
    /// A user with a shell who may not use the socket.
    pub denied_user: String,
    pub socket: String,
    pub uri: String,
    pub netns: String,
    /// What `nsenter --net=` takes.
    pub netns_path: PathBuf,
    pub mount_ns: PathBuf,
    pub pids: BTreeMap<String, Option<i32>>,
    pub pid_dir: PathBuf,
    pub pools: BTreeMap<String, Pool>,
    /// What a CONNECT through a guest can reach: `address:port`, plain HTTP.
    pub connect_target: String,
    pub gateway: String,
    pub libvirtd_log: PathBuf,
    pub sshd_log: PathBuf,
    pub qemu_log_dir: PathBuf,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Pool {
    /// On the host.
    pub path: PathBuf,
    /// The same directory as this machine sees it.
    pub local_path: PathBuf,
}

impl Lab {
    /// The lab of `KVM2_LAB` or `KVM2_LAB_ID`. Without one: a line that begins with `SKIP`
    /// and None, or a panic when `tests/run` says that there has to be one.
    pub fn attach(test: &str) -> Option<Self> {
        if let Some(dir) = std::env::var_os(LAB_DIR) {
            return Some(Self::read(Path::new(&dir)));
        }
        if let Ok(id) = std::env::var(LAB_ID)
            && std::env::var_os(LAB_REQUIRED).is_none()
        {
            return Some(Self::up(&id));
        }
        let help = format!("no lab: run tests/lab/up and set {LAB_DIR}=/run/kvm2-lab/0, or set {LAB_ID} to have one brought up");
        assert!(std::env::var_os(LAB_REQUIRED).is_none(), "{test}: {help}");
        // not through print!, which the test runner keeps to itself when a test passes
        let _ = writeln!(std::io::stderr(), "SKIP {test}: {help}");
        None
    }

    fn up(id: &str) -> Self {
        let up = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/up");
        let status = Command::new(&up).args(["--id", id, "--hosts", "4"]).stdin(Stdio::null()).status();
        assert!(status.is_ok_and(|s| s.success()), "{} failed", up.display());
        Self::read(Path::new(&format!("/run/kvm2-lab/{id}")))
    }

    fn read(dir: &Path) -> Self {
        let path = dir.join("lab.json");
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}; is the lab up? tests/lab/up brings it up", path.display()));
        let mut lab: Self = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for host in &mut lab.hosts {
            host.lab_id = lab.id;
            host.tools_dir = lab.tools_dir.clone();
        }
        lab
    }

    pub fn host(&self, name: &str) -> &Host {
        self.hosts.iter().find(|h| h.name == name).unwrap_or_else(|| panic!("the lab has no {name}; bring it up with --hosts 4"))
    }

    /// An image by the name of its variant, built on demand.
    pub fn image(&self, variant: &str) -> LabImage {
        if let Some(image) = self.images.get(variant) {
            return image.clone();
        }
        run_ok(Command::new(self.tools_dir.join("guest-image/build")).arg(variant));
        // the running lab serves its whole image directory; only its description is older than the image
        run_ok(Command::new(self.tools_dir.join("up")).args(["--id", &self.id.to_string(), "--hosts", &self.hosts.len().to_string()]));
        let lab = Self::read(&self.run_dir);
        lab.images.get(variant).unwrap_or_else(|| panic!("the lab cannot build the image {variant}")).clone()
    }
}

impl Host {
    /// `virsh` on this host, local; its standard output.
    pub fn virsh(&self, args: &[&str]) -> String {
        run_ok(self.virsh_command().args(args))
    }

    /// As [`Host::virsh`], for commands that may fail.
    pub fn try_virsh(&self, args: &[&str]) -> Result<String, String> {
        run(self.virsh_command().args(args))
    }

    fn virsh_command(&self) -> Command {
        let mut command = bounded("virsh");
        command.args(["-q", "-c", &self.uri]);
        command
    }

    /// Deletes a volume behind the daemon's back. libvirt refuses while it allocates it.
    pub fn delete_volume(&self, pool: &str, volume: &str) {
        for _ in 0..200 {
            match self.try_virsh(&["vol-delete", volume, "--pool", pool]) {
                Ok(_) => return,
                Err(e) if e.contains("still being allocated") => std::thread::sleep(std::time::Duration::from_millis(100)),
                Err(e) => panic!("{e}"),
            }
        }
        panic!("{}: volume {volume} is allocated for ever", self.name);
    }

    /// Defines a domain from XML.
    pub fn define(&self, xml: &str) {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), xml).expect("writing a temporary file");
        self.virsh(&["define", &file.path().to_string_lossy()]);
    }

    /// Runs a command in the host's network, for example a client of a guest's proxy.
    pub fn netexec(&self, args: &[&str]) -> Result<String, String> {
        run(bounded(self.tools_dir.join("netexec")).args(["--id", &self.lab_id.to_string(), &self.name]).args(args))
    }

    /// `tests/lab/host`: breaks or mends something of this host.
    pub fn act(&self, args: &[&str]) -> String {
        self.try_act(args).unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`Host::act`], for what must not panic: mending in a drop.
    pub fn try_act(&self, args: &[&str]) -> Result<String, String> {
        run(bounded(self.tools_dir.join("host")).args(["--id", &self.lab_id.to_string(), &self.name]).args(args))
    }

    /// Whether libvirtd answers, within a time that a living one never needs.
    pub fn libvirtd_answers(&self) -> bool {
        run(Command::new("timeout").args(["-k", "5", "20", "virsh", "-q", "-c", &self.uri, "version"])).is_ok()
    }

    /// Pid of a daemon of the host as it is now; it changes with a restart.
    pub fn pid(&self, daemon: &str) -> Option<i32> {
        let record = std::fs::read_to_string(self.pid_dir.join(daemon)).ok()?;
        record.split_whitespace().next()?.parse().ok()
    }

    pub fn domains(&self) -> Vec<String> {
        names(&self.virsh(&["list", "--all", "--name"]))
    }

    pub fn is_active(&self, domain: &str) -> bool {
        names(&self.virsh(&["list", "--name"])).iter().any(|name| name == domain)
    }

    /// Names of the volumes of a pool, from its directory: libvirt shows changes only after a
    /// refresh, and refuses one during an upload.
    pub fn volumes(&self, pool: &str) -> Vec<String> {
        let dir = self.volume_path(pool, "");
        let files = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut volumes: Vec<_> = files.filter_map(|file| file.ok()?.file_name().into_string().ok()).collect();
        volumes.sort();
        volumes
    }

    /// The log that the host has of a domain once it was started.
    pub fn qemu_log(&self, domain: &str) -> PathBuf {
        self.qemu_log_dir.join(format!("{domain}.log"))
    }

    /// A file of a pool as this machine sees it.
    pub fn volume_path(&self, pool: &str, volume: &str) -> PathBuf {
        let pool = self.pools.get(pool).unwrap_or_else(|| panic!("{} has no pool {pool}", self.name));
        pool.local_path.join(volume)
    }
}

fn names(list: &str) -> Vec<String> {
    list.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// A command that is ended when it takes far too long.
pub(crate) fn bounded(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", COMMAND_SECONDS]).arg(program);
    command
}

/// Standard output on success, what it said otherwise.
pub(crate) fn run(command: &mut Command) -> Result<String, String> {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().map_err(|e| format!("{command:?}: {e}"))?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    if status.success() {
        return Ok(stdout);
    }
    Err(format!("{command:?}: {status}: {} {stdout}", String::from_utf8_lossy(&stderr)))
}

pub(crate) fn run_ok(command: &mut Command) -> String {
    run(command).unwrap_or_else(|e| panic!("{e}"))
}
