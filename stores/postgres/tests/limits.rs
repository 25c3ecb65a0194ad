//! The rows of rate limits: what is full goes, and several requests at once do not deadlock.

mod common;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::{client_of, keeper, number, on_a_clock, sql};
use futures_util::future::join_all;
use lockkeeper::limit::{PER_HOUR, PER_SECOND};
use lockkeeper_core::Store;
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{self, Harness, eventually, soon};
use lockkeeper_testkit::servers::{self, ClockShim, PostgresOptions, Server};

const ROWS: &str = "SELECT count(*) FROM lockkeeper.bucket";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rows_of_full_buckets_are_removed_by_later_takes() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let keeper = keeper(&client_of(&server).await);
    for user in 0..100 {
        assert!(
            keeper
                .limit(format!("user/{user}"))
                .rate(10, PER_SECOND)
                .burst(2)
                .take(2)
                .await
                .unwrap()
                .allowed()
        );
    }
    // As if a minute had passed.
    sql(&server, "UPDATE lockkeeper.bucket SET full_at = full_at - 60000000000, due = due - 4");
    let busy = keeper.limit("busy").rate(1, PER_HOUR).burst(1_000);
    eventually("one row is left", || async {
        let _ = busy.take(1).await.unwrap();
        number(&server, ROWS) == 1
    })
    .await;
    busy.reset().await.unwrap();
    assert_eq!(number(&server, ROWS), 0);
}

/// Requests for the same limits in different orders would wait for each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_several_limits_in_any_order_do_not_deadlock() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let mut keepers = Vec::new();
    for _ in 0..4 {
        keepers.push(keeper(&client_of(&server).await));
    }
    let mut takes = Vec::new();
    for round in 0..200_usize {
        let keeper = &keepers[round % 4];
        let mut limits: Vec<_> =
            (0..4).map(|n| keeper.limit(format!("tenant/{n}")).rate(1, PER_HOUR).burst(100)).collect();
        limits.rotate_left(round % 4);
        if round % 8 < 4 {
            limits.reverse();
        }
        takes.push(async move { keeper.limits(limits).take(1).await.unwrap().allowed() });
    }
    let given = soon("all are answered", join_all(takes)).await.into_iter().filter(|given| *given).count();
    assert_eq!(given, 100);
    let waited = keepers[0].limit("tenant/0").rate(1, PER_HOUR).burst(100).wait(Duration::from_secs(1)).await;
    assert!(!waited.unwrap().allowed());
}

/// A server whose wall clock the laws can set back, and whose buckets they can count.
struct OnAClock {
    server: Server,
    clock: ClockShim,
}

#[async_trait]
impl Harness for OnAClock {
    async fn start() -> Option<Self> {
        let (server, clock, _) = on_a_clock().await?;
        Some(OnAClock { server, clock })
    }

    async fn client(&self) -> Arc<dyn Store> {
        client_of(&self.server).await
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    fn for_correctness() -> bool {
        true
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    async fn set_wall_clock_back(&self, by: Duration) {
        self.clock.jump(-(by.as_nanos() as i64));
    }

    /// What the sweep leaves, which comes every ten minutes: without other takes nothing removes a full bucket earlier.
    async fn stored_buckets(&self) -> usize {
        sql(&self.server, "SELECT lockkeeper.remove_full_buckets(lockkeeper.now_us() * 1000, 1000)");
        number(&self.server, ROWS) as usize
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_back_gives_no_token_twice() {
    let Some(harness) = OnAClock::start().await else { return };
    laws::limit::a_clock_that_goes_back_gives_nothing_twice(harness).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_bucket_leaves_no_row() {
    let Some(harness) = OnAClock::start().await else { return };
    laws::limit::a_full_bucket_leaves_nothing(harness).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_leaves_no_row() {
    let Some(harness) = OnAClock::start().await else { return };
    laws::limit::bad_input_to_a_limit_leaves_nothing(harness).await;
}
