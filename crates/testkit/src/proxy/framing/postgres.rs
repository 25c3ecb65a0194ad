//! Finds the messages of PostgreSQL's protocol in a byte stream.

use super::lengths::Rest;
use super::{MessageMark, Piece, Splitter};
use crate::proxy::Direction;

/// The first byte of a TLS handshake.
const TLS: u8 = 0x16;

/// The frontend/backend protocol, version 3. Several protocol messages make one request or one reply.
pub(super) struct PostgresFraming {
    direction: Direction,
    stage: ProtocolStage,
    rest: Rest,
    /// Whether the protocol message under way ends the request or reply.
    ends: bool,
    /// Whether a request or reply is under way.
    inside: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ProtocolStage {
    /// Before the start-up message, or the answer to it: there is no type byte yet.
    Start,
    /// Type byte, length, body.
    Typed,
    /// Encrypted: nothing can be told apart any more.
    Opaque,
}

impl PostgresFraming {
    pub fn new(direction: Direction) -> Self {
        PostgresFraming {
            direction,
            stage: ProtocolStage::Start,
            rest: Rest::default(),
            ends: false,
            inside: false,
        }
    }

    /// Begins the protocol message at the front of `buf`; `false` if too little of it is there.
    fn begin(&mut self, buf: &[u8]) -> Result<bool, String> {
        let Some(first) = buf.first() else { return Ok(false) };
        match (self.stage, self.direction) {
            (ProtocolStage::Start, Direction::Requests) if *first == TLS => {
                self.stage = ProtocolStage::Opaque
            }
            (ProtocolStage::Start, Direction::Requests) => return self.start(buf),
            // The answer to "may we encrypt?" is a single byte.
            (ProtocolStage::Start, Direction::Replies) if matches!(first, b'N' | b'S' | b'G') => {
                self.stage = if *first == b'N' { ProtocolStage::Start } else { ProtocolStage::Opaque };
                return self.open(1, true, false);
            }
            (ProtocolStage::Start, Direction::Replies) => self.stage = ProtocolStage::Typed,
            _ => {}
        }
        if self.stage == ProtocolStage::Typed { self.typed(buf) } else { self.open(buf.len(), true, false) }
    }

    fn start(&mut self, buf: &[u8]) -> Result<bool, String> {
        let Some((header, _)) = buf.split_first_chunk::<8>() else { return Ok(false) };
        let [length, code] = [0, 4].map(|at| u32::from_be_bytes(header[at..at + 4].try_into().unwrap()));
        if !(8..=10_000).contains(&length) {
            return Err(format!("a PostgreSQL start-up message of {length} bytes"));
        }
        // Requests for encryption or cancellation have code 1234.x and may be followed by another start.
        if code >> 16 == 3 {
            self.stage = ProtocolStage::Typed;
        }
        self.open(length as usize, true, false)
    }

    fn typed(&mut self, buf: &[u8]) -> Result<bool, String> {
        let Some(([kind, length @ ..], body)) = buf.split_first_chunk::<5>() else { return Ok(false) };
        let length = u32::from_be_bytes(*length) as usize;
        if length < 4 {
            return Err(format!("a PostgreSQL message of {length} bytes"));
        }
        let asynchronous = matches!(kind, b'A' | b'N' | b'S') && !self.inside;
        let (ends, aside) = match self.direction {
            // Parse, Bind, Describe, Execute, Close and Flush wait for the Sync.
            Direction::Requests => (!matches!(kind, b'P' | b'B' | b'D' | b'E' | b'C' | b'H'), false),
            Direction::Replies if asynchronous => (true, true),
            Direction::Replies if *kind == b'R' => {
                let Some((code, _)) = body.split_first_chunk::<4>() else { return Ok(false) };
                // "Ok" and the end of SASL are followed by more; to everything else the client has to answer.
                (!matches!(u32::from_be_bytes(*code), 0 | 12), false)
            }
            Direction::Replies => (matches!(kind, b'Z' | b'G' | b'W'), false),
        };
        self.open(1 + length, ends, aside)
    }

    fn open(&mut self, len: usize, ends: bool, aside: bool) -> Result<bool, String> {
        self.ends = ends;
        self.rest.begin(len, MessageMark { aside, ..Default::default() })?;
        Ok(true)
    }
}

impl Splitter for PostgresFraming {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        if !self.rest.is_open() && !self.begin(buf)? {
            return Ok(None);
        }
        let piece = self.rest.piece(buf).map(|p| Piece { last: p.last && self.ends, ..p });
        self.inside = piece.map_or(self.inside, |p| !p.last);
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ASIDE, PLAIN, assert_split};
    use super::*;
    use crate::proxy::Framing;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        [&[kind][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat()
    }

    fn first(code: u32, body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32 + 8).to_be_bytes()[..], &code.to_be_bytes(), body].concat()
    }

    #[test]
    fn a_request_lasts_until_its_sync() {
        let prepare = [message(b'P', b"select 1"), message(b'D', b"S"), message(b'S', b"")].concat();
        let all: &[(&[u8], MessageMark)] = &[
            (&first(80_877_103, b""), PLAIN),
            (&first(196_608, b"user\0me\0\0"), PLAIN),
            (&message(b'p', b"secret"), PLAIN),
            (&message(b'Q', b"select 1\0"), PLAIN),
            (&prepare, PLAIN),
            (&message(b'X', b""), PLAIN),
        ];
        assert_split(Framing::Postgres, Direction::Requests, all);
    }

    #[test]
    fn a_reply_lasts_until_ready_for_query_and_notifications_pass_uncounted() {
        let login = [message(b'R', b"\0\0\0\0"), message(b'S', b"a\0b\0"), message(b'Z', b"I")].concat();
        let rows = [message(b'D', b"row"), message(b'A', b"note"), message(b'Z', b"I")].concat();
        let all: &[(&[u8], MessageMark)] = &[
            (b"N", PLAIN),
            (&message(b'R', b"\0\0\0\x0aSCRAM"), PLAIN),
            (&login, PLAIN),
            (&message(b'A', b"note"), ASIDE),
            (&rows, PLAIN),
            (&message(b'Z', b"I"), PLAIN),
        ];
        assert_split(Framing::Postgres, Direction::Replies, all);
    }

    #[test]
    fn after_a_change_to_tls_every_read_is_a_message() {
        let mut replies = PostgresFraming::new(Direction::Replies);
        assert_eq!(replies.piece(b"S").unwrap().unwrap().len, 1);
        assert_eq!(replies.piece(b"\x16\x03\x01").unwrap(), Some(Piece { len: 3, last: true, mark: PLAIN }));
        assert_eq!(replies.piece(b"").unwrap(), None);
        let mut requests = PostgresFraming::new(Direction::Requests);
        assert!(requests.piece(&first(80_877_103, b"")).unwrap().unwrap().last);
        assert_eq!(requests.piece(b"\x16\x03").unwrap().unwrap().len, 2);
        assert!(PostgresFraming::new(Direction::Requests).piece(b"GET / HTTP/1.1\r\n").is_err());
    }
}
