//! Clocks: no clock is shared between clients, and every wall clock may be wrong.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use common::{moto, open, table, url};
use lockkeeper_core::{BootInstant, Error, Fence, RenewOutcome, Store, Wait, WallTime};
use lockkeeper_dynamodb::{DynamoStore, Options};
use lockkeeper_host::{Clock, SystemClock, Timer};
use lockkeeper_testkit::laws::{give_back, refused, request, take, with};

const TTL: Duration = Duration::from_secs(1);
const YEAR: i64 = 365 * 86_400 * 1_000_000;

/// The clock of a machine whose wall clock is wrong. Its boot-time clock is right.
#[derive(Clone, Debug, Default)]
struct WrongWallClock(Arc<AtomicI64>);

impl Clock for WrongWallClock {
    fn now(&self) -> BootInstant {
        SystemClock.now()
    }
    fn wall(&self) -> WallTime {
        WallTime::from_micros(
            SystemClock.wall().as_micros().saturating_add_signed(self.0.load(Ordering::Relaxed)),
        )
    }
    fn start(&self) -> std::io::Result<()> {
        SystemClock.start()
    }

    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        SystemClock.call_at(at, then)
    }
}

async fn open_with_clock(url: &str, clock: &WrongWallClock) -> Arc<dyn Store> {
    let mut options = Options::from_url(url).unwrap();
    options.clock = Arc::new(clock.clone());
    Arc::new(DynamoStore::open(options).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_waiter_observes_the_lock_for_a_whole_ttl() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (holder, rival) = (open(&address).await, open(&address).await);
    let late = take(&holder, &with(request("x"), |request| request.ttl = TTL)).await;
    // The lease has expired, but no other client has observed it.
    tokio::time::sleep(TTL * 2).await;
    let began = SystemClock.now();
    let waiting = with(request("x"), |request| request.wait = Wait::Forever);
    let next = take(&rival, &waiting).await;
    assert!(SystemClock.now().since(began) >= TTL, "the lock was taken over without an observation of a ttl");
    assert!(next.fence > late.fence);
    assert_eq!(holder.renew(&[late]).await.unwrap(), [RenewOutcome::Lost]);
}

/// A holder is paused past its ttl and then writes to its resource. The resource checks the fence and rejects the write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_item_rejects_the_write_of_a_paused_holder() {
    use lockkeeper_fenced::{Fenced, dynamodb::DynamoFenced};
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let client = common::sdk(server.addr()).await;
    common::foreign_table(&client, "orders").await;
    let orders = DynamoFenced::new(client, "orders", "id");
    let (holder, rival) = (open(&address).await, open(&address).await);
    let late = take(&holder, &with(request("x"), |request| request.ttl = TTL)).await;
    orders.put("42", late.fence, b"first").await.unwrap();
    let live = take(&rival, &with(request("x"), |request| request.wait = Wait::Forever)).await;
    orders.put("42", live.fence, b"second").await.unwrap();
    let refused = orders.put("42", late.fence, b"late").await;
    assert!(matches!(refused, Err(Error::Stale { seen, .. }) if seen == live.fence), "{refused:?}");
    assert_eq!(orders.read("42").await.unwrap().unwrap().value, Some(b"second".to_vec()));
}

/// A holder that renews keeps the lock, however long a waiter observes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_does_not_take_over_from_a_holder_that_renews() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (holder, rival) = (open(&address).await, open(&address).await);
    // Long enough for a busy machine to renew in time.
    let held = take(&holder, &with(request("x"), |request| request.ttl = TTL * 3)).await;
    let waiting = with(request("x"), |request| request.wait = Wait::For(TTL * 5));
    let waiter = tokio::spawn(async move { rival.acquire(&waiting).await });
    while !waiter.is_finished() {
        assert_eq!(holder.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
        tokio::time::sleep(TTL / 2).await;
    }
    assert!(matches!(waiter.await.unwrap(), Ok(lockkeeper_core::AcquireOutcome::Busy(_))));
}

/// Wall clocks that are hours apart do no harm: a lease ends by the observer's own boot-time clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wall_clocks_that_are_hours_apart_do_no_harm() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (early, late) = (WrongWallClock::default(), WrongWallClock::default());
    early.0.store(3_600_000_000, Ordering::Relaxed);
    late.0.store(-3_600_000_000, Ordering::Relaxed);
    let (early, late) = (open_with_clock(&address, &early).await, open_with_clock(&address, &late).await);
    let long = |name: &str| with(request(name), |request| request.ttl = Duration::from_secs(60));
    take(&late, &long("x")).await;
    refused(&early, &request("x")).await;
    take(&early, &long("y")).await;
    refused(&late, &request("y")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_while_wall_clocks_jump() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let clock = WrongWallClock::default();
    let (store, other) = (open_with_clock(&address, &clock).await, open(&address).await);
    let mut last: Option<Fence> = None;
    for jump in [0, 5 * YEAR, -30 * YEAR, 250 * YEAR, -60 * YEAR, 0] {
        clock.0.store(jump, Ordering::Relaxed);
        for store in [&store, &other] {
            let grant = take(store, &request("x")).await;
            assert!(Some(grant.fence) > last, "{} after {last:?} at {jump}", grant.fence);
            let broken =
                store.break_lock(&lockkeeper_core::LockName::new("x").unwrap(), "to see").await.unwrap();
            assert!(broken > grant.fence);
            last = Some(broken);
        }
    }
    // One wrong clock has not used up the fences of this lock.
    assert!(last < Some(Fence::new(1 << 52).unwrap()), "{last:?}");
    give_back(&store, &take(&store, &request("x")).await.key).await;
}
