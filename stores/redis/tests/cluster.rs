//! A cluster whose slots move and whose nodes die, and locks of several slots under contention.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, grow, keeper, open, renew, says, tell};
use futures_util::future::join_all;
use lockkeeper_core::{
    AcquireOutcome, Error, Fence, LockRequest, Mode, Outcome, ReleaseOutcome, RenewOutcome,
};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, refused, request, request_all, soon, take,
    with,
};
use lockkeeper_testkit::resource::CounterFile;
use lockkeeper_testkit::servers::{self, AppendOnly, RedisCluster, RedisOptions, TempDir};

async fn client_of(cluster: &RedisCluster) -> Client {
    open(&format!("redis+cluster://{}", cluster.addrs()[0])).await
}

/// All clients send a request at once. A client without a grant gets Busy, or an error that says that the slot is migrating.
async fn ask_at_once(clients: &[&Client], name: &str) -> Vec<(usize, LockRequest, Fence)> {
    let requests = clients.iter().enumerate().map(|(nth, client)| async move {
        let asked = request(name);
        match soon("a request ends", client.acquire(&asked)).await {
            Ok(AcquireOutcome::Granted(grant)) => Some((nth, asked, grant.fence)),
            Ok(AcquireOutcome::Busy(_)) | Err(Error::Unavailable(_)) => None,
            other => panic!("{name} while its slot moves: {other:?}"),
        }
    });
    join_all(requests).await.into_iter().flatten().collect()
}

/// The keys of a lock move one by one, and for a while a node has the lock and another one who holds it. Clients
/// with the old map, and one that reads the map in the middle, send requests all the while: never are there two holders.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_takes_its_locks_and_its_fences_along() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let (one, stale) = (client_of(&cluster).await, client_of(&cluster).await);
    let held = take(&one, &request("{orders}/1")).await;
    let gone = take(&one, &request("{orders}/2")).await;
    let waiter = join_queue(&stale, &request("{orders}/1"), 1).await;

    let slot = cluster.slot_of("lock:{orders}/1");
    let from = cluster.node_of_slot(slot);
    let to = (from + 1) % 3;
    let migration = cluster.begin_migration(slot, to);
    let cold = client_of(&cluster).await;
    let clients = [&one, &stale, &cold];
    let port = cluster.addrs()[to].port().to_string();
    for key in [None, Some("lock:{orders}/1")] {
        if let Some(key) = key {
            // The lock is at the new node now, and who holds it is at the old one.
            tell(cluster.addrs()[from], &["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
        }
        assert_eq!(ask_at_once(&clients, "{orders}/1").await.len(), 0, "a second holder");
        let got = ask_at_once(&clients, "{orders}/3").await;
        assert!(got.len() <= 1, "two holders of a free lock: {got:?}");
        for (nth, asked, _) in got {
            give_back(clients[nth], &asked.key).await;
        }
        let renewed = soon("a renewal ends", one.renew(std::slice::from_ref(&held))).await;
        let fine = matches!(&renewed, Ok(answer) if answer[0] == RenewOutcome::Renewed)
            || matches!(renewed, Err(Error::Unavailable(_)));
        assert!(fine, "a lock is lost by a move: {renewed:?}");
        let released = soon("a release ends", cold.release(&gone.key)).await;
        assert!(matches!(released, Ok(_) | Err(Error::Unavailable(_))), "{released:?}");
    }
    cluster.finish_migration(migration);

    assert_eq!(renew(&one, &held).await, RenewOutcome::Renewed);
    for client in clients {
        assert_eq!(refused(client, &request("{orders}/1")).await.held[0].fence, held.fence);
    }
    let mut fences = vec![held.fence, gone.fence];
    for client in clients {
        _ = give_back(client, &gone.key).await;
        fences.push(take(client, &request("{orders}/3")).await.fence);
        client.break_lock(&name("{orders}/3"), "the next is to have it").await.unwrap();
    }
    assert_eq!(give_back(&one, &held.key).await, ReleaseOutcome::Released);
    fences.push(granted(waiter).await.fence);
    grow(&fences);
}

/// Back and forth, with a request after each move: a map that is one move behind is mended by the answer it gets.
#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_many_moves_of_a_slot() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let clients = [client_of(&cluster).await, client_of(&cluster).await];
    let slot = cluster.slot_of("lock:orders/42");
    let mut fences = Vec::new();
    for round in 0..6 {
        let grant = take(&clients[round % 2], &request("orders/42")).await;
        fences.push(grant.fence);
        cluster.migrate_slot(slot, (cluster.node_of_slot(slot) + 1) % 3);
        refused(&clients[(round + 1) % 2], &request("orders/42")).await;
        assert_eq!(give_back(&clients[round % 2], &grant.key).await, ReleaseOutcome::Released);
    }
    grow(&fences);
}

