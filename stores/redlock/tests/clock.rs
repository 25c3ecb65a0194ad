//! Wall clocks that jump, at a minority and at a majority of the nodes, while a lock is held. Every test compares what
//! happens with what `docs/stores/redlock.md` says, and every grant has a higher fence than those before it.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lockkeeper_core::{Fence, Grant, Locks, ReleaseOutcome, RenewOutcome};
use lockkeeper_redlock::RedlockStore;
use lockkeeper_testkit::servers::{ClockShim, RedisOptions};

const TTL: Duration = Duration::from_secs(10);
const CALM: &str = "young_node=0s&node_timeout=1s&timeout=3s";
const HOUR: i64 = 3600 * ClockShim::SECOND;
const MINORITY: usize = QUORUM - 1;

/// Five nodes, each with a clock of its own.
struct Clocks {
    fleet: Fleet,
    clocks: Vec<ClockShim>,
    /// The highest fence so far.
    last: Option<Fence>,
}

impl Clocks {
    async fn start() -> Option<Clocks> {
        let clocks = (0..NODES).map(|_| ClockShim::build().ok()).collect::<Option<Vec<_>>>()?;
        let shims = clocks.clone();
        let with =
            move |node: usize| RedisOptions { clock: Some(shims[node].clone()), ..RedisOptions::default() };
        let fleet = tokio::task::spawn_blocking(move || Fleet::with(with)).await.unwrap()?;
        Some(Clocks { fleet, clocks, last: None })
    }

    /// Moves the clocks of this many nodes.
    fn jump(&self, nodes: usize, by: i64) {
        self.clocks[..nodes].iter().for_each(|clock| clock.jump(by));
    }

    /// Takes the lock at every node, and checks the fence.
    async fn take(&mut self, store: &RedlockStore, name: &str) -> Grant {
        let grant = take(store, &request(name, TTL)).await;
        self.check(&grant);
        eventually("every node has the lock", async || self.fleet.keys(name).len() == NODES).await;
        grant
    }

    fn check(&mut self, grant: &Grant) {
        assert!(Some(grant.fence) > self.last, "fence {} after {:?}", grant.fence, self.last);
        self.last = Some(grant.fence);
    }

    /// A store of its own for each: nothing that a process remembers helps the fence.
    async fn open(&self) -> RedlockStore {
        self.fleet.open(CALM).await
    }
}

