//! Silent servers.

mod common;

use common::{open, try_open};
use futures_util::future::join_all;
use lockkeeper_core::{Error, RenewOutcome};
use lockkeeper_testkit::laws::{eventually, request, soon, take};
use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Proxy};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// All requests need the same lease. If each asked for it after the one before had timed out, the last would fail
/// after minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_fail_together() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    let store = try_open(&format!("etcd://{}?timeout=2s", proxy.addr())).await.unwrap();
    proxy.hold(Direction::Replies);
    let requests: Vec<_> = (0..100).map(|i| request(&format!("x/{i}"))).collect();
    let outcome =
        soon("all calls end", join_all(requests.iter().map(|request| store.acquire(request)))).await;
    for outcome in outcome {
        assert!(matches!(outcome, Err(Error::Unknown(_) | Error::Unavailable(_))), "{outcome:?}");
    }
    proxy.heal();
}

/// Renewals are sent in several transactions, two at a time. If one of them has no reply, the others are renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_without_a_reply_is_unknown() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Http2);
    let store = open(proxy.addr()).await;
    let requests: Vec<_> = (0..500).map(|n| request(&format!("n{n}"))).collect();
    let held = join_all(requests.iter().map(|request| take(&store, request))).await;
    // When the third is sent, one of the first two has a reply.
    let fault = proxy.inject(Fault::at_request(3).cut_before_reply());
    let outcome = store.renew(&held).await.unwrap();
    assert!(fault.fired());
    let count = |what: RenewOutcome| outcome.iter().filter(|one| **one == what).count();
    let (renewed, unknown) = (count(RenewOutcome::Renewed), count(RenewOutcome::Unknown));
    assert!(renewed > 0 && unknown > 0 && renewed + unknown == held.len(), "{outcome:?}");
    eventually("all of them are renewed in the end", || async {
        store
            .renew(&held)
            .await
            .is_ok_and(|outcomes| outcomes.iter().all(|one| *one == RenewOutcome::Renewed))
    })
    .await;
}
