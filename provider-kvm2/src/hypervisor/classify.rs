//! One table: which failure of which call means what to a caller.
//!
//! Decided by number wherever libvirt gives one: its code, its domain, and for
//! system errors the host's errno. Text decides only inside codes that libvirt uses
//! for everything, and never worse than the code alone would.

use super::{CallError, CallFailure, code};
use crate::error::{LibvirtCode, ProviderError, Reason, bounded};

/// `virErrorDomain` values that refine a code.
mod domain {
    pub(super) const STORAGE: i32 = 18;
    pub(super) const DBUS: i32 = 47;
    pub(super) const POLKIT: i32 = 60;
}

const ENODEV: i32 = 19;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;
const EACCES: i32 = 13;
const EPERM: i32 = 1;
const ENOMEM: i32 = 12;

/// Appends the host's errno to libvirt's text, where [`reason_of`] finds it again.
pub fn with_errno(mut message: String, errno: i32) -> String {
    if errno > 0 {
        message.push_str(&format!(" [errno {errno}]"));
    }
    message
}

/// What libvirt says of an inactive pool, in the one language that [`reason_of`] reads: libvirt's own
/// is that of its host.
pub fn with_inactive_pool(message: String) -> String {
    format!("{message} {INACTIVE_POOL}")
}

const INACTIVE_POOL: &str = "[storage pool is not active]";

fn errno_of(message: &str) -> Option<i32> {
    message.strip_suffix(']')?.rsplit_once(" [errno ")?.1.parse().ok()
}

/// What a call is about; libvirt uses some codes for different things per kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum About {
    Host,
    Domain,
    Pool,
    Volume,
}

fn about(call: &str) -> About {
    match call {
        "lookup_pool" | "pool_xml" | "pool_info" | "refresh_pool" | "list_volumes" | "lookup_volume" | "create_volume" => About::Pool,
        "volume_info" | "volume_xml" | "delete_volume" | "upload" | "download" => About::Volume,
        "lookup_domain"
        | "list_domains"
        | "define_domain"
        | "start_domain"
        | "destroy_domain"
        | "undefine_domain"
        | "domain_state"
        | "domain_xml"
        | "domain_metadata"
        | "set_domain_metadata"
        | "set_live_metadata"
        | "domain_interfaces" => About::Domain,
        _ => About::Host,
    }
}

