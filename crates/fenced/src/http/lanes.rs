//! What is under way in this process, for each resource and fence.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockkeeper_core::{Fence, LockName};
use tokio::sync::Notify;

/// All resources that something is under way for.
#[derive(Clone, Debug, Default)]
pub(super) struct Lanes(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    lanes: Mutex<HashMap<LockName, Lane>>,
    /// How often the right to let anything through was lost.
    losses: AtomicU64,
}

#[derive(Debug, Default)]
struct Lane {
    /// How many are under way, by fence.
    running: BTreeMap<Fence, usize>,
    /// The highest fence whose mark was raised here.
    top: Option<Fence>,
    changed: Arc<Notify>,
}

impl Lane {
    fn is_first(&self, fence: Fence) -> bool {
        self.running.keys().next().is_none_or(|oldest| *oldest >= fence)
    }
}

impl Lanes {
    fn lock(&self) -> MutexGuard<'_, HashMap<LockName, Lane>> {
        // Nobody panics in here; and if somebody did, each step leaves the lanes whole.
        self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one as under way. It must be counted **before** its mark is checked: whoever raises the mark after that check
    /// finds it here and waits for it, and whoever raised it before is found by the check.
    ///
    /// `Err`: the mark was raised here to this higher fence, by a request that waits. It is refused without being counted:
    /// late clients that ask again and again would keep that request waiting.
    pub fn enter(&self, resource: LockName, fence: Fence) -> Result<Admission, Fence> {
        let mut lanes = self.lock();
        if let Some(top) = lanes.get(&resource).and_then(|lane| lane.top).filter(|top| *top > fence) {
            return Err(top);
        }
        let lane = lanes.entry(resource.clone()).or_default();
        *lane.running.entry(fence).or_default() += 1;
        let changed = lane.changed.clone();
        let before = self.0.losses.load(SeqCst);
        Ok(Admission(Arc::new(Place(Loss { lanes: self.clone(), before, resource, fence, changed }))))
    }

    /// Another process may let newer fences through from now on, without a word to us: all that is under way is overtaken.
    pub fn lost(&self) {
        self.0.losses.fetch_add(1, SeqCst);
        self.lock().values().for_each(|lane| lane.changed.notify_waiters());
    }
}

/// A request that was let through, as long as it is under way. It is among the extensions of the request; clones count as one.
///
/// Newer fences of the resource wait until all clones are dropped. A service that goes on working after it has answered
/// keeps one until it is done.
#[derive(Clone)]
pub struct Admission(Arc<Place>);

/// Whether the process that let a request through was [alone](super::FenceLayer::alone) ever since. Nothing waits for one.
#[derive(Clone)]
pub struct Loss {
    lanes: Lanes,
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
        self.lanes.0.losses.load(SeqCst) > self.before
    }

    /// As [`Admission::overtaken`], for one that does not count: it ends as well when the request is over.
    pub async fn overtaken(&self) {
        self.until(|lane| lane.top > Some(self.fence) || self.happened()).await;
    }

    async fn until(&self, seen: impl Fn(&Lane) -> bool) {
        loop {
            let mut news = std::pin::pin!(self.changed.notified());
            // From here on no news is missed.
            news.as_mut().enable();
            // The lane is there for as long as the request is in it.
            if self.lanes.lock().get(&self.resource).is_none_or(&seen) {
                return;
            }
            news.await;
        }
    }
}

/// Counts as under way until it is dropped.
struct Place(Loss);

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Admission({:?}, fence {})", self.resource(), self.fence())
    }
}

impl Admission {
    /// The fence that the request came with.
    pub fn fence(&self) -> Fence {
        self.0.0.fence
    }

    pub(super) fn resource(&self) -> &LockName {
        &self.0.0.resource
    }

    /// Ends when this process has let a newer fence in, which waits for us from then on: whoever may work for hours should stop.
    /// Also when it is not [alone](super::FenceLayer::alone) any more, though it was to be: then another process may let one in, and
    /// waits for nobody here. A newer fence that another process has let in is not noticed otherwise.
    pub async fn overtaken(&self) {
        self.0.0.overtaken().await;
    }

