//! Processes of other namespaces on the same machine.

mod common;

use std::time::Duration;

use common::{Contender, Dir, ask, name, open, take};
use lockkeeper_core::{Locks, Renewal};

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

#[must_use]
fn cannot_unshare() -> bool {
    common::without_root() || common::without("unshare", common::has("unshare"), "unshare (util-linux)")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_in_another_pid_namespace_is_not_taken_for_dead() {
    if cannot_unshare() {
        return;
    }
    let dir = Dir::new();
    let store = open(&dir.db());
    let apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let mut inside = Contender::start_in(&apart, &dir.db());
    assert!(inside.pid < 10, "it is not in a namespace of its own");
    let fence = Contender::fence(&inside.ask("take theirs"));
    // Its pid is somebody else's here, and the other way round.
    let busy = common::refused(&store, &ask("theirs")).await;
    assert_eq!(busy.held[0].fence.get(), fence);
    let mine = take(&store, &ask("mine")).await;
    assert_eq!(inside.ask("take mine"), "busy");
    assert_eq!(store.renew(&[mine]).await.unwrap(), [Renewal::Renewed]);
    // Waiting and waking need no pids.
    inside.tell("wait mine");
    common::in_line(&store, "mine", 1).await;
    store.break_lock(&name("mine"), "test").await.unwrap();
    Contender::fence(&inside.hear());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_namespace_shares_deadlines_and_is_noted() {
    if cannot_unshare() {
        return;
    }
    let dir = Dir::new();
    let store = open(&dir.db());
    let apart =
        ["unshare", "--time", "--fork", "--kill-child", "--boottime", "864000", "--monotonic", "864000"];
    let mut inside = Contender::start_in(&apart, &dir.db());
    assert!(inside.ask("notes").contains("time namespace"));
    assert!(!store.profile().notes.iter().any(|note| note.contains("time namespace")));
    take(&store, &ask("mine")).await;
    assert_eq!(inside.ask("take mine"), "busy", "ten days ahead, every lease would be over");
    Contender::fence(&inside.ask("take theirs 60000"));
    let busy = common::refused(&store, &ask("theirs")).await;
    assert!(busy.held[0].expires_in_ms <= 60_000, "{busy:?}");
    // Its waiters look well although their clock is far ahead.
    inside.tell("wait mine");
    common::in_line(&store, "mine", 1).await;
    let mut third = Contender::start(&dir.db());
    third.tell("wait mine");
    common::in_line(&store, "mine", 2).await;
    store.break_lock(&name("mine"), "test").await.unwrap();
    Contender::fence(&inside.hear());
    assert!(third.silent());
    // And a short lease of theirs ends for us too.
    Contender::fence(&inside.ask("take brief 100"));
    let end = async {
        while store.inspect(&name("brief")).await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    common::soon("a short lease ends", end).await;
}
