//! The marks: one record for each resource, with the highest fence that was let through.

use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper_core::{Error, Expect, Fence, LockName, Record, Result, WriteOutcome};
use sha2::{Digest, Sha256};

use super::exclusive_marks::{GrantId, MarksLock, MarksMode};
use super::in_flight::InFlightRequests;

/// How often a mark is tried to be raised while others raise it, or while the store's answers get lost.
const TRIES: u32 = 20;
/// A resource that is longer than this is known by its hash.
const PLAIN_BYTES_MAX: usize = 400;
/// The longest resource: more is no name but an attack.
pub(super) const RESOURCE_BYTES_MAX: usize = 4096;

/// How long a request waits for the lock of the marks, which is shared and most often free.
const START_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(super) struct HttpMarks {
    pub keeper: Lockkeeper,
    pub space: String,
    /// The requests in flight here, which are notified if the lock of the marks is lost.
    pub in_flight: InFlightRequests,
    /// Holds the lock of the marks, from the first request on.
    owner: Arc<OnceLock<MarksLock>>,
}

impl HttpMarks {
    pub fn new(keeper: &Lockkeeper, space: String, in_flight: InFlightRequests) -> HttpMarks {
        HttpMarks { keeper: keeper.clone(), space, in_flight, owner: Arc::default() }
    }

    /// The same in another space.
    pub fn in_space(&self, space: String) -> HttpMarks {
        HttpMarks::new(&self.keeper, space, self.in_flight.clone())
    }

    /// Holds the lock from now on, alone.
    pub fn alone(&mut self, ttl: Duration, lock_delay: Duration) -> Result<()> {
        let hold = MarksMode::Alone { ttl, lock_delay };
        let owner = MarksLock::start(&self.keeper, self.lock()?, hold, self.in_flight.clone());
        self.owner = Arc::new(OnceLock::from(owner));
        Ok(())
    }

    /// The lock of the marks, requested from now on at the latest, shared unless it was requested
    /// exclusively.
    pub fn owner(&self) -> Result<&MarksLock> {
        let name = self.lock()?;
        let start = || MarksLock::start(&self.keeper, name, MarksMode::Shared, self.in_flight.clone());
        Ok(self.owner.get_or_init(start))
    }

    /// The same, if it has begun.
    pub fn started(&self) -> Option<&MarksLock> {
        self.owner.get()
    }

    /// The record of a resource. No two share one: `=` says that the text follows, `#` that its hash does.
    pub fn key(&self, resource: &str) -> Result<LockName> {
        if resource.is_empty() || resource.len() > RESOURCE_BYTES_MAX {
            return Err(Error::invalid("a resource has 1 to 4096 bytes"));
        }
        if resource.len() <= PLAIN_BYTES_MAX
            && let Ok(key) = LockName::new(format!("fence/{}={resource}", self.space))
        {
            return Ok(key);
        }
        // Too long for a name, or with characters that names do not have.
        let mut key = format!("fence/{}#", self.space);
        Sha256::digest(resource).iter().for_each(|byte| _ = write!(key, "{byte:02x}"));
        LockName::new(key)
    }

    /// The lock of the marks of this space.
    fn lock(&self) -> Result<LockName> {
        LockName::new(format!("fence/{}", self.space))
    }

    /// The mark, if it is known without asking the store, and the grant under which it is.
    pub fn known(&self, key: &LockName) -> Option<(GrantId, Fence)> {
        let (under, seen) = self.owner.get()?.known(key).ok()?;
        Some((under, seen?))
    }

    /// Raises the mark to `fence`, where it is lower. [`Error::Stale`] where it is higher: then nothing has changed.
    ///
    /// The store is asked each time, because another process may have raised the mark; unless the marks are ours alone, and this
    /// one was seen. Returns the grant of the lock under which that was: see [`HttpMarks::still_under`].
    pub async fn raise(&self, key: &LockName, fence: Fence) -> Result<GrantId> {
        let owner = self.owner()?;
        if owner.is_shared() {
            // Most often it is there, and this costs nothing. If not, the error below says so.
            let _ = tokio::time::timeout(START_TIMEOUT, owner.owned()).await;
        }
        let (under, known) = owner.known(key)?;
        match known {
            Some(seen) if seen > fence => Err(Error::Stale { presented: fence, seen }),
            Some(seen) if seen == fence => Ok(under),
            _ => {
                let raised = self.raise_in_store(key, fence).await;
                match raised {
                    Ok(()) => owner.learn(under, key, fence),
                    Err(Error::Stale { seen, .. }) => owner.learn(under, key, seen),
                    Err(_) => {}
                }
                raised.map(|()| under)
            }
        }
    }

    /// Whether what [`HttpMarks::raise`] said can still be believed, after a while: the lock was ours all the time.
    pub fn still_under(&self, under: GrantId) -> bool {
        self.owner.get().is_some_and(|owner| owner.still_under(under))
    }

