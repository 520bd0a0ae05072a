//! One test against the lab: names of its own, a directory of its own, and a clean host behind it.

use std::path::{Path, PathBuf};

use egress_provider_proto::v1::{CloudInit, CreateRequest, Placement};

use crate::cleanup::Cleanup;
use crate::clients::seconds;
use crate::daemon::Daemon;
use crate::lab::{Host, Lab};
use crate::limit::Place;
use crate::providers_file::{EntryFile, ProvidersFile};

/// How long a Create of a test may take before it is answered as unfinished.
const MAX_WAIT_SECONDS: u64 = 120;

/// Declare it before the daemons of the test: they have to be gone when it cleans up.
#[derive(Debug)]
pub struct Case {
    name: &'static str,
    hosts: Vec<String>,
    pub lab: Lab,
    dir: tempfile::TempDir,
    // dropped in this order: the place goes when the hosts are clean
    _cleanup: Cleanup,
    _place: Place,
}

impl Case {
    /// None, and a line that says why, where there is no lab. Waits while too many others work. `name` is short and made of letters
    /// and digits, so that no case's names begin with another's. Only `hosts` are used, and swept.
    pub fn start(name: &'static str, hosts: &[&str]) -> Option<Self> {
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()), "{name}");
        let lab = Lab::attach(name)?;
        let place = Place::take();
        let dir = tempfile::Builder::new().prefix(&format!("kt-{name}-")).tempdir().expect("a temporary directory");
        let cleanup = Cleanup::of(hosts.iter().map(|h| lab.host(h).clone()).collect(), &format!("kt-{name}-"), &format!("kt-{name}"));
        let hosts = hosts.iter().map(|h| (*h).to_owned()).collect();
        Some(Self { name, hosts, lab, dir, _cleanup: cleanup, _place: place })
    }

    /// The test's own provider entry on its hosts.
    pub fn entry(&self) -> EntryFile {
        EntryFile::of_lab(&self.lab, &self.entry_name(), &self.hosts)
    }

    /// The test's own provider entry on some of its hosts.
    pub fn entry_on(&self, hosts: &[&str]) -> EntryFile {
        EntryFile::of_lab(&self.lab, &self.entry_name(), hosts)
    }

    pub fn entry_name(&self) -> String {
        format!("kt-{}", self.name)
    }

    /// A name of the test's own.
    pub fn vm(&self, suffix: &str) -> String {
        format!("kt-{}-{suffix}", self.name)
    }

    /// Starts the daemon; the directory of the first of several is `d`.
    pub async fn daemon(&self, file: impl Into<ProvidersFile>) -> Daemon {
        self.daemon_in("d", file).await
    }

    /// Starts one of several daemons of a test.
    pub async fn daemon_in(&self, dir: &str, file: impl Into<ProvidersFile>) -> Daemon {
        Daemon::start(&self.subdir(dir), &file.into()).await
    }

    /// Starts a daemon that logs as much as it can.
    pub async fn talkative_daemon(&self, file: impl Into<ProvidersFile>) -> Daemon {
        Daemon::start_talkative(&self.subdir("d"), &file.into()).await
    }

    /// Starts one of several daemons of a test, of the build with failpoints.
    pub async fn failing_daemon_in(&self, dir: &str, file: impl Into<ProvidersFile>, program: &Path, failpoints: String) -> Daemon {
        Daemon::start_failing(&self.subdir(dir), &file.into(), program, failpoints).await
    }

    /// An entry on its hosts beside the test's own: its name begins with that one's, so it is swept as well.
    pub fn other_entry(&self, suffix: &str) -> EntryFile {
        EntryFile::of_lab(&self.lab, &format!("{}-{suffix}", self.entry_name()), &self.hosts)
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn subdir(&self, name: &str) -> PathBuf {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir).expect("a directory in a temporary one");
        dir
    }

    pub fn host(&self, name: &str) -> &Host {
        self.lab.host(name)
    }

    /// A request for a small VM of image `tiny`, which boots nothing.
    pub fn request(&self, vm: &str, zone: &str) -> CreateRequest {
        request(vm, zone, "tiny")
    }

    /// Bases and their sidecars of the test's entry in the default pool of a host.
    pub fn bases(&self, host: &str) -> Vec<String> {
        let prefix = format!("base-{}-", self.entry_name());
        self.host(host).volumes("default").into_iter().filter(|v| v.starts_with(&prefix)).collect()
    }

    /// Everything of the test's VMs on a host: domains and volumes.
    pub fn left(&self, host: &str) -> Vec<String> {
        let prefix = format!("kt-{}-", self.name);
        let host = self.host(host);
        let mut left = host.domains();
        left.extend(host.volumes("default"));
        left.retain(|name| name.starts_with(&prefix));
        left
    }
}

/// A request with the usual fields; the uid is derived from the name.
pub fn request(vm: &str, zone: &str, image: &str) -> CreateRequest {
    CreateRequest {
        name: vm.to_owned(),
        uid: uid_of(vm),
        placement: Some(Placement {
            zone: zone.to_owned(),
            machine_type: "nano".to_owned(),
            image: image.to_owned(),
            ..Default::default()
        }),
        cloud_init: Some(CloudInit { user_data: b"#cloud-config\n{}\n".to_vec() }),
        spec_hash: "sha256:1".to_owned(),
        max_wait: seconds(MAX_WAIT_SECONDS),
        ..Default::default()
    }
}

/// The uid that [`request`] gives to a name.
pub fn uid_of(vm: &str) -> String {
    format!("uid-{vm}")
}
