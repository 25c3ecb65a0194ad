//! Guards and waiters over restarts and cut connections, and what many locks leave behind.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper_core::{EventKind, Mode, RenewOutcome};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, AppendOnly, RedisOptions, Server};

use crate::common::{ask_for, client_of, grow, keeper, open, renew, tell, url};

/// One failed renewal has ended the watchdog of more than one lock client, and no client noticed until the ttl was over.
#[tokio::test(flavor = "multi_thread")]
async fn a_guard_survives_a_restart_of_the_server_and_is_renewed_afterwards() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut server) = servers::redis(options) else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    let ttl = Duration::from_secs(4);
    let keeper = keeper(&one);
    let guard = keeper.lock("jobs").ttl(ttl).acquire().await.unwrap();
    server.kill9();
    server.restart();
    // The ttl is over three times before any client looks.
    tokio::time::sleep(3 * ttl).await;
    assert!(guard.is_held());
    let busy = refused(&two, &request("jobs")).await;
    assert_eq!(busy.held[0].fence, guard.fence());
    guard.release().await.unwrap();
    take(&two, &request("jobs")).await;
}

/// Ends all connections but the one that says so.
fn cut_all(server: &Server) -> usize {
    let kill = |kind| tell(server.addr(), &["CLIENT", "KILL", "TYPE", kind]).parse::<usize>().unwrap();
    kill("normal") + kill("pubsub")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_and_a_waiter_survive_the_end_of_their_connections() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    // No poll comes to the waiter's help: it must receive the message, on a connection that did not exist when it sent its request.
    let two = open(&format!("{}?poll=5m&claim=10m", url(&server))).await;
    let ttl = Duration::from_secs(3);
    let keeper = keeper(&client_of(&server).await);
    let guard = keeper.lock("jobs").ttl(ttl).acquire().await.unwrap();
    let waiter = join_queue(&two, &request("jobs"), 1).await;
    for _ in 0..5 {
        assert!(cut_all(&server) >= 2, "there was nothing to cut");
        // In the queue all the same, and once: the request is not lost, and not doubled.
        eventually("it is in the queue", || async {
            // A client that looks may be the one to notice that its own connection is gone.
            let view = keeper.store().inspect(&name("jobs")).await;
            view.is_ok_and(|view| view.is_some_and(|view| view.waiting == 1))
        })
        .await;
        tokio::time::sleep(ttl / 3).await;
    }
    assert!(guard.is_held());
    let fence = guard.fence();
    guard.release().await.unwrap();
    grow(&[fence, granted(waiter).await.fence]);
}

/// The message that it is the waiter's turn goes to a connection that is just being cut: the poll finds out.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_connection_is_cut_at_its_turn_is_served_by_its_poll() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    for round in 0..5 {
        let held = take(&one, &request("jobs")).await;
        let waiter = join_queue(&two, &request("jobs"), 1).await;
        cut_all(&server);
        let mut given = one.release(&held.key).await;
        while given.is_err() {
            given = one.release(&held.key).await;
        }
        cut_all(&server);
        let next = granted(waiter).await;
        assert!(next.fence > held.fence, "round {round}");
        eventually("the store works", || async { two.release(&next.key).await.is_ok() }).await;
        eventually("the other works", || async { one.inspect(&name("jobs")).await.is_ok() }).await;
    }
}

/// A waiter goes on waiting while the server is unreachable, and enqueues again if the server forgot the queue.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_outlives_a_server_that_forgets_everything() {
    let Ok(mut server) = servers::redis(RedisOptions::default()) else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    let held = take(&one, &request("jobs")).await;
    let waiter = join_queue(&two, &request("jobs"), 1).await;
    server.kill9();
    server.restart();
    // Nothing is in the way any more. That the first was forgotten is what the profile warns of.
    let next = granted(waiter).await;
    grow(&[held.fence, next.fence]);
    eventually("the first client finds the server", || async { one.inspect(&name("x")).await.is_ok() }).await;
    assert_eq!(renew(&one, &held).await, RenewOutcome::Lost);
}

/// A fence per name would stay for ever. There is one counter for all.
#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_names_leave_one_key_behind() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    for batch in 0..200 {
        let round = (0..100).map(|i| {
            let (store, number) = (&store, batch * 100 + i);
            async move {
                let ttl = Duration::from_millis(100 + number % 900);
                let grant = take(store, &ask_for(&format!("job/{number}"), ttl)).await;
                // The other half just ends.
                if number % 2 == 0 {
                    give_back(store, &grant.key).await;
                }
            }
        });
        join_all(round).await;
    }
    eventually("only the counter is left", || async { tell(server.addr(), &["DBSIZE"]) == "1" }).await;
    assert_eq!(tell(server.addr(), &["EXISTS", "lockkeeper:{all}:fence"]), "1");
}

/// Watchers get *expired* for a holder that died when the next client requests the lock, plain lock or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_expired_is_reported_to_watchers() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    let mut events = store.watch("").await.unwrap();
    for mode in [Mode::Exclusive, Mode::Shared] {
        let brief =
            with(request("jobs"), |request| (request.ttl, request.mode) = (Duration::from_secs(1), mode));
        let dead = take(&store, &brief).await;
        eventually("its lease ends", || async { tell(server.addr(), &["EXISTS", "lock:jobs"]) == "0" }).await;
        let next = take(&store, &request("jobs")).await;
        let mut seen = Vec::new();
        while seen.last() != Some(&EventKind::Granted { fence: next.fence }) {
            seen.push(soon("an event", events.next()).await.expect("the watch goes on").unwrap().kind);
        }
        let kinds = [
            EventKind::Granted { fence: dead.fence },
            EventKind::Expired { fence: dead.fence },
            EventKind::Granted { fence: next.fence },
        ];
        assert_eq!(seen, kinds);
        give_back(&store, &next.key).await;
        soon("the release", events.next()).await;
    }
}
