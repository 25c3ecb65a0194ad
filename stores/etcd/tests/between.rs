//! What happens between a look at a line and the step that is built on it.

mod common;

use std::pin::pin;

use common::{ctl, open, until_answered};
use lockkeeper_core::{Acquired, Error, Wait, limits};
use lockkeeper_testkit::laws::{
    SHORT, ask, ask_all, eventually, give_back, granted, is_free, name, owner, refused, soon, stand_in_line,
    take, with,
};
use lockkeeper_testkit::servers::{self, EtcdOptions};

/// An owner is about to enter once more what is taken away from it at that moment. With the fence that it had it would come after the
/// break, and pass for what was before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_enters_again_what_was_taken_away_meanwhile() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let owner = owner();
    let asks = || with(ask("x"), |ask| ask.owner = Some(owner));
    let held = take(&store, &asks()).await;
    // Somebody is known to be there: the next ask begins with a look.
    refused(&store, &ask("x")).await;
    let again = asks();
    let mut asked = pin!(store.acquire(&again));
    until_answered(asked.as_mut()).await;
    let broken = other.break_lock(&name("x"), "a test").await.unwrap();
    match soon("an answer", asked).await {
        Ok(Acquired::Granted(next)) => {
            assert!(next.fence > broken, "broken with {broken}, and entered again with {}", next.fence);
        }
        other => panic!("nobody is there any more: {other:?}"),
    }
    assert!(held.fence < broken);
    give_back(&store, &again.claim).await;
    is_free(&other, "x").await;
}

/// What stands at the base of the fences makes no sense, which is told only when the ask stands in line already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ask_that_fails_after_it_has_joined_does_not_stay() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let (store, other) = (open(server.addr()).await, open(server.addr()).await);
    let elsewhere = take(&other, &ask("elsewhere")).await;
    // Another place of the same process keeps the lease of the line alive.
    let waiter = stand_in_line(&store, &ask("elsewhere"), 1).await;
    let held = take(&other, &ask("x")).await;
    ctl(server.addr(), &["put", "lock//base", "nonsense"]);
    let told = store.acquire(&with(ask("x"), |ask| (ask.ttl, ask.wait) = (SHORT, Wait::Forever))).await;
    assert!(matches!(told, Err(Error::Invalid(_))), "{told:?}");
    eventually("only the holder is there", || async {
        ctl(server.addr(), &["get", "--prefix", "lock/x/", "--keys-only"]).split_whitespace().count() == 1
    })
    .await;
    ctl(server.addr(), &["del", "lock//base"]);
    give_back(&other, &held.claim).await;
    give_back(&other, &elsewhere.claim).await;
    let served = granted(waiter).await;
    give_back(&store, &served.claim).await;
}

/// As many names as there may be, entered once more at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_names_are_entered_again() {
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = open(server.addr()).await;
    let texts: Vec<String> = (0..limits::NAMES).map(|i| format!("x/{i}")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let owner = owner();
    let asks = || with(ask_all(&texts), |ask| ask.owner = Some(owner));
    let (first, second) = (take(&store, &asks()).await, take(&store, &asks()).await);
    assert_eq!(first.fence, second.fence);
    give_back(&store, &first.claim).await;
    give_back(&store, &second.claim).await;
}
