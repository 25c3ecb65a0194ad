//! The two loops for all waiters of this process: one polls, which is also the heartbeat, and one listens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join;
use lockkeeper_host::random_128;
use serde::Deserialize;

use crate::codec::micros;
use crate::statements::POLL;
use crate::waiters::Waiters;

/// How often a process polls that notifications do not reach.
pub(crate) const POLL_WITHOUT_NOTIFY: Duration = Duration::from_millis(250);
/// The least time between two polls.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The reply of the SQL function `poll`.
#[derive(Deserialize)]
struct PollReply {
    /// Since when this process has been alive, without a gap.
    alive_since: Option<i64>,
    /// The waiters of this process that are first in a queue.
    first: Vec<FirstWaiter>,
    /// The attempts that were granted one of the names lately, of any process.
    granted: Vec<String>,
}

#[derive(Deserialize)]
struct FirstWaiter {
    attempt: String,
    ready: bool,
    changes_in: Option<u64>,
}

/// Listens and polls for the waiters for as long as the store is open.
pub(crate) async fn run(waiters: Arc<Waiters>) {
    // Two loops: if the server is slow to reply to LISTEN, the waiters still poll, because each poll is also the heartbeat of this process,
    // without which its queue entries end.
    join(waiters.keep_polling(), waiters.keep_listening()).await;
}

/// The duration, a quarter more or less, so that many processes do not poll in step.
pub(crate) fn jitter(duration: Duration) -> Duration {
    duration * 3 / 4 + duration / 2 * u32::from(random_128()[0]) / 255
}

impl Waiters {
    /// Polls whenever a poll is due, while there are waiters.
    async fn keep_polling(&self) {
        let mut last = Instant::now();
        loop {
            let (any, due, listening) = {
                let mut state = self.state();
                if state.names.is_empty() {
                    // No poll is due, so that the next waiter wakes this loop.
                    state.next_poll = None;
                }
                (!state.names.is_empty(), state.next_poll, state.listening)
            };
            if !any {
                self.changed.notified().await;
                continue;
            }
            if !listening {
                self.must_listen.notify_one();
            }
            let poll = self.options.poll;
            let interval = if listening { poll } else { jitter(POLL_WITHOUT_NOTIFY.min(poll)) };
            let due = due.unwrap_or(last + interval).min(last + interval).max(last + MIN_POLL_INTERVAL);
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => last = self.poll().await,
                () = self.changed.notified() => {}
            }
        }
    }

    /// Listens for notifications whenever there are waiters and no connection that listens.
    async fn keep_listening(&self) {
        loop {
            // After a failure the other loop says when to try again: it polls all the more often meanwhile.
            self.must_listen.notified().await;
            let (must_listen, disconnects) = {
                let state = self.state();
                (!state.names.is_empty() && !state.listening, state.disconnects)
            };
            let listener = &self.listener;
            if must_listen && listener.works() && listener.listen(&listener.wake_channel()).await {
                let mut state = self.state();
                // The connection may have ended already, which is reported once only.
                state.listening = state.disconnects == disconnects;
                // Notifications from before the LISTEN were not delivered.
                state.next_poll = Some(Instant::now());
                self.changed.notify_one();
            }
        }
    }

    /// Polls once for all waiters, and wakes those that have something to do.
    async fn poll(&self) -> Instant {
        let (names, listening, missed): (Vec<String>, bool, bool) = {
            let mut state = self.state();
            state.next_poll = None;
            (state.names.keys().cloned().collect(), state.listening, std::mem::take(&mut state.missed))
        };
        let reply = self.send_poll(listening, &names).await;
        let now = Instant::now();
        let mut state = self.state();
        let mut soonest = self.options.poll;
        state.missed |= missed && reply.is_none();
        match reply {
            // Notifications may have been lost: every waiter sends its request again.
            Some(_) if missed => state.waiters.values().for_each(|waiter| waiter.woken.notify_one()),
            Some(reply) => {
                // This process was silent for too long, or the server's tables were lost: a waiter from before may have lost its entry.
                if let Some(alive_since) = reply.alive_since {
                    state
                        .waiters
                        .values()
                        .filter(|waiter| waiter.enqueued_before(alive_since))
                        .for_each(|waiter| waiter.woken.notify_one());
                }
                // A waiter that was handed the lock is in no queue any more: if its notification was lost, this wakes it.
                for waiter in reply.granted.iter().filter_map(|attempt| state.waiters.get(attempt)) {
                    self.resume(waiter);
                }
                for FirstWaiter { attempt, ready, changes_in } in reply.first {
                    if let Some(waiter) = state.waiters.get(&attempt).filter(|_| ready) {
                        self.resume(waiter);
                    }
                    if let Some(change) = changes_in {
                        soonest = soonest.min(Duration::from_micros(change) + Duration::from_millis(1));
                    }
                }
            }
            None => soonest = soonest.min(POLL_WITHOUT_NOTIFY),
        }
        let at = now + soonest;
        state.next_poll = Some(state.next_poll.map_or(at, |due| due.min(at)));
        now
    }

    async fn send_poll(&self, listening: bool, names: &[String]) -> Option<PollReply> {
        let rows = async {
            let session = self.connection.session().await?;
            let claim = micros(self.ttls.entry_life(self.options.claim, self.options.poll));
            session.rows(&POLL, &[&self.client, &session.epoch(), &claim, &listening, &names]).await
        };
        match rows.await {
            Ok(rows) => serde_json::from_str(rows.first()?.try_get(0).ok()?).ok(),
            Err(failure) => {
                if failure.is_missing() {
                    self.connection.repair_schema();
                }
                tracing::debug!(?failure, "the poll of the queues failed; polling again");
                None
            }
        }
    }
}
