//! One host as an operation uses it: its control link, its pool, what it can run.
//!
//! What a link has learnt once (the pool, its directory, that the host can run this
//! entry's machines) is remembered for the life of that link, so that a warm Create
//! does not ask again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OnceCell;

use super::preflight;
use crate::config::{Entry, Firmware, Host};
use crate::domain::volume::StoragePoolXml;
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{Connect, HostId, Hypervisor, PoolRef, code};

#[derive(Debug, Clone)]
pub(super) struct Site {
    pub id: HostId,
    pub entry: Arc<Entry>,
    pub host: Host,
    pub hv: Arc<dyn Hypervisor>,
    pub pool: PoolRef,
    /// The pool's directory on the host.
    pub target: String,
    able: Arc<Able>,
}

/// Filled once per link and firmware: only success is remembered.
#[derive(Debug, Default)]
struct Able {
    uefi: OnceCell<()>,
    bios: OnceCell<()>,
}

impl Site {
    /// The absolute path of a volume of this site's pool.
    pub(super) fn path_of(&self, volume: &str) -> String {
        format!("{}/{volume}", self.target)
    }

    /// Fails with the reason why this host can never run the entry's VMs.
    pub(super) async fn require_able(&self, firmware: Firmware) -> Result<()> {
        let known = match firmware {
            Firmware::Uefi => &self.able.uefi,
            Firmware::Bios => &self.able.bios,
        };
        known.get_or_try_init(|| preflight::require(&*self.hv, &self.entry, &self.host, firmware)).await.copied()
    }
}

#[derive(Debug)]
pub(super) struct Sites {
    connect: Arc<dyn Connect>,
    known: Mutex<HashMap<HostId, Site>>,
}

impl Sites {
    pub(super) fn new(connect: Arc<dyn Connect>) -> Self {
        Self { connect, known: Mutex::default() }
    }

    pub(super) fn connect(&self) -> &Arc<dyn Connect> {
        &self.connect
    }

    /// The control link alone, for operations that need no pool.
    pub(super) async fn control(&self, id: &HostId) -> Result<Arc<dyn Hypervisor>> {
        self.connect.control(id).await
    }

    pub(super) async fn open(&self, entry: &Arc<Entry>, host: &Host) -> Result<Site> {
        let id = HostId { entry: entry.name.clone(), host: host.name.clone() };
        let hv = self.connect.control(&id).await?;
        if let Some(site) = self.lock().get(&id)
            && Arc::ptr_eq(&site.hv, &hv)
            && site.host == *host
            && site.entry == *entry
        {
            return Ok(site.clone());
        }
        let pool = hv.lookup_pool(&host.pool).await.map_err(|e| pool_error(e.into(), host))?;
        let xml = hv.pool_xml(&pool).await?;
        let target = StoragePoolXml::parse(&xml).map(|pool| pool.target_path).map_err(|fault| {
            ProviderError::new(
                Reason::HostIncompatible,
                format!("pool {} on host {} has no target directory; the provider needs a pool of type dir", host.pool, host.name),
            )
            .with_source(fault)
            .on_host(&host.name)
        })?;
        let site = Site { id: id.clone(), entry: entry.clone(), host: host.clone(), hv, pool, target, able: Arc::default() };
        self.lock().insert(id, site.clone());
        Ok(site)
    }

    /// After an error that says the pool is another one by now.
    pub(super) fn forget(&self, id: &HostId) {
        self.lock().remove(id);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<HostId, Site>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A missing or inactive pool with the command that mends it.
pub(super) fn pool_error(error: ProviderError, host: &Host) -> ProviderError {
    let pool = &host.pool;
    let message = match error.reason() {
        Reason::PoolNotFound => format!(
            "host {} has no storage pool {pool}; define it (virsh pool-define-as {pool} dir --target DIR) or correct hosts[].pool",
            host.name
        ),
        // said already, with what is wrong
        Reason::PoolNotActive if error.libvirt().is_none() => return error.on_host(&host.name),
        Reason::PoolNotActive if error.libvirt().is_some_and(|e| e.code != code::OPERATION_INVALID) => format!(
            "the file system of storage pool {pool} on host {} is read-only; look in the host's kernel log for the reason and mount it writable",
            host.name
        ),
        Reason::PoolNotActive => not_active(host),
        _ => return error.on_host(&host.name),
    };
    ProviderError::new(error.reason(), message).with_source(error).on_host(&host.name)
}

/// libvirt stops a pool whose directory it cannot read when it is refreshed.
pub(super) fn not_active(host: &Host) -> String {
    let pool = &host.pool;
    format!("storage pool {pool} on host {} is not active; see that its directory is there and run virsh pool-start {pool}", host.name)
}
