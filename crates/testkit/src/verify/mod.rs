//! Verifies a store that its user runs already: the laws, on names below a private prefix, and a verdict for each promise.
//!
//! A verification injects no fault and changes no setting, so that it disturbs no other user of the store. It uses the clients that it was
//! given and no more, at most [`Verification::PARALLEL`] laws at a time. Every lock and record that it makes ends within [`LONGEST`], also
//! if the process is killed; otherwise it removes them itself.

mod durability;
mod harness;
mod laws;
mod private_store;
mod verdict;

pub use private_store::LONGEST;
pub use verdict::{LawOutcome, LawResult, PromiseVerdict, Verdict, VerifiedPromise, judge};

use std::sync::Arc;

use crate::laws::say_no_seeds;
use futures_util::StreamExt;
use futures_util::stream;
use lockkeeper_core::{Error, Expect, Page, Result, Store};
use lockkeeper_host::random_128;
use tokio::sync::watch;

/// The prefix of all verifications.
pub const PREFIX: &str = "lockkeeper-verify/";

/// One verification of one store.
pub struct Verification {
    clients: Arc<[Arc<dyn Store>]>,
    prefix: String,
    stop: watch::Sender<bool>,
}

impl Verification {
    /// How many laws run at the same time.
    pub const PARALLEL: usize = 8;

    /// A verification with a prefix of its own. The `clients` are clients of one store, at least one.
    pub fn new(clients: impl IntoIterator<Item = Arc<dyn Store>>) -> Self {
        let clients: Arc<[Arc<dyn Store>]> = clients.into_iter().collect();
        assert!(!clients.is_empty(), "a verification needs a client");
        let random: String = random_128()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Verification { clients, prefix: format!("{PREFIX}{random}/"), stop: watch::Sender::new(false) }
    }

    /// The prefix of all names that this verification uses. It ends with a slash.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// How many laws a verification has, with those that it leaves out.
    pub fn law_count() -> usize {
        laws::ALL.len()
    }

    /// Runs every law. `ended` is called with each result, as soon as the law has ended. After [`Verification::stop`] the laws that have
    /// not ended have the result [`LawOutcome::Stopped`].
    pub async fn laws(&self, ended: impl Fn(&LawResult)) -> Vec<LawResult> {
        self.run(laws::ALL, ended).await
    }

    /// Runs the laws with this name.
    pub async fn only(&self, law: &str, ended: impl Fn(&LawResult)) -> Vec<LawResult> {
        let named: Vec<laws::ListedLaw> = laws::ALL.iter().copied().filter(|one| one.name == law).collect();
        self.run(&named, ended).await
    }

    async fn run(&self, laws: &[laws::ListedLaw], ended: impl Fn(&LawResult)) -> Vec<LawResult> {
        say_no_seeds();
        let run = |law: laws::ListedLaw| async move {
            if let Some(why) = law.left_out() {
                return LawResult::new(law.name, law.promise(), LawOutcome::LeftOut(why.into()));
            }
            law.run(self.clients.clone(), self.prefix.clone(), self.stop.subscribe()).await
        };
        let results = stream::iter(laws.iter().copied().map(run)).buffer_unordered(Self::PARALLEL);
        results.inspect(ended).collect().await
    }

    /// Checks what can be seen of durability from outside: that grants and records are in the store, for a client that was opened after they
    /// were made. `opened` opens that client. After [`Verification::stop`] it checks nothing.
    pub async fn durability(&self, opened: impl AsyncFnOnce() -> Result<Arc<dyn Store>>) -> Vec<LawResult> {
        if *self.stop.borrow() {
            return Vec::new();
        }
        let prefix: Arc<str> = format!("{}durability/", self.prefix).into();
        let results = durability::check(&self.clients[0], opened, &prefix).await;
        _ = sweep(&self.clients[0], &prefix).await;
        results
    }

    /// Ends the laws that run, soon. They release what they hold.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Removes all that is left below the prefix, and fails if something remains.
    ///
    /// # Errors
    /// The errors of the store; [`Error::Unavailable`] if locks or records are still there.
    pub async fn clean(&self) -> Result<()> {
        sweep(&self.clients[0], &self.prefix).await
    }
}

/// How often a lock is broken: a break may begin a lock-delay, and the next one ends it.
const BREAKS: usize = 4;

/// Removes every lock and record below `prefix`.
async fn sweep(store: &Arc<dyn Store>, prefix: &str) -> Result<()> {
    for left in (0..=BREAKS).rev() {
        let locks = store.list(prefix, &Page::FIRST).await?.locks;
        if locks.is_empty() {
            break;
        }
        if left == 0 {
            let names: Vec<_> = locks.iter().map(|view| view.name.as_str()).collect();
            return Err(Error::Unavailable(format!("these locks are still held: {}", names.join(", "))));
        }
        for view in locks {
            store.break_lock(&view.name, "the verification is over").await?;
        }
    }
    while store.profile().records {
        let records = store.scan(prefix, &Page::FIRST).await?.records;
        if records.is_empty() {
            break;
        }
        for record in records {
            store.delete(&record.key, Expect::Any).await?;
        }
    }
    Ok(())
}
