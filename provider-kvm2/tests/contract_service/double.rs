//! Operations that do what a test tells them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use provider_kvm2::config::{
    Config, DigestPolicy, Entry, GuestAgent, Host, HostKeys, MachineType, NetworkConfig, PoolReserve, UrlPolicy, VirtType,
};
use provider_kvm2::domain::addresses::{Address, AddressSource};
use provider_kvm2::domain::{InstanceId, Phase, VmName};
use provider_kvm2::error::{ProviderError, Reason, Result};
use provider_kvm2::image::ImageStatus;
use provider_kvm2::provider::{
    CreateOutcome, CreateRequest, Created, DeleteOutcome, DeleteRequest, Deleted, HostCheck, Instance, InstanceImage, ListPage,
    ListRequest, Operations, Selector, State, StateReason,
};
use tokio::sync::Notify;

#[derive(Debug, Default)]
struct Script {
    calls: Vec<String>,
    fail_get: Option<ProviderError>,
    hang: bool,
    panic: bool,
    max_wait: Option<Duration>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Double {
    script: Arc<Mutex<Script>>,
    entered: Arc<Notify>,
    answered: Arc<Notify>,
}

impl Double {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.script.lock().expect("no holder panics")
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.script().calls.clone()
    }

    /// The next Get fails with this.
    pub(crate) fn fail_get(&self, error: ProviderError) {
        self.script().fail_get = Some(error);
    }

    /// Gets answer only after [`Double::answer`].
    pub(crate) fn hang(&self) {
        self.script().hang = true;
    }

    pub(crate) fn answer(&self) {
        self.script().hang = false;
        self.answered.notify_waiters();
    }

    /// Resolves once a Get has begun.
    pub(crate) async fn entered(&self) {
        self.entered.notified().await;
    }

    pub(crate) fn panic_once(&self) {
        self.script().panic = true;
    }

    pub(crate) fn last_max_wait(&self) -> Option<Duration> {
        self.script().max_wait
    }
}

#[async_trait]
impl Operations for Double {
    async fn create(&self, request: CreateRequest) -> Result<Created> {
        let mut script = self.script();
        script.calls.push(format!("create {request:?}"));
        script.max_wait = Some(request.max_wait);
        tracing::trace!(target: "provider_kvm2::provider", ?request, "create as asked for");
        Ok(Created { instance: instance(), outcome: CreateOutcome::Created })
    }

    async fn get(&self, entry: &str, selector: Selector) -> Result<Instance> {
        let answered = self.answered.notified();
        let hangs = {
            let mut script = self.script();
            script.calls.push(format!("get {entry} {selector:?}"));
            if let Some(error) = script.fail_get.take() {
                return Err(error);
            }
            if std::mem::take(&mut script.panic) {
                drop(script);
                panic!("s3nt1nel-user-data of {entry}");
            }
            script.hang
        };
        self.entered.notify_one();
        if hangs {
            answered.await;
        }
        Ok(instance())
    }

    async fn delete(&self, _: DeleteRequest) -> Result<Deleted> {
        Ok(Deleted { outcome: DeleteOutcome::AlreadyAbsent, removed: Vec::new(), create_cancelled: false })
    }

    async fn list(&self, _: ListRequest) -> Result<ListPage> {
        Ok(ListPage::default())
    }

    async fn check(&self, _: &str, _: Duration) -> Result<Vec<HostCheck>> {
        Err(ProviderError::new(Reason::Internal, "not scripted"))
    }

    fn config(&self) -> Arc<Config> {
        Arc::new(config())
    }

    async fn image(&self, _: &str, _: &str, _: &str) -> Result<Vec<ImageStatus>> {
        Ok(Vec::new())
    }

    async fn images(&self, _: &str) -> Result<(Vec<ImageStatus>, Vec<ProviderError>)> {
        Ok((Vec::new(), Vec::new()))
    }
}

pub(crate) fn instance() -> Instance {
    let address =
        |last, primary| Address { ip: [192, 0, 2, last].into(), source: AddressSource::Agent, mac: "52:54:00:00:00:01".into(), primary };
    Instance {
        entry: "lab".into(),
        id: InstanceId { host: "hv1".into(), name: VmName::parse("web-1").expect("a name") },
        uid: "u-1".into(),
        installation_id: String::new(),
        spec_hash: String::new(),
        phase: Phase::Ready,
        image: InstanceImage::default(),
        last_error: None,
        created_at: None,
        state: State::Running,
        state_reason: StateReason::Unspecified,
        state_message: String::new(),
        addresses: vec![address(9, false), address(7, true)],
    }
}

pub(crate) fn config() -> Config {
    let host = Host {
        name: "hv1".into(),
        address: "198.51.100.7".into(),
        port: 22,
        user: "kvm".into(),
        socket: "/run/libvirt/libvirt-sock".into(),
        pool: "default".into(),
        bridge: "br0".into(),
    };
    let entry = Entry {
        name: "lab".into(),
        ssh_key_file: "/nowhere/key".into(),
        host_keys: HostKeys::Ignored,
        disk_size_gib: 10,
        vendor_data: None,
        guest_agent: GuestAgent::Install,
        network_config: NetworkConfig::Written,
        images: BTreeMap::new(),
        machine_types: BTreeMap::from([("small".to_owned(), MachineType { vcpus: 1, memory_mib: 512 })]),
        hosts: vec![host],
        virt_type: VirtType::Qemu,
        cpu_mode: "maximum".into(),
        machine: "q35".into(),
        pool_reserve: PoolReserve::FivePercent,
        max_image_bytes: 20 << 30,
        url_policy: UrlPolicy::default(),
        digests: DigestPolicy::Optional,
        budgets: Default::default(),
        warnings: Vec::new(),
    };
    Config { entries: vec![Arc::new(entry)] }
}
