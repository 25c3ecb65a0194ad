//! Failures of requests, and the core error that each of them becomes.

use lockkeeper_core::Error;
use tokio_postgres::error::Severity;

/// Why a request has no result.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The request was not sent.
    NotSent(String),
    /// The request was not sent because the connection had ended. The caller may connect again at once.
    ConnectionEnded,
    /// The request was sent, and its outcome is unknown.
    NoReply(String),
    /// The server rejected the request and rolled it back.
    Rejected {
        /// The SQLSTATE.
        code: String,
        /// The server's message.
        text: String,
    },
    /// The final error: a retry does not help.
    Final(Error),
}

impl Failure {
    /// A reply that this client cannot read.
    pub fn unexpected_reply() -> Self {
        Failure::NoReply("PostgreSQL sent a reply that this client cannot read".into())
    }

    /// Whether tables or functions of the store are missing.
    pub fn is_missing(&self) -> bool {
        matches!(self, Failure::Rejected { code, .. }
            if matches!(code.as_str(), "42P01" | "42883" | "3F000" | "42704" | "42703"))
    }

    /// The meaning of an error of a request.
    pub fn of_request(error: &tokio_postgres::Error, server: &str) -> Self {
        match error.as_db_error() {
            // Rolled back as a whole: each request is a transaction of its own.
            Some(db) if db.parsed_severity() == Some(Severity::Error) => {
                Failure::Rejected { code: db.code().code().into(), text: db.message().into() }
            }
            // Anything worse ends the connection, perhaps between the commit and the reply.
            _ => Failure::NoReply(format!("the connection to {server} broke: {}", chain(error))),
        }
    }

    /// The meaning of an error while connecting or logging in: no request was sent yet.
    pub fn while_connecting(error: &tokio_postgres::Error, server: &str) -> Self {
        match error.as_db_error() {
            Some(db) => Failure::Rejected { code: db.code().code().into(), text: db.message().into() },
            // The driver reports this case in its text only.
            None if chain(error).ends_with("password missing") => {
                Failure::Rejected { code: "28000".into(), text: "that a password is needed".into() }
            }
            None => Failure::NotSent(format!("no PostgreSQL at {server}: {}", chain(error))),
        }
    }
}

/// An error with its causes: tokio-postgres leaves the cause out of its own text.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// The meaning of each failure to a caller that wants a lock, and what the caller can do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, text) = match failure {
            Failure::NotSent(text) => return Error::Unavailable(text),
            Failure::ConnectionEnded => {
                return Error::Unavailable("the connection has ended; try again".into());
            }
            Failure::NoReply(text) => return Error::Unknown(text),
            Failure::Final(error) => return error,
            Failure::Rejected { code, text } => (code, text),
        };
        let report = format!("PostgreSQL says {text} ({code})");
        match code.as_str() {
            "28P01" | "28000" => Error::Denied(format!(
                "{report}. Give user and password in the address, as postgres://USER:PASSWORD@HOST/DATABASE"
            )),
            "3D000" => Error::Invalid(format!("{report}. Name an existing database, or create it first")),
            "LK001" => Error::Limited(text),
            "LK002" => Error::Invalid(text),
            "25006" => Error::Unavailable(format!(
                "{report}. The server is a standby or read-only: name the primary, or a name that follows it"
            )),
            "53100" => Error::Limited(format!("{report}. The server's disk is full: free some space")),
            "53200" | "54000" => Error::Limited(report),
            "53300" => {
                Error::Unavailable(format!("{report}. Raise max_connections, or put a pooler in front"))
            }
            "57P03" | "57P01" | "57P02" => {
                Error::Unavailable(format!("{report}. The server is starting or stopping; try again soon"))
            }
            "42501" => Error::Denied(report),
            // Rolled back as a whole: the caller may safely retry.
            _ => Error::Unavailable(report),
        }
    }
}
