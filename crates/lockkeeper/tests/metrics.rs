//! The numbers that the library records: each once, under a pattern and never under a name.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper, ReleaseOutcome, Result, Store};
use lockkeeper_core::{AcquireOutcome, Grant, LockRequest, RenewOutcome, RequestKey};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;
use lockkeeper_testkit::SimulatedKeeper;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

const TTL: Duration = Duration::from_secs(30);

/// The recorder of this process. Each test has patterns of its own.
fn prometheus() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let buckets = PrometheusBuilder::new().set_buckets(&[1.0, 10.0]).unwrap();
        buckets.install_recorder().unwrap()
    })
}

/// The value of a series; `None` if there is none.
fn value(series: &str) -> Option<f64> {
    let text = prometheus().render();
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ').map(str::to_owned));
    line.map(|value| value.parse().unwrap())
}

/// Waits until another thread has passed the counts on. A test beside this one keeps that thread busy for a while.
async fn soon(has_come: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !has_come() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "{}", prometheus().render());
}

async fn until(series: &str, wanted: f64) {
    soon(|| value(series) == Some(wanted)).await;
}

#[tokio::test]
async fn waiting_and_holding_are_measured_apart() {
    prometheus();
    let rehearsal = SimulatedKeeper::new();
    let (keeper, rival) = (rehearsal.keeper(), rehearsal.rival());
    keeper.metrics_patterns(["apart/*"]).unwrap();
    let held = keeper.lock("apart/1").acquire().await.unwrap();
    let waiting = tokio::spawn({
        let keeper = keeper.clone();
        async move { keeper.lock("apart/1").acquire().await }
    });
    while rival.inspect("apart/1").await.unwrap().unwrap().waiting == 0 {
        tokio::task::yield_now().await;
    }
    rehearsal.pass(Duration::from_secs(7)).await;
    assert!(keeper.lock("apart/1").try_acquire().await.unwrap().is_none());
    held.release().await.unwrap();
    let second = waiting.await.unwrap().unwrap();
    rehearsal.pass(Duration::from_secs(3)).await;
    drop(second);
    let value =
        |name: &str, labels: &str| value(&format!("lockkeeper_{name}{{pattern=\"apart/*\"{labels}}}"));
    assert_eq!(value("wait_seconds_sum", ",outcome=\"granted\""), Some(7.0));
    assert_eq!(value("wait_seconds_count", ",outcome=\"granted\""), Some(2.0));
    assert_eq!(value("wait_seconds_sum", ",outcome=\"busy\""), Some(0.0));
    assert_eq!(value("hold_seconds_sum", ""), Some(10.0));
    assert_eq!(value("hold_seconds_count", ""), Some(2.0));
    for (outcome, count) in [("granted", 2.0), ("busy", 1.0), ("cancelled", 0.0), ("unknown", 0.0)] {
        assert_eq!(value("requests_total", &format!(",outcome=\"{outcome}\"")), Some(count), "{outcome}");
    }
    // The busy answer met one waiter; the waiter itself looked after 200 ms, and met none before it.
    assert_eq!((value("queue_length_sum", ""), value("queue_length_count", "")), (Some(1.0), Some(2.0)));
}

/// A request that its caller gives up, for instance by a time-out, has waited the longest of all.
#[tokio::test]
async fn a_dropped_request_is_cancelled() {
    prometheus();
    let rehearsal = SimulatedKeeper::new();
    let keeper = rehearsal.keeper();
    let _held = rehearsal.rival().lock("x").acquire().await.unwrap();
    let mut waiting = Box::pin(keeper.lock("x").metrics_pattern("cancelled").acquire());
    assert!(futures_util::poll!(&mut waiting).is_pending());
    rehearsal.pass(Duration::from_secs(5)).await;
    drop(waiting);
    let labels = "{pattern=\"cancelled\",outcome=\"cancelled\"}";
    assert_eq!(value(&format!("lockkeeper_requests_total{labels}")), Some(1.0));
    assert_eq!(value(&format!("lockkeeper_wait_seconds_sum{labels}")), Some(5.0));
}

