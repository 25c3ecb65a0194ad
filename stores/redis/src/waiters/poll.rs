//! Polls the queues of this process: one task keeps its queue entries alive, finds hand-offs whose message was lost, and
//! makes the server grant locks whose holder ended without a release.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Value, cmd};

use super::{QueuedAt, RedisWaiter, Waiters};
use crate::keys::KeyGroup;
use crate::runner::sleep_until;
use crate::statements::millis;
use crate::statements::{POLL, ScriptCall};

/// Another lock client releases without a message, so the process polls more often at its locks.
const FOREIGN_POLL: Duration = Duration::from_millis(100);
/// How many names one script polls at.
const KEYS_PER_POLL: usize = 200;

/// Runs for as long as the store is open.
pub(crate) async fn run(waiters: Arc<Waiters>) {
    let waiters = &waiters;
    let (mut polls, mut subscribing) = (FuturesUnordered::new(), FuturesUnordered::new());
    let mut subscribe_at = Instant::now();
    loop {
        let (next, subscribed) = {
            let state = waiters.state();
            (state.next(), state.subscribed || state.polls.is_empty())
        };
        if !subscribed && subscribing.is_empty() && subscribe_at <= Instant::now() {
            subscribing.push(subscribe(waiters));
        }
        let resubscribe = !subscribed && subscribing.is_empty();
        tokio::select! {
            () = sleep_until(next) => {
                let due = waiters.state().begin_polls(waiters.runner.options.poll);
                polls.extend(due.into_iter().map(|group| poll_group(waiters, group)));
            }
            Some(()) = polls.next(), if !polls.is_empty() => {}
            Some(()) = subscribing.next(), if !subscribing.is_empty() => {
                subscribe_at = Instant::now() + waiters.runner.options.poll;
            }
            () = sleep_until(Some(subscribe_at)), if resubscribe => {}
            () = waiters.wake.notified() => {}
        }
    }
}

/// Any node will do: messages of a cluster reach all of them.
async fn subscribe(waiters: &Arc<Waiters>) {
    let losses = waiters.state().losses;
    match waiters.runner.router.call_any(cmd("SUBSCRIBE").arg(waiters.runner.wake_channel())).await {
        Ok(_) => {
            let mut state = waiters.state();
            state.subscribed = state.losses == losses;
            // The client has not received the messages from before the subscription.
            state.poll_all_now();
        }
        Err(failure) => {
            tracing::warn!(
                ?failure,
                "cannot subscribe to hand-offs; the waiters poll every {:?} until it works",
                waiters.runner.options.poll
            );
        }
    }
}

/// Polls all names of a group that have waiters, once, whatever the number of the waiters.
async fn poll_group(waiters: &Arc<Waiters>, group: KeyGroup) {
    let queue_keys: Vec<(KeyGroup, String)> = {
        let state = waiters.state();
        let from = state.queues.range((group, String::new())..).map(|(queue_key, _)| queue_key);
        from.take_while(|queue_key| queue_key.0 == group).cloned().collect()
    };
    let polls = queue_keys.chunks(KEYS_PER_POLL).map(|batch| poll_keys(waiters, batch));
    let next = futures_util::future::join_all(polls).await.into_iter().flatten().min();
    let soonest = next.unwrap_or(waiters.runner.options.poll).min(waiters.runner.options.poll);
    let now = Instant::now();
    if let Some(poll) = waiters.state().polls.get_mut(&group) {
        (poll.in_flight, poll.last) = (false, Some(now));
        poll.due = poll.due.min(now + soonest);
    }
}

