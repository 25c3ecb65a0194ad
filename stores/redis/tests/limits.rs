//! Rate limits on a clock that is set, the keys that are left, and limits in different hash slots.

mod common;

use std::net::SocketAddr;
use std::pin::pin;

use common::{client_of, keeper, open, tell};
use futures_util::future::join_all;
use futures_util::poll;
use lockkeeper::Error;
use lockkeeper::limit::{PER_HOUR, PER_SECOND};
use lockkeeper_testkit::laws::{eventually, soon};
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

/// How many scripts the server has run.
fn scripts(addr: SocketAddr) -> usize {
    let stats = tell(addr, &["INFO", "commandstats"]);
    let calls = |line: &str| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next()?.parse().ok();
    stats.lines().find_map(calls).unwrap_or(0)
}

/// Sends requests that all reach the store while the servers hold every command back.
async fn at_once<T>(
    servers: &[SocketAddr],
    requests: impl Iterator<Item = impl Future<Output = T>>,
) -> Vec<T> {
    let pause = |how: &[&str]| servers.iter().for_each(|addr| drop(tell(*addr, how)));
    pause(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    let mut all = pin!(join_all(requests));
    assert!(poll!(all.as_mut()).is_pending(), "no server has answered yet");
    pause(&["CLIENT", "UNPAUSE"]);
    soon("all takes are decided", all).await
}

/// Takes of many tasks share scripts, and each is decided as if it were alone: of one bucket and of several, at different rates, and beside a
/// key that another program has overwritten.
#[tokio::test(flavor = "multi_thread")]
async fn takes_of_many_tasks_share_a_script_and_are_decided_one_by_one() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let keeper = keeper(&client_of(&server).await);
    let limit = |key: &str, burst| keeper.limit(key).rate(1, PER_HOUR).burst(burst);
    // Another program has written something else under the keys of two buckets.
    for (key, command) in [("bad/list", "LPUSH"), ("bad/text", "SET")] {
        assert!(limit(key, 1).take(1).await.unwrap().allowed());
        let stored = tell(server.addr(), &["KEYS", &format!("*limit:*{key}")]);
        assert_eq!(stored.lines().count(), 1, "{stored}");
        tell(server.addr(), &["DEL", &stored]);
        tell(server.addr(), &[command, &stored, "not digits at all"]);
    }
    let takes = (0..60).map(|n| {
        let all = match n % 6 {
            0 => vec![limit("hot", 5)],
            1 => vec![limit("hot", 5), limit(&format!("own/{n}"), 7)],
            2 => vec![limit(&format!("own/{n}"), 3 + n)],
            3 => vec![limit("warm", 4)],
            4 => vec![limit("warm", 4), limit("bad/list", 9)],
            _ => vec![limit("bad/text", 9)],
        };
        let all = keeper.limits(all);
        async move { (n, all.take(1).await) }
    });
    let before = scripts(server.addr());
    let answers = at_once(&[server.addr()], takes).await;
    // Two scripts were on their way when the others came; the store's own polls are among the rest.
    let sent = scripts(server.addr()) - before;
    assert!(sent <= 20, "60 takes were {sent} scripts");
    let mut allowed = [0; 6];
    for (n, answer) in answers {
        match answer {
            Ok(taken) if n % 6 < 4 => allowed[(n % 6) as usize] += u32::from(taken.allowed()),
            Err(Error::Invalid(_)) if n % 6 >= 4 => {}
            other => panic!("{n}: {other:?}"),
        }
    }
    assert_eq!((allowed[0] + allowed[1], allowed[2], allowed[3]), (5, 10, 4), "{allowed:?}");
    for n in (1..60).step_by(6) {
        let left = limit(&format!("own/{n}"), 7).peek().await.unwrap().remaining;
        assert!(left == 6 || left == 7, "{left}");
        allowed[1] -= u32::from(left == 6);
    }
    assert_eq!(allowed[1], 0, "a refused take of two buckets took from one of them");
}

/// Keys of one slot are on two nodes while the slot is migrated. A script of several takes would find some of its keys on the other node,
/// and each take alone finds its own.
#[tokio::test(flavor = "multi_thread")]
async fn takes_that_share_a_script_are_decided_while_their_slot_is_migrated() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let keeper = keeper(&open(&format!("redis+cluster://{}", cluster.addrs()[0])).await);
    let limit = |n: u32| keeper.limit(format!("{{acme}}/{n}")).rate(1, PER_HOUR).burst(10);
    let slot = cluster.slot_of("{acme}");
    let (from, to) = (cluster.node_of_slot(slot), (cluster.node_of_slot(slot) + 1) % 3);
    for n in 0..6 {
        assert!(limit(n).take(1).await.unwrap().allowed());
    }
    let migration = cluster.begin_migration(slot, to);
    let keys = tell(cluster.addrs()[from], &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"]);
    let buckets: Vec<&str> = keys.lines().filter(|key| key.contains("limit:")).collect();
    assert_eq!(buckets.len(), 6, "{keys}");
    for key in &buckets[..3] {
        let port = cluster.addrs()[to].port().to_string();
        tell(cluster.addrs()[from], &["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
    }
    let takes = (0..48).map(|n| {
        let limit = limit(n % 6);
        async move { limit.take(1).await }
    });
    for answer in at_once(&cluster.addrs(), takes).await {
        assert!(answer.unwrap().allowed(), "there were enough tokens");
    }
    for n in 0..6 {
        assert_eq!(limit(n).peek().await.unwrap().remaining, 1, "9 were taken");
    }
    cluster.finish_migration(migration);
    assert_eq!(limit(0).peek().await.unwrap().remaining, 1, "9 were taken");
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
