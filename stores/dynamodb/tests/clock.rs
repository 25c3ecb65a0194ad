//! Time: there is no clock that all share, and none that can be believed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use common::{moto, open, table, url};
use lockkeeper_core::{Error, Fence, Moment, Renewal, Store, Wait, Wall};
use lockkeeper_dynamodb::{DynamoStore, Options};
use lockkeeper_host::{Clock, SystemClock, Timer};
use lockkeeper_testkit::laws::{ask, give_back, refused, take, with};

const TTL: Duration = Duration::from_secs(1);
const YEAR: i64 = 365 * 86_400 * 1_000_000;

/// A machine whose wall clock is off. Its boot-time clock runs like every other.
#[derive(Clone, Debug, Default)]
struct Off(Arc<AtomicI64>);

impl Clock for Off {
    fn now(&self) -> Moment {
        SystemClock.now()
    }
    fn wall(&self) -> Wall {
        Wall::from_micros(
            SystemClock.wall().as_micros().saturating_add_signed(self.0.load(Ordering::Relaxed)),
        )
    }
    fn start(&self) -> std::io::Result<()> {
        SystemClock.start()
    }

    fn call_at(&self, at: Moment, then: Box<dyn FnOnce() + Send>) -> Timer {
        SystemClock.call_at(at, then)
    }
}

async fn open_off(url: &str, off: &Off) -> Arc<dyn Store> {
    let mut options = Options::from_url(url).unwrap();
    options.clock = Arc::new(off.clone());
    Arc::new(DynamoStore::open(options).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_just_arrived_watches_for_a_whole_ttl() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (holder, rival) = (open(&address).await, open(&address).await);
    let late = take(&holder, &with(ask("x"), |ask| ask.ttl = TTL)).await;
    // Long over, but nobody has watched.
    tokio::time::sleep(TTL * 2).await;
    let began = SystemClock.now();
    let patient = with(ask("x"), |ask| ask.wait = Wait::Forever);
    let next = take(&rival, &patient).await;
    assert!(SystemClock.now().since(began) >= TTL, "it was taken over without being watched");
    assert!(next.fence > late.fence);
    assert_eq!(holder.renew(&[late]).await.unwrap(), [Renewal::Lost]);
}

/// The promise that survives a pause: the holder sleeps past its ttl, wakes up believing, and writes. The item says no.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_holder_is_refused_by_the_item_that_it_writes_to() {
    use lockkeeper_fenced::{Fenced, dynamodb::DynamoFenced};
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let client = common::sdk(server.addr()).await;
    common::foreign_table(&client, "orders").await;
    let orders = DynamoFenced::new(client, "orders", "id");
    let (holder, rival) = (open(&address).await, open(&address).await);
    let late = take(&holder, &with(ask("x"), |ask| ask.ttl = TTL)).await;
    orders.put("42", late.fence, b"first").await.unwrap();
    let live = take(&rival, &with(ask("x"), |ask| ask.wait = Wait::Forever)).await;
    orders.put("42", live.fence, b"second").await.unwrap();
    let refused = orders.put("42", late.fence, b"late").await;
    assert!(matches!(refused, Err(Error::Stale { seen, .. }) if seen == live.fence), "{refused:?}");
    assert_eq!(orders.read("42").await.unwrap().unwrap().value, Some(b"second".to_vec()));
}

/// A holder that renews is never taken for dead, however long a rival watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beating_heart_is_seen() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (holder, rival) = (open(&address).await, open(&address).await);
    // A ttl that a busy machine keeps.
    let held = take(&holder, &with(ask("x"), |ask| ask.ttl = TTL * 3)).await;
    let patient = with(ask("x"), |ask| ask.wait = Wait::For(TTL * 5));
    let waiter = tokio::spawn(async move { rival.acquire(&patient).await });
    while !waiter.is_finished() {
        assert_eq!(holder.renew(std::slice::from_ref(&held)).await.unwrap(), [Renewal::Renewed]);
        tokio::time::sleep(TTL / 2).await;
    }
    assert!(matches!(waiter.await.unwrap(), Ok(lockkeeper_core::Acquired::Busy(_))));
}

/// Clocks that are an hour apart do no harm: a lease is over by the clock of whoever watches it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_are_far_apart_do_no_harm() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let (early, late) = (Off::default(), Off::default());
    early.0.store(3_600_000_000, Ordering::Relaxed);
    late.0.store(-3_600_000_000, Ordering::Relaxed);
    let (early, late) = (open_off(&address, &early).await, open_off(&address, &late).await);
    let long = |name: &str| with(ask(name), |ask| ask.ttl = Duration::from_secs(60));
    take(&late, &long("x")).await;
    refused(&early, &ask("x")).await;
    take(&early, &long("y")).await;
    refused(&late, &ask("y")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_grow_while_clocks_jump() {
    let Some(server) = moto().await else { return };
    let address = url(server.addr(), &table(server.addr()).await);
    let off = Off::default();
    let (store, other) = (open_off(&address, &off).await, open(&address).await);
    let mut last: Option<Fence> = None;
    for jump in [0, 5 * YEAR, -30 * YEAR, 250 * YEAR, -60 * YEAR, 0] {
        off.0.store(jump, Ordering::Relaxed);
        for store in [&store, &other] {
            let grant = take(store, &ask("x")).await;
            assert!(Some(grant.fence) > last, "{} after {last:?} at {jump}", grant.fence);
            let broken =
                store.break_lock(&lockkeeper_core::LockName::new("x").unwrap(), "to see").await.unwrap();
            assert!(broken > grant.fence);
            last = Some(broken);
        }
    }
    // One broken clock has not used up the fences of this lock.
    assert!(last < Some(Fence::new(1 << 52).unwrap()), "{last:?}");
    give_back(&store, &take(&store, &ask("x")).await.claim).await;
}
