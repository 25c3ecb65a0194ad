//! Pending requests: in the order in which they came, but requests that most likely only join a queue come last.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use lockkeeper_core::{Attempt, LockName, RequestKey};

use crate::requests::WriteRequest;
use crate::waiters::Waiters;

/// How many requests one transaction runs: enough to share the cost of a sync, and few enough that no caller waits long
/// for the commit.
const MAX_BATCH: usize = 256;
/// How many of them may be requests that only join a queue, at least and at most.
const MIN_JOINING: usize = 8;
const MAX_JOINING: usize = 64;
/// How long a transaction with such requests may take: requests for free locks wait for its end.
const JOINING_TIME: Duration = Duration::from_millis(8);

enum WorkItem<C> {
    Request(WriteRequest),
    Call(C),
}

/// Requests and calls (of type `C`) that the worker has not started.
///
/// If other callers of this process have requested or wait for the same lock, a request most likely joins the queue. Many
/// such requests do not delay a request for a free lock, which runs first. A call runs after the requests that came before
/// it.
pub(crate) struct PendingWork<C> {
    ready: VecDeque<WorkItem<C>>,
    joining: VecDeque<WorkItem<C>>,
    /// The names of all pending lock requests.
    names: KeyCounts<LockName>,
    /// The attempts of the requests in `joining`.
    attempts: KeyCounts<Attempt>,
    /// How many requests of `joining` the next transaction runs.
    joining_limit: usize,
    /// Whether the last batch had so many.
    joining_was_limited: bool,
}

impl<C> Default for PendingWork<C> {
    fn default() -> Self {
        PendingWork {
            ready: VecDeque::new(),
            joining: VecDeque::new(),
            names: KeyCounts::default(),
            attempts: KeyCounts::default(),
            joining_limit: MAX_JOINING,
            joining_was_limited: false,
        }
    }
}

impl<C> PendingWork<C> {
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.joining.is_empty()
    }

    pub fn len(&self) -> usize {
        self.ready.len() + self.joining.len()
    }

    pub fn push(&mut self, request: WriteRequest, waiters: &Waiters) {
        let list = match &request {
            WriteRequest::Acquire { request, .. } => {
                let joins = self.will_join(&request.key, waiters);
                request.key.names.iter().for_each(|name| self.names.add(name));
                if joins {
                    self.attempts.add(&request.key.attempt);
                    &mut self.joining
                } else {
                    &mut self.ready
                }
            }
            // A release runs after the request that it releases.
            WriteRequest::Release { key, .. } if self.attempts.has(&key.attempt) => &mut self.joining,
            _ => &mut self.ready,
        };
        list.push_back(WorkItem::Request(request));
    }

    pub fn push_call(&mut self, call: C) {
        let list = if self.joining.is_empty() { &mut self.ready } else { &mut self.joining };
        list.push_back(WorkItem::Call(call));
    }

    fn will_join(&self, key: &RequestKey, waiters: &Waiters) -> bool {
        key.names.iter().any(|name| waiters.first(name).is_some() || self.names.has(name))
            || self.attempts.has(&key.attempt)
    }

    /// The requests of the next transaction, and the call that runs after it.
    pub fn next_batch(&mut self) -> (Vec<WriteRequest>, Option<C>) {
        let mut batch = Vec::new();
        let call = take(&mut self.ready, MAX_BATCH, &mut batch);
        let ready = batch.len();
        let call = call.or_else(|| take(&mut self.joining, self.joining_limit, &mut batch));
        self.joining_was_limited = batch.len() - ready == self.joining_limit;
        for (i, request) in batch.iter().enumerate() {
            if let WriteRequest::Acquire { request, .. } = request {
                request.key.names.iter().for_each(|name| self.names.remove(name));
                if i >= ready {
                    self.attempts.remove(&request.key.attempt);
                }
            }
        }
        (batch, call)
    }

    /// Adapts the number of requests that only join a queue to how long the last batch took.
    pub fn adapt(&mut self, took: Duration) {
        if self.joining_was_limited && took > JOINING_TIME {
            self.joining_limit = (self.joining_limit / 2).max(MIN_JOINING);
        } else if self.joining_was_limited && took < JOINING_TIME / 2 {
            self.joining_limit = (self.joining_limit * 2).min(MAX_JOINING);
        }
    }
}

/// Takes at most `most` requests from the front of a list, up to and with its first call.
fn take<C>(list: &mut VecDeque<WorkItem<C>>, most: usize, batch: &mut Vec<WriteRequest>) -> Option<C> {
    for _ in 0..most {
        match list.pop_front()? {
            WorkItem::Request(request) => batch.push(request),
            WorkItem::Call(call) => return Some(call),
        }
    }
    None
}

