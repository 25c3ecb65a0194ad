//! Waiters are notified when the entry ahead is gone: the poll interval is longer than these tests.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{admin, open, tree, try_open, wipe};
use futures_util::StreamExt;
use lockkeeper_core::{AcquireOutcome, Expect, Mode, Page, RenewOutcome, Store, Wait};
use lockkeeper_testkit::laws::{
    SHORT, eventually, give_back, granted, is_free, join_queue, name, owner, refused, request, request_all,
    soon, take, with,
};
use lockkeeper_testkit::proxy::{Framing, Proxy};
use lockkeeper_testkit::servers::{self, Server, ZooKeeperOptions};
use zookeeper_client::{Acl, AuthId, Permission};

fn server() -> Option<Server> {
    servers::zookeeper(ZooKeeperOptions::default()).ok()
}

async fn patient(server: &Server) -> Arc<dyn Store> {
    try_open(&format!("zk://{}?poll=10m", server.addr())).await.unwrap()
}

/// The waiter watched only the queue of the first name, where no entry was ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_names_that_are_shared_or_counted_are_watched_in_every_queue() {
    let Some(server) = server() else { return };
    let store = patient(&server).await;
    for mode in [Mode::Shared, Mode::Permit(2)] {
        let beside = take(&store, &with(request("a"), |request| request.mode = mode)).await;
        let in_the_way = take(&store, &request("b")).await;
        let both = with(request_all(&["a", "b"]), |request| request.mode = mode);
        let waits = join_queue(&store, &both, 1).await;
        give_back(&store, &in_the_way.key).await;
        let both = granted(waits).await;
        give_back(&store, &both.key).await;
        give_back(&store, &beside.key).await;
    }
}

/// Holds of one owner count as one permit, also with other entries between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_that_was_entered_twice_is_one() {
    let Some(server) = server() else { return };
    let (store, me) = (open(server.addr()).await, owner());
    let permit = || with(request("x"), |request| request.mode = Mode::Permit(3));
    let mine = || with(permit(), |request| request.owner = Some(me));
    let first = take(&store, &mine()).await;
    take(&store, &permit()).await;
    assert_eq!(take(&store, &mine()).await.fence, first.fence);
    take(&store, &permit()).await;
    refused(&store, &permit()).await;
}

/// Event nodes are created while a client watches, and for some time after. When an administrator deleted their
/// parent, no lock could be granted or released until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_of_events_is_made_again() {
    let Some(server) = server() else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let mut events = store.watch("").await.unwrap();
    let held = take(&store, &request("x")).await;
    events.next().await.unwrap().unwrap();
    drop(events);
    let waits = join_queue(&store, &request("x"), 1).await;
    wipe(&admin, "/lock/=events").await;
    give_back(&store, &held.key).await;
    let held = granted(waits).await;
    wipe(&admin, "/lock/=events").await;
    store.break_lock(&name("x"), "to see what happens").await.unwrap();
    wipe(&admin, "/lock/=events").await;
    let other = open(server.addr()).await;
    let next = take(&other, &request("x")).await;
    assert!(next.fence > held.fence);
}

/// The end of a hold could not create its event node, because the parent was gone; the store took that for a missing
/// hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_with_a_lock_delay_ends_without_the_events_node() {
    let Some(server) = server() else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    drop(store.watch("").await.unwrap());
    let short = with(request("x"), |request| {
        (request.ttl, request.lock_delay) = (Duration::from_secs(2), Duration::from_secs(1));
    });
    let late = take(&store, &short).await;
    wipe(&admin, "/lock/=events").await;
    let other = open(server.addr()).await;
    eventually("it is let go", || async {
        let seen = other.inspect(&name("x")).await.unwrap();
        seen.is_none_or(|seen| seen.held.is_empty())
    })
    .await;
    assert!(
        take(&other, &with(request("x"), |request| request.wait = Wait::Forever)).await.fence > late.fence
    );
}

/// The client library cannot send more watches than fit into one message to a new connection, and lost its session
/// over that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_with_many_watches_reconnects() {
    let extra = vec!["maxSessionTimeout=90000".into()];
    let Ok(server) = servers::zookeeper(ZooKeeperOptions { extra, ..ZooKeeperOptions::default() }) else {
        return;
    };
    let proxy = Proxy::start(server.addr(), Framing::ZooKeeper);
    let url = format!("zk://{}?poll=500ms&session=90s", proxy.addr());
    let (store, other) = (try_open(&url).await.unwrap(), open(server.addr()).await);
    let kept = take(&store, &request("kept")).await;
    // Every byte of these takes three in a path.
    let names: Vec<String> = (0..120).map(|n| format!("{n:03}{}", "ü".repeat(250))).collect();
    let (mut held, mut waits) = (Vec::new(), Vec::new());
    for text in &names {
        held.push(take(&other, &request(text)).await);
        waits.push(join_queue(&store, &request(text), 1).await);
    }
    proxy.cut_all();
    proxy.heal();
    eventually("it is connected again", || async {
        matches!(store.renew(std::slice::from_ref(&kept)).await.as_deref(), Ok([RenewOutcome::Renewed]))
    })
    .await;
    for (held, waits) in held.iter().zip(waits) {
        give_back(&other, &held.key).await;
        give_back(&store, &granted(waits).await.key).await;
    }
}

/// The process that wrote the record is gone: the next reader deletes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_record_is_deleted_by_its_next_reader() {
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

/// A retry came while the servers rejected the end of the earlier hold. It waited for that end, whatever its wait time
/// was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_while_an_earlier_hold_cannot_be_removed() {
    let Ok(server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let (store, admin) = (open(server.addr()).await, admin(server.addr()).await);
    let asked = with(request("x"), |request| (request.ttl, request.wait) = (SHORT, Wait::For(SHORT)));
    let held = take(&store, &asked).await;
    let no_deletes = Permission::READ | Permission::WRITE | Permission::CREATE | Permission::ADMIN;
    admin.set_acl("/lock/x", &[Acl::new(no_deletes, AuthId::anyone())], None).await.unwrap();
    tokio::time::sleep(SHORT * 2).await;
    assert_eq!(store.renew(&[held]).await.unwrap(), [RenewOutcome::Lost]);
    let told = soon("its wait ends", store.acquire(&asked)).await;
    assert!(matches!(told, Ok(AcquireOutcome::Busy(_))), "{told:?}");
    admin.set_acl("/lock/x", &[Acl::new(Permission::ALL, AuthId::anyone())], None).await.unwrap();
    is_free(&store, "x").await;
}