/// Grants that wait for replicas are sent by connections of their own, each with the command that waits behind it. A client that knows
/// the old map is redirected there too, and every step of a grant arrives once.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_waits_for_a_replica_follows_a_slot_that_moved() {
    let Ok(cluster) = servers::redis_cluster_with_replicas(3, RedisOptions::default()) else { return };
    let url = format!("redis+cluster://{}?wait_replicas=1", cluster.addrs()[0]);
    let clients = [open(&url).await, open(&url).await];
    let slot = cluster.slot_of("lock:orders/42");
    let mut fences = Vec::new();
    for round in 0..4 {
        let (one, stale) = (&clients[round % 2], &clients[(round + 1) % 2]);
        let grant = take(one, &request("orders/42")).await;
        let shared = with(request("{orders/42}/shared"), |request| request.mode = Mode::Shared);
        let reader = take(one, &shared).await;
        fences.extend([grant.fence, reader.fence]);
        cluster.migrate_slot(slot, (cluster.node_of_slot(slot) + 1) % 3);
        assert_eq!(refused(stale, &request("orders/42")).await.held[0].fence, grant.fence);
        for held in [&grant, &reader] {
            assert_eq!(renew(one, held).await, RenewOutcome::Renewed);
            assert_eq!(give_back(one, &held.key).await, ReleaseOutcome::Released);
        }
        // The first request after the move is the grant of a client that knows the old map.
        cluster.migrate_slot(slot, (cluster.node_of_slot(slot) + 1) % 3);
        let grant = take(stale, &request("orders/42")).await;
        fences.push(grant.fence);
        assert_eq!(renew(stale, &grant).await, RenewOutcome::Renewed);
        assert_eq!(give_back(stale, &grant.key).await, ReleaseOutcome::Released);
        is_free(one, "orders/42").await;
    }
    grow(&fences);
}

/// One of three nodes is killed. The others go on; it comes back with what it had, and no client has to open anything anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_killed_is_found_again() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut cluster) = servers::redis_cluster_with(3, options) else { return };
    let (one, two) = (client_of(&cluster).await, client_of(&cluster).await);
    // The node that the addresses name is not the one that dies.
    let mut names = (0..).map(|i| format!("orders/{i}"));
    let mut on = |node: usize| {
        let here = |text: &String| cluster.node_of_slot(cluster.slot_of(&format!("lock:{text}"))) == node;
        names.find(here).unwrap()
    };
    let (here, elsewhere) = (on(1), on(2));
    let held = take(&one, &request(&here)).await;
    cluster.node_mut(1).kill9();
    let asked = request(&here);
    for client in [&one, &two] {
        let answer = soon("a request ends", client.acquire(&asked)).await;
        assert!(matches!(answer, Err(Error::Unavailable(_) | Error::Unknown(_))), "{answer:?}");
        // A client that noticed has forgotten the map with it, and finds the others all the same.
        eventually("the other nodes go on", || async {
            matches!(
                client.acquire(&request(&elsewhere)).await,
                Ok(AcquireOutcome::Granted(_) | AcquireOutcome::Busy(_))
            )
        })
        .await;
    }
    cluster.node_mut(1).restart();
    for client in [&one, &two] {
        eventually("the node is found again", || async { client.inspect(&name(&here)).await.is_ok() }).await;
        eventually("it takes writes again", || async {
            client
                .renew(std::slice::from_ref(&held))
                .await
                .is_ok_and(|answer| answer[0] == RenewOutcome::Renewed)
        })
        .await;
    }
    assert_eq!(refused(&two, &asked).await.held[0].fence, held.fence);
    give_back(&one, &held.key).await;
    grow(&[held.fence, take(&two, &request(&here)).await.fence]);
}

