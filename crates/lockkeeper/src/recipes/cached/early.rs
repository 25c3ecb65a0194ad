//! When a value that is still fresh is refreshed early, and by how much a ttl is shortened: both at random,
//! so that callers and keys do not act together.

use std::time::Duration;

use lockkeeper_core::limits;
use lockkeeper_host::random_128;

use super::record::StoredValue;

/// A random number above 0 and at most 1.
pub(super) fn random_unit() -> f64 {
    let [a, b, c, d, ..] = random_128();
    (f64::from(u32::from_ne_bytes([a, b, c, d])) + 1.0) / (f64::from(u32::MAX) + 1.0)
}

/// Whether a caller refreshes a fresh value early: `now - delta * beta * ln(random) >= end`, from
/// [Vattani, Chierichetti, Lowenstein: Optimal Probabilistic Cache Stampede Prevention](https://cseweb.ucsd.edu/~avattani/papers/cache_stampede.pdf).
///
/// The age comes from the wall clocks of two processes, which may differ. So it decides about nothing but
/// this: a value that seems to be from the future, or older than its life, is not refreshed early.
pub(super) fn is_early(value: &StoredValue, now_ms: u64, beta: f64, random: f64) -> bool {
    let Some(age) = now_ms.checked_sub(value.made_ms).filter(|age| *age < value.life_ms) else {
        return false;
    };
    let remaining = (value.life_ms - age) as f64;
    beta > 0.0 && value.took_ms as f64 * beta * -random.ln() >= remaining
}

/// How long a value is fresh: the ttl less a random part of it.
pub(super) fn life(ttl: Duration, jitter: f64, random: f64) -> Duration {
    ttl.mul_f64(1.0 - jitter * random).max(limits::TTL_MIN).min(ttl)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(made_ms: u64, took_ms: u64) -> StoredValue {
        StoredValue { size: 0, parts: 0, external: false, made_ms, took_ms, life_ms: 1000 }
    }

    #[test]
    fn the_closer_the_end_and_the_longer_the_work_the_likelier() {
        // -ln(1/e) = 1: refreshed when the remaining time is the time that the work takes.
        let random = (-1f64).exp();
        assert!(!is_early(&value(5000, 100), 5899, 1.0, random));
        assert!(is_early(&value(5000, 100), 5900, 1.0, random));
        assert!(is_early(&value(5000, 100), 5800, 2.0, random));
        assert!(!is_early(&value(5000, 100), 5999, 0.0, random), "0 turns it off");
        assert!(!is_early(&value(5000, 0), 5999, 1.0, random), "work that takes no time need not be early");
    }

    #[test]
    fn a_clock_that_is_off_refreshes_nothing_early() {
        assert!(!is_early(&value(5000, 900), 4999, 100.0, 1e-9), "from the future");
        assert!(!is_early(&value(5000, 900), 6000, 100.0, 1e-9), "older than its life");
    }

    #[test]
    fn jitter_shortens_and_never_prolongs() {
        let ttl = Duration::from_secs(10);
        assert_eq!(life(ttl, 0.0, 0.7), ttl);
        assert_eq!(life(ttl, 0.5, 1.0), ttl / 2);
        assert_eq!(life(limits::TTL_MIN, 0.5, 1.0), limits::TTL_MIN, "no store takes less");
        for _ in 0..1000 {
            let random = random_unit();
            assert!(random > 0.0 && random <= 1.0);
            assert!(life(ttl, 0.1, random) >= ttl.mul_f64(0.9) && life(ttl, 0.1, random) <= ttl);
        }
    }
}