async fn renew(store: &RedlockStore, grant: &Grant) -> RenewOutcome {
    store.renew(std::slice::from_ref(grant)).await.unwrap().remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minority_set_forward_changes_nothing() {
    let Some(mut all) = Clocks::start().await else { return };
    let holder = all.open().await;
    let held = all.take(&holder, "orders/42").await;
    for _ in 0..3 {
        all.jump(MINORITY, HOUR);
        let rival = all.open().await;
        assert!(!granted(&rival.acquire(&request("orders/42", TTL)).await), "a second holder");
        // What the rival has taken at the minority is released, and the next renewal puts the lock back there.
        eventually("the nodes that dropped the lock have it again", async || {
            assert_eq!(renew(&holder, &held).await, RenewOutcome::Renewed);
            all.fleet.keys("orders/42").len() == NODES
        })
        .await;
    }
    assert_eq!(holder.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    let next = all.open().await;
    let grant = all.take(&next, "orders/42").await;
    // The clocks are set right, and what was granted by the wrong ones stays below what follows.
    all.jump(MINORITY, -3 * HOUR);
    next.release(&grant.key).await.unwrap();
    let last = all.open().await;
    all.take(&last, "orders/42").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_set_forward_ends_leases_early_and_the_fence_tells() {
    let Some(mut all) = Clocks::start().await else { return };
    let holder = all.open().await;
    let held = all.take(&holder, "orders/42").await;
    all.jump(QUORUM, HOUR);
    let rival = all.open().await;
    let second = take(&rival, &request("orders/42", TTL)).await;
    all.check(&second);
    assert_eq!(
        renew(&holder, &held).await,
        RenewOutcome::Lost,
        "the first holder is told by its next renewal"
    );
    assert_eq!(renew(&rival, &second).await, RenewOutcome::Renewed, "and does not disturb the second");
    // Set right again: the second holder's lock is not over, and the next fence is above those of the wrong clock.
    all.jump(QUORUM, -HOUR);
    assert_eq!(renew(&rival, &second).await, RenewOutcome::Renewed);
    assert_eq!(rival.release(&second.key).await.unwrap(), ReleaseOutcome::Released);
    eventually("what the first one left at a minority is over", async || {
        all.fleet.keys("orders/42").is_empty()
    })
    .await;
    let third = all.open().await;
    all.take(&third, "orders/42").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn set_back_a_holder_keeps_its_lock_and_a_dead_one_loses_it_after_its_ttl() {
    let Some(mut all) = Clocks::start().await else { return };
    for (nodes, name) in [(MINORITY, "minority"), (QUORUM, "majority"), (NODES, "all")] {
        let holder = all.open().await;
        let held = all.take(&holder, name).await;
        all.jump(nodes, -HOUR);
        let rival = all.open().await;
        assert!(!granted(&rival.acquire(&request(name, TTL)).await), "{name}: a second holder");
        assert_eq!(renew(&holder, &held).await, RenewOutcome::Renewed, "{name}");
        all.jump(nodes, -HOUR);
        // It is not renewed from here on. By the clocks that were set back it would last for an hour more.
        let silent_since = Instant::now();
        let (request, mut next) = (request(name, TTL), None);
        while next.is_none() {
            assert!(silent_since.elapsed() < TTL * 3, "{name}: the lock of a dead holder stays");
            next = match rival.acquire(&request).await.unwrap() {
                lockkeeper_core::AcquireOutcome::Granted(grant) => Some(grant),
                lockkeeper_core::AcquireOutcome::Busy(busy) => {
                    let left = Duration::from_millis(busy.held.first().map_or(0, |held| held.expires_in_ms));
                    assert!(left <= TTL, "{name}: {left:?} are shown as left");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    None
                }
            };
        }
        let waited = silent_since.elapsed();
        assert!(
            waited > TTL - TTL / 10,
            "{name}: it was taken from a holder that could be alive: {waited:?}"
        );
        let next = next.unwrap();
        all.check(&next);
        assert_eq!(renew(&holder, &held).await, RenewOutcome::Lost, "{name}");
        rival.release(&next.key).await.unwrap();
        all.jump(nodes, 2 * HOUR);
    }
}

/// Clocks that go to and fro at any of the nodes, and another process for each grant: what remains is what nodes remember.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fence_grows_over_any_jumps() {
    let Some(mut all) = Clocks::start().await else { return };
    let mut dice = Dice::new();
    for _ in 0..15 {
        let store = all.open().await;
        let grant = take(&store, &request("orders/42", TTL)).await;
        all.check(&grant);
        store.release(&grant.key).await.unwrap();
        all.fleet.nothing_left("orders/42", "after the release").await;
        for clock in &all.clocks {
            clock.jump((dice.roll(5) as i64 - 2) * HOUR);
        }
    }
}

/// A node whose clock is set back to before its start is young for as long as it looks so, and says that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_before_the_start_of_the_server_looks_young() {
    let Some(all) = Clocks::start().await else { return };
    let store = all.fleet.open("node_timeout=1s&timeout=3s&max_ttl=10s&young_node=1s").await;
    eventually("the nodes are old enough", async || granted(&store.acquire(&request("x", TTL)).await)).await;
    all.jump(QUORUM, -HOUR);
    let answer = store.acquire(&request("y", TTL)).await;
    assert!(matches!(&answer, Err(error) if error.to_string().contains("young_node")), "{answer:?}");
    all.jump(QUORUM, HOUR);
    assert!(granted(&store.acquire(&request("z", TTL)).await), "it is over when the clock is right");
}
