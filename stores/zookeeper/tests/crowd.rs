//! Many waiters. The tests count the requests at the server, not the time.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{four_letter, keeper, try_open};
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Mode, RenewOutcome, Store, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, name, owner, request, request_all, set_patience, soon, take, with,
};
use lockkeeper_testkit::scenarios::crowd::{an_owner_among_sharers, take_many};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};

async fn patient(server: &Server) -> Arc<dyn Store> {
    // Polls are counted too, so they are made rare.
    try_open(&format!("zk://{}?poll=10m&session=60s&timeout=20s", server.addr())).await.unwrap()
}

/// How many requests the server has handled, pings included.
fn handled(server: &Server) -> u64 {
    monitored(server, "zk_packets_received")
}

fn monitored(server: &Server, what: &str) -> u64 {
    let told = four_letter(server.addr(), "mntr");
    let line = told.lines().find_map(|line| line.strip_prefix(what));
    line.and_then(|count| count.trim().parse().ok()).expect("a count")
}

/// The requests per hand-off with this many waiters.
async fn per_hand_off(waiters: usize) -> Option<f64> {
    // Long sessions: with many clients a busy machine answers pings late.
    let tick = Duration::from_secs(3);
    let server = servers::zookeeper(ZooKeeperOptions { tick, ..ZooKeeperOptions::default() }).ok()?;
    let store = patient(&server).await;
    let held = take(&store, &request("popular")).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.extend(lockkeeper_testkit::scenarios::crowd::join(&patient(&server).await, waiters / 4));
    }
    eventually("all are in the queue", || async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == waiters)
    })
    .await;
    // All are in the queue; but many have not set their watch yet.
    let mut before = handled(&server);
    eventually("all have set their watches", || {
        let server = &server;
        let last = std::mem::replace(&mut before, handled(server));
        let quiet = before - last < 5;
        async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            quiet
        }
    })
    .await;
    let before = handled(&server);
    give_back(&store, &held.key).await;
    lockkeeper_testkit::scenarios::crowd::all_granted(waiting).await;
    let calls = handled(&server) - before;
    assert!(store.inspect(&name("popular")).await.unwrap().is_none());
    Some(calls as f64 / waiters as f64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_off_costs_the_same_however_many_wait() {
    set_patience(Duration::from_secs(180));
    // Each read of the queue returns the names of all waiters: thousands are slow in a debug build.
    let crowd = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 2000 } else { 200 };
    let (Some(few), Some(many)) = (per_hand_off(20).await, per_hand_off(crowd).await) else { return };
    println!("requests per hand-off: {few:.2} with 20 waiters, {many:.2} with {crowd}");
    // One request to release, one to read the queue, one to write the grant; and sometimes a ping.
    assert!(few < 4.0 && many < 3.3, "{few} {many}");
}

/// The requests of one shared acquire of these names and its release beside this many holders without an owner.
async fn requests_per_sharer(
    server: &Server,
    store: &Arc<dyn Store>,
    names: &[&str],
    with_owner: bool,
    holders: usize,
) -> f64 {
    let shared = || {
        with(request_all(names), |request| {
            request.mode = Mode::Shared;
            request.wait = Wait::Forever;
        })
    };
    take_many(store, holders, shared).await;
    let before = handled(server);
    for round in 0..10 {
        let wait = if round % 2 == 0 { Wait::No } else { Wait::Forever };
        let sharer = with(shared(), |request| {
            (request.wait, request.owner) = (wait, with_owner.then(owner));
        });
        let sharer = take(store, &sharer).await;
        give_back(store, &sharer.key).await;
    }
    (handled(server) - before) as f64 / 10.0
}

