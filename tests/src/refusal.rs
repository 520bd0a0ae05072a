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
        Self::read(status).unwrap_or_else(|fault| panic!("{fault}"))
    }

    /// As [`Refusal::of`]; an error says what a status lacks.
    pub fn read(status: &Status) -> Result<Self, String> {
        let details = status.check_error_details_vec().map_err(|e| format!("the details of {status:?} cannot be read: {e}"))?;
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
                    if info.domain != ERROR_DOMAIN {
                        return Err(format!("a domain other than {ERROR_DOMAIN} in {status:?}"));
                    }
                    refusal.reason = ErrorReason::from_wire_name(&info.reason).ok_or_else(|| format!("unknown reason in {status:?}"))?;
                    refusal.metadata = info.metadata.into_iter().collect();
                }
                ErrorDetail::BadRequest(bad) => refusal.fields.extend(bad.field_violations.into_iter().map(|v| v.field)),
                ErrorDetail::RetryInfo(retry) => refusal.retry_after = retry.retry_delay,
                _ => {}
            }
        }
        if infos != 1 {
            return Err(format!("{infos} ErrorInfo and not exactly one in {status:?}"));
        }
        if refusal.code != refusal.reason.grpc_code() {
            return Err(format!("not the code of {} in {status:?}", refusal.reason.wire_name()));
        }
        if refusal.message.is_empty() {
            return Err(format!("no message for people in {status:?}"));
        }
        Ok(refusal)
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
