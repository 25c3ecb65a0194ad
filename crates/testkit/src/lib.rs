//! The tools that Lockkeeper is tested with, and that you can test your own code with.
//!
//! - [`laws`]: what every store promises, and [`bugs`]: the planted bugs that the laws must catch.
//! - [`fenced`]: what every resource that checks the fence (the fencing token) promises, and the scenario of the paused process.
//! - [`SimulatedKeeper`]: a keeper on a clock that you turn, to try loss, pause and expiry in milliseconds in your own tests.
//! - [`scenarios`]: failover, lost messages and crowds, on real servers.
//! - [`history`]: a recorder, and checkers that find two holders, a fence that went back, a stale write.
//! - [`proxy`]: a TCP proxy that cuts, holds, resets, duplicates and throttles at message boundaries.
//! - [`ratio`]: measures a store beside a peer, for the benchmarks; [`lock_table`]: drives a store beside the lock table of `core`.
//! - [`verify`]: runs the laws on a store that its user runs already, and gives a verdict for each promise.
//! - [`torture`]: client processes that contend in real stores, faults, and checks: the matrix of faults.
//! - [`servers`]: starters for real servers; [`resource`]: things for a lock to protect, fenced and not; [`stop`]: stops a process.

pub mod bugs;
pub mod fenced;
pub mod history;
pub mod laws;
#[cfg(feature = "servers")]
pub mod lock_table;
mod port;
pub mod proxy;
pub mod ratio;
pub mod resource;
#[cfg(feature = "servers")]
pub mod scenarios;
#[cfg(feature = "servers")]
pub mod servers;
mod simulated_keeper;
pub mod stop;
#[cfg(feature = "servers")]
pub mod torture;
pub mod verify;

pub use simulated_keeper::SimulatedKeeper;
