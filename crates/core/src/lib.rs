//! The types, rules and state machines of Lockkeeper, without IO.
//!
//! Callers pass in the time and random bits; nothing here opens a socket, reads a clock or starts a thread. So the tests can
//! check the state machines exhaustively (see `tests/`).
//!
//! - Types: [`LockName`], [`Fence`] (the fencing token), [`Attempt`], [`Owner`], [`Holder`], [`LockRequest`], [`Grant`], [`Profile`].
//! - Answers: [`AcquireOutcome`], [`RenewOutcome`], [`ReleaseOutcome`], and [`Error`] with one table of [`Outcome`]s.
//! - Traits: [`Locks`], [`Records`], [`Limits`] and [`Examine`], which every store implements.
//! - State machines: [`table::Table`], the reference for every store, [`lease::Lease`], which decides whether a guard is valid, and
//!   [`limit::decide`], which decides about rate limits.
//! - [`faults`]: what each store is declared to keep under which fault.
//! - [`assignment`]: which member of a group owns which partition.
#![deny(missing_docs)]

pub mod admission;
pub mod assignment;
pub mod deadlock;
mod error;
mod examine;
pub mod faults;
mod fence;
mod finding;
mod id;
pub mod lease;
pub mod limit;
mod name;
mod poison;
mod profile;
mod record;
mod request;
mod secret;
mod store;
pub mod table;
mod time;
mod url;
mod view;
pub mod vote;

pub use error::{Error, Outcome, Result};
pub use examine::{ClockReading, Examination, Examine, ServerReport};
pub use fence::Fence;
pub use finding::{Finding, Promise, SettingChange, Severity};
pub use id::{Attempt, Holder, Owner};
pub use name::{LockName, Names};
pub use poison::IgnorePoison;
pub use profile::{Guarantee, LimitSupport, Profile, Purpose, WaitOrder};
pub use record::{DeleteOutcome, Expect, Record, RecordPage, Version, WriteOutcome};
pub use request::{
    AcquireOutcome, Busy, Grant, LockRequest, Mode, ReleaseOutcome, RenewOutcome, RequestKey, Wait, limits,
};
pub use secret::Secret;
pub use store::{EventStream, Limits, Locks, Records, Store};
pub use time::{BootInstant, WallTime};
pub use url::StoreUrl;
pub use view::{Event, EventKind, HolderView, LockPage, LockView, Page, WaiterView};
