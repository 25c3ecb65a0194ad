//! The answers of the layer itself, as `application/problem+json` (RFC 9457).

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use lockkeeper_core::Fence;
use serde_json::{Value, json};

/// An answer that is not the service's. Each is a different thing for the client to do. It is also among the extensions of the
/// response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Send a fence.
    Missing,
    /// Correct the fence.
    Malformed(&'static str),
    /// Say which resource it is.
    NoResource,
    /// Send a request that can be read in one way only.
    Ambiguous(&'static str),
    /// Stop: another client writes now.
    Stale {
        /// The fence that was sent.
        presented: Fence,
        /// The newest one that was seen.
        seen: Fence,
    },
    /// Ask again: older requests are still under way. Nothing was passed on.
    Waiting,
    /// Ask again: the marks cannot be read. Nothing was passed on.
    Unavailable,
    /// Ask again: the service cannot be reached. Nothing was passed on.
    Unreached,
    /// Look before you ask again: it was passed on, and may have been done.
    Unknown,
}

impl Problem {
    /// One word for it, in `type` and in metrics.
    pub fn as_str(&self) -> &'static str {
        self.row().1
    }

    fn row(&self) -> (StatusCode, &'static str, String) {
        let fixed = |status, word, detail: &str| (status, word, detail.to_owned());
        match self {
            Problem::Missing => fixed(
                StatusCode::PRECONDITION_REQUIRED,
                "missing",
                "this needs a header Lock-Fence with the fence of the lock that you hold",
            ),
            Problem::Malformed(why) => {
                (StatusCode::BAD_REQUEST, "malformed", format!("the Lock-Fence cannot be used: {why}"))
            }
            Problem::NoResource => fixed(
                StatusCode::BAD_REQUEST,
                "no-resource",
                "this request does not say which resource it is for, or says it in more than 4096 bytes",
            ),
            Problem::Ambiguous(why) => (
                StatusCode::BAD_REQUEST,
                "ambiguous",
                format!("the service may read this request in another way: {why}"),
            ),
            Problem::Stale { presented, seen } => (
                StatusCode::PRECONDITION_FAILED,
                "stale",
                format!(
                    "fence {presented} is stale: {seen} was seen already. Another holder has the lock now: stop"
                ),
            ),
            Problem::Waiting => fixed(
                StatusCode::SERVICE_UNAVAILABLE,
                "waiting",
                "older requests for this resource are still under way, and nothing was passed on; ask again",
            ),
            Problem::Unavailable => fixed(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "the fence cannot be checked now, and nothing was passed on; ask again",
            ),
            Problem::Unreached => fixed(
                StatusCode::BAD_GATEWAY,
                "unreached",
                "the service cannot be reached, and nothing was passed on; ask again",
            ),
            Problem::Unknown => fixed(
                StatusCode::GATEWAY_TIMEOUT,
                "unknown",
                "the service did not answer; it may have done it all the same. Look before you ask again",
            ),
        }
    }

    /// The answer.
    pub fn response(self) -> Response<Full<Bytes>> {
        let (status, word, detail) = self.row();
        let mut body = json!({
            "type": format!("urn:lockkeeper:fence:{word}"),
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": detail,
        });
        if let Problem::Stale { presented, seen } = self {
            body["presented"] = Value::from(presented.get());
            body["seen"] = Value::from(seen.get());
        }
        let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if matches!(self, Problem::Waiting | Problem::Unavailable | Problem::Unreached) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response.extensions_mut().insert(self);
        response
    }
}
