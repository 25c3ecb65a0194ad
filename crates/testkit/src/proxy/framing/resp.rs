//! Finds the values of Redis' protocol in a byte stream.

use super::{MessageMark, Piece, Splitter};
use crate::proxy::Direction;

/// Longer than any header or inline command that a server takes.
const LONGEST_LINE: usize = 64 << 10;

/// RESP2 and RESP3, without recursion: it counts how many values are still to come.
pub(super) struct Resp {
    direction: Direction,
    /// Values of this message that are still to come; none between two messages.
    values: u64,
    /// Bytes of the present bulk string that are still to come.
    bulk: u64,
    mark: MessageMark,
}

impl Resp {
    pub fn new(direction: Direction) -> Self {
        Resp { direction, values: 0, bulk: 0, mark: MessageMark::default() }
    }

    fn begin(&mut self, first: u8) {
        self.values = 1;
        self.mark = MessageMark {
            aside: first == b'>' && self.direction == Direction::Replies,
            ..Default::default()
        };
    }

    /// Takes one line: a whole value, or the header of one.
    fn line(&mut self, line: &[u8]) -> Result<(), String> {
        let (kind, rest) = line.split_first().ok_or("an empty line")?;
        match kind {
            b'$' | b'=' | b'!' => match number(rest)? {
                None => self.values -= 1,
                Some(n) => self.bulk = n + 2,
            },
            b'*' | b'~' | b'>' => self.open(number(rest)?.unwrap_or(0), 1),
            b'%' => self.open(2 * number(rest)?.unwrap_or(0), 1),
            // Attributes stand before the value that they belong to.
            b'|' => self.open(2 * number(rest)?.unwrap_or(0), 0),
            b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => self.values -= 1,
            _ => return Err(format!("{:?} begins no RESP value", char::from(*kind))),
        }
        Ok(())
    }

    fn open(&mut self, more: u64, done: u64) {
        self.values = self.values.saturating_add(more) - done;
    }

    /// Takes what it can from the front of `buf`, which is not empty; zero if a line is not complete yet.
    fn step(&mut self, buf: &[u8]) -> Result<usize, String> {
        if self.bulk > 0 {
            let len = self.bulk.min(buf.len() as u64);
            self.bulk -= len;
            self.values -= u64::from(self.bulk == 0);
            return Ok(len as usize);
        }
        let begins = self.values == 0;
        let Some(end) = buf.iter().position(|b| *b == b'\n') else {
            let too_long = buf.len() > LONGEST_LINE;
            return if too_long { Err("a line without an end".into()) } else { Ok(0) };
        };
        if begins {
            self.begin(buf[0]);
        }
        if begins && self.direction == Direction::Requests && buf[0] != b'*' {
            // An inline command, as typed by hand: a line is the whole of it.
            self.values = 0;
        } else {
            self.line(buf[..end].strip_suffix(b"\r").ok_or("a line that does not end in CR LF")?)?;
        }
        Ok(end + 1)
    }
}

/// A length; `None` for null.
fn number(text: &[u8]) -> Result<Option<u64>, String> {
    if text == b"-1" {
        return Ok(None);
    }
    let number = std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()).filter(|n| *n < 1 << 32);
    Ok(Some(number.ok_or_else(|| format!("{:?} is no length", String::from_utf8_lossy(text)))?))
}

impl Splitter for Resp {
    fn piece(&mut self, buf: &[u8]) -> Result<Option<Piece>, String> {
        let (mut len, mut last) = (0, false);
        while len < buf.len() && !last {
            match self.step(&buf[len..])? {
                0 => break,
                n => len += n,
            }
            last = self.values == 0;
        }
        Ok((len > 0).then_some(Piece { len, last, mark: self.mark }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ASIDE, PLAIN, assert_split};
    use super::*;
    use crate::proxy::Framing;

    #[test]
    fn commands_and_answers_are_found() {
        let requests: &[(&[u8], MessageMark)] = &[
            (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\n\r\n\r\n\r\n", PLAIN),
            (b"PING\r\n", PLAIN),
            (b"*1\r\n$4\r\nPING\r\n", PLAIN),
            (b"*0\r\n", PLAIN),
        ];
        assert_split(Framing::Resp, Direction::Requests, requests);
        let replies: &[(&[u8], MessageMark)] = &[
            (b"+OK\r\n", PLAIN),
            (b"-ERR no\r\n", PLAIN),
            (b"$-1\r\n", PLAIN),
            (b"$0\r\n\r\n", PLAIN),
            (b"*-1\r\n", PLAIN),
            (b"*2\r\n*1\r\n:1\r\n*0\r\n", PLAIN),
            (b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n", ASIDE),
            (b"%1\r\n$1\r\na\r\n~2\r\n#t\r\n_\r\n", PLAIN),
            (b"|1\r\n+ttl\r\n:3600\r\n,1.5\r\n", PLAIN),
        ];
        assert_split(Framing::Resp, Direction::Replies, replies);
    }

    #[test]
    fn what_is_not_resp_is_refused_and_claimed_lengths_cost_nothing() {
        let mut deep = Resp::new(Direction::Replies);
        for _ in 0..100_000 {
            assert!(deep.piece(b"*4294967295\r\n").unwrap().is_some());
        }
        for bad in [&b"hello\r\n"[..], b"$x\r\n", b"*-7\r\n", b"$99999999999999999999\r\n", b"+OK\n"] {
            assert!(Resp::new(Direction::Replies).piece(bad).is_err(), "{bad:?}");
        }
        assert!(Resp::new(Direction::Requests).piece(&vec![b'x'; LONGEST_LINE + 1]).is_err());
    }
}
