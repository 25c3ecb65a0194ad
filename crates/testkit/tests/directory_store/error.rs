//! Failures of the file system: before the step changed anything, or perhaps after.

use std::fmt::Display;

use lockkeeper_core::Error;

/// A read failed: nothing has changed.
pub fn unavailable(error: impl Display) -> Error {
    Error::Unavailable(error.to_string())
}

/// A write failed, and may have reached the directory.
pub fn unknown(error: impl Display) -> Error {
    Error::Unknown(error.to_string())
}
