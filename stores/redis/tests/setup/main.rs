//! Servers as they are found: with settings that lose locks, behind passwords and TLS, full, silent, restarted. The store
//! says what is wrong in words that help, does no harm, and works again by itself when the trouble is over.

#[path = "../common/mod.rs"]
mod common;

mod endpoints;
mod settings;
mod trouble;
mod waiters;
