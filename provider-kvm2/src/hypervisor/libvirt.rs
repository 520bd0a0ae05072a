//! The seam over a real libvirt connection.
//!
//! `ffi` makes the C calls, `worker` puts them on threads with a budget, `transfer`
//! moves bodies; here each method of the seam becomes one of those calls. A handle
//! in a reference belongs to the connection that made it: a reference from another
//! link is refused, never mixed in.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::{
    Budgets, CallFailure, CallResult, DomainRef, Handle, Hypervisor, NodeInfo, PoolInfo, PoolRef, UploadPart, VolumeInfo, VolumeRef, code,
};
use crate::domain::addresses::{AddressSource, GuestInterface};
use crate::domain::state::RawState;
use crate::link::state::LinkState;
use crate::lock::KeyedLocks;

mod agents;
#[expect(unsafe_code, reason = "libvirt is a C library; this is the one place that calls it")]
mod ffi;
mod transfer;
mod worker;

use agents::Agents;
pub use ffi::{Connection, LibvirtError};
use ffi::{Domain, Object, Pool, Volume};
use worker::{Fault, Lane, Worker};

/// How long an orderly close may take before the transport is dropped.
const ORDERLY_CLOSE: Duration = Duration::from_secs(1);

/// A failure that took so long is an agent's silence: libvirtd waits for [`ffi::AGENT_SECONDS`], and says at once that
/// one is not connected.
const SILENT_AFTER: Duration = Duration::from_secs(ffi::AGENT_SECONDS as u64 - 1);

/// How long a refresh waits for another job of the pool.
const REFRESH_PATIENCE: Duration = Duration::from_secs(5);
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// Looks at the host beside libvirt, where the SSH account allows it.
#[async_trait]
pub trait Outlook: Send + Sync + fmt::Debug {
    /// None where nothing can be said.
    async fn has_network_interface(&self, name: &str) -> Option<bool>;
}

/// One link's libvirt. Dropping it closes the link.
pub struct LibvirtHypervisor {
    worker: Worker,
    budgets: Budgets,
    connection: Mutex<Option<Connection>>,
    refreshes: KeyedLocks<String>,
    agents: Arc<Agents>,
    outlook: Arc<dyn Outlook>,
}

impl fmt::Debug for LibvirtHypervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "libvirt over {:?}", self.worker.state())
    }
}

impl LibvirtHypervisor {
    pub fn new(connection: Connection, state: Arc<LinkState>, budgets: Budgets, tracker: TaskTracker, outlook: Arc<dyn Outlook>) -> Self {
        Self {
            worker: Worker::new(state, tracker),
            budgets,
            connection: Mutex::new(Some(connection)),
            refreshes: KeyedLocks::default(),
            agents: Arc::default(),
            outlook,
        }
    }

    fn connection(&self, call: &'static str) -> CallResult<Connection> {
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone();
        connection.ok_or_else(|| self.worker.dead(call))
    }

    /// A call on the connection itself, within the ordinary budget.
    async fn ask<T: Send + 'static>(
        &self,
        call: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, LibvirtError> + Send + 'static,
    ) -> CallResult<T> {
        let connection = self.connection(call)?;
        let handle = connection.clone();
        self.worker.run(call, Lane::Plain, self.budgets.call, connection, move || Ok(work(&handle)?)).await
    }

    /// A call on an object of this connection.
    async fn on<O: 'static, T: Send + 'static>(
        &self,
        call: &'static str,
        handle: &Handle,
        budget: Duration,
        work: impl FnOnce(&Object<O>) -> Result<T, Fault> + Send + 'static,
    ) -> CallResult<T> {
        self.on_lane(call, Lane::Plain, handle, budget, work).await
    }

    async fn on_lane<O: 'static, T: Send + 'static>(
        &self,
        call: &'static str,
        lane: Lane,
        handle: &Handle,
        budget: Duration,
        work: impl FnOnce(&Object<O>) -> Result<T, Fault> + Send + 'static,
    ) -> CallResult<T> {
        let connection = self.connection(call)?;
        let object = self.object(call, handle, &connection)?;
        self.worker.run(call, lane, budget, connection, move || work(&object)).await
    }

    fn object<O: 'static>(&self, call: &'static str, handle: &Handle, connection: &Connection) -> CallResult<Arc<Object<O>>> {
        let object = handle.clone().and_then(|h| h.downcast::<Object<O>>().ok()).filter(|o| o.connection().is(connection));
        object.ok_or_else(|| {
            let what = "the reference belongs to another link; look the object up again".to_owned();
            self.worker.error(call, CallFailure::BadAnswer { what })
        })
    }
}

