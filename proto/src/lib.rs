//! The `egressproxies.provider.v1` contract.
// placeholder for the generated crate, replaced when the contract lands
#![allow(missing_debug_implementations)]
pub const ERROR_DOMAIN: &str = "provider.egressproxies.io";
pub mod v1 {
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum ErrorClass {
        Unspecified,
        NotFound,
        Permanent,
        Transient,
        QuotaExceeded,
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum ErrorReason {
        NameInvalid,
        UidInvalid,
        FieldInvalid,
        EntryUnknown,
        EntryRequired,
        ZoneUnknown,
        ZoneRequired,
        MachineTypeUnknown,
        ImageUnknown,
        ImageUrlForbidden,
        IdMalformed,
        UserDataTooLarge,
        PageTokenInvalid,
        DiskTooSmall,
        MachineTooLarge,
        NameOwnedByOtherUid,
        SpecConflict,
        NameNotManaged,
        InstanceNotFound,
        ImageNotCached,
        PoolSpace,
        BridgeMissing,
        FirmwareUnavailable,
        KvmUnavailable,
        MachineUnsupported,
        PoolNotFound,
        PoolNotActive,
        PausedByAdmin,
        DigestMismatch,
        DigestRequired,
        ImageNotFound,
        ImageForbidden,
        ImageUnsafe,
        ImageFormatMismatch,
        ImageTooLarge,
        ImageInUse,
        UidMismatch,
        NotManaged,
        HostNotConfigured,
        DiskLost,
        HostRejected,
        SshAuthRejected,
        HostKeyUnknown,
        HostKeyChanged,
        HostKeyRevoked,
        KeyUnparsable,
        KeyEncrypted,
        SocketDenied,
        SocketMissing,
        StreamlocalForwardingDisabled,
        SocketUnavailable,
        HostUnreachable,
        CredentialsUnavailable,
        SshThrottled,
        LinkLost,
        LibvirtBusy,
        LibvirtError,
        ImagePullInProgress,
        ImageSourceUnavailable,
        ImageSourceBroken,
        AddressUnreadable,
        StartFailed,
        ListingIncomplete,
        ShuttingDown,
        OperationInProgress,
        CreateCancelled,
        StateChanged,
        CallTimeout,
        CapabilityMissing,
        MarkCorrupt,
        Internal,
    }
    impl ErrorReason {
        pub fn class(self) -> ErrorClass {
            use ErrorReason::*;
            match self {
                InstanceNotFound | ImageNotCached => ErrorClass::NotFound,
                PoolSpace => ErrorClass::QuotaExceeded,
                HostUnreachable
                | CredentialsUnavailable
                | SshThrottled
                | LinkLost
                | LibvirtBusy
                | LibvirtError
                | ImagePullInProgress
                | ImageSourceUnavailable
                | ImageSourceBroken
                | AddressUnreadable
                | StartFailed
                | ListingIncomplete
                | ShuttingDown
                | OperationInProgress
                | CreateCancelled
                | StateChanged
                | CallTimeout
                | MarkCorrupt
                | Internal => ErrorClass::Transient,
                _ => ErrorClass::Permanent,
            }
        }
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum StateReason {
        Unspecified,
    }
}
