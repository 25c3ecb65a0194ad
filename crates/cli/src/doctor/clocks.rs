//! The clocks of the servers against the clock of this host: the offset, within the bounds that the round trip allows, and the rate.

use std::collections::BTreeMap;
use std::time::Duration;

use lockkeeper::store::ClockReading;
use lockkeeper::{Finding, Promise};
use serde_json::{Value, json};

use crate::duration;

/// Clocks that differ by more than this are wrong: NTP keeps them within milliseconds.
const OFFSET: i64 = 1_000_000;
/// The margin of a lease allows for clocks whose rates differ by less than this.
const RATE_PPM: f64 = 10_000.0;

/// An estimate from the readings of one server's clock.
#[derive(Clone, Debug, PartialEq)]
pub struct ClockEstimate {
    pub server: String,
    /// How far the server's clock is ahead of this host's, in µs.
    pub offset_us: i64,
    /// The offset is known this well.
    pub offset_bound_us: i64,
    /// How much faster the server's clock runs, in parts per million, and how well this is known. `None`: the examination was too short.
    pub rate_ppm: Option<(f64, f64)>,
}

/// A reading, reduced to a point: this host's boot time and the server's offset, with its bound, all in µs.
struct ClockPoint {
    at: i64,
    time: i64,
    offset: i64,
    bound: i64,
}

fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

fn point(reading: &ClockReading) -> ClockPoint {
    let round_trip = micros(reading.received.since(reading.sent));
    let (half, step) = (round_trip / 2, micros(reading.resolution));
    let time = i64::try_from(reading.time.as_micros()).unwrap_or(i64::MAX);
    let local = i64::try_from(reading.local.as_micros()).unwrap_or(i64::MAX) - half;
    let at = i64::try_from(reading.received.as_nanos() / 1000).unwrap_or(i64::MAX) - half;
    ClockPoint { at, time, offset: time - local, bound: round_trip - half + step }
}

/// One estimate for each server, from readings in the order in which they were made.
pub fn estimate(readings: &[ClockReading]) -> Vec<ClockEstimate> {
    let mut servers: BTreeMap<&str, Vec<ClockPoint>> = BTreeMap::new();
    for reading in readings {
        servers.entry(&reading.server).or_default().push(point(reading));
    }
    let one = |(server, points): (&str, Vec<ClockPoint>)| {
        let best = points.iter().min_by_key(|point| point.bound)?;
        // The best of each half: the longer the time between them, the better the rate is known.
        let (early, late) = points.split_at(points.len() / 2);
        let best_of = |half: &[ClockPoint]| {
            half.iter().min_by_key(|point| point.bound).map(|p| (p.at, p.time, p.bound))
        };
        let rate_ppm = best_of(early).zip(best_of(late)).and_then(|(a, b)| {
            let (ours, theirs) = ((b.0 - a.0) as f64, (b.1 - a.1) as f64);
            let bound = (a.2 + b.2) as f64 / ours * 1e6;
            (ours > 0.0 && bound < RATE_PPM / 2.0).then(|| ((theirs / ours - 1.0) * 1e6, bound))
        });
        Some(ClockEstimate {
            server: server.to_owned(),
            offset_us: best.offset,
            offset_bound_us: best.bound,
            rate_ppm,
        })
    };
    servers.into_iter().filter_map(one).collect()
}

