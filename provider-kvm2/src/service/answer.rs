//! The provider's results turned into messages of the contract.

use std::time::{Duration, SystemTime};

use egress_provider_proto::v1;

use super::request::{MAX_NAME, MAX_PAGE, MAX_USER_DATA};
use super::status::{MAX_TEXT, summary};
use crate::config::{Config, Entry, Firmware, ImageFormat};
use crate::domain::Phase;
use crate::domain::addresses::AddressSource;
use crate::error::{ProviderError, Reason, bounded, bounded_to};
use crate::image::{ImageState, ImageStatus};
use crate::provider::{
    Address, CreateOutcome, Created, DeleteOutcome, Deleted, HostCheck, HostDetails, Instance, InstanceImage, ListPage, ListedInstance,
    OrphanKind, OrphanVolume, RemovedKind, State,
};

/// Suffixes of an instance's volumes.
const VOLUME_SUFFIXES: [&str; 2] = ["-seed.iso", ".qcow2"];
/// Most warnings of a host and most unreadable instances in an answer; the contract's numbers.
const MAX_WARNINGS: usize = 20;
const MAX_UNREADABLE: usize = 100;
const MAX_HOST_TEXT: usize = 255;

/// What is offered: the RPCs that are not in here answer CAPABILITY_MISSING.
const CAPABILITIES: [v1::Capability; 8] = [
    v1::Capability::Create,
    v1::Capability::Get,
    v1::Capability::Delete,
    v1::Capability::List,
    v1::Capability::Check,
    v1::Capability::ImageRead,
    v1::Capability::ImageByUrl,
    v1::Capability::ListOrphanVolumes,
];

/// Of all entries, or of the one that is named; empty if there is no such entry.
pub(super) fn info(config: &Config, name: &str) -> v1::GetProviderInfoResponse {
    let entries = config.entries.iter().filter(|e| name.is_empty() || e.name == name);
    v1::GetProviderInfoResponse {
        provider_type: "kvm2".into(),
        provider_version: env!("CARGO_PKG_VERSION").into(),
        contract_version: "egressproxies.provider.v1".into(),
        entries: entries.map(|e| entry_info(e)).collect(),
    }
}

fn entry_info(entry: &Entry) -> v1::ProviderEntry {
    let limits = v1::Limits {
        max_name_length: MAX_NAME as u32,
        max_user_data_bytes: MAX_USER_DATA as u64,
        max_page_size: MAX_PAGE,
        max_disks: 1,
        max_vcpus: entry.machine_types.values().map(|m| m.vcpus).max().unwrap_or_default(),
        max_memory_mib: entry.machine_types.values().map(|m| m.memory_mib).max().unwrap_or_default(),
        max_disk_bytes: entry.disk_bytes(),
        max_image_bytes: entry.max_image_bytes,
    };
    let image = |(key, image): (&String, &crate::config::CatalogueImage)| v1::CatalogueImage {
        key: key.clone(),
        redacted_url: image.url.redacted(),
        sha256: image.sha256.as_ref().map(|s| s.as_str().to_owned()).unwrap_or_default(),
        format: format_of(image.format).into(),
        firmware: match image.firmware {
            Firmware::Uefi => v1::Firmware::Uefi,
            Firmware::Bios => v1::Firmware::Bios,
        }
        .into(),
    };
    v1::ProviderEntry {
        name: entry.name.clone(),
        capabilities: CAPABILITIES.iter().map(|c| (*c).into()).collect(),
        limits: Some(limits),
        hosts: entry.hosts.iter().map(|h| v1::HostInfo { name: h.name.clone(), address: h.endpoint() }).collect(),
        machine_types: entry
            .machine_types
            .iter()
            .map(|(key, m)| v1::MachineType { key: key.clone(), vcpus: m.vcpus, memory_mib: m.memory_mib })
            .collect(),
        images: entry.images.iter().map(image).collect(),
        disk_bytes: entry.disk_bytes(),
    }
}