/// The reason of a libvirt error; None for a code that the table does not know.
pub fn reason_of(call: &str, code: i32, error_domain: i32, message: &str) -> Option<Reason> {
    let about = about(call);
    let says = |text: &str| message.contains(text);
    Some(match code {
        code::NO_DOMAIN if call == "lookup_domain" => Reason::InstanceNotFound,
        // it was there a moment ago
        code::NO_DOMAIN | code::NO_STORAGE_VOL | code::NO_DOMAIN_METADATA => Reason::StateChanged,
        code::NO_STORAGE_POOL => Reason::PoolNotFound,
        code::STORAGE_VOL_EXIST => Reason::VolumeConflict,

        code::OPERATION_INVALID => match about {
            // creating over a file that the pool has not seen has the code of an inactive pool
            About::Pool if call == "create_volume" && !says(INACTIVE_POOL) => Reason::VolumeConflict,
            About::Pool => Reason::PoolNotActive,
            // also a volume that is still being written
            About::Volume => Reason::LibvirtBusy,
            About::Domain | About::Host => Reason::StateChanged,
        },

        code::SYSTEM_ERROR => match (errno_of(message), about) {
            (Some(ENOSPC | EDQUOT), About::Pool | About::Volume) => Reason::PoolSpace,
            // what is wrong with it only a person mends
            (Some(EROFS), About::Pool | About::Volume) => Reason::PoolNotActive,
            (Some(ENODEV), _) if call == "start_domain" => Reason::BridgeMissing,
            (Some(ENOMEM), _) if call == "start_domain" => Reason::HostMemory,
            (Some(EACCES | EPERM), About::Host) => Reason::SocketDenied,
            (_, About::Domain) if call == "start_domain" => Reason::StartFailed,
            _ => Reason::LibvirtError,
        },

        code::INTERNAL_ERROR => match (error_domain, about) {
            // polkit is asked over D-Bus, and there is none
            (domain::DBUS | domain::POLKIT, _) => Reason::SocketDenied,
            // "has asynchronous jobs running", in whatever language
            (domain::STORAGE, _) if call == "refresh_pool" => Reason::LibvirtBusy,
            (_, About::Domain) if call == "start_domain" && says("Cannot allocate memory") => Reason::HostMemory,
            (_, About::Domain) if call == "start_domain" && says("KVM") => Reason::KvmUnavailable,
            (_, About::Domain) if call == "start_domain" => Reason::StartFailed,
            // qemu-img's words, which no locale changes
            (_, About::Pool | About::Volume) if says("No space left") => Reason::PoolSpace,
            (_, About::Pool | About::Volume) if says("Read-only file system") => Reason::PoolNotActive,
            _ => Reason::LibvirtError,
        },

        code::OPERATION_FAILED => match call {
            "define_domain" | "start_domain" if says("firmware") => Reason::FirmwareUnavailable,
            // a domain of this name and another uuid appeared since it was looked up
            "define_domain" => Reason::StateChanged,
            "start_domain" => Reason::StartFailed,
            _ => Reason::LibvirtError,
        },

        code::CONFIG_UNSUPPORTED | code::CPU_INCOMPATIBLE if says("kvm") || says("KVM") => Reason::KvmUnavailable,
        code::CONFIG_UNSUPPORTED | code::CPU_INCOMPATIBLE if says("firmware") => Reason::FirmwareUnavailable,
        code::CONFIG_UNSUPPORTED | code::CPU_INCOMPATIBLE => Reason::MachineUnsupported,
        // asked for the capabilities of a machine or type that the host does not have
        code::INVALID_ARG if call == "domain_capabilities" && (says("kvm") || says("KVM")) => Reason::KvmUnavailable,
        code::INVALID_ARG if call == "domain_capabilities" => Reason::MachineUnsupported,
        // default devices find no place in a machine that libvirt does not know
        code::XML_ERROR if call == "define_domain" && says("PCI bus") => Reason::MachineUnsupported,
        code::XML_ERROR
        | code::XML_DETAIL
        | code::XML_INVALID_SCHEMA
        | code::INVALID_ARG
        | code::NO_SUPPORT
        | code::NO_NETWORK
        | code::OPERATION_UNSUPPORTED
        | code::RPC => Reason::HostRejected,

        code::AUTH_FAILED | code::AUTH_CANCELLED | code::AUTH_UNAVAILABLE | code::ACCESS_DENIED | code::OPERATION_DENIED => {
            Reason::SocketDenied
        }

        code::OPERATION_TIMEOUT | code::RESOURCE_BUSY | code::OPERATION_ABORTED => Reason::LibvirtBusy,
        code::AGENT_UNRESPONSIVE | code::AGENT_UNSYNCED | code::AGENT_COMMAND_TIMEOUT | code::AGENT_COMMAND_FAILED => {
            Reason::AddressUnreadable
        }
        code::NO_MEMORY => Reason::LibvirtError,
        _ => return None,
    })
}

/// True where a pool is busy with a job of its own and the call can simply be made again.
pub fn is_pool_job(error: &CallError) -> bool {
    match &error.kind {
        CallFailure::Libvirt { code, domain, message } => reason_of(error.call, *code, *domain, message) == Some(Reason::LibvirtBusy),
        _ => false,
    }
}

/// The code of an error that the table does not know, for the counter of such.
pub fn unknown_code(error: &CallError) -> Option<i32> {
    match &error.kind {
        CallFailure::Libvirt { code, domain, message } => reason_of(error.call, *code, *domain, message).is_none().then_some(*code),
        _ => None,
    }
}

/// What a person, or the next attempt, does about it.
fn advice(reason: Reason) -> &'static str {
    match reason {
        Reason::PoolNotFound => "define the storage pool on the host or correct `pool` in the configuration",
        Reason::PoolNotActive => {
            "see that the file system of the storage pool is mounted and writable on the host, start the pool (virsh pool-start) and set it to autostart"
        }
        Reason::PoolSpace => "free space in the storage pool or give it more",
        Reason::HostMemory => "free memory on the host or use a smaller machine type",
        Reason::BridgeMissing => "create the configured bridge on the host or correct `bridge` in the configuration",
        Reason::FirmwareUnavailable => "install the firmware on the host (package ovmf)",
        Reason::KvmUnavailable => "enable hardware virtualisation on the host or set `virtType: qemu`",
        Reason::MachineUnsupported => "install an emulator for this machine on the host or change `machine`",
        Reason::SocketDenied => "let the SSH user use libvirt on the host (group libvirt, or a polkit rule)",
        Reason::VolumeConflict => "look at the file of that name in the pool and remove it if nobody needs it",
        Reason::HostRejected => "look at libvirt's message; the host's libvirt may be too old for this",
        Reason::InstanceNotFound => "create it again if it is wanted",
        _ => "try again later; if it stays, look at the host's libvirt log",
    }
}

