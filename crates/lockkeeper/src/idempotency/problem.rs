//! The layer's own responses, as `application/problem+json` (RFC 9457).

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::json;

use super::stored_response::StoredResponse;

/// A problem; each asks something different of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdempotencyProblem {
    /// Send a key.
    Missing,
    /// Correct the key.
    Malformed(&'static str),
    /// Send less.
    TooLarge(usize),
    /// Send the body again: it broke off.
    Broken,
    /// Retry in a moment.
    Running,
    /// Take a new key.
    Reused,
    /// Retry with the same key; nothing was done.
    Unavailable,
    /// Retry with the same key; the work may have been done.
    Unknown,
    /// The work was done, and its response cannot be replayed.
    ResponseTooLarge,
    /// The work was done, and its response broke off.
    BrokenOff,
    /// The client can do nothing: the service has no tenant for the request.
    NoScope,
}

impl IdempotencyProblem {
    fn row(self) -> (StatusCode, &'static str, String) {
        let fixed = |status, word, detail: &str| (status, word, detail.to_owned());
        match self {
            IdempotencyProblem::Missing => fixed(
                StatusCode::BAD_REQUEST,
                "key-missing",
                "this needs a header Idempotency-Key, new for each thing to do and the same for each retry",
            ),
            IdempotencyProblem::Malformed(why) => (
                StatusCode::BAD_REQUEST,
                "key-malformed",
                format!(
                    "the Idempotency-Key cannot be used: {why}. Send 1 to 255 characters, such as \"8e03978e-40d5\""
                ),
            ),
            IdempotencyProblem::TooLarge(most) => {
                (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", format!("the body may have {most} bytes"))
            }
            IdempotencyProblem::Broken => fixed(
                StatusCode::BAD_REQUEST,
                "body-broken",
                "the body broke off; nothing was done. Send it again",
            ),
            IdempotencyProblem::Running => fixed(
                StatusCode::CONFLICT,
                "running",
                "a request with this Idempotency-Key is under way; ask again for its answer",
            ),
            IdempotencyProblem::Reused => fixed(
                StatusCode::UNPROCESSABLE_ENTITY,
                "key-reused",
                "this Idempotency-Key stands for another request; send that one again, or take a new key",
            ),
            IdempotencyProblem::Unavailable => fixed(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "the keys cannot be looked up now, and nothing was done; ask again with the same key",
            ),
            IdempotencyProblem::Unknown => fixed(
                StatusCode::GATEWAY_TIMEOUT,
                "unknown",
                "it may have been done, and its answer was not kept; ask again with the same key",
            ),
            IdempotencyProblem::ResponseTooLarge => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "answer-too-large",
                "it was done, but its answer is too large to be kept; it is not done again under this key",
            ),
            IdempotencyProblem::BrokenOff => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "answer-broken-off",
                "it was done, but its answer broke off; it is not done again under this key",
            ),
            IdempotencyProblem::NoScope => fixed(
                StatusCode::INTERNAL_SERVER_ERROR,
                "no-scope",
                "the service cannot tell whose Idempotency-Key this is; nothing was done",
            ),
        }
    }

    pub fn answer(self) -> StoredResponse {
        let (status, word, detail) = self.row();
        let body = json!({
            "type": format!("urn:lockkeeper:idempotency:{word}"),
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": detail,
        });
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(
            self,
            IdempotencyProblem::Running | IdempotencyProblem::Unavailable | IdempotencyProblem::Unknown
        ) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        StoredResponse { status, headers, body: Bytes::from(body.to_string()) }
    }
}
