//! A thing that is done once, however often it is asked for: absent → running → done, with the result kept.

mod page;
mod parts;
mod turn;

use std::future::Future;
use std::time::Duration;

use lockkeeper_core::{Busy, Error, Fence, LockName, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::backoff::look_again;
use super::cell::{Cell, Seen};
use super::{name_of, need_records};
use crate::builder::LockBuilder;
use crate::guard::Guard;
use crate::keeper::Lockkeeper;
use page::Page;
pub use turn::Turn;

/// What is to become of a run that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// It is as if it had not been tried: the next caller runs again. The default.
    #[default]
    Retry,
    /// The failure is the result: later callers get it, and nobody runs again.
    Keep,
}

/// A key under which something is done once. Nothing happens before [`Once::run`] or [`Once::claim`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn charge(_: lockkeeper::Fence) -> Result<u64, String> { Ok(4711) }
/// for replayed in [false, true] {
///     let done = keeper.once("charge/order-42").run(charge).await?;
///     assert_eq!((done.result, done.replayed), (Ok(4711), replayed));
/// }
/// # Ok(())
/// # }
/// ```
///
/// The result is kept exactly once: a runner that lost its lease to another is refused. What `work` itself does is done
/// exactly once only where it is done with the fence, at a resource that refuses older ones: a runner that crashed in the
/// middle may have done it already, and one that was paused may still try.
#[must_use = "nothing happens before run() or claim()"]
#[derive(Clone, Debug)]
pub struct Once {
    keeper: Lockkeeper,
    key: String,
    print: Option<String>,
    ttl: Duration,
    keep: Duration,
    wait: Option<Duration>,
    on_failure: OnFailure,
    poll: Duration,
    for_correctness: bool,
}

/// A result, stored now or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done<T> {
    /// What it came to.
    pub result: T,
    /// The fence of the run that it came from.
    pub fence: Fence,
    /// It was there already; nothing was run.
    pub replayed: bool,
}

/// A result as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Whether the run went well.
    pub ok: bool,
    /// What it left.
    pub bytes: Vec<u8>,
}

/// The answer to a claim.
#[derive(Debug)]
pub enum Claim {
    /// It is done; this is the result.
    Done(Done<Stored>),
    /// It is ours to do.
    Turn(Box<Turn>),
}

impl Lockkeeper {
    /// What is done once under `key`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. A bad key is told by the
    /// first call.
    pub fn once(&self, key: impl Into<String>) -> Once {
        Once {
            keeper: self.clone(),
            key: key.into(),
            print: None,
            ttl: Duration::from_secs(30),
            keep: Duration::from_secs(24 * 60 * 60),
            wait: None,
            on_failure: OnFailure::Retry,
            poll: Duration::from_millis(500),
            for_correctness: false,
        }
    }
}

impl Once {
    /// What is asked for under the key: a body, a command. The same key with something else is [`Error::Invalid`], as it
    /// is a mistake of the caller's. Only a hash of it is kept. By default nothing is compared.
    pub fn fingerprint(mut self, request: impl AsRef<[u8]>) -> Self {
        let hash = Sha256::digest(request.as_ref());
        self.print = Some(hash.iter().map(|byte| format!("{byte:02x}")).collect());
        self
    }

    /// How long a runner's silence may last before another takes over: 100 ms to 24 h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long the result is kept; after that the key is as good as new. A day by default.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    /// How long to wait for somebody else's run before [`Error::Busy`]; zero: not at all. By default for ever.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// What is to become of a run that fails: by default it is tried again by the next caller.
    pub fn on_failure(mut self, what: OnFailure) -> Self {
        self.on_failure = what;
        self
    }

    /// How often a caller that waits looks for the result, beside standing in line. Every 500 ms by default.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Refuses a store that can forget what is done.
    pub fn for_correctness(mut self) -> Self {
        self.for_correctness = true;
        self
    }

    /// The result, from now or from before. `work` is called only if it is our turn, and dropped before the deadline if
    /// the lease cannot be kept: then the answer is [`Error::Lost`] and the next caller takes over. [`Error::Stale`] if
    /// somebody took over while we finished: our result was not kept, and theirs counts.
    ///
    /// Dropping the future gives the turn back; so does a panic. The next caller runs then, with a newer fence.
    pub async fn run<T, E, W>(self, work: impl FnOnce(Fence) -> W) -> Result<Done<Result<T, E>>>
    where
        T: Serialize + DeserializeOwned,
        E: Serialize + DeserializeOwned,
        W: Future<Output = Result<T, E>>,
    {
        let turn = match self.claim().await? {
            Claim::Done(Done { result, fence, .. }) => {
                return Ok(Done { result: of_stored(result)?, fence, replayed: true });
            }
            Claim::Turn(turn) => turn,
        };
        let fence = turn.fence();
        let result = turn.guard().run(work(fence)).await?;
        turn.finish(to_stored(&result)?).await?;
        Ok(Done { result, fence, replayed: false })
    }

    /// The result if there is one, else the turn to make it. Waits while somebody else runs.
    pub async fn claim(self) -> Result<Claim> {
        need_records(&self.keeper, "a thing done once")?;
        self.check()?;
        let cell = Cell::new(&self.keeper, name_of("once/", &self.key)?);
        if let Some(done) = self.look(&cell).await? {
            return Ok(Claim::Done(done));
        }
        let guard = tokio::select! {
            biased;
            // Standing in line is the wait; looking now and then spares those at the end of a long line.
            done = self.watch_for_result(&cell) => return done.map(Claim::Done),
            guard = self.stand_in_line(&cell.key) => guard?,
        };
        self.begin(cell, guard).await
    }

