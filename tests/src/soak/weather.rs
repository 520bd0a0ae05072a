//! What is broken, and when: an error is judged by the faults that went on while its call did.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::plan::{DaemonFault, HostFault, ImageFault};

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    Host(usize, HostFault),
    /// libvirtd takes no more calls though nothing holds it: a defect of libvirt.
    LockedUp(usize),
    Image(ImageFault),
    Daemon(usize, DaemonFault),
}

#[derive(Debug, Clone, Copy)]
struct Span {
    fault: Fault,
    from: u64,
    until: Option<u64>,
}

/// The history of a soak. Times are milliseconds since its start.
#[derive(Debug)]
pub struct Weather {
    start: Instant,
    spans: Mutex<Vec<Span>>,
}

impl Default for Weather {
    fn default() -> Self {
        Self { start: Instant::now(), spans: Mutex::default() }
    }
}

/// One fault of the history, to be ended.
#[derive(Debug, Clone, Copy)]
pub struct Begun(usize);

impl Weather {
    pub fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn spans(&self) -> std::sync::MutexGuard<'_, Vec<Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn begin(&self, fault: Fault) -> Begun {
        let mut spans = self.spans();
        spans.push(Span { fault, from: self.now(), until: None });
        Begun(spans.len() - 1)
    }

    pub fn end(&self, begun: Begun) {
        self.spans()[begun.0].until = Some(self.now());
    }

    /// A fault that was found out only after it had begun.
    pub fn past(&self, fault: Fault, from: u64) {
        let until = Some(self.now());
        self.spans().push(Span { fault, from, until });
    }

    /// Every fault that went on at some time between the two.
    pub fn between(&self, from: u64, until: u64) -> BTreeSet<Fault> {
        let spans = self.spans();
        spans.iter().filter(|span| span.from <= until && span.until.is_none_or(|end| end >= from)).map(|span| span.fault).collect()
    }

    /// Since when nothing has been wrong with a host; None while something is.
    pub fn whole_since(&self, host: usize) -> Option<u64> {
        let of_host = |fault: Fault| matches!(fault, Fault::Host(h, _) | Fault::LockedUp(h) if h == host);
        self.spans().iter().filter(|span| of_host(span.fault)).map(|span| span.until).try_fold(0, |latest, end| Some(latest.max(end?)))
    }

    /// How often each fault began.
    pub fn counts(&self) -> std::collections::BTreeMap<String, usize> {
        let mut counts = std::collections::BTreeMap::new();
        for span in self.spans().iter() {
            let kind = match span.fault {
                Fault::Host(_, fault) => format!("host {fault:?}"),
                Fault::LockedUp(_) => "libvirtd locked up".to_owned(),
                Fault::Image(fault) => format!("image {fault:?}"),
                Fault::Daemon(_, fault) => format!("daemon {fault:?}"),
            };
            *counts.entry(kind).or_default() += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_whole_since_the_end_of_its_last_fault() {
        let weather = Weather::default();
        assert_eq!(weather.whole_since(0), Some(0));
        let begun = weather.begin(Fault::Host(0, HostFault::PathStalled));
        assert_eq!((weather.whole_since(0), weather.whole_since(1)), (None, Some(0)));
        weather.end(begun);
        assert!(weather.whole_since(0).is_some());
        assert_eq!(weather.between(0, u64::MAX), [Fault::Host(0, HostFault::PathStalled)].into());
        assert_eq!(weather.between(weather.now() + 1, u64::MAX), BTreeSet::new());
    }
}
