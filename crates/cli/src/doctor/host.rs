//! The pauses of this host: how late a thread wakes that wants to sleep for a millisecond, how long the control group was throttled, and how
//! much time the hypervisor took. A ttl must be longer than the longest pause, or the holder loses its lock in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use lockkeeper::{Finding, Promise};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::duration;

/// How long the thread sleeps between two looks at the clock.
const NAP: Duration = Duration::from_millis(1);
/// A pause may take this part of the ttl: the first renewal is sent after a third, and needs time for a second try.
const PART: u32 = 10;

/// The pauses of this host during the examination.
#[derive(Clone, Debug, Default)]
pub struct HostPauses {
    /// For how long they were measured.
    pub measured: Duration,
    /// The longest time by which the thread was late, suspends included.
    pub longest: Duration,
    /// How long this process's control group had used up its share of the processors.
    pub throttled: Duration,
    /// How much of the processors' time the hypervisor gave to others, in percent.
    pub steal_percent: f64,
}

/// A thread that measures until it is stopped.
pub struct PauseSampler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<HostPauses>>,
}

impl PauseSampler {
    /// Starts to measure. Without a thread there are no pauses in the report.
    pub fn start() -> PauseSampler {
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let thread =
            std::thread::Builder::new().name("lockkeeper-pauses".into()).spawn(move || sample(&until));
        PauseSampler { stop, thread: thread.ok() }
    }

    /// Ends the measurement. `None` if there was no thread for it.
    pub fn finish(mut self) -> Option<HostPauses> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

/// CLOCK_BOOTTIME, which goes on while the machine is suspended.
fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn sample(stop: &AtomicBool) -> HostPauses {
    let (begun, throttled, ticks) = (boot_time(), throttled_time(), cpu_ticks());
    let (mut longest, mut last) = (Duration::ZERO, begun);
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(NAP);
        let now = boot_time();
        longest = longest.max(now.saturating_sub(last).saturating_sub(NAP));
        last = now;
    }
    let (all, steal) = cpu_ticks();
    let all = all.saturating_sub(ticks.0).max(1);
    HostPauses {
        measured: last.saturating_sub(begun),
        longest,
        throttled: throttled_time().saturating_sub(throttled),
        steal_percent: steal.saturating_sub(ticks.1) as f64 * 100.0 / all as f64,
    }
}

/// `throttled_usec` of this process's control group (cgroup v2); zero where there is none.
fn throttled_time() -> Duration {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let stat = std::fs::read_to_string(format!("/sys/fs/cgroup{path}/cpu.stat")).unwrap_or_default();
    let micros = stat.lines().find_map(|line| line.strip_prefix("throttled_usec "));
    Duration::from_micros(micros.and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

/// The ticks of all processors so far, and those that the hypervisor took (`steal`, the eighth number of /proc/stat).
fn cpu_ticks() -> (u64, u64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .map(|line| line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect())
        .unwrap_or_default();
    // The last two numbers are parts of the first two.
    (ticks.iter().take(8).sum(), ticks.get(7).copied().unwrap_or(0))
}

impl HostPauses {
    /// The finding for a lease of `ttl`.
    pub fn finding(&self, ttl: Duration) -> Option<Finding> {
        let longest = self.longest.max(self.throttled);
        if longest * PART <= ttl {
            return None;
        }
        let text = format!(
            "this host paused for {} within {}, and the ttl is {}: a holder that is paused for longer than its ttl loses its \
             lock, and may write before it knows",
            duration::measured(longest),
            duration::measured(self.measured),
            duration::exact(ttl)
        );
        let finding = if longest >= ttl {
            Finding::harm(Promise::Exclusion, text)
        } else {
            Finding::risk(Promise::Exclusion, text)
        };
        let enough = Duration::from_secs((longest * PART).as_secs() + 1);
        Some(finding.change("the ttl", duration::exact(ttl), format!("{} or more", duration::exact(enough))))
    }

    pub fn json(&self) -> Value {
        json!({
            "measured_ms": self.measured.as_millis() as u64,
            "longest_pause_us": self.longest.as_micros() as u64,
            "throttled_us": self.throttled.as_micros() as u64,
            "steal_percent": (self.steal_percent * 10.0).round() / 10.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockkeeper::Severity;

    #[test]
    fn a_pause_is_compared_with_the_ttl() {
        let paused = |ms| HostPauses { longest: Duration::from_millis(ms), ..HostPauses::default() };
        let ttl = Duration::from_secs(30);
        assert_eq!(paused(3_000).finding(ttl), None);
        assert_eq!(paused(3_001).finding(ttl).map(|found| found.severity), Some(Severity::Risk));
        let harm = paused(30_000).finding(ttl).expect("as long as the ttl");
        assert_eq!(harm.severity, Severity::Harm);
        assert_eq!(harm.changes[0].to, "5m1s or more");
        let throttled = HostPauses { throttled: Duration::from_secs(4), ..HostPauses::default() };
        assert!(throttled.finding(ttl).is_some(), "a throttled control group is a pause");
    }

    #[test]
    fn the_sampler_measures_until_it_is_stopped() {
        let sampler = PauseSampler::start();
        std::thread::sleep(Duration::from_millis(20));
        let found = sampler.finish().expect("there is a thread");
        assert!(found.measured >= Duration::from_millis(1), "{found:?}");
    }
}
