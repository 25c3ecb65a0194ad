//! The heart of Lockkeeper: the words, the rules and the machines, without any IO.
//!
//! Everything here is told the time and handed its dice; nothing here opens a socket, reads a clock or starts a thread.
//! That is what makes it possible to check the machines exhaustively (see `tests/`).
//!
//! - The words: [`LockName`], [`Fence`], [`Attempt`], [`Owner`], [`Holder`], [`Ask`], [`Grant`], [`Profile`].
//! - The answers: [`Acquired`], [`Renewal`], [`Release`], and [`Error`] with its one table of [`Outcome`]s.
//! - The doors: [`Locks`] and [`Records`], which every store implements.
//! - The machines: [`table::Table`], the reference for every store, and [`lease::Lease`], the truth behind every guard.
#![deny(missing_docs)]

mod address;
mod ask;
pub mod deadlock;
mod error;
mod fence;
mod id;
pub mod lease;
mod name;
mod profile;
mod record;
pub mod rules;
mod secret;
mod store;
pub mod table;
mod time;
mod view;
pub mod vote;

pub use address::Address;
pub use ask::{Acquired, Ask, Busy, Claim, Grant, Mode, Release, Renewal, Wait, limits};
pub use error::{Error, Outcome, Result};
pub use fence::Fence;
pub use id::{Attempt, Holder, Owner};
pub use name::{LockName, Names};
pub use profile::{Profile, Promise, Purpose, Waiting};
pub use record::{Delete, Expect, Record, RecordPage, Version, Write};
pub use secret::Secret;
pub use store::{EventStream, Locks, Records, Store};
pub use time::{Moment, Wall};
pub use view::{Event, EventKind, Held, LockPage, LockView, Page, Queued};
