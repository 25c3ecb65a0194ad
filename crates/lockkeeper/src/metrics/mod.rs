//! Numbers about locks, for the recorder of your choice: how long requests waited, how long locks were held, and how they were lost.
//!
//! When a lock is slow, the first question is whether waiting or holding is the problem, so the two are separate histograms. The
//! library records through the facade crate [`metrics`](https://docs.rs/metrics) 0.24. Install any recorder for that crate; without
//! one nothing is recorded. The recorder may be installed before or after the store is opened.
//!
//! | metric | what it is | labels beside `pattern` |
//! |---|---|---|
//! | `lockkeeper_wait_seconds` | histogram: from the request to its end | `outcome`: granted, busy, cancelled, failed |
//! | `lockkeeper_hold_seconds` | histogram: from the grant until the guard ended, at most until its deadline | |
//! | `lockkeeper_queue_length` | histogram: the waiters that a request met | |
//! | `lockkeeper_requests_total` | lock requests by their end; grants are those with `granted` | `outcome`: granted, busy, cancelled, deadlock, lost, unavailable, unknown, refused |
//! | `lockkeeper_losses_total` | guards that were lost before their holder ended them | `reason`: taken, revoked, silence, unreachable, max_hold, stalled, abandoned, reassigned, already_gone |
//! | `lockkeeper_renewal_failures_total` | renewals of a guard that failed; the guard stays valid until its deadline | `outcome`: unknown, unavailable, refused |
//! | `lockkeeper_breaks_total` | locks that this process took away from their holders | `kind`: revoke, break |
//!
//! - A request is *cancelled* if its future is dropped. `already_gone`: the holder released a lock that it believed to hold, and
//!   the store had no such grant any more.
//! - The queue length is the one in a busy answer, and the one that the store shows when a request has waited for 200 ms. At
//!   most one request of a keeper looks at a time, so under load it is a sample.
//! - The crate `lockkeeper-fenced` counts the stale writes that its adapters refuse, in `lockkeeper_fenced_stale_writes_total` with
//!   the label `adapter`.
//! - Claims and job tables hold no locks, so their items are not counted here.
//!
//! # The label `pattern`
//! No metric has the name of a lock as a label, because names such as `orders/4711` would make a time series for each order. The
//! label is a pattern that you choose: with [`Lockkeeper::metrics_patterns`] for all locks of a keeper, or with
//! [`LockBuilder::metrics_pattern`](crate::LockBuilder::metrics_pattern) for one request. A lock of a recipe has `once/*`,
//! `cached/*`, `election/*`, `partition/*` or `fence/*`. Every other lock has the label `other`. A process uses at most
//! [`PATTERNS_MAX`] patterns; a lock with a further pattern has the label `other`, too. A lock with several names has the pattern
//! of the first of its sorted names.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use metrics_exporter_prometheus::PrometheusBuilder;
//!
//! let prometheus = PrometheusBuilder::new()
//!     .set_buckets(&[0.001, 0.01, 0.1, 1.0, 10.0, 60.0])?             // else the histograms are summaries
//!     .install_recorder()?;                                           // before or after the store is opened
//! let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
//! keeper.metrics_patterns(["orders/*", "nightly"])?;
//! let guard = keeper.lock("orders/4711").acquire().await?;
//! guard.release().await?;
//! let text = prometheus.render();
//! assert!(text.contains("lockkeeper_requests_total{pattern=\"orders/*\",outcome=\"granted\"} 1"), "{text}");
//! assert!(!text.contains("4711"));
//! # Ok(())
//! # }
//! ```

mod keeper_metrics;
mod pattern;
mod pattern_metrics;

pub(crate) use keeper_metrics::{KeeperMetrics, RequestTimer};
use lockkeeper_core::Result;
pub(crate) use pattern::MetricsPattern;
pub use pattern::{OTHER, PATTERN_BYTES, PATTERNS_MAX, PatternRules};
pub(crate) use pattern_metrics::{PatternMetrics, RenewalFailure, RequestEnd};

use crate::keeper::Lockkeeper;

impl Lockkeeper {
    /// Sets the rules from the name of a lock to the label `pattern` of its metrics, for this keeper and all of its clones. In a
    /// pattern `*` stands for any text; the first pattern that matches the whole name counts. See [`crate::metrics`].
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are more than [`PATTERNS_MAX`] patterns, if one is empty, longer than
    /// [`PATTERN_BYTES`] or has control characters, or if the rules were set before.
    pub fn metrics_patterns<P: AsRef<str>>(&self, patterns: impl IntoIterator<Item = P>) -> Result<()> {
        self.0.metrics.set_rules(PatternRules::new(patterns)?)
    }
}
