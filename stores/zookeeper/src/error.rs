//! Failures of requests to ZooKeeper, and the errors that callers get for them.

use lockkeeper_core::Error;
use zookeeper_client as zk;

/// Why a request failed.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The request was not sent.
    NotSent(String),
    /// The request was not sent, and a retry will not be either: one side does not trust the other's certificate.
    Untrusted(String),
    /// The request was sent, and no reply came: its outcome is unknown.
    NoReply(String),
    /// The session has ended, and the servers delete its nodes. The request may have been applied before.
    SessionEnded,
    /// ZooKeeper rejected the request, and nothing was applied. The number is that of the rejected operation in its
    /// transaction.
    Rejected(usize, zk::Error),
}

impl Failure {
    pub fn of(error: zk::Error) -> Self {
        Failure::at(0, error)
    }

    /// Classifies the error of an operation. Only errors that are known to be rejections count as such.
    pub fn at(step: usize, error: zk::Error) -> Self {
        use zk::Error::*;
        match error {
            // `SessionMoved` is not among these: the session continues on another server, and only this connection is
            // useless.
            SessionExpired | ClientClosed => Failure::SessionEnded,
            NoNode
            | NoAuth
            | BadVersion
            | NoChildrenForEphemerals
            | NodeExists
            | NotEmpty
            | InvalidAcl
            | AuthFailed
            | NotReadOnly
            | QuotaExceeded
            | Throttled
            | MarshallingError
            | Unimplemented
            | BadArguments(_)
            | NoHosts => Failure::Rejected(step, error),
            other => Failure::NoReply(other.to_string()),
        }
    }

    pub fn is(&self, what: &zk::Error) -> bool {
        matches!(self, Failure::Rejected(_, error) if error == what)
    }

    /// `None` for a missing node, for calls that do not need it.
    pub fn if_exists<T>(result: Result<T, Failure>) -> Result<Option<T>, Failure> {
        match result {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.is(&zk::Error::NoNode) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Why a step of an operation failed: a request, or a reason that ends the operation.
pub enum StepError {
    Backend(Failure),
    Final(Error),
}

impl From<Failure> for StepError {
    fn from(failure: Failure) -> Self {
        StepError::Backend(failure)
    }
}

impl From<Error> for StepError {
    fn from(error: Error) -> Self {
        StepError::Final(error)
    }
}

/// Why a server does not accept a session.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "some of them only TLS tells"))]
pub enum RefusalCause {
    /// The client does not trust the server's certificate, or the server rejects the client's: a retry does not help.
    Untrusted(String),
    /// The server does not speak TLS.
    NotTls,
    /// The server closed the connection without a reply.
    Silent,
    /// Another cause.
    Other(String),
}

/// The error that the caller of the store gets, with advice.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = match failure {
            Failure::NotSent(text) => return Error::Unavailable(text),
            Failure::Untrusted(text) => return Error::Denied(text),
            Failure::NoReply(text) => return Error::Unknown(text),
            Failure::SessionEnded => return Error::Unknown("the session with ZooKeeper has ended".into()),
            Failure::Rejected(_, error) => error,
        };
        let text = format!("ZooKeeper returned: {error}");
        match error {
            zk::Error::NoAuth | zk::Error::AuthFailed | zk::Error::InvalidAcl => Error::Denied(format!(
                "{text}. The user needs all rights on the path of the address and below, as zk://USER:PASSWORD@HOST/PATH"
            )),
            zk::Error::QuotaExceeded => Error::Limited(text),
            zk::Error::BadArguments(_) | zk::Error::MarshallingError => Error::Invalid(text),
            zk::Error::Unimplemented => Error::Unsupported(text),
            _ => Error::Unavailable(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All guards of a process were reported as lost, though their session had only moved to another server.
    #[test]
    fn a_session_that_moved_has_not_ended() {
        let moved = Failure::of(zk::Error::SessionMoved);
        assert!(matches!(moved, Failure::NoReply(_)), "{moved:?}");
        assert!(matches!(Error::from(moved), Error::Unknown(_)));
        assert!(matches!(Failure::of(zk::Error::SessionExpired), Failure::SessionEnded));
    }
}