fn format_of(format: ImageFormat) -> v1::ImageFormat {
    match format {
        ImageFormat::Qcow2 => v1::ImageFormat::Qcow2,
        ImageFormat::Raw => v1::ImageFormat::Raw,
    }
}

fn timestamp(at: jiff::Timestamp) -> prost_types::Timestamp {
    // a host whose clock is ahead must not make an instance younger than new
    let at = at.min(jiff::Timestamp::now());
    prost_types::Timestamp { seconds: at.as_second(), nanos: at.subsec_nanosecond().max(0) }
}

fn duration(d: Duration) -> prost_types::Duration {
    // only a time of ages does not fit, and no call takes that long
    d.try_into().unwrap_or_default()
}

fn address(address: &Address) -> v1::Address {
    let family = if address.ip.is_ipv4() { v1::AddressFamily::Ipv4 } else { v1::AddressFamily::Ipv6 };
    let source = match address.source {
        AddressSource::Agent => v1::AddressSource::GuestAgent,
        AddressSource::Lease => v1::AddressSource::DhcpLease,
        AddressSource::Arp => v1::AddressSource::Arp,
    };
    v1::Address {
        ip: address.ip.to_string(),
        family: family.into(),
        source: source.into(),
        mac: address.mac.to_ascii_lowercase(),
        primary: address.primary,
    }
}

fn phase(phase: Phase) -> v1::InstancePhase {
    match phase {
        Phase::Creating => v1::InstancePhase::Creating,
        // what is being deleted was complete or will not be completed: nothing in the contract waits for it
        Phase::Ready | Phase::Deleting => v1::InstancePhase::Ready,
    }
}

fn image_of(image: InstanceImage) -> Option<v1::InstanceImage> {
    let InstanceImage { key, digest, base_volume } = image;
    let known = !(key.is_empty() && digest.is_empty() && base_volume.is_empty());
    known.then(|| v1::InstanceImage { key, redacted_url: String::new(), sha256: digest, base_volume })
}

pub(super) fn instance(instance: Instance) -> v1::Instance {
    let state = match instance.state {
        State::Provisioning => v1::InstanceState::Provisioning,
        State::Running => v1::InstanceState::Running,
        State::Paused => v1::InstanceState::Paused,
        State::Stopped => v1::InstanceState::Stopped,
        State::Deleting => v1::InstanceState::Deleting,
        State::Unknown => v1::InstanceState::Unknown,
    };
    let mut addresses: Vec<_> = instance.addresses.iter().map(address).collect();
    addresses.sort_by_key(|a| !a.primary);
    v1::Instance {
        instance_id: instance.id.to_string(),
        name: instance.id.name.to_string(),
        uid: instance.uid,
        installation_id: instance.installation_id,
        spec_hash: instance.spec_hash,
        state: state.into(),
        state_reason: instance.state_reason.into(),
        state_message: bounded_to(&instance.state_message, MAX_TEXT),
        addresses,
        created_at: instance.created_at.map(timestamp),
        host: instance.id.host,
        entry: instance.entry,
        phase: phase(instance.phase).into(),
        image: image_of(instance.image),
        last_error: instance.last_error.as_ref().map(summary),
    }
}

pub(super) fn created(created: Created) -> v1::CreateResponse {
    use v1::create_response::Outcome;
    let outcome = match created.outcome {
        CreateOutcome::Created => Outcome::Created,
        CreateOutcome::Joined => Outcome::Joined,
        CreateOutcome::Existing => Outcome::Existing,
    };
    v1::CreateResponse { instance: Some(instance(created.instance)), outcome: outcome.into() }
}

pub(super) fn deleted(deleted: Deleted) -> v1::DeleteResponse {
    use v1::delete_response::Outcome;
    use v1::removed_resource::Kind;
    let outcome = match deleted.outcome {
        DeleteOutcome::Deleted => Outcome::Deleted,
        DeleteOutcome::AlreadyAbsent => Outcome::AlreadyAbsent,
        DeleteOutcome::Abandoned => Outcome::Abandoned,
    };
    let removed = deleted.removed.into_iter().map(|r| {
        let kind = match r.kind {
            RemovedKind::Domain => Kind::Domain,
            RemovedKind::Overlay => Kind::Overlay,
            RemovedKind::Seed => Kind::Seed,
        };
        v1::RemovedResource { kind: kind.into(), host: r.host, pool: r.pool, name: r.name }
    });
    v1::DeleteResponse { outcome: outcome.into(), removed: removed.collect(), create_cancelled: deleted.create_cancelled }
}

