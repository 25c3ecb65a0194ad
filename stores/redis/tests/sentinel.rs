//! Three sentinels watch a primary and its replica. The store asks them where the primary is, and follows it.

mod common;

use std::time::Duration;

use common::{grow, keeper, open, refused_at_open, renew, says, tell};
use lockkeeper_core::{AcquireOutcome, Error, Outcome, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{eventually, give_back, name, request, take};
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
    let before = take(&store, &request("orders/42")).await;
    fleet.pair.wait_synced();

    let old = fleet.master_addr().unwrap();
    fleet.pair.primary_mut().kill9();
    // Until there is a new primary, a request says so; it does not hang.
    let asked = request("orders/43");
    let meanwhile = lockkeeper_testkit::laws::soon("a request ends", store.acquire(&asked)).await;
    assert!(matches!(meanwhile, Err(Error::Unavailable(_) | Error::Unknown(_))), "{meanwhile:?}");
    assert_eq!(fleet.wait_for_failover(old), fleet.pair.replica().addr());

    // The same store, not opened again; the same attempt, because it may have happened.
    eventually("the store finds the new primary", || async {
        matches!(store.acquire(&asked).await, Ok(AcquireOutcome::Granted(_)))
    })
    .await;
    let after = take(&store, &request("orders/44")).await;
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

/// The sentinels cannot reach the old primary, take it for dead, and name another one. It lives, and answers us: nothing fails,
/// so no failure made the store ask the sentinels again, and it used the old primary for ever.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_primary_that_still_answers_is_left_for_the_new_one() {
    let Ok(fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    let store = open(&url(&fleet, RedisSentinel::NAME)).await;
    let before = take(&store, &request("before")).await;
    // Its grants have a connection of their own.
    let counted = open(&format!("{}&wait_replicas=1", url(&fleet, RedisSentinel::NAME))).await;
    fleet.pair.wait_synced();
    let old = fleet.master_addr().unwrap();
    fleet.pair.cut_off_sentinels();
    let new = fleet.wait_for_failover(old);
    assert!(tell(fleet.pair.primary().addr(), &["INFO", "replication"]).contains("role:master"));
    let mut fences = vec![before.fence];
    let begun = std::time::Instant::now();
    for i in 0.. {
        let name = format!("orders/{i}");
        if let Ok(AcquireOutcome::Granted(grant)) = store.acquire(&request(&name)).await {
            fences.push(grant.fence);
            if tell(new, &["EXISTS", &format!("lock:{name}")]) == "1" {
                break;
            }
        }
        assert!(begun.elapsed().as_secs() < 20, "it still asks the old primary");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    grow(&fences);
    // A release finds the same server as the request before it, and what was synced is still held there.
    let held = take(&store, &request("after")).await;
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
    assert_eq!(renew(&store, &before).await, RenewOutcome::Renewed);
    // The old primary has no replica any more. The store sends such a request, and its release, to the new one too.
    eventually("grants that no replica has are asked of the new primary", || async {
        let asked = request("counted");
        says(&common::failed(&counted, &asked).await, Outcome::Unavailable, &["0 of 1 replicas"]);
        tell(new, &["INFO", "commandstats"]).contains("cmdstat_wait:")
    })
    .await;
    assert_eq!(tell(new, &["EXISTS", "lock:counted"]), "0", "it was granted here and given back elsewhere");
}

/// The sentinels tell only a user of theirs where the primary is, which needs the rights in the manual and no others.
#[tokio::test(flavor = "multi_thread")]
async fn sentinels_with_a_password_are_asked_with_it() {
    let Ok(fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    let manual = include_str!("../../../docs/stores/redis.md");
    let rights =
        manual.split('`').find(|text| text.starts_with("+sentinel|")).expect("the manual names them");
    for sentinel in fleet.sentinels() {
        let words = ["ACL", "SETUSER", "keeper", "on", ">sesame"].into_iter();
        tell(sentinel, &words.chain(rights.split(' ')).collect::<Vec<_>>());
        tell(
            sentinel,
            &["ACL", "SETUSER", "default", "-sentinel|get-master-addr-by-name", "-sentinel|master"],
        );
    }
    let url = url(&fleet, RedisSentinel::NAME);
    let stranger = refused_at_open(&url).await;
    says(&stranger, Outcome::Denied, &["NOPERM"]);
    let wrong = refused_at_open(&format!("{url}&sentinel_user=keeper&sentinel_password=canary")).await;
    says(&wrong, Outcome::Denied, &["WRONGPASS"]);
    assert!(!wrong.to_string().contains("canary"), "{wrong}");
    let store = open(&format!("{url}&sentinel_user=keeper&sentinel_password=sesame")).await;
    let grant = take(&store, &request("orders/42")).await;
    give_back(&store, &grant.key).await;
}

/// A primary that sends no reply delays the reading of its settings. The task that asks the sentinels used to wait for that, for up to
/// twice the timeout, and did not learn of the new primary meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_primary_does_not_delay_the_questions_to_the_sentinels() {
    let Ok(fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    let url = url(&fleet, RedisSentinel::NAME).replace("timeout=1s", "timeout=5m&poll=50ms");
    let store = open(&url).await;
    let old = fleet.master_addr().unwrap();
    fleet.pair.primary().pause();
    fleet.wait_for_failover(old);
    eventually("requests go to the new primary", || async {
        let asked = request("orders/42");
        let answer = tokio::time::timeout(Duration::from_secs(1), store.acquire(&asked)).await;
        matches!(answer, Ok(Ok(AcquireOutcome::Granted(_))))
    })
    .await;
    fleet.pair.primary().resume();
}
