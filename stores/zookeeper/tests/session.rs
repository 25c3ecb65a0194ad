//! Sessions that end under us: by an administrator's hand, or because nobody could be reached. Never a false grant; what is
//! lost is told; and the same process goes on with another session.

mod common;

use std::time::Duration;

use common::{admin, keeper, open, tree, try_open};
use lockkeeper_core::{Acquired, Error, Release, Renewal, Wait};
use lockkeeper_host::{Clock, SystemClock};
use lockkeeper_testkit::laws::{
    ask, eventually, give_back, granted, in_line, is_free, name, refused, soon, stand_in_line, take, with,
};
use lockkeeper_testkit::proxy::{Direction, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};
use zookeeper_client::Client;

/// Deletes the nodes of one session, as its end does.
async fn end_session_at(admin: &Client, server: &Server, node: &str) {
    let (_, stat) = admin.get_data(node).await.unwrap();
    let (addr, session) = (server.addr(), stat.ephemeral_owner);
    // Its client may take the session back before it is closed: then it is closed again.
    eventually("its nodes are gone", || async {
        tokio::task::block_in_place(|| common::close_session(addr, session));
        admin.check_stat(node).await.unwrap().is_none()
    })
    .await;
}

/// The places in the line of `x`, in order.
async fn places(admin: &Client) -> Vec<String> {
    let mut places: Vec<String> =
        tree(admin, "/lock/x").await.into_iter().filter(|node| node.contains("lock-")).collect();
    places.sort_by_key(|node| node.rsplit('-').next().unwrap().parse::<u64>().unwrap());
    places
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_ends_while_holding_loses_its_guards_and_no_others() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, other, admin) =
        (open(server.addr()).await, open(server.addr()).await, admin(server.addr()).await);
    let short = |text| with(ask(text), |ask| ask.ttl = Duration::from_secs(1));
    let lost = [take(&store, &short("x")).await, take(&store, &short("y")).await];
    let kept = take(&other, &ask("z")).await;
    end_session_at(&admin, &server, &places(&admin).await[0]).await;
    let next = take(&other, &ask("x")).await;
    assert!(next.fence > lost[0].fence);
    // A renewal that meets the end of the session itself knows nothing yet, and is asked again.
    eventually("a loss is told", || async {
        match store.renew(&lost).await {
            Err(Error::Unknown(_) | Error::Unavailable(_)) => false,
            told => {
                assert_eq!(told.unwrap(), [Renewal::Lost, Renewal::Lost]);
                true
            }
        }
    })
    .await;
    assert_eq!(store.release(&lost[0].claim).await.unwrap(), Release::AlreadyGone);
    assert_eq!(other.renew(&[next, kept]).await.unwrap(), [Renewal::Renewed, Renewal::Renewed]);
    // And the process that lost its session goes on with another one.
    take(&store, &ask("y")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_ends_while_waiting_grants_nothing() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (addr, admin) = (server.addr(), admin(server.addr()).await);
    let stores = [open(addr).await, open(addr).await, open(addr).await];
    for _ in 0..3 {
        let held = take(&stores[0], &ask("x")).await;
        let unlucky = stand_in_line(&stores[1], &ask("x"), 1).await;
        let place = places(&admin).await[1].clone();
        let lucky = stand_in_line(&stores[2], &ask("x"), 2).await;
        end_session_at(&admin, &server, &place).await;
        // It was the first, and its place is gone: it comes back behind the other, in another session.
        eventually("it stands in line again", || async { places(&admin).await.len() == 3 }).await;
        give_back(&stores[0], &held.claim).await;
        let served = granted(lucky).await;
        assert!(!unlucky.is_finished(), "served on a place that was gone");
        in_line(&stores[0], &name("x"), 1).await;
        give_back(&stores[2], &served.claim).await;
        let last = granted(unlucky).await;
        assert!(last.fence > served.fence && served.fence > held.fence);
        give_back(&stores[1], &last.claim).await;
        is_free(&stores[0], "x").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_is_cut_off_is_lost_before_anybody_else_gets_in() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let cut_off = try_open(&format!("zk://{}?timeout=500ms&session=2s", proxy.addr())).await.unwrap();
    let other = open(server.addr()).await;
    // A ttl that is longer than the session lasts: it is believed once it is renewed. What the session does not keep, the
    // note does.
    for (ttl, renewed) in [(1, false), (5, false), (5, true)] {
        let keeper = keeper(&cut_off);
        let guard = keeper.lock("x").ttl(Duration::from_secs(ttl)).acquire().await.unwrap();
        let first = guard.deadline();
        if renewed {
            eventually("it is renewed", || async { guard.deadline() > first }).await;
            assert!(guard.deadline().since(first) > Duration::from_secs(3));
        }
        proxy.hold(Direction::Requests);
        let waiter = {
            let other = other.clone();
            tokio::spawn(async move { other.acquire(&with(ask("x"), |ask| ask.wait = Wait::Forever)).await })
        };
        let next = granted(waiter).await;
        assert!(!guard.is_held(), "two hold it, with a ttl of {ttl} s");
        soon("the loss is told", guard.lost()).await;
        assert!(next.fence > guard.fence());
        give_back(&other, &next.claim).await;
        proxy.cut(Pick::Any);
        proxy.heal();
        drop(guard);
        soon("what is left is given back", keeper.settle()).await;
        eventually("it goes on by itself", || async {
            match cut_off.acquire(&ask("x")).await {
                Ok(Acquired::Granted(grant)) => cut_off.release(&grant.claim).await.is_ok(),
                _ => false,
            }
        })
        .await;
        is_free(&other, "x").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_delay_follows_the_death_of_a_process() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let dead = open(server.addr()).await;
    let careful = |text, delay| {
        with(ask(text), |ask| {
            (ask.ttl, ask.lock_delay) = (Duration::from_secs(1), Duration::from_millis(delay));
        })
    };
    take(&dead, &careful("x", 600_000)).await;
    take(&dead, &careful("y", 1)).await;
    end_session_at(&admin, &server, &places(&admin).await[0]).await;
    refused(&store, &ask("x")).await;
    let view = store.inspect(&name("x")).await.unwrap().unwrap();
    assert!(view.held.is_empty() && view.delayed_ms.is_some(), "{view:?}");
    let patient = with(ask("y"), |ask| ask.wait = Wait::Forever);
    assert!(matches!(soon("a short delay ends", store.acquire(&patient)).await, Ok(Acquired::Granted(_))));
}

/// A store that was dropped closed its session or did not, as it happened. Closed, it freed a lock whose lease still ran; not
/// closed, it kept it for the whole session. Now it is always the second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dropped_store_held_is_not_free_while_its_lease_runs() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let other = open(server.addr()).await;
    for _ in 0..6 {
        let store = try_open(&format!("zk://{}?session=2s", server.addr())).await.unwrap();
        let held = take(&store, &ask("x")).await;
        drop(store);
        let patient = with(ask("x"), |ask| ask.wait = Wait::Forever);
        let next = soon("its session ends", other.acquire(&patient)).await;
        assert!(SystemClock.now() >= held.sent_at + held.lease, "free before its lease is over");
        let Ok(Acquired::Granted(next)) = next else { panic!("{next:?}") };
        assert!(next.fence > held.fence);
        give_back(&other, &next.claim).await;
    }
}
