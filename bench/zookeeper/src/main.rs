//! The ZooKeeper store against its peer, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-zookeeper [ROUNDS]

mod zookeeper;

#[tokio::main]
async fn main() {
    zookeeper::run(lockkeeper_testkit::ratio::rounds(9)).await;
}
