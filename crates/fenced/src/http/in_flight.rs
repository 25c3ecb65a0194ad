//! The requests in flight in this process, for each resource and fence.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use lockkeeper_core::{Fence, IgnorePoison, LockName};
use tokio::sync::Notify;

use super::admitted_body::ClientResponse;

/// All resources that something is under way for.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlightRequests(Arc<InFlightState>);

#[derive(Debug, Default)]
struct InFlightState {
    in_flight: Mutex<HashMap<LockName, ResourceQueue>>,
    /// How often the right to let anything through was lost.
    losses: AtomicU64,
    /// The number of the last request.
    entered: AtomicU64,
}

#[derive(Debug, Default)]
struct ResourceQueue {
    /// The requests under way, by fence and number. Each with its response, once that has begun.
    running: BTreeMap<(Fence, u64), Option<Weak<dyn ClientResponse>>>,
    /// The highest fence whose mark was raised here.
    top: Option<Fence>,
    changed: Arc<Notify>,
}

impl ResourceQueue {
    fn is_first(&self, fence: Fence) -> bool {
        self.running.keys().next().is_none_or(|(oldest, _)| *oldest >= fence)
    }

    /// Records that the mark is as high as `fence`. Returns the responses to requests that this overtakes.
    fn raise(&mut self, fence: Fence) -> Vec<Weak<dyn ClientResponse>> {
        if self.top >= Some(fence) {
            return Vec::new();
        }
        let before = self.top.replace(fence).unwrap_or(Fence::MIN);
        self.changed.notify_waiters();
        self.running.range((before, 0)..(fence, 0)).filter_map(|(_, response)| response.clone()).collect()
    }
}

impl InFlightRequests {
    fn lock(&self) -> MutexGuard<'_, HashMap<LockName, ResourceQueue>> {
        // No code panics under this lock; if it did, each step leaves the map consistent.
        self.0.in_flight.lock().ignore_poison()
    }

    /// Counts a request as in flight. It must be counted **before** its mark is checked: a request that
    /// raises the mark after that check finds it here and waits for it, and one that raised it before is
    /// found by the check.
    ///
    /// `Err`: the mark was raised here to this higher fence, by a request that waits. It is refused without being counted:
    /// late clients that ask again and again would keep that request waiting.
    pub fn enter(&self, resource: LockName, fence: Fence) -> Result<WriteAdmission, Fence> {
        let mut in_flight = self.lock();
        if let Some(top) = in_flight.get(&resource).and_then(|queue| queue.top).filter(|top| *top > fence) {
            return Err(top);
        }
        let queue = in_flight.entry(resource.clone()).or_default();
        let number = self.0.entered.fetch_add(1, SeqCst);
        queue.running.insert((fence, number), None);
        let changed = queue.changed.clone();
        let before = self.0.losses.load(SeqCst);
        let loss = Loss { in_flight: self.clone(), before, resource, fence, changed };
        Ok(WriteAdmission(Arc::new(InFlightEntry { loss, number })))
    }

    /// Another process may let newer fences through from now on, without a word to us: all that is under way is overtaken.
    pub fn lost(&self) {
        self.0.losses.fetch_add(1, SeqCst);
        self.lock().values().for_each(|queue| queue.changed.notify_waiters());
    }
}

/// A request that was let through, as long as it is under way. It is among the extensions of the request; clones count as one.
///
/// Newer fences of the resource wait until all clones are dropped. A service that goes on working after it has answered
/// keeps one until it is done.
#[derive(Clone)]
pub struct WriteAdmission(Arc<InFlightEntry>);

/// Whether the process that let a request through was [alone](super::FenceLayer::alone) ever since. Nothing waits for one.
#[derive(Clone)]
pub struct Loss {
    in_flight: InFlightRequests,
    before: u64,
    resource: LockName,
    fence: Fence,
    changed: Arc<Notify>,
}

impl fmt::Debug for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loss({})", self.happened())
    }
}

impl Loss {
    /// Whether another process may let newer fences through: then nothing more of the request should be passed on.
    pub fn happened(&self) -> bool {
        self.in_flight.0.losses.load(SeqCst) > self.before
    }

    /// As [`WriteAdmission::overtaken`], for one that does not count: it ends as well when the request is over.
    pub async fn overtaken(&self) {
        self.until(|queue| queue.top > Some(self.fence) || self.happened()).await;
    }

    async fn until(&self, seen: impl Fn(&ResourceQueue) -> bool) {
        loop {
            let mut news = std::pin::pin!(self.changed.notified());
            // From here on no news is missed.
            news.as_mut().enable();
            // The queue is there for as long as the request is in it.
            if self.in_flight.lock().get(&self.resource).is_none_or(&seen) {
                return;
            }
            news.await;
        }
    }
}

/// Counts as under way until it is dropped.
struct InFlightEntry {
    loss: Loss,
    number: u64,
}

impl fmt::Debug for WriteAdmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteAdmission({:?}, fence {})", self.resource(), self.fence())
    }
}

impl WriteAdmission {
    /// The fence that the request came with.
    pub fn fence(&self) -> Fence {
        self.0.loss.fence
    }

    pub(super) fn resource(&self) -> &LockName {
        &self.0.loss.resource
    }

    /// Completes when this process has admitted a newer fence, which waits for this request from then on:
    /// long work should stop. It completes also when this process is not [alone](super::FenceLayer::alone)
    /// any more, though it was to be: then another process may admit a newer fence without waiting for this
    /// request. A newer fence of another process is not noticed otherwise.
    pub async fn overtaken(&self) {
        self.0.loss.overtaken().await;
    }

