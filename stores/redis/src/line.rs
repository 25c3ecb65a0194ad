//! Those of this process who stand in line, and the one task that looks after all of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockkeeper_core::{Ask, Fence, Moment};
use redis::{Value, cmd};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::entry;
use crate::fault::Failure;
use crate::lane::Kept;
use crate::layout::Group;
use crate::script::{Call, POLL};
use crate::store::Shared;

/// A lock taken by somebody else's client is given back without a word to us: it is looked at more often.
const FOREIGN: Duration = Duration::from_millis(100);
/// The least time between two looks.
const LEAST: Duration = Duration::from_millis(10);
/// How many names one script looks at.
const BATCH: usize = 200;

/// Everybody of this process who waits.
#[derive(Default)]
pub struct Line {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    /// By attempt, in hexadecimal digits.
    waiters: HashMap<String, Arc<Waiter>>,
    /// Who waits for which key, in the order in which they came.
    lines: BTreeMap<(Group, String), Vec<Arc<Waiter>>>,
    subscribed: bool,
    due: Option<Instant>,
}

struct Waiter {
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
    claim: lockkeeper_core::Claim,
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
            // The server hears from us all the same, but nobody has to wait for that: if it is not heard, the holder
            // renews within its first lease.
            let parts = [(order.group, &order.claim)];
            let told = async { tell(Called::In { sent_at, lease, fence }) };
            _ = tokio::join!(shared.renew_all(&parts), told);
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
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to listen for `attempt`, before anything is sent: the answer may come at once.
    pub fn join(&self, attempt: String) -> Place<'_> {
        let waiter = Arc::new(Waiter {
            attempt,
            called: Notify::new(),
            left: AtomicBool::new(false),
            kept: Kept::default(),
            claim: Mutex::default(),
        });
        self.desk().waiters.insert(waiter.attempt.clone(), waiter.clone());
        Place { line: self, waiter, spots: Vec::new() }
    }

    /// The ask of `attempt` is to end, wherever it is.
    pub fn leave(&self, attempt: &str) {
        if let Some(waiter) = self.desk().waiters.get(attempt) {
            waiter.left.store(true, Ordering::SeqCst);
            waiter.called.notify_one();
        }
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
        desk.due = Some(Instant::now());
        self.ring.notify_one();
    }

    fn expect(&self, at: Instant) {
        let mut desk = self.desk();
        if desk.due.is_none_or(|due| at < due) || !desk.subscribed {
            desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
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
        ask: &Ask,
        keys: &[String],
        called: Vec<Vec<u8>>,
        since: Since,
        ends: Option<Duration>,
    ) {
        let order = Order { group, claim: ask.claim.clone(), keys: keys.to_vec(), args: called };
        let mut claim = self.waiter.claim();
        (claim.order, claim.under_way, claim.answer) = (Some(order), None, None);
        claim.since = claim.since.max(since);
        drop(claim);
        if self.spots.is_empty() {
            let mut desk = self.line.desk();
            for key in keys {
                let spot = (group, key.clone());
                desk.lines.entry(spot.clone()).or_default().push(self.waiter.clone());
                self.spots.push(spot);
            }
        }
        let soon = ends.map_or(Duration::from_secs(1), |ends| ends + Duration::from_millis(1));
        self.line.expect(Instant::now() + soon);
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

    /// It has the lock, and keeps it.
    pub fn keep(&self) {
        self.waiter.kept.store(true, Ordering::SeqCst);
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
                line.retain(|other| !Arc::ptr_eq(other, &self.waiter));
                if line.is_empty() {
                    desk.lines.remove(spot);
                }
            }
        }
    }
}

/// Looks after the line for as long as the store is open: listens, polls, and says that we are still there.
pub async fn attend(shared: Arc<Shared>) {
    let line = &shared.line;
    let mut last = Instant::now();
    loop {
        let (busy, due, subscribed) = {
            let mut desk = line.desk();
            if desk.lines.is_empty() {
                // Nothing is due, so that the next one who comes rings.
                desk.due = None;
            }
            (!desk.lines.is_empty(), desk.due, desk.subscribed)
        };
        if !busy {
            line.ring.notified().await;
            continue;
        }
        if !subscribed && subscribe(&shared).await {
            line.desk().subscribed = true;
            // What was said before we listened was not heard.
            last = look(&shared).await;
            continue;
        }
        let due = due.unwrap_or(last + shared.options.poll).min(last + shared.options.poll).max(last + LEAST);
        tokio::select! {
            () = tokio::time::sleep_until(due.into()) => last = look(&shared).await,
            () = line.ring.notified() => {}
        }
    }
}

