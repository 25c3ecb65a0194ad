//! A full database.

mod common;

use common::open;
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Error, ReleaseOutcome};
use lockkeeper_testkit::laws::{give_back, is_free, request};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// etcd rejects the requests that fill the database, and has applied them all the same: it checks the space again
/// after the write. A caller that got the error does not have the lock, so no client may have it. A release needs no
/// space.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_request_leaves_nothing() {
    let extra = vec!["--quota-backend-bytes=1000000".to_owned()];
    let Ok(server) = servers::etcd(EtcdOptions { extra, ..EtcdOptions::default() }) else { return };
    let fill = async |i: usize| {
        let store = open(server.addr()).await;
        let mut held = Vec::new();
        for n in 0.. {
            let text = format!("{i}/{n}/{}", "n".repeat(400));
            match store.acquire(&request(&text)).await {
                Ok(AcquireOutcome::Granted(grant)) => held.push(grant),
                Err(Error::Limited(_)) => return (store, held, text),
                other => panic!("{other:?}"),
            }
        }
        unreachable!("it is never full")
    };
    let filled = join_all((0..24).map(fill)).await;
    let other = open(server.addr()).await;
    for (_, _, text) in &filled {
        is_free(&other, text).await;
    }
    for (store, held, _) in &filled {
        for grant in held {
            assert_eq!(give_back(store, &grant.key).await, ReleaseOutcome::Released);
        }
    }
}
