//! The fixtures of `golden.rs`: the keys of a server without the values that depend on the time, and back.

use std::time::Duration;

use lockkeeper_testkit::servers::{self, RedisKey};

use crate::common::tell;

/// The lease of each hold.
pub const TTL: Duration = Duration::from_secs(600);
/// The positions of the four numbers of a hold that depend on the time: fence, end, start, end of the minimum hold.
const TIMES: std::ops::Range<usize> = 33..65;
/// The position of the start of the wait in a queue entry: behind the byte with the version.
const ENTRY_TIME: std::ops::Range<usize> = 1..9;

/// Whether a part of a value is a hold: an attempt, flags, the times, and the terms of the request.
pub fn is_hold(part: &[u8]) -> bool {
    part.len() > 100 && part[..32].iter().all(u8::is_ascii_hexdigit)
}

/// The fence counter, and the version before the value of a record: 16 digits.
fn begins_with_time(part: &[u8]) -> bool {
    part.len() >= 16 && part[..16].iter().all(u8::is_ascii_digit)
}

/// Where the counts of a lock's holds have the time at which they were written: behind the sign of a long number.
fn time_of_counts(part: &[u8]) -> std::ops::Range<usize> {
    let sign = part.iter().position(|byte| *byte == 0xcf).expect("the counts have a time");
    sign + 1..sign + 9
}

/// The client id of the fixture, which is another one in each run.
const CLIENT: &[u8] = b"CLIENT";

/// Replaces the client id.
fn replace_client(keys: &mut [RedisKey], from: &[u8], to: &[u8]) {
    let replaced = |bytes: &[u8]| {
        let at = bytes.windows(from.len()).position(|window| window == from);
        at.map_or(bytes.to_vec(), |at| [&bytes[..at], to, &bytes[at + from.len()..]].concat())
    };
    for key in keys {
        key.key = replaced(&key.key);
        key.parts.iter_mut().for_each(|part| *part = replaced(part));
    }
}

/// Whether the key has this word: `holds`, `ends`, `queue`, `client`.
pub fn is_of(key: &RedisKey, word: &str) -> bool {
    String::from_utf8_lossy(&key.key).contains(&format!("}}:{word}:"))
}

/// Calls `change` with each value that depends on the time, and its kind.
fn each_time(keys: &mut [RedisKey], mut change: impl FnMut(StoredTime, &mut Vec<u8>)) {
    for key in keys {
        let (scores, counts) = (key.kind == "zset", is_of(key, "holds"));
        let (ends, queues) = (is_of(key, "ends"), is_of(key, "client"));
        let numbered = is_of(key, "record") || key.key.ends_with(b":fence");
        let bucket = is_of(key, "limit");
        for i in 0..key.parts.len() {
            let of_counts = counts && i % 2 == 1 && key.parts[i - 1] == b"#";
            let part = &mut key.parts[i];
            match () {
                () if scores && i % 2 == 1 => {
                    change(if ends { StoredTime::Ends } else { StoredTime::Digits }, part)
                }
                () if of_counts => change(StoredTime::Counts, part),
                () if queues && i % 2 == 1 => change(StoredTime::Entry, part),
                () if is_hold(part) => change(StoredTime::Hold, part),
                () if bucket => change(StoredTime::Bucket, part),
                () if numbered && (begins_with_time(part) || part.starts_with(b"TIME")) => {
                    change(StoredTime::Digits, part)
                }
                () => {}
            }
        }
    }
}

/// The values that depend on the time.
enum StoredTime {
    /// The end of a lease in milliseconds, as a score.
    Ends,
    /// Microseconds in digits, in front of the rest.
    Digits,
    /// The instant in the counts of a lock's holds.
    Counts,
    /// The start of the wait in a queue entry.
    Entry,
    /// The instant at which a bucket is full.
    Bucket,
    Hold,
}

/// Replaces the times.
pub fn without_times(mut keys: Vec<RedisKey>) -> Vec<RedisKey> {
    let client = keys.iter().find(|key| is_of(key, "client")).expect("a client waits").key.clone();
    let id = client.rsplit(|byte| *byte == b':').next().expect("the id").to_vec();
    replace_client(&mut keys, &id, CLIENT);
    each_time(&mut keys, |time, part| match time {
        StoredTime::Ends => *part = b"END".to_vec(),
        StoredTime::Digits | StoredTime::Bucket => drop(part.splice(..16, *b"TIME")),
        StoredTime::Counts => {
            let time = time_of_counts(part);
            part[time].fill(0);
        }
        StoredTime::Entry => part[ENTRY_TIME].fill(0),
        StoredTime::Hold => part[TIMES].fill(0),
    });
    keys
}

/// Puts times into the fixture.
pub fn with_times(mut keys: Vec<RedisKey>, now_us: u64, end_ms: u64) -> Vec<RedisKey> {
    each_time(&mut keys, |time, part| match time {
        StoredTime::Ends => *part = end_ms.to_string().into_bytes(),
        StoredTime::Digits => drop(part.splice(..4, now_us.to_string().into_bytes())),
        StoredTime::Bucket => drop(part.splice(..4, (end_ms * 1000).to_string().into_bytes())),
        StoredTime::Counts => {
            let time = time_of_counts(part);
            part[time].copy_from_slice(&(now_us / 1000).to_be_bytes());
        }
        StoredTime::Entry => part[ENTRY_TIME].copy_from_slice(&(now_us as f64).to_be_bytes()),
        StoredTime::Hold => {
            let times = [now_us as f64, end_ms as f64, now_us as f64, 0.0];
            part[TIMES].copy_from_slice(&times.map(f64::to_be_bytes).concat());
        }
    });
    keys
}

/// The time of a server in microseconds, and the end of a lease from now in milliseconds.
pub fn times_of(server: &servers::Server) -> (u64, u64) {
    let time = tell(server.addr(), &["TIME"]);
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    (seconds * 1_000_000, (seconds + TTL.as_secs()) * 1000)
}

/// Writes keys to a server: the counter and records for ever, the rest with a time to live.
pub fn restore(server: &servers::Server, keys: &[RedisKey]) {
    for key in keys {
        let lives = !is_of(key, "record") && !key.key.ends_with(b":fence");
        key.restore(server.addr(), if lives { TTL.as_millis() as u64 } else { 0 });
    }
}
