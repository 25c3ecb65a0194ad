//! From the release by one client to the grant at another that waits for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::Store;
use lockkeeper_postgres::{Options, PostgresStore};
use lockkeeper_testkit::ratio::hand_off;
use tokio_postgres::Client;

use crate::bare::{self, Words};
use crate::median;

pub async fn run(addr: SocketAddr, rounds: usize) {
    // Side by side: what else the machine does hits both.
    let (mut trips, mut hand_offs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let client = bare::connect(addr).await;
    let words = Words::of(&client, true).await;
    let (here, there) = (open(addr).await, open(addr).await);
    for _ in 0..rounds {
        let trip = round_trip(&client, &words, 100).await;
        let ours = hand_off(&*here, &there, 50).await;
        ratios.push(ours.as_secs_f64() / trip.as_secs_f64());
        trips.push(trip);
        hand_offs.push(ours);
    }
    println!("hand-off: bare round trip (one update) {:.1?}, ours {:.1?}", median(trips), median(hand_offs));
    println!("  ratio to the round trip {:.2} (goal: at most 3)", median(ratios));
}

async fn round_trip(client: &Client, words: &Words, times: usize) -> Duration {
    let mut trips = Vec::new();
    for turn in 0..times {
        let attempt = (turn as u128).to_be_bytes();
        let began = Instant::now();
        words.take(client, "trip", &attempt).await;
        trips.push(began.elapsed());
        let began = Instant::now();
        words.give(client, "trip", &attempt).await;
        trips.push(began.elapsed());
    }
    median(trips)
}

async fn open(addr: SocketAddr) -> Arc<dyn Store> {
    let options = Options::from_url(&format!("postgres://postgres@{addr}/postgres")).expect("an address");
    Arc::new(PostgresStore::open(options).await.expect("a store"))
}
