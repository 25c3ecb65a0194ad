//! From the release by one client to the grant at another that waits for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::Store;
use lockkeeper_redis::{Options, RedisStore};
use lockkeeper_testkit::ratio::hand_off;
use redis::aio::MultiplexedConnection;
use rslock::LockManager;

use crate::median;

pub async fn run(addr: SocketAddr, rounds: usize) {
    // Side by side: what else the machine does hits both.
    let (mut trips, mut hand_offs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let client = redis::Client::open(format!("redis://{addr}")).expect("an address");
    let connection = client.get_multiplexed_async_connection().await.expect("a connection");
    let (here, there) = (open(addr).await, open(addr).await);
    for _ in 0..rounds {
        let trip = round_trip(connection.clone(), 200).await;
        let ours = hand_off(&*here, &there, 50).await;
        ratios.push(ours.as_secs_f64() / trip.as_secs_f64());
        trips.push(trip);
        hand_offs.push(ours);
    }
    let (trip, ours, polled) = (median(trips), median(hand_offs), polled(addr, rounds).await);
    println!("hand-off: bare round trip {trip:.1?}, ours {ours:.1?}, rslock (polls) {polled:.1?}");
    println!("  ratio to the round trip {:.2} (goal: at most 3)", median(ratios));
    println!("  ratio to polling {:.0} (goal: at least 20)", polled.as_secs_f64() / ours.as_secs_f64());
}

async fn round_trip(mut connection: MultiplexedConnection, times: usize) -> Duration {
    let mut trips = Vec::new();
    for _ in 0..times {
        let began = Instant::now();
        let mut get = redis::cmd("SET");
        get.arg("trip").arg("value").arg("PX").arg(30_000);
        get.query_async::<()>(&mut connection).await.expect("an answer");
        trips.push(began.elapsed());
    }
    median(trips)
}

async fn open(addr: SocketAddr) -> Arc<dyn Store> {
    let options = Options::from_url(&format!("redis://{addr}")).expect("an address");
    Arc::new(RedisStore::open(options).await.expect("a store"))
}

async fn polled(addr: SocketAddr, times: usize) -> Duration {
    // As it comes, but patient enough.
    let manager = || {
        let mut manager = LockManager::new(vec![format!("redis://{addr}")]);
        manager.set_retry(100, Duration::from_millis(200));
        manager
    };
    let (here, there) = (manager(), manager());
    let mut times_taken = Vec::new();
    for turn in 0..times {
        let held = here.lock("polled", Duration::from_secs(30)).await.expect("a lock");
        let there2 = there.clone();
        let waiter = tokio::spawn(async move {
            let lock = there2.lock("polled", Duration::from_secs(30)).await.expect("a lock");
            let when = Instant::now();
            there2.unlock(&lock).await;
            when
        });
        // Somewhere in the middle of its sleep, as a release is.
        tokio::time::sleep(Duration::from_millis(300 + 37 * (turn as u64 % 7))).await;
        let began = Instant::now();
        here.unlock(&held).await;
        times_taken.push(waiter.await.expect("it ends well") - began);
    }
    median(times_taken)
}
