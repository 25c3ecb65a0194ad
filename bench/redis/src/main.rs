//! The Redis store against its peers, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-redis [ROUNDS]

mod handoff;
mod limits;
mod throughput;

use lockkeeper_testkit::ratio::{median, median_ratio, rounds};
use lockkeeper_testkit::servers::{self, RedisOptions};

#[tokio::main]
async fn main() {
    let rounds = rounds(15);
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let info = servers::redis_call(server.addr(), &["INFO", "server"]).expect("the server answers");
    let version = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap_or("?");
    println!("Redis {version}, {rounds} rounds, medians");
    throughput::run(server.addr(), rounds).await;
    limits::run(server.addr(), rounds).await;
    handoff::run(server.addr(), rounds).await;
}
