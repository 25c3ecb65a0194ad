//! Scenarios with faults that several stores run, each on servers of its own. They are no laws: a test calls them one by one, because
//! the faults that a server must survive, and what may be left in it, are its own.

pub mod crowd;
pub mod failover;
pub mod lost_messages;
