//! Errors on the wire: the only place that builds a `tonic::Status`.
//!
//! Every failed RPC carries exactly one `google.rpc.ErrorInfo`; its code follows
//! from its reason by the table of the contract. Texts are bounded, because the
//! status travels in headers, whose total size clients limit (16 KiB is usual).

use std::collections::HashMap;
use std::time::Duration;

use egress_provider_proto::{ERROR_DOMAIN, v1};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, PreconditionViolation, QuotaViolation, StatusExt as _};

use crate::error::{ProviderError, Reason, bounded_to};
use crate::hypervisor::code;

/// Longest text of a status and of a message in an answer, in bytes; the contract's number.
pub(super) const MAX_TEXT: usize = 1024;
/// Longest value of the `ErrorInfo` metadata, in bytes.
const MAX_META_VALUE: usize = 256;
/// Most keys of the `ErrorInfo` metadata.
const MAX_META_KEYS: usize = 24;

/// A failed call, before it becomes a status.
#[derive(Debug, Clone)]
pub enum Fault {
    Failed(ProviderError),
    /// The request itself is wrong: every field that is, never empty.
    Rejected(Vec<Violation>),
}

/// A field of a request that breaks its rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Path of the field in the request message.
    pub field: String,
    pub reason: Reason,
    /// The rule that is broken; never the value, which may be secret.
    pub rule: String,
}

impl From<ProviderError> for Fault {
    fn from(e: ProviderError) -> Self {
        Self::Failed(e)
    }
}

impl Fault {
    fn into_error(self) -> (ProviderError, Vec<Violation>) {
        let violations = match self {
            Self::Failed(e) => {
                let own = e.field().map(|field| Violation { field: field.to_owned(), reason: e.reason(), rule: e.message().to_owned() });
                return (e, own.into_iter().collect());
            }
            Self::Rejected(violations) => violations,
        };
        // one reason has to be chosen; the first one in the order of the message's fields is as good as any
        let reason = violations.first().map_or(Reason::FieldInvalid, |v| v.reason);
        let list: Vec<_> = violations.iter().map(|v| format!("{} {}", v.field, v.rule)).collect();
        let error = ProviderError::new(reason, format!("the request is not valid: {}", list.join("; ")));
        (error, violations)
    }

    /// The status of the contract's table. `operation` is the RPC, used where the error names no step of its own.
    pub fn into_status(self, operation: &'static str, entry: &str) -> Status {
        let (error, violations) = self.into_error();
        let error = error.during(operation);
        let mut details = ErrorDetails::new();
        details.set_error_info(error.reason().wire_name(), ERROR_DOMAIN, metadata(&error, entry, &violations));
        if let Some(delay) = error.retry_delay() {
            details.set_retry_info(Some(delay));
        }
        let text = bounded_to(&error.chain(), MAX_TEXT);
        match error.reason().grpc_code() {
            Code::InvalidArgument | Code::OutOfRange if !violations.is_empty() => {
                // a request has no more fields than this, so nothing is lost
                let shown = violations.into_iter().take(16);
                details
                    .set_bad_request(shown.map(|v| FieldViolation::new(v.field, bounded_to(&v.rule, MAX_META_VALUE))).collect::<Vec<_>>());
            }
            Code::ResourceExhausted => {
                details.set_quota_failure(vec![QuotaViolation::new(subject(&error, "pool"), bounded_to(error.message(), MAX_META_VALUE))]);
            }
            Code::FailedPrecondition => {
                let violation = PreconditionViolation::new(
                    error.reason().wire_name(),
                    subject(&error, "instance"),
                    bounded_to(error.message(), MAX_META_VALUE),
                );
                details.set_precondition_failure(vec![violation]);
            }
            _ => {}
        }
        Status::with_error_details(error.reason().grpc_code(), text, details)
    }
}

/// What the failure is about, for the details that want a subject.
fn subject(error: &ProviderError, kind: &str) -> String {
    let host = error.host().unwrap_or("-");
    match error.metadata().get(kind).map(String::as_str).or(error.instance()) {
        Some(name) => bounded_to(&format!("host:{host} {kind}:{name}"), MAX_META_VALUE),
        None => format!("host:{host}"),
    }
}

