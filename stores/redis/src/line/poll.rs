//! The one task that looks after all waiters of a process: it listens, polls, and says that the process is still there.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Value, cmd};

use super::{Since, Waiter};
use crate::layout::Group;
use crate::script::{Call, POLL};
use crate::store::Shared;

/// A lock taken by another client is released without a message to us: it is looked at more often.
const FOREIGN: Duration = Duration::from_millis(100);
/// How many names one script looks at.
const BATCH: usize = 200;

/// Runs for as long as the store is open.
pub async fn attend(shared: Arc<Shared>) {
    let line = &shared.line;
    let (mut looks, mut subscribing) = (FuturesUnordered::new(), FuturesUnordered::new());
    let mut subscribe_at = Instant::now();
    loop {
        let (next, subscribed) = {
            let desk = line.desk();
            (desk.next(), desk.subscribed || desk.polls.is_empty())
        };
        if !subscribed && subscribing.is_empty() && subscribe_at <= Instant::now() {
            subscribing.push(subscribe(&shared));
        }
        let resubscribe = !subscribed && subscribing.is_empty();
        tokio::select! {
            () = sleep_until(next) => {
                let due = line.desk().begin_looks(shared.options.poll);
                looks.extend(due.into_iter().map(|group| look(&shared, group)));
            }
            Some(()) = looks.next(), if !looks.is_empty() => {}
            Some(()) = subscribing.next(), if !subscribing.is_empty() => {
                subscribe_at = Instant::now() + shared.options.poll;
            }
            () = sleep_until(Some(subscribe_at)), if resubscribe => {}
            () = line.ring.notified() => {}
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Any node will do: messages of a cluster reach all of them.
async fn subscribe(shared: &Shared) {
    let losses = shared.line.desk().losses;
    match shared.fleet.call_any(cmd("SUBSCRIBE").arg(shared.wake_channel())).await {
        Ok(_) => {
            let mut desk = shared.line.desk();
            desk.subscribed = desk.losses == losses;
            // What was said before we listened was not heard.
            desk.look_at_all();
        }
        Err(failure) => {
            tracing::warn!(
                ?failure,
                "no messages: waiting goes on by looking every {:?}",
                shared.options.poll
            );
        }
    }
}

/// Looks at everything of a group that is waited for, once, whatever the number of those who wait.
async fn look(shared: &Arc<Shared>, group: Group) {
    let spots: Vec<(Group, String)> = {
        let desk = shared.line.desk();
        let from = desk.lines.range((group, String::new())..).map(|(spot, _)| spot);
        from.take_while(|spot| spot.0 == group).cloned().collect()
    };
    let looks = spots.chunks(BATCH).map(|batch| look_at(shared, batch));
    let next = futures_util::future::join_all(looks).await.into_iter().flatten().min();
    let soonest = next.unwrap_or(shared.options.poll).min(shared.options.poll);
    let now = Instant::now();
    if let Some(poll) = shared.line.desk().polls.get_mut(&group) {
        (poll.looking, poll.last) = (false, Some(now));
        poll.due = poll.due.min(now + soonest);
    }
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
        for waiter in batch.iter().filter_map(|spot| desk.lines.get(spot)).flat_map(BTreeMap::values) {
            waiter.called.notify_one();
        }
        return Some(shared.options.poll);
    }
    let mut soonest = shared.options.poll;
    let [_, Value::Int(fence), Value::Array(let_in) | Value::Set(let_in), states @ ..] = &answer[..] else {
        return None;
    };
    let since = Since { sent_at, fence: u64::try_from(*fence).unwrap_or(u64::MAX) };
    let attempts = let_in.iter().filter_map(|attempt| match attempt {
        Value::BulkString(attempt) => std::str::from_utf8(attempt).ok(),
        _ => None,
    });
    // The message to these was lost, or they have not confirmed yet.
    let let_in: HashSet<&str> = attempts.collect();
    for waiter in let_in.iter().filter_map(|attempt| desk.waiters.get(*attempt)) {
        waiter.answer_the_call(shared, None);
    }
    for (spot, state) in batch.iter().zip(states) {
        let Value::Array(state) = state else { continue };
        let [Value::Int(state), Value::Int(pttl)] = &state[..] else { continue };
        // The others were in the queue when the server looked.
        for waiter in desk.lines.get(spot).into_iter().flat_map(BTreeMap::values) {
            let mut claim = waiter.claim();
            if claim.order.is_some() && !let_in.contains(&*waiter.attempt) {
                claim.since = claim.since.max(since);
            }
        }
        match *state {
            // Free, and still there are waiters: the queue was lost. The first asks again.
            0 => _ = first_of(desk.lines.get(spot)).inspect(|one| one.called.notify_one()),
            2 => soonest = soonest.min(FOREIGN),
            _ => {}
        }
        if let Ok(pttl) = u64::try_from(*pttl) {
            soonest = soonest.min(Duration::from_millis(pttl + 1));
        }
    }
    Some(soonest)
}

fn first_of(queue: Option<&BTreeMap<u64, Arc<Waiter>>>) -> Option<&Arc<Waiter>> {
    queue?.values().next()
}
