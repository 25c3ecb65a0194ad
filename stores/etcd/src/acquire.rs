//! Asking. A free lock is one transaction: if nobody is there, the key is written as granted. Otherwise the same
//! transaction writes it as waiting, and reads the line.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Acquired, Ask, Error, Grant, Result, Wait};
use lockkeeper_host::sleep_until;

use crate::base::fence_at;
use crate::book::{Caller, Entered};
use crate::entry::{Line, State};
use crate::fault::Failure;
use crate::hold::Search;
use crate::judge::{self, Said};
use crate::layout::Mark;
use crate::lease::Lease;
use crate::order::Answer;
use crate::store::Shared;

/// How long somebody in line waits after a failure before it looks again.
pub const PAUSE: Duration = Duration::from_millis(100);

/// An ask on its way.
pub struct Asking<'a> {
    pub shared: &'a Shared,
    pub ask: &'a Ask,
    pub mark: Mark,
    /// It stands in line, as far as we know.
    pub joined: bool,
    /// Asks that may wait write themselves down at once.
    pub joins: bool,
    /// When its place in line was made.
    pub created: i64,
    /// The line is long, and its two ends are not enough.
    pub all: bool,
    /// It was refused for want of room, and may have happened.
    pub no_room: bool,
    /// The outcome of an earlier call is unknown: it may be queued though it was not read.
    pub doubted: bool,
}

/// What one look at the lines has come to.
pub enum Step {
    Granted(Grant),
    Blocked {
        lines: Vec<Line>,
        revision: i64,
    },
    /// Something changed meanwhile: look again.
    Again,
}

impl Shared {
    pub async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        let mark = crate::layout::mark(&ask.claim.attempt);
        let mut entered = Entered::new(self, mark, &ask.claim.names, ask.ttl);
        let joins = ask.wait != Wait::No;
        // What it is known to have is looked at; it does not stand in line behind itself.
        let (joined, doubted) = {
            let pages = self.book.open();
            let hold = pages.holds.get(&mark);
            (hold.is_some_and(|hold| hold.known.is_some()), hold.is_some_and(|hold| hold.doubted))
        };
        let (created, all, no_room) = (0, false, false);
        let mut asking = Asking { shared: self, ask, mark, joined, joins, created, all, no_room, doubted };
        // Nearly all that is ever asked is over with this. The rest is a future many times as large, which is made only then.
        let answer = match asking.try_first().await {
            Ok(Step::Granted(grant)) => Ok(Acquired::Granted(grant)),
            Ok(_) => Box::pin(asking.run(&entered.caller)).await,
            Err(error) => Err(error),
        };
        if matches!(answer, Err(Error::Lost(_))) {
            // It was revoked: asking again does not count its lease anew.
            entered.restore();
        }
        let open = asking.joined || matches!(answer, Ok(Acquired::Granted(_)) | Err(Error::Unknown(_)));
        entered.nothing = !open;
        if asking.no_room && !matches!(answer, Ok(_) | Err(Error::Unknown(_))) {
            // It has been answered, so nothing is on its way any more: what is there is taken out at once.
            let gone = Box::pin(self.take_out(&ask.claim.names, &mark, Search::Everywhere)).await;
            entered.nothing = gone.is_ok();
        }
        match answer {
            // The request is queued, whatever became of the last call.
            Err(Error::Unavailable(why)) if asking.joined => Err(Error::Unknown(why)),
            answer => answer,
        }
    }
}

