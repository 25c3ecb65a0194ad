//! Those of this process who stand in line, and the one task that looks after all of them.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use lockkeeper_core::Claim;
use lockkeeper_host::random_128;
use serde::Deserialize;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::entry::{hash, hex, micros};
use crate::fault::Failure;
use crate::lane::{Answer, Order};
use crate::script::LOOK;
use crate::store::Shared;

/// How often a process looks where no messages come.
pub(crate) const DEAF: Duration = Duration::from_millis(250);
/// The least time between two looks.
const LEAST: Duration = Duration::from_millis(10);

/// Everybody of this process who waits.
#[derive(Default)]
pub(crate) struct Line {
    desk: Mutex<Desk>,
    ring: Notify,
}

#[derive(Default)]
struct Desk {
    /// By the hash of the attempt, in hexadecimal digits.
    waiters: HashMap<String, Arc<Waiter>>,
    /// How many of us wait for which name.
    names: BTreeMap<String, usize>,
    listening: bool,
    /// How often a connection that could have brought messages has ended.
    ends: u64,
    /// Messages may have been lost since everybody asked last.
    missed: bool,
    due: Option<Instant>,
}

struct Waiter {
    key: String,
    called: Notify,
    turn: Mutex<Turn>,
}

/// How a waiter that is called takes its turn. Whoever hears the call does it, at once, on the thread where it is heard: the
/// waiter's own task may be slow to wake.
#[derive(Default)]
struct Turn {
    order: Option<Order>,
    /// Since when our process had been there when it was told that it stands in line.
    since: Option<i64>,
    under_way: Option<AbortHandle>,
    /// Somebody took the ask back: nothing is sent for it any more, or it would stand in line for nobody.
    left: bool,
    answer: Option<Result<Answer, Failure>>,
}

impl Waiter {
    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes its turn if it stands in line and has not done so already; else lets it ask by itself.
    fn take_turn(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut turn = self.turn();
        if turn.under_way.is_some() || turn.left {
            return;
        }
        let Some(order) = turn.order.take() else { return self.called.notify_one() };
        let (waiter, posted) = (self.clone(), shared.lane.post(order));
        let task = shared.link.reactor().spawn(async move {
            let answer = posted.answer().await;
            waiter.turn().answer = Some(answer);
            waiter.called.notify_one();
        });
        turn.under_way = Some(task.abort_handle());
    }

    /// Whether it took its place while our process was not there yet, or not yet again, by what is known now.
    fn came_before(&self, since: i64) -> bool {
        let turn = self.turn();
        turn.order.is_some() && turn.since != Some(since)
    }
}

/// A place in line. Dropping it gives up waiting, not the place: that is what a release is for.
pub(crate) struct Place<'a> {
    line: &'a Line,
    waiter: Arc<Waiter>,
    names: Vec<String>,
    stands: bool,
}

/// What one who stands in line is told.
pub(crate) struct Spot {
    /// Since when its process has been there, without a gap.
    pub since: Option<i64>,
    /// How long until something changes by itself.
    pub ends: Option<Duration>,
}

/// What `look` says.
#[derive(Deserialize)]
struct Seen {
    /// Since when our process has been there, without a gap.
    since: Option<i64>,
    names: Vec<First>,
    /// The attempts that were granted one of the names lately, of whatever process.
    granted: Vec<String>,
}

/// A name for which one of us is the first in line.
#[derive(Deserialize)]
struct First {
    first: String,
    ready: bool,
    ends: Option<u64>,
}

impl Line {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to listen for an attempt, before anything is sent: it may be called at once.
    pub fn join(&self, claim: &Claim) -> Place<'_> {
        let key = hex(&hash(&claim.attempt));
        let waiter = Arc::new(Waiter { key, called: Notify::new(), turn: Mutex::default() });
        self.desk().waiters.insert(waiter.key.clone(), waiter.clone());
        let names = claim.names.iter().map(|name| name.as_str().to_owned()).collect();
        Place { line: self, waiter, names, stands: false }
    }

    /// The ask is to end, wherever it is: what is sent after this is sent after all of it.
    pub fn leave(&self, claim: &Claim) {
        let desk = self.desk();
        if desk.waiters.is_empty() {
            return;
        }
        if let Some(waiter) = desk.waiters.get(&hex(&hash(&claim.attempt))) {
            waiter.turn().left = true;
            waiter.called.notify_one();
        }
    }

    /// A message for a waiter of this process: it is the first in the queue, or holds the lock already. Every role of the database
    /// may send such a message, so it is only a wake-up: the waiter asks the database what is true.
    pub fn call(&self, shared: &Arc<Shared>, key: &str) {
        let waiter = self.desk().waiters.get(key).cloned();
        // A waiter that has left gives back what it was given.
        if let Some(waiter) = waiter {
            waiter.take_turn(shared);
        }
    }

    /// No messages come any more, and perhaps one was lost.
    pub fn deaf(&self) {
        let mut desk = self.desk();
        desk.missed |= std::mem::take(&mut desk.listening);
        desk.ends += 1;
        desk.due = Some(Instant::now());
        self.ring.notify_one();
    }
}

