//! The counters and histograms of one pattern, registered with the recorder of the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use lockkeeper_core::Outcome;
use lockkeeper_core::lease::LossReason;
use lockkeeper_host::call_elsewhere;
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_histogram, histogram, with_recorder,
};

const WAIT: &str = "lockkeeper_wait_seconds";
const HOLD: &str = "lockkeeper_hold_seconds";
const QUEUE: &str = "lockkeeper_queue_length";
const REQUESTS: &str = "lockkeeper_requests_total";
const LOSSES: &str = "lockkeeper_losses_total";
const RENEWALS: &str = "lockkeeper_renewal_failures_total";
const BREAKS: &str = "lockkeeper_breaks_total";

const REQUEST_ENDS: [&str; 8] =
    ["granted", "busy", "cancelled", "deadlock", "lost", "unavailable", "unknown", "refused"];
const WAIT_ENDS: [&str; 4] = ["granted", "busy", "cancelled", "failed"];
const LOSS_REASONS: [&str; 9] = [
    "taken",
    "revoked",
    "silence",
    "unreachable",
    "max_hold",
    "stalled",
    "abandoned",
    "reassigned",
    "already_gone",
];
const FAILURES: [&str; 3] = ["unknown", "unavailable", "refused"];

/// How a lock request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestEnd {
    Granted,
    Busy,
    Cancelled,
    Deadlock,
    Lost,
    Unavailable,
    Unknown,
    Refused,
}

impl From<Outcome> for RequestEnd {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Busy => RequestEnd::Busy,
            Outcome::Deadlock => RequestEnd::Deadlock,
            Outcome::Lost => RequestEnd::Lost,
            Outcome::Unavailable => RequestEnd::Unavailable,
            Outcome::Unknown => RequestEnd::Unknown,
            _ => RequestEnd::Refused,
        }
    }
}

/// How a renewal failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RenewalFailure {
    Unknown,
    Unavailable,
    Refused,
}

impl From<Outcome> for RenewalFailure {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Unknown => RenewalFailure::Unknown,
            Outcome::Unavailable => RenewalFailure::Unavailable,
            _ => RenewalFailure::Refused,
        }
    }
}

/// The place of a reason in [`LOSS_REASONS`].
fn place(why: &LossReason) -> usize {
    match why {
        LossReason::Taken => 0,
        LossReason::Revoked(_) => 1,
        LossReason::Silence => 2,
        LossReason::Unreachable(_) => 3,
        LossReason::MaxHold => 4,
        LossReason::Stalled => 5,
        // A fork records nothing: the recorder belongs to the parent process.
        LossReason::Abandoned | LossReason::Forked => 6,
        LossReason::Reassigned => 7,
    }
}
const ALREADY_GONE: usize = 8;

/// A counter for the driver's thread. That thread calls no recorder, which may block: it adds here, and another thread passes the
/// sum on.
struct RelayedCounter {
    counter: Counter,
    pending: AtomicU64,
}

impl RelayedCounter {
    fn new(counter: Counter) -> Self {
        RelayedCounter { counter, pending: AtomicU64::new(0) }
    }

    fn pass_on(&self) {
        let count = self.pending.swap(0, Relaxed);
        if count > 0 {
            self.counter.increment(count);
        }
    }
}

/// The metrics of the locks of one pattern. They exist from the first request on, because the first increase of a counter that
/// was not there before is no increase for Prometheus.
pub(crate) struct PatternMetrics {
    /// Whether the process has a recorder.
    pub recorded: bool,
    requests: [Counter; REQUEST_ENDS.len()],
    waits: [Histogram; WAIT_ENDS.len()],
    hold: Histogram,
    queue: Histogram,
    losses: [RelayedCounter; LOSS_REASONS.len()],
    renewals: [RelayedCounter; FAILURES.len()],
    breaks: [Counter; 2],
    /// Whether the other thread had no room for a call: then the next request passes the sums on.
    unsent: AtomicBool,
}