    /// The same in the store. A write whose answer got lost is looked for: raising twice is the same as raising once, so it does
    /// not matter whose write it was.
    async fn raise_in_store(&self, key: &LockName, fence: Fence) -> Result<()> {
        let store = self.keeper.store();
        let mut found = store.read(key).await.map_err(not_passed)?;
        for tries in 0..TRIES {
            let seen = found.as_ref().map(mark).transpose()?.flatten();
            match seen {
                Some(seen) if seen > fence => return Err(Error::Stale { presented: fence, seen }),
                Some(seen) if seen == fence => return Ok(()),
                _ => {}
            }
            let expect = found.as_ref().map_or(Expect::Absent, |record| Expect::Version(record.version));
            match store.write(key, fence.to_string().as_bytes(), expect, None).await {
                Ok(WriteOutcome::Written(_)) => return Ok(()),
                Ok(WriteOutcome::Conflict(now)) => found = now,
                Err(Error::Unknown(_)) => {
                    // The first time at once: most often the answer alone got lost.
                    if tries > 0 {
                        tokio::time::sleep(Duration::from_millis(u64::from(tries) * 5)).await;
                    }
                    found = store.read(key).await.map_err(not_passed)?;
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::Unavailable(format!("the mark {:?} could not be raised in {TRIES} tries", key.as_str())))
    }
}

/// Whatever became of the mark, the request was not passed on.
fn not_passed(error: Error) -> Error {
    match error {
        Error::Unknown(why) => Error::Unavailable(why),
        error => error,
    }
}

/// The mark that a record holds; `None` if it was taken away with `lockkeeper record rm`, which leaves a tombstone.
fn mark(record: &Record) -> Result<Option<Fence>> {
    if record.value.starts_with(b"lk0 ") {
        return Ok(None);
    }
    // A record that `lockkeeper record set` wrote has a line of its own before it.
    let text = std::str::from_utf8(&record.value).ok().and_then(|text| text.rsplit('\n').next());
    let number = text.and_then(|text| text.parse().ok());
    number.and_then(|number| Fence::new(number).ok()).map(Some).ok_or_else(|| {
        let key = record.key.as_str();
        Error::invalid(format!(
            "the record {key:?} is no mark: write a fence into it, and keep out of fence/"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_two_resources_share_a_mark() {
        let marks = HttpMarks::new(
            &Lockkeeper::open("memory:").await.unwrap(),
            "http".into(),
            InFlightRequests::default(),
        );
        let long = "x".repeat(401);
        let hash = marks.key(&long).unwrap().as_str().strip_prefix("fence/http#").unwrap().to_owned();
        let all =
            ["/a", "/a/", "/A", "=/a", "#", &hash, &long, &"x".repeat(400), &"x".repeat(4096), "a\nb", "/ä"];
        let keys: std::collections::HashSet<LockName> = all.iter().map(|r| marks.key(r).unwrap()).collect();
        assert_eq!(keys.len(), all.len());
        assert!(marks.key("").is_err() && marks.key(&"x".repeat(4097)).is_err());
    }

    /// The stored format: the record that this version writes, and that every later version must read.
    #[tokio::test]
    async fn the_golden_mark_is_read_and_written() {
        let golden = include_bytes!("../../tests/golden/http-mark");
        let keeper = Lockkeeper::open("memory:").await.unwrap();
        let marks = HttpMarks::new(&keeper, "http".into(), InFlightRequests::default());
        let (store, fence) = (keeper.store(), |n| Fence::new(n).unwrap());
        let read = LockName::new("fence/http=/read").unwrap();
        store.write(&read, golden, Expect::Any, None).await.unwrap();
        assert!(marks.raise(&read, fence(41)).await.is_err());
        assert!(marks.raise(&read, fence(43)).await.is_ok());
        let written = marks.key("/written").unwrap();
        assert_eq!(written.as_str(), "fence/http=/written");
        marks.raise(&written, fence(42)).await.unwrap();
        assert_eq!(store.read(&written).await.unwrap().unwrap().value, golden);
        // Behind the line that `lockkeeper record set` writes.
        let set = LockName::new("fence/http=/set").unwrap();
        store.write(&set, &[b"lk1 7\n", golden.as_slice()].concat(), Expect::Any, None).await.unwrap();
        assert!(marks.raise(&set, fence(41)).await.is_err());
    }

    #[tokio::test]
    async fn a_mark_never_goes_back() {
        let marks = HttpMarks::new(
            &Lockkeeper::open("memory:").await.unwrap(),
            "http".into(),
            InFlightRequests::default(),
        );
        let key = marks.key("/a").unwrap();
        let fence = |n| Fence::new(n).unwrap();
        for (n, taken) in [(5, true), (5, true), (4, false), (7, true), (6, false), (5, false), (7, true)] {
            assert_eq!(marks.raise(&key, fence(n)).await.is_ok(), taken, "{n}");
        }
        let stale = marks.raise(&key, fence(6)).await;
        assert!(
            matches!(stale, Err(Error::Stale { presented, seen }) if (presented, seen) == (fence(6), fence(7)))
        );
        // A mark that was taken away is none, and the next one is written over its tombstone.
        let register = marks.keeper.register::<u64>(key.as_str());
        assert!(matches!(register.remove(None).await.unwrap(), lockkeeper::register::Swap::Swapped(_)));
        assert!(marks.raise(&key, fence(3)).await.is_ok());
        assert!(marks.raise(&key, fence(2)).await.is_err());
        // A record that is no mark admits no request.
        marks.keeper.store().write(&key, b"seven", Expect::Any, None).await.unwrap();
        assert!(matches!(marks.raise(&key, fence(9)).await, Err(Error::Invalid(_))));
    }
}
