//! How long to wait before the next try. Pure: the jitter comes from the caller, so that tests choose it.

use std::time::Duration;

use crate::provider_client::{ProviderError, Verdict};

/// First and longest wait of a kind of error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Curve {
    /// After the first failure.
    pub first: Duration,
    /// Doubling ends here.
    pub most: Duration,
}

/// A host that does not answer, a budget that is spent.
const BACKOFF: Curve = Curve { first: Duration::from_secs(2), most: Duration::from_secs(120) };
/// Somebody else is at it.
const SOON: Curve = Curve { first: Duration::from_secs(1), most: Duration::from_secs(15) };
/// A person has to act: hosts get repaired without a change of the spec.
const SLOW: Curve = Curve { first: Duration::from_secs(30), most: Duration::from_secs(600) };
/// A pool or a host is full.
const LONG: Curve = Curve { first: Duration::from_secs(60), most: Duration::from_secs(900) };
/// Not offered: until the provider is another one.
const NEVER: Curve = Curve { first: Duration::from_secs(600), most: Duration::from_secs(3600) };
/// A provider's own wish is heard up to here.
const MOST_ASKED: Duration = Duration::from_secs(3600);

/// When to try again after an error that has happened `attempts` times in a row (1 is the first). A provider's
/// `RetryInfo` is the least; `jitter` in 0..1 adds up to a fifth, so that those who failed together do not come together.
/// None: not before the spec changes.
#[must_use]
pub fn next_try(error: &ProviderError, attempts: u32, jitter: f64) -> Option<Duration> {
    let curve = match error.verdict() {
        Verdict::Latch => return None,
        Verdict::Backoff | Verdict::Absent => BACKOFF,
        Verdict::Soon => SOON,
        Verdict::SlowRetry => SLOW,
        Verdict::LongWait => LONG,
        Verdict::Never => NEVER,
    };
    let asked = error.retry_after.unwrap_or_default().min(MOST_ASKED);
    Some(spread(curve.after(attempts).max(asked), jitter))
}

/// `base` and up to a fifth more.
#[must_use]
pub fn spread(base: Duration, jitter: f64) -> Duration {
    base + base.mul_f64(0.2 * jitter.clamp(0.0, 1.0))
}

impl Curve {
    /// The wait after that many failures in a row.
    #[must_use]
    pub fn after(self, attempts: u32) -> Duration {
        self.first.saturating_mul(2_u32.saturating_pow(attempts.saturating_sub(1).min(20))).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn error(code: Code) -> ProviderError {
        ProviderError::local(code, "X", "")
    }

    #[test]
    fn waits_double_up_to_their_end_and_only_what_the_table_latches_is_latched() {
        let wait = |code, attempts| next_try(&error(code), attempts, 0.0).map(|d| d.as_secs());
        assert_eq!([1, 2, 3, 30, u32::MAX].map(|n| wait(Code::Unavailable, n)), [2, 4, 8, 120, 120].map(Some));
        assert_eq!(wait(Code::ResourceExhausted, 1), Some(60));
        assert_eq!(wait(Code::FailedPrecondition, 1), Some(30));
        for latched in [Code::InvalidArgument, Code::OutOfRange, Code::AlreadyExists] {
            assert_eq!(wait(latched, 1), None);
        }
        for code in (1..=16).map(Code::from_i32).filter(|c| !matches!(c, Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists)) {
            assert!(wait(code, 1).is_some(), "{code:?}");
        }
    }

    #[test]
    fn a_provider_that_names_a_delay_is_not_asked_before_and_cannot_silence_us_for_ever() {
        let asked = |seconds| ProviderError { retry_after: Some(Duration::from_secs(seconds)), ..error(Code::Unavailable) };
        assert_eq!(next_try(&asked(30), 1, 0.0), Some(Duration::from_secs(30)));
        assert_eq!(next_try(&asked(1), 5, 0.0), Some(Duration::from_secs(32)));
        assert_eq!(next_try(&asked(u64::from(u32::MAX)), 1, 0.0), Some(MOST_ASKED));
    }

    #[test]
    fn those_who_failed_together_come_apart() {
        assert_eq!(next_try(&error(Code::Unavailable), 1, 1.0), Some(Duration::from_millis(2400)));
    }
}