/// Names in three slots, requested in every order by four clients. No script sees all of them at once, and still it is
/// all or nothing: no update is lost, no client waits for ever, and nothing stays behind.
#[tokio::test(flavor = "multi_thread")]
async fn names_in_many_slots_are_taken_together_under_contention() {
    const ROUNDS: u64 = 25;
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let slots: Vec<u16> = ["a", "b", "c"].iter().map(|x| cluster.slot_of(&format!("lock:{x}"))).collect();
    assert!(slots[0] != slots[1] && slots[1] != slots[2] && slots[0] != slots[2], "{slots:?}");
    let dir = Arc::new(TempDir::new("counters"));
    let counter = |dir: &TempDir, text: &str| CounterFile::new(dir.join(text));
    let sets: [&[&str]; 4] = [&["a", "b"], &["c", "b"], &["c", "a"], &["c", "b", "a"]];
    let mut tasks = Vec::new();
    for set in sets {
        let (keeper, dir) = (keeper(&client_of(&cluster).await), dir.clone());
        tasks.push(tokio::spawn(async move {
            let mut last = Fence::MIN;
            for round in 0..ROUNDS {
                // In opposite order every other time.
                let names: Vec<&str> =
                    if round % 2 == 0 { set.to_vec() } else { set.iter().rev().copied().collect() };
                let request =
                    keeper.lock_all(names).ttl(Duration::from_secs(30)).wait(Duration::from_secs(60));
                let guard = request.acquire().await.unwrap();
                assert!(guard.fence() > last);
                last = guard.fence();
                for name in set {
                    counter(&dir, name).increment_async().await.unwrap();
                }
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(120), task).await.expect("a deadlock").unwrap();
    }
    for name in ["a", "b", "c"] {
        assert_eq!(counter(&dir, name).get().unwrap(), 3 * ROUNDS, "{name}: updates were lost");
    }
    let store = client_of(&cluster).await;
    for name in ["a", "b", "c"] {
        is_free(&store, name).await;
    }
}

/// The store rejects requests that no script can carry out across slots, and names a shared hash tag as the remedy.
#[tokio::test(flavor = "multi_thread")]
async fn the_error_for_an_owner_names_the_hash_tag() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = client_of(&cluster).await;
    let owned = |names: &[&str]| {
        with(request_all(names), |request| request.owner = Some(lockkeeper_testkit::laws::owner()))
    };
    let across = common::failed(&store, &owned(&["a", "b"])).await;
    says(&across, Outcome::Unsupported, &["hash tag"]);
    take(&store, &owned(&["{x}/a", "{x}/b"])).await;
}

/// Names at two nodes: the first is taken, the second cannot be, and then the first cannot be given back. It is held, so that
/// the outcome is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_cannot_be_released_is_unknown() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut cluster) = servers::redis_cluster_with(3, options) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=2s", cluster.addrs()[2])).await;
    let name_at = |prefix: &str, node: usize| {
        let here = |text: &String| cluster.node_of_slot(cluster.slot_of(&format!("lock:{text}"))) == node;
        (0..).map(|i| format!("{prefix}{i}")).find(here).unwrap()
    };
    let (first, second) = (name_at("a", 0), name_at("b", 1));
    cluster.nodes()[1].pause();
    // Until its connection is closed: from then on a request waits for a new one, and is not sent.
    assert!(store.inspect(&name(&second)).await.is_err());
    let (asking, asked) = (store.clone(), request_all(&[&first, &second]));
    let asking = tokio::spawn(async move { asking.acquire(&asked).await });
    let key = format!("lock:{first}");
    eventually("the first is taken", || async { tell(cluster.addrs()[0], &["EXISTS", &key]) == "1" }).await;
    cluster.node_mut(0).kill9();
    let answer = soon("the request ends", asking).await.unwrap();
    assert!(matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    cluster.nodes()[1].resume();
    cluster.node_mut(0).restart();
    eventually("it is held all the same", || async {
        servers::redis_call(cluster.addrs()[0], &["EXISTS", &key]).is_ok_and(|held| held == "1")
    })
    .await;
}

/// The nodes send a request back and forth, because each takes another for the owner of the slot. That ends in time, says what is
/// the matter, and is over when they agree again.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_without_an_owner_is_unavailable_after_the_timeout() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=500ms", cluster.addrs()[0])).await;
    let slot = cluster.slot_of("lock:orders/42");
    let owner = cluster.node_of_slot(slot);
    let ids: Vec<String> = cluster.addrs().iter().map(|addr| tell(*addr, &["CLUSTER", "MYID"])).collect();
    let set = |node: usize, to: usize| {
        tell(cluster.addrs()[node], &["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &ids[to]]);
    };
    // The owner names the next node, which names the owner: gossip does not take a slot back that a node gave away.
    let next = (owner + 1) % 3;
    set(owner, next);
    set(next, owner);
    let begun = std::time::Instant::now();
    let error = common::failed(&store, &request("orders/42")).await;
    says(&error, Outcome::Unavailable, &[&format!("slot {slot}")]);
    assert!(begun.elapsed() >= Duration::from_millis(400), "given up after {:?}", begun.elapsed());
    set(owner, owner);
    eventually("the slot has an owner again", || async {
        matches!(
            store.acquire(&request("orders/42")).await,
            Ok(AcquireOutcome::Granted(_) | AcquireOutcome::Busy(_))
        )
    })
    .await;
}

/// Nodes that do not know by which address clients reach them leave it out, in the map and in redirects: it is then the host
/// to which the client sent the request.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_leave_out_their_host_are_found() {
    let extra = vec![("cluster-preferred-endpoint-type".to_owned(), "unknown-endpoint".to_owned())];
    let Ok(cluster) = servers::redis_cluster_with(3, RedisOptions { extra, ..RedisOptions::default() })
    else {
        return;
    };
    let (one, stale) = (client_of(&cluster).await, client_of(&cluster).await);
    let held = take(&one, &request_all(&["a", "b", "c"])).await;
    refused(&stale, &request("c")).await;
    let slot = cluster.slot_of("lock:c");
    let from = cluster.node_of_slot(slot);
    let migration = cluster.begin_migration(slot, (from + 1) % 3);
    let port = cluster.addrs()[(from + 1) % 3].port().to_string();
    tell(cluster.addrs()[from], &["MIGRATE", "127.0.0.1", &port, "lock:c", "0", "1000"]);
    let told = servers::redis_call(cluster.addrs()[from], &["GET", "lock:c"]).unwrap_err().to_string();
    assert!(told.contains("ASK") && !told.contains("127.0.0.1"), "a redirect with a host: {told}");
    assert_eq!(renew(&one, &held).await, RenewOutcome::Renewed);
    cluster.finish_migration(migration);
    let told = servers::redis_call(cluster.addrs()[from], &["GET", "lock:c"]).unwrap_err().to_string();
    assert!(told.contains("MOVED") && !told.contains("127.0.0.1"), "a redirect with a host: {told}");
    refused(&stale, &request("c")).await;
    assert_eq!(give_back(&one, &held.key).await, ReleaseOutcome::Released);
    take(&stale, &request("c")).await;
}

/// The rights in the manual are enough for a user of a cluster as well.
#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_the_manual_are_enough_in_a_cluster() {
    let manual = include_str!("../../../docs/stores/redis.md");
    let rights =
        manual.split('`').find(|text| text.starts_with("~lock:*")).expect("the manual names the rights");
    assert!(manual.contains("`+cluster|slots`"), "the manual does not name what a cluster needs");
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    for addr in cluster.addrs() {
        let words = ["ACL", "SETUSER", "worker", "reset", "on", ">pw"].into_iter();
        tell(addr, &words.chain(rights.split(' ')).chain(["+cluster|slots"]).collect::<Vec<_>>());
    }
    let url = format!("redis+cluster://worker:pw@{}", cluster.addrs()[0]);
    let (one, two) = (open(&url).await, open(&url).await);
    let held = take(&one, &request_all(&["a", "b", "c"])).await;
    let waiter = join_queue(&two, &request("b"), 1).await;
    let slot = cluster.slot_of("lock:c");
    cluster.migrate_slot(slot, (cluster.node_of_slot(slot) + 1) % 3);
    assert_eq!(renew(&one, &held).await, RenewOutcome::Renewed);
    give_back(&one, &held.key).await;
    granted(waiter).await;
}
