//! The metrics of one keeper: its rules, the registered metrics of each pattern, and the measurement of one request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, IgnorePoison, LockName, Result};
use lockkeeper_host::sleep_until;
use metrics::with_recorder;

use super::pattern::{MetricsPattern, NO_RULES, PatternRules, admit};
use super::pattern_metrics::{PatternMetrics, RequestEnd};
use crate::keeper::Lockkeeper;

/// How long a request waits before it looks at the length of the queue: a free lock is granted long before this.
const BEFORE_LOOKING: Duration = Duration::from_millis(200);

/// The metrics of a keeper.
#[derive(Debug, Default)]
pub(crate) struct KeeperMetrics {
    rules: OnceLock<PatternRules>,
    registered: RwLock<RegisteredMetrics>,
    /// Whether a request looks at its queue now.
    looks: AtomicBool,
}

/// The metrics that are registered with one recorder.
#[derive(Debug, Default)]
struct RegisteredMetrics {
    /// The address of the recorder: a recorder that is installed later gets metrics of its own.
    recorder: usize,
    by_label: BTreeMap<Box<str>, Arc<PatternMetrics>>,
}

fn recorder() -> usize {
    with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>().addr())
}

impl KeeperMetrics {
    pub fn set_rules(&self, rules: PatternRules) -> Result<()> {
        let set = self.rules.set(rules);
        set.map_err(|_| Error::invalid("the patterns of the metrics of this keeper are set already"))
    }

    /// The metrics of a lock: by the pattern of the request, else by the rules.
    pub fn of(&self, pattern: Option<&MetricsPattern>, name: &LockName) -> Arc<PatternMetrics> {
        let rules = self.rules.get().unwrap_or(&NO_RULES);
        let label = pattern.map_or_else(|| rules.label_of(name.as_str()), MetricsPattern::label);
        let recorder = recorder();
        {
            let registered = self.registered.read().ignore_poison();
            if registered.recorder == recorder
                && let Some(metrics) = registered.by_label.get(label)
            {
                return metrics.clone();
            }
        }
        self.register(label, recorder)
    }

    fn register(&self, label: &str, recorder: usize) -> Arc<PatternMetrics> {
        let admitted = admit(label);
        let mut registered = self.registered.write().ignore_poison();
        if registered.recorder != recorder {
            *registered = RegisteredMetrics { recorder, by_label: BTreeMap::new() };
            PatternMetrics::describe();
        }
        let by_label = &mut registered.by_label;
        let entry = by_label.entry(admitted.into());
        entry.or_insert_with(|| Arc::new(PatternMetrics::register(admitted))).clone()
    }
}

/// Measures one request, from its start to its end. If it is dropped first, the request was cancelled.
pub(crate) struct RequestTimer {
    pub metrics: Arc<PatternMetrics>,
    keeper: Lockkeeper,
    began: BootInstant,
    ended: bool,
}

impl RequestTimer {
    pub fn start(metrics: Arc<PatternMetrics>, keeper: &Lockkeeper) -> Self {
        let began = keeper.0.clock.now();
        RequestTimer { metrics, keeper: keeper.clone(), began, ended: false }
    }

    /// Records how the request ended. Returns the time.
    pub fn end(&mut self, end: impl Into<RequestEnd>) -> BootInstant {
        let now = self.keeper.0.clock.now();
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics.count_request(end.into(), now.since(self.began));
        }
        now
    }

    /// Looks at the queue of `name` once, if the request is still waiting by then. Never completes.
    pub async fn look_at_queue<T>(&self, name: &LockName) -> T {
        if self.metrics.recorded {
            let keeper = &self.keeper.0;
            sleep_until(&*keeper.clock, self.began + BEFORE_LOOKING).await;
            // A thousand waiters must not send a thousand requests more.
            if let Some(_look) = QueueLook::begin(&keeper.metrics.looks)
                && let Ok(Some(view)) = keeper.store.inspect(name).await
            {
                // The request itself is one of the waiters.
                self.metrics.record_queue(view.waiting.saturating_sub(1));
            }
        }
        std::future::pending().await
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        // In a fork the recorder is that of the parent, and a thread of the parent may have had its lock.
        if !self.ended && !self.keeper.0.forked() {
            self.end(RequestEnd::Cancelled);
        }
    }
}

/// The one look at a queue that a keeper has in flight.
struct QueueLook<'a>(&'a AtomicBool);

impl<'a> QueueLook<'a> {
    fn begin(looks: &'a AtomicBool) -> Option<Self> {
        (!looks.swap(true, Relaxed)).then_some(QueueLook(looks))
    }
}

impl Drop for QueueLook<'_> {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}
