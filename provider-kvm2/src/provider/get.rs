//! Get: one instance as it is, its addresses included.

use std::sync::Arc;

use futures::future::join_all;

use super::{Expected, Instance, Key, Provider, Selector, placement};
use crate::config::{Entry, Host};
use crate::domain::addresses::{self, AddressSource, Reading};
use crate::domain::mark::{self, Mark};
use crate::domain::names::NameFault;
use crate::domain::state::{self, State, StateReason};
use crate::domain::{InstanceId, VmName, host_xml, seen};
use crate::error::{ProviderError, Reason, Result};
use crate::hypervisor::{CallFailure, CallResult, DomainRef, HostId, Hypervisor, code};

/// Where a selector points, and whose instance the caller expects there.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub host: Host,
    pub name: VmName,
    pub expected: Expected,
    /// The caller named the instance itself, not its key.
    pub by_id: bool,
}

impl Expected {
    pub(super) fn of(key: &Key) -> Self {
        Self { uid: key.uid.clone(), installation_id: key.installation_id.clone() }
    }

    /// Refuses an instance that is somebody else's.
    pub(super) fn check(&self, mark: &Mark, id: &InstanceId) -> Result<()> {
        if !mark::same(&self.uid, &mark.uid) {
            return Err(ProviderError::new(
                Reason::UidMismatch,
                format!("instance {id} belongs to uid {}, not to {}; it was left alone", mark.uid, self.uid),
            )
            .with_meta("owner_uid", &mark.uid));
        }
        if !mark::same(&self.installation_id, &mark.installation_id) {
            return Err(ProviderError::new(
                Reason::UidMismatch,
                format!(
                    "instance {id} belongs to installation {}, not to {}; it was left alone",
                    mark.installation_id, self.installation_id
                ),
            )
            .with_meta("owner_installation_id", &mark.installation_id));
        }
        Ok(())
    }
}

impl Provider {
    pub(super) async fn get_instance(&self, entry: &str, selector: Selector) -> Result<Instance> {
        let entry = placement::entry(&self.config.current(), entry)?;
        let mut targets = self.targets(&entry, &selector)?;
        if targets.len() == 1 {
            let target = targets.remove(0);
            return self.get_at(&entry, &target).await;
        }
        let answers = join_all(targets.iter().map(|target| self.get_at(&entry, target))).await;
        let (mut failure, mut foreign) = (None, None);
        for answer in answers {
            match answer {
                Ok(instance) => return Ok(instance),
                Err(e) if e.reason() == Reason::InstanceNotFound => {}
                Err(e) if matches!(e.reason(), Reason::NotManaged | Reason::UidMismatch) => foreign = Some(e),
                Err(e) => failure = Some(e),
            }
        }
        // what could not be asked may hold it; what was asked holds somebody else's at most
        Err(failure.or(foreign).unwrap_or_else(|| not_found_anywhere(&entry, &selector)))
    }

    /// The places to look at: one, or every host of the entry for a key without a zone.
    pub(super) fn targets(&self, entry: &Arc<Entry>, selector: &Selector) -> Result<Vec<Target>> {
        match selector {
            Selector::Id { id, expected_uid, expected_installation } => {
                let id = InstanceId::parse(id).map_err(|fault| {
                    ProviderError::invalid(
                        Reason::IdMalformed,
                        "id.instance_id",
                        "the instance id is not of the form hosts/<host>/domains/<name>; pass it as Create answered it",
                    )
                    .with_source(fault)
                })?;
                let host = entry.host(&id.host).ok_or_else(|| host_not_configured(entry, &id.host))?;
                Ok(vec![Target {
                    host: host.clone(),
                    name: id.name,
                    expected: Expected { uid: expected_uid.clone(), installation_id: expected_installation.clone() },
                    by_id: true,
                }])
            }
            Selector::Key { key, zone } => {
                let name = parse_name(&key.name)?;
                let expected = Expected::of(key);
                if zone.is_empty() {
                    return Ok(entry
                        .hosts
                        .iter()
                        .map(|host| Target { host: host.clone(), name: name.clone(), expected: expected.clone(), by_id: false })
                        .collect());
                }
                let host = entry.host(zone).ok_or_else(|| host_not_configured(entry, zone))?;
                Ok(vec![Target { host: host.clone(), name, expected, by_id: false }])
            }
        }
    }

