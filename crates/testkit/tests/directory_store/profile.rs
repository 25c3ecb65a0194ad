//! The guarantees of the store.

use std::time::Duration;

use lockkeeper_core::{Guarantee, Profile};

pub fn profile() -> Profile {
    Profile {
        exclusion: Guarantee::Kept,
        fence: Guarantee::Likely,
        durable: Guarantee::Likely,
        wake: Duration::from_millis(250),
        notes: vec!["the store does not sync its files: a power failure can undo the last steps".into()],
        ..Profile::undeclared("directory")
    }
}
