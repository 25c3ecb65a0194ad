//! A client that is connected to the leader sees what a client of a follower was told.

mod common;

use common::open;
use lockkeeper_core::{Expect, WriteOutcome};
use lockkeeper_testkit::laws::{give_back, name, request, take};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

/// A leader sends a commit to its followers before it applies the commit itself, and answers `sync` without waiting
/// for that. So a view that followed a grant sometimes did not contain the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_the_leader_sees_what_a_follower_has_reported() {
    let Ok(cluster) = servers::zookeeper_cluster(3, ZooKeeperOptions::default()) else { return };
    let leader = cluster.leader();
    let follower = (leader + 1) % 3;
    let [at_leader, at_follower] =
        [leader, follower].map(|node| format!("{}/reads?create=yes", cluster.nodes()[node].addr()));
    let (reader, writer) = (open(at_leader).await, open(at_follower).await);
    let (mut stale, mut stale_records) = (0, 0);
    for round in 0..400_u32 {
        let grant = take(&writer, &request("x")).await;
        let view = reader.inspect(&name("x")).await.unwrap();
        stale += u32::from(view.is_none_or(|view| view.held[0].fence != grant.fence));
        give_back(&writer, &grant.key).await;
        let value = round.to_string().into_bytes();
        let written = writer.write(&name("r"), &value, Expect::Any, None).await.unwrap();
        assert!(matches!(written, WriteOutcome::Written(_)));
        let read = reader.read(&name("r")).await.unwrap();
        stale_records += u32::from(read.is_none_or(|record| record.value != value));
    }
    assert_eq!((stale, stale_records), (0, 0), "stale views and records of 400 each");
}
