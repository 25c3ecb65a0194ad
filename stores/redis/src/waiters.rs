//! The waiters of this process.

mod poll;

pub(crate) use poll::run;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lockkeeper_core::{BootInstant, Fence, IgnorePoison};
use lockkeeper_store_kit::WaiterTtls;
use redis::Value;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::batch::{BatchSender, KeepFlag};
use crate::config::Options;
use crate::error::Failure;
use crate::keys::KeyGroup;
use crate::runner::ScriptRunner;

/// The least time between two polls.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The waiters of this process.
pub(crate) struct Waiters {
    runner: Arc<ScriptRunner>,
    requests: BatchSender,
    confirms: BatchSender,
    state: Mutex<WaitersState>,
    ttls: WaiterTtls,
    wake: Notify,
    /// The longest time between two polls of a group.
    poll: Duration,
}

#[derive(Default)]
struct WaitersState {
    /// By attempt, in hexadecimal digits.
    waiters: HashMap<String, Arc<RedisWaiter>>,
    /// The waiters for each key, in the order of their requests.
    queues: BTreeMap<(KeyGroup, String), BTreeMap<u64, Arc<RedisWaiter>>>,
    /// How many waiters there were so far.
    joined: u64,
    /// When the process polls each group with waiters next.
    polls: BTreeMap<KeyGroup, GroupPoll>,
    subscribed: bool,
    /// How often a connection was lost, and perhaps messages with it.
    losses: u64,
    /// Attempts with a minimum hold that were granted by a message, until the server confirms them or they are released.
    unconfirmed: HashMap<String, Instant>,
}

/// The polls of one group. A node that does not reply delays the polls of its own groups only.
struct GroupPoll {
    /// How many keys of the group have waiters.
    queue_keys: usize,
    due: Instant,
    last: Option<Instant>,
    in_flight: bool,
}

impl GroupPoll {
    fn at(&self) -> Instant {
        self.last.map_or(self.due, |last| self.due.max(last + MIN_POLL_INTERVAL))
    }
}

impl WaitersState {
    /// When the next poll of a group is due that has none in flight.
    fn next(&self) -> Option<Instant> {
        self.polls.values().filter(|poll| !poll.in_flight).map(GroupPoll::at).min()
    }

    /// The groups whose polls are due now. The polls count as in flight from here on.
    fn begin_polls(&mut self, poll_every: Duration) -> Vec<KeyGroup> {
        let now = Instant::now();
        let due = self.polls.iter_mut().filter(|(_, poll)| !poll.in_flight && poll.at() <= now);
        due.map(|(group, poll)| {
            (poll.in_flight, poll.last, poll.due) = (true, Some(now), now + poll_every);
            *group
        })
        .collect()
    }

    fn poll_all_now(&mut self) {
        let now = Instant::now();
        self.polls.values_mut().for_each(|poll| poll.due = now);
    }
}

struct RedisWaiter {
    /// Its number: earlier waiters have a lower one.
    number: u64,
    attempt: String,
    ttl: Duration,
    woken: Notify,
    kept: KeepFlag,
    hand_off: Mutex<HandOffState>,
}

/// How far a waiter is with the confirmation of a hand-off. The task that receives the message sends the confirmation at once,
/// because the waiter's own task may be slow to wake.
#[derive(Default)]
struct HandOffState {
    request: Option<ConfirmRequest>,
    since: QueuedAt,
    confirming: Option<AbortHandle>,
    outcome: Option<HandOffOutcome>,
}

/// The last moment at which the client sent something to which the server replied that the waiter is in the queue, and the highest
/// fence of the server at that time. A later grant to the waiter has a higher fence, and its lease began after that moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuedAt {
    pub sent_at: BootInstant,
    pub fence: u64,
}

/// The request that confirms a hand-off.
struct ConfirmRequest {
    group: KeyGroup,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
}

/// The message of a hand-off: the fence, and how long the server keeps the lock without a confirmation, which depends on the
/// claim of the waiter's client.
#[derive(Clone, Copy)]
struct HandOffMessage {
    fence: Fence,
    lease: Duration,
}

impl HandOffMessage {
    fn read(text: &str) -> Option<HandOffMessage> {
        let (fence, lease) = text.split_once(' ')?;
        let fence = Fence::new(fence.parse().ok()?).ok()?;
        Some(HandOffMessage { fence, lease: Duration::from_millis(lease.parse().ok()?) })
    }
}

/// The outcome of a hand-off.
pub enum HandOffOutcome {
    /// The message granted the lock: the lease counts from `sent_at`, and its rest is long enough to begin with.
    Granted { sent_at: BootInstant, lease: Duration, fence: Fence },
    /// The client sent the request again at this moment, and this is the reply.
    Replied(BootInstant, Result<Value, Failure>),
}

