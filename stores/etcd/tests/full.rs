//! A database without room.

mod common;

use common::open;
use futures_util::future::join_all;
use lockkeeper_core::{Acquired, Error, Release};
use lockkeeper_testkit::laws::{ask, give_back, is_free};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// Those that fill it are told that there is no room, and etcd has done what they asked for all the same: it looks at the room that is
/// left once more when it has written. Whoever was told so does not have the lock, so nobody has it. Giving back needs no room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_stays_of_what_was_refused() {
    let extra = vec!["--quota-backend-bytes=1000000".to_owned()];
    let Ok(server) = servers::etcd(EtcdOptions { extra, ..EtcdOptions::default() }) else { return };
    let fill = async |i: usize| {
        let store = open(server.addr()).await;
        let mut held = Vec::new();
        for n in 0.. {
            let text = format!("{i}/{n}/{}", "n".repeat(400));
            match store.acquire(&ask(&text)).await {
                Ok(Acquired::Granted(grant)) => held.push(grant),
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
            assert_eq!(give_back(store, &grant.claim).await, Release::Released);
        }
    }
}
