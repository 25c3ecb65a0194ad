//! What is refused at the endpoint, who else may call, and that a crowd counts right.

mod common;

use std::time::Duration;

use common::*;
use lockkeeper_core::{
    AcquireOutcome, Error, Guarantee, LockName, LockRequest, Locks, Mode, Page, Purpose, Records,
    ReleaseOutcome, RenewOutcome, Wait,
};
use lockkeeper_redlock::{Options, RedlockStore};
use lockkeeper_testkit::servers::{RedisOptions, TlsFiles, redis_call, redis_tls_addr};

const TTL: Duration = Duration::from_secs(20);
const CALM: &str = "young_node=0s&node_timeout=1s&timeout=2s";

async fn start() -> Option<Fleet> {
    tokio::task::spawn_blocking(Fleet::start).await.unwrap()
}

async fn opened(url: &str) -> Result<RedlockStore, Error> {
    RedlockStore::open(Options::from_url(url)?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_denied() {
    let with =
        |_| RedisOptions { extra: vec![("requirepass".into(), "secret".into())], ..RedisOptions::default() };
    let Some(fleet) = tokio::task::spawn_blocking(move || Fleet::with(with)).await.unwrap() else { return };
    let url = |who: &str| fleet.url(CALM).replace("://", &format!("://{who}"));
    for who in ["", ":wrong@", "stranger:secret@"] {
        let answer = opened(&url(who)).await;
        assert!(matches!(answer, Err(Error::Denied(_))), "{who:?}: {answer:?}");
    }
    let store = opened(&url(":secret@")).await.unwrap();
    take(&store, &request("orders/42", TTL)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_there_twice_and_a_minority_are_refused() {
    let Some(fleet) = start().await else { return };
    let ports: Vec<u16> = fleet.servers.iter().map(|server| server.addr().port()).collect();
    let twice = format!("redlock://127.0.0.1:{0},localhost:{0},127.0.0.1:{1}?{CALM}", ports[0], ports[1]);
    assert!(matches!(opened(&twice).await, Err(Error::Invalid(told)) if told.contains("twice")));
    // Two of five away: it opens, and says which. Three: it does not.
    fleet.proxies[0].cut_all();
    fleet.proxies[1].cut_all();
    let store = fleet.open(CALM).await;
    let findings = store.profile().findings;
    assert_eq!(
        findings.iter().filter(|finding| finding.text.contains("did not answer")).count(),
        2,
        "{findings:?}"
    );
    fleet.proxies[2].cut_all();
    let answer = opened(&fleet.url(CALM)).await;
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_does_not_have_is_refused_with_what_has_it() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let plain = || request("orders/42", TTL);
    let wanted = [
        LockRequest { mode: Mode::Shared, ..plain() },
        LockRequest { mode: Mode::Permit(3), ..plain() },
        LockRequest { lock_delay: TTL, ..plain() },
        LockRequest { min_hold: TTL, ..plain() },
        LockRequest { owner: Some(lockkeeper_core::Owner::from_bytes([1; 16])), ..plain() },
    ];
    for request in wanted {
        let answer = store.acquire(&request).await;
        assert!(
            matches!(&answer, Err(Error::Unsupported(told)) if told.contains("sqlite:")),
            "{request:?}: {answer:?}"
        );
    }
    let name = LockName::new("orders/42").unwrap();
    assert!(matches!(store.read(&name).await, Err(Error::Unsupported(_))));
    assert!(matches!(store.watch("").await.map(|_| ()), Err(Error::Unsupported(_))));
    let profile = store.profile();
    assert_eq!((profile.fence, profile.durable), (Guarantee::Likely, Guarantee::No));
    assert!(
        matches!(profile.allows(Purpose::Correctness), Err(Error::Unsupported(told)) if told.contains("redlock"))
    );
}

/// What the manual says that a user needs, word by word: no node refuses a command of such a user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rights_in_the_manual_are_enough() {
    let manual = include_str!("../../../docs/stores/redlock.md");
    let rights =
        manual.split('`').find(|text| text.starts_with("~lock:*")).expect("the manual names the rights");
    let Some(fleet) = start().await else { return };
    for server in &fleet.servers {
        let words = ["ACL", "SETUSER", "worker", "reset", "on", ">pw"].into_iter();
        redis_call(server.addr(), &words.chain(rights.split_whitespace()).collect::<Vec<_>>()).unwrap();
    }
    let url = fleet.url(CALM).replace("://", "://worker:pw@");
    let store = opened(&url).await.unwrap();
    let name = LockName::new("orders/42").unwrap();
    let held = take(&store, &request("orders/42", TTL)).await;
    eventually("every node has it", async || fleet.keys("orders/42").len() == NODES).await;
    redis_call(fleet.servers[0].addr(), &["DEL", "lock:orders/42"]).unwrap();
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    eventually("it is put back where it was missing", async || fleet.keys("orders/42").len() == NODES).await;
    assert!(matches!(store.acquire(&request("orders/42", TTL)).await, Ok(AcquireOutcome::Busy(_))));
    assert!(store.inspect(&name).await.unwrap().is_some());
    assert_eq!(store.list("", &Page::FIRST).await.unwrap().locks.len(), 1);
    let waiting = store.clone();
    let patient = LockRequest { wait: Wait::Forever, ..request("orders/42", TTL) };
    let waiter = tokio::spawn(async move { take(&waiting, &patient).await });
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let next = tokio::time::timeout(Duration::from_secs(10), waiter).await.expect("it is let in").unwrap();
    store.revoke(&name, "to see").await.unwrap();
    store.break_lock(&name, "to see").await.unwrap();
    store.release(&next.key).await.unwrap();
    fleet.nothing_left("orders/42", "after the break").await;
    for server in &fleet.servers {
        assert_eq!(redis_call(server.addr(), &["ACL", "LOG"]).unwrap(), "", "a node refused this");
    }
}

/// A runtime without timers and sockets, as the library's own thread has: everything of ours runs elsewhere.
#[test]
fn calls_need_no_runtime_of_ours() {
    let Some(fleet) = Fleet::start() else { return };
    let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let store = fleet.open(CALM).await;
        let held = take(&store, &request("orders/42", TTL)).await;
        let patient =
            LockRequest { wait: Wait::For(Duration::from_millis(300)), ..request("orders/42", TTL) };
        assert!(matches!(store.acquire(&patient).await, Ok(AcquireOutcome::Busy(_))));
        store.renew(std::slice::from_ref(&held)).await.unwrap();
        assert_eq!(store.list("", &Page::FIRST).await.unwrap().locks.len(), 1);
        assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    });
}

/// A lock that another Redlock client has at a majority is busy, and shown as foreign; at a minority it is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plain_key_of_another_client_counts() {
    let Some(fleet) = start().await else { return };
    let store = fleet.open(CALM).await;
    let name = LockName::new("orders/42").unwrap();
    let set = |node: usize| {
        redis_call(fleet.servers[node].addr(), &["SET", "lock:orders/42", "theirs", "NX", "PX", "60000"])
            .unwrap()
    };
    assert_eq!((set(0), set(1)), ("OK".into(), "OK".into()));
    assert_eq!(store.inspect(&name).await.unwrap(), None, "two of five");
    set(2);
    let view = store.inspect(&name).await.unwrap().unwrap();
    assert_eq!(view.held[0].holder.label.as_deref(), Some("another Redis client"));
    match store.acquire(&request("orders/42", TTL)).await {
        Ok(AcquireOutcome::Busy(busy)) => {
            assert_eq!(busy.held, view_now(busy.held[0].expires_in_ms, &view.held))
        }
        other => panic!("another client has it: {other:?}"),
    }
    // The slowest of the nodes may hear of it after the answer.
    eventually("what we had of it was given back", async || fleet.keys("orders/42") == [0, 1, 2]).await;
    store.break_lock(&name, "to see").await.unwrap();
    // Ours is as plain: the key, the attempt, an end.
    let mine = request("orders/42", TTL);
    take(&store, &mine).await;
    eventually("every node has it", async || fleet.keys("orders/42").len() == NODES).await;
    let value = redis_call(fleet.servers[0].addr(), &["GET", "lock:orders/42"]).unwrap();
    assert_eq!(value, mine.key.attempt.to_hex());
    assert_eq!(set(0), "(nil)");
}

