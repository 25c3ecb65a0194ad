//! The guarantees of the store.

use std::time::Duration;

use lockkeeper_core::{Finding, Guarantee, Profile, Promise};

pub fn profile() -> Profile {
    Profile {
        exclusion: Guarantee::Kept,
        fence: Guarantee::Likely,
        durable: Guarantee::Likely,
        wake: Duration::from_millis(250),
        findings: vec![Finding::risk(
            Promise::Durability,
            "the store does not sync its files: a power failure can undo the last steps",
        )],
        ..Profile::undeclared("directory")
    }
}