struct KeyCounts<K>(HashMap<K, usize>);

impl<K> Default for KeyCounts<K> {
    fn default() -> Self {
        KeyCounts(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> KeyCounts<K> {
    fn has(&self, key: &K) -> bool {
        !self.0.is_empty() && self.0.contains_key(key)
    }

    fn add(&mut self, key: &K) {
        *self.0.entry(key.clone()).or_default() += 1;
    }

    fn remove(&mut self, key: &K) {
        if let Some(count) = self.0.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lockkeeper_core::{Holder, LockRequest};
    use tokio::sync::oneshot;

    use super::*;

    fn acquire(name: &str, number: u128) -> WriteRequest {
        let holder = Arc::new(Holder::new("here", 1, None).unwrap());
        let attempt = Attempt::from_bytes(number.to_be_bytes());
        let name = LockName::new(name).unwrap();
        WriteRequest::Acquire {
            request: LockRequest::new(attempt, name, Duration::from_secs(1), holder),
            reply: oneshot::channel().0,
        }
    }

    fn names(batch: &[WriteRequest]) -> Vec<&str> {
        let name = |request: &WriteRequest| match request {
            WriteRequest::Acquire { request, .. } => Some(request.key.names.first().as_str().to_owned()),
            _ => None,
        };
        let names = batch.iter().filter_map(name);
        names.map(|name| if name == "hot" { "hot" } else { "free" }).collect()
    }

    #[test]
    fn requests_that_only_join_a_queue_do_not_delay_a_free_lock() {
        let (mut pending, mut waiters) = (PendingWork::<()>::default(), Waiters::default());
        // Before and after the first of them has become a waiter.
        for number in 0..3 {
            pending.push(acquire("hot", number), &waiters);
        }
        pending.push(acquire("free", 3), &waiters);
        let (batch, _) = pending.next_batch();
        assert_eq!(names(&batch), ["hot", "free", "hot", "hot"]);
        let WriteRequest::Acquire { request, reply } = acquire("hot", 0) else { unreachable!() };
        let key = request.key.clone();
        waiters.add(
            1,
            crate::waiters::LocalWaiter { request, until: lockkeeper_core::BootInstant::NEVER, reply },
        );
        for number in 1..=10_000 {
            pending.push(acquire("hot", number), &waiters);
        }
        pending.push(acquire("free", 10_001), &waiters);
        let (batch, _) = pending.next_batch();
        assert_eq!(names(&batch)[..2], ["free", "hot"]);
        assert_eq!(batch.len(), 1 + MAX_JOINING);
        // A release runs after its request; requests for one name keep their order.
        let WriteRequest::Acquire { request, .. } = acquire("hot", 9_000) else { unreachable!() };
        pending
            .push(WriteRequest::Release { key: request.key.clone(), reply: oneshot::channel().0 }, &waiters);
        pending.push(WriteRequest::Release { key, reply: oneshot::channel().0 }, &waiters);
        let (batch, _) = pending.next_batch();
        assert!(
            matches!(&batch[0], WriteRequest::Release { key, .. } if key.attempt == Attempt::from_bytes([0; 16]))
        );
        assert!(matches!(&batch[1], WriteRequest::Acquire { request, .. }
            if request.key.attempt == Attempt::from_bytes(65_u128.to_be_bytes())));
        let mut last = None;
        while !pending.is_empty() {
            last = pending.next_batch().0.pop();
        }
        assert!(
            matches!(last, Some(WriteRequest::Release { key, .. }) if key.attempt == request.key.attempt)
        );
        assert!(!pending.names.has(&LockName::new("hot").unwrap()));
    }

    #[test]
    fn a_slow_transaction_takes_fewer_requests_that_join_a_queue() {
        let (mut pending, waiters) = (PendingWork::<()>::default(), Waiters::default());
        for number in 0..=1_000 {
            pending.push(acquire("hot", number), &waiters);
        }
        pending.next_batch();
        let mut sizes = Vec::new();
        for took in [JOINING_TIME * 2, JOINING_TIME * 2, JOINING_TIME, JOINING_TIME * 9, JOINING_TIME * 9] {
            pending.adapt(took);
            sizes.push(pending.next_batch().0.len());
        }
        assert_eq!(sizes, [32, 16, 16, 8, 8]);
        for _ in 0..4 {
            pending.adapt(JOINING_TIME / 4);
            sizes.push(pending.next_batch().0.len());
        }
        assert_eq!(sizes[5..], [16, 32, 64, 64]);
    }
}