impl From<CallError> for ProviderError {
    fn from(error: CallError) -> Self {
        let CallError { host, call, kind } = error.clone();
        let (reason, libvirt, text) = match &kind {
            CallFailure::Libvirt { code, domain, message } => {
                let reason = reason_of(call, *code, *domain, message).unwrap_or(Reason::LibvirtError);
                let libvirt = LibvirtCode { code: *code, domain: *domain };
                (reason, Some(libvirt), format!("{call} failed on host {host}; {}", advice(reason)))
            }
            CallFailure::LinkDead { .. } => {
                (Reason::LinkLost, None, format!("the link to host {host} was lost at {call}; try again, the link is made anew"))
            }
            CallFailure::Timeout { budget } => {
                let text = format!("{call} did not end within {} s on host {host}; see whether its libvirtd hangs", budget.as_secs());
                (Reason::CallTimeout, None, text)
            }
            CallFailure::SourceAborted => {
                (Reason::ImageSourceBroken, None, format!("{call} to host {host} was ended by its source; see the source's own error"))
            }
            // only guest agents are spared calls
            CallFailure::NotAsked { why } => {
                (Reason::AddressUnreadable, None, format!("{call} was not asked of host {host}: {why}; try again later"))
            }
            CallFailure::BadAnswer { .. } => {
                (Reason::LibvirtError, None, format!("{call} on host {host} had an outcome that cannot be used"))
            }
        };
        let mut e = Self::new(reason, bounded(&text)).during(call).on_host(host).with_source(kind);
        if reason == Reason::CallTimeout {
            e = e.with_meta("step", call);
        }
        match libvirt {
            Some(code) => e.with_libvirt(code),
            None => e,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Class;
    use rstest::rstest;
    use std::time::Duration;

    fn libvirt(call: &'static str, code: i32, domain: i32, message: &str) -> CallError {
        CallError { host: "hv1".to_owned(), call, kind: CallFailure::Libvirt { code, domain, message: message.to_owned() } }
    }

    #[rstest]
    #[case("lookup_domain", 42, 10, "", Reason::InstanceNotFound)]
    #[case("start_domain", 42, 10, "", Reason::StateChanged)]
    #[case("volume_info", 50, 18, "", Reason::StateChanged)]
    #[case("domain_metadata", 80, 20, "", Reason::StateChanged)]
    #[case("lookup_pool", 49, 18, "", Reason::PoolNotFound)]
    #[case("create_volume", 90, 18, "", Reason::VolumeConflict)]
    #[case("create_volume", 55, 18, "Speicher-Pool 'x' ist nicht aktiv [storage pool is not active]", Reason::PoolNotActive)]
    #[case("create_volume", 38, 18, "cannot create [errno 30]", Reason::PoolNotActive)]
    #[case("delete_volume", 38, 18, "cannot unlink file [errno 30]", Reason::PoolNotActive)]
    #[case("create_volume", 55, 18, "volume target path '/x' already exists", Reason::VolumeConflict)]
    #[case("refresh_pool", 55, 18, "", Reason::PoolNotActive)]
    #[case("delete_volume", 55, 18, "volume 'x' is still in use.", Reason::LibvirtBusy)]
    #[case("volume_info", 55, 18, "storage pool 'x' is not active", Reason::LibvirtBusy)]
    #[case("start_domain", 55, 10, "domain is already running", Reason::StateChanged)]
    #[case("create_volume", 38, 18, "cannot allocate [errno 28]", Reason::PoolSpace)]
    #[case("create_volume", 38, 18, "cannot allocate [errno 122]", Reason::PoolSpace)]
    #[case("create_volume", 38, 18, "cannot create", Reason::LibvirtError)]
    #[case("start_domain", 38, 0, "no such device [errno 19]", Reason::BridgeMissing)]
    #[case("start_domain", 38, 0, "no such file [errno 2]", Reason::StartFailed)]
    #[case("start_domain", 38, 0, "[errno 12]", Reason::StartFailed)]
    #[case("start_domain", 38, 0, "x [errno 12]", Reason::HostMemory)]
    #[case("lib_version", 1, 47, "Unable to get system bus connection", Reason::SocketDenied)]
    #[case("refresh_pool", 1, 18, "pool 'x' has asynchronous jobs running.", Reason::LibvirtBusy)]
    #[case("refresh_pool", 1, 18, "Pool 'x' hat laufende asynchrone Aufgaben.", Reason::LibvirtBusy)]
    #[case("create_volume", 1, 18, "qemu-img failed", Reason::LibvirtError)]
    #[case("create_volume", 1, 0, "Could not create '/p/x': Read-only file system", Reason::PoolNotActive)]
    #[case("start_domain", 1, 10, "process exited while connecting to monitor", Reason::StartFailed)]
    #[case("start_domain", 1, 10, "cannot set up guest memory: Cannot allocate memory", Reason::HostMemory)]
    #[case("start_domain", 1, 10, "Could not access KVM kernel module", Reason::KvmUnavailable)]
    #[case("hostname", 1, 0, "", Reason::LibvirtError)]
    #[case("define_domain", 9, 20, "domain 'x' already exists with uuid y", Reason::StateChanged)]
    #[case("start_domain", 9, 10, "Unable to find any firmware", Reason::FirmwareUnavailable)]
    #[case("define_domain", 67, 10, "does not support machine", Reason::MachineUnsupported)]
    #[case("define_domain", 67, 10, "Emulator does not support virt type 'kvm'", Reason::KvmUnavailable)]
    #[case("domain_capabilities", 8, 10, "KVM is not supported by 'x' on this host", Reason::KvmUnavailable)]
    #[case("domain_capabilities", 8, 10, "the accel 'kvm' is not supported by 'x' on this host", Reason::KvmUnavailable)]
    #[case("domain_capabilities", 8, 10, "the machine 'x' is not supported", Reason::MachineUnsupported)]
    #[case("define_domain", 27, 20, "XML error: No PCI buses available", Reason::MachineUnsupported)]
    #[case("define_domain", 27, 20, "missing name", Reason::HostRejected)]
    #[case("define_domain", 35, 20, "", Reason::HostRejected)]
    #[case("define_domain", 92, 20, "", Reason::HostRejected)]
    #[case("define_domain", 8, 20, "", Reason::HostRejected)]
    #[case("has_interface", 3, 0, "", Reason::HostRejected)]
    #[case("define_domain", 84, 10, "", Reason::HostRejected)]
    #[case("define_domain", 39, 7, "", Reason::HostRejected)]
    #[case("hostname", 45, 13, "", Reason::SocketDenied)]
    #[case("hostname", 88, 0, "", Reason::SocketDenied)]
    #[case("hostname", 79, 0, "", Reason::SocketDenied)]
    #[case("hostname", 94, 0, "", Reason::SocketDenied)]
    #[case("hostname", 29, 0, "", Reason::SocketDenied)]
    #[case("start_domain", 68, 10, "", Reason::LibvirtBusy)]
    #[case("undefine_domain", 87, 10, "", Reason::LibvirtBusy)]
    #[case("start_domain", 78, 10, "", Reason::LibvirtBusy)]
    #[case("domain_interfaces", 86, 10, "", Reason::AddressUnreadable)]
    #[case("domain_interfaces", 97, 10, "", Reason::AddressUnreadable)]
    #[case("domain_interfaces", 112, 10, "", Reason::AddressUnreadable)]
    #[case("domain_interfaces", 113, 10, "", Reason::AddressUnreadable)]
    fn every_row_has_its_reason(
        #[case] call: &'static str,
        #[case] code: i32,
        #[case] domain: i32,
        #[case] message: &str,
        #[case] expected: Reason,
    ) {
        let error = libvirt(call, code, domain, message);
        assert_eq!(unknown_code(&error), None);
        let e = ProviderError::from(error);
        assert_eq!(e.reason(), expected);
        assert_eq!(e.libvirt(), Some(LibvirtCode { code, domain }));
        assert_eq!((e.operation(), e.host()), (Some(call), Some("hv1")));
        assert!(e.message().contains("hv1"), "{}", e.message());
    }

    #[test]
    fn an_unknown_code_is_transient_and_counted() {
        let error = libvirt("start_domain", 4711, 10, "new");
        assert_eq!(unknown_code(&error), Some(4711));
        let e = ProviderError::from(error);
        assert_eq!((e.reason(), e.class()), (Reason::LibvirtError, Class::Transient));
    }

    #[rstest]
    #[case(CallFailure::LinkDead { cause: "gone".to_owned() }, Reason::LinkLost)]
    #[case(CallFailure::Timeout { budget: Duration::from_secs(30) }, Reason::CallTimeout)]
    #[case(CallFailure::SourceAborted, Reason::ImageSourceBroken)]
    #[case(CallFailure::NotAsked { why: "x".to_owned() }, Reason::AddressUnreadable)]
    #[case(CallFailure::BadAnswer { what: "x".to_owned() }, Reason::LibvirtError)]
    fn failures_without_an_answer_are_transient(#[case] kind: CallFailure, #[case] expected: Reason) {
        let e = ProviderError::from(CallError { host: "hv1".to_owned(), call: "upload", kind });
        assert_eq!(e.reason(), expected);
        assert!(e.is_transient());
    }

    #[test]
    fn the_errno_is_read_from_the_end_only() {
        assert_eq!(errno_of(&with_errno("cannot allocate".to_owned(), 28)), Some(28));
        assert_eq!(errno_of(&with_errno("cannot allocate".to_owned(), 0)), None);
        assert_eq!(errno_of("a file named x [errno 28] is missing"), None);
    }
}