/// A sharer that is granted behind a sharer needs to read no other holder: with many holders, each acquire read all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sharer_costs_the_same_however_many_share() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = patient(&server).await;
    for (few, many, with_owner) in [
        (vec!["few"], vec!["many"], false),
        (vec!["few/owner"], vec!["many/owner"], true),
        (vec!["few/a", "few/b"], vec!["many/a", "many/b"], false),
    ] {
        let requests = requests_per_sharer(&server, &store, &few, with_owner, 50).await;
        let more = requests_per_sharer(&server, &store, &many, with_owner, 200).await;
        println!("requests per shared acquire of {many:?}: {requests} beside 50 holders, {more} beside 200");
        // To enqueue, to list, to read two nodes, to write the grant, to release; and pings. The lists and the nodes for each name.
        let most = 12.0 * many.len() as f64;
        assert!(requests < most && more < most, "{requests} {more}");
        let view = store.inspect(&name(many[0])).await.unwrap().unwrap();
        // A view reads the first hundred entries.
        assert_eq!((view.held.len() > 100, view.held.len() + view.waiting), (true, 200));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_is_found_among_many_sharers() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    an_owner_among_sharers(&patient(&server).await).await;
}

/// The requests for a permit of four, from its enqueuing to its release, in a queue of this many waiters.
async fn requests_per_permit(server: &Server, store: &Arc<dyn Store>, name: &str, waiters: usize) -> f64 {
    let permit =
        || with(request(name), |request| (request.mode, request.wait) = (Mode::Permit(4), Wait::Forever));
    let requests: Vec<_> = (0..4).map(|_| permit()).collect();
    let held = join_all(requests.iter().map(|request| take(store, request))).await;
    let (before, nodes) = (handled(server), monitored(server, "zk_znode_count"));
    let crowd: Vec<_> = (0..waiters)
        .map(|_| {
            let (store, request) = (store.clone(), permit());
            tokio::spawn(async move { give_back(&store, &take(&store, &request).await.key).await })
        })
        .collect();
    // Without a request of ours, which would be counted.
    eventually("all are in the queue", || async {
        monitored(server, "zk_znode_count") >= nodes + waiters as u64
    })
    .await;
    for grant in held {
        give_back(store, &grant.key).await;
    }
    soon("all are granted a permit", join_all(crowd)).await;
    (handled(server) - before) as f64 / waiters as f64
}

/// A counted request behind a waiter waits, and reads no other entry: each read all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_costs_the_same_however_many_wait() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = patient(&server).await;
    let few = requests_per_permit(&server, &store, "few", 20).await;
    let many = requests_per_permit(&server, &store, "many", 80).await;
    println!("requests per permit: {few} with 20 waiters, {many} with 80");
    assert!(many < few * 1.5, "{few} {many}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_guards_are_taken_renewed_and_given_back_together() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let store = patient(&server).await;
    let requests = || -> Vec<_> { (0..640).map(|i| request(&format!("guard/{i}"))).collect() };
    let take_all = async || join_all(requests().iter().map(|request| take(&store, request))).await;
    // The first use of each name creates its queue node.
    for grant in take_all().await {
        give_back(&store, &grant.key).await;
    }
    let before = handled(&server);
    let grants = take_all().await;
    let taken = handled(&server) - before;
    assert!(taken <= 60, "{taken} requests for 640 grants");
    let before = handled(&server);
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Renewed));
    let renewed = handled(&server) - before;
    assert!(renewed <= 24, "{renewed} requests for 640 renewals");
    let before = handled(&server);
    join_all(grants.iter().map(|grant| give_back(&store, &grant.key))).await;
    let given_back = handled(&server) - before;
    assert!(given_back <= 60, "{given_back} requests for 640 releases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_session_and_no_more() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let url = format!("zk://{}?session=2s", server.addr());
    let (store, dead) = (try_open(&url).await.unwrap(), try_open(&url).await.unwrap());
    let held = take(&store, &request("popular")).await;
    let gone = {
        let keeper = keeper(&dead);
        tokio::spawn(async move { keeper.lock("popular").acquire().await.map(drop) })
    };
    eventually("the request is in the queue", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    // The whole thread is gone, as if the process were; no task is left to remove the entry.
    gone.abort();
    drop(dead);
    give_back(&store, &held.key).await;
    let patient = with(request("popular"), |request| request.wait = Wait::For(Duration::from_secs(20)));
    let served = store.acquire(&patient).await;
    assert!(matches!(served, Ok(AcquireOutcome::Granted(_))), "{served:?}");
}
