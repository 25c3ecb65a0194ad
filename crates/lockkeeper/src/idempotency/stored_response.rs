//! A response that can be replayed: status, headers and body, stored as one line of JSON and the bytes of
//! the body.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use lockkeeper_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::problem::IdempotencyProblem;
use super::service::BodyError;
use crate::recipes::format;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ResponseHead {
    status: u16,
    /// Header values are bytes, each written as the character with its number.
    headers: Vec<(String, String)>,
}

/// Whether a header belongs to one connection or moment, and not to the response.
fn is_per_connection(name: &HeaderName) -> bool {
    const PER_CONNECTION: [HeaderName; 8] = [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::DATE,
        header::PROXY_AUTHENTICATE,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    PER_CONNECTION.contains(name) || name == "keep-alive"
}

impl StoredResponse {
    /// The whole response, and the status that the service gave it. A body that is too large or breaks off
    /// cannot be replayed, so every client receives the same problem instead.
    pub async fn of<R>(response: Response<R>, most: usize) -> (StatusCode, StoredResponse)
    where
        R: http_body::Body<Data = Bytes>,
        R::Error: Into<BodyError>,
    {
        let (parts, body) = response.into_parts();
        let status = parts.status;
        let answer = match Limited::new(body, most).collect().await {
            Ok(body) => {
                let mut headers = parts.headers;
                let passing: Vec<HeaderName> =
                    headers.keys().filter(|name| is_per_connection(name)).cloned().collect();
                passing.iter().for_each(|name| drop(headers.remove(name)));
                StoredResponse { status: parts.status, headers, body: body.to_bytes() }
            }
            Err(error) if error.is::<LengthLimitError>() => {
                tracing::error!(
                    most,
                    "a response is too large to be stored; answering 500. Raise answer_limit, or attach the layer to other paths"
                );
                IdempotencyProblem::ResponseTooLarge.answer()
            }
            Err(error) => {
                tracing::error!(%error, "a response broke off; answering 500");
                IdempotencyProblem::BrokenOff.answer()
            }
        };
        (status, answer)
    }

    /// The status alone, for a response that is not stored and whose body broke off.
    pub fn bare(status: StatusCode) -> StoredResponse {
        StoredResponse { status, headers: HeaderMap::new(), body: Bytes::new() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let text = |value: &HeaderValue| value.as_bytes().iter().copied().map(char::from).collect();
        let headers = self.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        let head = ResponseHead { status: self.status.as_u16(), headers };
        let mut bytes = format::encode(&head);
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.body);
        bytes
    }

    pub fn parse(bytes: Vec<u8>) -> Result<StoredResponse> {
        Self::read(Bytes::from(bytes)).ok_or_else(|| {
            Error::invalid("the stored value of this key is no response of this program: delete its record, and do not write under http/")
        })
    }

    fn read(bytes: Bytes) -> Option<StoredResponse> {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let head: ResponseHead = format::decode("of a response", &bytes[..end]).ok()?;
        let mut headers = HeaderMap::new();
        for (name, value) in head.headers {
            let value: Option<Vec<u8>> = value.chars().map(|c| u8::try_from(c).ok()).collect();
            headers.append(HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&value?).ok()?);
        }
        Some(StoredResponse {
            status: StatusCode::from_u16(head.status).ok()?,
            headers,
            body: bytes.slice(end + 1..),
        })
    }

    /// The same response, marked as a replay.
    pub fn again(mut self) -> StoredResponse {
        self.headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
        self
    }

    pub fn response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_response_round_trips() {
        let mut response = Response::new(Full::new(Bytes::from_static(b"two\nlines\xff\0")));
        *response.status_mut() = StatusCode::CREATED;
        for (name, value) in
            [("set-cookie", &b"a=1"[..]), ("set-cookie", b"b=2"), ("x-odd", b"\xe4\xff\""), ("date", b"now")]
        {
            response.headers_mut().append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let (_, answer) = StoredResponse::of(response, 100).await;
        assert_eq!(StoredResponse::parse(answer.bytes()).unwrap(), answer);
        assert_eq!(answer.headers.get_all("set-cookie").iter().count(), 2);
        assert!(!answer.headers.contains_key("date"));
        assert_eq!(answer.again().headers["idempotent-replayed"], "true");
    }

    #[tokio::test]
    async fn a_response_that_is_too_large_is_the_same_for_all_clients() {
        let (_, large) = StoredResponse::of(Response::new(Full::new(Bytes::from(vec![0; 101]))), 100).await;
        assert_eq!(large.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(StoredResponse::parse(large.bytes()).unwrap(), large);
    }

    #[test]
    fn bytes_that_are_no_response_are_refused() {
        for bytes in [
            &b""[..],
            b"7",
            b"{}\n",
            b"{\"status\":99,\"headers\":[]}\n",
            b"{\"status\":200,\"headers\":[[\"a b\",\"\"]]}\n",
        ] {
            assert!(matches!(StoredResponse::parse(bytes.to_vec()), Err(Error::Invalid(_))));
        }
    }
}
