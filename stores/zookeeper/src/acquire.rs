//! Asking. A node is made, and the same transaction tells how many there are: if there is no other, it is granted by having
//! been made. Otherwise it stands in line, and the grant is a write of its own when its turn has come.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Acquired, Ask, Error, Grant, Moment, Result};
use lockkeeper_host::sleep_until;

use crate::book::Caller;
use crate::fault::Failure;
use crate::judge::{self, Said};
use crate::layout::Mark;
use crate::line::Line;
use crate::link::Session;
use crate::store::Shared;
use crate::watch::Word;

/// How long somebody in line waits after a failure before it looks again.
pub const PAUSE: Duration = Duration::from_millis(100);

/// An ask on its way.
pub struct Asking<'a> {
    pub shared: &'a Arc<Shared>,
    pub ask: &'a Ask,
    pub mark: Mark,
    /// The session that its nodes hang on.
    pub session: Option<Arc<Session>>,
    /// Its nodes, one for each name. None: it does not stand in line.
    pub own: Vec<String>,
    /// Which write of its nodes was the last.
    pub version: i32,
    /// Its notes are there.
    pub noted: bool,
    /// Nodes of the same attempt may be there already.
    pub known: bool,
    /// Until when it had what it has, before it asked again.
    pub expires: Moment,
    /// It has been told that it must wait.
    pub waits: bool,
    /// The highest fence that had been seen before its last write was sent.
    pub floor: u64,
}

/// What one look at the lines has come to.
pub enum Step {
    Granted(Grant),
    Blocked(Vec<Line>),
    /// Something changed meanwhile: look again.
    Again,
}

/// Ends the entry in the book, also when the ask is dropped.
struct Entered<'a> {
    shared: &'a Shared,
    mark: Mark,
    caller: Arc<Caller>,
    nothing: bool,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.shared.book.end(self.mark, &self.caller, self.nothing, self.shared.clock.now());
    }
}

impl Shared {
    pub async fn acquire(self: &Arc<Self>, ask: &Ask) -> Result<Acquired> {
        let mark = crate::layout::mark(&ask.claim.attempt);
        let (caller, before) = self.book.begin(mark, ask, self.clock.now());
        let mut entered = Entered { shared: self, mark, caller: caller.clone(), nothing: false };
        let mut asking = Asking {
            shared: self,
            ask,
            mark,
            session: None,
            own: Vec::new(),
            version: 0,
            noted: false,
            known: before.is_some(),
            expires: before.unwrap_or(Moment::NEVER),
            waits: false,
            floor: 0,
        };
        let answer = asking.run(&caller).await;
        // What may be there of an earlier try is still to be found, also when this one could not even be sent.
        let may_have = asking.known || !asking.own.is_empty();
        let open = may_have || matches!(answer, Ok(Acquired::Granted(_)) | Err(Error::Unknown(_)));
        entered.nothing = !open;
        match answer {
            // This call has queued the request, and nothing says that its nodes are gone.
            Err(Error::Unavailable(why)) if may_have && asking.session.is_some() => Err(Error::Unknown(why)),
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
                if !self.own.is_empty() {
                    caller.gives_place_up();
                }
                self.leave().await?;
                return Err(Error::Unavailable("the ask was taken back".into()));
            }
            let mut lines = match self.step().await {
                Ok(Step::Granted(grant)) => return Ok(Acquired::Granted(grant)),
                Ok(Step::Again) => continue,
                Ok(Step::Blocked(lines)) => lines,
                // In line already: servers that are away for a while are no reason to leave it.
                Err(Error::Unknown(_) | Error::Unavailable(_))
                    if !self.own.is_empty()
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
                return self.give_up(&mut lines).await;
            }
            if !self.waits {
                if self.drop_notes().await.is_err() {
                    // Whatever it was: it shows at the next look.
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                self.waits = true;
                self.shared.tell(&self.ask.claim.names, Word::Waiting, &self.ask.holder).await;
            }
            tokio::select! {
                () = self.news(&lines) => {}
                () = tokio::time::sleep(self.shared.options.poll) => {}
                () = sleep_until(&**clock, patience) => {}
                () = caller.taken_back() => {}
            }
        }
    }

