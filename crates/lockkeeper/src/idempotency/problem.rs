//! What the layer itself has to say, as `application/problem+json` (RFC 9457).

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::json;

use super::answer::Answer;

/// Each is a different thing for the client to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// Send a key.
    Missing,
    /// Correct the key.
    Malformed(&'static str),
    /// Send less.
    TooLarge(usize),
    /// Send the body again: it broke off.
    Broken,
    /// Ask again in a moment.
    Running,
    /// Take a new key.
    Reused,
    /// Ask again with the same key; nothing was done.
    Unavailable,
    /// Ask again with the same key; it may have been done.
    Unknown,
    /// It was done, and its answer cannot be had.
    Unkept,
    /// It was done, and its answer broke off.
    BrokenOff,
    /// Nothing for the client to do: the service does not say whose key it is.
    NoScope,
}

impl Problem {
    fn row(self) -> (StatusCode, &'static str, String) {
        let fixed = |status, word, detail: &str| (status, word, detail.to_owned());
        match self {
            Problem::Missing => fixed(
                StatusCode::BAD_REQUEST,
                "key-missing",
                "this needs a header Idempotency-Key, new for each thing to do and the same for each retry",
            ),
            Problem::Malformed(why) => (
                StatusCode::BAD_REQUEST,
                "key-malformed",
                format!(
                    "the Idempotency-Key cannot be used: {why}. Send 1 to 255 characters, such as \"8e03978e-40d5\""
                ),
            ),
            Problem::TooLarge(most) => {
                (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", format!("the body may have {most} bytes"))
            }
            Problem::Broken => fixed(
                StatusCode::BAD_REQUEST,
                "body-broken",
                "the body broke off; nothing was done. Send it again",
            ),
            Problem::Running => fixed(
                StatusCode::CONFLICT,
                "running",
                "a request with this Idempotency-Key is under way; ask again for its answer",
            ),
            Problem::Reused => fixed(
                StatusCode::UNPROCESSABLE_ENTITY,
                "key-reused",
                "this Idempotency-Key stands for another request; send that one again, or take a new key",
            ),
            Problem::Unavailable => fixed(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "the keys cannot be looked up now, and nothing was done; ask again with the same key",
            ),
            Problem::Unknown => fixed(
                StatusCode::GATEWAY_TIMEOUT,
                "unknown",
                "it may have been done, and its answer was not kept; ask again with the same key",
            ),
            Problem::Unkept => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "answer-too-large",
                "it was done, but its answer is too large to be kept; it is not done again under this key",
            ),
            Problem::BrokenOff => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "answer-broken-off",
                "it was done, but its answer broke off; it is not done again under this key",
            ),
            Problem::NoScope => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "no-scope",
                "the service cannot tell whose Idempotency-Key this is; nothing was done",
            ),
        }
    }

    pub fn answer(self) -> Answer {
        let (status, word, detail) = self.row();
        let body = json!({
            "type": format!("urn:lockkeeper:idempotency:{word}"),
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": detail,
        });
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(self, Problem::Running | Problem::Unavailable | Problem::Unknown) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Answer { status, headers, body: Bytes::from(body.to_string()) }
    }
}
