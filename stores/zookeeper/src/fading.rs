//! Records that were written with a ttl. Nobody sees one whose time is over; the process that wrote it, or whoever meets it later, takes it away.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{LockName, Moment};
use tokio::sync::Notify;

use crate::fault::Failure;
use crate::store::Shared;

/// How long until it is tried again to take one away.
const AGAIN: Duration = Duration::from_secs(5);

/// What is to be taken away, and when: one entry for each record, however often it is written.
#[derive(Default)]
pub struct Fading {
    list: Mutex<List>,
    ring: Notify,
}

#[derive(Default)]
struct List {
    /// When it is over, and which write of its node is meant.
    each: HashMap<LockName, (Moment, i32)>,
    order: BTreeSet<(Moment, LockName)>,
}

impl List {
    fn remove(&mut self, key: &LockName) {
        if let Some((at, _)) = self.each.remove(key) {
            self.order.remove(&(at, key.clone()));
        }
    }
}

impl Fading {
    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This write of a record is over then.
    pub fn add(&self, key: &LockName, at: Moment, node: i32) {
        let mut list = self.list();
        list.remove(key);
        list.each.insert(key.clone(), (at, node));
        list.order.insert((at, key.clone()));
        if list.order.first().is_some_and(|(_, first)| first == key) {
            self.ring.notify_one();
        }
    }

    /// It stays, or is gone.
    pub fn forget(&self, key: &LockName) {
        self.list().remove(key);
    }

    /// The first that is over, or when the next one is.
    fn due(&self, now: Moment) -> Result<(LockName, i32), Option<Moment>> {
        let mut list = self.list();
        let Some((at, key)) = list.order.first().cloned() else { return Err(None) };
        if at > now {
            return Err(Some(at));
        }
        let node = list.each.get(&key).map_or(0, |(_, node)| *node);
        list.remove(&key);
        Ok((key, node))
    }
}

/// Takes away what is over, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>) {
    loop {
        let now = shared.clock.now();
        let next = match shared.fading.due(now) {
            Ok((key, node)) => {
                if let Err(failure) = shared.take_away_record(&key, node).await {
                    tracing::debug!(?failure, "could not take a record away, will try again");
                    shared.fading.add(&key, shared.clock.now() + AGAIN, node);
                }
                continue;
            }
            Err(next) => next,
        };
        let pause = next.map_or(Duration::from_secs(3600), |next| next.since(now));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.fading.ring.notified() => {}
        }
    }
}

impl Shared {
    /// Takes a record away if it is still the one that was written, and over.
    async fn take_away_record(self: &Arc<Self>, key: &LockName, node: i32) -> Result<(), Failure> {
        let session = self.link.session().await?;
        let seen = self.see(&session, key).await?;
        if seen.is_over(node) {
            self.remove(&session, key, &seen).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_written_again_and_again_is_one_entry() {
        let (fading, key) = (Fading::default(), LockName::new("k").unwrap());
        let at = |n| Moment::from_nanos(n);
        for n in 0..1000 {
            fading.add(&key, at(1000 - n), i32::try_from(n).unwrap());
        }
        assert_eq!(fading.list().each.len(), 1);
        assert_eq!(fading.list().order.len(), 1);
        assert_eq!(fading.due(at(0)), Err(Some(at(1))));
        assert_eq!(fading.due(at(1)), Ok((key.clone(), 999)));
        fading.add(&key, at(5), 7);
        fading.forget(&key);
        assert_eq!(fading.due(at(9)), Err(None));
        assert!(fading.list().each.is_empty());
    }
}
