//! Work that is done once, however often it is requested: absent → running → done, with the result stored.

pub(crate) mod nested;
mod permit;
mod record;
mod result;
mod run;
mod start;

use std::time::Duration;

use lockkeeper_core::Fence;
use sha2::{Digest, Sha256};

use crate::keeper::Lockkeeper;
pub use permit::RunPermit;

/// The record that a failed run leaves behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// Nothing: the next caller runs the work again. The default.
    #[default]
    Retry,
    /// The failure is the result: later callers receive it, and the work is not run again.
    Keep,
}

/// The longest time for which a result is stored. Stores count times in their own units, and some cannot
/// represent longer ones.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A key under which work is done once. Nothing happens before [`Once::run`] or [`Once::claim`].
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
/// The result is stored exactly once: a runner that lost its lease to another is refused. The effects of
/// `work` happen exactly once only if `work` sends the fence (the fencing token) to a resource that refuses
/// older ones: a runner that crashed may have done the work already, and one that was paused may still try.
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

/// A result, stored by this call or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done<T> {
    /// The result.
    pub result: T,
    /// The fence of the run that produced the result.
    pub fence: Fence,
    /// Whether the result was found, and nothing was run.
    pub replayed: bool,
}

/// A result as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Whether the run succeeded.
    pub ok: bool,
    /// The bytes of the result.
    pub bytes: Vec<u8>,
}

/// The answer of [`Once::claim`].
#[derive(Debug)]
pub enum OnceStart {
    /// The work is done; this is the result.
    Done(Done<Stored>),
    /// The caller has to do the work.
    Run(Box<RunPermit>),
}

impl Lockkeeper {
    /// The work that is done once under `key`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. The
    /// first call reports an invalid key.
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
    /// The content that the key stands for: a request's body, a command. The same key with another fingerprint returns
    /// [`Error::Invalid`](crate::Error::Invalid), because the caller made a mistake. Only a hash is stored. By default nothing is
    /// compared.
    pub fn fingerprint(mut self, request: impl AsRef<[u8]>) -> Self {
        let hash = Sha256::digest(request.as_ref());
        self.print = Some(hash.iter().map(|byte| format!("{byte:02x}")).collect());
        self
    }

    /// How long the store waits for a renewal of the runner before another caller takes over: 100 ms to 24
    /// h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long the result is stored; after that the key can be used again. A day by default, a hundred
    /// years at most.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep.min(LONGEST);
        self
    }

    /// How long to wait for another caller's run before [`Error::Busy`](crate::Error::Busy); zero means not at all. By default
    /// without a limit.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// The record that a failed run leaves behind: by default the next caller tries again.
    pub fn on_failure(mut self, what: OnFailure) -> Self {
        self.on_failure = what;
        self
    }

    /// How often a waiting caller polls for the result, beside its place in the queue. Every 500 ms by
    /// default.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Refuses a store that can forget a record.
    pub fn for_correctness(mut self) -> Self {
        self.for_correctness = true;
        self
    }
}