    async fn get_at(&self, entry: &Arc<Entry>, target: &Target) -> Result<Instance> {
        let id = InstanceId { host: target.host.name.clone(), name: target.name.clone() };
        let at = |e: ProviderError| e.on_host(&target.host.name).on_instance(&id).during("get");
        let hv = self.sites.control(&HostId { entry: entry.name.clone(), host: target.host.name.clone() }).await.map_err(at)?;
        let found = match hv.lookup_domain(target.name.as_str()).await {
            Ok(domain) => domain,
            Err(e) if e.is(code::NO_DOMAIN) => return Err(at(not_found(&id))),
            Err(e) => return Err(at(e.into())),
        };
        let instance = read_instance(&*hv, entry, &id, &found, &target.expected).await.map_err(at)?;
        let instance = self.with_progress(entry, instance);
        tracing::debug!(provider = %entry.name, host = %id.host, name = %id.name, state = ?instance.state, reason = instance.state_reason.as_str_name(), uid = %instance.uid, addresses = instance.addresses.len(), "kvm2 domain fetched");
        Ok(instance)
    }
}

/// Everything about one domain of ours; a domain that vanishes meanwhile is not found.
pub(super) async fn read_instance(
    hv: &dyn Hypervisor,
    entry: &Entry,
    id: &InstanceId,
    domain: &DomainRef,
    expected: &Expected,
) -> Result<Instance> {
    let gone = |e: crate::hypervisor::CallError| if e.is(code::NO_DOMAIN) { not_found(id) } else { e.into() };
    let (element, raw, xml) =
        tokio::join!(hv.domain_metadata(domain, mark::NAMESPACE), hv.domain_state(domain), hv.domain_xml(domain, false));
    let mark = require_mark(element.map_err(gone)?.as_deref(), id)?;
    expected.check(&mark, id)?;
    let (mut state, mut state_reason) = state::map(raw.map_err(gone)?, mark.phase);
    let mut addresses = Vec::new();
    let mut state_message = String::new();
    if state == State::Running {
        let xml = xml.map_err(gone)?;
        let macs = host_xml::nic_macs(&xml).unwrap_or_default();
        let known = seen::is_noted(&xml);
        match read_addresses(hv, domain, macs.first().map_or("", String::as_str)).await.map_err(gone)? {
            Reading::Found(found) => {
                addresses = found;
                if !known {
                    note_address(hv, domain).await;
                }
            }
            Reading::NoIpv4(found) => {
                (state, state_reason) = (State::Provisioning, StateReason::NoIpv4Address);
                state_message = "the guest's own network card has no usable IPv4 address yet".to_owned();
                addresses = found;
            }
            // on a bridge only the agent knows addresses: one that fell silent after it told some makes them
            // unreadable; they are not gone, and the guest is not starting again
            Reading::NotYet { agent_failed: true } if known => {
                return Err(ProviderError::new(
                    Reason::AddressUnreadable,
                    format!(
                        "the guest agent of running instance {id} did not answer or could not be asked, and no other source knows its addresses; they are unchanged as far as is known, ask again"
                    ),
                ));
            }
            Reading::NotYet { agent_failed } => {
                state = State::Provisioning;
                (state_reason, state_message) = if agent_failed {
                    (StateReason::WaitingForAgent, "the guest agent does not answer yet, and no other source knows an address".to_owned())
                } else {
                    (StateReason::NoIpv4Address, "the guest has no address yet".to_owned())
                };
            }
            Reading::Unreadable => {
                return Err(ProviderError::new(
                    Reason::AddressUnreadable,
                    format!(
                        "the addresses of running instance {id} cannot be read: guest agent, leases and ARP table all failed; its state is unchanged, ask again"
                    ),
                ));
            }
        }
    }
    let mut instance = Instance::of(&entry.name, id.clone(), mark, state, state_reason);
    instance.addresses = addresses;
    if !state_message.is_empty() {
        instance.state_message = state_message;
    }
    Ok(instance)
}