fn view_now(expires_in_ms: u64, held: &[lockkeeper_core::HolderView]) -> Vec<lockkeeper_core::HolderView> {
    held.iter().map(|held| lockkeeper_core::HolderView { expires_in_ms, ..held.clone() }).collect()
}

/// With polls this far apart only a message can be what wakes the waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_is_told_of_a_release() {
    let Some(fleet) = start().await else { return };
    let (holder, waiting) =
        (fleet.open(CALM).await, fleet.open(&format!("{CALM}&poll=10m&max_ttl=10m")).await);
    let ttl = Duration::from_secs(60);
    let held = take(&holder, &request("orders/42", ttl)).await;
    let waiter = tokio::spawn(async move {
        take(&waiting, &LockRequest { wait: Wait::Forever, ..request("orders/42", ttl) }).await;
        waiting
    });
    let channel = "lockkeeper:free:0:lock:orders/42";
    let listens = |server: &lockkeeper_testkit::servers::Server| {
        redis_call(server.addr(), &["PUBSUB", "NUMSUB", channel]).unwrap().ends_with("\n1")
    };
    eventually("it listens at every node", async || fleet.servers.iter().all(listens)).await;
    // Whatever made it listen has made it look, too: give it the time to find the lock taken.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(holder.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let served = tokio::time::timeout(Duration::from_secs(10), waiter).await;
    let store = served.expect("it is told").unwrap();
    eventually("no client is subscribed any more", async || !fleet.servers.iter().any(listens)).await;
    drop(store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_speaks_tls() {
    let files = TlsFiles::new();
    let (tls, ca) = (files.clone(), files.ca_path().display().to_string());
    let with = move |_| RedisOptions { tls: Some(tls.clone()), ..RedisOptions::default() };
    let Some(fleet) = tokio::task::spawn_blocking(move || Fleet::with(with)).await.unwrap() else { return };
    let hosts: Vec<String> = fleet.servers.iter().map(|server| redis_tls_addr(server).to_string()).collect();
    let url = format!("redlocks://{}?{CALM}", hosts.join(","));
    assert!(opened(&url).await.is_err(), "no certificate authority vouches for them");
    let store = opened(&format!("{url}&ca={ca}")).await.unwrap();
    take(&store, &request("orders/42", TTL)).await;
}

/// Twelve who count in one file under one lock, by four clients: nothing is counted twice or lost, and fences grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_counts_right() {
    let Some(fleet) = start().await else { return };
    let file = std::env::temp_dir().join(format!("lk-redlock-count-{}", std::process::id()));
    std::fs::write(&file, "0 0").unwrap();
    let mut crowd = Vec::new();
    for _ in 0..4 {
        let store = fleet.open(CALM).await;
        for _ in 0..3 {
            let (store, file) = (store.clone(), file.clone());
            crowd.push(tokio::spawn(async move {
                for _ in 0..8 {
                    let grant =
                        take(&store, &LockRequest { wait: Wait::Forever, ..request("orders/42", TTL) }).await;
                    let text = std::fs::read_to_string(&file).unwrap();
                    let (count, last) = text.split_once(' ').unwrap();
                    assert!(grant.fence.get() > last.parse().unwrap(), "{} after {last}", grant.fence);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    std::fs::write(&file, format!("{} {}", count.parse::<u32>().unwrap() + 1, grant.fence))
                        .unwrap();
                    store.release(&grant.key).await.unwrap();
                }
            }));
        }
    }
    for one in crowd {
        tokio::time::timeout(Duration::from_secs(60), one)
            .await
            .expect("each waiter is granted the lock")
            .unwrap();
    }
    assert!(std::fs::read_to_string(&file).unwrap().starts_with("96 "));
    std::fs::remove_file(file).unwrap();
    fleet.nothing_left("orders/42", "after the crowd").await;
}
