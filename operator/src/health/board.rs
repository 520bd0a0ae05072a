//! Which proxies are to be probed, and what the probes say of them.

use std::collections::HashMap;
use std::sync::Mutex;

use tokio::sync::{Notify, mpsc};

use super::Finding;
use super::thresholds::{Course, Thresholds};
use crate::status::Health;

/// A proxy to probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// namespace/name of its Proxy.
    pub proxy: String,
    /// Address and port.
    pub at: (String, u16),
    /// Tells apart two wishes for one Proxy; a finding of an older one is dropped.
    pub wish: u64,
}

#[derive(Debug)]
struct Entry {
    target: Target,
    course: Course,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Entry>,
    new: Vec<Target>,
    wishes: u64,
}

/// Shared by reconciliation, the prober and discovery.
#[derive(Debug)]
pub struct Board {
    state: Mutex<State>,
    changed: Notify,
    touched: mpsc::UnboundedSender<String>,
}

impl Board {
    /// A board, and the names of Proxies that have a reason to be reconciled.
    #[must_use]
    pub fn new() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (touched, names) = mpsc::unbounded_channel();
        (Self { state: Mutex::default(), changed: Notify::new(), touched }, names)
    }

    /// A Proxy has this address, or none. The same again changes nothing; another one starts from nothing.
    pub fn want(&self, proxy: &str, at: Option<(String, u16)>) {
        let mut state = self.state();
        if state.entries.get(proxy).map(|e| &e.target.at) == at.as_ref() {
            return;
        }
        let Some(at) = at else {
            state.entries.remove(proxy);
            return;
        };
        state.wishes += 1;
        let target = Target { proxy: proxy.to_owned(), at, wish: state.wishes };
        state.entries.insert(proxy.to_owned(), Entry { target: target.clone(), course: Course::default() });
        state.new.push(target);
        drop(state);
        self.changed.notify_one();
    }

    /// What the probes say of a Proxy; None where nothing is probed.
    #[must_use]
    pub fn health(&self, proxy: &str) -> Option<Health> {
        self.state().entries.get(proxy).map(|e| e.course.health())
    }

    /// A Proxy has a reason to be reconciled.
    pub fn touch(&self, proxy: &str) {
        // nobody listens any more only at the end of the process
        let _ = self.touched.send(proxy.to_owned());
    }

    /// Targets that came since the last call.
    pub(super) fn take_new(&self) -> Vec<Target> {
        std::mem::take(&mut self.state().new)
    }

    /// Ends when there is something for [`Board::take_new`].
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether a target is wanted as it is.
    pub(super) fn is_wanted(&self, target: &Target) -> bool {
        self.state().entries.get(&target.proxy).is_some_and(|e| e.target.wish == target.wish)
    }

    /// Notes what a probe found. Whether the proxy was healthy before, and is now; None if it is not wanted any more.
    pub(super) fn note(&self, target: &Target, finding: &Finding, thresholds: Thresholds) -> Option<(Option<bool>, Option<bool>)> {
        let mut state = self.state();
        let entry = state.entries.get_mut(&target.proxy).filter(|e| e.target.wish == target.wish)?;
        let before = entry.course.health().healthy;
        let is_news = entry.course.take(finding, thresholds);
        let after = entry.course.health().healthy;
        drop(state);
        if is_news {
            self.touch(&target.proxy);
        }
        Some((before, after))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLDS: Thresholds = Thresholds { rise: 1, fall: 1 };

    #[test]
    fn a_verdict_of_an_address_that_is_not_the_proxys_any_more_is_dropped() {
        let (board, _names) = Board::new();
        board.want("a", Some(("10.0.0.1".into(), 3128)));
        let old = board.take_new().remove(0);
        board.want("a", Some(("10.0.0.2".into(), 3128)));
        assert!(!board.is_wanted(&old));
        assert_eq!(board.note(&old, &Finding::Good { egress: None }, THRESHOLDS), None);
        assert_eq!(board.health("a").expect("wanted").healthy, None);
    }

    #[test]
    fn only_news_is_a_reason_to_reconcile() {
        let (board, mut names) = Board::new();
        board.want("a", Some(("10.0.0.1".into(), 3128)));
        board.want("a", Some(("10.0.0.1".into(), 3128)));
        let targets = board.take_new();
        assert_eq!(targets.len(), 1);
        for _ in 0..3 {
            board.note(&targets[0], &Finding::Good { egress: None }, THRESHOLDS);
        }
        assert_eq!((names.try_recv().as_deref(), names.try_recv().is_err()), (Ok("a"), true));
        board.want("a", None);
        assert_eq!(board.health("a"), None);
    }
}
