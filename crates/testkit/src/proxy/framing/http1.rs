//! Finds the messages of HTTP/1.1 in a byte stream.

use super::lengths::Rest;
use super::{MessageMark, Piece, Splitter};

/// Longer than any header of a test.
const LONGEST_HEADER: usize = 64 << 10;

/// HTTP/1.1: a header, and as many bytes behind it as it says. Chunked bodies are not for this proxy.
#[derive(Default)]
pub(super) struct Http1 {
    rest: Rest,
}

impl Splitter for Http1 {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        if !self.rest.is_open() {
            let Some(end) = buf.windows(4).position(|four| four == b"\r\n\r\n") else {
                let too_long = buf.len() > LONGEST_HEADER;
                return if too_long { Err("a header without an end".into()) } else { Ok(None) };
            };
            let body = length(&buf[..end])?;
            self.rest.begin(end + 4 + body, MessageMark::default())?;
        }
        Ok(self.rest.piece(buf))
    }
}

/// How long the body is, by its header.
fn length(header: &[u8]) -> Result<usize, String> {
    let header = String::from_utf8_lossy(header);
    let mut lines = header.lines();
    if !lines.next().is_some_and(|line| line.contains("HTTP/1.")) {
        return Err("this is not HTTP/1".into());
    }
    let field = |wanted: &str| {
        let mut fields = lines.clone().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim().to_owned())
    };
    if field("transfer-encoding").is_some() {
        return Err("a body without a length".into());
    }
    match field("content-length") {
        None => Ok(0),
        Some(text) => text.parse().map_err(|_| format!("{text:?} is no length")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PLAIN, assert_split};
    use super::*;
    use crate::proxy::{Direction, Framing};

    #[test]
    fn requests_and_answers_are_found() {
        let requests: &[(&[u8], MessageMark)] = &[
            (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\n\r\n\r", PLAIN),
            (b"GET /x HTTP/1.1\r\n\r\n", PLAIN),
        ];
        assert_split(Framing::Http1, Direction::Requests, requests);
        let replies: &[(&[u8], MessageMark)] = &[
            (b"HTTP/1.1 400 BAD REQUEST\r\nContent-Length: 2\r\n\r\n{}", PLAIN),
            (b"HTTP/1.1 204 No Content\r\n\r\n", PLAIN),
        ];
        assert_split(Framing::Http1, Direction::Replies, replies);
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        for bad in [
            &b"hello\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        ] {
            assert!(Http1::default().piece(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
    }
}
