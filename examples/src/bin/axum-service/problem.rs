//! How an error of Lockkeeper becomes an HTTP answer.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use lockkeeper::Error;

/// Why a request has no good answer.
#[derive(Debug)]
pub enum Problem {
    /// A lock, a fence or the store.
    Lock(Error),
    /// The request itself.
    Rejected(String),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Problem::Lock(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let error = match self {
            Problem::Rejected(text) => {
                return (StatusCode::UNPROCESSABLE_ENTITY, text + "\n").into_response();
            }
            Problem::Lock(error) => error,
        };
        // The text of an error names hosts and processes: it is for the log, not for the client.
        eprintln!("{}: {error}", error.outcome().as_str());
        let retry_later = [(header::RETRY_AFTER, "1")];
        match error {
            Error::Busy(_) | Error::Stale { .. } => {
                (StatusCode::CONFLICT, retry_later, "another request is at work: retry\n").into_response()
            }
            Error::Unavailable(_) | Error::Limited(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, retry_later, "nothing was done: retry\n").into_response()
            }
            Error::Unknown(_) | Error::Lost(_) => {
                (StatusCode::GATEWAY_TIMEOUT, "it may have been done: check before you retry\n")
                    .into_response()
            }
            // Invalid, Unsupported, Denied, Deadlock: a mistake of the service, not of its client.
            _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper::Fence;

    #[test]
    fn the_client_learns_whether_it_may_ask_again() {
        let status = |error: Error| Problem::from(error).into_response().status().as_u16();
        let (presented, seen) = (Fence::new(1).unwrap(), Fence::new(2).unwrap());
        assert_eq!(status(Error::Stale { presented, seen }), 409);
        assert_eq!(status(Error::Unavailable("connection refused".into())), 503);
        assert_eq!(status(Error::Unknown("no reply".into())), 504);
        assert_eq!(status(Error::Lost("expired".into())), 504);
        assert_eq!(status(Error::Denied("the password is wrong".into())), 500);
        assert_eq!(Problem::Rejected("no such order".into()).into_response().status().as_u16(), 422);
    }
}