fn metadata(error: &ProviderError, entry: &str, violations: &[Violation]) -> HashMap<String, String> {
    let mut all: HashMap<String, String> = HashMap::new();
    let mut put = |key: &str, value: &str| {
        if !value.is_empty() && all.len() < MAX_META_KEYS {
            all.entry(key.to_owned()).or_insert_with(|| bounded_to(value, MAX_META_VALUE));
        }
    };
    put("operation", error.operation().unwrap_or_default());
    put("entry", entry);
    put("host", error.host().unwrap_or_default());
    put("instance", error.instance().unwrap_or_default());
    put("field", violations.first().map(|v| v.field.as_str()).unwrap_or_default());
    if let Some(libvirt) = error.libvirt() {
        put("libvirt_code", &libvirt.code.to_string());
        put("libvirt_name", libvirt_name(libvirt.code).unwrap_or_default());
    }
    for (key, value) in error.metadata() {
        put(key, value);
    }
    all
}

/// libvirt's own name of an error number, for those that the provider knows.
fn libvirt_name(number: i32) -> Option<&'static str> {
    Some(match number {
        code::INTERNAL_ERROR => "VIR_ERR_INTERNAL_ERROR",
        code::NO_SUPPORT => "VIR_ERR_NO_SUPPORT",
        code::INVALID_ARG => "VIR_ERR_INVALID_ARG",
        code::OPERATION_FAILED => "VIR_ERR_OPERATION_FAILED",
        code::XML_ERROR => "VIR_ERR_XML_ERROR",
        code::XML_DETAIL => "VIR_ERR_XML_DETAIL",
        code::SYSTEM_ERROR => "VIR_ERR_SYSTEM_ERROR",
        code::NO_DOMAIN => "VIR_ERR_NO_DOMAIN",
        code::NO_NETWORK => "VIR_ERR_NO_NETWORK",
        code::AUTH_FAILED => "VIR_ERR_AUTH_FAILED",
        code::NO_STORAGE_POOL => "VIR_ERR_NO_STORAGE_POOL",
        code::NO_STORAGE_VOL => "VIR_ERR_NO_STORAGE_VOL",
        code::OPERATION_INVALID => "VIR_ERR_OPERATION_INVALID",
        code::CONFIG_UNSUPPORTED => "VIR_ERR_CONFIG_UNSUPPORTED",
        code::OPERATION_TIMEOUT => "VIR_ERR_OPERATION_TIMEOUT",
        code::NO_DOMAIN_METADATA => "VIR_ERR_NO_DOMAIN_METADATA",
        code::OPERATION_UNSUPPORTED => "VIR_ERR_OPERATION_UNSUPPORTED",
        code::AGENT_UNRESPONSIVE => "VIR_ERR_AGENT_UNRESPONSIVE",
        code::RESOURCE_BUSY => "VIR_ERR_RESOURCE_BUSY",
        code::ACCESS_DENIED => "VIR_ERR_ACCESS_DENIED",
        code::STORAGE_VOL_EXIST => "VIR_ERR_STORAGE_VOL_EXIST",
        code::XML_INVALID_SCHEMA => "VIR_ERR_XML_INVALID_SCHEMA",
        code::AGENT_UNSYNCED => "VIR_ERR_AGENT_UNSYNCED",
        _ => return None,
    })
}

/// An error as a row of an answer that is itself OK.
pub(super) fn summary(error: &ProviderError) -> v1::ErrorSummary {
    v1::ErrorSummary {
        class: error.class().into(),
        reason: error.reason().wire_name().to_owned(),
        message: bounded_to(&error.chain(), MAX_TEXT),
        time: None,
    }
}

/// A status that tonic made itself (a request it could not decode, a method it does not know), with
/// the details that the contract promises. None: the status has them or needs none.
pub(super) fn completed(status: &Status, operation: &'static str) -> Option<Status> {
    if status.code() == Code::Ok || !status.details().is_empty() {
        return None;
    }
    let error = match status.code() {
        Code::OutOfRange if operation == "Create" => {
            ProviderError::invalid(Reason::UserDataTooLarge, "cloud_init.user_data", "makes the request larger than this provider reads")
        }
        Code::OutOfRange => ProviderError::new(Reason::FieldInvalid, "the request is larger than this provider reads"),
        Code::Unimplemented => {
            ProviderError::new(Reason::CapabilityMissing, "this provider does not offer the method or the compression of the request")
        }
        Code::Internal | Code::InvalidArgument => {
            ProviderError::new(Reason::FieldInvalid, "the request is no message of this contract: check the version of the client")
        }
        Code::Cancelled | Code::DeadlineExceeded => timed_out(),
        _ => ProviderError::new(Reason::Internal, "the call ended without an answer"),
    };
    Some(Fault::from(error).into_status(operation, ""))
}

