//! The store: the lock table of `core` behind a mutex, and the `Locks` trait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper_core::faults::Deployment;
use lockkeeper_core::table::{Answer, Now, Table, TableEffect};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Error, EventStream, Fence, Finding, Grant, IgnorePoison,
    LimitSupport, LockName, LockPage, LockRequest, LockView, Locks, Page, Profile, Promise, ReleaseOutcome,
    RenewOutcome, RequestKey, Result, WaitOrder, limits,
};
use lockkeeper_host::{Clock, Timer};
use lockkeeper_store_kit::EventHub;
use tokio::sync::oneshot;

use crate::bucket_table::BucketTable;
use crate::record_index::RecordIndex;

/// Locks and records in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryStore(Arc<MemoryShared>);

#[derive(Debug)]
struct MemoryShared {
    clock: Arc<dyn Clock>,
    state: Mutex<MemoryState>,
}

#[derive(Debug, Default)]
pub(crate) struct MemoryState {
    pub table: Table,
    pub records: RecordIndex,
    pub buckets: BucketTable,
    waiting: HashMap<Attempt, oneshot::Sender<Result<AcquireOutcome>>>,
    hub: EventHub,
    /// The next timeout of the table, and its timer.
    timer: Option<(BootInstant, Timer)>,
}

impl MemoryStore {
    /// An empty store with this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        MemoryStore(Arc::new(MemoryShared { clock, state: Mutex::default() }))
    }

    /// Runs `work` under the mutex, then applies the effects of the table.
    pub(crate) fn with_state<T>(&self, work: impl FnOnce(&mut MemoryState, Now) -> T) -> T {
        let mut state = self.0.lock();
        let now = self.0.time();
        let done = work(&mut state, now);
        self.0.apply_effects(&mut state, now);
        done
    }
}

impl MemoryShared {
    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().ignore_poison()
    }

    fn time(&self) -> Now {
        Now { moment: self.clock.now(), wall: self.clock.wall() }
    }

    fn apply_effects(self: &Arc<Self>, state: &mut MemoryState, now: Now) {
        while let Some(effect) = state.table.poll_effect() {
            match effect {
                TableEffect::Event(event) => state.hub.emit(&event),
                TableEffect::Answer(attempt, answer) => {
                    let Some(waiter) = state.waiting.remove(&attempt) else { continue };
                    if let Err(Ok(AcquireOutcome::Granted(grant))) = waiter.send(answer) {
                        // The caller has gone: the next waiter must not wait for the end of this lease.
                        state.table.handle_release(now, &grant.key);
                    }
                }
            }
        }
        state.table.set_watched(state.hub.any());
        self.set_timer(state);
    }

    fn set_timer(self: &Arc<Self>, state: &mut MemoryState) {
        let next = state.table.poll_timeout();
        if state.timer.as_ref().map(|(at, _)| *at) == next {
            return;
        }
        let weak = Arc::downgrade(self);
        let fire = move || {
            let Some(inner) = weak.upgrade() else { return };
            let mut state = inner.lock();
            let now = inner.time();
            state.timer = None;
            state.table.handle_timeout(now);
            inner.apply_effects(&mut state, now);
        };
        state.timer = next.map(|at| (at, self.clock.call_at(at, Box::new(fire))));
    }
}

#[async_trait]
impl Locks for MemoryStore {
    fn profile(&self) -> Profile {
        Profile {
            waiting: WaitOrder::Queue,
            wake: Duration::from_millis(50),
            shared: true,
            permits: true,
            multi_name: true,
            reentry: true,
            deadlocks: true,
            lock_delay: true,
            min_hold: true,
            watch: true,
            revoke: true,
            records: true,
            limits: LimitSupport::Native,
            findings: vec![
                Finding::risk(Promise::Durability, "private to one process, and gone with it"),
                Finding::hint(
                    Promise::Fence,
                    "after a restart fences go on from the wall clock: they go back if that was set back",
                ),
            ],
            ..Profile::deployed("memory", vec![Deployment::Memory])
        }
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let (reply, answer) = oneshot::channel();
        let outcome =
            self.with_state(|state, now| match state.table.handle_request(now, request.clone())? {
                Answer::Granted(grant) => Ok(Some(AcquireOutcome::Granted(grant))),
                Answer::Busy(busy) => Ok(Some(AcquireOutcome::Busy(busy))),
                Answer::Waiting => {
                    state.waiting.insert(request.key.attempt, reply);
                    Ok(None)
                }
            })?;
        let mut outcome = match outcome {
            Some(outcome) => outcome,
            // The store drops the sender only if the same attempt is sent again or withdrawn.
            None => {
                answer.await.unwrap_or_else(|_| Err(Error::Unknown("the request left the queue".into())))?
            }
        };
        if let AcquireOutcome::Granted(grant) = &mut outcome {
            // The table counts in whole milliseconds, rounded up.
            (grant.ttl, grant.lease) = (request.ttl, request.ttl);
        }
        Ok(outcome)
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        Ok(self.with_state(|state, now| {
            grants.iter().map(|grant| state.table.handle_renew(now, &grant.key.attempt)).collect()
        }))
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        Ok(self.with_state(|state, now| {
            state.waiting.remove(&key.attempt);
            state.table.handle_release(now, key)
        }))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        Ok(self.with_state(|state, now| state.table.inspect(now.moment, name)))
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        Ok(self.with_state(|state, now| state.table.list(now.moment, prefix, page)))
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        Ok(self.with_state(|state, _| state.hub.add(prefix)))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.with_state(|state, now| state.table.handle_revoke(now, name, reason))
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        limits::check_reason(reason)?;
        self.with_state(|state, now| state.table.handle_break(now, name, reason))
    }
}
