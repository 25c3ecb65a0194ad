//! `lockkeeper gate`: the real program between real clients and a real service.
#![cfg(feature = "gate")]

#[path = "../common/mod.rs"]
mod common;
mod crowd;
mod drain;
mod hostile;
mod lost;
mod pass;
mod pause;
mod tools;
mod trouble;
mod websocket;