    /// Whether the lock of the marks was lost since the request came. It does not count as under way.
    pub fn loss(&self) -> Loss {
        self.0.loss.clone()
    }

    /// Ends when nothing older is under way.
    pub(super) async fn wait_for_older(&self) {
        self.0.loss.until(|queue| queue.is_first(self.fence())).await;
    }

    /// Records that the mark was raised to this fence, so no older request is admitted any more. Returns
    /// whether none is in flight. Clients have `grace` to read the responses to older ones.
    pub(super) fn raised(&self, grace: Duration) -> bool {
        let mut in_flight = self.0.loss.in_flight.lock();
        let Some(queue) = in_flight.get_mut(self.resource()) else { return true };
        let (overtaken, first) = (queue.raise(self.fence()), queue.is_first(self.fence()));
        drop(in_flight);
        detach_after(grace, overtaken);
        first
    }

    /// Records that the response has begun. Once a newer fence is admitted, its client has `grace` to read it.
    pub(super) fn begin_response(&self, response: Weak<dyn ClientResponse>, grace: Duration) {
        let mut in_flight = self.0.loss.in_flight.lock();
        // It is there for as long as this request counts.
        let Some(queue) = in_flight.get_mut(self.resource()) else { return };
        queue.running.insert((self.fence(), self.0.number), Some(response.clone()));
        let overtaken = queue.top > Some(self.fence());
        drop(in_flight);
        if overtaken {
            detach_after(grace, vec![response]);
        }
    }
}

/// Detaches the clients of these responses in a while. One that has ended by then is gone.
fn detach_after(grace: Duration, responses: Vec<Weak<dyn ClientResponse>>) {
    if responses.is_empty() {
        return;
    }
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(async move {
            tokio::time::sleep(grace).await;
            responses.iter().filter_map(Weak::upgrade).for_each(|response| response.detach());
        });
    }
}

impl Drop for InFlightEntry {
    fn drop(&mut self) {
        let Loss { in_flight, resource, fence, .. } = &self.loss;
        let mut in_flight = in_flight.lock();
        let Some(queue) = in_flight.get_mut(resource) else { return };
        queue.running.remove(&(*fence, self.number));
        if queue.running.range((*fence, 0)..=(*fence, u64::MAX)).next().is_none() {
            queue.changed.notify_waiters();
        }
        if queue.running.is_empty() {
            in_flight.remove(resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn enter(in_flight: &InFlightRequests, fence: u64) -> WriteAdmission {
        in_flight.enter(LockName::new("/a").unwrap(), Fence::new(fence).unwrap()).unwrap()
    }

    #[test]
    fn the_newer_waits_for_the_older_and_never_the_other_way_round() {
        let in_flight = InFlightRequests::default();
        let (five, again, six) = (enter(&in_flight, 5), enter(&in_flight, 5), enter(&in_flight, 6));
        let other = in_flight.enter(LockName::new("/b").unwrap(), Fence::MIN).unwrap();
        assert!(five.wait_for_older().now_or_never().is_some());
        let clone = five.clone();
        let mut waits = Box::pin(six.wait_for_older());
        for older in [five, again] {
            assert!(waits.as_mut().now_or_never().is_none());
            drop(older);
        }
        assert!(waits.as_mut().now_or_never().is_none(), "a clone counts");
        drop(clone);
        assert!(waits.now_or_never().is_some());
        drop((six, other));
        assert!(in_flight.lock().is_empty(), "nothing is left of what is over");
    }

    #[test]
    fn who_is_overtaken_is_told_when_the_mark_is_raised_and_not_before() {
        let in_flight = InFlightRequests::default();
        let five = enter(&in_flight, 5);
        let mut overtaken = Box::pin(five.overtaken());
        let six = enter(&in_flight, 6);
        assert!(overtaken.as_mut().now_or_never().is_none());
        six.raised(Duration::ZERO);
        assert!(overtaken.now_or_never().is_some());
        assert!(six.overtaken().now_or_never().is_none());
    }

    #[test]
    fn who_comes_below_a_raised_mark_is_not_counted() {
        let in_flight = InFlightRequests::default();
        let (five, six) = (enter(&in_flight, 5), enter(&in_flight, 6));
        assert!(!six.raised(Duration::ZERO));
        let late = in_flight.enter(LockName::new("/a").unwrap(), Fence::new(5).unwrap());
        assert_eq!(late.err().map(Fence::get), Some(6));
        drop(five);
        assert!(six.wait_for_older().now_or_never().is_some(), "it waits for one that was refused");
    }

    #[test]
    fn a_loss_overtakes_all_that_is_under_way_and_nothing_that_comes_later() {
        let in_flight = InFlightRequests::default();
        let (five, other) =
            (enter(&in_flight, 5), in_flight.enter(LockName::new("/b").unwrap(), Fence::MIN).unwrap());
        let (mut overtaken, mut other_overtaken) = (Box::pin(five.overtaken()), Box::pin(other.overtaken()));
        assert!(
            overtaken.as_mut().now_or_never().is_none() && other_overtaken.as_mut().now_or_never().is_none()
        );
        let loss = five.loss();
        assert!(!loss.happened());
        in_flight.lost();
        assert!(
            overtaken.now_or_never().is_some() && other_overtaken.now_or_never().is_some() && loss.happened()
        );
        let again = enter(&in_flight, 5);
        assert!(again.overtaken().now_or_never().is_none() && !again.loss().happened());
        drop((five, other, again));
        assert!(in_flight.lock().is_empty(), "a loss alone keeps no queue");
    }
}