/// Written once per boot. Where it cannot be written the next read tries again.
async fn note_address(hv: &dyn Hypervisor, domain: &DomainRef) {
    if let Err(e) = hv.set_live_metadata(domain, seen::NAMESPACE, seen::PREFIX, seen::ELEMENT).await {
        tracing::debug!(host = hv.host(), name = %domain.name, error = %e.kind, "that the instance has an address cannot be noted");
    }
}

/// The agent first, since only it knows the guest from inside; leases and the ARP table together.
async fn read_addresses(hv: &dyn Hypervisor, domain: &DomainRef, mac: &str) -> CallResult<Reading> {
    let agent = keep_fatal(hv.domain_interfaces(domain, AddressSource::Agent).await)?;
    let readings = [(AddressSource::Agent, agent)];
    if let found @ Reading::Found(_) = addresses::select(mac, &readings) {
        return Ok(found);
    }
    let [(_, agent)] = readings;
    let (lease, arp) = tokio::join!(hv.domain_interfaces(domain, AddressSource::Lease), hv.domain_interfaces(domain, AddressSource::Arp));
    let readings = [(AddressSource::Agent, agent), (AddressSource::Lease, keep_fatal(lease)?), (AddressSource::Arp, keep_fatal(arp)?)];
    Ok(addresses::select(mac, &readings))
}

/// One source failing is no verdict; a dead link or a vanished domain is.
fn keep_fatal<T>(result: CallResult<T>) -> CallResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if matches!(e.kind, CallFailure::NotAsked { .. }) => Ok(None),
        Err(e) if e.is(code::NO_DOMAIN) || e.code().is_none() => Err(e),
        Err(_) => Ok(None),
    }
}

/// The mark of a domain; without one it is nobody's business of ours.
pub(super) fn require_mark(element: Option<&str>, id: &InstanceId) -> Result<Mark> {
    let unmanaged = || {
        ProviderError::new(
            Reason::NotManaged,
            format!(
                "domain {} on host {} was not created by this provider (it does not carry its mark); it was left alone",
                id.name, id.host
            ),
        )
    };
    let element = element.ok_or_else(unmanaged)?;
    let mark = Mark::parse(element, jiff::Timestamp::now()).map_err(|fault| {
        ProviderError::new(
            Reason::MarkCorrupt,
            format!("the mark of domain {} on host {} cannot be read; inspect it with virsh metadata", id.name, id.host),
        )
        .with_source(fault)
    })?;
    if mark.is_managed() { Ok(mark) } else { Err(unmanaged()) }
}

fn parse_name(name: &str) -> Result<VmName> {
    VmName::parse(name).map_err(|fault| bad_name(&fault))
}

pub(super) fn bad_name(fault: &NameFault) -> ProviderError {
    ProviderError::invalid(Reason::NameInvalid, "name", format!("the name cannot be used for a VM: {fault}"))
}

pub(super) fn not_found(id: &InstanceId) -> ProviderError {
    ProviderError::new(Reason::InstanceNotFound, format!("instance {id} does not exist: host {} has no domain {}", id.host, id.name))
}

fn not_found_anywhere(entry: &Entry, selector: &Selector) -> ProviderError {
    let name = match selector {
        Selector::Id { id, .. } => id,
        Selector::Key { key, .. } => &key.name,
    };
    ProviderError::new(
        Reason::InstanceNotFound,
        format!("no host of entry {} has an instance {} of that uid", entry.name, placement::quoted(name)),
    )
}

pub(super) fn host_not_configured(entry: &Entry, host: &str) -> ProviderError {
    let host = placement::quoted(host);
    ProviderError::new(
        Reason::HostNotConfigured,
        format!(
            "host {host} is not in hosts of entry {}; add it again, or delete with abandon_unknown_host to leave its VM behind",
            entry.name
        ),
    )
    .with_meta("host", host)
}
