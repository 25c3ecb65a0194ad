//! Finds messages that begin with their length, as the messages of ZooKeeper do.

use super::{MessageMark, Piece, Splitter};

/// More than any message of a test: a longer one means that this is another protocol.
const LONGEST: usize = 64 << 20;

/// The rest of a message whose length is known.
#[derive(Default)]
pub(super) struct Rest {
    left: usize,
    mark: MessageMark,
}

impl Rest {
    /// Begins a message of `len` bytes, its header among them.
    pub fn begin(&mut self, len: usize, mark: MessageMark) -> Result<(), String> {
        if len > LONGEST {
            return Err(format!("a message of {len} bytes"));
        }
        *self = Rest { left: len, mark };
        Ok(())
    }

    /// Whether a message is under way.
    pub fn is_open(&self) -> bool {
        self.left > 0
    }

    /// As much of the message as there is.
    pub fn piece(&mut self, buf: &[u8]) -> Option<Piece> {
        let len = buf.len().min(self.left);
        self.left -= len;
        (len > 0).then_some(Piece { len, last: self.left == 0, mark: self.mark })
    }
}

/// Four bytes of length, then an xid in nearly every message. A connection may also be for one of the four-letter words, whose
/// answer is text.
#[derive(Default)]
pub(super) struct ZooKeeperFraming {
    rest: Rest,
    words: bool,
}

impl Splitter for ZooKeeperFraming {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        // No frame is so long that its first byte is a letter.
        self.words |= !self.rest.is_open() && buf.first().is_some_and(u8::is_ascii_alphabetic);
        if self.words {
            let mark = MessageMark { aside: true, ..Default::default() };
            return Ok((!buf.is_empty()).then_some(Piece { len: buf.len(), last: true, mark }));
        }
        if !self.rest.is_open() {
            let Some((header, _)) = buf.split_first_chunk::<8>() else { return Ok(None) };
            let [length, xid] = [0, 4].map(|at| i32::from_be_bytes(header[at..at + 4].try_into().unwrap()));
            let length = usize::try_from(length).ok().filter(|n| *n >= 4);
            let length = length.ok_or_else(|| "a ZooKeeperFraming frame without an xid".to_owned())?;
            // A watch event has xid -1 and a ping -2: both come when they like.
            self.rest
                .begin(4 + length, MessageMark { aside: matches!(xid, -1 | -2), ..Default::default() })?;
        }
        Ok(self.rest.piece(buf))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ASIDE, PLAIN, assert_split, split};
    use super::*;
    use crate::proxy::{Direction, Framing};

    #[test]
    fn zookeeper_frames_are_found_and_pings_pass_uncounted() {
        let connect = b"\0\0\0\x0c\0\0\0\0greeting";
        let ping = b"\0\0\0\x08\xff\xff\xff\xfe\0\0\0\x0b";
        let event = b"\0\0\0\x0a\xff\xff\xff\xffabcdef";
        let create = b"\0\0\0\x06\0\0\0\x01ab";
        let all: &[(&[u8], MessageMark)] =
            &[(connect, PLAIN), (ping, ASIDE), (event, ASIDE), (create, PLAIN)];
        assert_split(Framing::ZooKeeper, Direction::Replies, all);
        assert!(ZooKeeperFraming::default().piece(b"\0\0\0\x02abcd").is_err(), "not a frame");
    }

    #[test]
    fn four_letter_words_and_their_answers_pass_uncounted() {
        for (direction, text) in
            [(Direction::Requests, &b"srvr"[..]), (Direction::Replies, b"Mode: leader\n\0\0\0\0")]
        {
            for size in [1, 3, 100] {
                let pieces = split(Framing::ZooKeeper, direction, text, size);
                assert!(pieces.iter().all(|(_, mark)| *mark == ASIDE), "{pieces:?}");
            }
        }
    }
}
