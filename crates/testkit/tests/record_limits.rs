//! The laws of rate limits on a store that has only records: compare-and-swap, without a server.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::{Clock, Profile, Store, WallTime};
use lockkeeper_core::limit::{LimitOutcome, LimitRequest};
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, EventStream, Expect, Fence, Grant, LimitSupport, Limits, LockName,
    LockPage, LockRequest, LockView, Locks, Page, Record, RecordPage, Records, ReleaseOutcome, RenewOutcome,
    RequestKey, Result, WriteOutcome,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;
use lockkeeper_store_kit::{RecordClient, RecordLimits};
use lockkeeper_testkit::laws::{self, Harness, eventually};

/// One client: what it shares with others is the records.
struct RecordsOnly {
    store: Arc<dyn Store>,
    clock: VirtualClock,
    limits: RecordLimits,
}

#[async_trait]
impl Limits for RecordsOnly {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let wall = || self.clock.wall();
        let client = RecordClient { records: &*self.store, clock: &lockkeeper::SystemClock, wall: &wall };
        self.limits.limit(client, request).await
    }
}

lockkeeper_testkit::forward_examine!(RecordsOnly);

#[async_trait]
impl Locks for RecordsOnly {
    fn profile(&self) -> Profile {
        Profile { limits: LimitSupport::CompareAndSwap, ..self.store.profile() }
    }
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        self.store.inspect(name).await
    }
    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        self.store.list(prefix, page).await
    }
    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        self.store.watch(prefix).await
    }
    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store.revoke(name, reason).await
    }
    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        self.store.break_lock(name, reason).await
    }
}

#[async_trait]
impl Records for RecordsOnly {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let found = self.store.read(key).await;
        // Others come between the reading and the writing.
        tokio::task::yield_now().await;
        found
    }
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.store.write(key, value, expect, ttl).await
    }
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.store.delete(key, expect).await
    }
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.store.scan(prefix, page).await
    }
}

struct OnRecords {
    clock: VirtualClock,
    store: MemoryStore,
}

#[async_trait]
impl Harness for OnRecords {
    async fn start() -> Option<Self> {
        let clock = VirtualClock::default();
        Some(OnRecords { store: MemoryStore::new(Arc::new(clock.clone())), clock })
    }
    async fn client(&self) -> Arc<dyn Store> {
        let store = Arc::new(self.store.clone());
        Arc::new(RecordsOnly { store, clock: self.clock.clone(), limits: RecordLimits::default() })
    }
    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clock.clone())
    }
    fn for_correctness() -> bool {
        false
    }
    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
    async fn set_wall_clock_back(&self, by: Duration) {
        let wall = self.clock.wall().as_micros() - by.as_micros() as u64;
        self.clock.set_wall(WallTime::from_micros(wall));
    }
}

macro_rules! laws_on_records {
    ($($law:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                laws::limit::$law(OnRecords::start().await.unwrap()).await;
            }
        )*
    };
}

laws_on_records!(
    a_bucket_gives_its_burst_and_no_more,
    a_bucket_refills_at_its_rate_and_no_faster,
    a_refused_take_takes_nothing,
    a_peek_changes_nothing,
    a_reset_fills_the_bucket,
    two_keys_do_not_share_a_bucket,
    several_limits_are_all_or_nothing,
    a_refund_brings_back_no_more_than_was_taken,
    a_refund_brings_nothing_back_once_others_have_taken,
    a_full_bucket_leaves_nothing,
    a_clock_that_goes_back_gives_nothing_twice,
    waits_are_served_in_turn_and_keep_the_limit,
    no_two_waits_have_one_turn,
    a_dropped_wait_gives_its_place_back,
    a_take_whose_reply_is_lost_is_unknown_and_counts_once,
    prefetched_tokens_keep_their_bound,
    a_permit_and_a_token_come_together_or_not_at_all,
    bad_input_to_a_limit_leaves_nothing,
);

/// A client whose clock is behind brings no tokens, and one whose clock goes on brings those of the time that has passed for it.
#[tokio::test]
async fn the_newest_clock_that_a_bucket_has_seen_counts() {
    let harness = OnRecords::start().await.unwrap();
    let keeper = harness.keeper().await;
    let limit = keeper.limit("mail").rate(1, lockkeeper::limit::PER_HOUR).burst(2);
    assert!(limit.take(2).await.unwrap().allowed());
    let hour = Duration::from_secs(3600);
    harness.set_wall_clock_back(hour * 10).await;
    assert!(!limit.take(1).await.unwrap().allowed());
    harness.clock.set_wall(WallTime::from_micros(harness.clock.wall().as_micros() + 11 * 3_600_000_000));
    assert!(limit.take(1).await.unwrap().allowed() && !limit.take(1).await.unwrap().allowed());
    // A record of another program is reported, and stays.
    let key = LockName::new("limit/foreign").unwrap();
    harness.store.write(&key, b"7", Expect::Absent, None).await.unwrap();
    let answer = keeper.limit("foreign").rate(1, hour).take(1).await;
    assert!(matches!(answer, Err(lockkeeper::Error::Invalid(_))), "{answer:?}");
    eventually("the record stays", || async { harness.store.read(&key).await.unwrap().is_some() }).await;
}

/// Clients race for the last tokens of a tenant. A client that the tenant's bucket refuses takes nothing from the bucket that all share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_by_the_scarcest_bucket_costs_the_others_nothing() {
    let harness = OnRecords::start().await.unwrap();
    let hour = lockkeeper::limit::PER_HOUR;
    let mut takes = Vec::new();
    for _ in 0..16 {
        let keeper = harness.keeper().await;
        let all = keeper.limit("all").rate(1, hour).burst(100);
        let tenant = keeper.limit("tenant").rate(1, hour).burst(3);
        takes.push(tokio::spawn(async move { keeper.limits([all, tenant]).take(1).await.unwrap() }));
    }
    let mut allowed = 0;
    for take in takes {
        let outcome = take.await.unwrap();
        allowed += u64::from(outcome.allowed());
        assert!(outcome.allowed() || outcome.refused() == Some("tenant"), "{outcome:?}");
        let used: Vec<u64> =
            outcome.statuses().iter().map(|status| status.burst - status.remaining).collect();
        assert!(used[0] <= 16 && used[1] <= 3 && (outcome.allowed() || used[1] == 3), "{used:?}");
    }
    let left = harness.keeper().await.limit("all").rate(1, hour).burst(100).peek().await.unwrap().remaining;
    assert_eq!((allowed, left), (3, 97), "a refused take cost tokens of another bucket");
}
