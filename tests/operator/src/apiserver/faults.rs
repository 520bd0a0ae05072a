//! Answers that a real API server gives on a bad day.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct When {
    /// Only this method; empty: all.
    pub method: &'static str,
    /// Only paths that contain this.
    pub path: &'static str,
    /// Only watches, or only what is none.
    pub watch: Option<bool>,
    /// The first so many, then all is well; None: all.
    pub times: Option<usize>,
}

/// What happens to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// An answer with this code, and nothing is done.
    Status(u16),
    /// As [`Fault::Status`], but it is done: the answer was lost on its way.
    LostAnswer,
    /// The answer comes after a while.
    Slow(Duration),
    /// No answer, ever.
    Silent,
}

#[derive(Debug, Clone)]
struct Seen {
    method: String,
    path: String,
    watch: bool,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<(When, Fault, usize)>,
    seen: Vec<Seen>,
    in_flight: usize,
    most_in_flight: usize,
}

/// A request while it is answered, also when its caller goes away.
#[derive(Debug)]
pub(super) struct Flight(Arc<Faults>);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.0.lock().expect("no panic").in_flight -= 1;
    }
}

#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<State>);

impl When {
    fn fits(&self, method: &str, path: &str, watch: bool) -> bool {
        (self.method.is_empty() || self.method == method) && path.contains(self.path) && self.watch.is_none_or(|w| w == watch)
    }
}

impl Faults {
    pub(super) fn set(&self, when: When, fault: Fault) {
        self.0.lock().expect("no panic").rules.push((when, fault, 0));
    }

    pub(super) fn clear(&self) {
        self.0.lock().expect("no panic").rules.clear();
    }

    pub(super) fn count(&self, when: &When) -> usize {
        self.0.lock().expect("no panic").seen.iter().filter(|s| when.fits(&s.method, &s.path, s.watch)).count()
    }

    pub(super) fn fly(self: &Arc<Self>) -> Flight {
        let mut state = self.0.lock().expect("no panic");
        state.in_flight += 1;
        state.most_in_flight = state.most_in_flight.max(state.in_flight);
        Flight(self.clone())
    }

    pub(super) fn most_in_flight(&self) -> usize {
        self.0.lock().expect("no panic").most_in_flight
    }

    pub(super) fn tally(&self, label: impl Fn(&str, &str, bool) -> String) -> BTreeMap<String, usize> {
        let mut all = BTreeMap::new();
        for seen in &self.0.lock().expect("no panic").seen {
            *all.entry(label(&seen.method, &seen.path, seen.watch)).or_default() += 1;
        }
        all
    }

    /// Notes a request; the fault that it meets.
    pub(super) fn meet(&self, method: &str, path: &str, watch: bool) -> Option<Fault> {
        let mut state = self.0.lock().expect("no panic");
        state.seen.push(Seen { method: method.to_owned(), path: path.to_owned(), watch });
        let rule = state.rules.iter_mut().find(|(when, _, met)| when.fits(method, path, watch) && when.times.is_none_or(|n| *met < n))?;
        rule.2 += 1;
        Some(rule.1.clone())
    }
}