fn domain_ref(domain: Domain) -> Result<DomainRef, LibvirtError> {
    Ok(DomainRef { name: domain.name()?, uuid: domain.uuid()?, handle: Some(Arc::new(domain)) })
}

fn pool_ref(pool: Pool) -> Result<PoolRef, LibvirtError> {
    Ok(PoolRef { name: pool.name()?, handle: Some(Arc::new(pool)) })
}

fn volume_ref(volume: Volume) -> Result<VolumeRef, LibvirtError> {
    Ok(VolumeRef { name: volume.name()?, key: volume.key()?, handle: Some(Arc::new(volume)) })
}

/// Whether a volume document asks for more than a sparse file, so that creating it may take as long as writing it.
fn asks_for_allocation(xml: &str) -> bool {
    xml.split_once("<allocation").and_then(|(_, rest)| rest.split_once('>')).is_some_and(|(attributes, rest)| {
        let text = rest.split('<').next().unwrap_or_default().trim();
        !attributes.ends_with('/') && text.bytes().any(|b| b.is_ascii_digit() && b != b'0')
    })
}

#[async_trait]
impl Hypervisor for LibvirtHypervisor {
    fn host(&self) -> &str {
        self.worker.state().host()
    }

    fn is_alive(&self) -> bool {
        self.worker.state().is_open()
    }

    async fn lib_version(&self) -> CallResult<u64> {
        self.ask("lib_version", Connection::lib_version).await
    }

    async fn hypervisor_version(&self) -> CallResult<u64> {
        self.ask("hypervisor_version", Connection::hypervisor_version).await
    }

    async fn hostname(&self) -> CallResult<String> {
        self.ask("hostname", Connection::hostname).await
    }

    async fn node_info(&self) -> CallResult<NodeInfo> {
        self.ask("node_info", Connection::node_info).await
    }

    async fn domain_capabilities(&self, machine: &str, virt_type: &str) -> CallResult<String> {
        let (machine, virt_type) = (machine.to_owned(), virt_type.to_owned());
        self.ask("domain_capabilities", move |c| c.domain_capabilities(&machine, &virt_type)).await
    }

    async fn has_interface(&self, name: &str) -> CallResult<Option<bool>> {
        let asked = name.to_owned();
        let answer = self.ask("has_interface", move |c| c.lookup_interface(&asked)).await;
        match answer {
            Ok(()) => Ok(Some(true)),
            Err(e) if e.is(code::NO_INTERFACE) => Ok(Some(false)),
            Err(e) if e.code().is_some() => Ok(self.outlook.has_network_interface(name).await),
            Err(e) => Err(e),
        }
    }

    async fn lookup_domain(&self, name: &str) -> CallResult<DomainRef> {
        let name = name.to_owned();
        self.ask("lookup_domain", move |c| c.lookup_domain(&name).and_then(domain_ref)).await
    }

    async fn list_domains(&self) -> CallResult<Vec<DomainRef>> {
        self.ask("list_domains", |c| c.list_domains()?.into_iter().map(domain_ref).collect()).await
    }

    async fn define_domain(&self, xml: &str) -> CallResult<DomainRef> {
        let xml = xml.to_owned();
        self.ask("define_domain", move |c| c.define_domain(&xml).and_then(domain_ref)).await
    }

