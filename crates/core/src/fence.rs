//! The fence: the fencing token of a grant.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, WallTime};

/// The fencing token: the number that comes with every grant and grows from grant to grant of a lock.
///
/// A resource that remembers the highest fence it has seen and refuses lower ones is safe from a late writer, whatever
/// happened to clocks, processes and networks. Fences stay below 2^53, so that every JSON reader can hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Fence(u64);

impl Fence {
    /// The smallest fence there is: older than every grant.
    pub const MIN: Fence = Fence(1);
    /// The largest fence there is.
    pub const MAX: Fence = Fence((1 << 53) - 1);

    /// Checks a number: zero and everything from 2^53 on is [`Error::Invalid`].
    pub fn new(n: u64) -> Result<Self> {
        if n == 0 || n > Self::MAX.0 {
            return Err(Error::invalid(format!("{n} is not a fence: fences are 1 to {}", Self::MAX.0)));
        }
        Ok(Fence(n))
    }

    /// The fence after `last`: one more, and at least the wall clock in microseconds.
    ///
    /// Between two grants of a healthy store only `last + 1` matters. The clock is a floor for the day when `last` was
    /// lost (a deleted file, a flushed server, a restored backup): starting again at 1 would lock every fenced
    /// resource out. A clock beyond the largest fence is broken, and is ignored.
    pub fn after(last: Option<Fence>, wall: WallTime) -> Result<Fence> {
        let next = last.map_or(1, |last| last.0 + 1);
        let floor = if wall.as_micros() < Self::MAX.0 { wall.as_micros() } else { 0 };
        if next > Self::MAX.0 {
            return Err(Error::Limited("the fences of this store are used up".into()));
        }
        let fence = Fence(next.max(floor));
        debug_assert!(Some(fence) > last);
        Ok(fence)
    }

    /// The number itself.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> u64 {
        fence.0
    }
}

impl TryFrom<u64> for Fence {
    type Error = Error;
    fn try_from(n: u64) -> Result<Self> {
        Fence::new(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_grow_whatever_the_clock_does() {
        let mut last = None;
        for wall in [5, 5, 1_000_000, 0, 999, u64::MAX, 1 << 53, 2_000_000] {
            let next = Fence::after(last, WallTime::from_micros(wall)).unwrap();
            assert!(Some(next) > last);
            last = Some(next);
        }
        assert_eq!(last, Some(Fence(2_000_000)), "a broken clock was used");
        // One that stands at the largest fence would use them all up.
        assert_eq!(Fence::after(None, WallTime::from_micros(Fence::MAX.get())).unwrap(), Fence::MIN);
    }

    #[test]
    fn a_fence_is_shown_and_sent_as_its_number() {
        assert_eq!((Fence(7).to_string(), u64::from(Fence(7))), ("7".to_owned(), 7));
    }

    #[test]
    fn used_up_is_an_error_and_not_a_wrap() {
        assert!(matches!(Fence::after(Some(Fence::MAX), WallTime::default()), Err(Error::Limited(_))));
        assert!(Fence::new(0).is_err() && Fence::new(1 << 53).is_err());
    }
}
