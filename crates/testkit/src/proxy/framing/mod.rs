//! Cutting byte streams into messages: just enough of each protocol to find where a message begins and ends.
//!
//! Nothing is kept but an incomplete header, and nothing is allocated from a claimed length: the body of a message goes
//! on in the pieces in which it comes.

mod http1;
mod http2;
mod lengths;
mod postgres;
mod resp;

use super::Direction;

/// The protocol that is spoken, and so what a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Framing {
    /// None: every read is a message.
    Bytes,
    /// Redis. A command or an answer is a message; push messages of RESP3 pass uncounted.
    Resp,
    /// PostgreSQL. Everything up to a `Sync` or `Query`, and everything up to `ReadyForQuery`, is one message, so that
    /// the nth reply answers the nth request; notifications and notices pass uncounted. After a change to TLS every
    /// read is a message.
    Postgres,
    /// ZooKeeper. A frame with four bytes of length is a message; pings, watch events and four-letter words pass uncounted.
    ZooKeeper,
    /// HTTP/1.1 with bodies of a known length. A request or an answer is a message.
    Http1,
    /// HTTP/2, as gRPC speaks it. A frame is a message: of the requests every `DATA` frame with a body and every
    /// `HEADERS` frame that ends its stream, of the replies every `HEADERS` and `DATA` frame; all others pass uncounted.
    Http2,
}

/// How far the bytes at hand reach, and what they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// How many bytes can go on now: at least one.
    pub len: usize,
    /// Whether they end their message.
    pub last: bool,
    /// The kind of the message; the same for all its pieces.
    pub mark: MessageMark,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MessageMark {
    /// Neither request nor reply: it is passed on and not counted.
    pub aside: bool,
    /// The stream it belongs to, where one connection carries several.
    pub stream: Option<u32>,
    /// A client says by it that it no longer waits for a reply.
    pub gives_up: bool,
}

/// Finds the boundaries of messages in one direction of one connection.
pub(super) trait Splitter: Send {
    /// Returns the piece at the front of `buf`. `None`: more bytes are needed to know it. An error: this is not the
    /// protocol, and nothing more can be said about this connection.
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String>;
}

impl Framing {
    pub(super) fn splitter(self, direction: Direction) -> Box<dyn Splitter> {
        match self {
            Framing::Bytes => Box::new(Bytes),
            Framing::Resp => Box::new(resp::Resp::new(direction)),
            Framing::Postgres => Box::new(postgres::PostgresFraming::new(direction)),
            Framing::ZooKeeper => Box::new(lengths::ZooKeeperFraming::default()),
            Framing::Http1 => Box::new(http1::Http1::default()),
            Framing::Http2 => Box::new(http2::Http2::new(direction)),
        }
    }
}

struct Bytes;

impl Splitter for Bytes {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        Ok((!buf.is_empty()).then_some(Piece { len: buf.len(), last: true, mark: MessageMark::default() }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Feeds `stream` in chunks of `size` and returns the messages with their marks.
    pub fn split(
        framing: Framing,
        direction: Direction,
        stream: &[u8],
        size: usize,
    ) -> Vec<(Vec<u8>, MessageMark)> {
        let mut splitter = framing.splitter(direction);
        let (mut buf, mut whole, mut out) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in stream.chunks(size) {
            buf.extend_from_slice(chunk);
            while let Some(piece) = splitter.piece(&buf).unwrap() {
                assert!(piece.len > 0 && piece.len <= buf.len());
                whole.extend(buf.drain(..piece.len));
                if piece.last {
                    out.push((std::mem::take(&mut whole), piece.mark));
                }
            }
        }
        assert!(buf.is_empty() && whole.is_empty(), "left over: {buf:?} {whole:?}");
        out
    }

    /// The messages are found whatever the reads look like.
    pub fn assert_split(framing: Framing, direction: Direction, messages: &[(&[u8], MessageMark)]) {
        let stream: Vec<u8> = messages.iter().flat_map(|(bytes, _)| bytes.iter().copied()).collect();
        for size in [1, 2, 3, 7, 16, stream.len()] {
            let found = split(framing, direction, &stream, size);
            let found: Vec<_> = found.iter().map(|(bytes, mark)| (&bytes[..], *mark)).collect();
            assert_eq!(found, messages, "{framing:?}, reads of {size}");
        }
    }

    pub const PLAIN: MessageMark = MessageMark { aside: false, stream: None, gives_up: false };
    pub const ASIDE: MessageMark = MessageMark { aside: true, ..PLAIN };
}
