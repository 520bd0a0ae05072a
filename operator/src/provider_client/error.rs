//! What went wrong at a provider, and what the contract's table says about it.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_provider_proto::code_name;
use egress_provider_proto::v1::{ErrorClass, ErrorReason};
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// The most of a provider's text that is kept, in bytes: what a condition's message takes.
const MESSAGE_LIMIT: usize = 1024;

/// An error of a provider.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct ProviderError {
    /// The gRPC code.
    pub code: Code,
    /// `ErrorInfo.reason`, UPPER_SNAKE; for an error without one, the name of the code.
    pub reason: String,
    /// The reason, if this build of the contract knows it.
    pub known: Option<ErrorReason>,
    /// For people. Bounded, without control characters.
    pub message: String,
    /// `RetryInfo`.
    pub retry_after: Option<Duration>,
    /// `ErrorInfo.metadata`.
    pub metadata: BTreeMap<String, String>,
}

/// What the caller does about an error: the last column of the contract's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing, until the spec changes.
    Latch,
    /// The instance is not there.
    Absent,
    /// A person has to act on host, image or configuration: a condition, and a slow retry.
    SlowRetry,
    /// A resource is used up: a long wait.
    LongWait,
    /// Back off and try again.
    Backoff,
    /// Somebody else is at it: again soon.
    Soon,
    /// Not offered; asking again does not help until the provider is another.
    Never,
}

impl ProviderError {
    /// From what a call answered.
    #[must_use]
    pub fn from_status(status: &Status) -> Self {
        let details = status.get_error_details();
        let info = details.error_info();
        let ours = info.filter(|info| info.domain == egress_provider_proto::ERROR_DOMAIN);
        let known = ours.and_then(|info| ErrorReason::from_wire_name(&info.reason));
        let reason = ours.map_or_else(|| reason_of(status.code()).to_owned(), |info| clean(&info.reason, 63));
        Self {
            code: status.code(),
            reason,
            known,
            message: clean(status.message(), MESSAGE_LIMIT),
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
            metadata: ours
                .map(|info| info.metadata.iter().take(32).map(|(k, v)| (clean(k, 63), clean(v, 256))).collect())
                .unwrap_or_default(),
        }
    }

    /// An error that no provider answered: it could not be asked.
    #[must_use]
    pub fn local(code: Code, reason: &str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.to_owned(),
            known: None,
            message: clean(&message.into(), MESSAGE_LIMIT),
            retry_after: None,
            metadata: BTreeMap::new(),
        }
    }

    /// Its class in the contract's table; by the code alone when the reason is not known.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        self.known.map_or_else(|| ErrorClass::of_code(self.code), ErrorReason::class)
    }

    /// What to do about it.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.code {
            Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists => Verdict::Latch,
            Code::NotFound => Verdict::Absent,
            Code::FailedPrecondition | Code::Unauthenticated | Code::PermissionDenied => Verdict::SlowRetry,
            Code::ResourceExhausted => Verdict::LongWait,
            Code::Aborted => Verdict::Soon,
            Code::Unimplemented => Verdict::Never,
            Code::Ok | Code::Cancelled | Code::Unknown | Code::DeadlineExceeded | Code::Internal | Code::Unavailable | Code::DataLoss => {
                Verdict::Backoff
            }
        }
    }

    /// Whether it is this reason.
    #[must_use]
    pub fn is(&self, reason: ErrorReason) -> bool {
        self.known == Some(reason)
    }
}

/// The reason of an error that has none.
fn reason_of(code: Code) -> &'static str {
    match code {
        // of the provider's, where conditions speak of proxies
        Code::Unavailable => "PROVIDER_UNAVAILABLE",
        other => code_name(other),
    }
}

/// Text of somebody else, cut and without control characters.
pub(crate) fn clean(text: &str, limit: usize) -> String {
    let mut clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if clean.len() > limit {
        let mut end = limit.saturating_sub('…'.len_utf8());
        while !clean.is_char_boundary(end) {
            end -= 1;
        }
        clean.truncate(end);
        clean.push('…');
    }
    clean
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn status(code: Code, reason: &str, domain: &str) -> Status {
        let mut details = ErrorDetails::with_error_info(reason, domain, [("host".to_owned(), "hv1".to_owned())]);
        details.set_retry_info(Some(Duration::from_secs(7)));
        Status::with_error_details(code, "the pool\nis full", details)
    }

    #[test]
    fn a_status_of_the_contract_is_taken_apart() {
        let e = ProviderError::from_status(&status(Code::ResourceExhausted, "POOL_SPACE", "provider.egressproxies.io"));
        assert_eq!((e.known, e.verdict(), e.class()), (Some(ErrorReason::PoolSpace), Verdict::LongWait, ErrorClass::QuotaExceeded));
        assert_eq!((e.retry_after, e.message.as_str()), (Some(Duration::from_secs(7)), "the pool is full"));
        assert_eq!(e.metadata["host"], "hv1");
    }

    #[test]
    fn an_unknown_reason_and_a_foreign_domain_are_treated_by_their_code() {
        let e = ProviderError::from_status(&status(Code::FailedPrecondition, "MOON_PHASE", "provider.egressproxies.io"));
        assert_eq!((e.reason.as_str(), e.known, e.verdict()), ("MOON_PHASE", None, Verdict::SlowRetry));
        let e = ProviderError::from_status(&status(Code::Unavailable, "POOL_SPACE", "example.org"));
        assert_eq!((e.reason.as_str(), e.known, e.verdict()), ("PROVIDER_UNAVAILABLE", None, Verdict::Backoff));
    }
}