fn listed(instance: ListedInstance, entry: &str) -> v1::Instance {
    v1::Instance {
        instance_id: instance.id.to_string(),
        name: instance.id.name.to_string(),
        uid: instance.uid,
        installation_id: instance.installation_id,
        spec_hash: instance.spec_hash,
        created_at: instance.created_at.map(timestamp),
        host: instance.id.host,
        entry: entry.to_owned(),
        phase: phase(instance.phase).into(),
        image: image_of(instance.image),
        ..Default::default()
    }
}

fn orphan(volume: OrphanVolume) -> v1::OrphanVolume {
    use v1::orphan_volume::Kind;
    let kind = match volume.kind {
        OrphanKind::Overlay => Kind::Overlay,
        OrphanKind::Seed => Kind::Seed,
        OrphanKind::IncompleteBase => Kind::BaseDebris,
    };
    let owner = match volume.kind {
        OrphanKind::Overlay | OrphanKind::Seed => VOLUME_SUFFIXES.iter().find_map(|s| volume.name.strip_suffix(s)),
        OrphanKind::IncompleteBase => None,
    };
    v1::OrphanVolume {
        instance_id: owner.map(|name| format!("hosts/{}/domains/{name}", volume.host)).unwrap_or_default(),
        host: volume.host,
        pool: volume.pool,
        name: volume.name,
        kind: kind.into(),
        capacity_bytes: volume.capacity_bytes,
        allocation_bytes: volume.allocation_bytes,
    }
}

pub(super) fn unreachable(errors: &[ProviderError]) -> Vec<v1::UnreachableHost> {
    errors.iter().map(|e| v1::UnreachableHost { host: e.host().unwrap_or_default().to_owned(), error: Some(summary(e)) }).collect()
}

pub(super) fn page(page: ListPage, entry: &str) -> v1::ListByTagResponse {
    let complete = page.unreachable.is_empty() && page.unreadable.is_empty();
    let unreadable = page.unreadable.into_iter().take(MAX_UNREADABLE).map(|u| v1::UnreadableInstance {
        host: u.host,
        name: bounded_to(&u.name, MAX_HOST_TEXT),
        error: Some(summary(&u.error)),
    });
    v1::ListByTagResponse {
        instances: page.instances.into_iter().map(|i| listed(i, entry)).collect(),
        complete,
        unreachable_hosts: unreachable(&page.unreachable),
        unreadable_instances: unreadable.collect(),
        orphan_volumes: page.orphan_volumes.into_iter().map(orphan).collect(),
        next_page_token: page.next_page_token,
    }
}

pub(super) fn image(status: ImageStatus, entry: &Entry) -> v1::Image {
    let (state, started_at, created_at) = match status.state {
        ImageState::Pulling | ImageState::PulledElsewhere => (v1::ImageState::Pulling, Some(status.since), None),
        ImageState::Ready => (v1::ImageState::Ready, None, Some(status.since)),
        ImageState::Failed => (v1::ImageState::Failed, Some(status.since), None),
    };
    // before the first pull that this process saw there is no time to tell
    let time = |t: Option<SystemTime>| t.filter(|t| *t > SystemTime::UNIX_EPOCH).map(prost_types::Timestamp::from);
    let volume = status.volume.unwrap_or_default();
    let pool = entry.host(&status.host).filter(|_| !volume.is_empty()).map(|h| h.pool.clone());
    v1::Image {
        entry: status.entry,
        // a key made from a URL is no key of the catalogue
        key: if status.key.starts_with("url-") { String::new() } else { status.key },
        redacted_url: bounded_to(&status.url.redacted(), 2048),
        state: state.into(),
        bytes_done: status.bytes_done,
        bytes_total: status.bytes_total.unwrap_or_default(),
        sha256: status.digest.map(|d| d.as_str().to_owned()).unwrap_or_default(),
        volume,
        pool: pool.unwrap_or_default(),
        virtual_size_bytes: status.virtual_size.unwrap_or_default(),
        format: format_of(status.format).into(),
        users: Vec::new(),
        started_at: time(started_at),
        created_at: time(created_at),
        last_used_at: None,
        last_error: status.last_error.as_ref().map(summary),
        host: status.host,
    }
}

