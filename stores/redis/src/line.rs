//! The waiters of this process.

mod poll;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockkeeper_core::{Fence, Moment};
use redis::Value;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::config::Options;
use crate::fault::Failure;
use crate::lane::Kept;
use crate::layout::Group;
use crate::store::Shared;

pub use poll::attend;

/// The least time between two looks.
const LEAST: Duration = Duration::from_millis(10);

/// Everybody of this process who waits.
pub struct Line {
    desk: Mutex<Desk>,
    ring: Notify,
    /// How often a group is looked at, at least.
    poll: Duration,
}

#[derive(Default)]
struct Desk {
    /// By attempt, in hexadecimal digits.
    waiters: HashMap<String, Arc<Waiter>>,
    /// Who waits for which key, in the order in which they came.
    lines: BTreeMap<(Group, String), BTreeMap<u64, Arc<Waiter>>>,
    /// How many waiters there were so far.
    joined: u64,
    /// When each group that is waited for is looked at next.
    polls: BTreeMap<Group, Poll>,
    subscribed: bool,
    /// How often a connection was lost, and perhaps messages with it.
    losses: u64,
    /// Attempts with a minimum hold that were let in by message, until the server confirms them or they are released.
    unconfirmed: HashMap<String, Instant>,
}

/// The looks at the keys of one group. A node that does not reply delays those at its own groups only.
struct Poll {
    /// How many keys of the group are waited for.
    spots: usize,
    due: Instant,
    last: Option<Instant>,
    looking: bool,
}

impl Poll {
    fn at(&self) -> Instant {
        self.last.map_or(self.due, |last| self.due.max(last + LEAST))
    }
}

impl Desk {
    /// When the next group is to be looked at, if no look at it is in flight already.
    fn next(&self) -> Option<Instant> {
        self.polls.values().filter(|poll| !poll.looking).map(Poll::at).min()
    }

    /// The groups that are due now; looks at them begin.
    fn begin_looks(&mut self, poll_every: Duration) -> Vec<Group> {
        let now = Instant::now();
        let due = self.polls.iter_mut().filter(|(_, poll)| !poll.looking && poll.at() <= now);
        due.map(|(group, poll)| {
            (poll.looking, poll.last, poll.due) = (true, Some(now), now + poll_every);
            *group
        })
        .collect()
    }

    fn look_at_all(&mut self) {
        let now = Instant::now();
        self.polls.values_mut().for_each(|poll| poll.due = now);
    }
}

struct Waiter {
    /// Its number: waiters that came earlier have a lower one.
    number: u64,
    attempt: String,
    called: Notify,
    left: AtomicBool,
    kept: Kept,
    claim: Mutex<Claim>,
}

/// How a waiter that is called says that it is there. Whoever hears the call says it, at once, on the thread where it is
/// heard: the waiter's own task may be slow to wake.
#[derive(Default)]
struct Claim {
    order: Option<Order>,
    since: Since,
    under_way: Option<AbortHandle>,
    answer: Option<Called>,
}

/// A waiter was in line, and not called, when the server got something that was sent at this moment, and the highest fence
/// of all was this one. What is granted to it since has a higher one, and is kept for a claim counted from here at least.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Since {
    pub sent_at: Moment,
    pub fence: u64,
}

/// What is said for a waiter.
struct Order {
    group: Group,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
}

/// What a message says to one that is let in: its fence, and for how long the server keeps the lock for it unless it is heard.
/// That is up to whoever gave the lock back, whose claim may be another one than ours.
#[derive(Clone, Copy)]
struct Word {
    fence: Fence,
    lease: Duration,
}

impl Word {
    fn read(text: &str) -> Option<Word> {
        let (fence, lease) = text.split_once(' ')?;
        let fence = Fence::new(fence.parse().ok()?).ok()?;
        Some(Word { fence, lease: Duration::from_millis(lease.parse().ok()?) })
    }
}

/// What became of a call.
pub enum Called {
    /// It was let in, by a message: this lease counts from then, and is long enough to go on with.
    In { sent_at: Moment, lease: Duration, fence: Fence },
    /// It said that it is there, and this was the answer to what was sent then.
    Asked(Moment, Result<Value, Failure>),
}

