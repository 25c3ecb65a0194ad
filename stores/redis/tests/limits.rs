//! Rate limits on a clock that is set, the keys that are left, and limits in different hash slots.

mod common;

use common::{client_of, keeper, open, tell};
use lockkeeper::Error;
use lockkeeper::limit::{PER_HOUR, PER_SECOND};
use lockkeeper_testkit::laws::eventually;
use lockkeeper_testkit::servers::{self, ClockShim, RedisOptions};

const HOUR: i64 = 3600 * ClockShim::SECOND;

/// The clock of the server goes back by days and comes back: not one token more than the burst.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_and_forth_again_gives_nothing_twice() {
    let Ok(clock) = ClockShim::build() else { return };
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    let keeper = keeper(&client_of(&server).await);
    let limit = keeper.limit("mail").rate(1, PER_HOUR).burst(5);
    assert!(limit.take(5).await.unwrap().allowed());
    for hours in [1, 24, 1000] {
        clock.jump(-HOUR * hours);
        assert!(!limit.take(1).await.unwrap().allowed(), "tokens were given twice, {hours} h back");
        clock.jump(HOUR * hours);
        assert!(!limit.take(1).await.unwrap().allowed(), "tokens were given twice, {hours} h back and forth");
    }
    // An operator who cannot wait for the clock.
    clock.jump(-HOUR * 24);
    limit.reset().await.unwrap();
    assert!(limit.take(5).await.unwrap().allowed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_bucket_leaves_no_key() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let keeper = keeper(&client_of(&server).await);
    let keys = || tell(server.addr(), &["KEYS", "*limit:*"]);
    for user in 0..20 {
        assert!(
            keeper
                .limit(format!("user/{user}"))
                .rate(20, PER_SECOND)
                .burst(20)
                .take(10)
                .await
                .unwrap()
                .allowed()
        );
    }
    eventually("no key is left", || async { !keys().contains("limit:") }).await;
    let limit = keeper.limit("mail").rate(1, PER_HOUR).burst(5);
    assert!(limit.take(5).await.unwrap().allowed());
    assert!(keys().contains("limit:"));
    limit.reset().await.unwrap();
    assert!(!keys().contains("limit:"), "{}", keys());
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_in_different_slots_of_a_cluster_are_refused_and_a_hash_tag_helps() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let keeper = keeper(&open(&format!("redis+cluster://{}", cluster.addrs()[0])).await);
    let limit = |key: &str| keeper.limit(key).rate(1, PER_HOUR).burst(2);
    let refused = keeper.limits([limit("a"), limit("b")]).take(1).await;
    assert!(matches!(&refused, Err(Error::Unsupported(why)) if why.contains("hash tag")), "{refused:?}");
    for key in ["a", "b"] {
        assert_eq!(limit(key).peek().await.unwrap().remaining, 2, "a refused request took something");
    }
    let both = keeper.limits([limit("user/{acme}/a"), limit("tenant/{acme}")]);
    assert!(both.take(2).await.unwrap().allowed() && !both.take(1).await.unwrap().allowed());
}
