//! The headers of the IETF draft, and the layer's own responses as `application/problem+json` (RFC 9457).

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::limit::{RateLimit, TakeOutcome};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Whole seconds, so that a client that waits for them does not come too early.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Adds the headers that tell a client of its limit.
pub(super) fn add(headers: &mut HeaderMap, policy: &str, limit: &RateLimit, taken: &TakeOutcome) {
    let (quota, period) = limit.quota();
    // The window has whole seconds: a shorter or broken one is left out.
    let window = match (period.as_secs(), period.subsec_nanos()) {
        (whole @ 1.., 0) => format!(";w={whole}"),
        _ => String::new(),
    };
    let state = format!("\"{policy}\";r={};t={}", taken.remaining(), seconds(taken.reset_after()));
    for (name, value) in [(RATELIMIT_POLICY, format!("\"{policy}\";q={quota}{window}")), (RATELIMIT, state)] {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.append(name, value);
        }
    }
}

/// The response to a request above the limit.
pub(super) fn refused(policy: &str, limit: &RateLimit, taken: &TakeOutcome) -> Response<Full<Bytes>> {
    let retry = seconds(taken.retry_after()).max(1);
    let mut response = problem(
        StatusCode::TOO_MANY_REQUESTS,
        "https://iana.org/assignments/http-problem-types#quota-exceeded",
        json!({ "detail": format!("the quota is used up: retry in {retry} s"), "violated-policies": [policy] }),
        Some(retry),
    );
    add(response.headers_mut(), policy, limit, taken);
    response
}

/// The response while the store is unreachable.
pub(super) fn unavailable() -> Response<Full<Bytes>> {
    let detail = json!({ "detail": "the quota cannot be looked up now, and nothing was done: ask again" });
    problem(StatusCode::SERVICE_UNAVAILABLE, "urn:lockkeeper:rate-limit:unavailable", detail, Some(1))
}

/// The response if the service has made a limit that cannot be.
pub(super) fn misconfigured() -> Response<Full<Bytes>> {
    let detail = json!({ "detail": "the service has no valid quota for this request; nothing was done" });
    problem(StatusCode::INTERNAL_SERVER_ERROR, "urn:lockkeeper:rate-limit:misconfigured", detail, None)
}

fn problem(status: StatusCode, kind: &str, mut body: Value, retry: Option<u64>) -> Response<Full<Bytes>> {
    body["type"] = kind.into();
    body["title"] = status.canonical_reason().into();
    body["status"] = status.as_u16().into();
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Some(retry) = retry {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(retry));
    }
    response
}
