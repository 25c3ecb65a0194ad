//! Who waits is called when the one in the way is gone: here nobody looks by itself before the test is over.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree, try_open, wipe};
use futures_util::StreamExt;
use lockkeeper_core::{Expect, Mode, Page, Renewal, Store, Wait};
use lockkeeper_testkit::laws::{
    ask, ask_all, eventually, give_back, granted, name, owner, refused, stand_in_line, take, with,
};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};

fn server() -> Option<Server> {
    servers::zookeeper(ZooKeeperOptions::default()).ok()
}

async fn patient(server: &Server) -> Arc<dyn Store> {
    try_open(&format!("zk://{}?poll=10m", server.addr())).await.unwrap()
}

/// It watched the line of the first name alone, where nobody is in the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_names_that_are_shared_or_counted_are_watched_in_every_line() {
    let Some(server) = server() else { return };
    let store = patient(&server).await;
    for mode in [Mode::Shared, Mode::Permit(2)] {
        let beside = take(&store, &with(ask("a"), |ask| ask.mode = mode)).await;
        let in_the_way = take(&store, &ask("b")).await;
        let both = with(ask_all(&["a", "b"]), |ask| ask.mode = mode);
        let waits = stand_in_line(&store, &both, 1).await;
        give_back(&store, &in_the_way.claim).await;
        let both = granted(waits).await;
        give_back(&store, &both.claim).await;
        give_back(&store, &beside.claim).await;
    }
}

/// Holds of one owner are one permit, whoever came between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_that_was_entered_twice_is_one() {
    let Some(server) = server() else { return };
    let (store, me) = (open(server.addr()).await, owner());
    let permit = || with(ask("x"), |ask| ask.mode = Mode::Permit(3));
    let mine = || with(permit(), |ask| ask.owner = Some(me));
    let first = take(&store, &mine()).await;
    take(&store, &permit()).await;
    assert_eq!(take(&store, &mine()).await.fence, first.fence);
    take(&store, &permit()).await;
    refused(&store, &permit()).await;
}

/// What happens is written below a node of its own while somebody watches, and for some time after. If that node was gone, nothing could be
/// granted or given back until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_of_events_is_made_again() {
    let Some(server) = server() else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let mut events = store.watch("").await.unwrap();
    let held = take(&store, &ask("x")).await;
    events.next().await.unwrap().unwrap();
    drop(events);
    let waits = stand_in_line(&store, &ask("x"), 1).await;
    wipe(&admin, "/lock/=events").await;
    give_back(&store, &held.claim).await;
    let held = granted(waits).await;
    wipe(&admin, "/lock/=events").await;
    store.break_lock(&name("x"), "to see what happens").await.unwrap();
    wipe(&admin, "/lock/=events").await;
    let other = open(server.addr()).await;
    let next = take(&other, &ask("x")).await;
    assert!(next.fence > held.fence);
}

/// Its end could not be told, because there was no node to tell it below; that was taken for its being gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_with_a_lock_delay_ends_though_its_end_cannot_be_told() {
    let Some(server) = server() else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    drop(store.watch("").await.unwrap());
    let short = with(ask("x"), |ask| {
        (ask.ttl, ask.lock_delay) = (Duration::from_secs(2), Duration::from_secs(1));
    });
    let late = take(&store, &short).await;
    wipe(&admin, "/lock/=events").await;
    let other = open(server.addr()).await;
    eventually("it is let go", || async {
        let seen = other.inspect(&name("x")).await.unwrap();
        seen.is_none_or(|seen| seen.held.is_empty())
    })
    .await;
    assert!(take(&other, &with(ask("x"), |ask| ask.wait = Wait::Forever)).await.fence > late.fence);
}

/// The client cannot tell a new connection of more watches than fit into one message, and lost its session over that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_waits_for_much_is_connected_again() {
    let extra = vec!["maxSessionTimeout=90000".into()];
    let Ok(server) = servers::zookeeper(ZooKeeperOptions { extra, ..ZooKeeperOptions::default() }) else {
        return;
    };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let url = format!("zk://{}?poll=500ms&session=90s", proxy.addr());
    let (store, other) = (try_open(&url).await.unwrap(), open(server.addr()).await);
    let kept = take(&store, &ask("kept")).await;
    // Every byte of these takes three in a path.
    let names: Vec<String> = (0..120).map(|n| format!("{n:03}{}", "ü".repeat(250))).collect();
    let (mut held, mut waits) = (Vec::new(), Vec::new());
    for text in &names {
        held.push(take(&other, &ask(text)).await);
        waits.push(stand_in_line(&store, &ask(text), 1).await);
    }
    proxy.cut_all();
    proxy.heal();
    eventually("it is connected again", || async {
        matches!(store.renew(std::slice::from_ref(&kept)).await.as_deref(), Ok([Renewal::Renewed]))
    })
    .await;
    for (held, waits) in held.iter().zip(waits) {
        give_back(&other, &held.claim).await;
        give_back(&store, &granted(waits).await.claim).await;
    }
}

/// The process that wrote it is gone: whoever meets it takes it away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_is_over_is_taken_away_by_whoever_meets_it() {
    let Some(server) = server() else { return };
    let (other, admin) = (open(server.addr()).await, admin(server.addr()).await);
    for scanned in [true, false] {
        let writer = open(server.addr()).await;
        writer.write(&name("k"), b"v", Expect::Any, Some(Duration::from_millis(300))).await.unwrap();
        drop(writer);
        eventually("it is taken away", || async {
            match scanned {
                true => drop(other.scan("", &Page::FIRST).await.unwrap()),
                false => drop(other.read(&name("k")).await.unwrap()),
            }
            tree(&admin, "/lock/=records").await.len() == 1
        })
        .await;
    }
}