pub(super) fn host_check(row: HostCheck) -> v1::HostCheck {
    let reason = row.problem.as_ref().map_or(v1::CheckReason::Reachable, |e| check_reason(e.reason()));
    v1::HostCheck {
        host: row.host,
        address: row.address,
        healthy: row.problem.is_none(),
        reason: reason.into(),
        error_reason: row.problem.as_ref().map(|e| e.reason().wire_name().to_owned()).unwrap_or_default(),
        message: row.problem.as_ref().map(|e| bounded_to(&e.chain(), MAX_TEXT)).unwrap_or_default(),
        remediation: bounded_to(&row.remediation, MAX_TEXT),
        latency: Some(duration(row.latency)),
        details: Some(host_details(row.details)),
    }
}

fn host_details(details: HostDetails) -> v1::HostDetails {
    v1::HostDetails {
        user: details.user,
        hostname: bounded_to(&details.hostname, MAX_HOST_TEXT),
        libvirt_version: bounded_to(&details.libvirt_version, MAX_HOST_TEXT),
        hypervisor_version: bounded_to(&details.hypervisor_version, MAX_HOST_TEXT),
        pool: details.pool,
        pool_state: bounded_to(&details.pool_state, MAX_HOST_TEXT),
        pool_capacity_bytes: details.pool_capacity_bytes,
        // a pool without a size was not read; one without space was
        pool_available_bytes: (details.pool_capacity_bytes > 0).then_some(details.pool_available_bytes),
        pool_reserve_bytes: details.pool_reserve_bytes,
        emulator: bounded_to(&details.emulator, MAX_HOST_TEXT),
        cpu_count: details.cpus,
        memory_mib: details.memory_mib,
        warnings: details.warnings.iter().take(MAX_WARNINGS).map(|w| bounded(w)).collect(),
    }
}

