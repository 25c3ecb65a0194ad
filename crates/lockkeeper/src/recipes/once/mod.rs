//! A thing that is done once, however often it is asked for: absent → running → done, with the result kept.

mod claim;
pub(crate) mod nested;
mod page;
mod parts;
mod run;
mod turn;

use std::time::Duration;

use lockkeeper_core::Fence;
use sha2::{Digest, Sha256};

use crate::keeper::Lockkeeper;
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

/// The longest that a result is kept. Stores count times in their own units, and longer ones are beyond some of them.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

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

    /// How long the result is kept; after that the key is as good as new. A day by default, and a hundred years at most.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep.min(LONGEST);
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
}