/// The caller's own deadline is about to pass; the work goes on.
pub(super) fn timed_out() -> ProviderError {
    ProviderError::new(
        Reason::CallTimeout,
        "the deadline of the call passed before there was an answer; the work goes on: repeat the same request to wait for it",
    )
    .with_meta("step", "answer")
    .retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LibvirtCode;

    #[test]
    fn every_reason_has_its_code_and_one_error_info() {
        for reason in Reason::all() {
            let status = Fault::from(ProviderError::new(reason, "x").on_host("hv1")).into_status("get", "lab");
            assert_eq!(status.code(), reason.grpc_code(), "{reason:?}");
            let infos = status.get_error_details_vec().into_iter().filter(|d| matches!(d, tonic_types::ErrorDetail::ErrorInfo(_))).count();
            assert_eq!(infos, 1, "{reason:?}");
            let details = status.get_error_details();
            let info = details.error_info().expect("counted above");
            assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason.wire_name(), ERROR_DOMAIN));
            assert_eq!(info.metadata["host"], "hv1");
            assert_eq!(details.quota_failure().is_some(), status.code() == Code::ResourceExhausted);
            assert_eq!(details.precondition_failure().is_some(), status.code() == Code::FailedPrecondition);
        }
    }

    #[test]
    fn a_libvirt_error_names_its_number_and_its_name() {
        let e = ProviderError::new(Reason::LibvirtError, "x")
            .with_libvirt(LibvirtCode { code: 38, domain: 7 })
            .retry_after(Duration::from_secs(5));
        let details = Fault::from(e).into_status("get", "lab").get_error_details();
        let info = details.error_info().expect("every status has one");
        assert_eq!((info.metadata["libvirt_code"].as_str(), info.metadata["libvirt_name"].as_str()), ("38", "VIR_ERR_SYSTEM_ERROR"));
        assert_eq!(details.retry_info().and_then(|r| r.retry_delay), Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_huge_error_still_fits_into_headers() {
        let mut e = ProviderError::new(Reason::BridgeMissing, "é".repeat(100_000)).with_source(std::io::Error::other("ü".repeat(100_000)));
        for key in 0..100 {
            e = e.with_meta(&format!("key{key}"), "é".repeat(1000));
        }
        let status = Fault::from(e).into_status("get", "lab");
        let response = status.into_http::<tonic::body::Body>();
        let size: usize = response.headers().iter().map(|(k, v)| k.as_str().len() + v.len()).sum();
        assert!(size < 16 * 1024, "{size}");
    }

    #[test]
    fn all_violations_arrive_in_one_bad_request() {
        let violation = |field: &str, reason| Violation { field: field.into(), reason, rule: "is required".into() };
        let fault = Fault::Rejected(vec![violation("name", Reason::NameInvalid), violation("uid", Reason::UidInvalid)]);
        let status = fault.into_status("create", "");
        let details = status.get_error_details();
        let fields: Vec<_> = details.bad_request().expect("set").field_violations.iter().map(|v| v.field.as_str()).collect();
        assert_eq!(fields, ["name", "uid"]);
        assert_eq!(details.error_info().expect("set").reason, "NAME_INVALID");
        assert!(status.message().contains("uid is required"), "{}", status.message());
    }

    #[test]
    fn a_status_of_tonic_gets_details_and_ours_is_left_alone() {
        let made = completed(&Status::out_of_range("too large"), "Create").expect("it has none");
        assert_eq!(
            (made.code(), made.get_error_details().error_info().map(|i| i.reason.clone())),
            (Code::InvalidArgument, Some("USER_DATA_TOO_LARGE".into()))
        );
        assert!(completed(&made, "Create").is_none());
    }
}
