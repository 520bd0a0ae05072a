//! Guest agents that do not answer.
//!
//! Asking a silent one takes as long as an agent may take, and holds one of the few places that the agents of all guests
//! of a link share. So it is left alone for a while, each time for longer: a guest's silence is its own.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

/// How long one is left alone that did not answer for the first time.
const FIRST_REST: Duration = Duration::from_secs(15);
/// Longest that one is left alone: so late its address is seen again when it has come back.
const LONGEST_REST: Duration = Duration::from_secs(120);

/// The silent ones of one link, by their domains' UUIDs.
#[derive(Debug, Default)]
pub(super) struct Agents(Mutex<HashMap<Uuid, Silence>>);

#[derive(Debug, Clone, Copy)]
struct Silence {
    until: Instant,
    rest: Duration,
}

impl Agents {
    /// How long it is still left alone.
    pub(super) fn rests(&self, domain: Uuid) -> Option<Duration> {
        let until = self.lock().get(&domain)?.until;
        until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// It answered, if only with an error, or its guest was started anew.
    pub(super) fn heard(&self, domain: Uuid) {
        self.lock().remove(&domain);
    }

    pub(super) fn silent(&self, domain: Uuid) {
        let now = Instant::now();
        let mut silences = self.lock();
        // what nobody asks for any more is forgotten: guests come and go
        silences.retain(|_, silence| now < silence.until + LONGEST_REST);
        let rest = match silences.get(&domain) {
            // of two that asked at a time
            Some(silence) if now < silence.until => return,
            Some(silence) => (silence.rest * 2).min(LONGEST_REST),
            None => FIRST_REST,
        };
        silences.insert(domain, Silence { until: now + rest, rest });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Silence>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_agent_rests_twice_as_long_each_time_and_one_that_is_heard_not_at_all() {
        let (agents, [one, other]) = (Agents::default(), [Uuid::from_u128(1), Uuid::from_u128(2)]);
        for seconds in [15, 30, 60, 120, 120] {
            assert_eq!(agents.rests(one), None);
            agents.silent(one);
            agents.silent(one);
            assert_eq!((agents.rests(one), agents.rests(other)), (Some(Duration::from_secs(seconds)), None));
            tokio::time::advance(Duration::from_secs(seconds)).await;
        }
        agents.silent(one);
        agents.heard(one);
        assert_eq!(agents.rests(one), None);
        agents.silent(one);
        assert_eq!(agents.rests(one), Some(FIRST_REST));
    }

    #[tokio::test(start_paused = true)]
    async fn agents_that_nobody_asks_for_are_forgotten() {
        let agents = Agents::default();
        (0..100).for_each(|n| agents.silent(Uuid::from_u128(n)));
        tokio::time::advance(FIRST_REST + LONGEST_REST).await;
        agents.silent(Uuid::from_u128(100));
        assert_eq!(agents.lock().len(), 1);
    }
}
