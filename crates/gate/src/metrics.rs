//! The counters of the gate, in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use lockkeeper_fenced::http::Problem;

/// The values of the label `outcome`; those of refused requests are the words of [`Problem::as_str`].
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
/// Upper bounds of the histogram's buckets, in microseconds.
const BUCKETS: [u64; 12] =
    [250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 1_000_000, 10_000_000];

/// The counters of one gate.
#[derive(Debug, Default)]
pub struct GateMetrics {
    outcomes: [AtomicU64; OUTCOMES.len()],
    buckets: [AtomicU64; BUCKETS.len()],
    micros: AtomicU64,
    /// Requests that were forwarded and have not ended, websockets among them.
    pub requests: Gauge,
    /// Client connections.
    pub connections: Gauge,
    /// Websockets.
    pub tunnels: Gauge,
    /// Whether the gate shuts down.
    pub draining: AtomicBool,
}

/// How many of something exist now.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

/// One thing that a [`Gauge`] counts, until this guard is dropped.
#[derive(Debug)]
pub struct GaugeGuard(Arc<AtomicU64>);

impl Gauge {
    /// Counts one more.
    pub fn increment(&self) -> GaugeGuard {
        self.0.fetch_add(1, Relaxed);
        GaugeGuard(self.0.clone())
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl GateMetrics {
    /// Counts a response: the service's, or one of the gate's own.
    pub fn count_response(&self, problem: Option<&Problem>, fenced: bool, took: Duration) {
        let word = match (problem, fenced) {
            (Some(problem), _) => problem.as_str(),
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

    /// The text of `/metrics`.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let head = |name: &str, kind: &str, help: &str| {
            format!("# HELP lockkeeper_gate_{name} {help}\n# TYPE lockkeeper_gate_{name} {kind}\n")
        };
        text += &head("requests_total", "counter", "Requests by outcome.");
        let mut all = 0;
        for (word, count) in OUTCOMES.iter().zip(&self.outcomes) {
            let count = count.load(Relaxed);
            all += count;
            let _ = writeln!(text, "lockkeeper_gate_requests_total{{outcome=\"{word}\"}} {count}");
        }
        text += &head("request_seconds", "histogram", "Time until the response began.");
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
            ("requests_in_flight", "Requests that were forwarded and have not ended.", self.requests.count()),
            ("connections", "Client connections.", self.connections.count()),
            ("tunnels", "Websockets.", self.tunnels.count()),
            ("draining", "1 while the gate shuts down.", self.draining.load(Relaxed).into()),
        ] {
            text += &head(name, "gauge", help);
            let _ = writeln!(text, "lockkeeper_gate_{name} {value}");
        }
        text
    }
}