/// Polls some names of one group. Returns when the next poll is worth it.
async fn poll_keys(waiters: &Arc<Waiters>, batch: &[(KeyGroup, String)]) -> Option<Duration> {
    let (group, sent_at) = (batch[0].0, waiters.runner.options.clock.now());
    let names: Vec<&str> = batch.iter().map(|(_, key)| key.as_str()).collect();
    let call = ScriptCall::new(&POLL, &waiters.runner.script_keys(group, &names))
        .arg(waiters.runner.keys.group_prefix(group))
        .arg(waiters.runner.claim_ms())
        .arg(&waiters.runner.client)
        .arg(millis(waiters.entry_life(waiters.runner.options.claim)));
    let call = waiters.longest_waiting(batch).iter().fold(call, |call, attempt| call.arg(attempt));
    let answer = match waiters.runner.run(group, &call).await {
        Ok(Value::Array(answer)) => answer,
        other => {
            tracing::warn!(?other, "poll failed; the waiters of the group poll again");
            return None;
        }
    };
    let state = waiters.state();
    if matches!(answer.first(), Some(Value::Int(0))) {
        // The queue entries expired, or the server lost them: all waiters send their requests again.
        for waiter in
            batch.iter().filter_map(|queue_key| state.queues.get(queue_key)).flat_map(BTreeMap::values)
        {
            waiter.woken.notify_one();
        }
        return Some(waiters.runner.options.poll);
    }
    let mut soonest = waiters.runner.options.poll;
    let [_, Value::Int(fence), Value::Array(let_in) | Value::Set(let_in), replies @ ..] = &answer[..] else {
        return None;
    };
    let since = QueuedAt { sent_at, fence: u64::try_from(*fence).unwrap_or(u64::MAX) };
    let attempts = let_in.iter().filter_map(|attempt| match attempt {
        Value::BulkString(attempt) => std::str::from_utf8(attempt).ok(),
        _ => None,
    });
    // The message to these waiters was lost, or they have not confirmed yet.
    let let_in: HashSet<&str> = attempts.collect();
    for waiter in let_in.iter().filter_map(|attempt| state.waiters.get(*attempt)) {
        waiter.confirm_hand_off(waiters, None);
    }
    for (queue_key, reply) in batch.iter().zip(replies) {
        let Value::Array(reply) = reply else { continue };
        let [Value::Int(held), Value::Int(pttl), Value::Int(kept)] = &reply[..] else { continue };
        let queue = state.queues.get(queue_key).into_iter().flat_map(BTreeMap::values);
        for waiter in queue.filter(|waiter| !let_in.contains(&*waiter.attempt)) {
            let mut hand_off = waiter.hand_off();
            if hand_off.request.is_none() {
                continue;
            }
            if *kept == 0 && hand_off.since.sent_at < sent_at {
                // One waiter has lost its entry, so all of them send their requests again. Existing entries stay where they are.
                waiter.woken.notify_one();
            } else if *kept != 0 {
                // The waiter was in the queue when the server looked.
                hand_off.since = hand_off.since.max(since);
            }
        }
        match *held {
            // The lock is free although there are waiters: the queue was lost. The first waiter sends its request again.
            0 => _ = first_of(state.queues.get(queue_key)).inspect(|one| one.woken.notify_one()),
            2 => soonest = soonest.min(FOREIGN_POLL),
            _ => {}
        }
        if let Ok(pttl) = u64::try_from(*pttl) {
            soonest = soonest.min(Duration::from_millis(pttl + 1));
        }
    }
    Some(soonest)
}

impl Waiters {
    /// For each key the attempt of the waiter that has waited longest, of those that no hand-off has woken; empty if there is none.
    fn longest_waiting(&self, queue_keys: &[(KeyGroup, String)]) -> Vec<String> {
        let state = self.state();
        let longest = |queue_key| {
            let mut waiters = state.queues.get(queue_key)?.values();
            waiters.find(|waiter| waiter.hand_off().request.is_some()).map(|waiter| waiter.attempt.clone())
        };
        queue_keys.iter().map(|queue_key| longest(queue_key).unwrap_or_default()).collect()
    }
}

fn first_of(queue: Option<&BTreeMap<u64, Arc<RedisWaiter>>>) -> Option<&Arc<RedisWaiter>> {
    queue?.values().next()
}
