//! Everything that the author of a store needs, in one place: the traits, their types, the shared rules and the clock.
//!
//! A store implements [`Locks`], [`Records`], [`Limits`] and [`Examine`], and [`Lockkeeper::with_store`](crate::Lockkeeper::with_store)
//! makes a keeper of it. It declares its guarantees in a [`Profile`]; the laws of the crate `lockkeeper-testkit` test each declared one.
//! Calls for what it does not declare return [`Error::Unsupported`].
//!
//! | a store that | uses |
//! |---|---|
//! | computes admission itself | [`admission`]: who may hold a lock now; [`deadlock`]: which waiters wait for each other |
//! | keeps its locks in memory | [`table`]: the reference lock table, without IO |
//! | asks a quorum of servers | [`vote`] |
//! | decides about rate limits itself | [`limit`]: the token bucket, without IO; with records only: `RecordLimits` of `lockkeeper-store-kit` |
//! | is opened by a URL | [`StoreUrl`], [`Secret`] for passwords |
//! | has connections, batches or watchers | the crate `lockkeeper-store-kit` |
//!
//! An invariant that every store keeps: [`Grant::sent_at`] is the moment at which the request was *sent*, never the moment of
//! the reply, because the holder counts its deadline from it.

pub use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Busy, ClockReading, DeleteOutcome, Error, Event, EventKind,
    EventStream, Examination, Examine, Expect, Fence, Finding, Grant, Guarantee, Holder, HolderView,
    LimitSupport, Limits, LockName, LockPage, LockRequest, LockView, Locks, Mode, Names, Owner, Page,
    Profile, Promise, Purpose, Record, RecordPage, Records, ReleaseOutcome, RenewOutcome, RequestKey, Result,
    Secret, ServerReport, SettingChange, Severity, Store, StoreUrl, Version, Wait, WaitOrder, WaiterView,
    WallTime, WriteOutcome, admission, deadlock, limit, limits, table, vote,
};
pub use lockkeeper_host::{Clock, SystemClock, Timer, VirtualClock, random_128, sleep_until};
