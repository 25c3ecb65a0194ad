//! What is under way for each attempt, so that whoever takes an ask back reaches all of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lockkeeper_core::Attempt;
use tokio::sync::watch;

use crate::round::Round;

/// All that is under way for one attempt: it lasts while somebody works for it, in the background too.
#[derive(Default)]
pub struct Errand {
    withdrawn: watch::Sender<bool>,
    asking: AtomicUsize,
    rounds: Mutex<Vec<Weak<Round>>>,
}

impl Errand {
    fn rounds(&self) -> MutexGuard<'_, Vec<Weak<Round>>> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more round of votes. If the ask has been taken back before, so is the round.
    pub fn add(&self, round: &Arc<Round>) {
        let mut rounds = self.rounds();
        rounds.retain(|round| round.strong_count() > 0);
        rounds.push(Arc::downgrade(round));
        drop(rounds);
        if self.is_withdrawn() {
            round.withdraw();
        }
    }

    pub fn is_withdrawn(&self) -> bool {
        *self.withdrawn.borrow()
    }

    /// Ends when the ask is taken back.
    pub async fn withdrawn(&self) {
        // The sender is in self: it cannot be gone.
        _ = self.withdrawn.subscribe().wait_for(|withdrawn| *withdrawn).await;
    }

    /// Somebody asks, until this is dropped.
    pub fn ask(self: &Arc<Self>) -> Asking {
        self.asking.fetch_add(1, Ordering::SeqCst);
        Asking(self.clone())
    }
}

/// An ask that waits for its answer.
pub struct Asking(Arc<Errand>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The errands of this process.
#[derive(Default)]
pub struct Errands(Mutex<Book>);

#[derive(Default)]
struct Book {
    pages: HashMap<Attempt, Weak<Errand>>,
    /// How many pages there may be before the empty ones are torn out.
    full: usize,
}

impl Errands {
    /// The errand of an attempt: the one that is under way, or a new one.
    pub fn begin(&self, attempt: Attempt) -> Arc<Errand> {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = book.pages.get(&attempt).and_then(Weak::upgrade)
            && !known.is_withdrawn()
        {
            return known;
        }
        if book.pages.len() >= book.full {
            book.pages.retain(|_, errand| errand.strong_count() > 0);
            book.full = 2 * book.pages.len() + 64;
        }
        let errand = Arc::new(Errand::default());
        book.pages.insert(attempt, Arc::downgrade(&errand));
        errand
    }

    /// Takes back all that is under way for an attempt, and says whether somebody was still asking.
    pub fn withdraw(&self, attempt: Attempt) -> bool {
        let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(errand) = book.pages.get(&attempt).and_then(Weak::upgrade) else { return false };
        drop(book);
        // Looked at first: once it is told, it may be gone at once.
        let asked = errand.asking.load(Ordering::SeqCst) > 0;
        errand.withdrawn.send_replace(true);
        for round in errand.rounds().iter().filter_map(Weak::upgrade) {
            round.withdraw();
        }
        asked
    }
}
