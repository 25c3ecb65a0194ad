use lockkeeper_core::Error;
use tonic::{Code, Status};

/// Why a request has no good answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// It was never sent, or not even looked at.
    Away(String),
    /// It was sent, and nobody knows what became of it.
    Unheard(String),
    /// etcd refused it; nothing happened, unless there was no room for it.
    Refused(Code, String),
}

impl Failure {
    /// What a bad status means. `etcd` also says that it is unavailable when it has proposed something and did not hear of
    /// it again, so that is not taken for a refusal.
    pub fn of(status: &Status, at: &str) -> Self {
        let text = format!("{at}: {}", status.message());
        if never_sent(status) {
            return Failure::Away(format!("no etcd at {text}"));
        }
        match status.code() {
            // Said before anything is done, because we ask for it ("hasleader").
            Code::Unavailable if status.message() == "etcdserver: no leader" => Failure::Away(text),
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated => Failure::Refused(status.code(), status.message().to_owned()),
            _ => Failure::Unheard(text),
        }
    }

    /// Whether it may have happened, or may happen yet. Where there is no room etcd looks twice: before it begins, and when it is done.
    /// What is refused at the second look has happened.
    pub fn may_have_happened(&self) -> bool {
        match self {
            Failure::Away(_) => false,
            Failure::Unheard(_) => true,
            Failure::Refused(code, text) => {
                *code == Code::ResourceExhausted && text.contains("space exceeded")
            }
        }
    }

    /// Whether another server might do better.
    pub fn is_of_the_server(&self) -> bool {
        !matches!(self, Failure::Refused(..))
    }

    /// The lease that was to be used is gone.
    pub fn lease_is_gone(&self) -> bool {
        matches!(self, Failure::Refused(Code::NotFound, text) if text.contains("lease not found"))
    }

    /// The proof that we logged in has run out, or the server has forgotten it.
    pub fn wants_login(&self) -> bool {
        match self {
            Failure::Refused(Code::Unauthenticated, _) => true,
            Failure::Refused(Code::InvalidArgument, text) => {
                text.contains("auth") && text.contains("revision")
            }
            _ => false,
        }
    }
}

/// Whether the connection could not even be made.
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

/// What each failure means to somebody who wants a lock, and what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let (code, text) = match failure {
            Failure::Away(text) => return Error::Unavailable(text),
            Failure::Unheard(text) => return Error::Unknown(text),
            Failure::Refused(code, text) => (code, format!("etcd says: {text}")),
        };
        match code {
            Code::PermissionDenied => Error::Denied(format!(
                "{text}. This user needs to read and write everything that begins with the prefix of the address"
            )),
            Code::Unauthenticated => Error::Denied(text),
            Code::InvalidArgument | Code::FailedPrecondition
                if ["authentication", "user name is empty", "password", "authentication is not enabled"]
                    .iter()
                    .any(|said| text.contains(said)) =>
            {
                Error::Denied(format!("{text}. Give both in the address, as etcd://USER:PASSWORD@HOST"))
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
