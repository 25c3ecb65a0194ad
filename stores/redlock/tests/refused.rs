//! Nodes that answer and refuse: rights that are missing, disks that are full, replicas that are gone.

mod common;

use std::time::Duration;

use common::*;
use lockkeeper_core::{AcquireOutcome, Error, LockName, LockRequest, Locks, ReleaseOutcome, Wait};
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::proxy::Direction;
use lockkeeper_testkit::servers::{Server, redis_call};

/// Far longer than a test waits: what is gone was released.
const TTL: Duration = Duration::from_secs(300);
const CALM: &str = "young_node=0s&node_timeout=500ms&timeout=2s&max_ttl=300s";

async fn start() -> Option<Fleet> {
    tokio::task::spawn_blocking(Fleet::start).await.unwrap()
}

fn call(server: &Server, command: &[&str]) -> String {
    redis_call(server.addr(), command).unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// A way to refuse writes, and the way back.
struct Refusal {
    word: &'static str,
    begin: fn(&Server),
    end: fn(&Server),
}

const REFUSALS: [Refusal; 4] = [
    Refusal { word: "MISCONF", begin: break_saving, end: mend_saving },
    Refusal {
        word: "READONLY",
        // No server listens at the port of the primary, so the data stays.
        begin: |server| _ = call(server, &["REPLICAOF", "127.0.0.1", "1"]),
        end: |server| _ = call(server, &["REPLICAOF", "NO", "ONE"]),
    },
    Refusal {
        word: "NOREPLICAS",
        begin: |server| _ = call(server, &["CONFIG", "SET", "min-replicas-to-write", "1"]),
        end: |server| _ = call(server, &["CONFIG", "SET", "min-replicas-to-write", "0"]),
    },
    Refusal {
        word: "NOPERM",
        begin: |server| _ = call(server, &["ACL", "SETUSER", "default", "-del"]),
        end: |server| _ = call(server, &["ACL", "SETUSER", "default", "+del"]),
    },
];

/// The snapshot cannot be written where a directory is in its way.
fn break_saving(server: &Server) {
    std::fs::create_dir(server.place().join("dump.rdb")).unwrap();
    call(server, &["CONFIG", "SET", "save", "3600 100000"]);
    call(server, &["BGSAVE"]);
    while !call(server, &["INFO", "persistence"]).contains("rdb_last_bgsave_status:err") {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn mend_saving(server: &Server) {
    std::fs::remove_dir(server.place().join("dump.rdb")).unwrap();
    call(server, &["CONFIG", "SET", "save", ""]);
}

/// The caller has been told of its release, or has given up: the store alone is left to send it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_a_node_refuses_is_sent_again() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    for Refusal { word, begin, end } in REFUSALS {
        for refusing in [2, NODES] {
            let name = format!("{word}-{refusing}");
            let held = take(&store, &request(&name, TTL)).await;
            eventually("every node has the lock", async || fleet.keys(&name).len() == NODES).await;
            tokio::task::block_in_place(|| fleet.servers[..refusing].iter().for_each(begin));
            let answer = store.release(&held.key).await;
            if refusing < QUORUM {
                assert_eq!(answer.unwrap(), ReleaseOutcome::Released, "{name}");
            } else {
                let error = answer.unwrap_err().to_string();
                // Redis names a right that is missing inside a script without the word.
                assert!(
                    error.contains(word) || error.contains("The user executing the script"),
                    "{name}: {error}"
                );
            }
            eventually("the others have released it", async || fleet.keys(&name).len() == refusing).await;
            tokio::task::block_in_place(|| fleet.servers[..refusing].iter().for_each(end));
            fleet.nothing_left(&name, "the nodes take writes again").await;
        }
    }
}

/// A user without a right to publish: no waiter is notified of a release, but the lock is released, and the answer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_publish_a_release_is_a_release() {
    let Some(fleet) = start().await else { return };
    for server in &fleet.servers {
        call(server, &["ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "resetchannels"]);
    }
    let url = fleet.url(CALM).replace("://", "://mute:secret@");
    let store = RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap();
    let held = take(&store, &request("orders/42", TTL)).await;
    eventually("every node has the lock", async || fleet.keys("orders/42").len() == NODES).await;
    let waiting = store.clone();
    let waiter = tokio::spawn(async move {
        take(&waiting, &LockRequest { wait: Wait::Forever, ..request("orders/42", TTL) }).await
    });
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let next = tokio::time::timeout(Duration::from_secs(10), waiter).await.expect("it polls").unwrap();
    assert!(next.fence > held.fence);
    let broken = store.break_lock(&LockName::new("orders/42").unwrap(), "to see").await.unwrap();
    assert!(broken > next.fence);
    fleet.nothing_left("orders/42", "after the break").await;
    let findings = store.profile().findings;
    assert!(
        findings.iter().any(|finding| finding.text.contains("publish")),
        "the page says why waiters poll: {findings:?}"
    );
}

/// A node without a subscription is no reason to try more often than `poll` says: neither one that is gone, nor all of
/// them because the right is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_cannot_subscribe_polls_and_does_not_spin() {
    let Some(fleet) = start().await else { return };
    for server in &fleet.servers {
        call(server, &["ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "resetchannels"]);
    }
    let options = format!("{CALM}&poll=500ms");
    let mute = fleet.url(&options).replace("://", "://mute:secret@");
    for (story, url) in [("no right", mute), ("a node is gone", fleet.url(&options))] {
        let store = RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap();
        let held = take(&store, &request("orders/42", TTL)).await;
        if story == "a node is gone" {
            fleet.proxies[0].cut_all();
        }
        let waiting = store.clone();
        let waiter = tokio::spawn(async move {
            waiting
                .acquire(&LockRequest {
                    wait: Wait::For(Duration::from_secs(3)),
                    ..request("orders/42", TTL)
                })
                .await
        });
        let before = fleet.proxies[4].count().requests;
        waiter.await.unwrap().unwrap();
        // A try and a subscription for each poll of 250 to 500 ms, and the first and last ones.
        let requests = fleet.proxies[4].count().requests - before;
        assert!(requests <= 40, "{story}: {requests} requests in 3 s");
        fleet.proxies[0].heal();
        store.release(&held.key).await.unwrap();
        fleet.nothing_left("orders/42", story).await;
    }
}

/// A minority that is gone answers soonest, with a refused connection: a lock that is held is busy all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_lock_is_busy_while_a_minority_is_gone() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let held = take(&store, &request("orders/42", TTL)).await;
    eventually("every node has the lock", async || fleet.keys("orders/42").len() == NODES).await;
    for gone in 1..QUORUM {
        fleet.proxies[gone - 1].cut_all();
        for _ in 0..20 {
            match store.acquire(&request("orders/42", TTL)).await {
                Ok(AcquireOutcome::Busy(busy)) => assert_eq!(busy.held[0].fence, held.fence),
                other => panic!("{gone} of {NODES} nodes are gone: {other:?}"),
            }
        }
    }
}

/// One node refuses at once, and a majority locks and replies too late. The caller used to get *not allowed*, as if nothing had happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_beside_a_majority_that_is_silent_is_unknown() {
    let Some(fleet) = start().await else { return };
    let rights = ["ACL", "SETUSER", "default", "-set"];
    call(&fleet.servers[0], &rights);
    let store = fleet.open(CALM).await;
    for proxy in &fleet.proxies[1..=QUORUM] {
        proxy.hold(Direction::Replies);
    }
    let answer = store.acquire(&request("orders/42", TTL)).await;
    assert!(matches!(&answer, Err(Error::Unknown(text)) if text.contains("majority")), "{answer:?}");
    fleet.proxies.iter().for_each(lockkeeper_testkit::proxy::Proxy::heal);
    fleet.nothing_left("orders/42", "the replies arrive").await;
    // A majority refuses: no other node can have made it a grant.
    fleet.servers[1..QUORUM].iter().for_each(|server| _ = call(server, &rights));
    let answer = store.acquire(&request("orders/42", TTL)).await;
    assert!(matches!(&answer, Err(Error::Denied(_))), "{answer:?}");
}

/// A script of a lock request raises its errors before it writes. The caller used to get *unknown*, and to send the request again for
/// a whole ttl, where the key is another program's or a right is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_before_the_first_write_says_what_to_change() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    for server in &fleet.servers[..QUORUM] {
        call(server, &["RPUSH", "lock:a-list", "an item"]);
    }
    let answer = store.acquire(&request("a-list", TTL)).await;
    assert!(matches!(&answer, Err(Error::Invalid(text)) if text.contains("prefix")), "{answer:?}");
    let answer = store.inspect(&LockName::new("a-list").unwrap()).await;
    assert!(matches!(&answer, Err(Error::Invalid(_))), "a view: {answer:?}");
    for server in &fleet.servers {
        let rights = ["on", ">secret", "~*", "&*", "+@all", "-set"];
        call(server, &[&["ACL", "SETUSER", "reader"][..], &rights].concat());
    }
    let url = fleet.url(CALM).replace("://", "://reader:secret@");
    let reader = RedlockStore::open(Options::from_url(&url).unwrap()).await.unwrap();
    let answer = reader.acquire(&request("orders/42", TTL)).await;
    assert!(matches!(&answer, Err(Error::Denied(_))), "{answer:?}");
    take(&store, &request("orders/42", TTL)).await;
}
