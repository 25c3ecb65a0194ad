//! Lockkeeper lets exactly one process of a fleet do a thing, says so truthfully, and keeps a late writer from doing
//! harm: one API over many stores, and a [`Fence`] with every grant.
//!
//! ```
//! # async fn settle(_: lockkeeper::Fence) {}
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! use lockkeeper::Lockkeeper;
//! use std::time::Duration;
//!
//! let keeper = Lockkeeper::open("memory:").await?;     // or sqlite:PATH, for all processes of a host
//! let guard = keeper
//!     .lock("settlement/2026-06-11")
//!     .ttl(Duration::from_secs(30))                    // how long our silence may last
//!     .wait(Duration::from_secs(5))                    // then Error::Busy, which says who has it
//!     .acquire()
//!     .await?;
//! guard.run(settle(guard.fence())).await?;             // ended before the deadline if the lock is lost
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! **Ask first what the lock is for.** If doing it twice is a waste, any store will do. If doing it twice is harm, say
//! [`LockBuilder::for_correctness`], and let the resource check the fence: no lock of any store stops a process that
//! was paused and wakes up believing that it still holds the lock. A resource that remembers the highest fence it has
//! seen and refuses lower ones does.
//!
//! **Often the best lock is none**: an idempotent operation, a compare-and-swap, a unique key.
//!
//! # What a guard promises
//! - [`Guard::is_held`] is a comparison with a deadline that counts from the moment the request was *sent*, on a clock
//!   that goes on during suspend. It needs no IO and is right even in the first instruction after a pause.
//! - All guards of a keeper are renewed in batches by one thread of their own: a busy runtime does not lose locks.
//! - Every future here may be dropped at any await point; what it had asked for is given back in the background.
//! - Dropping a [`Guard`] ends it at once and releases it in the background; the ttl is the last resort.
#![deny(missing_docs)]

mod builder;
mod driver;
mod guard;
#[cfg(feature = "tower")]
pub mod idempotency;
mod keeper;
mod open;
mod own_process;
#[cfg(feature = "postgres")]
pub mod postgres;
mod recipes;
mod sequencer;

pub use builder::LockBuilder;
pub use guard::Guard;
pub use keeper::Lockkeeper;
pub use lockkeeper_core::lease::{State, Why};
pub use lockkeeper_core::{
    Attempt, Busy, Error, Event, EventKind, EventStream, Fence, Held, Holder, LockName, LockPage, LockView,
    Locks, Mode, Moment, Outcome, Owner, Page, Profile, Promise, Purpose, Queued, Records, Release, Result,
    Store, Waiting, Wall, limits,
};
pub use lockkeeper_host::{Clock, SystemClock};
pub use open::{Init, default_url, init, schemes};
pub use recipes::KEY_BYTES;
pub use recipes::cell::VALUE_BYTES;
pub use recipes::election::{Election, Leader, Proclamation};
pub use recipes::once::{Claim, Done, OnFailure, Once, Stored, Turn};
pub use recipes::register::{Entry, Register, Swap, Updated};
pub use recipes::windows::{EndedRun, Run, Window, WindowRecord, Windows};
pub use sequencer::Sequencer;

/// The README's Rust compiles and runs.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../../../README.md")]
mod readme {}

/// So does that of the pages of the recipes.
#[cfg(all(doctest, feature = "memory"))]
mod pages {
    #[doc = include_str!("../../../docs/cron.md")]
    mod cron {}
    #[doc = include_str!("../../../docs/election.md")]
    mod election {}
    #[cfg(feature = "tower")]
    #[doc = include_str!("../../../docs/once.md")]
    mod once {}
    #[doc = include_str!("../../../docs/register.md")]
    mod register {}
    #[doc = include_str!("../../../docs/fenced/sequencer.md")]
    mod sequencer {}
}