/// What a failure of a check is called in its row.
fn check_reason(reason: Reason) -> v1::CheckReason {
    use v1::CheckReason as C;
    match reason {
        Reason::CallTimeout => C::Timeout,
        Reason::HostUnreachable | Reason::SshThrottled | Reason::LinkLost => C::Unreachable,
        Reason::SshAuthRejected | Reason::HostKeyUnknown | Reason::HostKeyChanged | Reason::HostKeyRevoked => C::Unauthorized,
        Reason::SocketDenied | Reason::SocketMissing | Reason::StreamlocalForwardingDisabled | Reason::SocketUnavailable => C::Forbidden,
        Reason::CredentialsUnavailable | Reason::KeyUnparsable | Reason::KeyEncrypted => C::CredentialsUnavailable,
        Reason::PoolNotFound => C::PoolNotFound,
        Reason::PoolNotActive => C::PoolNotActive,
        Reason::BridgeMissing => C::BridgeMissing,
        Reason::KvmUnavailable => C::KvmUnavailable,
        Reason::FirmwareUnavailable => C::FirmwareUnavailable,
        Reason::LibvirtRestarting => C::LibvirtRestarting,
        Reason::MachineUnsupported => C::MachineUnsupported,
        Reason::HostIncompatible => C::Incompatible,
        // whatever else libvirt or the provider had to say
        _ => C::ApiError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::UnreadableInstance;
    use crate::service::fixtures;

    #[test]
    fn an_address_that_libvirt_spells_in_capitals_is_lower_case_in_the_answer() {
        let a = Address { ip: [192, 0, 2, 1].into(), source: AddressSource::Agent, mac: "52:54:00:AB:CD:EF".into(), primary: true };
        assert_eq!(address(&a).mac, "52:54:00:ab:cd:ef");
    }

    #[test]
    fn a_time_in_the_future_is_told_as_now() {
        let future = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
        assert!(timestamp(future).seconds < future.as_second());
    }

    #[test]
    fn an_orphaned_volume_names_the_id_that_removes_it_but_debris_does_not() {
        let volume = |name: &str, kind| OrphanVolume {
            host: "hv1".into(),
            pool: "p".into(),
            name: name.into(),
            kind,
            capacity_bytes: 1,
            allocation_bytes: 1,
        };
        assert_eq!(orphan(volume("web-1-seed.iso", OrphanKind::Seed)).instance_id, "hosts/hv1/domains/web-1");
        assert_eq!(orphan(volume("web-1.qcow2", OrphanKind::Overlay)).instance_id, "hosts/hv1/domains/web-1");
        assert_eq!(orphan(volume("base-lab-x-01234567.qcow2", OrphanKind::IncompleteBase)).instance_id, "");
    }

    #[test]
    fn a_pool_that_is_full_is_not_a_pool_that_was_not_read() {
        let full = HostDetails { pool_capacity_bytes: 10, ..Default::default() };
        assert_eq!(host_details(full).pool_available_bytes, Some(0));
        assert_eq!(host_details(HostDetails::default()).pool_available_bytes, None);
    }

    #[test]
    fn what_a_host_says_is_cut_and_plain_wherever_an_answer_shows_it() {
        let hostile = || format!("a\x1b[2J\n{}", "é".repeat(2000));
        let failure = || ProviderError::new(Reason::LibvirtError, "it failed").with_source(std::io::Error::other(hostile()));
        let details = HostDetails {
            hostname: hostile(),
            libvirt_version: hostile(),
            hypervisor_version: hostile(),
            pool_state: hostile(),
            emulator: hostile(),
            warnings: vec![hostile()],
            ..HostDetails::default()
        };
        let row = HostCheck {
            host: "hv1".into(),
            address: "hv1:22".into(),
            latency: Duration::ZERO,
            problem: Some(failure()),
            remediation: hostile(),
            details,
        };
        let row = host_check(row);
        let details = row.details.expect("every row has them");
        let unreadable = UnreadableInstance { host: "hv1".into(), name: hostile(), error: failure() };
        let page = page(ListPage { unreadable: vec![unreadable], unreachable: vec![failure()], ..ListPage::default() }, "lab");
        let [gap] = &page.unreachable_hosts[..] else { panic!("{page:?}") };
        let [odd] = &page.unreadable_instances[..] else { panic!("{page:?}") };
        let message = |error: &Option<v1::ErrorSummary>| error.as_ref().map(|e| e.message.clone()).unwrap_or_default();
        let mut shown = vec![row.message, row.remediation, odd.name.clone(), message(&odd.error), message(&gap.error)];
        shown.extend([details.hostname, details.libvirt_version, details.hypervisor_version, details.pool_state, details.emulator]);
        shown.extend(details.warnings);
        for (n, text) in shown.iter().enumerate() {
            assert!((1..=MAX_TEXT).contains(&text.len()) && !text.chars().any(char::is_control), "{n}: {text:?}");
        }
    }

    #[test]
    fn only_what_is_offered_is_advertised() {
        let info = info(&fixtures::config(&[("lab", &["hv1"]), ("home", &["hv2"])]), "home");
        let [entry] = &info.entries[..] else { panic!("one entry was asked for: {info:?}") };
        for missing in [v1::Capability::WatchEvents, v1::Capability::ImagePrepare, v1::Capability::ImageWatch, v1::Capability::ImageEvict] {
            assert!(!entry.capabilities.contains(&missing.into()), "{missing:?}");
        }
        assert!(entry.limits.as_ref().is_some_and(|l| l.max_user_data_bytes >= 65536));
    }
}
