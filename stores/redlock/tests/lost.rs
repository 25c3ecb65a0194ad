//! Nodes that come back empty, and answers that come back late.

mod common;

use std::time::Duration;

use common::*;
use lockkeeper_core::{AcquireOutcome, Error, Fence, LockRequest, Locks, ReleaseOutcome, RenewOutcome, Wait};
use lockkeeper_testkit::proxy::Direction;
use lockkeeper_testkit::servers::{ClockShim, RedisOptions, redis_call};

const TTL: Duration = Duration::from_secs(20);
const CALM: &str = "young_node=0s&node_timeout=500ms&timeout=2s";

async fn start() -> Option<Fleet> {
    tokio::task::spawn_blocking(Fleet::start).await.unwrap()
}

/// The clocks of the nodes are an hour apart, so only the counters that the nodes remember can make the fence grow.
/// Between two grants up to two of them forget everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_while_nodes_forget() {
    let Ok(clocks) = (0..NODES).map(|_| ClockShim::build()).collect::<Result<Vec<_>, _>>() else { return };
    for (hours, clock) in clocks.iter().enumerate() {
        clock.jump((hours as i64 - 2) * 3600 * ClockShim::SECOND);
    }
    let shims = clocks.clone();
    let with =
        move |node: usize| RedisOptions { clock: Some(shims[node].clone()), ..RedisOptions::default() };
    let Some(mut fleet) = tokio::task::spawn_blocking(move || Fleet::with(with)).await.unwrap() else {
        return;
    };
    let mut dice = Dice::new();
    let mut last: Option<Fence> = None;
    for round in 0..12 {
        // Another process each time: nothing is remembered on this side.
        let store = fleet.open(CALM).await;
        // A break that meets a renewal may leave the lock at a minority until its ttl is over: hence the patience.
        let patient = LockRequest { wait: Wait::For(TTL), ..request("orders/42", Duration::from_secs(5)) };
        let grant = take(&store, &patient).await;
        assert!(Some(grant.fence) > last, "round {round}: {last:?}, then {}", grant.fence);
        last = Some(grant.fence);
        // A node that was too slow for the vote has it from the next renewal on. It may know of a higher one, which was
        // chosen by a vote that no client won.
        eventually("all have the fence", async || {
            _ = store.renew(std::slice::from_ref(&grant)).await;
            let has = |server: &&lockkeeper_testkit::servers::Server| {
                let known = redis_call(server.addr(), &["GET", "lockkeeper:{all}:fence"]).unwrap();
                known.parse::<u64>().is_ok_and(|known| known >= grant.fence.get())
            };
            fleet.servers.iter().filter(has).count() == NODES
        })
        .await;
        if dice.roll(2) == 0 {
            assert_eq!(store.release(&grant.key).await.unwrap(), ReleaseOutcome::Released);
        } else {
            let broken = store.break_lock(&grant.key.names.first().clone(), "to see").await.unwrap();
            assert!(broken > grant.fence);
        }
        for _ in 0..dice.roll(3) {
            let node = dice.roll(NODES);
            println!("round {round}: node {node} forgets");
            tokio::task::block_in_place(|| {
                fleet.servers[node].kill9();
                fleet.servers[node].restart();
            });
        }
    }
}

/// A rolling restart: one node after the other comes back empty, and the holder, which renews, keeps its lock. All five
/// have forgotten it once, and no other client is ever granted the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_outlives_a_rolling_restart() {
    let Some(mut fleet) = start().await else { return };
    let (store, rival) = (fleet.open(CALM).await, fleet.open(CALM).await);
    let held = take(&store, &request("orders/42", TTL)).await;
    for node in 0..NODES {
        tokio::task::block_in_place(|| {
            fleet.servers[node].kill9();
            fleet.servers[node].restart();
        });
        assert!(
            !granted(&rival.acquire(&request("orders/42", TTL)).await),
            "the rival got in by node {node}"
        );
        eventually("the empty node has it again", async || {
            assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
            fleet.keys("orders/42").len() == NODES
        })
        .await;
        let view = rival.inspect(held.key.names.first()).await.unwrap().unwrap();
        assert_eq!((view.held[0].fence, view.held[0].holder.label.as_deref()), (held.fence, Some("a test")));
        let counter = redis_call(fleet.servers[node].addr(), &["GET", "lockkeeper:{all}:fence"]).unwrap();
        assert_eq!(counter, held.fence.to_string(), "and it knows the fence");
    }
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    fleet.nothing_left("orders/42", "at the end").await;
}

/// A lock that most nodes have forgotten is lost, and not put back by its holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_most_have_forgotten_is_lost() {
    let Some(mut fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let held = take(&store, &request("orders/42", TTL)).await;
    let other = take(&store, &request("orders/43", TTL)).await;
    eventually("every node has it", async || fleet.keys("orders/42").len() == NODES).await;
    for node in 0..QUORUM {
        let key = "lock:orders/42";
        redis_call(fleet.servers[node].addr(), &["DEL", key]).unwrap();
    }
    // It does not take the other one with it.
    let answer = store.renew(&[held.clone(), other]).await.unwrap();
    assert_eq!(answer, [RenewOutcome::Lost, RenewOutcome::Renewed]);
    assert!(fleet.keys("orders/42").iter().all(|node| *node >= QUORUM), "it was put back");
    tokio::task::block_in_place(|| fleet.servers[0].restart());
    let view = store.inspect(held.key.names.first()).await.unwrap();
    assert_eq!(view, None, "two of five hold nothing");
}

