//! Code that several stores need and no single store owns. This crate knows no backend: `core` and `host` are the only crates of the
//! workspace that it depends on.
//!
//! | module | what it does |
//! |---|---|
//! | [`InFlight`] | accounts for the requests in flight on a connection, and notices a silent server |
//! | [`run_batches`] | sends the requests of many tasks in batches |
//! | [`admission`] | core's rule of admission for clients that read the queues themselves |
//! | [`HoldRegistry`] | keeps the holds of a process whose session or lease is shared, and ends those that expire |
//! | [`SingleFlight`] | lets one of many tasks create the value that all of them need |
//! | [`hash_attempt`], [`hash_owner`], with the feature `hash` | stand for secrets that other clients may read |
//! | [`RecentSet`] | remembers hints that may be forgotten |
//! | [`read_clock`] | reads the clock of a server, with the bounds of the moment |
//! | [`CancelSignal`] | connects a running acquire call with the release that cancels it |
//! | [`EventHub`] | passes events on to the watchers of this process |
//! | [`WaiterTtls`] | finds the shortest ttl of the waiters of this process |
//! | [`PendingRequests`] | lists the lock requests of this process without an answer, so that a release can cancel them |
//! | [`lent_records!`] | the traits of records and rate limits for a store whose records run on its own thread |
//! | [`no_records!`] | the `Records` trait of a store without records |
//! | [`TlsPaths`], [`login`], [`server_list`] | take the options that several stores share from a URL |
//! | `tls_config`, with the feature `tls` | makes the TLS configuration of a connection |
//! | [`RecordLimits`] | keeps rate limits in records, by compare-and-swap |
//! | [`IoThread`] | runs the sockets and timers of a store on a thread of its own |
#![deny(missing_docs)]

// For the macros of this crate.
#[doc(hidden)]
pub use async_trait::async_trait as __async_trait;
#[doc(hidden)]
pub use lockkeeper_core as __core;

/// Stands for an attempt where other clients may read it.
pub type AttemptHash = [u8; 16];

pub mod admission;
mod batch_delay;
mod batch_loop;
mod cancel_signal;
mod clock_reading;
mod event_hub;
mod hold_registry;
mod in_flight;
mod io_thread;
mod lent_records;
mod no_records;
mod pending;
mod recent_set;
mod record_limits;
#[cfg(feature = "hash")]
mod secret_hash;
mod single_flight;
#[cfg(feature = "tls")]
mod tls;
mod url_options;
mod waiter_ttls;

pub use batch_loop::{BatchRule, run_batches};
pub use cancel_signal::CancelSignal;
pub use clock_reading::read_clock;
pub use event_hub::EventHub;
pub use hold_registry::{
    EndOutcome, HoldRegistry, HoldTable, KnownGrant, OwnHold, RegisteredCall, UnfinishedRelease,
};
pub use in_flight::{InFlight, Request};
pub use io_thread::{IoThread, Task};
pub use pending::{PendingRequest, PendingRequests};
pub use recent_set::RecentSet;
pub use record_limits::{RecordClient, RecordLimits};
#[cfg(feature = "hash")]
pub use secret_hash::{hash_attempt, hash_owner};
pub use single_flight::SingleFlight;
#[cfg(feature = "tls")]
pub use tls::tls_config;
pub use url_options::{TlsPaths, login, server_list};
pub use waiter_ttls::WaiterTtls;
