use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::table::{Answer, Effect, Now, Table};
use lockkeeper_core::{
    Acquired, Ask, Attempt, Claim, Error, EventStream, Fence, Grant, LockName, LockPage, LockView, Locks,
    Moment, Page, Profile, Promise, Release, Renewal, Result, Waiting, limits,
};
use lockkeeper_host::{Clock, Feed, Timer};
use tokio::sync::oneshot;

use crate::records::Shelf;

/// Locks and records in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Arc<dyn Clock>,
    desk: Mutex<Desk>,
}

#[derive(Debug, Default)]
pub(crate) struct Desk {
    pub table: Table,
    pub shelf: Shelf,
    waiting: HashMap<Attempt, oneshot::Sender<Result<Acquired>>>,
    feed: Feed,
    /// When the table wants to be woken next, and the timer that does it.
    alarm: Option<(Moment, Timer)>,
}

impl MemoryStore {
    /// An empty store that goes by `clock`.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        MemoryStore(Arc::new(Inner { clock, desk: Mutex::default() }))
    }

    /// Does one thing at the desk, then passes on what came of it.
    pub(crate) fn at_desk<T>(&self, work: impl FnOnce(&mut Desk, Now) -> T) -> T {
        let mut desk = self.0.desk();
        let now = self.0.time();
        let done = work(&mut desk, now);
        self.0.pass_on(&mut desk, now);
        done
    }
}

impl Inner {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(&self) -> Now {
        Now { moment: self.clock.now(), wall: self.clock.wall() }
    }

    fn pass_on(self: &Arc<Self>, desk: &mut Desk, now: Now) {
        while let Some(effect) = desk.table.poll_effect() {
            match effect {
                Effect::Event(event) => desk.feed.tell(&event),
                Effect::Answer(attempt, answer) => {
                    let Some(waiter) = desk.waiting.remove(&attempt) else { continue };
                    if let Err(Ok(Acquired::Granted(grant))) = waiter.send(answer) {
                        // It left without saying goodbye: the next in line must not wait for its ttl.
                        desk.table.handle_release(now, &grant.claim);
                    }
                }
            }
        }
        desk.table.set_watched(desk.feed.any());
        self.set_alarm(desk);
    }

    fn set_alarm(self: &Arc<Self>, desk: &mut Desk) {
        let next = desk.table.poll_timeout();
        if desk.alarm.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        let weak = Arc::downgrade(self);
        let ring = move || {
            let Some(inner) = weak.upgrade() else { return };
            let mut desk = inner.desk();
            let now = inner.time();
            desk.alarm = None;
            desk.table.handle_timeout(now);
            inner.pass_on(&mut desk, now);
        };
        desk.alarm = next.map(|at| (at, self.clock.call_at(at, Box::new(ring))));
    }
}

#[async_trait]
impl Locks for MemoryStore {
    fn profile(&self) -> Profile {
        Profile {
            store: "memory".into(),
            exclusion: Promise::Kept,
            fence: Promise::Likely,
            durable: Promise::No,
            waiting: Waiting::Line,
            wake: Duration::from_millis(50),
            shared: true,
            permits: true,
            several: true,
            reentry: true,
            deadlocks: true,
            lock_delay: true,
            min_hold: true,
            watch: true,
            revoke: true,
            records: true,
            notes: vec![
                "private to one process, and gone with it".into(),
                "after a restart fences go on from the wall clock: they go back if that was set back".into(),
            ],
        }
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        let (answered, answer) = oneshot::channel();
        let told = self.at_desk(|desk, now| match desk.table.handle_ask(now, ask.clone())? {
            Answer::Granted(grant) => Ok(Some(Acquired::Granted(grant))),
            Answer::Busy(busy) => Ok(Some(Acquired::Busy(busy))),
            Answer::Waiting => {
                desk.waiting.insert(ask.claim.attempt, answered);
                Ok(None)
            }
        })?;
        let mut told = match told {
            Some(told) => told,
            // The sender goes only when the same attempt asks again, or leaves.
            None => answer.await.unwrap_or_else(|_| Err(Error::Unknown("the ask left the line".into())))?,
        };
        if let Acquired::Granted(grant) = &mut told {
            // The table counts in whole milliseconds, rounded up.
            (grant.ttl, grant.lease) = (ask.ttl, ask.ttl);
        }
        Ok(told)
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        Ok(self.at_desk(|desk, now| {
            grants.iter().map(|grant| desk.table.handle_renew(now, &grant.claim.attempt)).collect()
        }))
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        Ok(self.at_desk(|desk, now| {
            desk.waiting.remove(&claim.attempt);
            desk.table.handle_release(now, claim)
        }))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        Ok(self.at_desk(|desk, now| desk.table.inspect(now.moment, name)))
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        Ok(self.at_desk(|desk, now| desk.table.list(now.moment, prefix, page)))
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        Ok(self.at_desk(|desk, _| desk.feed.add(prefix)))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.at_desk(|desk, now| desk.table.handle_revoke(now, name, reason))
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.at_desk(|desk, now| desk.table.handle_break(now, name, reason))
    }
}
