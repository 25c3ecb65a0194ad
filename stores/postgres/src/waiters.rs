//! The waiters of this process: their requests, their queue entries, and what wakes them.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::{Duration, Instant};

use lockkeeper_core::{IgnorePoison, RequestKey};
use lockkeeper_store_kit::WaiterTtls;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::batch::{BatchSender, RequestParams, RequestReply};
use crate::codec::{hash, hex};
use crate::config::Options;
use crate::connection::Connection;
use crate::error::Failure;
use crate::listener::NotificationListener;

/// The waiters of this process.
pub(crate) struct Waiters {
    pub options: Arc<Options>,
    pub connection: Arc<Connection>,
    pub listener: Arc<NotificationListener>,
    pub batch: Arc<BatchSender>,
    pub ttls: Arc<WaiterTtls>,
    /// The id of this process in the database.
    pub client: String,
    pub state: Mutex<WaiterTable>,
    /// Wakes the loop that polls (see [`crate::poll`]).
    pub changed: Notify,
    /// Wakes the loop that listens.
    pub must_listen: Notify,
}

#[derive(Default)]
pub(crate) struct WaiterTable {
    /// By the hash of the attempt, in hexadecimal digits.
    pub waiters: HashMap<String, Arc<QueuedWaiter>>,
    /// How many waiters of this process are in the queue of each name.
    pub names: BTreeMap<String, usize>,
    pub listening: bool,
    /// How often a listening connection has ended.
    pub disconnects: u64,
    /// Notifications may have been lost since all waiters sent their last request.
    pub missed: bool,
    pub next_poll: Option<Instant>,
}

pub(crate) struct QueuedWaiter {
    attempt: String,
    ttl: Duration,
    pub woken: Notify,
    wake: Mutex<WakeProgress>,
}

/// The state of a waiter that is woken. The thread that receives the notification submits the waiter's request at once: the waiter's own
/// task may be slow to wake.
#[derive(Default)]
struct WakeProgress {
    /// The request to send when the waiter is woken; `None` if it is not in the queue.
    request: Option<RequestParams>,
    /// `alive_since` of this process when the waiter was enqueued.
    alive_since: Option<i64>,
    in_flight: Option<AbortHandle>,
    /// The request was released: nothing may be sent for it any more, or an entry without a waiter would stay in the queue.
    released: bool,
    reply: Option<Result<RequestReply, Failure>>,
}

impl QueuedWaiter {
    fn wake(&self) -> MutexGuard<'_, WakeProgress> {
        self.wake.lock().ignore_poison()
    }

    /// Submits the waiter's request if it is in the queue and has no request in flight; else lets the waiter send one itself.
    fn resume(self: &Arc<Self>, batch: &BatchSender, runtime: &Handle) {
        let mut wake = self.wake();
        if wake.in_flight.is_some() || wake.released {
            return;
        }
        let Some(request) = wake.request.take() else { return self.woken.notify_one() };
        let (waiter, pending) = (self.clone(), batch.submit(request));
        let task = runtime.spawn(async move {
            let reply = pending.reply().await;
            waiter.wake().reply = Some(reply);
            waiter.woken.notify_one();
        });
        wake.in_flight = Some(task.abort_handle());
    }

    /// Whether the waiter was enqueued before `alive_since`, so that its entry may be lost.
    pub fn enqueued_before(&self, alive_since: i64) -> bool {
        let wake = self.wake();
        wake.request.is_some() && wake.alive_since != Some(alive_since)
    }
}

/// The handle of a waiter. Dropping it stops waiting, but leaves the queue entry: a release removes that.
pub(crate) struct WaiterHandle<'a> {
    waiters: &'a Waiters,
    waiter: Arc<QueuedWaiter>,
    names: Vec<String>,
    enqueued: bool,
}

/// The reply to a request that is in the queue.
pub(crate) struct QueuePosition {
    /// Since when the process of the waiter has been alive, without a gap.
    pub alive_since: Option<i64>,
    /// How long until the state changes by itself.
    pub changes_in: Option<Duration>,
}

