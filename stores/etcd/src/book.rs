//! What this process holds, and until when. A lease is shared by all locks of one length, so it does not end for one that
//! is not renewed: the process itself gives that one back, and the lease is there for when the process dies.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Fence, Moment, Names};
use tokio::sync::Notify;

use crate::entry::Entry;
use crate::layout::Mark;
use crate::lease::Lease;
use crate::seat::Seat;
use crate::store::Shared;

/// How long until an end that could not be told is told again.
const AGAIN: Duration = Duration::from_millis(500);
/// How long a request whose outcome is unknown is kept for a caller that sends it again.
const RETRY: Duration = Duration::from_secs(5);
/// How late a request may arrive that was not answered, as a rule.
const LATE: Duration = Duration::from_secs(10);
/// How often such a request is looked for: with a timeout of 3 s until 22 minutes later.
const LOOKS: u32 = 4;

/// A hold of ours.
#[derive(Clone, Debug)]
pub struct Hold {
    pub names: Names,
    pub ttl: Duration,
    /// Not renewed by then, it is over.
    pub expires: Moment,
    /// `None`: an ask whose outcome is not known.
    pub known: Option<Known>,
    /// Somebody still waits for the outcome.
    pub caller: Option<Arc<Caller>>,
    /// A request of it was never answered: it may have happened, and it may still arrive.
    pub doubted: bool,
    /// How often it was looked for after its end.
    pub looks: u32,
}

/// What is known of a grant.
#[derive(Clone, Debug)]
pub struct Known {
    pub place: Place,
    /// Which write of its keys it is.
    pub written: i64,
    pub fence: Fence,
    pub since: Moment,
    /// How long its holder may believe in it.
    pub lasts: Moment,
    pub lease: Arc<Lease>,
    pub entry: Entry,
}

/// Where a grant stands.
#[derive(Clone, Debug)]
pub struct Place {
    /// What its keys are called after.
    pub mark: Mark,
    /// `Some`: it is a seat of ours.
    pub seat: Option<Arc<Seat>>,
}

impl Place {
    /// Its keys are gone.
    pub fn leave(&self) {
        if let Some(seat) = &self.seat {
            seat.leave();
        }
    }
}

impl From<Mark> for Place {
    fn from(mark: Mark) -> Self {
        Place { mark, seat: None }
    }
}

impl From<Seat> for Place {
    fn from(seat: Seat) -> Self {
        Place { mark: seat.mark(), seat: Some(Arc::new(seat)) }
    }
}

/// The ask that stands behind an entry of the book.
#[derive(Debug, Default)]
pub struct Caller {
    left: AtomicBool,
    placed: AtomicBool,
    ring: Notify,
}

impl Caller {
    /// Waits until the ask is taken back.
    pub async fn taken_back(&self) {
        while !self.has_left() {
            self.ring.notified().await;
        }
    }

    pub fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        self.ring.notify_one();
    }

    /// Taken back, the ask is about to give its place in line up, and may be quicker than the release that wanted it so.
    pub fn gives_place_up(&self) {
        self.placed.store(true, Ordering::Release);
    }

    pub fn gave_place_up(&self) -> bool {
        self.placed.load(Ordering::Acquire)
    }
}

#[derive(Default)]
pub struct Book {
    pages: Mutex<Pages>,
    ring: Notify,
}

#[derive(Default)]
pub struct Pages {
    pub holds: HashMap<Mark, Hold>,
    /// Those whose time is over and whose end etcd has not been told yet.
    pub ending: HashSet<Mark>,
    next: Option<Moment>,
}

impl Book {
    pub fn open(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self, mark: Mark, mut hold: Hold) {
        let mut pages = self.open();
        hold.doubted |= pages.holds.get(&mark).is_some_and(|before| before.doubted);
        let sooner = pages.next.is_none_or(|next| hold.expires < next);
        pages.ending.remove(&mark);
        pages.holds.insert(mark, hold);
        if sooner {
            self.ring.notify_one();
        }
    }

    /// Notes that an ask is under way. If it is dropped before its outcome is known, what it may have got is given back
    /// soon, unless it is asked again. The end of the entry is [`end`](Self::end).
    fn begin(&self, mark: Mark, names: &Names, ttl: Duration, now: Moment) -> Arc<Caller> {
        let caller = Arc::new(Caller::default());
        let mut pages = self.open();
        match pages.holds.get_mut(&mark) {
            // The same ask again: what it has counts anew.
            Some(hold) => {
                hold.caller = Some(caller.clone());
                hold.expires = if hold.known.is_some() { now + hold.ttl } else { Moment::NEVER };
            }
            None => {
                let (names, expires, caller) = (names.clone(), Moment::NEVER, Some(caller.clone()));
                let hold = Hold { names, ttl, expires, known: None, caller, doubted: false, looks: 0 };
                pages.holds.insert(mark, hold);
            }
        }
        caller
    }

    /// Whether somebody asks for it, or has it.
    pub fn is_wanted(&self, mark: &Mark) -> bool {
        self.open().holds.get(mark).is_some_and(|hold| hold.known.is_some() || hold.caller.is_some())
    }

