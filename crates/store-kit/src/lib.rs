//! What several stores need and no single store owns. This crate knows no backend: `core` and `host` are the only crates of the
//! workspace that it depends on.
//!
//! | module | what it does |
//! |---|---|
//! | [`InFlight`] | accounts for the requests in flight on a connection, and notices a silent server |
//! | [`BatchDelay`] | decides how long a sender of batches waits for more requests |
//! | [`RecentSet`] | remembers hints that may be forgotten |
//! | [`EventHub`] | passes events on to the watchers of this process |
//! | [`WaiterTtls`] | finds the shortest ttl of the waiters of this process |
//! | [`RecordLimits`] | keeps rate limits in records, by compare-and-swap |
//! | [`IoThread`] | runs the sockets and timers of a store on a thread of its own |
#![deny(missing_docs)]

mod batch_delay;
mod event_hub;
mod in_flight;
mod io_thread;
mod recent_set;
mod record_limits;
mod waiter_ttls;

pub use batch_delay::BatchDelay;
pub use event_hub::EventHub;
pub use in_flight::{InFlight, Request};
pub use io_thread::{IoThread, Task};
pub use recent_set::RecentSet;
pub use record_limits::{RecordClient, RecordLimits};
pub use waiter_ttls::WaiterTtls;
