//! Three sentinels watch a primary and its replica. The store asks them where the primary is, and follows it.

mod common;

use common::{grow, keeper, open, refused_at_open, says};
use lockkeeper_core::{Acquired, Error, Outcome};
use lockkeeper_testkit::laws::{ask, eventually, name, take};
use lockkeeper_testkit::servers::{self, RedisOptions, RedisSentinel};

fn url(fleet: &RedisSentinel, name: &str) -> String {
    let sentinels: Vec<String> = fleet.sentinels().iter().map(ToString::to_string).collect();
    format!("redis+sentinel://{}/{name}?timeout=1s", sentinels.join(","))
}

/// One fleet for all that is to be seen here: it takes seconds to agree on a new primary.
#[tokio::test(flavor = "multi_thread")]
async fn the_store_follows_the_primary_that_the_sentinels_name() {
    let Ok(mut fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    let unknown = refused_at_open(&url(&fleet, "theirmaster")).await;
    says(&unknown, Outcome::Unavailable, &["sentinel", "\"theirmaster\""]);

    let store = open(&url(&fleet, RedisSentinel::NAME)).await;
    assert_eq!(store.profile().store, "redis+sentinel");
    common::not_for_correctness(&store, &["sentinel"]);
    let before = take(&store, &ask("orders/42")).await;
    fleet.pair.wait_synced();

    let old = fleet.master_addr().unwrap();
    fleet.pair.primary_mut().kill9();
    // Until there is a new primary, an ask says so; it does not hang.
    let asked = ask("orders/43");
    let meanwhile = lockkeeper_testkit::laws::soon("an ask ends", store.acquire(&asked)).await;
    assert!(matches!(meanwhile, Err(Error::Unavailable(_) | Error::Unknown(_))), "{meanwhile:?}");
    assert_eq!(fleet.wait_for_failover(old), fleet.pair.replica().addr());

    // The same store, not opened again; the same attempt, because it may have happened.
    eventually("the store finds the new primary", || async {
        matches!(store.acquire(&asked).await, Ok(Acquired::Granted(_)))
    })
    .await;
    let after = take(&store, &ask("orders/44")).await;
    grow(&[before.fence, after.fence]);
    // The replica had heard of it, so it is still held there.
    let view = store.inspect(&name("orders/42")).await.unwrap().unwrap();
    assert_eq!(view.held[0].fence, before.fence);

    // A sentinel that is gone is no trouble for a new client, nor is the order in which they are named.
    fleet.sentinel_mut(0).kill9();
    let late = keeper(&open(&url(&fleet, RedisSentinel::NAME)).await);
    let guard = late.lock("orders/45").acquire().await.unwrap();
    grow(&[after.fence, guard.fence()]);
    guard.release().await.unwrap();
}