impl Waiters {
    pub fn state(&self) -> MutexGuard<'_, WaiterTable> {
        self.state.lock().ignore_poison()
    }

    /// Registers a waiter, before its request is sent: a notification may come at once.
    pub fn register(&self, key: &RequestKey, ttl: Duration) -> WaiterHandle<'_> {
        let attempt = hex(&hash(&key.attempt));
        let waiter = Arc::new(QueuedWaiter { attempt, ttl, woken: Notify::new(), wake: Mutex::default() });
        self.ttls.add(ttl);
        self.state().waiters.insert(waiter.attempt.clone(), waiter.clone());
        let names = key.names.iter().map(|name| name.as_str().to_owned()).collect();
        WaiterHandle { waiters: self, waiter, names, enqueued: false }
    }

    /// Ends a waiter whose request is being released: the release is sent after all its requests.
    pub fn end(&self, key: &RequestKey) {
        let state = self.state();
        if state.waiters.is_empty() {
            return;
        }
        if let Some(waiter) = state.waiters.get(&hex(&hash(&key.attempt))) {
            waiter.wake().released = true;
            waiter.woken.notify_one();
        }
    }

    /// A notification for a waiter: it is the first in the queue, or holds the lock already. Every role of the database may send one, so it
    /// is only a wake-up: the waiter's request finds out what is true.
    pub fn wake(&self, attempt: &str) {
        let waiter = self.state().waiters.get(attempt).cloned();
        // A waiter that has ended releases what it was granted.
        if let Some(waiter) = waiter {
            self.resume(&waiter);
        }
    }

    /// Sends the waiter's request, or lets the waiter do it.
    pub fn resume(&self, waiter: &Arc<QueuedWaiter>) {
        waiter.resume(&self.batch, self.connection.runtime());
    }

    /// The listening connection has ended, and notifications may have been lost.
    pub fn on_disconnect(&self) {
        let mut state = self.state();
        state.missed |= std::mem::take(&mut state.listening);
        state.disconnects += 1;
        state.next_poll = Some(Instant::now());
        self.changed.notify_one();
    }
}

impl WaiterHandle<'_> {
    /// The waiter is in the queue. `request` is sent when it is woken.
    pub fn set_enqueued(&mut self, request: RequestParams, position: QueuePosition) {
        let QueuePosition { alive_since, changes_in } = position;
        let mut wake = self.waiter.wake();
        *wake = WakeProgress {
            request: Some(request),
            alive_since,
            released: wake.released,
            ..WakeProgress::default()
        };
        drop(wake);
        let mut state = self.waiters.state();
        if !std::mem::replace(&mut self.enqueued, true) {
            for name in &self.names {
                *state.names.entry(name.clone()).or_default() += 1;
            }
        }
        let pause = changes_in.map_or(Duration::from_secs(1), |change| change + Duration::from_millis(1));
        let at = Instant::now() + pause;
        if state.next_poll.is_none_or(|due| at < due) || !state.listening {
            state.next_poll = Some(state.next_poll.map_or(at, |due| due.min(at)));
            self.waiters.changed.notify_one();
        }
    }

    /// Ends when the waiter is woken.
    pub async fn woken(&self) {
        self.waiter.woken.notified().await;
    }

    /// Takes over from the wake-up: from now on the waiter's own task sends the request. `false` if a request is in flight already: then
    /// the task waits for its reply.
    pub fn take_over(&self) -> bool {
        let mut wake = self.waiter.wake();
        wake.request = None;
        wake.in_flight.is_none()
    }

    /// The reply to the request that a wake-up sent, if there is one.
    pub fn take_reply(&self) -> Option<Result<RequestReply, Failure>> {
        let mut wake = self.waiter.wake();
        let reply = wake.reply.take();
        if reply.is_some() {
            wake.in_flight = None;
        }
        reply
    }

    /// Whether the request was released.
    pub fn is_released(&self) -> bool {
        self.waiter.wake().released
    }

    /// Sends a request; `None` if it was released. The first poll happens under the lock of [`Waiters::end`], so a release is sent after it.
    pub async fn send(&self, params: RequestParams) -> Option<Result<RequestReply, Failure>> {
        let mut send = pin!(self.waiters.batch.send(params));
        let begun = poll_fn(|cx| {
            let wake = self.waiter.wake();
            Poll::Ready((!wake.released).then(|| send.as_mut().poll(cx)))
        });
        match begun.await? {
            Poll::Ready(reply) => Some(reply),
            Poll::Pending => Some(send.await),
        }
    }
}

impl Drop for WaiterHandle<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.waiter.wake().in_flight.take() {
            task.abort();
        }
        let mut state = self.waiters.state();
        self.waiters.ttls.remove(self.waiter.ttl);
        // The same attempt may have registered again meanwhile.
        if state.waiters.get(&self.waiter.attempt).is_some_and(|other| Arc::ptr_eq(other, &self.waiter)) {
            state.waiters.remove(&self.waiter.attempt);
        }
        for name in self.names.iter().filter(|_| self.enqueued) {
            if let Some(count) = state.names.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    state.names.remove(name);
                }
            }
        }
    }
}
