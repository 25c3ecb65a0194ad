//! Waits for a condition with a deadline.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::redis_call;

/// Far beyond what a healthy machine needs.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// Looks again and again until there is something to see, for what no server sends an event.
///
/// # Panics
/// If it takes too long; what was seen last is in the message.
pub(super) fn wait_for<T>(what: &str, mut look: impl FnMut() -> io::Result<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(seen) => return seen,
            Err(e) if Instant::now() > deadline => panic!("not within {PATIENCE:?}: {what}; last seen: {e}"),
            Err(_) => std::thread::sleep(POLL),
        }
    }
}

/// Asks, and takes the answer only if it is the right one.
pub(super) fn expect(addr: SocketAddr, command: &[&str], good: impl Fn(&str) -> bool) -> io::Result<String> {
    let answer = redis_call(addr, command)?;
    if good(&answer) { Ok(answer) } else { Err(io::Error::other(format!("{addr} {command:?}: {answer}"))) }
}

/// The value of a `key:value` line, as `INFO` and `CLUSTER INFO` have them.
pub(super) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
}
