//! Faults of a server while the store is open.

use std::time::Duration;

use lockkeeper_core::{AcquireOutcome, Error, Outcome, ReleaseOutcome};
use lockkeeper_testkit::laws::{eventually, give_back, name, refused, request, soon, take, with};
use lockkeeper_testkit::servers::{self, AppendOnly, RedisOptions, Server};

use crate::common::{client_of, failed, grow, open, says, tell, url};

fn server() -> Option<Server> {
    servers::redis(RedisOptions::default()).ok()
}

/// An operator, or a fail-over, turns the server into a replica of another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_becomes_a_replica_says_so_and_is_good_again_later() {
    let (Some(server), Some(other)) = (server(), server()) else { return };
    let store = client_of(&server).await;
    let before = take(&store, &request("before")).await;
    let port = other.addr().port().to_string();
    tell(server.addr(), &["REPLICAOF", "127.0.0.1", &port]);
    eventually("it follows", || async {
        tell(server.addr(), &["INFO", "replication"]).contains("master_link_status:up")
    })
    .await;
    for _ in 0..3 {
        says(
            &failed(&store, &request("jobs")).await,
            Outcome::Unavailable,
            &["READONLY", "This is a replica"],
        );
    }
    tell(server.addr(), &["REPLICAOF", "NO", "ONE"]);
    // It has lost everything: it was made the same as the other, which is empty.
    grow(&[before.fence, take(&store, &request("jobs")).await.fence]);
}

/// A server with much data answers before it has read all of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_still_loads_is_unavailable_and_then_works() {
    // Slow to load, by a setting for tests, and looking at its connections all the while.
    let slow = [("key-load-delay", "2000"), ("loading-process-events-interval-bytes", "1024")];
    let extra = slow.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    let Ok(mut server) = servers::redis(RedisOptions { extra, ..RedisOptions::default() }) else { return };
    let store = client_of(&server).await;
    let held = take(&store, &request("held")).await;
    let many = "for i = 1, 1500 do redis.call('SET', 'data:' .. i, string.rep('x', 100)) end";
    tell(server.addr(), &["EVAL", many, "0"]);
    tell(server.addr(), &["SAVE"]);
    server.kill9();
    let restarted = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    });
    let asked = request("jobs");
    eventually("the server says that it loads", || async {
        match store.acquire(&asked).await {
            Err(Error::Unavailable(text)) => {
                text.contains("LOADING") && text.contains("still reading its data")
            }
            Err(Error::Unknown(_)) => false,
            other => panic!("it was not seen to load: {other:?}"),
        }
    })
    .await;
    let _server = soon("it is loaded", restarted).await.unwrap();
    let after = take(&store, &asked).await;
    grow(&[held.fence, after.fence]);
    refused(&store, &request("held")).await;
}

/// SIGSTOP: the kernel takes connections and requests, and no client answers. Requests in flight may have happened.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_ends_calls_within_the_timeout_and_works_again_later() {
    let Some(server) = server() else { return };
    let store = open(&format!("{}?timeout=300ms", url(&server))).await;
    let held = take(&store, &request("held")).await;
    server.pause();
    let asked = request("jobs");
    says(&failed(&store, &asked).await, Outcome::Unknown, &["the connection to"]);
    let error = soon("a release ends", store.release(&held.key)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable(_) | Error::Unknown(_)), "{error:?}");
    says(&failed(&store, &asked).await, Outcome::Unavailable, &["did not answer within 300ms"]);
    server.resume();
    // Sent again with the same attempt, it is the same request, whether the first one arrived or not.
    eventually("the store works again", || async {
        match store.acquire(&asked).await {
            Ok(AcquireOutcome::Granted(_)) => true,
            Ok(busy) => panic!("in its own way: {busy:?}"),
            Err(_) => false,
        }
    })
    .await;
    assert_eq!(store.inspect(&name("jobs")).await.unwrap().unwrap().held.len(), 1);
    give_back(&store, &held.key).await;
    assert_eq!(store.inspect(&name("held")).await.unwrap(), None);
}

