//! Errors of PostgreSQL as errors of this crate: not done, or unknown.

use lockkeeper_core::Error;
use lockkeeper_postgres::tokio_postgres;
use tokio_postgres::error::Severity;

/// Why a statement has no good answer. `alone`: it was a transaction of its own, so a connection that broke may have
/// committed it.
pub(super) fn to_error(error: &tokio_postgres::Error, alone: bool) -> Error {
    let Some(db) = error.as_db_error().filter(|db| db.parsed_severity() == Some(Severity::Error)) else {
        let text = format!("the connection to PostgreSQL broke: {}", chain(error));
        return if alone { Error::Unknown(text) } else { Error::Unavailable(text) };
    };
    let text = format!("PostgreSQL says {} ({})", db.message(), db.code().code());
    match db.code().code() {
        "42501" => Error::Denied(text),
        "25006" => {
            Error::Unavailable(format!("{text}. The server is a standby or read-only: name the primary"))
        }
        "53100" | "53200" => Error::Limited(text),
        "55P03" => Error::Unavailable(format!("{text}. Another session has the table; try again")),
        // A name, a value or a table that cannot be.
        code if code.starts_with("42") || code.starts_with("22") || code == "0A000" => Error::Invalid(text),
        // Rolled back as a whole: a retry is safe.
        _ => Error::Unavailable(text),
    }
}

/// An answer that is not one of the statement's.
pub(super) fn unexpected(error: impl std::fmt::Display) -> Error {
    Error::Unknown(format!("PostgreSQL gave an answer that makes no sense: {error}"))
}

/// An error and what caused it: tokio-postgres leaves the cause out of its own words.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
