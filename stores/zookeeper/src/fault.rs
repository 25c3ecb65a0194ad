use lockkeeper_core::Error;
use zookeeper_client as zk;

/// Why a request has no good answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// It was never sent.
    Away(String),
    /// It was never sent, and will not be: we do not believe the servers, or they do not believe us.
    Barred(String),
    /// It was sent, and nobody knows what became of it.
    Unheard(String),
    /// The session has ended, and all that hung on it. What the request was to write may have been written before.
    Ended,
    /// ZooKeeper refused it; nothing happened. Of several steps: this one.
    Refused(usize, zk::Error),
}

impl Failure {
    pub fn of(error: zk::Error) -> Self {
        Failure::at(0, error)
    }

    /// What an error of a step means. Whatever is not known to be a refusal is not taken for one.
    pub fn at(step: usize, error: zk::Error) -> Self {
        use zk::Error::*;
        match error {
            // A session that has moved to another server lives on: only this connection is of no use any more.
            SessionExpired | ClientClosed => Failure::Ended,
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
            | NoHosts => Failure::Refused(step, error),
            other => Failure::Unheard(other.to_string()),
        }
    }

    pub fn is(&self, what: &zk::Error) -> bool {
        matches!(self, Failure::Refused(_, error) if error == what)
    }

    /// What a missing node means where it does not matter whether it was there.
    pub fn gone<T>(result: Result<T, Failure>) -> Result<Option<T>, Failure> {
        match result {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.is(&zk::Error::NoNode) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// What each failure means to somebody who wants a lock, and what to do about it.
impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = match failure {
            Failure::Away(text) => return Error::Unavailable(text),
            Failure::Barred(text) => return Error::Denied(text),
            Failure::Unheard(text) => return Error::Unknown(text),
            Failure::Ended => return Error::Unknown("the session with ZooKeeper has ended".into()),
            Failure::Refused(_, error) => error,
        };
        let text = format!("ZooKeeper says: {error}");
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

    /// All guards of a process were told that they are lost, though their session had only found another server.
    #[test]
    fn a_session_that_moved_has_not_ended() {
        let moved = Failure::of(zk::Error::SessionMoved);
        assert!(matches!(moved, Failure::Unheard(_)), "{moved:?}");
        assert!(matches!(Error::from(moved), Error::Unknown(_)));
        assert!(matches!(Failure::of(zk::Error::SessionExpired), Failure::Ended));
    }
}
