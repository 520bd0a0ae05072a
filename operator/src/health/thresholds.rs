//! From single probes to a verdict. Pure.

use super::Finding;
use crate::status::Health;

/// How many probes in a row make a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Good ones until a proxy is healthy.
    pub rise: u32,
    /// Bad ones until it is not.
    pub fall: u32,
}

/// What is known of one proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Course {
    healthy: Option<bool>,
    good: u32,
    bad: u32,
    shown: Option<(String, String)>,
}

impl Course {
    /// Takes a finding in; true if what [`Course::health`] says has changed.
    pub fn take(&mut self, finding: &Finding, thresholds: Thresholds) -> bool {
        let before = (self.healthy, self.shown.clone());
        if finding.is_good() {
            (self.good, self.bad) = (self.good.saturating_add(1), 0);
        } else {
            (self.good, self.bad) = (0, self.bad.saturating_add(1));
        }
        if self.good >= thresholds.rise {
            self.healthy = Some(true);
        } else if self.bad >= thresholds.fall {
            self.healthy = Some(false);
        }
        // what is shown is what the verdict is made of, so that one lost probe of a healthy proxy writes no status, and
        // the first of a new one is no reason to look at it
        if self.healthy == Some(finding.is_good()) {
            self.shown = Some((finding.reason().to_owned(), finding.message()));
        }
        // a healthy proxy's message may name its egress address and a bad one's its cause; both are worth a line
        before != (self.healthy, self.shown.clone())
    }

    /// What the conditions say.
    #[must_use]
    pub fn health(&self) -> Health {
        let (reason, message) = self.shown.clone().unwrap_or_default();
        Health { healthy: self.healthy, reason, message, failures: self.bad }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLDS: Thresholds = Thresholds { rise: 2, fall: 3 };

    fn good() -> Finding {
        Finding::Good { egress: None }
    }

    #[test]
    fn it_takes_rise_good_ones_to_come_up_and_fall_bad_ones_to_go_down() {
        let mut course = Course::default();
        assert!(!course.take(&good(), THRESHOLDS), "the first probe decides nothing, so nobody is told");
        assert_eq!(course.health().healthy, None);
        assert!(course.take(&good(), THRESHOLDS));
        assert_eq!(course.health().healthy, Some(true));
        for _ in 0..2 {
            assert!(!course.take(&Finding::Refused, THRESHOLDS), "a lost probe changes nothing that is shown");
        }
        assert_eq!((course.health().healthy, course.health().failures), (Some(true), 2));
        assert!(course.take(&Finding::Refused, THRESHOLDS));
        assert_eq!((course.health().healthy, course.health().reason.as_str()), (Some(false), "ConnectionRefused"));
        course.take(&good(), THRESHOLDS);
        assert_eq!((course.health().healthy, course.health().reason.as_str()), (Some(false), "ConnectionRefused"));
        course.take(&good(), THRESHOLDS);
        assert_eq!(course.health().healthy, Some(true));
    }

    #[test]
    fn good_and_bad_in_turns_decide_nothing_anew() {
        let mut course = Course::default();
        for _ in 0..10 {
            course.take(&good(), THRESHOLDS);
            course.take(&Finding::Timeout, THRESHOLDS);
        }
        assert_eq!(course.health().healthy, None);
    }

    #[test]
    fn another_cause_of_the_same_verdict_is_news() {
        let mut course = Course::default();
        for _ in 0..3 {
            course.take(&Finding::Refused, THRESHOLDS);
        }
        assert!(course.take(&Finding::Answered(407), THRESHOLDS));
        assert!(!course.take(&Finding::Answered(407), THRESHOLDS));
        assert_eq!(course.health().reason, "ProxyAuthRequired");
    }
}
