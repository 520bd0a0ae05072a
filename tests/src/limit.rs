//! How many tests work at a time. Tests that break a host wait for their turn at it, and must not keep the others from
//! running meanwhile: so the runner starts as many as there are, and each takes a place when it begins its work.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, PoisonError};

/// Each waits for a host most of its time, on a machine of two cores.
const PLACES: usize = 6;

static FREE: (Mutex<usize>, Condvar) = (Mutex::new(PLACES), Condvar::new());

thread_local! {
    /// Places of this test: the second costs nothing, or two tests could wait for one another.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

/// Gives its place back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    counts: bool,
}

impl Place {
    /// Waits for one. On the test's own thread.
    pub(crate) fn take() -> Self {
        let counts = MINE.get() == 0;
        if counts {
            let free = FREE.0.lock().unwrap_or_else(PoisonError::into_inner);
            *FREE.1.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner) -= 1;
        }
        MINE.set(MINE.get() + 1);
        Self { counts }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // on whatever thread the last of those lets go that share it
        MINE.set(MINE.get().saturating_sub(1));
        if self.counts {
            *FREE.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            FREE.1.notify_one();
        }
    }
}