    /// The result if there is one by now. Neither waits nor runs.
    pub async fn result(&self) -> Result<Option<Done<Stored>>> {
        need_records(&self.keeper, "a thing done once")?;
        self.look(&Cell::new(&self.keeper, name_of("once/", &self.key)?)).await
    }

    /// Whether the key is in use for something else than our fingerprint says.
    #[cfg(feature = "tower")]
    pub(crate) async fn stands_for_another(&self) -> Result<bool> {
        let Some(seen) = Cell::new(&self.keeper, name_of("once/", &self.key)?).read().await? else {
            return Ok(false);
        };
        let (page, _) = Page::parse(&self.key, &seen.value)?;
        Ok(page.check_print(&self.key, self.print.as_deref()).is_err())
    }

    fn check(&self) -> Result<()> {
        if self.keep < lockkeeper_core::limits::TTL_MIN {
            return Err(Error::invalid(format!(
                "the result is kept for {:?}: at least 100ms are needed",
                self.keep
            )));
        }
        Ok(())
    }

    async fn stand_in_line(&self, name: &LockName) -> Result<Guard> {
        let mut ask: LockBuilder = self.keeper.lock(name).ttl(self.ttl);
        if self.for_correctness {
            ask = ask.for_correctness();
        }
        match self.wait {
            Some(Duration::ZERO) => match ask.try_acquire().await? {
                Some(guard) => Ok(guard),
                None => Err(self.busy(name).await?),
            },
            Some(wait) => ask.wait(wait).acquire().await,
            None => ask.acquire().await,
        }
    }

    /// Who is at it, for one who does not wait.
    async fn busy(&self, name: &LockName) -> Result<Error> {
        let view = self.keeper.inspect(name).await?;
        let (held, waiting) = view.map_or_else(Default::default, |view| (view.held, view.waiting));
        Ok(Error::Busy(Box::new(Busy { name: name.clone(), held, waiting })))
    }

    async fn watch_for_result(&self, cell: &Cell) -> Result<Done<Stored>> {
        loop {
            look_again(&*self.keeper.0.clock, self.poll).await;
            // Trouble while looking is no trouble: the place in line will tell.
            match self.look(cell).await {
                Ok(Some(done)) => return Ok(done),
                Err(error @ Error::Invalid(_)) => return Err(error),
                _ => {}
            }
        }
    }

    /// The result, if there is one.
    async fn look(&self, cell: &Cell) -> Result<Option<Done<Stored>>> {
        match cell.read().await? {
            Some(seen) => self.judge(cell, &seen).await,
            None => Ok(None),
        }
    }

    /// The result that a page tells of; `None` if it tells of a run.
    async fn judge(&self, cell: &Cell, seen: &Seen) -> Result<Option<Done<Stored>>> {
        let (page, body) = Page::parse(&self.key, &seen.value)?;
        page.check_print(&self.key, self.print.as_deref())?;
        let Some(done) = &page.done else { return Ok(None) };
        let bytes = parts::gather(cell, &self.key, page.fence, done, body).await?;
        Ok(Some(Done { result: Stored { ok: done.ok, bytes }, fence: page.fence, replayed: true }))
    }

    /// Says in the record that we run, unless there is a result after all.
    async fn begin(&self, cell: Cell, guard: Guard) -> Result<Claim> {
        loop {
            let old = cell.read().await?;
            if let Some(seen) = &old {
                if let Some(done) = self.judge(&cell, seen).await? {
                    guard.release().await.ok();
                    return Ok(Claim::Done(done));
                }
                let (page, _) = Page::parse(&self.key, &seen.value)?;
                if page.fence > guard.fence() {
                    // Somebody was let in after us: we are late, and do not know it yet.
                    return Err(Error::Stale { yours: guard.fence(), seen: page.fence });
                }
            }
            let page = Page::running(guard.fence(), self.print.clone()).bytes(&[]);
            let ttl = Some(turn::forgotten_after(self.keep));
            // If not, the runner before us came through after all, or its page went: look again.
            if let Ok(running) = guard.run(cell.swap(old.as_ref(), &page, ttl)).await?? {
                let (key, print) = (self.key.clone(), self.print.clone());
                let (keep, on_failure) = (self.keep, self.on_failure);
                let turn = Turn { cell, guard, running, key, print, keep, on_failure };
                return Ok(Claim::Turn(Box::new(turn)));
            }
        }
    }
}

fn to_stored<T: Serialize, E: Serialize>(result: &Result<T, E>) -> Result<Stored> {
    let bytes = match result {
        Ok(value) => serde_json::to_vec(value),
        Err(value) => serde_json::to_vec(value),
    };
    let bytes = bytes.map_err(|e| Error::invalid(format!("the result cannot be written as JSON: {e}")))?;
    Ok(Stored { ok: result.is_ok(), bytes })
}

fn of_stored<T: DeserializeOwned, E: DeserializeOwned>(stored: Stored) -> Result<Result<T, E>> {
    let result = match stored.ok {
        true => serde_json::from_slice(&stored.bytes).map(Ok),
        false => serde_json::from_slice(&stored.bytes).map(Err),
    };
    result.map_err(|e| Error::invalid(format!("the stored result is not of this type: {e}")))
}
