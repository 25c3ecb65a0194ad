use lockkeeper_core::Error;
use tokio_postgres::error::Severity;

/// Why a request has no good answer.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// It was never sent.
    Away(String),
    /// It was never sent: the connection had ended by then. A new one may be made at once.
    Ended,
    /// It was sent, and nobody knows what became of it.
    Unheard(String),
    /// The server refused it, and undid what it had begun.
    Refused {
        /// The SQLSTATE.
        code: String,
        /// What it said.
        text: String,
    },
    /// It is no use to go on.
    Told(Error),
}

impl Failure {
    /// Our tables or functions are not there (any more).
    pub fn is_missing(&self) -> bool {
        matches!(self, Failure::Refused { code, .. }
            if matches!(code.as_str(), "42P01" | "42883" | "3F000" | "42704" | "42703"))
    }

    /// What a failure of a request means.
    pub fn of_request(error: &tokio_postgres::Error, to: &str) -> Self {
        match error.as_db_error() {
            // Undone as a whole: it was a transaction of its own.
            Some(told) if told.parsed_severity() == Some(Severity::Error) => {
                Failure::Refused { code: told.code().code().into(), text: told.message().into() }
            }
            // Anything worse ends the connection, perhaps between the commit and the answer.
            _ => Failure::Unheard(format!("the connection to {to} broke: {}", chain(error))),
        }
    }

    /// What a failure to connect or to log in means: nothing was asked for yet.
    pub fn while_connecting(error: &tokio_postgres::Error, to: &str) -> Self {
        match error.as_db_error() {
            Some(told) => Failure::Refused { code: told.code().code().into(), text: told.message().into() },
            // The client library says so in words only.
            None if chain(error).ends_with("password missing") => {
                Failure::Refused { code: "28000".into(), text: "that a password is needed".into() }
            }
            None => Failure::Away(format!("no PostgreSQL at {to}: {}", chain(error))),
        }
    }
}

/// An error and what caused it: tokio-postgres leaves the cause out of its own words.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// What each refusal means to somebody who wants a lock, and what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, text) = match failure {
            Failure::Away(text) => return Error::Unavailable(text),
            Failure::Ended => return Error::Unavailable("the connection has ended; try again".into()),
            Failure::Unheard(text) => return Error::Unknown(text),
            Failure::Told(error) => return error,
            Failure::Refused { code, text } => (code, text),
        };
        let told = format!("PostgreSQL says {text} ({code})");
        match code.as_str() {
            "28P01" | "28000" => Error::Denied(format!(
                "{told}. Give user and password in the address, as postgres://USER:PASSWORD@HOST/DATABASE"
            )),
            "3D000" => Error::Invalid(format!("{told}. Name a database that is there, or make it first")),
            "LK001" => Error::Limited(text),
            "LK002" => Error::Invalid(text),
            "25006" => Error::Unavailable(format!(
                "{told}. This is a standby, or may only be read: name the primary, or a name that follows it"
            )),
            "53100" => Error::Limited(format!("{told}. The server's disk is full: free some space")),
            "53200" | "54000" => Error::Limited(told),
            "53300" => Error::Unavailable(format!("{told}. Raise max_connections, or put a pooler in front")),
            "57P03" | "57P01" | "57P02" => {
                Error::Unavailable(format!("{told}. The server is starting or stopping; try again soon"))
            }
            "42501" => Error::Denied(told),
            // Undone as a whole, whatever it was: asking again is safe.
            _ => Error::Unavailable(told),
        }
    }
}
