//! The etcd store against its peers, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-etcd [ROUNDS]

mod etcd;

#[tokio::main]
async fn main() {
    etcd::run(lockkeeper_testkit::ratio::rounds(9)).await;
}
