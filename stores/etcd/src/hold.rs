//! Renewing, giving back, and letting go of what was not renewed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{Fence, Grant, Moment, Names, Release, Renewal, Result};

use crate::book::{Entered, Hold, Known};
use crate::entry::{One, State};
use crate::fault::Failure;
use crate::layout::{self, Mark};
use crate::lease::Lease;
use crate::order::Topic;
use crate::proto::RequestOp;
use crate::script::{delete, get, head, look, nested, put, txn, written};
use crate::store::Shared;
use crate::watch::Why;

/// Where to look for what an attempt has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// In line, under its own key.
    Line,
    /// Also under a seat of whatever process: what was granted there at once is older than all the others in the line.
    Everywhere,
}

/// What a renewal finds of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
enum There {
    /// All of its keys, as they were.
    Whole,
    /// All of its keys, and the reason for which its holder is to give it back.
    Revoked(String),
    Gone,
}

/// A hold that is being given back. If this is dropped before it is known to be gone, the process sees to it that it is gone in the
/// end: nobody else may come back to it.
struct Leaving<'a> {
    shared: &'a Shared,
    mark: Mark,
    hold: Option<Hold>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        let doubted = hold.doubted || hold.known.is_none();
        self.shared.book.look_after(self.mark, Hold { doubted, expires: self.shared.clock.now(), ..hold });
    }
}

impl Shared {
    fn own_keys(&self, names: &Names, mark: &Mark) -> Vec<Vec<u8>> {
        names.iter().map(|name| self.layout.key(name, mark)).collect()
    }

    pub fn about(&self, names: &Names) -> Vec<Topic> {
        names.iter().map(Topic::new).collect()
    }