impl std::fmt::Debug for PatternMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PatternMetrics(recorded: {})", self.recorded)
    }
}

impl PatternMetrics {
    /// Registers the metrics of a pattern with the recorder of this thread or process.
    pub fn register(label: &str) -> Self {
        let label: Arc<str> = label.into();
        let counted = |name: &'static str, key: &'static str, value: &'static str| counter!(name, "pattern" => label.clone(), key => value);
        let relayed = |name, key, value| RelayedCounter::new(counted(name, key, value));
        PatternMetrics {
            // The facade does not say whether there is a recorder. Its stand-in has no size.
            recorded: with_recorder(|recorder| size_of_val(recorder) > 0),
            requests: REQUEST_ENDS.map(|end| counted(REQUESTS, "outcome", end)),
            waits: WAIT_ENDS.map(|end| histogram!(WAIT, "pattern" => label.clone(), "outcome" => end)),
            hold: histogram!(HOLD, "pattern" => label.clone()),
            queue: histogram!(QUEUE, "pattern" => label.clone()),
            losses: LOSS_REASONS.map(|reason| relayed(LOSSES, "reason", reason)),
            renewals: FAILURES.map(|failure| relayed(RENEWALS, "outcome", failure)),
            breaks: ["revoke", "break"].map(|kind| counted(BREAKS, "kind", kind)),
            unsent: AtomicBool::new(false),
        }
    }

    /// Registers the units and descriptions.
    pub fn describe() {
        describe_histogram!(WAIT, Unit::Seconds, "Time from a lock request to its end.");
        describe_histogram!(HOLD, Unit::Seconds, "Time from the grant of a lock until its guard ended.");
        describe_histogram!(QUEUE, Unit::Count, "Waiters that a lock request met in the queue.");
        describe_counter!(REQUESTS, Unit::Count, "Lock requests by their end.");
        describe_counter!(LOSSES, Unit::Count, "Locks that were lost before their holder ended them.");
        describe_counter!(
            RENEWALS,
            Unit::Count,
            "Renewals that failed; the lock was held until its deadline."
        );
        describe_counter!(BREAKS, Unit::Count, "Locks that this process took away from their holders.");
    }

    pub fn count_request(&self, end: RequestEnd, waited: Duration) {
        if self.unsent.load(Relaxed) && self.unsent.swap(false, Relaxed) {
            self.pass_on();
        }
        self.requests[end as usize].increment(1);
        let wait = match end {
            RequestEnd::Granted => 0,
            RequestEnd::Busy => 1,
            RequestEnd::Cancelled => 2,
            _ => 3,
        };
        self.waits[wait].record(waited.as_secs_f64());
    }

    pub fn record_hold(&self, held: Duration) {
        self.hold.record(held.as_secs_f64());
    }

    pub fn record_queue(&self, waiting: usize) {
        self.queue.record(waiting as f64);
    }

    pub fn count_break(&self, revoked: bool) {
        self.breaks[usize::from(!revoked)].increment(1);
    }

    /// Counts a loss. Any thread may call it.
    pub fn count_loss(self: &Arc<Self>, why: &LossReason) {
        self.relay(&self.losses[place(why)]);
    }

    /// Counts a release of a lock that was lost unnoticed.
    pub fn count_already_gone(self: &Arc<Self>) {
        self.relay(&self.losses[ALREADY_GONE]);
    }

    /// Counts a failed renewal. Any thread may call it.
    pub fn count_renewal_failure(self: &Arc<Self>, failure: RenewalFailure) {
        self.relay(&self.renewals[failure as usize]);
    }

    fn relay(self: &Arc<Self>, counter: &RelayedCounter) {
        counter.pending.fetch_add(1, Relaxed);
        let metrics = self.clone();
        if !call_elsewhere(move || metrics.pass_on()) {
            self.unsent.store(true, Relaxed);
        }
    }

    fn pass_on(&self) {
        self.losses.iter().chain(&self.renewals).for_each(RelayedCounter::pass_on);
    }
}