impl RedisWaiter {
    fn hand_off(&self) -> MutexGuard<'_, HandOffState> {
        self.hand_off.lock().ignore_poison()
    }

    /// Confirms a hand-off, unless a confirmation is in flight. A waiter that is not in the queue is woken instead, and sends its
    /// request itself. `message`: the message of the hand-off, if there was one.
    fn confirm_hand_off(self: &Arc<Self>, waiters: &Arc<Waiters>, message: Option<HandOffMessage>) {
        let mut hand_off = self.hand_off();
        if hand_off.confirming.is_some() {
            return;
        }
        let Some(request) = hand_off.request.take() else { return self.woken.notify_one() };
        let QueuedAt { sent_at, fence: before } = hand_off.since;
        let (waiter, waiters, now) = (self.clone(), waiters.clone(), waiters.runner.options.clock.now());
        // The message counts if more than half of its lease is left and its fence is higher than every fence that this client has seen.
        // Otherwise it may be a delayed message, or from a server that has lost data, and the server has to confirm it first.
        let good = |message: &HandOffMessage| {
            let newest = message.fence.get() > before.max(waiters.runner.highest_fence_seen());
            newest && waiters.runner.grant_router.is_none() && now < sent_at + message.lease / 2
        };
        let known = message.filter(good);
        let handle = waiters.runner.router.io().clone();
        let task = handle.spawn(async move {
            let report = |outcome| {
                waiter.hand_off().outcome = Some(outcome);
                waiter.woken.notify_one();
            };
            let Some(HandOffMessage { fence, lease }) = known else {
                let answer = waiters
                    .requests
                    .send(request.group, request.keys, request.args, waiter.kept.clone())
                    .await;
                return report(HandOffOutcome::Replied(now, answer));
            };
            // The confirmation shares a script with those of other waiters, and the caller does not wait for its reply: without one,
            // the guard renews within the first lease.
            let attempt = vec![request.args[0].clone()];
            let reported = async { report(HandOffOutcome::Granted { sent_at, lease, fence }) };
            let confirmed = waiters.confirms.send(request.group, request.keys, attempt, waiter.kept.clone());
            if let (Ok(Value::Int(1)), ()) = tokio::join!(confirmed, reported) {
                waiters.forget_unconfirmed(&waiter.attempt);
            }
        });
        hand_off.confirming = Some(task.abort_handle());
    }
}

/// A waiter, for its caller. Dropping it ends the wait; only a release removes the queue entry.
pub struct WaiterHandle<'a> {
    waiters: &'a Waiters,
    waiter: Arc<RedisWaiter>,
    queue_keys: Vec<(KeyGroup, String)>,
}

impl Waiters {
    pub fn new(runner: Arc<ScriptRunner>, requests: BatchSender, confirms: BatchSender) -> Self {
        let poll = runner.options.poll;
        let (state, ttls, wake) = (Mutex::default(), WaiterTtls::default(), Notify::new());
        Waiters { runner, requests, confirms, state, ttls, wake, poll }
    }

    fn state(&self) -> MutexGuard<'_, WaitersState> {
        self.state.lock().ignore_poison()
    }

    /// Registers the waiter of `attempt` before its request is sent, because a message may arrive at once.
    pub fn join(&self, attempt: String, ttl: Duration) -> WaiterHandle<'_> {
        let mut state = self.state();
        state.joined += 1;
        self.ttls.add(ttl);
        let waiter = Arc::new(RedisWaiter {
            number: state.joined,
            attempt,
            ttl,
            woken: Notify::new(),
            kept: KeepFlag::default(),
            hand_off: Mutex::default(),
        });
        state.waiters.insert(waiter.attempt.clone(), waiter.clone());
        drop(state);
        WaiterHandle { waiters: self, waiter, queue_keys: Vec::new() }
    }

    /// How long the server keeps the queue entries of this process after its last poll.
    pub fn entry_life(&self, claim: Duration) -> Duration {
        self.ttls.entry_life(claim, self.poll)
    }

    /// Handles the message of a hand-off: the attempt, the fence and the lease.
    pub fn on_hand_off(self: &Arc<Self>, message: &[u8]) {
        let Some((attempt, message)) =
            std::str::from_utf8(message).ok().and_then(|text| text.split_at_checked(32))
        else {
            return;
        };
        let waiter = self.state().waiters.get(attempt).cloned();
        if let Some(waiter) = waiter {
            waiter.confirm_hand_off(self, HandOffMessage::read(message));
        }
    }

    /// The connection is closed; messages may be lost.
    pub fn on_disconnect(&self) {
        let mut state = self.state();
        state.subscribed = false;
        state.losses += 1;
        state.poll_all_now();
        self.wake.notify_one();
    }

    /// Whether a guard was made for this attempt without the server having confirmed it.
    pub fn is_unconfirmed(&self, attempt: &str) -> bool {
        self.state().unconfirmed.contains_key(attempt)
    }

    pub fn forget_unconfirmed(&self, attempt: &str) {
        self.state().unconfirmed.remove(attempt);
    }

    fn expect(&self, group: KeyGroup, at: Instant) {
        let mut state = self.state();
        let subscribed = state.subscribed;
        if let Some(poll) = state.polls.get_mut(&group)
            && (at < poll.due || !subscribed)
        {
            poll.due = poll.due.min(at);
            self.wake.notify_one();
        }
    }
}