    /// Whether the lock of the marks was lost since the request came. It does not count as under way.
    pub fn loss(&self) -> Loss {
        self.0.0.clone()
    }

    /// Ends when nothing older is under way.
    pub(super) async fn first_in_lane(&self) {
        self.0.0.until(|lane| lane.is_first(self.fence())).await;
    }

    /// The mark has been raised to our fence, so those before us will get no more company. Says whether there is nobody.
    pub(super) fn raised(&self) -> bool {
        let mut lanes = self.0.0.lanes.lock();
        let Some(lane) = lanes.get_mut(self.resource()) else { return true };
        if lane.top < Some(self.fence()) {
            lane.top = Some(self.fence());
            lane.changed.notify_waiters();
        }
        lane.is_first(self.fence())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lanes = self.0.lanes.lock();
        let Some(lane) = lanes.get_mut(&self.0.resource) else { return };
        if let Some(count) = lane.running.get_mut(&self.0.fence) {
            *count -= 1;
            if *count == 0 {
                lane.running.remove(&self.0.fence);
                lane.changed.notify_waiters();
            }
        }
        if lane.running.is_empty() {
            lanes.remove(&self.0.resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn enter(lanes: &Lanes, fence: u64) -> Admission {
        lanes.enter(LockName::new("/a").unwrap(), Fence::new(fence).unwrap()).unwrap()
    }

    #[test]
    fn the_newer_waits_for_the_older_and_never_the_other_way_round() {
        let lanes = Lanes::default();
        let (five, again, six) = (enter(&lanes, 5), enter(&lanes, 5), enter(&lanes, 6));
        let other = lanes.enter(LockName::new("/b").unwrap(), Fence::MIN).unwrap();
        assert!(five.first_in_lane().now_or_never().is_some());
        let clone = five.clone();
        let mut waits = Box::pin(six.first_in_lane());
        for older in [five, again] {
            assert!(waits.as_mut().now_or_never().is_none());
            drop(older);
        }
        assert!(waits.as_mut().now_or_never().is_none(), "a clone counts");
        drop(clone);
        assert!(waits.now_or_never().is_some());
        drop((six, other));
        assert!(lanes.lock().is_empty(), "nothing is left of what is over");
    }

    #[test]
    fn who_is_overtaken_is_told_when_the_mark_is_raised_and_not_before() {
        let lanes = Lanes::default();
        let five = enter(&lanes, 5);
        let mut told = Box::pin(five.overtaken());
        let six = enter(&lanes, 6);
        assert!(told.as_mut().now_or_never().is_none());
        six.raised();
        assert!(told.now_or_never().is_some());
        assert!(six.overtaken().now_or_never().is_none());
    }

    #[test]
    fn who_comes_below_a_raised_mark_is_not_counted() {
        let lanes = Lanes::default();
        let (five, six) = (enter(&lanes, 5), enter(&lanes, 6));
        assert!(!six.raised());
        let late = lanes.enter(LockName::new("/a").unwrap(), Fence::new(5).unwrap());
        assert_eq!(late.err().map(Fence::get), Some(6));
        drop(five);
        assert!(six.first_in_lane().now_or_never().is_some(), "it waits for one that was refused");
    }

    #[test]
    fn a_loss_overtakes_all_that_is_under_way_and_nothing_that_comes_later() {
        let lanes = Lanes::default();
        let (five, other) =
            (enter(&lanes, 5), lanes.enter(LockName::new("/b").unwrap(), Fence::MIN).unwrap());
        let (mut told, mut other_told) = (Box::pin(five.overtaken()), Box::pin(other.overtaken()));
        assert!(told.as_mut().now_or_never().is_none() && other_told.as_mut().now_or_never().is_none());
        let loss = five.loss();
        assert!(!loss.happened());
        lanes.lost();
        assert!(told.now_or_never().is_some() && other_told.now_or_never().is_some() && loss.happened());
        let again = enter(&lanes, 5);
        assert!(again.overtaken().now_or_never().is_none() && !again.loss().happened());
        drop((five, other, again));
        assert!(lanes.lock().is_empty(), "a loss alone keeps no lane");
    }
}
