//! The PostgreSQL store against bare tokio-postgres, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-postgres [ROUNDS]

mod bare;
mod handoff;
mod jobs;
mod throughput;

use lockkeeper_testkit::ratio::{median, median_ratio, rounds};
use lockkeeper_testkit::servers::{self, PostgresOptions};

#[tokio::main]
async fn main() {
    let rounds = rounds(15);
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let client = bare::connect(server.addr()).await;
    let version: String = client.query_one("SHOW server_version", &[]).await.expect("an answer").get(0);
    println!("PostgreSQL {version}, fsync on, {rounds} rounds, medians");
    bare::prepare(&client).await;
    jobs::run(server.addr(), rounds).await;
    throughput::run(server.addr(), 1, 0.85, rounds).await;
    throughput::run(server.addr(), 64, 2.0, rounds).await;
    handoff::run(server.addr(), rounds).await;
}
