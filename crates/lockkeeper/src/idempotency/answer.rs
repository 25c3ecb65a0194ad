//! An answer that can be given again: status, headers and body, as one line of JSON and the bytes of the body.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use lockkeeper_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::problem::Problem;
use super::service::BoxError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Head {
    status: u16,
    /// Values are bytes, each written as the character with its number.
    headers: Vec<(String, String)>,
}

/// What belongs to one connection or one moment, and not to the answer.
fn passing(name: &HeaderName) -> bool {
    const PASSING: [HeaderName; 8] = [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::DATE,
        header::PROXY_AUTHENTICATE,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    PASSING.contains(name) || name == "keep-alive"
}

impl Answer {
    /// All of a response, and the status that the service gave it. A body that is too large or breaks off cannot be given
    /// again, so no caller gets it: all get the same.
    pub async fn of<R>(response: Response<R>, most: usize) -> (StatusCode, Answer)
    where
        R: http_body::Body<Data = Bytes>,
        R::Error: Into<BoxError>,
    {
        let (parts, body) = response.into_parts();
        let status = parts.status;
        let answer = match Limited::new(body, most).collect().await {
            Ok(body) => {
                let mut headers = parts.headers;
                let passing: Vec<HeaderName> = headers.keys().filter(|name| passing(name)).cloned().collect();
                passing.iter().for_each(|name| drop(headers.remove(name)));
                Answer { status: parts.status, headers, body: body.to_bytes() }
            }
            Err(error) if error.is::<LengthLimitError>() => {
                tracing::error!(
                    most,
                    "an answer is too large to be kept: raise answer_limit, or leave its path out"
                );
                Problem::Unkept.answer()
            }
            Err(error) => {
                tracing::error!(%error, "an answer broke off");
                Problem::BrokenOff.answer()
            }
        };
        (status, answer)
    }

    /// The status alone: all that is left of an answer that says that nothing came of it, and whose body cannot be had.
    pub fn bare(status: StatusCode) -> Answer {
        Answer { status, headers: HeaderMap::new(), body: Bytes::new() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let text = |value: &HeaderValue| value.as_bytes().iter().copied().map(char::from).collect();
        let headers = self.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        let head = Head { status: self.status.as_u16(), headers };
        let mut bytes = serde_json::to_vec(&head).expect("a head is plain data");
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.body);
        bytes
    }

    pub fn parse(bytes: Vec<u8>) -> Result<Answer> {
        Self::read(Bytes::from(bytes)).ok_or_else(|| {
            Error::invalid("what is kept under this key is no answer of this program: delete its record, or keep out of http/")
        })
    }

    fn read(bytes: Bytes) -> Option<Answer> {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let head: Head = serde_json::from_slice(&bytes[..end]).ok()?;
        let mut headers = HeaderMap::new();
        for (name, value) in head.headers {
            let value: Option<Vec<u8>> = value.chars().map(|c| u8::try_from(c).ok()).collect();
            headers.append(HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&value?).ok()?);
        }
        Some(Answer {
            status: StatusCode::from_u16(head.status).ok()?,
            headers,
            body: bytes.slice(end + 1..),
        })
    }

    /// The same answer, marked as one that was given before.
    pub fn again(mut self) -> Answer {
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
    async fn an_answer_comes_back_as_it_was() {
        let mut response = Response::new(Full::new(Bytes::from_static(b"two\nlines\xff\0")));
        *response.status_mut() = StatusCode::CREATED;
        for (name, value) in
            [("set-cookie", &b"a=1"[..]), ("set-cookie", b"b=2"), ("x-odd", b"\xe4\xff\""), ("date", b"now")]
        {
            response.headers_mut().append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let (_, answer) = Answer::of(response, 100).await;
        assert_eq!(Answer::parse(answer.bytes()).unwrap(), answer);
        assert_eq!(answer.headers.get_all("set-cookie").iter().count(), 2);
        assert!(!answer.headers.contains_key("date"));
        assert_eq!(answer.again().headers["idempotent-replayed"], "true");
    }

    #[tokio::test]
    async fn an_answer_that_is_too_large_is_the_same_for_all() {
        let (_, large) = Answer::of(Response::new(Full::new(Bytes::from(vec![0; 101]))), 100).await;
        assert_eq!(large.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(Answer::parse(large.bytes()).unwrap(), large);
    }

    #[test]
    fn what_is_no_answer_is_told() {
        for bytes in [
            &b""[..],
            b"7",
            b"{}\n",
            b"{\"status\":99,\"headers\":[]}\n",
            b"{\"status\":200,\"headers\":[[\"a b\",\"\"]]}\n",
        ] {
            assert!(matches!(Answer::parse(bytes.to_vec()), Err(Error::Invalid(_))));
        }
    }
}