async fn subscribe(shared: &Shared) -> bool {
    let subscribed = shared.fleet.call(0, cmd("SUBSCRIBE").arg(shared.wake_channel())).await;
    if let Err(failure) = &subscribed {
        tracing::warn!(?failure, "no messages: waiting goes on by looking every {:?}", shared.options.poll);
    }
    subscribed.is_ok()
}

/// Looks at everything that is waited for, once, whatever the number of those who wait.
async fn look(shared: &Arc<Shared>) -> Instant {
    let spots: Vec<(Group, String)> = {
        let mut desk = shared.line.desk();
        desk.due = None;
        desk.lines.keys().cloned().collect()
    };
    let mut soonest = shared.options.poll;
    let looks = spots.chunk_by(|a, b| a.0 == b.0).flat_map(|group| group.chunks(BATCH));
    let looks = looks.map(|batch| look_at(shared, batch));
    for next in futures_util::future::join_all(looks).await.into_iter().flatten() {
        soonest = soonest.min(next);
    }
    let now = Instant::now();
    let mut desk = shared.line.desk();
    let at = now + soonest;
    desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
    now
}

/// Looks at some keys of one group. Says when it is worth looking again.
async fn look_at(shared: &Arc<Shared>, batch: &[(Group, String)]) -> Option<Duration> {
    let (group, sent_at) = (batch[0].0, shared.options.clock.now());
    let names: Vec<&str> = batch.iter().map(|(_, key)| key.as_str()).collect();
    let call = Call::new(&POLL, &shared.keys(group, &names))
        .arg(shared.layout.base(group))
        .arg(shared.claim_ms())
        .arg(&shared.client);
    let answer = match call.run(&shared.fleet, group.slot()).await {
        Ok(Value::Array(answer)) => answer,
        other => {
            tracing::warn!(?other, "could not look at the line, will look again");
            return None;
        }
    };
    let desk = shared.line.desk();
    if matches!(answer.first(), Some(Value::Int(0))) {
        // We were silent for too long, or the server has forgotten us: everybody asks again.
        for waiter in batch.iter().filter_map(|spot| desk.lines.get(spot)).flatten() {
            waiter.called.notify_one();
        }
        return Some(shared.options.poll);
    }
    let mut soonest = shared.options.poll;
    let Some(Value::Int(fence)) = answer.get(1) else { return None };
    let since = Since { sent_at, fence: u64::try_from(*fence).unwrap_or(u64::MAX) };
    for (spot, state) in batch.iter().zip(&answer[2..]) {
        let Value::Array(state) = state else { continue };
        let [Value::BulkString(value), Value::BulkString(held), Value::Int(pttl)] = &state[..] else {
            continue;
        };
        let holds = entry::holds(held);
        for hold in &holds {
            if let Some(waiter) = desk.waiters.get(&hold.attempt) {
                waiter.answer_the_call(shared, None);
            }
        }
        // Those who were there before we looked still stand in line.
        for waiter in desk.lines.get(spot).into_iter().flatten() {
            let mut claim = waiter.claim();
            if claim.order.is_some() && holds.iter().all(|hold| hold.attempt != waiter.attempt) {
                claim.since = claim.since.max(since);
            }
        }
        let foreign = value != b"lockkeeper" && !holds.iter().any(|hold| entry::names(value, &hold.attempt));
        if value.is_empty() {
            // Free, and still we wait: the line was lost. The first asks again.
            desk.lines.get(spot).and_then(|line| line.first()).inspect(|waiter| waiter.called.notify_one());
        } else if foreign {
            soonest = soonest.min(FOREIGN);
        }
        if let Ok(pttl) = u64::try_from(*pttl) {
            soonest = soonest.min(Duration::from_millis(pttl + 1));
        }
    }
    Some(soonest)
}
