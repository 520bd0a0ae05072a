//! A failed RPC taken apart as the contract says clients do: by code and reason.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_provider_proto::ERROR_DOMAIN;
use egress_provider_proto::v1::ErrorReason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetail, StatusExt as _};

#[derive(Debug, Clone)]
pub struct Refusal {
    pub code: Code,
    pub reason: ErrorReason,
    pub message: String,
    pub metadata: BTreeMap<String, String>,
    /// Fields that `BadRequest` names.
    pub fields: Vec<String>,
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// Takes a status apart and checks what holds for each: details that can be read, exactly one
    /// `ErrorInfo` of the contract's domain, a reason that it knows, and the code that goes with it.
    pub fn of(status: &Status) -> Self {
        let details = status.check_error_details_vec().unwrap_or_else(|e| panic!("the details of {status:?} cannot be read: {e}"));
        let mut refusal = Self {
            code: status.code(),
            reason: ErrorReason::Unspecified,
            message: status.message().to_owned(),
            metadata: BTreeMap::new(),
            fields: Vec::new(),
            retry_after: None,
        };
        let mut infos = 0;
        for detail in details {
            match detail {
                ErrorDetail::ErrorInfo(info) => {
                    infos += 1;
                    assert_eq!(info.domain, ERROR_DOMAIN, "{status:?}");
                    refusal.reason = ErrorReason::from_wire_name(&info.reason).unwrap_or_else(|| panic!("unknown reason in {status:?}"));
                    refusal.metadata = info.metadata.into_iter().collect();
                }
                ErrorDetail::BadRequest(bad) => refusal.fields.extend(bad.field_violations.into_iter().map(|v| v.field)),
                ErrorDetail::RetryInfo(retry) => refusal.retry_after = retry.retry_delay,
                _ => {}
            }
        }
        assert_eq!(infos, 1, "exactly one ErrorInfo in {status:?}");
        assert_eq!(refusal.code, refusal.reason.grpc_code(), "the code of {} in {status:?}", refusal.reason.wire_name());
        assert!(!refusal.message.is_empty(), "a message for people in {status:?}");
        refusal
    }
}

/// The refusal of an RPC that has to fail with `reason`.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, Status>, reason: ErrorReason) -> Refusal {
    let status = match result {
        Ok(answer) => panic!("expected {}, got {answer:?}", reason.wire_name()),
        Err(status) => status,
    };
    let refusal = Refusal::of(&status);
    assert_eq!(refusal.reason, reason, "{}: {}", refusal.reason.wire_name(), refusal.message);
    refusal
}
