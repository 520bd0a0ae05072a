//! What all actors of a soak share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use egress_provider_proto::v1::{CloudInit, CreateRequest, Placement};
use tokio::sync::watch;

use crate::case::Case;
use crate::clients::seconds;
use crate::fault_proxy::FaultProxy;
use crate::image_server::{Answer, ImageServer};
use crate::lab::Host;
use crate::providers_file::EntryFile;
use crate::scratch::ScratchImage;

use super::journal::{Journal, Replay};
use super::plan::{DAEMONS, HOSTS, IMAGES, Spec, Uid, Vm};
use super::report::Report;
use super::weather::Weather;

/// The pool of each host that has room for disks and a file system of its own, to be filled.
pub const POOL: &str = "roomy";
/// How long a patient Create waits, in seconds; its work may take longer.
const MAX_WAIT_SECONDS: u64 = 40;

/// One generation of the images that the soak serves: all the same bytes.
#[derive(Debug, Clone)]
pub struct Served {
    generation: u64,
    pub body: Vec<u8>,
    sha256: String,
}

impl Served {
    /// The images of a generation, which differ from those of every other.
    pub fn of(case: &Case, images: &ImageServer, generation: u64) -> Self {
        let image = ScratchImage::filled(case.dir(), &format!("g{generation}.qcow2"), 1, generation);
        let served = Self { generation, body: image.bytes(), sha256: image.sha256 };
        for n in 0..IMAGES.len() {
            images.serve(&served.path(n), served.body.clone(), [Answer::Whole]);
        }
        served
    }

    /// The images that come after these.
    pub fn next(&self, case: &Case, images: &ImageServer) -> Self {
        Self::of(case, images, self.generation + 1)
    }

    pub fn path(&self, image: usize) -> String {
        format!("{}-{}.qcow2", IMAGES[image], self.generation)
    }

    /// An entry whose catalogue has them.
    pub fn in_entry(&self, mut entry: EntryFile, images: &ImageServer) -> EntryFile {
        for (n, key) in IMAGES.iter().enumerate() {
            let url = images.url(&self.path(n));
            entry = entry.image(key, serde_json::json!({ "url": url, "sha256": self.sha256, "firmware": "bios" }));
        }
        entry
    }
}

#[derive(Debug)]
pub struct Course {
    pub case: Arc<Case>,
    pub weather: Weather,
    pub journal: Journal,
    pub replay: Option<Replay>,
    pub report: Mutex<Report>,
    pub proxies: Vec<FaultProxy>,
    pub images: ImageServer,
    /// What the images are at present.
    pub served: Mutex<Served>,
    pub sockets: Vec<PathBuf>,
    pub logs: Vec<PathBuf>,
    /// How often each daemon has ended.
    pub endings: [AtomicU64; DAEMONS],
    /// No new step is begun, and what is held is let go.
    pub over: watch::Sender<bool>,
}

impl Course {
    pub fn report(&self) -> std::sync::MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn report_seed(&self) -> u64 {
        self.report().seed
    }

    /// Returns when the soak is over.
    pub async fn until_over(&self) {
        // the sender lives as long as self
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    pub fn host(&self, host: usize) -> &Host {
        self.case.host(HOSTS[host])
    }

    pub fn ended(&self, daemon: usize) -> u64 {
        self.endings[daemon].load(Ordering::SeqCst)
    }

    pub fn served(&self) -> std::sync::MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The foreign domain of each host.
    pub fn foreign(&self) -> String {
        self.case.vm("foreign")
    }

    pub fn vm_name(&self, caller: usize, name: usize) -> String {
        self.case.vm(&format!("c{caller}n{name}"))
    }

    pub fn request(&self, vm_name: &str, host: usize, vm: Vm, image: &str) -> CreateRequest {
        CreateRequest {
            name: vm_name.to_owned(),
            uid: uid(vm_name, vm.uid),
            placement: Some(Placement {
                zone: HOSTS[host].to_owned(),
                machine_type: "nano".to_owned(),
                image: image.to_owned(),
                ..Default::default()
            }),
            cloud_init: Some(CloudInit { user_data: b"#cloud-config\n{}\n".to_vec() }),
            spec_hash: if vm.spec == Spec::One { "sha256:1".to_owned() } else { "sha256:2".to_owned() },
            max_wait: seconds(MAX_WAIT_SECONDS),
            ..Default::default()
        }
    }
}

pub fn uid(vm_name: &str, uid: Uid) -> String {
    format!("uid-{vm_name}-{}", if uid == Uid::A { "a" } else { "b" })
}

/// Each name lives on one host, so that one belief is enough for it.
pub fn host_of(caller: usize, name: usize) -> usize {
    (caller + name) % HOSTS.len()
}

/// The entry that all daemons have: hosts by way of the proxies.
pub fn entry(case: &Case, proxies: &[FaultProxy]) -> EntryFile {
    let mut entry = case.entry();
    for (host, proxy) in HOSTS.iter().zip(proxies) {
        entry = entry.via(host, proxy.addr()).host_set(host, "pool", POOL);
    }
    // short enough for a silent host to be given up within the soak, long enough for a machine with other work
    entry.set(
        "budgets",
        serde_json::json!({ "dial": "8s", "call": "15s", "start": "60s", "allocate": "30s", "uploadSmall": "15s", "uploadImage": "40s" }),
    )
}