impl Waiter {
    fn claim(&self) -> MutexGuard<'_, Claim> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that it is there, if it stands in line and has not said so already; else lets it ask by itself. `word` is
    /// what a message said.
    fn answer_the_call(self: &Arc<Self>, shared: &Arc<Shared>, word: Option<Word>) {
        let mut claim = self.claim();
        if claim.under_way.is_some() {
            return;
        }
        let Some(order) = claim.order.take() else { return self.called.notify_one() };
        let Since { sent_at, fence: before } = claim.since;
        let (waiter, shared, now) = (self.clone(), shared.clone(), shared.options.clock.now());
        // Good for a while yet, no message from long ago, and newer than all that we know of: a server that has forgotten
        // must be asked.
        let good = |word: &Word| {
            let newest = word.fence.get() > before.max(shared.floor());
            newest && shared.grants.is_none() && now < sent_at + word.lease / 2
        };
        let known = word.filter(good);
        let handle = shared.fleet.reactor().clone();
        let task = handle.spawn(async move {
            let tell = |called| {
                waiter.claim().answer = Some(called);
                waiter.called.notify_one();
            };
            let Some(Word { fence, lease }) = known else {
                let answer = shared.asks.send(order.group, order.keys, order.args, waiter.kept.clone()).await;
                return tell(Called::Asked(now, answer));
            };
            // The waiter confirms, together with others that were let in, and its caller need not wait for that: without
            // an answer, the holder renews within its first lease.
            let attempt = vec![order.args[0].clone()];
            let told = async { tell(Called::In { sent_at, lease, fence }) };
            let confirmed = shared.confirms.send(order.group, order.keys, attempt, waiter.kept.clone());
            if let (Ok(Value::Int(1)), ()) = tokio::join!(confirmed, told) {
                shared.line.forget_unconfirmed(&waiter.attempt);
            }
        });
        claim.under_way = Some(task.abort_handle());
    }
}

/// A place in line. Dropping it gives up waiting, not the place: that is what a release is for.
pub struct Place<'a> {
    line: &'a Line,
    waiter: Arc<Waiter>,
    spots: Vec<(Group, String)>,
}

impl Line {
    pub fn new(poll: Duration) -> Self {
        Line { desk: Mutex::default(), ring: Notify::new(), poll }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to listen for `attempt`, before anything is sent: the answer may come at once.
    pub fn join(&self, attempt: String) -> Place<'_> {
        let mut desk = self.desk();
        desk.joined += 1;
        let waiter = Arc::new(Waiter {
            number: desk.joined,
            attempt,
            called: Notify::new(),
            left: AtomicBool::new(false),
            kept: Kept::default(),
            claim: Mutex::default(),
        });
        desk.waiters.insert(waiter.attempt.clone(), waiter.clone());
        drop(desk);
        Place { line: self, waiter, spots: Vec::new() }
    }

    /// The ask of `attempt` is to end, wherever it is.
    pub fn leave(&self, attempt: &str) {
        if let Some(waiter) = self.desk().waiters.get(attempt) {
            waiter.left.store(true, Ordering::SeqCst);
            waiter.called.notify_one();
        }
    }

    /// The waiter of `attempt` is to ask again. Says whether there is one.
    pub fn wake(&self, attempt: &str) -> bool {
        self.desk().waiters.get(attempt).inspect(|waiter| waiter.called.notify_one()).is_some()
    }

    /// The server has let somebody in: the attempt, and behind it the fence and the lease.
    pub fn call(&self, shared: &Arc<Shared>, message: &[u8]) {
        let Some((attempt, word)) =
            std::str::from_utf8(message).ok().and_then(|text| text.split_at_checked(32))
        else {
            return;
        };
        let waiter = self.desk().waiters.get(attempt).cloned();
        if let Some(waiter) = waiter {
            waiter.answer_the_call(shared, Word::read(word));
        }
    }

    /// The connection is gone, and perhaps a message with it.
    pub fn deaf(&self) {
        let mut desk = self.desk();
        desk.subscribed = false;
        desk.losses += 1;
        desk.look_at_all();
        self.ring.notify_one();
    }

    /// Whether a guard was made for this attempt without the server having confirmed it.
    pub fn is_unconfirmed(&self, attempt: &str) -> bool {
        self.desk().unconfirmed.contains_key(attempt)
    }