impl ClockEstimate {
    /// The findings that are certain: the bounds count in favour of the clock.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let server = &self.server;
        if self.offset_us.abs() - self.offset_bound_us > OFFSET {
            let text = format!(
                "the clock of {server} is {}: one of the two is wrong. Fences begin at the store's clock, so they go back if it is \
                 corrected and the store loses its data",
                self.offset_text()
            );
            findings.push(
                Finding::risk(Promise::Fence, text)
                    .change(format!("the offset of {server}"), self.offset_text(), "less than 1s")
                    .how("run chrony or another NTP client on both hosts; look at `timedatectl`"),
            );
        }
        if let Some((ppm, bound)) = self.rate_ppm
            && ppm.abs() - bound > RATE_PPM
        {
            let text = format!(
                "the clock of {server} runs {:.1} % {} than this host's, and the margin of a lease allows for 1 %: two processes can \
                 hold one lock",
                ppm.abs() / 1e4,
                if ppm > 0.0 { "faster" } else { "slower" }
            );
            findings.push(
                Finding::harm(Promise::Exclusion, text)
                    .change(format!("the clock rate of {server}"), format!("{ppm:+.0} ppm"), "within 1 %")
                    .how("look at /sys/devices/system/clocksource and at the clock of the virtual machine"),
            );
        }
        findings
    }

    /// The offset in words: `12ms ahead of this host's (± 1ms)`.
    pub fn offset_text(&self) -> String {
        let time = |us: i64| duration::measured(Duration::from_micros(us.unsigned_abs()));
        let bound = time(self.offset_bound_us);
        if self.offset_us.abs() <= self.offset_bound_us {
            return format!("equal to this host's within {bound}");
        }
        let side = if self.offset_us > 0 { "ahead of" } else { "behind" };
        format!("{} {side} this host's (± {bound})", time(self.offset_us))
    }

    pub fn json(&self) -> Value {
        let rate = |value: f64| value.round() as i64;
        json!({
            "server": self.server,
            "offset_us": self.offset_us,
            "offset_bound_us": self.offset_bound_us,
            "rate_ppm": self.rate_ppm.map(|(ppm, _)| rate(ppm)),
            "rate_bound_ppm": self.rate_ppm.map(|(_, bound)| rate(bound)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper::{BootInstant, WallTime};

    /// A reading at `at` ms of boot time with a round trip of `trip` µs; this host's wall clock is one hour ahead of its boot time.
    fn reading(at: u64, trip: u64, server_ms: u64) -> ClockReading {
        let received = BootInstant::from_nanos(at * 1_000_000);
        ClockReading {
            server: "a".into(),
            time: WallTime::from_micros(3_600_000_000 + server_ms * 1000),
            resolution: Duration::from_micros(1),
            sent: received.before(Duration::from_micros(trip)),
            received,
            local: WallTime::from_micros(3_600_000_000 + at * 1000),
        }
    }

    #[test]
    fn equal_clocks_give_no_finding() {
        let found = estimate(&[reading(1000, 400, 1000), reading(3000, 400, 3000)]);
        assert_eq!(found[0].findings(), []);
        assert!(found[0].offset_us.abs() <= found[0].offset_bound_us, "{found:?}");
        assert!(found[0].rate_ppm.is_some_and(|(ppm, _)| ppm.abs() < 1.0), "{found:?}");
    }

    #[test]
    fn a_clock_that_is_ahead_and_one_that_is_fast_are_found() {
        let ahead = estimate(&[reading(1000, 400, 6000), reading(3000, 400, 8000)]);
        assert_eq!(ahead[0].findings()[0].promise, Promise::Fence);
        assert!(ahead[0].offset_text().starts_with("5.0s ahead of"), "{}", ahead[0].offset_text());
        let fast = estimate(&[reading(1000, 400, 1000), reading(3000, 400, 3100)]);
        assert_eq!(fast[0].findings()[0].promise, Promise::Exclusion);
        let behind = estimate(&[reading(9000, 400, 1000)]);
        assert!(behind[0].offset_text().contains("behind"), "{}", behind[0].offset_text());
        assert_eq!(behind[0].rate_ppm, None, "one reading has no rate");
    }

    #[test]
    fn the_round_trip_counts_in_favour_of_the_clock() {
        // Two seconds ahead, as it seems, by a round trip of five seconds.
        assert_eq!(estimate(&[reading(9000, 5_000_000, 9000)])[0].findings(), []);
        let slow = estimate(&[reading(1000, 900_000, 1000), reading(2000, 900_000, 3000)]);
        assert_eq!(slow[0].rate_ppm, None, "the bound of the rate is wider than the margin");
    }
}
