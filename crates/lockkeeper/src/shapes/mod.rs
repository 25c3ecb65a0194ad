//! Locks of other shapes as types of their own: [`Semaphore`] and [`RwLock`]. Both are a [`LockBuilder`]
//! with a name and a way to use it; a request for several names is [`Lockkeeper::lock_all`].

mod rw_lock;
mod semaphore;

use std::time::Duration;

use lockkeeper_core::{Error, Owner, Result};
use lockkeeper_host::random_128;

use crate::builder::LockBuilder;
use crate::keeper::Lockkeeper;
pub use rw_lock::{DowngradeError, ReadGuard, RwLock, WriteGuard};
pub use semaphore::{Semaphore, SemaphorePermit};

/// The options of a request, for each hold of a shape.
#[derive(Clone, Debug)]
struct HoldOptions {
    ttl: Duration,
    wait: Option<Duration>,
    label: Option<String>,
    for_correctness: bool,
}

impl Default for HoldOptions {
    fn default() -> Self {
        HoldOptions { ttl: Duration::from_secs(30), wait: None, label: None, for_correctness: false }
    }
}

impl HoldOptions {
    fn apply(&self, mut builder: LockBuilder, owner: Option<Owner>) -> LockBuilder {
        builder = builder.ttl(self.ttl);
        if let Some(label) = &self.label {
            builder = builder.label(label);
        }
        if let Some(owner) = owner {
            builder = builder.owner(owner);
        }
        if self.for_correctness { builder.for_correctness() } else { builder }
    }
}

/// The setters that every shape has.
macro_rules! hold_options {
    () => {
        /// How long the store waits for a renewal of a holder: 100 ms to 24 h, 30 s by default.
        pub fn ttl(mut self, ttl: Duration) -> Self {
            self.options.ttl = ttl;
            self
        }

        /// How long a request may wait before [`Error::Busy`]. By default without a limit.
        pub fn wait(mut self, wait: Duration) -> Self {
            self.options.wait = Some(wait);
            self
        }

        /// The text that `list` and `inspect` show beside the host and the pid. By default the name of the process,
        /// as `ps` shows it.
        pub fn label(mut self, label: impl Into<String>) -> Self {
            self.options.label = Some(label.into());
            self
        }

        /// Refuses a store that can forget a holder or repeat a fence.
        pub fn for_correctness(mut self) -> Self {
            self.options.for_correctness = true;
            self
        }
    };
}
use hold_options;

/// Refuses a store that lacks what a shape needs.
fn need(keeper: &Lockkeeper, has: bool, shape: &str, needs: &str) -> Result<()> {
    if has {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "the {} store has no {needs}, and {shape} needs them: use sqlite:PATH on one host, redis://HOST or etcd://HOSTS for a \
         fleet",
        keeper.profile().store
    )))
}

/// An owner for one hold, with which its holder may enter again; `None` on a store without re-entry.
fn hold_owner(keeper: &Lockkeeper) -> Option<Owner> {
    keeper.profile().reentry.then(|| Owner::from_bytes(random_128()))
}
