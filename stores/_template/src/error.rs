//! Failures of requests to the backend: not sent, no reply, rejected; and the core error that each becomes.

use lockkeeper_core::Error;

/// Why a request failed. Fill in: a function that makes one from each error of the driver. An error that it does not know is
/// [`Failure::NoReply`]: "nothing has happened" must be proven, "unknown" is always safe.
#[derive(Debug)]
#[allow(dead_code, reason = "nothing reaches a backend yet; remove this line with the first statement")]
pub enum Failure {
    /// The request was not sent: a retry is safe.
    NotSent(String),
    /// The request was sent and no reply came: its outcome is unknown.
    NoReply(String),
    /// The backend rejected the request and did not apply it.
    Rejected(String),
    /// This statement is not written yet. Remove it in a copy when none is left.
    NotWritten(&'static str),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotSent(text) => Error::Unavailable(text),
            Failure::NoReply(text) => Error::Unknown(text),
            Failure::Rejected(text) => Error::Denied(text),
            Failure::NotWritten(statement) => {
                Error::Unsupported(format!("the template store has no statement to {statement}"))
            }
        }
    }
}
