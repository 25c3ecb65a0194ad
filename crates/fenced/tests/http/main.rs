//! The layers for HTTP: what is refused, what waits, and ten thousand interleavings.
#![cfg(feature = "http")]

mod client;
mod interleavings;
mod laws;
mod layer;
mod shaky;
mod tools;
