//! Rate limits on a store that has only records: compare-and-swap with bounded retries.
//!
//! A bucket is one record: the instant at which it is full, and the newest clock reading that any client has brought. The clock is the client's wall
//! clock, but never earlier than that reading, so a client whose clock is behind, or goes back, gives nothing twice. The record has a ttl, by the
//! store's clock: when the bucket is full, nothing is left.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use lockkeeper_core::limit::{
    BucketChange, BucketState, LimitBucket, LimitOperation, LimitOutcome, LimitRequest, decide,
};
use lockkeeper_core::{Error, Expect, Record, Records, Result, WallTime, WriteOutcome, limits};
use lockkeeper_host::{Clock, random_128, sleep_until};
use tokio::sync::Mutex;

/// How often a take is tried while other clients write the bucket. With random pauses, as many clients as a store can serve get through.
const TRIES: u32 = 64;
/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// How many buckets of this process are written at the same time.
const STRIPES: usize = 64;
/// The version of the stored format.
const FORMAT: &str = "lkb1";

/// Rate limits over the records of one store. The tasks of a process wait for each other here, so that they do not collide in the store.
#[derive(Debug)]
pub struct RecordLimits {
    stripes: Vec<Mutex<()>>,
}

impl Default for RecordLimits {
    fn default() -> Self {
        RecordLimits { stripes: (0..STRIPES).map(|_| Mutex::default()).collect() }
    }
}

/// A bucket as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StoredBucket {
    full_at: u64,
    seen: u64,
}

impl StoredBucket {
    fn parse(record: &Record) -> Result<StoredBucket> {
        let text = std::str::from_utf8(&record.value).unwrap_or_default();
        let mut words = text.split(' ');
        let format = words.next();
        let mut number = || words.next().and_then(|word| word.parse().ok());
        match (format, number(), number()) {
            (Some(FORMAT), Some(full_at), Some(seen)) => Ok(StoredBucket { full_at, seen }),
            (Some(format), ..) if format.starts_with("lkb") && format != FORMAT => Err(Error::Unsupported(
                format!("the record {} was written by a newer Lockkeeper: upgrade this one", record.key),
            )),
            _ => Err(Error::invalid(format!("the record {} was not written by a rate limit", record.key))),
        }
    }

    fn bytes(self) -> Vec<u8> {
        format!("{FORMAT} {} {}", self.full_at, self.seen).into_bytes()
    }
}

/// The client of one call: its records and its clocks.
#[derive(Clone, Copy)]
pub struct RecordClient<'a> {
    /// Where the buckets are.
    pub records: &'a dyn Records,
    /// For the pauses between two tries.
    pub clock: &'a dyn Clock,
    /// The time that decides.
    pub wall: &'a (dyn Fn() -> WallTime + Sync),
}

impl RecordLimits {
    /// Carries out a request. Several limits are taken from one after the other, the one with the fewest tokens first, and given back if a later
    /// one refuses: a moment of several milliseconds in which other clients find a bucket emptier than it is, and no moment in which a limit
    /// is exceeded. If another client takes from the bucket in that moment, the tokens are lost to it.
    ///
    /// [`Error::Unavailable`], and nothing is taken, if other clients write a bucket during all tries.
    pub async fn limit(&self, client: RecordClient<'_>, request: &LimitRequest) -> Result<LimitOutcome> {
        request.check()?;
        let one = |bucket: &LimitBucket, operation| LimitRequest { operation, buckets: vec![bucket.clone()] };
        if let [bucket] = &request.buckets[..] {
            return self.one(client, &one(bucket, request.operation)).await;
        }
        if !matches!(request.operation, LimitOperation::Take { .. }) {
            return self.each(client, request).await;
        }
        // A request that will be refused should take from no bucket for a while.
        let peek = LimitRequest { operation: LimitOperation::Peek, buckets: request.buckets.clone() };
        let seen = self.each(client, &peek).await?;
        if !seen.allowed {
            return Ok(seen);
        }
        // The bucket that may refuse because another client is faster comes first: then there is nothing to give back.
        let mut order: Vec<usize> = (0..request.buckets.len()).collect();
        order.sort_by_key(|i| seen.buckets[*i].remaining / request.buckets[*i].tokens);
        let buckets = order.iter().map(|i| request.buckets[*i].clone()).collect();
        let taken = self.each(client, &LimitRequest { operation: request.operation, buckets }).await?;
        let mut states = seen.buckets;
        for (i, state) in order.iter().zip(taken.buckets) {
            states[*i] = state;
        }
        Ok(LimitOutcome { refused: taken.refused.map(|i| order[i]), buckets: states, ..taken })
    }