    pub async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        let now = self.clock.now();
        let marks: Vec<Mark> = grants.iter().map(|grant| layout::mark(&grant.claim.attempt)).collect();
        let there = grants.iter().zip(&marks).map(|(grant, mark)| self.is_there(grant, mark));
        // Which of them are still there is asked together with the keep-alives.
        let there = join_all(there);
        let leases = join_all(self.leases_of(&marks, now).into_iter().map(|(lease, until)| async move {
            let covered = self.cover(&lease, until).await;
            covered.map(|covered| (lease.id, covered))
        }));
        let (there, leases) = tokio::join!(there, leases);
        let leases: BTreeMap<i64, bool> = leases.into_iter().collect::<Result<_, _>>()?;
        let mut answers = Vec::with_capacity(grants.len());
        for (mark, (grant, there)) in marks.iter().zip(grants.iter().zip(there)) {
            let there = match there? {
                There::Revoked(reason) => {
                    // The lease is not counted anew.
                    answers.push(Renewal::Revoked(reason.into()));
                    continue;
                }
                there => there == There::Whole,
            };
            let mut pages = self.book.open();
            let hold = pages.holds.get_mut(mark).filter(|_| there);
            let kept = hold.filter(|hold| {
                hold.known
                    .as_ref()
                    .is_some_and(|known| leases.get(&known.lease.id).is_none_or(|alive| *alive))
            });
            answers.push(match kept {
                Some(hold) => {
                    hold.expires = hold.expires.max(now + grant.ttl);
                    if let Some(known) = &mut hold.known {
                        known.lasts = known.lasts.max(now + grant.ttl);
                    }
                    Renewal::Renewed
                }
                None => {
                    // A later good answer would not bring it back.
                    let hold = pages.holds.remove(mark).filter(|hold| hold.doubted);
                    drop(pages);
                    hold.into_iter().for_each(|hold| self.look_again(*mark, hold));
                    Renewal::Lost
                }
            });
        }
        Ok(answers)
    }

    /// The leases of these holds, and until when each must last.
    fn leases_of(&self, marks: &[Mark], now: Moment) -> Vec<(Arc<Lease>, Moment)> {
        let pages = self.book.open();
        let mut leases: BTreeMap<i64, (Arc<Lease>, Moment)> = BTreeMap::new();
        for hold in marks.iter().filter_map(|mark| pages.holds.get(mark)) {
            let Some(known) = &hold.known else { continue };
            let until = now + hold.ttl + Duration::from_millis(known.entry.lock_delay_ms);
            known.lease.touch(now);
            let one = leases.entry(known.lease.id).or_insert_with(|| (known.lease.clone(), until));
            one.1 = one.1.max(until);
        }
        leases.into_values().collect()
    }

    /// Whether a grant's keys are as they were when it was granted.
    async fn is_there(&self, grant: &Grant, mark: &Mark) -> Result<There> {
        let known = {
            let pages = self.book.open();
            if pages.ending.contains(mark) {
                return Ok(There::Gone);
            }
            let known = pages.holds.get(mark).and_then(|hold| hold.known.as_ref());
            known.map(|known| (known.place.mark, known.written))
        };
        match known {
            Some((place, at)) => {
                let keys = self.own_keys(&grant.claim.names, &place);
                let same = keys.iter().map(|key| written(key, at)).collect();
                // A transaction that reads nothing is answered by any member from what it has, however far behind it is.
                let read = keys.iter().take(1).map(|key| look(key)).collect();
                let answer = self.lane.hope(same, read, None, Vec::new()).await?;
                if answer.txn.succeeded {
                    return Ok(There::Whole);
                }
                let revoked = self.find_revoked(&grant.claim.names, &place, mark).await?;
                Ok(revoked.map_or(There::Gone, |(_, reason)| There::Revoked(reason)))
            }
            None => self.adopt(grant, mark).await,
        }
    }

    /// A grant that another open store was given: it goes on under a lease of ours.
    async fn adopt(&self, grant: &Grant, mark: &Mark) -> Result<There> {
        let found = self.find_own(&grant.claim.names, mark, Search::Everywhere).await?;
        let granted: Vec<&One> = found.iter().filter(|one| one.is(State::Granted)).collect();
        let Some((place, entry)) = granted.first().and_then(|one| Some((one.place?, one.entry.clone()?)))
        else {
            return Ok(There::Gone);
        };
        let together = granted.iter().all(|one| one.place == Some(place));
        if !together || granted.len() != grant.claim.names.count() {
            return Ok(There::Gone);
        }
        if let Some(reason) = entry.revoked {
            return Ok(There::Revoked(reason));
        }
        let needed = grant.ttl + Duration::from_millis(entry.lock_delay_ms);
        let (lease, now) = (self.lease(needed).await?, self.clock.now());
        let same = granted.iter().map(|one| written(&one.key, one.written)).collect();
        let puts = granted.iter().filter_map(|one| {
            let value = one.entry.as_ref()?.in_state(State::Granted, grant.fence);
            Some(put(&one.key, value, lease.id))
        });
        let order = txn(same, puts.collect(), Vec::new());
        // From here on it may hang on our lease, whatever is heard of it.
        let mut entered = Entered::new(self, *mark, &grant.claim.names, grant.ttl);
        let answer = self.lane.send(order, self.about(&grant.claim.names)).await?;
        entered.nothing = !answer.txn.succeeded;
        if entered.nothing || !self.cover(&lease, now + needed).await? {
            return Ok(There::Gone);
        }
        let place = place.into();
        let known = Known {
            place,
            written: answer.revision,
            fence: grant.fence,
            since: now,
            lasts: now + grant.ttl,
            lease,
            entry,
        };
        self.book.write(
            *mark,
            Hold {
                names: grant.claim.names.clone(),
                ttl: grant.ttl,
                expires: now + grant.ttl,
                known: Some(known),
                caller: None,
                doubted: false,
                looks: 0,
            },
        );
        Ok(There::Whole)
    }

    /// Gives back, or leaves the line. What is on its way to its end already goes on: this call may fail.
    pub async fn release_mark(&self, names: &Names, mark: Mark) -> Result<Release, Failure> {
        let hold = self.book.open().holds.remove(&mark);
        let mut leaving = Leaving { shared: self, mark, hold };
        let caller = leaving.hold.as_ref().and_then(|hold| hold.caller.clone());
        if let Some(caller) = &caller {
            caller.leave();
        }
        let done = match leaving.hold.as_ref().and_then(|hold| hold.known.as_ref()) {
            Some(known) => self.give_back(names, &mark, known).await,
            None => Box::pin(self.take_out(names, &mark, Search::Everywhere)).await,
        };
        if done.is_ok() {
            let doubted = |hold: &Hold| hold.doubted || hold.known.is_none() && hold.caller.is_none();
            let hold = leaving.hold.take().filter(doubted);
            hold.into_iter().for_each(|hold| self.look_again(mark, hold));
        }
        match done {
            Ok(Release::AlreadyGone) if caller.is_some_and(|caller| caller.gave_place_up()) => {
                Ok(Release::Released)
            }
            done => done,
        }
    }

    async fn give_back(&self, names: &Names, mark: &Mark, known: &Known) -> Result<Release, Failure> {
        let stays = known.since + Duration::from_millis(known.entry.min_hold_ms);
        if stays > self.clock.now() {
            return Box::pin(self.take_out(names, mark, Search::Everywhere)).await;
        }
        let keys = self.own_keys(names, &known.place.mark);
        let gone: Vec<RequestOp> = keys.iter().map(|key| delete(key)).collect();
        // Nobody but its holder writes a key, other than to hold the lock back for a while. Where nothing was asked for that could do
        // that, what is there is the grant, or nothing is. But a seat of another process may be taken by another attempt of it.
        let ours = known.place.seat.is_some() || known.place.mark == *mark;
        let plain = ours && known.entry.lock_delay_ms == 0 && known.entry.min_hold_ms == 0;
        let same = keys.iter().filter(|_| !plain).map(|key| written(key, known.written)).collect();
        let answer = self.lane.hope(same, gone, None, self.about(names)).await?;
        let deleted = if answer.txn.succeeded { answer.txn.deleted() } else { 0 };
        if deleted == keys.len() {
            known.place.leave();
            return Ok(Release::Released);
        }
        // It was taken away, or a part of it was deleted.
        match Box::pin(self.take_out(names, mark, Search::Everywhere)).await? {
            Release::AlreadyGone if deleted > 0 => Ok(Release::Released),
            release => Ok(release),
        }
    }

    /// What an attempt has.
    async fn find_own(&self, names: &Names, mark: &Mark, search: Search) -> Result<Vec<One>, Failure> {
        let each = names.iter().map(|name| {
            let mut reads = vec![get(&self.layout.key(name, mark))];
            if search == Search::Everywhere {
                reads.push(head(&self.layout.queue(name), 1));
            }
            nested(txn(Vec::new(), reads, Vec::new()))
        });
        let order = txn(Vec::new(), each.collect(), Vec::new());
        let mut ranges = self.lane.send(order, self.about(names)).await?.txn.ranges().into_iter();
        let mut found: Vec<One> = Vec::new();
        for name in names {
            let reads = if search == Search::Everywhere { 2 } else { 1 };
            let kvs = ranges.by_ref().take(reads).flat_map(|range| range.kvs);
            let ones = kvs.filter_map(|kv| One::read(&self.layout, name, kv));
            found.extend(ones.filter(|one| one.mark.as_ref() == Some(mark)));
        }
        found.sort_by(|a, b| a.key.cmp(&b.key));
        found.dedup_by(|a, b| a.key == b.key);
        Ok(found)
    }

    /// Takes whatever an attempt has out of the lines: it is looked for first.
    pub async fn take_out(&self, names: &Names, mark: &Mark, search: Search) -> Result<Release, Failure> {
        loop {
            let found = self.find_own(names, mark, search).await?;
            if let Some(release) = self.end_all(names, found).await? {
                return Ok(release);
            }
        }
    }

    /// The same for what nobody wants any more. False: somebody does. An ask says so in the book before it says anything to etcd, so
    /// whatever was found there before the book was looked at is not what it has got. What hangs on a lease of another process is that one's.
    pub async fn take_back(&self, names: &Names, mark: &Mark) -> Result<bool, Failure> {
        loop {
            let mut found = self.find_own(names, mark, Search::Everywhere).await?;
            if self.book.is_wanted(mark) {
                return Ok(false);
            }
            found.retain(|one| self.keeps_alive(one.lease));
            if self.end_all(names, found).await?.is_some() {
                return Ok(true);
            }
        }
    }

    /// Ends what was found of an attempt. `None`: it has changed meanwhile.
    async fn end_all(&self, names: &Names, mut found: Vec<One>) -> Result<Option<Release>, Failure> {
        found.retain(|one| one.is(State::Granted) || one.is(State::Waiting));
        // What waits, beside what is granted, is an ask that had not heard of it.
        let granted = found.iter().find(|one| one.is(State::Granted));
        let Some(first) = granted.or(found.first()) else { return Ok(Some(Release::AlreadyGone)) };
        let same = found.iter().map(|one| written(&one.key, one.written)).collect();
        let lingers = self.lingers(first);
        let lease = match lingers {
            Some(time) => Some(self.link.grant_lease(seconds(time)).await?.0),
            None => None,
        };
        let fence = first.fence(self.base());
        let stays = |one: &One| lease.filter(|_| one.is(State::Granted));
        let ends = found.iter().map(|one| end(one, stays(one), State::Lingering, fence)).collect();
        let answer = self.lane.send(txn(same, ends, Vec::new()), self.about(names)).await?;
        Ok(answer.txn.succeeded.then_some(Release::Released))
    }

    /// For how much longer a minimum hold lasts.
    fn lingers(&self, one: &One) -> Option<Duration> {
        // A revoked one is to be free.
        let entry =
            one.entry.as_ref().filter(|entry| entry.state == State::Granted && entry.revoked.is_none())?;
        let until = entry.since_us.as_micros().saturating_add(entry.min_hold_ms * 1000);
        let left = until.checked_sub(self.clock.wall().as_micros())?;
        // A clock that was set back must not make it longer than was asked for.
        (left > 0).then(|| Duration::from_micros(left.min(entry.min_hold_ms * 1000)))
    }

    /// Its time is over, and it was not renewed.
    pub async fn expire(&self, mark: &Mark, hold: &Hold, known: &Known) -> Result<(), Failure> {
        let delay = known.entry.lock_delay_ms;
        let lease = match delay {
            0 => None,
            _ => Some(self.link.grant_lease(seconds(Duration::from_millis(delay))).await?.0),
        };
        let keys = self.own_keys(&hold.names, &known.place.mark);
        let mut ends: Vec<RequestOp> = hold
            .names
            .iter()
            .zip(&keys)
            .map(|(name, key)| match lease {
                None => delete(key),
                Some(lease) => {
                    let entry = crate::entry::Entry {
                        state: State::Delayed,
                        fence: Some(known.fence),
                        ..known.entry.clone()
                    };
                    put(key, entry.under(name, hold.names.as_slice()), lease)
                }
            })
            .collect();
        let why = self.layout.why();
        ends.push(put(&why, Why::Expired { names: hold.names.as_slice().to_vec() }.to_bytes(), 0));
        let mut about = self.about(&hold.names);
        about.push(Topic::new(why));
        let mut at = vec![known.written; keys.len()];
        loop {
            let same = keys.iter().zip(&at).map(|(key, at)| written(key, *at)).collect();
            let answer = self.lane.send(txn(same, ends.clone(), Vec::new()), about.clone()).await?;
            if answer.txn.succeeded {
                if lease.is_none() {
                    known.place.leave();
                }
                return Ok(());
            }
            // A revoke has written its keys anew.
            match self.find_revoked(&hold.names, &known.place.mark, mark).await? {
                Some((written, _)) => at = written,
                None => return Ok(()),
            }
        }
    }
}

/// The end of one key: gone, or in another state for as long as the lease lasts.
pub fn end(one: &One, lease: Option<i64>, state: State, fence: Fence) -> RequestOp {
    match (lease, &one.entry) {
        (Some(lease), Some(entry)) => put(&one.key, entry.in_state(state, fence), lease),
        _ => delete(&one.key),
    }
}

/// Whole seconds, rounded up: etcd counts in nothing smaller.
pub fn seconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1)
}