impl Place<'_> {
    /// It stands in line now. `order` is what to send when it is called.
    pub fn stand(&mut self, order: Order, Spot { since, ends }: Spot) {
        let mut turn = self.waiter.turn();
        *turn = Turn { order: Some(order), since, left: turn.left, ..Turn::default() };
        drop(turn);
        let mut desk = self.line.desk();
        if !std::mem::replace(&mut self.stands, true) {
            for name in &self.names {
                *desk.names.entry(name.clone()).or_default() += 1;
            }
        }
        let at = Instant::now() + ends.map_or(Duration::from_secs(1), |ends| ends + Duration::from_millis(1));
        if desk.due.is_none_or(|due| at < due) || !desk.listening {
            desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
            self.line.ring.notify_one();
        }
    }

    /// Ends when it is worth asking again.
    pub async fn called(&self) {
        self.waiter.called.notified().await;
    }

    /// It asks by itself now: a call that comes meanwhile does not do it too. Unless that is done already: then it is to wait
    /// for the answer.
    pub fn ask(&self) -> bool {
        let mut turn = self.waiter.turn();
        turn.order = None;
        turn.under_way.is_none()
    }

    /// What became of a call, if there was one.
    pub fn answer(&self) -> Option<Result<Answer, Failure>> {
        let mut turn = self.waiter.turn();
        let answer = turn.answer.take();
        if answer.is_some() {
            turn.under_way = None;
        }
        answer
    }

    /// Whether somebody took the ask back.
    pub fn left(&self) -> bool {
        self.waiter.turn().left
    }

    /// Sends an ask, unless somebody took it back. What is sent after that is sent after it: it leaves while nobody can take it back.
    pub async fn send(&self, shared: &Shared, order: Order) -> Option<Result<Answer, Failure>> {
        let mut send = pin!(shared.send(order));
        let left = poll_fn(|cx| {
            let turn = self.waiter.turn();
            Poll::Ready((!turn.left).then(|| send.as_mut().poll(cx)))
        });
        match left.await? {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => Some(send.await),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.waiter.turn().under_way.take() {
            task.abort();
        }
        let mut desk = self.line.desk();
        // The same attempt may have asked again meanwhile.
        if desk.waiters.get(&self.waiter.key).is_some_and(|other| Arc::ptr_eq(other, &self.waiter)) {
            desk.waiters.remove(&self.waiter.key);
        }
        for name in self.names.iter().filter(|_| self.stands) {
            if let Some(count) = desk.names.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    desk.names.remove(name);
                }
            }
        }
    }
}

/// Looks after the line for as long as the store is open: listens, polls, and says that we are still there.
pub(crate) async fn attend(shared: Arc<Shared>) {
    let line = &shared.line;
    let mut last = Instant::now();
    loop {
        let (busy, due, listening, ends) = {
            let mut desk = line.desk();
            if desk.names.is_empty() {
                // Nothing is due, so that the next one who comes rings.
                desk.due = None;
            }
            (!desk.names.is_empty(), desk.due, desk.listening, desk.ends)
        };
        if !busy {
            line.ring.notified().await;
            continue;
        }
        if !listening && shared.hears() && shared.listen(&shared.wake_channel()).await {
            {
                let mut desk = line.desk();
                // It may be over already, and nobody tells that twice.
                desk.listening = desk.ends == ends;
            }
            // What was said before we listened was not heard.
            last = look(&shared).await;
            continue;
        }
        let pace = if listening { shared.options.poll } else { jitter(DEAF.min(shared.options.poll)) };
        let due = due.unwrap_or(last + pace).min(last + pace).max(last + LEAST);
        tokio::select! {
            () = tokio::time::sleep_until(due.into()) => last = look(&shared).await,
            () = line.ring.notified() => {}
        }
    }
}

/// A quarter more or less: many processes that look do not do so in step.
pub(crate) fn jitter(span: Duration) -> Duration {
    span * 3 / 4 + span / 2 * u32::from(random_128()[0]) / 255
}

/// Looks at everything that is waited for, once, whatever the number of those who wait.
async fn look(shared: &Arc<Shared>) -> Instant {
    let (names, listening, missed): (Vec<String>, bool, bool) = {
        let mut desk = shared.line.desk();
        desk.due = None;
        (desk.names.keys().cloned().collect(), desk.listening, std::mem::take(&mut desk.missed))
    };
    let seen = see(shared, listening, &names).await;
    let now = Instant::now();
    let mut desk = shared.line.desk();
    let mut soonest = shared.options.poll;
    desk.missed |= missed && seen.is_none();
    match seen {
        // The server did not reach us: everybody asks again.
        Some(_) if missed => desk.waiters.values().for_each(|waiter| waiter.called.notify_one()),
        Some(seen) => {
            // We were silent for too long, or the server has forgotten us: whoever came before that may have lost its place.
            if let Some(since) = seen.since {
                desk.waiters
                    .values()
                    .filter(|waiter| waiter.came_before(since))
                    .for_each(|waiter| waiter.called.notify_one());
            }
            // A waiter that was handed the lock is in no queue any more: if its message was lost, this is how it learns that.
            for waiter in seen.granted.iter().filter_map(|attempt| desk.waiters.get(attempt)) {
                waiter.take_turn(shared);
            }
            for First { first, ready, ends } in seen.names {
                if let Some(waiter) = desk.waiters.get(&first).filter(|_| ready) {
                    waiter.take_turn(shared);
                }
                if let Some(ends) = ends {
                    soonest = soonest.min(Duration::from_micros(ends) + Duration::from_millis(1));
                }
            }
        }
        None => soonest = soonest.min(DEAF),
    }
    let at = now + soonest;
    desk.due = Some(desk.due.map_or(at, |due| due.min(at)));
    now
}

async fn see(shared: &Shared, hears: bool, names: &[String]) -> Option<Seen> {
    let told = async {
        let live = shared.link.live().await?;
        let claim = micros(shared.options.claim);
        live.rows(&LOOK, &[&shared.client, &live.epoch(), &claim, &hears, &names]).await
    };
    match told.await {
        Ok(rows) => serde_json::from_str(rows.first()?.try_get(0).ok()?).ok(),
        Err(failure) => {
            if failure.is_missing() {
                shared.link.rebuild();
            }
            tracing::debug!(?failure, "could not look at the line, will look again");
            None
        }
    }
}
