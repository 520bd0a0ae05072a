//! How a command ended: its exit code, and what a person reads about a failure.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use egress_provider_proto::v1::{ErrorClass, ErrorReason};
use tonic::{Code, Status};
use tonic_types::{FieldViolation, StatusExt as _};

use crate::error::bounded_to;

/// Exit codes; documented in `--help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    Other = 1,
    Usage = 2,
    NotFound = 3,
    Permanent = 4,
    Transient = 5,
    Quota = 6,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl From<ErrorClass> for Exit {
    fn from(class: ErrorClass) -> Self {
        match class {
            ErrorClass::NotFound => Self::NotFound,
            ErrorClass::Permanent => Self::Permanent,
            ErrorClass::QuotaExceeded => Self::Quota,
            ErrorClass::Transient | ErrorClass::Unspecified => Self::Transient,
        }
    }
}

/// A command that failed. Its text is complete: message, where, and what to do.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    message: String,
    /// Pairs shown below the message.
    facts: Vec<(&'static str, String)>,
}

impl Failure {
    pub(super) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), facts: Vec::new() }
    }

    /// With the chain of its causes.
    pub(super) fn of(exit: Exit, error: &(dyn StdError + 'static)) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(c) = cause {
            let text = c.to_string();
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = c.source();
        }
        Self::new(exit, message)
    }

    pub(super) fn fact(mut self, name: &'static str, value: impl Into<String>) -> Self {
        let value = value.into();
        if !value.is_empty() {
            self.facts.push((name, value));
        }
        self
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        let info = details.error_info();
        let reason = info.and_then(|i| ErrorReason::from_wire_name(&i.reason));
        let class = reason.map_or_else(|| ErrorClass::of_code(status.code()), ErrorReason::class);
        // a server that is not there has no reasons
        let message = match info {
            None if status.code() == Code::Unavailable => {
                format!("no daemon answers: start it, or name its socket with --socket ({})", status.message())
            }
            _ => status.message().to_owned(),
        };
        let meta = |key: &str| info.and_then(|i| i.metadata.get(key)).map(|v| bounded_to(v, 256)).unwrap_or_default();
        let mut failure = Self::new(class.into(), bounded_to(&message, 2048));
        failure = failure.fact("reason", info.map(|i| bounded_to(&i.reason, 64)).unwrap_or_default());
        for key in ["host", "instance", "operation", "step", "libvirt_name", "owner_uid", "owner_installation_id"] {
            failure = failure.fact(key, meta(key));
        }
        if let Some(bad) = details.bad_request() {
            for FieldViolation { field, description, .. } in &bad.field_violations {
                failure = failure.fact("field", bounded_to(&format!("{field} {description}"), 512));
            }
        }
        let delay = details.retry_info().and_then(|r| r.retry_delay);
        failure.fact("what to do", advice(class, delay))
    }
}

fn advice(class: ErrorClass, delay: Option<Duration>) -> String {
    match (class, delay) {
        (ErrorClass::Transient | ErrorClass::Unspecified | ErrorClass::QuotaExceeded, Some(delay)) => {
            format!("repeat the command in {} s", delay.as_secs().max(1))
        }
        (ErrorClass::Transient | ErrorClass::Unspecified, None) => "repeat the command in a moment".into(),
        (ErrorClass::QuotaExceeded, None) => "make room on the host, then repeat the command".into(),
        (ErrorClass::Permanent, _) => "change what the message names; repeating alone does not help".into(),
        (ErrorClass::NotFound, _) => String::new(),
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", self.message)?;
        for (name, value) in &self.facts {
            writeln!(f, "  {name}: {value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ProviderError, Reason};
    use crate::service::Fault;

    fn failure(reason: Reason) -> Failure {
        let e = ProviderError::new(reason, "it failed").on_host("hv1").retry_after(Duration::from_secs(7));
        Fault::from(e).into_status("get", "lab").into()
    }

    #[test]
    fn each_class_has_its_exit_code() {
        let table = [
            (Reason::InstanceNotFound, 3),
            (Reason::BridgeMissing, 4),
            (Reason::ZoneUnknown, 4),
            (Reason::HostUnreachable, 5),
            (Reason::CallTimeout, 5),
            (Reason::PoolSpace, 6),
        ];
        for (reason, code) in table {
            assert_eq!(failure(reason).exit as u8, code, "{reason:?}");
        }
    }

    #[test]
    fn an_error_says_reason_host_and_when_to_repeat() {
        assert_eq!(
            failure(Reason::HostUnreachable).to_string(),
            "error: it failed\n  reason: HOST_UNREACHABLE\n  host: hv1\n  operation: get\n  what to do: repeat the command in 7 s\n"
        );
    }

    #[test]
    fn a_reason_of_the_future_is_judged_by_its_code() {
        assert_eq!(Failure::from(Status::not_found("x")).exit, Exit::NotFound);
        assert_eq!(Failure::from(Status::unknown("x")).exit, Exit::Transient);
    }
}
