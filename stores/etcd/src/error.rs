//! Failures of requests to etcd: not sent, no reply, rejected; and the core error that each becomes.

use lockkeeper_core::Error;
use tonic::{Code, Status};

/// Why a request failed.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The request was not sent, or etcd rejected it before any work.
    NotSent(String),
    /// The request was sent and no reply came: its outcome is unknown.
    NoReply(String),
    /// etcd rejected the request, and did not apply it unless the database is full.
    Rejected(Code, String),
}

impl Failure {
    /// Classifies a gRPC status. etcd also replies *unavailable* when it has proposed a request and did not see it
    /// committed, so that is no rejection.
    pub fn of(status: &Status, at: &str) -> Self {
        let text = format!("{at}: {}", status.message());
        if never_sent(status) {
            return Failure::NotSent(format!("no etcd at {text}"));
        }
        match status.code() {
            // etcd checks this before any work, because the client sends `hasleader`.
            Code::Unavailable if status.message() == "etcdserver: no leader" => Failure::NotSent(text),
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated => Failure::Rejected(status.code(), status.message().to_owned()),
            _ => Failure::NoReply(text),
        }
    }

    /// Whether etcd may have applied the request, or may still do so. With a full database etcd checks the space
    /// twice, before and after it applies a request. A request that the second check rejects has been applied.
    pub fn may_be_applied(&self) -> bool {
        match self {
            Failure::NotSent(_) => false,
            Failure::NoReply(_) => true,
            Failure::Rejected(code, text) => {
                *code == Code::ResourceExhausted && text.contains("space exceeded")
            }
        }
    }

    /// Whether another member might succeed.
    pub fn concerns_member(&self) -> bool {
        !matches!(self, Failure::Rejected(..))
    }

    /// The lease of the request does not exist.
    pub fn lease_is_gone(&self) -> bool {
        matches!(self, Failure::Rejected(Code::NotFound, text) if text.contains("lease not found"))
    }

    /// The login token has expired, or the member does not know it.
    pub fn needs_login(&self) -> bool {
        match self {
            Failure::Rejected(Code::Unauthenticated, _) => true,
            Failure::Rejected(Code::InvalidArgument, text) => {
                text.contains("auth") && text.contains("revision")
            }
            _ => false,
        }
    }
}

/// Whether the client could not even connect.
fn never_sent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let refused = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if refused == Some(std::io::ErrorKind::ConnectionRefused) || error.to_string().contains("tcp connect")
        {
            return true;
        }
        source = error.source();
    }
    false
}

/// The meaning of each failure to the caller, and what an operator can do.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, text) = match failure {
            Failure::NotSent(text) => return Error::Unavailable(text),
            Failure::NoReply(text) => return Error::Unknown(text),
            Failure::Rejected(code, text) => (code, format!("etcd says: {text}")),
        };
        match code {
            Code::PermissionDenied => Error::Denied(format!(
                "{text}. This user needs permission to read and write all keys with the prefix of the URL"
            )),
            Code::Unauthenticated => Error::Denied(text),
            Code::InvalidArgument | Code::FailedPrecondition
                if ["authentication", "user name is empty", "password", "authentication is not enabled"]
                    .iter()
                    .any(|said| text.contains(said)) =>
            {
                Error::Denied(format!("{text}. Give both in the URL, as etcd://USER:PASSWORD@HOST"))
            }
            Code::ResourceExhausted if text.contains("too many requests") => Error::Unavailable(text),
            Code::ResourceExhausted => {
                Error::Limited(format!("{text}. Compact and defragment, or raise --quota-backend-bytes"))
            }
            Code::InvalidArgument if text.contains("too large") || text.contains("too many operations") => {
                Error::Limited(text)
            }
            Code::InvalidArgument => Error::Invalid(text),
            _ => Error::Unavailable(text),
        }
    }
}
