//! The caller's deadline, taken from `grpc-timeout`.
//!
//! It ends the wait and not the work. The answer has to leave a little before
//! the deadline: a client that gave up already would show a bare
//! DEADLINE_EXCEEDED of its own, without reason, step or advice.

use std::time::Duration;

use http::HeaderMap;
use tokio::time::Instant;

/// Largest and smallest time kept back for the answer's way to the client.
const LARGEST_MARGIN: Duration = Duration::from_millis(250);
const SMALLEST_MARGIN: Duration = Duration::from_millis(5);

/// When the answer has to leave; in the extensions of a request that has a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// None without a readable `grpc-timeout`.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let timeout = parse(headers.get("grpc-timeout")?.to_str().ok()?)?;
        let margin = (timeout / 10).clamp(SMALLEST_MARGIN, LARGEST_MARGIN);
        // a timeout of years may not be representable; that is as good as none
        Instant::now().checked_add(timeout.saturating_sub(margin)).map(Self)
    }

    pub(super) fn instant(self) -> Instant {
        self.0
    }

    /// What an operation may wait so that its own, better answer ("the pull is at 40 %") comes in time.
    pub(super) fn wait_budget(self) -> Duration {
        let left = self.0.saturating_duration_since(Instant::now());
        left.saturating_sub((left / 10).min(LARGEST_MARGIN))
    }
}

/// gRPC's form: at most eight digits and a unit.
fn parse(text: &str) -> Option<Duration> {
    let unit = text.chars().last()?;
    let digits = text.strip_suffix(unit)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(n * 3600),
        'M' => Duration::from_secs(n * 60),
        'S' => Duration::from_secs(n),
        'm' => Duration::from_millis(n),
        'u' => Duration::from_micros(n),
        'n' => Duration::from_nanos(n),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_every_unit_are_read() {
        let table = [("2H", 7_200_000), ("3M", 180_000), ("4S", 4000), ("250m", 250), ("5000u", 5), ("99999999S", 99_999_999_000)];
        for (text, millis) in table {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "S", "1", "-1S", "1.5S", "123456789S", "1é", "1 S"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_answer_leaves_before_the_deadline_and_the_operation_ends_before_that() {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", "10S".parse().expect("ascii"));
        let deadline = Deadline::of(&headers).expect("it has one");
        let left = deadline.instant() - Instant::now();
        assert_eq!(left, Duration::from_millis(9750));
        assert_eq!(deadline.wait_budget(), Duration::from_millis(9500));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(deadline.wait_budget(), Duration::ZERO);
    }
}
