//! A lock that whoever had it gave to one of us, and from when its lease counts.

use std::time::Duration;

use lockkeeper_core::Moment;

/// What the server's clock said to a question that we had sent at this moment: it said so then, or later.
#[derive(Clone, Copy)]
pub(crate) struct Reading {
    pub sent_at: Moment,
    pub said: i64,
}

impl Reading {
    /// The earliest that it can have said `later`, as long as nobody sets it. Rates may differ by a hundredth.
    pub fn earliest(self, later: i64) -> Moment {
        let span = Duration::from_micros(later.abs_diff(self.said));
        match later > self.said {
            true => self.sent_at + span * 99 / 100,
            false => self.sent_at.before(span * 101 / 100),
        }
    }
}

/// The fence, when it was given, and for how long, in microseconds of the server's clock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    pub fence: i64,
    pub at: i64,
    pub lease: Duration,
}

impl Passed {
    /// Reads a message: for whom it is, and what that one was given. `None`: nothing, it is only called.
    pub fn read(text: &str) -> (&str, Option<Passed>) {
        let (key, rest) = text.split_once(' ').unwrap_or((text, ""));
        let mut numbers = rest.split(' ').map(|word| word.parse::<i64>().ok());
        let mut next = || numbers.next().flatten();
        let passed = match (next(), next(), next().and_then(|lease| lease.try_into().ok())) {
            (Some(fence), Some(at), Some(lease)) => {
                Some(Passed { fence, at, lease: Duration::from_micros(lease) })
            }
            _ => None,
        };
        (key, passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_makes_no_sense_is_only_a_call() {
        let whole = Passed { fence: 7, at: 8, lease: Duration::from_micros(9) };
        assert_eq!(Passed::read("ab12 7 8 9"), ("ab12", Some(whole)));
        for call in ["ab12", "ab12 ", "ab12 7", "ab12 7 8", "ab12 7 8 x", "ab12 7 8 -9"] {
            assert_eq!(Passed::read(call), ("ab12", None), "{call:?}");
        }
    }

    #[test]
    fn a_lease_counts_from_no_later_than_the_clock_allows() {
        let ms = Duration::from_millis;
        let origin = Moment::default() + ms(10_000);
        let reading = Reading { sent_at: origin, said: 5_000_000 };
        assert_eq!(reading.earliest(5_000_000), origin);
        // A clock that runs a hundredth too fast has said it sooner.
        assert_eq!(reading.earliest(6_000_000), origin + ms(990));
        assert_eq!(reading.earliest(4_000_000), origin.before(ms(1010)));
        assert_eq!(reading.earliest(i64::MIN), Moment::default(), "nonsense is long ago");
    }
}