    /// Carries out a request for one bucket after the other.
    async fn each(&self, client: RecordClient<'_>, request: &LimitRequest) -> Result<LimitOutcome> {
        let mut states: Vec<BucketState> = Vec::new();
        let mut refused = None;
        for bucket in &request.buckets {
            let one = LimitRequest { operation: request.operation, buckets: vec![bucket.clone()] };
            let done = self.one(client, &one).await;
            let undo = !matches!(&done, Ok(outcome) if outcome.allowed);
            if undo && matches!(request.operation, LimitOperation::Take { .. }) {
                self.give_back(client, &request.buckets, &states).await;
            }
            let outcome = done?;
            if !outcome.allowed && refused.is_none() {
                refused = Some(states.len());
            }
            states.extend(outcome.buckets);
            if refused.is_some() && matches!(request.operation, LimitOperation::Take { .. }) {
                break;
            }
        }
        if let Some(first) = refused {
            // Another client was faster between the peek and the take: show the refusal, and the rest as full as the peek may have seen it.
            let slowest = (first..states.len()).rev().max_by_key(|i| states[*i].retry_after).unwrap_or(first);
            let full = |bucket: &LimitBucket| BucketState {
                remaining: bucket.spec.burst(),
                retry_after: Duration::ZERO,
                reset_after: Duration::ZERO,
                full_at: 0,
            };
            states.extend(request.buckets[states.len()..].iter().map(full));
            return Ok(LimitOutcome {
                allowed: false,
                wait: Duration::ZERO,
                refused: Some(slowest),
                buckets: states,
            });
        }
        Ok(LimitOutcome { allowed: true, wait: Duration::ZERO, refused: None, buckets: states })
    }

    /// Gives back what the first buckets have given. If that fails, or another client has taken since, their tokens are lost, and no limit is
    /// exceeded.
    async fn give_back(&self, client: RecordClient<'_>, buckets: &[LimitBucket], taken: &[BucketState]) {
        for (bucket, state) in buckets.iter().zip(taken) {
            let bucket = LimitBucket { taken: state.full_at, ..bucket.clone() };
            let refund = LimitRequest { operation: LimitOperation::Refund, buckets: vec![bucket] };
            let _ = self.one(client, &refund).await;
        }
    }

    async fn one(&self, client: RecordClient<'_>, request: &LimitRequest) -> Result<LimitOutcome> {
        let bucket = &request.buckets[0];
        let key = bucket.spec.key();
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let _turn = self.stripes[hasher.finish() as usize % STRIPES].lock().await;
        let mut found = client.records.read(key).await?;
        for attempt in 0..TRIES {
            let stored = found.as_ref().map(StoredBucket::parse).transpose()?;
            let now = ((client.wall)().as_micros() * 1000).max(stored.map_or(0, |stored| stored.seen));
            let (outcome, changes) = decide(request, now, &[stored.map(|stored| stored.full_at)]);
            let full_at = match changes[0] {
                BucketChange::Keep => return Ok(outcome),
                BucketChange::Set(at) => at,
                BucketChange::Remove => now,
            };
            let value = StoredBucket { full_at, seen: now }.bytes();
            // The store drops the record when the bucket is full, and not before: by then nothing has to be remembered.
            let ttl = Duration::from_nanos(full_at - now).max(limits::TTL_MIN);
            let expect = found.as_ref().map_or(Expect::Absent, |record| Expect::Version(record.version));
            match client.records.write(key, &value, expect, Some(ttl)).await? {
                WriteOutcome::Written(_) => return Ok(outcome),
                WriteOutcome::Conflict(present) => found = present,
            }
            pause(client.clock, attempt).await;
            if attempt % 4 == 3 {
                found = client.records.read(key).await?;
            }
        }
        Err(Error::Unavailable(format!(
            "other clients wrote {key} during all {TRIES} tries, and nothing was taken: use a store that decides in one step, or prefetch tokens"
        )))
    }
}

/// Waits for a random time that grows with the attempts.
async fn pause(clock: &dyn Clock, attempt: u32) {
    let most = (Duration::from_millis(1) * 2_u32.pow(attempt.min(10))).min(PAUSE_MAX);
    let [a, b, ..] = random_128();
    let part = most.mul_f64(f64::from(u16::from_ne_bytes([a, b])) / f64::from(u16::MAX));
    sleep_until(clock, clock.now() + part).await;
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::{LockName, Version};

    use super::*;

    /// A bucket as the format of this version has it. If the bytes must change, raise [`FORMAT`], keep this file readable, and add one.
    const GOLDEN: &[u8] = include_bytes!("../tests/golden/lkb1");

    fn parse(value: &[u8]) -> Result<StoredBucket> {
        let (key, version) = (LockName::new("mail").unwrap(), Version(1));
        StoredBucket::parse(&Record { key, value: value.to_vec(), version })
    }

    #[test]
    fn the_fixture_of_this_version_is_read_and_written() {
        let bucket = StoredBucket { full_at: 1_795_018_859_013_721_000, seen: 1_795_018_800_000_000_000 };
        assert_eq!(parse(GOLDEN).unwrap(), bucket);
        assert_eq!(bucket.bytes(), GOLDEN);
    }

    #[test]
    fn a_newer_format_is_unsupported_and_a_damaged_record_is_invalid() {
        for newer in ["lkb2 1 2", "lkb2", "lkb10 1 2 3"] {
            assert!(matches!(parse(newer.as_bytes()), Err(Error::Unsupported(_))), "{newer}");
        }
        for damaged in ["lkb1", "lkb1 x", "lkb1 1", "lkb1 1 -2", "", "{}", "\u{e9}"] {
            assert!(matches!(parse(damaged.as_bytes()), Err(Error::Invalid(_))), "{damaged}");
        }
    }
}
