//! `lockkeeper doctor` against real stores: in health, and with one planted misconfiguration each, which it has to find.

#[path = "../common/mod.rs"]
mod common;
mod consensus;
mod dynamodb;
mod embedded;
mod postgres;
mod redis;
mod tools;