#[tokio::test]
async fn a_loss_is_counted_once_with_its_reason() {
    prometheus();
    let rehearsal = SimulatedKeeper::new();
    let keeper = rehearsal.keeper();
    keeper.metrics_patterns(["loss/*"]).unwrap();
    let lock = async |name: &str| keeper.lock(name).ttl(TTL).acquire().await.unwrap();
    let loss = |reason: &str| format!("lockkeeper_losses_total{{pattern=\"loss/*\",reason=\"{reason}\"}}");
    // The driver learns of it, and then the holder drops its guard.
    let revoked = lock("loss/revoked").await;
    keeper.revoke("loss/revoked", "test").await.unwrap();
    rehearsal.pass(TTL / 2).await;
    assert!(!revoked.is_held());
    drop(revoked);
    until(&loss("revoked"), 1.0).await;
    assert_eq!(value("lockkeeper_breaks_total{pattern=\"loss/*\",kind=\"revoke\"}"), Some(1.0));
    // The holder asks the store to release what it has lost without knowing.
    let gone = lock("loss/gone").await;
    keeper.break_lock("loss/gone", "test").await.unwrap();
    assert_eq!(gone.release().await.unwrap(), ReleaseOutcome::AlreadyGone);
    until(&loss("already_gone"), 1.0).await;
    assert_eq!(value("lockkeeper_breaks_total{pattern=\"loss/*\",kind=\"break\"}"), Some(1.0));
    // The store is cut off until the deadline.
    let silent = lock("loss/silent").await;
    rehearsal.cut();
    rehearsal.pass(TTL * 2).await;
    rehearsal.heal();
    assert!(!silent.is_held());
    let _ = silent.release().await;
    let failures = || -> f64 {
        let outcomes = ["unavailable", "unknown", "refused"].map(|outcome| {
            format!("lockkeeper_renewal_failures_total{{pattern=\"loss/*\",outcome=\"{outcome}\"}}")
        });
        outcomes.iter().map(|series| value(series).unwrap()).sum()
    };
    soon(|| failures() > 0.0).await;
    // A guard that was released in time is no loss.
    lock("loss/none").await.release().await.unwrap();
    keeper.quiesce().await;
    let all = || -> f64 {
        let reasons = ["taken", "silence", "unreachable", "max_hold", "stalled", "abandoned", "reassigned"];
        reasons.iter().map(|reason| value(&loss(reason)).unwrap()).sum()
    };
    soon(|| all() >= 1.0).await;
    assert_eq!((all(), value(&loss("revoked")), value(&loss("already_gone"))), (1.0, Some(1.0), Some(1.0)));
    // A hold ends at the deadline at the latest: the holder had to stop then.
    let held = value("lockkeeper_hold_seconds_sum{pattern=\"loss/*\"}").unwrap();
    assert!((40.0..=46.0).contains(&held), "15 s revoked and at most 30 s silent, not 60: {held}");
}

#[tokio::test]
async fn recipes_have_a_pattern_of_their_own() {
    prometheus();
    let keeper = Lockkeeper::open("memory:").await.unwrap();
    let leader = keeper.election("secret-leader").campaign("here").await.unwrap();
    leader.resign().await.unwrap();
    assert!(value("lockkeeper_requests_total{pattern=\"election/*\",outcome=\"granted\"}") >= Some(1.0));
    assert!(!prometheus().render().contains("secret-leader"));
}

/// A store whose renewals fail.
struct NoRenewals {
    store: Arc<dyn Store>,
}

lockkeeper_testkit::forward!(NoRenewals, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, _: &[Grant]) -> Result<Vec<RenewOutcome>> {
        Err(Error::Unavailable("planted".into()))
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

/// A recorder whose counters block for as long as it is told, as one may that writes to a pipe.
#[derive(Default)]
struct BlockingRecorder {
    blocks: Arc<AtomicBool>,
    counted: Arc<AtomicU64>,
}

struct BlockingCounter(Arc<AtomicBool>, Arc<AtomicU64>);

impl metrics::CounterFn for BlockingCounter {
    fn increment(&self, value: u64) {
        while self.0.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.1.fetch_add(value, SeqCst);
    }
    fn absolute(&self, _: u64) {}
}

impl Recorder for BlockingRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() != "lockkeeper_losses_total" && key.name() != "lockkeeper_renewal_failures_total" {
            return Counter::noop();
        }
        Counter::from_arc(Arc::new(BlockingCounter(self.blocks.clone(), self.counted.clone())))
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// The driver's thread renews all guards: a recorder that blocks there would lose every lock of the process.
#[tokio::test]
async fn a_recorder_that_blocks_delays_no_loss_and_loses_no_count() {
    let recorder = BlockingRecorder::default();
    let _local = metrics::set_default_local_recorder(&recorder);
    let clock = VirtualClock::default();
    let store = NoRenewals { store: Arc::new(MemoryStore::new(Arc::new(clock.clone()))) };
    let keeper = Lockkeeper::with_store(Arc::new(store), Arc::new(clock.clone()));
    let mut guards = Vec::new();
    for i in 0..1000 {
        guards.push(keeper.lock(format!("blocked/{i}")).ttl(TTL).acquire().await.unwrap());
    }
    recorder.blocks.store(true, SeqCst);
    let pass = async |time: Duration| {
        let mut left = time;
        while !left.is_zero() {
            keeper.quiesce().await;
            left = clock.step(left);
        }
        keeper.quiesce().await;
    };
    let passed = tokio::time::timeout(Duration::from_secs(60), pass(TTL)).await;
    assert!(passed.is_ok(), "the thread that renews waits for the recorder");
    assert!(guards.iter().all(|guard| !guard.is_held()));
    assert_eq!(recorder.counted.load(SeqCst), 0);
    recorder.blocks.store(false, SeqCst);
    drop(guards);
    // More calls were waiting than fit; the next request passes the rest on. In the end these are 1000 losses, and as many failures
    // with each renewal.
    let passed_on = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            drop(keeper.lock("after").acquire().await.unwrap());
            let counted = recorder.counted.load(SeqCst);
            if counted >= 2000 && counted.is_multiple_of(1000) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(passed_on.await.is_ok(), "only {} were counted", recorder.counted.load(SeqCst));
}