    async fn give_up(&mut self, lines: &mut [Line]) -> Result<Acquired> {
        if let Some(session) = self.session.clone() {
            for line in lines.iter_mut() {
                self.shared.read_few(&session, line).await?;
            }
        }
        let busy = judge::busy(&self.own, lines, self.shared.base().number);
        self.leave().await?;
        Ok(Acquired::Busy(busy))
    }

    /// Asks, or looks, and takes the lock if it may be had.
    async fn step(&mut self) -> Result<Step> {
        match self.try_step().await {
            // Nodes that hung on the old session are gone, or will be. It asks again in the next one.
            Err(Stop::Failed(Failure::Ended)) => {
                self.forget();
                Ok(Step::Again)
            }
            Err(Stop::Failed(failure)) => Err(failure.into()),
            Err(Stop::Told(error)) => Err(error),
            Ok(step) => Ok(step),
        }
    }

    /// Nothing of it counts any more; but something of it may still be there.
    fn forget(&mut self) {
        self.own.clear();
        (self.version, self.noted, self.known) = (0, false, true);
    }

    async fn try_step(&mut self) -> Result<Step, Stop> {
        let session = self.shared.link.session().await?;
        if self.session.as_ref().is_some_and(|old| old.id != session.id) && !self.own.is_empty() {
            self.forget();
        }
        self.session = Some(session.clone());
        if self.own.is_empty() && self.known {
            if let Some(step) = self.find_again(&session).await? {
                return Ok(step);
            }
            self.known = false;
        }
        if self.own.is_empty() {
            match self.join(&session).await? {
                Joined::Alone { sent_at, zxid } => {
                    return self.granted_at_once(&session, sent_at, zxid).await;
                }
                Joined::InLine => {}
                Joined::Not => return Ok(Step::Again),
            }
        }
        let lines = self.shared.list_all(&session, self.ask.claim.names.as_slice()).await?;
        self.judge(&session, lines).await
    }

    async fn judge(&mut self, session: &Arc<Session>, mut lines: Vec<Line>) -> Result<Step, Stop> {
        let again = |(line, own): (&Line, &String)| {
            line.all.iter().any(|one| one.mark == Some(self.mark) && one.path != *own)
        };
        if lines.iter().zip(&self.own).any(again) {
            // A request of ours that nobody had heard of has arrived after all: it would wait for itself.
            self.leave().await?;
            return Ok(Step::Again);
        }
        let here = lines.iter().zip(&self.own).filter(|(line, own)| line.place(own).is_some()).count();
        if here < lines.len() {
            // Somebody deleted it, or a part of it. Nothing may be granted to what is not there, and what is left is
            // worth nothing.
            self.leave().await?;
            return Ok(Step::Again);
        }
        for (line, own) in lines.iter_mut().zip(&self.own) {
            line.orphans.retain(|(_, mark)| *mark != self.mark);
            self.shared.read_for(session, self.ask, line, own).await?;
        }
        let base = self.shared.base().number;
        match judge::say(self.ask, &self.own, &lines, base, self.waits) {
            Ok(Said::Yes(fence)) => self.take(session, &lines, fence).await,
            Ok(Said::No) => Ok(Step::Blocked(lines)),
            Err(error) => {
                self.leave().await?;
                Err(Stop::Told(error))
            }
        }
    }

    /// Gives its place in line up.
    pub async fn leave(&mut self) -> Result<(), Failure> {
        if !self.own.is_empty() {
            self.shared.take_out(&self.ask.claim.names, &self.mark).await?;
            if self.waits {
                self.shared.tell(&self.ask.claim.names, Word::Left, &self.ask.holder).await;
            }
            self.own.clear();
            self.noted = false;
        }
        Ok(())
    }
}

/// What came of standing in line.
pub enum Joined {
    /// Nobody else does: when that was sent, and which write it was.
    Alone { sent_at: Moment, zxid: i64 },
    /// Others may come first.
    InLine,
    /// Something was missing, and is there now.
    Not,
}

/// Why a step did not get on.
pub enum Stop {
    Failed(Failure),
    Told(Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Told(error)
    }
}