impl Asking<'_> {
    async fn run(&mut self, caller: &Caller) -> Result<Acquired> {
        let clock = &self.shared.clock;
        let patience = self.ask.wait.deadline(clock.now());
        let mut since_failure = None;
        loop {
            if caller.has_left() {
                // Whoever took it back may have looked before it stood in line.
                if self.joined {
                    caller.gives_place_up();
                }
                self.leave().await?;
                return Err(Error::Unavailable("the ask was taken back".into()));
            }
            let step = self.step().await;
            let (lines, revision) = match step {
                Ok(Step::Granted(grant)) => return Ok(Acquired::Granted(grant)),
                Ok(Step::Again) => continue,
                Ok(Step::Blocked { lines, revision }) => (lines, revision),
                // In line already: a server that is away for a while is no reason to leave it.
                Err(Error::Unknown(_) | Error::Unavailable(_))
                    if self.joined
                        && clock.now() < patience
                        && clock.now() < *since_failure.get_or_insert(clock.now()) + self.ask.ttl =>
                {
                    tokio::select! {
                        () = tokio::time::sleep(PAUSE) => {}
                        () = caller.taken_back() => {}
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            since_failure = None;
            if clock.now() >= patience {
                self.joined |= self.doubted;
                self.leave().await?;
                return Ok(Acquired::Busy(judge::busy(self.ask, &self.mark, &lines, self.shared.base())));
            }
            tokio::select! {
                () = self.news(&lines, revision) => {}
                () = tokio::time::sleep(self.shared.options.poll) => {}
                () = sleep_until(&**clock, patience) => {}
                () = caller.taken_back() => {}
            }
        }
    }

    async fn lease(&self) -> Result<Arc<Lease>, Failure> {
        self.shared.lease(self.ask.ttl + self.ask.lock_delay).await
    }

    /// What a failure to get it means.
    pub fn failed(&mut self, failure: Failure) -> Error {
        self.no_room |= matches!(failure, Failure::Refused(..)) && failure.may_have_happened();
        failure.into()
    }

    /// Asks for what is thought to be free, and for nothing else. Where somebody was met lately, that is not worth a try.
    async fn try_first(&mut self) -> Result<Step> {
        if self.joined || self.shared.crowded.has(&self.ask.claim.names) {
            return Ok(Step::Again);
        }
        let lease = self.lease().await?;
        let (floor, base) = (self.shared.floor(), self.shared.base());
        match self.try_seat(&lease, base).await {
            Ok((answer, Some(seat))) => {
                let fence = fence_at(base, answer.revision)?;
                self.granted(&lease, seat.into(), &answer, fence, floor, None).await
            }
            Ok((_, None)) => {
                self.shared.crowded.add(&self.ask.claim.names);
                Ok(Step::Again)
            }
            Err(failure) if failure.lease_is_gone() => {
                Box::pin(self.shared.check_leases(&lease)).await?;
                Ok(Step::Again)
            }
            Err(failure) => Err(self.failed(failure)),
        }
    }

    /// Asks, or looks, and takes the lock if it may be had.
    async fn step(&mut self) -> Result<Step> {
        let ask = self.ask;
        let lease = self.lease().await?;
        let (floor, base) = (self.shared.floor(), self.shared.base());
        let answer = match self.joined {
            true => self.look().await?,
            false => match self.try_or_join(&lease, base).await {
                Ok((answer, Some(seat))) => {
                    _ = self.shared.crowded.remove(&ask.claim.names);
                    let fence = fence_at(base, answer.revision)?;
                    return self.granted(&lease, seat.into(), &answer, fence, floor, None).await;
                }
                Ok((answer, None)) => answer,
                Err(failure) if failure.lease_is_gone() => {
                    self.shared.check_leases(&lease).await?;
                    return Ok(Step::Again);
                }
                Err(failure) => return Err(self.failed(failure)),
            },
        };
        let revision = answer.revision;
        let mut ranges = answer.txn.clone().ranges().into_iter();
        let found = ranges.next().and_then(|range| range.kvs.into_iter().next());
        let learned = self.shared.learn_base(found.as_ref(), revision, floor).await;
        // It stands in line by now, whatever becomes of this.
        self.joined |= self.joins && learned.is_err();
        learned?;
        if base != self.shared.base() {
            return Ok(Step::Again);
        }
        let mut lines = Vec::new();
        for name in &ask.claim.names {
            let mut line = Line::read(&self.shared.layout, name, ranges.next().unwrap_or_default());
            line.add(&self.shared.layout, ranges.next().unwrap_or_default());
            lines.push(line);
        }
        if !self.all && lines.iter().any(|line| !judge::is_enough(ask, &self.mark, line)) {
            self.all = true;
            self.joined |= lines.iter().all(|line| line.mine(&self.mark).is_some());
            return Ok(Step::Again);
        }
        // The next look at a long line needs only a part of it again.
        self.all &= !judge::is_simple(ask);
        self.judge(&lease, &answer, lines, floor).await
    }

    async fn judge(
        &mut self,
        lease: &Arc<Lease>,
        answer: &Answer,
        lines: Vec<Line>,
        floor: u64,
    ) -> Result<Step> {
        let revision = answer.revision;
        let mine: Vec<_> = lines.iter().filter_map(|line| line.mine(&self.mark)).collect();
        if mine.iter().any(|one| one.is(State::Lingering) || one.is(State::Delayed)) {
            // What this very attempt had and gave back is still in the way.
            self.joined = false;
            return Ok(Step::Blocked { lines, revision });
        }
        let granted = mine.iter().filter(|one| one.is(State::Granted)).count();
        // Granted together, they stand under one place.
        let apart = mine.iter().any(|one| one.place != mine[0].place);
        if granted == lines.len() && !apart {
            let fence = mine[0].fence(self.shared.base());
            return self.resume(lease, answer, &lines, fence).await;
        }
        if granted > 0 || apart || (!mine.is_empty() && mine.len() < lines.len()) {
            // Somebody deleted a part of it: what is left is worth nothing.
            self.joined = false;
            self.shared.take_out(&self.ask.claim.names, &self.mark, Search::Everywhere).await?;
            return Ok(Step::Again);
        }
        let was_joined = std::mem::replace(&mut self.joined, !mine.is_empty());
        self.created =
            lines.iter().filter_map(|line| line.mine(&self.mark)).map(|one| one.created).max().unwrap_or(0);
        if was_joined && !self.joined {
            // The place in line is lost, with its lease or by somebody's hand. Nothing may be granted to what is not there.
            return Ok(Step::Again);
        }
        match judge::say(self.ask, &self.mark, &lines, self.shared.base(), self.joined) {
            Ok(Said::Yes(fence)) => self.take(lease, &lines, revision, fence, floor).await,
            Ok(Said::No) => Ok(Step::Blocked { lines, revision }),
            Err(error) => {
                self.leave().await?;
                Err(error)
            }
        }
    }

    /// Gives its place in line up.
    async fn leave(&mut self) -> Result<(), Failure> {
        if self.joined {
            self.shared.take_out(&self.ask.claim.names, &self.mark, Search::Line).await?;
            self.joined = false;
        }
        Ok(())
    }
}
