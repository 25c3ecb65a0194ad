//! What several stores need and no single one owns. It knows no backend: `core` and `host` are the only crates of the
//! workspace that it may depend on.
#![deny(missing_docs)]

mod in_flight;

pub use in_flight::{InFlight, Request};