    async fn start_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.agents.heard(domain.uuid);
        self.on("start_domain", &domain.handle, self.budgets.start, |d: &Domain| Ok(d.start()?)).await
    }

    async fn destroy_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.on("destroy_domain", &domain.handle, self.budgets.call, |d: &Domain| Ok(d.destroy()?)).await
    }

    async fn undefine_domain(&self, domain: &DomainRef) -> CallResult<()> {
        self.on("undefine_domain", &domain.handle, self.budgets.call, |d: &Domain| Ok(d.undefine()?)).await
    }

    async fn domain_state(&self, domain: &DomainRef) -> CallResult<RawState> {
        self.on("domain_state", &domain.handle, self.budgets.call, |d: &Domain| Ok(d.state()?)).await
    }

    async fn domain_xml(&self, domain: &DomainRef, inactive: bool) -> CallResult<String> {
        self.on("domain_xml", &domain.handle, self.budgets.call, move |d: &Domain| Ok(d.xml(inactive)?)).await
    }

    async fn domain_metadata(&self, domain: &DomainRef, uri: &str) -> CallResult<Option<String>> {
        let uri = uri.to_owned();
        self.on("domain_metadata", &domain.handle, self.budgets.call, move |d: &Domain| Ok(d.metadata(&uri)?)).await
    }

    async fn domains_metadata(&self, domains: &[DomainRef], uri: &str) -> CallResult<Vec<CallResult<Option<String>>>> {
        const CALL: &str = "domains_metadata";
        let connection = self.connection(CALL)?;
        let handles = domains.iter().map(|d| self.object(CALL, &d.handle, &connection)).collect::<CallResult<Vec<Arc<Domain>>>>()?;
        let uri = uri.to_owned();
        let read = move || {
            let outcome = |domain: Arc<Domain>| match domain.metadata(&uri) {
                Err(e) if e.is_lost_connection() || !domain.connection().is_alive() => Err(Fault::Libvirt(e)),
                outcome => Ok(outcome),
            };
            handles.into_iter().map(outcome).collect::<Result<Vec<_>, _>>()
        };
        let read = self.worker.run(CALL, Lane::Plain, self.budgets.call, connection, read).await?;
        Ok(read.into_iter().map(|outcome| outcome.map_err(|e| self.worker.error(CALL, e.into()))).collect())
    }

    async fn set_domain_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()> {
        let (uri, prefix, element) = (uri.to_owned(), prefix.to_owned(), element.to_owned());
        let set = move |d: &Domain| Ok(d.set_metadata(&uri, &prefix, &element)?);
        self.on("set_domain_metadata", &domain.handle, self.budgets.call, set).await
    }

    async fn set_live_metadata(&self, domain: &DomainRef, uri: &str, prefix: &str, element: &str) -> CallResult<()> {
        let (uri, prefix, element) = (uri.to_owned(), prefix.to_owned(), element.to_owned());
        let set = move |d: &Domain| Ok(d.set_live_metadata(&uri, &prefix, &element)?);
        self.on("set_live_metadata", &domain.handle, self.budgets.call, set).await
    }

    async fn domain_interfaces(&self, domain: &DomainRef, source: AddressSource) -> CallResult<Vec<GuestInterface>> {
        const CALL: &str = "domain_interfaces";
        if source != AddressSource::Agent {
            return self.on(CALL, &domain.handle, self.budgets.call, move |d: &Domain| Ok(d.interfaces(source)?)).await;
        }
        let (agents, uuid) = (self.agents.clone(), domain.uuid);
        if let Some(rest) = agents.rests(uuid) {
            let why = format!("the guest agent was silent a moment ago and is left alone for {} s", rest.as_secs() + 1);
            return Err(self.worker.error(CALL, CallFailure::NotAsked { why }));
        }
        let read = move |d: &Domain| {
            let began = Instant::now();
            let answer = d.interfaces(source);
            if answer.is_err() && began.elapsed() >= SILENT_AFTER {
                agents.silent(uuid)
            } else {
                agents.heard(uuid)
            }
            Ok(answer?)
        };
        self.on_lane(CALL, Lane::Agent, &domain.handle, self.budgets.call, read).await
    }

    async fn lookup_pool(&self, name: &str) -> CallResult<PoolRef> {
        let name = name.to_owned();
        self.ask("lookup_pool", move |c| c.lookup_pool(&name).and_then(pool_ref)).await
    }

    async fn pool_xml(&self, pool: &PoolRef) -> CallResult<String> {
        self.on("pool_xml", &pool.handle, self.budgets.call, |p: &Pool| Ok(p.xml()?)).await
    }

    async fn pool_info(&self, pool: &PoolRef) -> CallResult<PoolInfo> {
        self.on("pool_info", &pool.handle, self.budgets.call, |p: &Pool| Ok(p.info()?)).await
    }

    async fn refresh_pool(&self, pool: &PoolRef) -> CallResult<()> {
        // counted from here, so that who waits behind another's wait does not wait as long again
        let patience = tokio::time::Instant::now() + REFRESH_PATIENCE;
        // two refreshes at a time would each be the other's "asynchronous job"
        let _turn = self.refreshes.lock(pool.name.clone()).await;
        loop {
            let result = self.on("refresh_pool", &pool.handle, self.budgets.call, |p: &Pool| Ok(p.refresh()?)).await;
            match result {
                Err(e) if super::classify::is_pool_job(&e) && tokio::time::Instant::now() < patience => {
                    tokio::time::sleep(REFRESH_PAUSE).await;
                }
                result => return result,
            }
        }
    }

    async fn list_volumes(&self, pool: &PoolRef) -> CallResult<Vec<VolumeRef>> {
        let list = |p: &Pool| Ok(p.volumes()?.into_iter().map(volume_ref).collect::<Result<Vec<_>, _>>()?);
        self.on("list_volumes", &pool.handle, self.budgets.call, list).await
    }

    async fn lookup_volume(&self, pool: &PoolRef, name: &str) -> CallResult<VolumeRef> {
        let name = name.to_owned();
        let lookup = move |p: &Pool| Ok(p.lookup_volume(&name).and_then(volume_ref)?);
        self.on("lookup_volume", &pool.handle, self.budgets.call, lookup).await
    }

    async fn volume_info(&self, volume: &VolumeRef) -> CallResult<VolumeInfo> {
        self.on("volume_info", &volume.handle, self.budgets.call, |v: &Volume| Ok(v.info()?)).await
    }

    async fn volume_xml(&self, volume: &VolumeRef) -> CallResult<String> {
        self.on("volume_xml", &volume.handle, self.budgets.call, |v: &Volume| Ok(v.xml()?)).await
    }

    async fn create_volume(&self, pool: &PoolRef, xml: &str) -> CallResult<VolumeRef> {
        let budget = if asks_for_allocation(xml) { self.budgets.allocate } else { self.budgets.call };
        let xml = xml.to_owned();
        let create = move |p: &Pool| {
            p.create_volume(&xml).and_then(volume_ref).map_err(|e| {
                // one code for an inactive pool and for a file in the way, and a text in the host's language
                let inactive = e.code == code::OPERATION_INVALID && p.info().is_ok_and(|info| info.state != PoolInfo::RUNNING);
                if inactive { LibvirtError { message: super::classify::with_inactive_pool(e.message), ..e } } else { e }.into()
            })
        };
        self.on("create_volume", &pool.handle, budget, create).await
    }

    async fn delete_volume(&self, volume: &VolumeRef) -> CallResult<()> {
        self.on("delete_volume", &volume.handle, self.budgets.call, |v: &Volume| Ok(v.delete()?)).await
    }

    async fn upload(&self, volume: &VolumeRef, length: u64, parts: mpsc::Receiver<UploadPart>, budget: Duration) -> CallResult<u64> {
        let parts = transfer::feed(parts, self.worker.state(), self.worker.tracker());
        let state = self.worker.state().clone();
        let upload = move |v: &Volume| transfer::upload(v, length, parts, &state);
        self.on("upload", &volume.handle, budget, upload).await
    }

    async fn download(&self, volume: &VolumeRef, limit: u64) -> CallResult<Bytes> {
        let state = self.worker.state().clone();
        let download = move |v: &Volume| transfer::download(v, limit, &state);
        self.on("download", &volume.handle, self.budgets.upload_small, download).await
    }

    fn close(&self) {
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner).take();
        let state = self.worker.state().clone();
        let (Some(connection), true) = (connection, state.begin_close()) else {
            return state.kill("closed");
        };
        if tokio::runtime::Handle::try_current().is_err() {
            return state.kill("closed");
        }
        // libvirtd logs an error for a client that leaves without a word, so it gets one
        self.worker.tracker().spawn(async move {
            let closed = connection.closed();
            drop(connection);
            tokio::select! {
                () = closed.cancelled() => {}
                _ = state.died() => {}
                () = tokio::time::sleep(ORDERLY_CLOSE) => {}
            }
            state.kill("closed");
        });
    }
}

impl Drop for LibvirtHypervisor {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_document_with_an_allocation_gets_the_budget_of_one() {
        for (xml, expected) in [
            ("<volume><name>a</name><capacity>10</capacity></volume>", false),
            ("<volume><allocation>0</allocation></volume>", false),
            ("<volume><allocation unit='bytes'> 0 </allocation></volume>", false),
            ("<volume><allocation/></volume>", false),
            ("<volume><allocation unit='bytes'>1048576</allocation></volume>", true),
            ("<volume><allocation>\n100</allocation></volume>", true),
        ] {
            assert_eq!(asks_for_allocation(xml), expected, "{xml}");
        }
    }
}
