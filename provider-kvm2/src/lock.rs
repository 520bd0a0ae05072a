//! Locks by key: one holder per key, waiters in order, nothing kept for idle keys.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

type Slots<K> = Arc<Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>>;

#[derive(Debug)]
pub struct KeyedLocks<K: Eq + Hash>(Slots<K>);

impl<K: Eq + Hash> Clone for KeyedLocks<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Eq + Hash> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(HashMap::new())))
    }
}

/// Holds the lock of one key; the key is forgotten once nobody holds or awaits it.
#[derive(Debug)]
pub struct KeyedGuard<K: Eq + Hash + Clone> {
    slots: Slots<K>,
    key: K,
    guard: Option<OwnedMutexGuard<()>>,
}

impl<K: Eq + Hash + Clone> KeyedLocks<K> {
    /// Waits for the key. A waiter that is dropped leaves the queue.
    pub async fn lock(&self, key: K) -> KeyedGuard<K> {
        // made first, so that a waiter cancelled in the queue forgets its key as well
        let mut guard = KeyedGuard { slots: self.0.clone(), key: key.clone(), guard: None };
        let slot = lock(&self.0).entry(key).or_default().clone();
        guard.guard = Some(slot.lock_owned().await);
        guard
    }

    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K: Eq + Hash + Clone> Drop for KeyedGuard<K> {
    fn drop(&mut self) {
        self.guard = None;
        let mut slots = lock(&self.slots);
        // the map's own reference is the last one: nobody holds or awaits the key
        if slots.get(&self.key).is_some_and(|slot| Arc::strong_count(slot) == 1) {
            slots.remove(&self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn one_key_is_held_once_and_forgotten_afterwards() {
        let locks = KeyedLocks::default();
        let first = locks.lock("a").await;
        assert!(locks.lock("b").now_or_never().is_some(), "another key is free");
        let mut second = Box::pin(locks.lock("a"));
        assert!(second.as_mut().now_or_never().is_none(), "the key is taken");
        drop(first);
        drop(second.await);
        assert!(locks.is_empty());
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_does_not_keep_the_key() {
        let locks = KeyedLocks::default();
        let held = locks.lock("a").await;
        assert!(locks.lock("a").now_or_never().is_none());
        drop(held);
        assert!(locks.is_empty());
    }
}
