//! One look at a store, within a bound of time and of locks, and its numbers as text.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lockkeeper::metrics::PatternRules;
use lockkeeper::windows::WindowRecord;
use lockkeeper::{LockName, LockView, Lockkeeper, Page, Result};
use lockkeeper_core::Secret;

use crate::commands::status;
use crate::exposition::Exposition;
use crate::text::age;

/// The lock whose state is read for the round trip. No process locks it.
const PROBE: &str = "lockkeeper/metrics";

/// The settings of a scrape.
#[derive(Debug)]
pub struct ScrapeOptions {
    pub url: Secret,
    pub prefix: String,
    pub rules: PatternRules,
    /// The jobs of `run --window` and `cron`.
    pub windows: Vec<LockName>,
    pub max_locks: usize,
    pub timeout: Duration,
}

/// Looks at one store, over and over.
#[derive(Debug)]
pub struct StoreScraper {
    options: ScrapeOptions,
    keeper: Option<Lockkeeper>,
}

/// The numbers of one scrape, and whether the store answered.
#[derive(Clone, Debug)]
pub struct StoreNumbers {
    pub text: String,
    /// Why the store is not up.
    pub down: Option<String>,
}

/// The locks of one pattern.
#[derive(Clone, Copy, Debug, Default)]
struct LockTotals {
    held: usize,
    waiting: usize,
    oldest_holder: Duration,
    oldest_waiter: Duration,
}

impl LockTotals {
    fn add(&mut self, lock: &LockView) {
        // A hold that lingers has no holder any more.
        let holders = || lock.held.iter().filter(|held| !held.lingering);
        self.held += holders().count();
        self.waiting += lock.waiting;
        let oldest = holders().map(|held| age(held.since)).max().unwrap_or_default();
        self.oldest_holder = self.oldest_holder.max(oldest);
        let oldest = lock.queue.iter().map(|waiter| age(waiter.since)).max().unwrap_or_default();
        self.oldest_waiter = self.oldest_waiter.max(oldest);
    }
}

/// The numbers that one look has found.
struct StoreLook {
    round_trip: Duration,
    totals: BTreeMap<String, LockTotals>,
    is_complete: bool,
    windows: Vec<(LockName, Option<(WindowRecord, bool)>)>,
}

impl StoreScraper {
    pub fn new(options: ScrapeOptions) -> Self {
        StoreScraper { options, keeper: None }
    }

    /// Looks at the store. A store that is unreachable or silent is a number, too: `lockkeeper_up 0`.
    pub async fn scrape(&mut self) -> StoreNumbers {
        let began = Instant::now();
        let timeout = self.options.timeout;
        let look = match tokio::time::timeout(timeout, self.look()).await {
            Ok(Ok(look)) => Ok(look),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("the store did not answer within {timeout:?}")),
        };
        let mut text = Exposition::default();
        let up = f64::from(u8::from(look.is_ok()));
        text.single("lockkeeper_up", "1 if the store answered this scrape in time.", up);
        let took = began.elapsed().as_secs_f64();
        text.single("lockkeeper_scrape_duration_seconds", "Time that this scrape took.", took);
        if let Ok(look) = &look {
            look.render(&mut text);
        }
        StoreNumbers { text: text.into_text(), down: look.err() }
    }

    async fn look(&mut self) -> Result<StoreLook> {
        let keeper = match &self.keeper {
            Some(keeper) => keeper.clone(),
            None => {
                let keeper = Lockkeeper::open(self.options.url.expose()).await?;
                self.keeper.insert(keeper).clone()
            }
        };
        let asked = Instant::now();
        keeper.inspect(PROBE).await?;
        let round_trip = asked.elapsed();
        let (totals, is_complete) = self.totals(&keeper).await?;
        let mut windows = Vec::new();
        for name in &self.options.windows {
            windows.push((name.clone(), status::look(&keeper, name).await?.1));
        }
        Ok(StoreLook { round_trip, totals, is_complete, windows })
    }

    /// The locks by pattern, and whether these are all. Every pattern is there, also without a lock: a series that comes and goes
    /// is no base for an alert.
    async fn totals(&self, keeper: &Lockkeeper) -> Result<(BTreeMap<String, LockTotals>, bool)> {
        let ScrapeOptions { rules, prefix, max_locks, .. } = &self.options;
        let known = rules.labels().chain([lockkeeper::metrics::OTHER]);
        let mut totals: BTreeMap<String, LockTotals> =
            known.map(|label| (label.to_owned(), LockTotals::default())).collect();
        let (mut after, mut left) = (None, *max_locks);
        loop {
            let page = keeper.list(prefix, &Page { after, limit: left }).await?;
            for lock in page.locks.iter().take(left) {
                totals.entry(rules.label_of(lock.name.as_str()).to_owned()).or_default().add(lock);
            }
            left = left.saturating_sub(page.locks.len());
            match page.next {
                None => return Ok((totals, true)),
                Some(_) if left == 0 => return Ok((totals, false)),
                next => after = next,
            }
        }
    }
}