impl WaiterHandle<'_> {
    /// Records that the server has the waiter in the queues of these keys. `ends`: when the lease of the first holder ends, unless
    /// the holder renews. `woken`: the arguments of the request that confirms a hand-off.
    pub fn enter_queue(
        &mut self,
        group: KeyGroup,
        keys: &[String],
        woken: Vec<Vec<u8>>,
        since: QueuedAt,
        ends: Option<Duration>,
    ) {
        let request = ConfirmRequest { group, keys: keys.to_vec(), args: woken };
        let mut hand_off = self.waiter.hand_off();
        (hand_off.request, hand_off.confirming, hand_off.outcome) = (Some(request), None, None);
        hand_off.since = hand_off.since.max(since);
        drop(hand_off);
        if self.queue_keys.is_empty() {
            let mut state = self.waiters.state();
            for key in keys {
                let queue_key = (group, key.clone());
                let queue = state.queues.entry(queue_key.clone()).or_default();
                queue.insert(self.waiter.number, self.waiter.clone());
                let new = queue.len() == 1;
                self.queue_keys.push(queue_key);
                if new {
                    let due = Instant::now() + self.waiters.poll;
                    let fresh = || GroupPoll { queue_keys: 0, due, last: None, in_flight: false };
                    state.polls.entry(group).or_insert_with(fresh).queue_keys += 1;
                    self.waiters.wake.notify_one();
                }
            }
        }
        let soon = ends.map_or(Duration::from_secs(1), |ends| ends + Duration::from_millis(1));
        self.waiters.expect(group, Instant::now() + soon);
    }

    /// Waits until there is an outcome, or until the caller should send the request again.
    pub async fn woken(&self) {
        self.waiter.woken.notified().await;
    }

    /// The caller sends the request itself now, so a message that arrives meanwhile starts no confirmation.
    pub fn begin_request(&self) {
        self.waiter.hand_off().request = None;
    }

    /// Whether a confirmation is in flight: then its outcome follows.
    pub fn is_confirming(&self) -> bool {
        let hand_off = self.waiter.hand_off();
        hand_off.confirming.is_some() && hand_off.outcome.is_none()
    }

    /// Takes the outcome of a hand-off, if there was one.
    pub fn take_outcome(&self) -> Option<HandOffOutcome> {
        self.waiter.hand_off().outcome.take()
    }

    /// Records that the caller has the lock. `unconfirmed`: it has a minimum hold, and the server may not have the confirmation yet.
    pub fn keep(&self, unconfirmed: bool) {
        self.waiter.kept.store(true, Ordering::SeqCst);
        if unconfirmed {
            let (mut state, now) = (self.waiters.state(), Instant::now());
            // No hold stays unconfirmed for longer than the longest claim.
            state.unconfirmed.retain(|_, since| *since + Options::CLAIM_MOST > now);
            state.unconfirmed.insert(self.waiter.attempt.clone(), now);
        }
    }
}

impl Drop for WaiterHandle<'_> {
    fn drop(&mut self) {
        // The confirmation of a waiter that has the lock goes on.
        if !self.waiter.kept.load(Ordering::SeqCst)
            && let Some(task) = self.waiter.hand_off().confirming.take()
        {
            task.abort();
        }
        let mut state = self.waiters.state();
        self.waiters.ttls.remove(self.waiter.ttl);
        // A newer request of the same attempt may have replaced the waiter.
        if state.waiters.get(&self.waiter.attempt).is_some_and(|other| Arc::ptr_eq(other, &self.waiter)) {
            state.waiters.remove(&self.waiter.attempt);
        }
        for queue_key in &self.queue_keys {
            if let Some(queue) = state.queues.get_mut(queue_key) {
                queue.remove(&self.waiter.number);
                if queue.is_empty() {
                    state.queues.remove(queue_key);
                    if let Some(poll) = state.polls.get_mut(&queue_key.0) {
                        poll.queue_keys -= 1;
                        if poll.queue_keys == 0 {
                            state.polls.remove(&queue_key.0);
                        }
                    }
                }
            }
        }
    }
}
