//! Text that no output shows: a password, or a URL that may contain one.

use std::fmt;

/// A password, an access key, or a URL that may contain one.
///
/// `Debug` and `Display` print `***`, and there is no `Serialize`: a secret does not get into a log, an error or a file as
/// part of another value. [`Secret::expose`] is the only way to the text, so a search for it finds every use.
///
/// ```
/// # use lockkeeper_core::Secret;
/// let password = Secret::new("hunter2");
/// assert_eq!(format!("{password:?} {password}"), "*** ***");
/// assert_eq!(password.expose(), "hunter2");
/// ```
///
/// ```compile_fail
/// # use lockkeeper_core::Secret;
/// serde_json::to_string(&Secret::new("hunter2"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps a text secret.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The text: for the server that needs it, never for a log or an error.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Secret(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Secret(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
