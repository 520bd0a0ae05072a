//! The one error type of the daemon.
//!
//! An error is decided where it happens: it carries one [`Reason`] (and with it
//! one class and one gRPC code, see the table in the contract crate), says what
//! failed and what to do, and keeps its cause in `source()`. Its text never
//! contains the text of its cause, and never a secret.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;

pub use egress_provider_proto::v1::ErrorClass as Class;
pub use egress_provider_proto::v1::ErrorReason as Reason;

/// Longest text taken over from a host, an image server or a guest, in bytes.
pub const MAX_FOREIGN_TEXT: usize = 512;

/// Longest message of an error, in bytes: that of a status of the contract.
const MAX_MESSAGE: usize = 1024;

pub type Result<T, E = ProviderError> = std::result::Result<T, E>;

/// Runs `work`, and makes an error of a panic: whoever waits for work that is shared gets an answer, and what the work
/// holds or has made is let go of. The panic's message and place are in the log.
pub(crate) async fn unless_it_panics<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_| Err(defect(what)))
}

pub(crate) fn defect(what: &str) -> ProviderError {
    ProviderError::new(Reason::Internal, format!("{what} failed on a defect of this daemon; its log has the place"))
}

/// What failed, why, where, and what to do. Cheap to clone: callers that joined
/// one piece of work share its error.
#[derive(Clone)]
pub struct ProviderError(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    reason: Reason,
    message: String,
    operation: Option<&'static str>,
    host: Option<String>,
    instance: Option<String>,
    libvirt: Option<LibvirtCode>,
    retry_after: Option<Duration>,
    field: Option<String>,
    metadata: BTreeMap<String, String>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// libvirt's `virErrorNumber` and `virErrorDomain` of a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibvirtCode {
    pub code: i32,
    pub domain: i32,
}

impl ProviderError {
    /// `message` says what failed and, where a person can help, what to do. It is bounded and stripped
    /// here, since it may name what a host or a caller called so.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            reason,
            message: bounded_to(&message.into(), MAX_MESSAGE),
            operation: None,
            host: None,
            instance: None,
            libvirt: None,
            retry_after: None,
            field: None,
            metadata: BTreeMap::new(),
            source: None,
        }))
    }

    /// A bad field of a request; `field` is its path in the message.
    pub fn invalid(reason: Reason, field: &str, message: impl Into<String>) -> Self {
        let mut e = Self::new(reason, message);
        e.edit().field = Some(field.to_owned());
        e
    }

    fn edit(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.edit().source = Some(Arc::new(source));
        self
    }

    #[must_use]
    pub fn on_host(mut self, host: impl fmt::Display) -> Self {
        if self.0.host.is_none() {
            self.edit().host = Some(host.to_string());
        }
        self
    }

    #[must_use]
    pub fn on_instance(mut self, instance: impl fmt::Display) -> Self {
        if self.0.instance.is_none() {
            self.edit().instance = Some(instance.to_string());
        }
        self
    }

    /// The operation or hypervisor call that failed; the innermost wins.
    #[must_use]
    pub fn during(mut self, operation: &'static str) -> Self {
        if self.0.operation.is_none() {
            self.edit().operation = Some(operation);
        }
        self
    }

    #[must_use]
    pub fn with_libvirt(mut self, code: LibvirtCode) -> Self {
        self.edit().libvirt = Some(code);
        self
    }

    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.edit().retry_after = Some(delay);
        self
    }

    /// One more key of the `ErrorInfo` metadata; bounded and escaped here.
    #[must_use]
    pub fn with_meta(mut self, key: &str, value: impl fmt::Display) -> Self {
        let value = bounded(&value.to_string());
        self.edit().metadata.insert(key.to_owned(), value);
        self
    }

    pub fn reason(&self) -> Reason {
        self.0.reason
    }

    pub fn class(&self) -> Class {
        self.0.reason.class()
    }

    pub fn is_transient(&self) -> bool {
        self.class() == Class::Transient
    }

    pub fn message(&self) -> &str {
        &self.0.message
    }

    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    pub fn host(&self) -> Option<&str> {
        self.0.host.as_deref()
    }

    pub fn instance(&self) -> Option<&str> {
        self.0.instance.as_deref()
    }

    pub fn libvirt(&self) -> Option<LibvirtCode> {
        self.0.libvirt
    }

    pub fn retry_delay(&self) -> Option<Duration> {
        self.0.retry_after
    }

    pub fn field(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.0.metadata
    }

    /// The error with its whole chain of causes, for a log line or a status text.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(c) = cause {
            let line = bounded(&c.to_string());
            // libraries repeat their cause in their own text; once is enough
            if !text.ends_with(&line) {
                text.push_str(": ");
                text.push_str(&line);
            }
            cause = c.source();
        }
        text
    }
}

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({})", self.0.reason, self.chain())
    }
}

impl StdError for ProviderError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// Text from outside made fit for logs and statuses: control characters become
/// spaces and the length is cut to [`MAX_FOREIGN_TEXT`] bytes.
pub fn bounded(text: &str) -> String {
    bounded_to(text, MAX_FOREIGN_TEXT)
}

/// As [`bounded`], with another limit in bytes.
pub fn bounded_to(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for ch in text.trim().chars() {
        // bidi overrides and friends would let a host rewrite a log line on a terminal
        let hostile =
            ch.is_control() || matches!(ch, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        let ch = if hostile { ' ' } else { ch };
        if out.len() + ch.len_utf8() + '…'.len_utf8() > limit {
            out.push('…');
            break;
        }
        out.push(ch);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_cut_at_the_limit_and_has_no_control_characters() {
        let text = format!("a\x1b[31m\n{}", "é".repeat(1000));
        let out = bounded(&text);
        assert!(out.len() <= MAX_FOREIGN_TEXT);
        assert!(!out.chars().any(char::is_control));
        assert!(out.ends_with('…'));
    }

    #[test]
    fn the_chain_names_each_cause_once() {
        let cause = std::io::Error::other("no route");
        let e = ProviderError::new(Reason::HostUnreachable, "host hv1 is unreachable").with_source(cause);
        assert_eq!(e.chain(), "host hv1 is unreachable: no route");
        assert_eq!(e.to_string(), "host hv1 is unreachable");
    }

    #[test]
    fn the_innermost_operation_and_host_are_kept() {
        let e = ProviderError::new(Reason::LinkLost, "x").during("domain_define").during("create").on_host("a").on_host("b");
        assert_eq!((e.operation(), e.host()), (Some("domain_define"), Some("a")));
    }
}
