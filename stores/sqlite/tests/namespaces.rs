//! Processes of other namespaces on the same machine.

mod common;

use std::time::Duration;

use common::{Contender, Dir, name, open, request, take};
use lockkeeper_core::{Locks, RenewOutcome};

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
    let fence = Contender::fence(&inside.request("take theirs"));
    // Its pid belongs to another process here, and the other way round.
    let busy = common::refused(&store, &request("theirs")).await;
    assert_eq!(busy.held[0].fence.get(), fence);
    let mine = take(&store, &request("mine")).await;
    assert_eq!(inside.request("take mine"), "busy");
    assert_eq!(store.renew(&[mine]).await.unwrap(), [RenewOutcome::Renewed]);
    // Waiting and waking need no pids.
    inside.tell("wait mine");
    common::wait_for_waiters(&store, "mine", 1).await;
    store.break_lock(&name("mine"), "test").await.unwrap();
    Contender::fence(&inside.hear());
}

/// `-v locks.db:/c/locks.db` of a container: the database is shared, and its log and its locks are not. Both sides were
/// granted the same lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_mounted_without_its_directory_is_refused() {
    if cannot_unshare() {
        return;
    }
    let (dir, inside) = (Dir::new(), Dir::new());
    let store = open(&dir.db());
    let held = take(&store, &request("jobs")).await;
    std::fs::write(inside.db(), "").unwrap();
    let mount = |from: &std::path::Path, to: &std::path::Path| {
        format!("mount --bind {} {} && exec \"$0\" \"$@\"", from.display(), to.display())
    };
    let alone = mount(&dir.db(), &inside.db());
    let said = Contender::begin(&["unshare", "--mount", "sh", "-c", &alone], &inside.db()).hear();
    assert!(said.starts_with("error unsupported") && said.contains("Share the directory"), "{said}");
    assert_eq!(std::fs::read_dir(inside.path()).unwrap().count(), 1, "something was made beside it");
    // With its directory it is the same set of locks.
    let whole = mount(dir.path(), inside.path());
    let mut there = Contender::start_in(&["unshare", "--mount", "sh", "-c", &whole], &inside.db());
    assert_eq!(there.request("take jobs"), "busy");
    store.release(&held.key).await.unwrap();
    assert!(Contender::fence(&there.request("take jobs")) > held.fence.get());
}

/// LXC and systemd-nspawn mount a boot id of their own over the kernel's. The container took the file for one of
/// another boot, and removed all locks.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_masks_the_boot_id_leaves_the_locks_of_others_alone() {
    if cannot_unshare() {
        return;
    }
    let dir = Dir::new();
    let store = open(&dir.db());
    let mine = take(&store, &request("mine")).await;
    let mask = dir.path().join("boot_id");
    std::fs::write(&mask, "11111111-2222-4333-8444-555555555555\n").unwrap();
    let mount =
        format!("mount --bind {} /proc/sys/kernel/random/boot_id && exec \"$0\" \"$@\"", mask.display());
    let masked = ["unshare", "--mount", "sh", "-c", &mount];
    let mut inside = Contender::start_in(&masked, &dir.db());
    assert_eq!(inside.request("take mine"), "busy");
    assert!(inside.request("findings").contains("masks the identity of the boot"));
    assert_eq!(store.renew(std::slice::from_ref(&mine)).await.unwrap(), [RenewOutcome::Renewed]);
    // And the other way round, also for a process that comes later.
    let theirs = Contender::fence(&inside.request("take theirs"));
    for store in [&store, &open(&dir.db())] {
        assert_eq!(common::refused(store, &request("theirs")).await.held[0].fence.get(), theirs);
    }
    assert_eq!(inside.request("take mine"), "busy");
    assert_eq!(inside.request("release"), "AlreadyGone");
    drop(inside);

    // It still knows another boot by a clock that stands before the last write.
    drop(store);
    let file = rusqlite::Connection::open(dir.db()).unwrap();
    file.execute("UPDATE state SET boot = 'another', written_at = written_at + 3600000000000", []).unwrap();
    drop(file);
    let mut inside = Contender::start_in(&masked, &dir.db());
    assert!(Contender::fence(&inside.request("take mine")) > theirs);
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
    assert!(inside.request("findings").contains("time namespace"));
    assert!(!store.profile().findings.iter().any(|finding| finding.text.contains("time namespace")));
    take(&store, &request("mine")).await;
    assert_eq!(inside.request("take mine"), "busy", "ten days ahead, every lease would be over");
    Contender::fence(&inside.request("take theirs 60000"));
    let busy = common::refused(&store, &request("theirs")).await;
    assert!(busy.held[0].expires_in_ms <= 60_000, "{busy:?}");
    // Its waiters look well although their clock is far ahead.
    inside.tell("wait mine");
    common::wait_for_waiters(&store, "mine", 1).await;
    let mut third = Contender::start(&dir.db());
    third.tell("wait mine");
    common::wait_for_waiters(&store, "mine", 2).await;
    store.break_lock(&name("mine"), "test").await.unwrap();
    Contender::fence(&inside.hear());
    assert!(third.silent());
    // And a short lease of theirs ends for us too.
    Contender::fence(&inside.request("take brief 100"));
    let end = async {
        while store.inspect(&name("brief")).await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    common::soon("a short lease ends", end).await;
}
