//! Errors of PostgreSQL as errors of this crate: not done, or unknown.

use lockkeeper_core::{Error, Fence};
use tokio_postgres::error::{DbError, Severity};

use crate::count_verdict;

/// The SQLSTATE of a guarded table for a stale writer.
pub(super) const STALE: &str = "LK065";
/// The SQLSTATE for a writer that presents no fence, or a malformed one.
pub(super) const UNFENCED: &str = "LK064";

/// The refusal of a [guarded table](super::table): [`Error::Stale`] or [`Error::Invalid`]. `None`: the error is about something
/// else.
pub fn refusal(error: &tokio_postgres::Error) -> Option<Error> {
    from_db_error(error.as_db_error()?)
}

fn from_db_error(error: &DbError) -> Option<Error> {
    match error.code().code() {
        STALE => {
            let mut numbers = error.detail()?.split_whitespace().filter_map(|word| word.split_once('='));
            let mut next = |key: &str| numbers.find(|(k, _)| *k == key).and_then(|(_, n)| n.parse().ok());
            let (presented, seen) = (next("presented")?, next("seen")?);
            let (presented, seen) = (Fence::new(presented).ok()?, Fence::new(seen).ok()?);
            count_verdict("postgres_table", Err::<(), _>(Error::Stale { presented, seen })).err()
        }
        UNFENCED => {
            Some(Error::invalid(format!("{}: {}", error.message(), error.hint().unwrap_or_default())))
        }
        _ => None,
    }
}

/// Why a statement has no good answer. `alone`: it was a transaction of its own, so a connection that broke may have committed it.
pub(super) fn to_error(error: &tokio_postgres::Error, alone: bool) -> Error {
    let Some(db) = error.as_db_error().filter(|db| db.parsed_severity() == Some(Severity::Error)) else {
        let text = format!("the connection to PostgreSQL broke: {}", chain(error));
        return if alone && !unsent(error) { Error::Unknown(text) } else { Error::Unavailable(text) };
    };
    let text = format!("PostgreSQL says {} ({})", db.message(), db.code().code());
    match db.code().code() {
        STALE | UNFENCED => from_db_error(db).unwrap_or(Error::Unavailable(text)),
        "42501" => Error::Denied(text),
        "25006" => {
            Error::Unavailable(format!("{text}. This is a standby, or may only be read: name the primary"))
        }
        "53100" | "53200" => Error::Limited(text),
        "55P03" => Error::Unavailable(format!("{text}. Another session has it; try again")),
        "42602" | "42601" | "42703" | "42P01" | "0A000" | "22021" => Error::Invalid(text),
        // Undone as a whole, whatever it was: asking again is safe.
        _ => Error::Unavailable(text),
    }
}

/// Whether it cannot have reached the server.
fn unsent(error: &tokio_postgres::Error) -> bool {
    error.to_string().starts_with("error serializing parameter")
}

/// An error and what caused it: tokio-postgres leaves the cause out of its own words.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
