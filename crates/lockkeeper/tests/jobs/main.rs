//! Jobs in a PostgreSQL table, on a real server.
#![cfg(feature = "postgres")]

mod batch;
mod common;
mod crowd;
mod golden;
mod hostile;
mod install;
mod lost;
mod planted;
mod prepared;
mod worker;
