//! Every subset of the nodes down, silent or gone, in each phase. A majority up: it works. A minority up: no grant, no
//! hang, nothing left behind. Healed: it works again.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lockkeeper_core::{Error, Locks, ReleaseOutcome, RenewOutcome};
use lockkeeper_redlock::RedlockStore;

const TTL: Duration = Duration::from_secs(20);
const NODE_TIMEOUT: Duration = Duration::from_millis(500);
const OPTIONS: &str = "young_node=0s&node_timeout=500ms&timeout=800ms";
/// A vote, the fence, the release of what came of it; and a busy machine.
const BOUND: Duration = Duration::from_millis(3 * 500 + 2000);

#[derive(Clone, Copy, Debug)]
enum How {
    /// They take connections and requests, and say nothing.
    Silent,
    /// No server listens.
    Gone,
}

impl Fleet {
    fn down(&self, subset: usize, how: How) {
        for node in (0..NODES).filter(|node| subset & 1 << node != 0) {
            match how {
                How::Silent => self.servers[node].pause(),
                How::Gone => self.proxies[node].cut_all(),
            }
        }
    }

    fn heal(&self, how: How) {
        for node in 0..NODES {
            match how {
                How::Silent => self.servers[node].resume(),
                How::Gone => self.proxies[node].heal(),
            }
        }
    }
}

/// Runs `story` for every subset and both ways to be down; it is told whether a majority is up.
async fn every_subset(story: impl AsyncFn(&Fleet, &RedlockStore, usize, How, String)) {
    let Some(fleet) = tokio::task::spawn_blocking(Fleet::start).await.unwrap() else { return };
    let store = fleet.open(OPTIONS).await;
    for how in [How::Silent, How::Gone] {
        for subset in 0..1usize << NODES {
            story(&fleet, &store, subset, how, format!("{how:?}-{subset:05b}")).await;
        }
    }
}

fn majority_up(subset: usize) -> bool {
    NODES - subset.count_ones() as usize >= QUORUM
}

async fn timed<T>(what: &str, work: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let done = work.await;
    let took = began.elapsed();
    assert!(
        took < BOUND,
        "{what} took {took:?}: {NODE_TIMEOUT:?} for each of three steps is what it may take"
    );
    done
}

fn is_down<T: std::fmt::Debug>(answer: &Result<T, Error>) -> bool {
    matches!(answer, Err(Error::Unavailable(_) | Error::Unknown(_)))
}

/// After a heal it works again, and soon with all nodes.
async fn works_again(fleet: &Fleet, name: &str, store: &RedlockStore) {
    eventually(&format!("{name}: it works again"), async || {
        let fresh = request(name, TTL);
        let works = granted(&store.acquire(&fresh).await);
        // The slowest of them may have it a little later.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let all = fleet.keys(name).len() == NODES;
        works && all & matches!(store.release(&fresh.key).await, Ok(ReleaseOutcome::Released))
    })
    .await;
    fleet.nothing_left(name, "after the heal").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_it_is_asked_for() {
    every_subset(async |fleet, store, subset, how, name| {
        let mine = request(&name, TTL);
        fleet.down(subset, how);
        let answer = timed(&name, store.acquire(&mine)).await;
        if majority_up(subset) {
            assert!(granted(&answer), "{name}: {answer:?}");
            assert_eq!(timed(&name, store.release(&mine.key)).await.unwrap(), ReleaseOutcome::Released);
        } else {
            assert!(is_down(&answer), "{name}: {answer:?}");
        }
        fleet.heal(how);
        fleet.nothing_left(&name, "after the request").await;
        works_again(fleet, &name, store).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn between_the_grant_and_its_renewal() {
    every_subset(async |fleet, store, subset, how, name| {
        let held = take(store, &request(&name, TTL)).await;
        fleet.down(subset, how);
        let answer = timed(&name, store.renew(std::slice::from_ref(&held))).await;
        if majority_up(subset) {
            assert_eq!(answer.unwrap(), [RenewOutcome::Renewed], "{name}");
        } else {
            // The outcome is unknown: the grant is neither lost nor renewed, and no other client gets the lock.
            assert!(is_down(&answer), "{name}: {answer:?}");
        }
        fleet.heal(how);
        eventually(&format!("{name}: it is renewed"), async || {
            matches!(store.renew(std::slice::from_ref(&held)).await.as_deref(), Ok([RenewOutcome::Renewed]))
        })
        .await;
        let rival = store.acquire(&request(&name, TTL)).await;
        assert!(!granted(&rival), "{name}: two hold it");
        assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released, "{name}");
        fleet.nothing_left(&name, "after the release").await;
        works_again(fleet, &name, store).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_it_is_released() {
    every_subset(async |fleet, store, subset, how, name| {
        let held = take(store, &request(&name, TTL)).await;
        fleet.down(subset, how);
        let answer = timed(&name, store.release(&held.key)).await;
        if majority_up(subset) {
            assert_eq!(answer.unwrap(), ReleaseOutcome::Released, "{name}");
        } else {
            assert!(is_down(&answer), "{name}: {answer:?}");
        }
        fleet.heal(how);
        // The caller does not release again: the store sends the release to the nodes that missed it.
        fleet.nothing_left(&name, "after the release").await;
        works_again(fleet, &name, store).await;
    })
    .await;
}