/// The story that Redlock is known for: a holder has three nodes; one of them restarts empty, and gives a rival the
/// third vote while the holder still holds. A node that is young does not vote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_young_node_does_not_vote() {
    let Some(mut fleet) = start().await else { return };
    let ttl = Duration::from_secs(6);
    let patient = "node_timeout=500ms&timeout=2s&max_ttl=6s";
    let careless = fleet.open(&format!("{patient}&young_node=0s")).await;
    let careful = fleet.open(patient).await;
    assert!(
        matches!(careful.acquire(&request("x", ttl * 2)).await, Err(Error::Invalid(told)) if told.contains("max_ttl"))
    );
    match careful.acquire(&request("x", ttl)).await {
        Err(Error::Unavailable(told)) => assert!(told.contains("young_node"), "{told}"),
        other => panic!("all nodes are young: {other:?}"),
    }
    fleet.nothing_left("x", "after the young ones refused").await;
    eventually("they are old enough", async || granted(&careful.acquire(&request("y", ttl)).await)).await;

    for node in [3, 4] {
        fleet.servers[node].pause();
    }
    let held = take(&careful, &request("orders/42", ttl)).await;
    for node in [3, 4] {
        fleet.servers[node].resume();
    }
    tokio::task::block_in_place(|| {
        fleet.servers[2].kill9();
        fleet.servers[2].restart();
    });
    // What stood still in their sockets is served before one who only comes now.
    eventually("the late requests are through", async || {
        [3, 4].iter().all(|node| redis_call(fleet.servers[*node].addr(), &["PING"]).is_ok())
    })
    .await;
    // The late requests of the holder arrived when the nodes came back; as if they had been lost instead:
    for node in [3, 4] {
        redis_call(fleet.servers[node].addr(), &["DEL", "lock:orders/42"]).unwrap();
    }
    let rival = careful.acquire(&request("orders/42", ttl)).await;
    assert!(!granted(&rival), "a young node voted: {rival:?}");
    // With young_node=0s a second holder is possible.
    assert!(granted(&careless.acquire(&request("orders/42", ttl)).await));
    assert!(careless.profile().findings.iter().any(|finding| finding.text.contains("young_node")));
    drop(held);
    eventually("it is old enough again", async || granted(&careful.acquire(&request("z", ttl)).await)).await;
}

/// Requests or replies stand still past the time-out, then go through: no key stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_leaves_nothing() {
    let Some(fleet) = start().await else { return };
    for (name, direction) in [("requests", Direction::Requests), ("replies", Direction::Replies)] {
        for dropped in [false, true] {
            let name = format!("{name}-{dropped}");
            let store = fleet.open("young_node=0s&node_timeout=200ms&timeout=5s").await;
            for node in 0..QUORUM {
                fleet.proxies[node].hold(direction);
            }
            let mine = request(&name, TTL);
            if dropped {
                // The caller has cancelled before any node timed out.
                let asking = tokio::time::timeout(Duration::from_millis(50), store.acquire(&mine)).await;
                assert!(asking.is_err());
            } else {
                let answer = store.acquire(&mine).await;
                assert!(matches!(answer, Err(Error::Unknown(_))), "a majority may have it: {answer:?}");
                eventually("those that answer were released", async || {
                    fleet.keys(&name).iter().all(|node| *node < QUORUM)
                })
                .await;
            }
            for node in 0..QUORUM {
                fleet.proxies[node].heal();
            }
            fleet.nothing_left(&name, "after the late answers").await;
            // Nothing comes later still.
            tokio::time::sleep(Duration::from_millis(300)).await;
            fleet.nothing_left(&name, "a while after the late answers").await;
        }
    }
}

/// The same ask is tried again while what its first try left behind is still being cleaned up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_is_not_undone_by_the_clean_up_of_the_first_try() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open("young_node=0s&node_timeout=200ms&timeout=5s").await;
    let mine = request("orders/42", TTL);
    for node in 0..QUORUM {
        fleet.proxies[node].hold(Direction::Requests);
    }
    assert!(!granted(&store.acquire(&mine).await));
    for node in 0..QUORUM {
        fleet.proxies[node].heal();
    }
    let again = take(&store, &mine).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(store.renew(std::slice::from_ref(&again)).await.unwrap(), [RenewOutcome::Renewed]);
    assert!(fleet.keys("orders/42").len() >= QUORUM);
    let patient = LockRequest { wait: Wait::For(Duration::from_millis(300)), ..request("orders/42", TTL) };
    assert!(
        matches!(store.acquire(&patient).await, Ok(AcquireOutcome::Busy(busy)) if busy.held[0].fence == again.fence)
    );
}
