//! What the gate counts, in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use lockkeeper_fenced::http::Problem;

/// The outcomes, by the word that they are told with.
const OUTCOMES: [&str; 11] = [
    "passed",
    "unfenced",
    "missing",
    "malformed",
    "no-resource",
    "ambiguous",
    "stale",
    "waiting",
    "unavailable",
    "unreached",
    "unknown",
];
/// Upper bounds of the buckets, in microseconds.
const BUCKETS: [u64; 12] =
    [250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 1_000_000, 10_000_000];

#[derive(Debug, Default)]
pub struct Metrics {
    outcomes: [AtomicU64; OUTCOMES.len()],
    buckets: [AtomicU64; BUCKETS.len()],
    micros: AtomicU64,
    pub requests: Gauge,
    pub connections: Gauge,
    pub tunnels: Gauge,
    pub draining: AtomicBool,
}

/// How many of something there are now.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

/// One of them; it counts until it is dropped.
#[derive(Debug)]
pub struct One(Arc<AtomicU64>);

impl Gauge {
    pub fn one(&self) -> One {
        self.0.fetch_add(1, Relaxed);
        One(self.0.clone())
    }

    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Metrics {
    /// Counts an answer: the service's, or one of ours.
    pub fn answered(&self, problem: Option<&Problem>, fenced: bool, took: Duration) {
        let word = match (problem, fenced) {
            (Some(problem), _) => problem.word(),
            (None, true) => "passed",
            (None, false) => "unfenced",
        };
        if let Some(n) = OUTCOMES.iter().position(|outcome| *outcome == word) {
            self.outcomes[n].fetch_add(1, Relaxed);
        }
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Relaxed);
        if let Some(n) = BUCKETS.iter().position(|bound| micros <= *bound) {
            self.buckets[n].fetch_add(1, Relaxed);
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let head = |name: &str, kind: &str, help: &str| {
            format!("# HELP lockkeeper_gate_{name} {help}\n# TYPE lockkeeper_gate_{name} {kind}\n")
        };
        text += &head("requests_total", "counter", "Requests, by what became of them.");
        let mut all = 0;
        for (word, count) in OUTCOMES.iter().zip(&self.outcomes) {
            let count = count.load(Relaxed);
            all += count;
            let _ = writeln!(text, "lockkeeper_gate_requests_total{{outcome=\"{word}\"}} {count}");
        }
        text += &head("request_seconds", "histogram", "Time until the answer began.");
        let mut below = 0;
        for (bound, count) in BUCKETS.iter().zip(&self.buckets) {
            below += count.load(Relaxed);
            let bound = *bound as f64 / 1e6;
            let _ = writeln!(text, "lockkeeper_gate_request_seconds_bucket{{le=\"{bound}\"}} {below}");
        }
        let seconds = self.micros.load(Relaxed) as f64 / 1e6;
        let _ = writeln!(text, "lockkeeper_gate_request_seconds_bucket{{le=\"+Inf\"}} {all}");
        let _ = writeln!(text, "lockkeeper_gate_request_seconds_sum {seconds}");
        let _ = writeln!(text, "lockkeeper_gate_request_seconds_count {all}");
        for (name, help, value) in [
            ("requests_under_way", "Requests that were passed on and have not ended.", self.requests.count()),
            ("connections", "Connections of clients.", self.connections.count()),
            ("tunnels", "Websockets.", self.tunnels.count()),
            ("draining", "1 after a signal to end.", self.draining.load(Relaxed).into()),
        ] {
            text += &head(name, "gauge", help);
            let _ = writeln!(text, "lockkeeper_gate_{name} {value}");
        }
        text
    }
}
