//! What this process holds, and until when. All locks hang on one session, so it does not end for one that is not renewed:
//! the process itself gives that one back, and the session is there for when the process dies.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Ask, Fence, Moment, Names};
use tokio::sync::Notify;

use crate::entry::Entry;
use crate::layout::Mark;
use crate::link::Session;
use crate::store::Shared;

/// How long until an end that could not be told is told again.
const AGAIN: Duration = Duration::from_millis(500);

/// How long a request whose outcome is unknown is kept for a caller that sends it again.
const RETRY: Duration = Duration::from_secs(5);

/// A hold of ours.
#[derive(Clone)]
pub struct Hold {
    pub names: Names,
    pub ttl: Duration,
    /// Not renewed by then, it is over.
    pub expires: Moment,
    /// `None`: an ask whose outcome is not known.
    pub known: Option<Known>,
    /// Somebody still waits for the outcome.
    pub caller: Option<Arc<Caller>>,
}

/// What is known of a grant.
#[derive(Clone)]
pub struct Known {
    pub session: Arc<Session>,
    /// Its nodes, one for each name, and which write of them it is.
    pub paths: Vec<String>,
    pub version: i32,
    pub fence: Fence,
    pub since: Moment,
    pub entry: Entry,
    /// It has notes that outlive the session.
    pub noted: bool,
    /// It may have: a renewal that writes them is under way, or was not heard of.
    pub noting: bool,
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
    /// Those whose time is over and whose end ZooKeeper has not been told yet.
    pub ending: HashSet<Mark>,
    next: Option<Moment>,
}

impl Book {
    pub fn open(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self, mark: Mark, hold: Hold) {
        let mut pages = self.open();
        let sooner = pages.next.is_none_or(|next| hold.expires < next);
        pages.ending.remove(&mark);
        pages.holds.insert(mark, hold);
        if sooner {
            self.ring.notify_one();
        }
    }

    /// Something in it was changed.
    pub fn look(&self) {
        self.ring.notify_one();
    }

    /// Notes that an ask is under way. If it is dropped before its outcome is known, what it may have got is given back
    /// soon, unless it is asked again. `Some`: it was heard of before, and what it has was to end then.
    pub fn begin(&self, mark: Mark, ask: &Ask, now: Moment) -> (Arc<Caller>, Option<Moment>) {
        let caller = Arc::new(Caller::default());
        let mut pages = self.open();
        let before = match pages.holds.get(&mark) {
            Some(hold) => Some(hold.expires),
            None => pages.ending.contains(&mark).then_some(now),
        };
        match pages.holds.get_mut(&mark) {
            // The same ask again: what it has counts anew.
            Some(hold) => {
                hold.caller = Some(caller.clone());
                hold.expires = if hold.known.is_some() { now + hold.ttl } else { Moment::NEVER };
            }
            None => {
                let names = ask.claim.names.clone();
                let (ttl, expires, known) = (ask.ttl, Moment::NEVER, None);
                let hold = Hold { names, ttl, expires, known, caller: Some(caller.clone()) };
                pages.holds.insert(mark, hold);
            }
        }
        (caller, before)
    }

    /// A hold of ours ends then, at the latest.
    pub fn expire_by(&self, mark: &Mark, expires: Moment) {
        if let Some(hold) = self.open().holds.get_mut(mark).filter(|hold| hold.known.is_some()) {
            hold.expires = hold.expires.min(expires);
        }
        self.ring.notify_one();
    }

    /// The ask is over. `nothing`: it has got nothing.
    pub fn end(&self, mark: Mark, caller: &Arc<Caller>, nothing: bool, now: Moment) {
        let mut pages = self.open();
        let Some(hold) = pages.holds.get_mut(&mark) else { return };
        if !hold.caller.as_ref().is_some_and(|one| Arc::ptr_eq(one, caller)) {
            return;
        }
        hold.caller = None;
        if hold.known.is_none() {
            if nothing {
                pages.holds.remove(&mark);
            } else {
                hold.expires = now + hold.ttl.min(RETRY);
                self.ring.notify_one();
            }
        }
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
    /// Tells ZooKeeper that a hold is over, until it has heard.
    async fn see_off(self: &Arc<Self>, mark: Mark, hold: Hold) {
        loop {
            if !self.book.open().ending.contains(&mark) {
                return;
            }
            let done = match &hold.known {
                Some(known) => self.expire(&mark, &hold, known).await,
                None => self.take_out_lost(&hold.names, &mark).await.map(|_| ()),
            };
            match done {
                Ok(()) => break,
                Err(failure) => {
                    tracing::debug!(?failure, "could not end what was not renewed, will try again")
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
        self.book.open().ending.remove(&mark);
    }
}
