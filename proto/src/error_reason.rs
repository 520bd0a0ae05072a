//! The table of errors: which gRPC code goes with which reason, and which class with which code.
//!
//! The service, its clients, the docs and the conformance suite all read it here. What a reason means
//! and what the caller does about it is the comment of its value in `error.proto`.

use tonic::Code;

use crate::v1::{ErrorClass, ErrorReason};

const PREFIX: &str = "ERROR_REASON_";

/// Above every number of the enum, so that all of them can be found by trying.
const NUMBERS_END: i32 = 1000;

impl ErrorReason {
    /// Every reason that can be sent, in the order of the enum.
    pub fn all() -> impl Iterator<Item = Self> {
        (1..NUMBERS_END).filter_map(|number| Self::try_from(number).ok())
    }

    /// The name that travels in `google.rpc.ErrorInfo.reason`, for example `ZONE_UNKNOWN`.
    pub fn wire_name(self) -> &'static str {
        let name = self.as_str_name();
        name.strip_prefix(PREFIX).unwrap_or(name)
    }

    /// The reason of a name that travelled; `None` for one that this version does not know.
    pub fn from_wire_name(name: &str) -> Option<Self> {
        Self::from_str_name(&format!("{PREFIX}{name}")).filter(|reason| *reason != Self::Unspecified)
    }

    /// The class of the reason, which always is the class of its code.
    pub fn class(self) -> ErrorClass {
        ErrorClass::of_code(self.grpc_code())
    }

    /// The one gRPC code that goes with the reason.
    pub fn grpc_code(self) -> Code {
        // No wildcard: a new reason has to choose its code.
        match self {
            Self::Unspecified => Code::Unknown,

            Self::NameInvalid
            | Self::UidInvalid
            | Self::FieldInvalid
            | Self::EntryUnknown
            | Self::EntryRequired
            | Self::ZoneUnknown
            | Self::ZoneRequired
            | Self::MachineTypeUnknown
            | Self::ImageUnknown
            | Self::ImageUrlForbidden
            | Self::IdMalformed
            | Self::UserDataTooLarge
            | Self::PageTokenInvalid => Code::InvalidArgument,

            Self::DiskTooSmall | Self::MachineTooLarge => Code::OutOfRange,

            Self::NameOwnedByOtherUid | Self::SpecConflict | Self::NameNotManaged => Code::AlreadyExists,

            Self::InstanceNotFound | Self::ImageNotCached => Code::NotFound,

            Self::PoolSpace | Self::HostMemory => Code::ResourceExhausted,

            Self::BridgeMissing
            | Self::FirmwareUnavailable
            | Self::KvmUnavailable
            | Self::MachineUnsupported
            | Self::PoolNotFound
            | Self::PoolNotActive
            | Self::PausedByAdmin
            | Self::DigestMismatch
            | Self::DigestRequired
            | Self::ImageNotFound
            | Self::ImageForbidden
            | Self::ImageUnsafe
            | Self::ImageFormatMismatch
            | Self::ImageTooLarge
            | Self::ImageInUse
            | Self::UidMismatch
            | Self::NotManaged
            | Self::HostNotConfigured
            | Self::DiskLost
            | Self::HostRejected
            | Self::VolumeConflict
            | Self::HostIncompatible => Code::FailedPrecondition,

            Self::SshAuthRejected
            | Self::HostKeyUnknown
            | Self::HostKeyChanged
            | Self::HostKeyRevoked
            | Self::KeyUnparsable
            | Self::KeyEncrypted => Code::Unauthenticated,

            Self::SocketDenied
            | Self::SocketMissing
            | Self::StreamlocalForwardingDisabled
            | Self::SocketUnavailable
            | Self::CallerForbidden => Code::PermissionDenied,

            Self::HostUnreachable
            | Self::CredentialsUnavailable
            | Self::SshThrottled
            | Self::LinkLost
            | Self::LibvirtBusy
            | Self::LibvirtError
            | Self::LibvirtRestarting
            | Self::ImagePullInProgress
            | Self::ImageSourceUnavailable
            | Self::ImageSourceBroken
            | Self::AddressUnreadable
            | Self::StartFailed
            | Self::ListingIncomplete
            | Self::ShuttingDown
            | Self::Overloaded => Code::Unavailable,

            Self::OperationInProgress | Self::CreateCancelled | Self::StateChanged => Code::Aborted,

            Self::CallTimeout => Code::DeadlineExceeded,

            Self::CapabilityMissing => Code::Unimplemented,

            Self::MarkCorrupt | Self::Internal => Code::Internal,
        }
    }
}

impl ErrorClass {
    /// How a client treats a code whose reason it does not know. Whatever is not clearly otherwise is
    /// Transient, since giving up for ever is the costlier mistake.
    pub fn of_code(code: Code) -> Self {
        match code {
            Code::NotFound => Self::NotFound,
            Code::ResourceExhausted => Self::QuotaExceeded,
            Code::InvalidArgument
            | Code::OutOfRange
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::Unimplemented => Self::Permanent,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss => Self::Transient,
        }
    }

    /// The name of the class in docs, logs and metrics, for example `QuotaExceeded`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "Unspecified",
            Self::NotFound => "NotFound",
            Self::Permanent => "Permanent",
            Self::Transient => "Transient",
            Self::QuotaExceeded => "QuotaExceeded",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for reason in ErrorReason::all() {
            assert_eq!(ErrorReason::from_wire_name(reason.wire_name()), Some(reason));
            assert!(!reason.wire_name().starts_with(PREFIX), "{reason:?}");
        }
    }

    #[test]
    fn unknown_prefixed_and_unspecified_names_are_no_reason() {
        for name in ["", "UNSPECIFIED", "ERROR_REASON_ZONE_UNKNOWN", "zone_unknown", "FROM_THE_FUTURE"] {
            assert_eq!(ErrorReason::from_wire_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_code_of_the_future_is_retried() {
        assert_eq!(ErrorClass::of_code(Code::Unknown), ErrorClass::Transient);
        assert_eq!(ErrorReason::Unspecified.class(), ErrorClass::Transient);
    }
}