    pub fn forget_unconfirmed(&self, attempt: &str) {
        self.desk().unconfirmed.remove(attempt);
    }

    fn expect(&self, group: Group, at: Instant) {
        let mut desk = self.desk();
        let subscribed = desk.subscribed;
        if let Some(poll) = desk.polls.get_mut(&group)
            && (at < poll.due || !subscribed)
        {
            poll.due = poll.due.min(at);
            self.ring.notify_one();
        }
    }
}

impl Place<'_> {
    /// It stands in line for these keys now; the first of those who hold them is expected to be gone after `ends`, if
    /// it says nothing. `called` is what to say when it is called.
    pub fn stand(
        &mut self,
        group: Group,
        keys: &[String],
        called: Vec<Vec<u8>>,
        since: Since,
        ends: Option<Duration>,
    ) {
        let order = Order { group, keys: keys.to_vec(), args: called };
        let mut claim = self.waiter.claim();
        (claim.order, claim.under_way, claim.answer) = (Some(order), None, None);
        claim.since = claim.since.max(since);
        drop(claim);
        if self.spots.is_empty() {
            let mut desk = self.line.desk();
            for key in keys {
                let spot = (group, key.clone());
                let line = desk.lines.entry(spot.clone()).or_default();
                line.insert(self.waiter.number, self.waiter.clone());
                let new = line.len() == 1;
                self.spots.push(spot);
                if new {
                    let due = Instant::now() + self.line.poll;
                    let fresh = || Poll { spots: 0, due, last: None, looking: false };
                    desk.polls.entry(group).or_insert_with(fresh).spots += 1;
                    self.line.ring.notify_one();
                }
            }
        }
        let soon = ends.map_or(Duration::from_secs(1), |ends| ends + Duration::from_millis(1));
        self.line.expect(group, Instant::now() + soon);
    }

    /// Ends when it is worth asking again.
    pub async fn called(&self) {
        self.waiter.called.notified().await;
    }

    /// It asks by itself now: a call that comes meanwhile is not answered for it.
    pub fn ask(&self) {
        self.waiter.claim().order = None;
    }

    /// Whether the call is being answered: then the answer comes.
    pub fn answers(&self) -> bool {
        let claim = self.waiter.claim();
        claim.under_way.is_some() && claim.answer.is_none()
    }

    /// What became of a call, if there was one.
    pub fn answer(&self) -> Option<Called> {
        self.waiter.claim().answer.take()
    }

    /// It has the lock, and keeps it. `unconfirmed`: it has a minimum hold, and the server need not have heard yet that
    /// it is there.
    pub fn keep(&self, unconfirmed: bool) {
        self.waiter.kept.store(true, Ordering::SeqCst);
        if unconfirmed {
            let (mut desk, now) = (self.line.desk(), Instant::now());
            // No hold stays unconfirmed for longer than the longest claim.
            desk.unconfirmed.retain(|_, since| *since + Options::CLAIM_MOST > now);
            desk.unconfirmed.insert(self.waiter.attempt.clone(), now);
        }
    }

    /// Whether somebody took the ask back.
    pub fn left(&self) -> bool {
        self.waiter.left.load(Ordering::SeqCst)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // What is said for one that has the lock is said to the end.
        if !self.waiter.kept.load(Ordering::SeqCst)
            && let Some(task) = self.waiter.claim().under_way.take()
        {
            task.abort();
        }
        let mut desk = self.line.desk();
        // The same attempt may have asked again meanwhile.
        if desk.waiters.get(&self.waiter.attempt).is_some_and(|other| Arc::ptr_eq(other, &self.waiter)) {
            desk.waiters.remove(&self.waiter.attempt);
        }
        for spot in &self.spots {
            if let Some(line) = desk.lines.get_mut(spot) {
                line.remove(&self.waiter.number);
                if line.is_empty() {
                    desk.lines.remove(spot);
                    if let Some(poll) = desk.polls.get_mut(&spot.0) {
                        poll.spots -= 1;
                        if poll.spots == 0 {
                            desk.polls.remove(&spot.0);
                        }
                    }
                }
            }
        }
    }
}
