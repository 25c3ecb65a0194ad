//! Random numbers that a seed repeats: the schedule of a run.

use std::time::Duration;

/// SplitMix64 (Steele, Lea, Flood: *Fast Splittable Pseudorandom Number Generators*). Not for secrets.
#[derive(Clone, Debug)]
pub struct TortureRng(u64);

impl TortureRng {
    /// The numbers of a part of the run: each client and task has numbers of its own, whatever the others do.
    pub fn new(seed: u64, part: &str) -> TortureRng {
        // FNV-1a.
        let hash = part.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        TortureRng(seed ^ hash)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n
    }

    /// True in so many of 100 cases.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// A duration of `from` to `to`.
    pub fn duration(&mut self, from: Duration, to: Duration) -> Duration {
        let span = u64::try_from(to.saturating_sub(from).as_micros()).unwrap_or(u64::MAX - 1);
        from + Duration::from_micros(self.below(span + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_numbers_and_parts_differ() {
        let numbers = |seed, part: &str| {
            let mut rng = TortureRng::new(seed, part);
            [rng.next_u64(), rng.below(1000), rng.below(7)]
        };
        assert_eq!(numbers(7, "c0"), numbers(7, "c0"));
        assert_ne!(numbers(7, "c0"), numbers(7, "c1"));
        assert_ne!(numbers(7, "c0"), numbers(8, "c0"));
    }

    #[test]
    fn durations_stay_in_their_range() {
        let (from, to) = (Duration::from_millis(5), Duration::from_millis(6));
        let mut rng = TortureRng::new(1, "durations");
        assert!((0..1000).all(|_| (from..=to).contains(&rng.duration(from, to))));
        assert_eq!(rng.duration(to, from), to);
    }
}