/// A caller that gives up used to count as one that was answered: while callers kept coming and going, no client noticed that the
/// server had stopped, and requests without a time limit of their own hung for as long.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Some(server) = server() else { return };
    let store = open(&format!("{}?timeout=500ms", url(&server))).await;
    take(&store, &request("held")).await;
    server.pause();
    let impatient = store.clone();
    let impatient = tokio::spawn(async move {
        loop {
            _ = tokio::time::timeout(Duration::from_millis(50), impatient.inspect(&name("held"))).await;
        }
    });
    // It used to hang for as long as the others came and went. `failed` waits for longer than any busy machine needs.
    failed(&store, &request("jobs")).await;
    server.resume();
    impatient.abort();
    eventually("the store works again", || async { store.inspect(&name("held")).await.is_ok() }).await;
}

/// A caller that gives up costs no other client the connection, as long as the server replies.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_outlives_the_callers_that_gave_up() {
    let Some(server) = server() else { return };
    // The calls that are given up take several times as long as the server may be silent.
    let store = open(&format!("{}?timeout=2s", url(&server))).await;
    let connections = || {
        let info = tell(server.addr(), &["INFO", "stats"]);
        let count = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        count.and_then(|count| count.parse::<u64>().ok()).expect("it says so")
    };
    let before = connections();
    for _ in 0..20 {
        // Polled once, so that it is sent, and then dropped.
        let held = name("held");
        let mut call = std::pin::pin!(store.inspect(&held));
        _ = futures_util::poll!(&mut call);
        tokio::time::sleep(Duration::from_millis(450)).await;
    }
    assert_eq!(connections(), before + 1, "only the one that asks here is new");
    assert!(store.inspect(&name("held")).await.is_ok());
}

/// Scripts are kept in the server's memory, and nowhere else.
#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_the_server_forgot_are_loaded_again() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut server) = servers::redis(options) else { return };
    let store = client_of(&server).await;
    let mut fences = Vec::new();
    for round in 0..6 {
        let flush = |server: &mut Server| match round % 2 {
            0 => drop(tell(server.addr(), &["SCRIPT", "FLUSH"])),
            _ => server.restart(),
        };
        let asked = request(&format!("jobs/{}", round / 2));
        flush(&mut server);
        let granted = loop {
            match soon("a request ends", store.acquire(&asked)).await {
                Ok(AcquireOutcome::Granted(grant)) => break grant,
                // The connection that the restart ended may be noticed by this very call.
                Err(Error::Unknown(_) | Error::Unavailable(_)) if round % 2 == 1 => {}
                other => panic!("round {round}: {other:?}"),
            }
        };
        fences.push(granted.fence);
        tell(server.addr(), &["SCRIPT", "FLUSH"]);
        assert_eq!(crate::common::renew(&store, &granted).await, lockkeeper_core::RenewOutcome::Renewed);
        tell(server.addr(), &["SCRIPT", "FLUSH"]);
        give_back(&store, &granted.key).await;
    }
    grow(&fences);
}

/// a client keeps a list under the very key. It is not ours to overwrite.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_no_lock_is_left_alone() {
    let Some(server) = server() else { return };
    let store = client_of(&server).await;
    tell(server.addr(), &["RPUSH", "lock:jobs", "dear", "data"]);
    for wait in [lockkeeper_core::Wait::No, lockkeeper_core::Wait::Forever] {
        let asked = with(request("jobs"), |request| request.wait = wait);
        says(&failed(&store, &asked).await, Outcome::Invalid, &["WRONGTYPE", "?prefix="]);
        assert_eq!(give_back(&store, &asked.key).await, ReleaseOutcome::AlreadyGone);
    }
    let error = soon("a break ends", store.break_lock(&name("jobs"), "it is in the way")).await.unwrap_err();
    says(&error, Outcome::Invalid, &["WRONGTYPE"]);
    says(&store.inspect(&name("jobs")).await.unwrap_err(), Outcome::Invalid, &["WRONGTYPE", "?prefix="]);
    assert_eq!(tell(server.addr(), &["LRANGE", "lock:jobs", "0", "-1"]), "dear\ndata");
    // Others are not disturbed by it, and a prefix of its own is the way out.
    take(&store, &request("other")).await;
    take(&open(&format!("{}?prefix=mine:", url(&server))).await, &request("jobs")).await;
}