    /// When `hold.expires` is over, what there is of it is taken out, whatever that is.
    pub fn look_after(&self, mark: Mark, hold: Hold) {
        let mut pages = self.open();
        match pages.holds.get_mut(&mark) {
            // It is asked again meanwhile.
            Some(hold) => hold.doubted = true,
            None => {
                pages.holds.insert(mark, Hold { known: None, caller: None, ..hold });
                self.ring.notify_one();
            }
        }
    }

    /// The ask is over. `nothing`: it has got nothing. If an earlier call of it was not answered, that says nothing of what that
    /// one has got, or will get.
    fn end(&self, ask: &Entered<'_>, now: Moment) {
        let (mark, nothing) = (ask.mark, ask.nothing);
        let mut pages = self.open();
        let Some(hold) = pages.holds.get_mut(&mark) else {
            drop(pages);
            if !nothing {
                // It was given back meanwhile, perhaps before it had got what it has got.
                let (names, ttl, caller) = (ask.names.clone(), ask.ttl, None);
                let (known, doubted, looks) = (None, true, 0);
                self.look_after(mark, Hold { names, ttl, expires: now, known, caller, doubted, looks });
            }
            return;
        };
        if !hold.caller.as_ref().is_some_and(|one| Arc::ptr_eq(one, &ask.caller)) {
            return;
        }
        hold.caller = None;
        if hold.known.is_none() {
            if nothing && !hold.doubted {
                pages.holds.remove(&mark);
            } else {
                (hold.expires, hold.doubted) = (now + hold.ttl.min(RETRY), true);
                self.ring.notify_one();
            }
        }
    }
}

/// An ask that is under way. Its entry in the book ends with this, also when the ask is dropped.
pub struct Entered<'a> {
    shared: &'a Shared,
    mark: Mark,
    names: &'a Names,
    ttl: Duration,
    pub caller: Arc<Caller>,
    /// It has got nothing.
    pub nothing: bool,
}

impl<'a> Entered<'a> {
    pub fn new(shared: &'a Shared, mark: Mark, names: &'a Names, ttl: Duration) -> Self {
        let caller = shared.book.begin(mark, names, ttl, shared.clock.now());
        Entered { shared, mark, names, ttl, caller, nothing: false }
    }

    /// Asking again has not counted the lease of what it had already anew.
    pub fn restore(&self) {
        let mut pages = self.shared.book.open();
        if let Some(hold) = pages.holds.get_mut(&self.mark) {
            hold.expires = hold.known.as_ref().map_or(hold.expires, |known| known.lasts);
        }
        self.shared.book.ring.notify_one();
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.shared.book.end(self, self.shared.clock.now());
    }
}

/// Ends what was not renewed in time, for as long as the store is open.
pub async fn attend(shared: Arc<Shared>) {
    loop {
        let now = shared.clock.now();
        let (due, next) = {
            let mut pages = shared.book.open();
            let due: Vec<Mark> =
                pages.holds.iter().filter(|(_, hold)| hold.expires <= now).map(|(mark, _)| *mark).collect();
            let mut taken = Vec::new();
            for mark in due {
                pages.ending.insert(mark);
                taken.extend(pages.holds.remove(&mark).map(|hold| (mark, hold)));
            }
            pages.next = pages.holds.values().map(|hold| hold.expires).min();
            (taken, pages.next)
        };
        for (mark, hold) in due {
            let shared = shared.clone();
            tokio::spawn(async move { shared.see_off(mark, hold).await });
        }
        let pause = next.filter(|next| *next != Moment::NEVER).map(|next| next.since(now));
        tokio::select! {
            () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
            () = shared.book.ring.notified() => {}
        }
    }
}

impl Shared {
    /// Tells etcd that a hold is over, until it has heard.
    async fn see_off(&self, mark: Mark, hold: Hold) {
        loop {
            if let Some(again) = self.book.open().holds.get_mut(&mark).filter(|again| again.known.is_some()) {
                // It was asked again, and granted.
                again.doubted |= hold.doubted;
                return;
            }
            let done = match &hold.known {
                Some(known) => self.expire(&mark, &hold, known).await,
                None => match self.take_back(&hold.names, &mark).await {
                    // It is left to whoever asks again.
                    Ok(false) => return self.look_again(mark, hold),
                    done => done.map(|_| ()),
                },
            };
            match done {
                Ok(()) if hold.doubted => return self.look_again(mark, hold),
                Ok(()) => break,
                Err(failure) => {
                    tracing::debug!(?failure, "could not end what was not renewed, will try again")
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
        self.book.open().ending.remove(&mark);
    }

    /// A request without a reply may still be applied after its end: TCP delivers what a closed connection has left to send for minutes. So
    /// the request is looked for again, each time later, until that is as good as impossible.
    pub fn look_again(&self, mark: Mark, hold: Hold) {
        let (looks, doubted) = (hold.looks + 1, hold.looks + 1 < LOOKS);
        let expires = self.clock.now() + (self.link.timeout() * 2 + LATE) * 4u32.pow(hold.looks.min(LOOKS));
        self.book.open().ending.remove(&mark);
        self.book.look_after(mark, Hold { doubted, expires, looks, ..hold });
    }
}
