//! How many tests work at a time. Tests that break a host wait for their turn at it, and must not keep the others from
//! running meanwhile: so the runner starts as many as there are, and each takes a place when it begins its work.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, PoisonError};

use tokio::sync::MutexGuard;

/// Beside those that have their turn. Each waits for a host most of its time, on a machine of two cores.
const PLACES: usize = 4;

static FREE: (Mutex<usize>, Condvar) = (Mutex::new(PLACES), Condvar::new());

thread_local! {
    /// Places and turns of this test: the second costs nothing, or two tests could wait for one another.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

/// A test's turn at a host, until it is dropped. Those that wait in a row are the longest part of a run, so a turn is a place
/// of its own.
#[derive(Debug)]
pub struct Turn {
    _lock: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for it. On the test's own thread, and before the case is started: its cleaning up is part of the turn.
    pub async fn take(of: &'static tokio::sync::Mutex<()>) -> Self {
        let lock = of.lock().await;
        MINE.set(MINE.get() + 1);
        Self { _lock: lock }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        MINE.set(MINE.get().saturating_sub(1));
    }
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