impl StoreLook {
    fn render(&self, text: &mut Exposition) {
        let round_trip = self.round_trip.as_secs_f64();
        text.single("lockkeeper_store_round_trip_seconds", "Time of one read from the store.", round_trip);
        let cut = f64::from(u8::from(!self.is_complete));
        text.single("lockkeeper_locks_truncated", "1 if the store has more locks than were looked at.", cut);
        type Number = fn(&LockTotals) -> f64;
        let families: [(&str, &str, Number); 4] = [
            ("lockkeeper_held", "Holders of locks.", |totals| totals.held as f64),
            ("lockkeeper_waiting", "Waiters in queues.", |totals| totals.waiting as f64),
            (
                "lockkeeper_oldest_holder_age_seconds",
                "Time for which the oldest holder has held its lock.",
                |totals| totals.oldest_holder.as_secs_f64(),
            ),
            (
                "lockkeeper_oldest_waiter_age_seconds",
                "Time for which the oldest waiter has waited.",
                |totals| totals.oldest_waiter.as_secs_f64(),
            ),
        ];
        for (name, help, number) in families {
            text.family(name, "gauge", help);
            for (label, totals) in &self.totals {
                text.series(&[("pattern", label)], number(totals));
            }
        }
        if !self.windows.is_empty() {
            self.render_windows(text);
        }
    }

    fn render_windows(&self, text: &mut Exposition) {
        type Number = fn(&WindowRecord) -> Option<f64>;
        let families: [(&str, &str, Number); 5] = [
            ("lockkeeper_window_begin_timestamp_seconds", "When the newest window begins.", |record| {
                Some(record.at_ms as f64 / 1000.0)
            }),
            ("lockkeeper_window_last_start_timestamp_seconds", "When the newest run was begun.", |record| {
                record.started_ms.map(|ms| ms as f64 / 1000.0)
            }),
            ("lockkeeper_window_last_end_timestamp_seconds", "When the last run ended.", |record| {
                record.ended.as_ref().map(|run| run.ended_ms as f64 / 1000.0)
            }),
            (
                "lockkeeper_window_last_success_timestamp_seconds",
                "When the last run with exit code 0 ended.",
                |record| record.succeeded.as_ref().map(|run| run.ended_ms as f64 / 1000.0),
            ),
            ("lockkeeper_window_exit_code", "Exit code of the last run.", |record| {
                record.ended.as_ref().map(|run| f64::from(run.exit_code))
            }),
        ];
        for (name, help, number) in families {
            text.family(name, "gauge", help);
            for (window, record) in &self.windows {
                if let Some(value) = record.as_ref().and_then(|(record, _)| number(record)) {
                    text.series(&[("window", window.as_str())], value);
                }
            }
        }
        text.family(
            "lockkeeper_window_state",
            "gauge",
            "1 for the state of the newest window, 0 for the others.",
        );
        for (window, record) in &self.windows {
            let state = match record {
                None => "never",
                Some((record, _)) if record.done => "ended",
                Some((_, true)) => "running",
                // Its host died, or lost the lock.
                Some((_, false)) => "abandoned",
            };
            for known in ["never", "running", "ended", "abandoned"] {
                let value = f64::from(u8::from(state == known));
                text.series(&[("window", window.as_str()), ("state", known)], value);
            }
        }
    }
}
