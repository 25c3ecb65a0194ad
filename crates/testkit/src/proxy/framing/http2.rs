//! Finds the frames of HTTP/2 in a byte stream.

use super::lengths::Rest;
use super::{MessageMark, Piece, Splitter};
use crate::proxy::Direction;

const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;

/// The client's preface, then frames with a header of nine bytes.
pub(super) struct Http2 {
    direction: Direction,
    preface: bool,
    rest: Rest,
}

impl Http2 {
    pub fn new(direction: Direction) -> Self {
        Http2 { direction, preface: direction == Direction::Requests, rest: Rest::default() }
    }

    fn begin(&mut self, buf: &[u8]) -> Result<bool, String> {
        if self.preface {
            let known = buf.len().min(PREFACE.len());
            if buf[..known] != PREFACE[..known] {
                return Err("no HTTP/2 preface".into());
            }
            if known < PREFACE.len() {
                return Ok(false);
            }
            self.preface = false;
            self.rest.begin(PREFACE.len(), MessageMark { aside: true, ..Default::default() })?;
            return Ok(true);
        }
        let Some((&[a, b, c, kind, flags, stream @ ..], _)) = buf.split_first_chunk::<9>() else {
            return Ok(false);
        };
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        let counted = match self.direction {
            // An empty DATA frame only ends its stream: the request itself came before it.
            Direction::Requests => kind == DATA && length > 0 || kind == HEADERS && flags & END_STREAM != 0,
            Direction::Replies => matches!(kind, DATA | HEADERS),
        };
        let stream = u32::from_be_bytes(stream) & 0x7fff_ffff;
        let gives_up = matches!(kind, RST_STREAM | GOAWAY);
        self.rest.begin(9 + length, MessageMark { aside: !counted, stream: Some(stream), gives_up })?;
        Ok(true)
    }
}

impl Splitter for Http2 {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        if !self.rest.is_open() && !self.begin(buf)? {
            return Ok(None);
        }
        Ok(self.rest.piece(buf))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ASIDE, assert_split};
    use super::*;
    use crate::proxy::Framing;

    #[test]
    fn frames_are_found_after_the_preface_and_only_the_ones_that_ask_or_answer_count() {
        let on = |stream, aside| MessageMark { aside, stream: Some(stream), gives_up: false };
        let settings = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64";
        let headers = b"\0\0\x03\x01\x04\0\0\0\x01abc";
        let data = b"\0\0\x02\0\0\0\0\0\x01hi";
        let end = b"\0\0\0\0\x01\0\0\0\x01";
        let whole = b"\0\0\x01\x01\x05\0\0\0\x03x";
        let cancel = b"\0\0\x04\x03\0\0\0\0\x03\0\0\0\x08";
        let cancelled = MessageMark { gives_up: true, ..on(3, true) };
        let requests: &[(&[u8], MessageMark)] = &[
            (PREFACE, ASIDE),
            (settings, on(0, true)),
            (headers, on(1, true)),
            (data, on(1, false)),
            (end, on(1, true)),
            (whole, on(3, false)),
            (cancel, cancelled),
        ];
        assert_split(Framing::Http2, Direction::Requests, requests);
        let replies: &[(&[u8], MessageMark)] =
            &[(settings, on(0, true)), (headers, on(1, false)), (data, on(1, false)), (end, on(1, false))];
        assert_split(Framing::Http2, Direction::Replies, replies);
        assert!(Http2::new(Direction::Requests).piece(b"GET / HTTP/1.1").is_err());
    }
}
