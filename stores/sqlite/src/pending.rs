//! What callers want changed, until it is done: in the order of its coming, but what is certain to wait comes last.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use lockkeeper_core::{Attempt, Claim, LockName};

use crate::batch::Request;
use crate::locals::Locals;
use crate::worker::Worker;

/// How many requests travel in one transaction: so many that a sync costs each of them next to nothing, and so few that
/// nobody waits long for the end of it.
const BATCH: usize = 256;
/// How many of them may be requests that only join a queue.
const JOINING: usize = 64;

/// A look at the file, or something else that is done by itself.
pub(crate) type Call = Box<dyn FnOnce(&mut Worker) + Send>;

enum Work {
    Request(Request),
    Call(Call),
}

/// Work that was not begun yet.
///
/// A request for a lock that others of this process already ask or wait for will most likely join the queue. A crowd of
/// such requests does not delay the others: somebody who asks for a free lock is served first. A call comes after the
/// requests that came before it.
#[derive(Default)]
pub(crate) struct Pending {
    ready: VecDeque<Work>,
    joining: VecDeque<Work>,
    /// The names that are asked for here.
    names: Counts<LockName>,
    /// The attempts that are joining.
    attempts: Counts<Attempt>,
}

impl Pending {
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.joining.is_empty()
    }

    pub fn len(&self) -> usize {
        self.ready.len() + self.joining.len()
    }

    pub fn push(&mut self, request: Request, locals: &Locals) {
        let lane = match &request {
            Request::Acquire { ask, .. } => {
                let joins = self.must_join(&ask.claim, locals);
                ask.claim.names.iter().for_each(|name| self.names.add(name));
                if joins {
                    self.attempts.add(&ask.claim.attempt);
                    &mut self.joining
                } else {
                    &mut self.ready
                }
            }
            // Behind what it takes back.
            Request::Release { claim, .. } if self.attempts.has(&claim.attempt) => &mut self.joining,
            _ => &mut self.ready,
        };
        lane.push_back(Work::Request(request));
    }

    pub fn push_call(&mut self, call: Call) {
        let lane = if self.joining.is_empty() { &mut self.ready } else { &mut self.joining };
        lane.push_back(Work::Call(call));
    }

    fn must_join(&self, claim: &Claim, locals: &Locals) -> bool {
        claim.names.iter().any(|name| locals.first(name).is_some() || self.names.has(name))
            || self.attempts.has(&claim.attempt)
    }

    /// What travels in the next transaction, and what is done after it.
    pub fn next(&mut self) -> (Vec<Request>, Option<Call>) {
        let mut batch = Vec::new();
        let call = take(&mut self.ready, BATCH, &mut batch);
        let ready = batch.len();
        let call = call.or_else(|| take(&mut self.joining, JOINING, &mut batch));
        for (i, request) in batch.iter().enumerate() {
            if let Request::Acquire { ask, .. } = request {
                ask.claim.names.iter().for_each(|name| self.names.remove(name));
                if i >= ready {
                    self.attempts.remove(&ask.claim.attempt);
                }
            }
        }
        (batch, call)
    }
}

/// Takes requests from the front, as far as the first call, and that too.
fn take(lane: &mut VecDeque<Work>, most: usize, batch: &mut Vec<Request>) -> Option<Call> {
    for _ in 0..most {
        match lane.pop_front()? {
            Work::Request(request) => batch.push(request),
            Work::Call(call) => return Some(call),
        }
    }
    None
}

struct Counts<K>(HashMap<K, usize>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Counts(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Counts<K> {
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
    use std::time::Duration;

    use lockkeeper_core::{Ask, Holder};
    use tokio::sync::oneshot;

    use super::*;

    fn acquire(name: &str, number: u128) -> Request {
        let holder = Arc::new(Holder::new("here", 1, None).unwrap());
        let attempt = Attempt::from_bytes(number.to_be_bytes());
        let name = LockName::new(name).unwrap();
        Request::Acquire {
            ask: Ask::new(attempt, name, Duration::from_secs(1), holder),
            tell: oneshot::channel().0,
        }
    }

    fn names(batch: &[Request]) -> Vec<&str> {
        let name = |request: &Request| match request {
            Request::Acquire { ask, .. } => Some(ask.claim.names.first().as_str().to_owned()),
            _ => None,
        };
        let names = batch.iter().filter_map(name);
        names.map(|name| if name == "hot" { "hot" } else { "free" }).collect()
    }

    #[test]
    fn a_crowd_that_only_joins_a_queue_does_not_delay_a_free_lock() {
        let (mut pending, mut locals) = (Pending::default(), Locals::default());
        // Before the first of them is known to wait, and afterwards.
        for number in 0..3 {
            pending.push(acquire("hot", number), &locals);
        }
        pending.push(acquire("free", 3), &locals);
        let (batch, _) = pending.next();
        assert_eq!(names(&batch), ["hot", "free", "hot", "hot"]);
        let Request::Acquire { ask, tell } = acquire("hot", 0) else { unreachable!() };
        let claim = ask.claim.clone();
        locals.add(1, crate::locals::Local { ask, until: lockkeeper_core::Moment::NEVER, tell });
        for number in 1..=10_000 {
            pending.push(acquire("hot", number), &locals);
        }
        pending.push(acquire("free", 10_001), &locals);
        let (batch, _) = pending.next();
        assert_eq!(names(&batch)[..2], ["free", "hot"]);
        assert_eq!(batch.len(), 1 + JOINING);
        // A release stays behind the request that it takes back; a crowd keeps its order.
        let Request::Acquire { ask, .. } = acquire("hot", 9_000) else { unreachable!() };
        pending.push(Request::Release { claim: ask.claim.clone(), tell: oneshot::channel().0 }, &locals);
        pending.push(Request::Release { claim, tell: oneshot::channel().0 }, &locals);
        let (batch, _) = pending.next();
        assert!(
            matches!(&batch[0], Request::Release { claim, .. } if claim.attempt == Attempt::from_bytes([0; 16]))
        );
        assert!(matches!(&batch[1], Request::Acquire { ask, .. }
            if ask.claim.attempt == Attempt::from_bytes(65_u128.to_be_bytes())));
        let mut last = None;
        while !pending.is_empty() {
            last = pending.next().0.pop();
        }
        assert!(matches!(last, Some(Request::Release { claim, .. }) if claim.attempt == ask.claim.attempt));
        assert!(!pending.names.has(&LockName::new("hot").unwrap()));
    }
}
