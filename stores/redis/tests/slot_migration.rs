//! A slot stays on its way between two nodes for longer than a ttl. The guards of its locks survive, and releases and breaks work,
//! wherever the keys of a lock are meanwhile.

mod common;

use std::time::Duration;

use common::{Client, keeper, open, tell};
use futures_util::StreamExt;
use futures_util::future::join_all;
use lockkeeper::{Guard, Lockkeeper};
use lockkeeper_core::{
    AcquireOutcome, Error, EventKind, Fence, LockRequest, Mode, ReleaseOutcome, RenewOutcome,
};
use lockkeeper_testkit::laws::{eventually, join_queue, name, owner, refused, request, soon, take, with};
use lockkeeper_testkit::servers::{self, RedisCluster, RedisOptions, Skip};

const TTL: Duration = Duration::from_secs(3);
/// Longer than any ttl here.
const LONG: Duration = Duration::from_secs(600);

/// Which keys of the locks of a slot have moved.
#[derive(Clone, Copy, Debug)]
enum Moved {
    Nothing,
    /// The lock keys, and not what belongs to them.
    LockKeys,
    /// All but the lock keys.
    OtherKeys,
    Holds,
    Ends,
    /// The hash of the requests of each process that waits.
    Requests,
    Everything,
}

const MOVES: [Moved; 6] =
    [Moved::Nothing, Moved::LockKeys, Moved::OtherKeys, Moved::Holds, Moved::Ends, Moved::Everything];

impl Moved {
    fn includes(self, key: &str) -> bool {
        let ours = key.starts_with("lockkeeper:");
        match self {
            Moved::Nothing => false,
            Moved::LockKeys => !ours,
            Moved::OtherKeys => ours,
            Moved::Holds => key.contains(":holds:"),
            Moved::Ends => key.contains(":ends:"),
            Moved::Requests => key.contains(":client:"),
            Moved::Everything => true,
        }
    }

    /// Moves them, as an operator's tool does: a key at a time.
    fn apply(self, cluster: &RedisCluster, slot: u16, from: usize, to: usize) {
        let port = cluster.addrs()[to].port().to_string();
        let keys = tell(cluster.addrs()[from], &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"]);
        for key in keys.lines().filter(|key| self.includes(key)) {
            tell(cluster.addrs()[from], &["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
        }
    }
}

async fn client_of(cluster: &RedisCluster) -> Client {
    open(&format!("redis+cluster://{}", cluster.addrs()[0])).await
}

/// One guard of each kind, with the name after its hash tag.
async fn guards(keeper: &Lockkeeper, tag: &str) -> Vec<(&'static str, Guard)> {
    let lock = |text: &str| keeper.lock(format!("{{{tag}}}/{text}")).ttl(TTL);
    let all = keeper.lock_all([format!("{{{tag}}}/first"), format!("{{{tag}}}/second")]).ttl(TTL);
    let me = owner();
    let requests = [
        ("plain", lock("plain")),
        ("shared", lock("shared").shared()),
        ("shared", lock("shared").shared()),
        ("permits", lock("permits").permits(2)),
        ("permits", lock("permits").permits(2)),
        ("owned", lock("owned").owner(me)),
        ("owned", lock("owned").owner(me)),
        ("delayed", lock("delayed").lock_delay(LONG)),
        ("kept", lock("kept").min_hold(LONG)),
        ("first", all),
    ];
    let mut guards = Vec::new();
    for (kind, request) in requests {
        guards.push((kind, request.acquire().await.unwrap()));
    }
    guards
}

/// Every guard outlives two ttls of a migration, and is released in it; what it held is free for others when the slot has moved,
/// and its fence is behind theirs.
async fn guards_survive(cluster: Result<RedisCluster, Skip>, options: &str, watched: bool) {
    let Ok(cluster) = cluster else { return };
    let one = open(&format!("redis+cluster://{}{options}", cluster.addrs()[0])).await;
    let hasty = open(&format!("redis+cluster://{}?timeout=300ms", cluster.addrs()[0])).await;
    let watch = if watched { Some(one.watch("").await.unwrap()) } else { None };
    let keeper = keeper(&one);
    let mut moves = Vec::new();
    for moved in MOVES {
        let tag = format!("{moved:?}");
        let guards = guards(&keeper, &tag).await;
        let slot = cluster.slot_of(&format!("lock:{{{tag}}}/plain"));
        let from = cluster.node_of_slot(slot);
        let to = (from + 1) % 3;
        let migration = cluster.begin_migration(slot, to);
        moved.apply(&cluster, slot, from, to);
        moves.push((tag, guards, migration));
    }
    tokio::time::sleep(2 * TTL).await;
    let text = |tag: &str, kind: &str| format!("{{{tag}}}/{kind}");
    let requests =
        moves.iter().flat_map(|(tag, guards, _)| guards.iter().map(move |(kind, _)| text(tag, kind)));
    let hasty = &hasty;
    join_all(requests.map(|text| async move {
        let second = soon("a request ends", hasty.acquire(&request(&text))).await;
        assert!(!matches!(second, Ok(AcquireOutcome::Granted(_))), "a second holder of {text}: {second:?}");
    }))
    .await;
    let lost = |guard: &Guard| (!guard.is_held()).then(|| guard.loss_reason());
    for (tag, guards, _) in &moves {
        let lost: Vec<_> = guards.iter().filter_map(|(kind, guard)| Some((kind, lost(guard)?))).collect();
        assert!(lost.is_empty(), "{tag}: guards were lost: {lost:?}");
    }
    for (tag, guards, migration) in moves {
        let mut fences: Vec<(&str, Fence)> = Vec::new();
        for (kind, guard) in guards {
            fences.push((kind, guard.fence()));
            let released = soon("a release ends", guard.release()).await;
            assert!(matches!(released, Ok(ReleaseOutcome::Released)), "{tag}: {kind}: {released:?}");
        }
        cluster.finish_migration(migration);
        for (kind, fence) in fences {
            let text = text(&tag, kind);
            if kind == "kept" {
                refused(&one, &request(&text)).await;
                continue;
            }
            let grant = take(&one, &request(&text)).await;
            assert!(grant.fence > fence, "{tag}: the fence of {kind} goes back");
            assert_eq!(one.release(&grant.key).await.unwrap(), ReleaseOutcome::Released);
            let left = one.inspect(&name(&text)).await.unwrap();
            assert!(left.is_none(), "{tag}: left behind: {left:?}");
        }
    }
    drop(watch);
}

#[tokio::test(flavor = "multi_thread")]
async fn guards_outlive_a_long_migration_and_are_released_in_it() {
    guards_survive(servers::redis_cluster(3), "", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn guards_that_are_watched_outlive_a_long_migration() {
    guards_survive(servers::redis_cluster(3), "", true).await;
}

/// A renewal counts once a replica has it, wherever the key is: the command that waits goes to the node to which the server sends
/// the renewal.
#[tokio::test(flavor = "multi_thread")]
async fn guards_whose_replicas_are_waited_for_outlive_a_long_migration() {
    let cluster = servers::redis_cluster_with_replicas(3, RedisOptions::default());
    guards_survive(cluster, "?wait_replicas=1", false).await;
}

/// A co-holder that stays is not harmed by one that is released, or whose time is over, while the slot is on its way.
#[tokio::test(flavor = "multi_thread")]
async fn a_co_holder_stays_when_another_is_released_in_a_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let (one, two) = (client_of(&cluster).await, client_of(&cluster).await);
    for moved in MOVES {
        let text = format!("{{co{moved:?}}}/shared");
        let shared = |ttl| with(common::ask_for(&text, ttl), |request| request.mode = Mode::Shared);
        let (stays, goes) = (take(&one, &shared(LONG)).await, take(&two, &shared(LONG)).await);
        let slot = cluster.slot_of(&format!("lock:{text}"));
        let from = cluster.node_of_slot(slot);
        let to = (from + 1) % 3;
        let migration = cluster.begin_migration(slot, to);
        moved.apply(&cluster, slot, from, to);
        assert_eq!(
            soon("a release", two.release(&goes.key)).await.unwrap(),
            ReleaseOutcome::Released,
            "{moved:?}"
        );
        let again = soon("a release", two.release(&goes.key)).await.unwrap();
        assert_eq!(again, ReleaseOutcome::AlreadyGone, "{moved:?}");
        assert_eq!(common::renew(&two, &goes).await, RenewOutcome::Lost, "{moved:?}");
        assert_eq!(common::renew(&one, &stays).await, RenewOutcome::Renewed, "{moved:?}");
        cluster.finish_migration(migration);
        assert_eq!(refused(&two, &request(&text)).await.held.len(), 1, "{moved:?}");
        assert_eq!(common::renew(&one, &stays).await, RenewOutcome::Renewed, "{moved:?}");
        assert_eq!(one.release(&stays.key).await.unwrap(), ReleaseOutcome::Released, "{moved:?}");
        take(&two, &request(&text)).await;
    }
}

/// A waiter whose slot is on its way leaves the queue when it gives up, and one that stays is let in when the slot has moved.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_let_in_after_a_long_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let (one, two) = (client_of(&cluster).await, client_of(&cluster).await);
    for moved in MOVES {
        let text = format!("{{wait{moved:?}}}/plain");
        let held = take(&one, &request(&text)).await;
        let waiting = join_queue(&two, &request(&text), 1).await;
        let gives_up = request(&text);
        let given_up = join_queue(&two, &gives_up, 2).await;
        let slot = cluster.slot_of(&format!("lock:{text}"));
        let from = cluster.node_of_slot(slot);
        let to = (from + 1) % 3;
        let migration = cluster.begin_migration(slot, to);
        moved.apply(&cluster, slot, from, to);
        given_up.abort();
        _ = given_up.await;
        soon("a waiter leaves", two.release(&gives_up.key)).await.unwrap();
        assert_eq!(
            soon("a release", one.release(&held.key)).await.unwrap(),
            ReleaseOutcome::Released,
            "{moved:?}"
        );
        cluster.finish_migration(migration);
        let grant = lockkeeper_testkit::laws::granted(waiting).await;
        assert!(grant.fence > held.fence, "{moved:?}");
        assert_eq!(two.release(&grant.key).await.unwrap(), ReleaseOutcome::Released);
        eventually("nothing is left", || async { two.inspect(&name(&text)).await.unwrap().is_none() }).await;
    }
}

/// A break works too: the holder is lost, a lock-delay follows, and the next grant has a higher fence.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_broken_in_a_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let (one, two) = (client_of(&cluster).await, client_of(&cluster).await);
    for moved in MOVES {
        let text = |kind: &str| format!("{{break{moved:?}}}/{kind}");
        let plain = take(&one, &request(&text("plain"))).await;
        let shared = take(&one, &with(request(&text("shared")), |request| request.mode = Mode::Shared)).await;
        let delayed = take(&one, &with(request(&text("delayed")), |request| request.lock_delay = LONG)).await;
        let names = [text("first"), text("second")];
        let both = take(&one, &lockkeeper_testkit::laws::request_all(&[&names[0], &names[1]])).await;
        let slot = cluster.slot_of(&format!("lock:{}", text("plain")));
        let from = cluster.node_of_slot(slot);
        let to = (from + 1) % 3;
        let migration = cluster.begin_migration(slot, to);
        moved.apply(&cluster, slot, from, to);
        let mut broken = Vec::new();
        for (kind, grant) in [("plain", plain), ("shared", shared), ("delayed", delayed), ("first", both)] {
            let fence = soon("a break ends", two.break_lock(&name(&text(kind)), "in the way")).await;
            let fence = fence.unwrap_or_else(|error| panic!("{moved:?}: {kind}: {error:?}"));
            assert!(fence > grant.fence, "{moved:?}: {kind}");
            assert_eq!(common::renew(&one, &grant).await, RenewOutcome::Lost, "{moved:?}: {kind}");
            broken.push((kind, fence));
        }
        cluster.finish_migration(migration);
        broken.push(("second", broken[3].1));
        for (kind, fence) in broken {
            if kind == "delayed" {
                let kept_out = two.acquire(&request(&text(kind))).await;
                assert!(matches!(kept_out, Ok(AcquireOutcome::Busy(_))), "{moved:?}: {kept_out:?}");
            } else {
                assert!(take(&two, &request(&text(kind))).await.fence > fence, "{moved:?}: {kind}");
            }
        }
    }
}

/// While its slot is on its way, a free lock is not granted: none of its nodes could see another holder.
#[tokio::test(flavor = "multi_thread")]
async fn a_free_lock_is_not_granted_in_a_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=300ms", cluster.addrs()[0])).await;
    let slot = cluster.slot_of("lock:orders/42");
    let migration = cluster.begin_migration(slot, (cluster.node_of_slot(slot) + 1) % 3);
    let answer = soon("a request ends", store.acquire(&request("orders/42"))).await;
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    cluster.finish_migration(migration);
    take(&store, &request("orders/42")).await;
}

/// A revoke works too: the holder gets the reason at its next renewal, in the migration as well, and its release frees the lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_revoked_in_a_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let (one, two) = (client_of(&cluster).await, client_of(&cluster).await);
    for moved in MOVES {
        let text = |kind: &str| format!("{{revoke{moved:?}}}/{kind}");
        let plain = take(&one, &request(&text("plain"))).await;
        let shared = || with(request(&text("shared")), |request| request.mode = Mode::Shared);
        let readers = [take(&one, &shared()).await, take(&two, &shared()).await];
        let names = [text("first"), text("second")];
        let both = take(&one, &lockkeeper_testkit::laws::request_all(&[&names[0], &names[1]])).await;
        let unmarked = take(&one, &request(&text("unmarked"))).await;
        let slot = cluster.slot_of(&format!("lock:{}", text("plain")));
        let from = cluster.node_of_slot(slot);
        let to = (from + 1) % 3;
        tell(cluster.addrs()[from], &["SET", &format!("lock:{}", text("foreign")), "theirs", "PX", "600000"]);
        let migration = cluster.begin_migration(slot, to);
        moved.apply(&cluster, slot, from, to);
        let revoke =
            async |kind: &str| soon("a revoke ends", two.revoke(&name(&text(kind)), "an upgrade")).await;
        let [first_reader, second_reader] = readers;
        for (kind, grants) in
            [("plain", vec![plain]), ("shared", vec![first_reader, second_reader]), ("first", vec![both])]
        {
            let fence = revoke(kind).await.unwrap_or_else(|error| panic!("{moved:?}: {kind}: {error:?}"));
            for grant in &grants {
                assert!(fence > grant.fence, "{moved:?}: {kind}");
                let renewal = common::renew(&one, grant).await;
                let revoked = matches!(&renewal, RenewOutcome::Revoked(reason) if &**reason == "an upgrade");
                assert!(revoked, "{moved:?}: {kind}: {renewal:?}");
            }
            revoke(kind).await.unwrap_or_else(|error| panic!("{moved:?}: {kind} once more: {error:?}"));
            for grant in grants {
                let released = soon("a release ends", one.release(&grant.key)).await;
                assert!(matches!(released, Ok(ReleaseOutcome::Released)), "{moved:?}: {kind}: {released:?}");
            }
        }
        let foreign = revoke("foreign").await;
        assert!(matches!(foreign, Err(Error::Unsupported(_))), "{moved:?}: {foreign:?}");
        revoke("free").await.unwrap_or_else(|error| panic!("{moved:?}: a free lock: {error:?}"));
        assert_eq!(common::renew(&one, &unmarked).await, RenewOutcome::Renewed, "{moved:?}");
        cluster.finish_migration(migration);
        for kind in ["plain", "shared", "first", "second"] {
            take(&two, &request(&text(kind))).await;
        }
        refused(&two, &request(&text("unmarked"))).await;
    }
}

/// A break or a release in a migration does not wait for replicas, as at any other time. Its step used to wait, and when a replica
/// was behind, the caller got *unavailable*, although the key was deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_migration_step_that_has_written_is_not_unavailable() {
    let Ok(cluster) = servers::redis_cluster_with_replicas(3, RedisOptions::default()) else { return };
    let options = "wait_replicas=1&timeout=1s";
    let store = open(&format!("redis+cluster://{}?{options}", cluster.addrs()[0])).await;
    let text = |kind: &str| format!("{{replicas}}/{kind}");
    let mut grants = Vec::new();
    for kind in ["broken", "released", "renewed"] {
        let asked = request(&text(kind));
        eventually("the replica acknowledges", || async { store.acquire(&asked).await.is_ok() }).await;
        grants.push(take(&store, &asked).await);
    }
    let slot = cluster.slot_of(&format!("lock:{}", text("broken")));
    let from = cluster.node_of_slot(slot);
    let migration = cluster.begin_migration(slot, (from + 1) % 3);
    cluster.nodes()[3 + from].pause();
    let broken = soon("a break ends", store.break_lock(&name(&text("broken")), "in the way")).await;
    assert!(broken.is_ok_and(|fence| fence > grants[0].fence));
    let released = soon("a release ends", store.release(&grants[1].key)).await;
    assert!(matches!(released, Ok(ReleaseOutcome::Released)), "{released:?}");
    let renewed = soon("a renewal ends", store.renew(&grants[2..])).await;
    let unknown = matches!(&renewed, Err(Error::Unknown(_)))
        || renewed.as_ref().is_ok_and(|outcomes| outcomes[..] == [RenewOutcome::Unknown]);
    assert!(unknown, "a renewal that no replica has: {renewed:?}");
    cluster.nodes()[3 + from].resume();
    cluster.finish_migration(migration);
}

/// While a client watches and another waits, all declared keys of a lock exist, so the node runs the script, which then finds the first
/// of the others missing. It has written nothing by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_finds_a_key_missing_in_a_migration_is_unavailable() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = client_of(&cluster).await;
    let hasty = open(&format!("redis+cluster://{}?timeout=300ms", cluster.addrs()[0])).await;
    let _watch = store.watch("").await.unwrap();
    let held = take(&store, &request("orders/42")).await;
    let waiter = join_queue(&store, &request("orders/42"), 1).await;
    let slot = cluster.slot_of("lock:orders/42");
    let migration = cluster.begin_migration(slot, (cluster.node_of_slot(slot) + 1) % 3);
    for wait in [lockkeeper_core::Wait::No, lockkeeper_core::Wait::For(Duration::from_millis(100))] {
        let asked = with(request("orders/42"), |request| request.wait = wait);
        let answer = soon("a request ends", hasty.acquire(&asked)).await;
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    }
    cluster.finish_migration(migration);
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    lockkeeper_testkit::laws::granted(waiter).await;
}

/// The node to which a slot moves dies with a part of the keys. The steps at the other node have written, and the caller used to get
/// *unavailable*, although the hold was gone.
#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_a_dead_node_cuts_short_in_a_migration_is_unknown() {
    let extra = vec![("cluster-require-full-coverage".to_owned(), "no".to_owned())];
    let options = RedisOptions { extra, ..RedisOptions::default() };
    let Ok(mut cluster) = servers::redis_cluster_with(3, options) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=1s", cluster.addrs()[0])).await;
    let text = |kind: &str| format!("{{cut}}/{kind}");
    let mut grants = Vec::new();
    for kind in ["released", "revoked", "broken"] {
        let shared = with(request(&text(kind)), |request| request.mode = Mode::Shared);
        grants.push(take(&store, &shared).await);
    }
    // The release finds the queue at the first node too, and goes on to the holds.
    let waiter = join_queue(&store, &request(&text("released")), 1).await;
    let slot = cluster.slot_of(&format!("lock:{}", text("broken")));
    let from = cluster.node_of_slot(slot);
    let to = (from + 1) % 3;
    let _migration = cluster.begin_migration(slot, to);
    Moved::Ends.apply(&cluster, slot, from, to);
    cluster.node_mut(to).kill9();
    let released = soon("a release ends", store.release(&grants[0].key)).await.map(drop);
    let revoked = soon("a revoke ends", store.revoke(&name(&text("revoked")), "why")).await.map(drop);
    let broken = soon("a break ends", store.break_lock(&name(&text("broken")), "why")).await.map(drop);
    for (what, answer) in [("release", released), ("revoke", revoked), ("break", broken)] {
        assert!(matches!(answer, Err(Error::Unknown(_))), "{what}: {answer:?}");
    }
    waiter.abort();
}

/// A waiter leaves while the slot migrates, and the node to which it moves is dead. The release first leaves a tombstone, whose key is
/// missing at the old node, so the dead node would have to take it: the release has done nothing, and its caller gets *unavailable*. So does
/// the release of a hold that finds no node for its first step.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_without_a_node_for_its_first_step_is_unavailable() {
    let extra = vec![("cluster-require-full-coverage".to_owned(), "no".to_owned())];
    let options = RedisOptions { extra, ..RedisOptions::default() };
    let Ok(mut cluster) = servers::redis_cluster_with(3, options) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=1s", cluster.addrs()[0])).await;
    let text = |kind: &str| format!("{{cut}}/{kind}");
    let free = take(&store, &request(&text("free"))).await;
    take(&store, &request(&text("held"))).await;
    let waits = request(&text("held"));
    let waiter = join_queue(&store, &waits, 1).await;
    let slot = cluster.slot_of(&format!("lock:{}", text("held")));
    let from = cluster.node_of_slot(slot);
    let to = (from + 1) % 3;
    let _migration = cluster.begin_migration(slot, to);
    Moved::Requests.apply(&cluster, slot, from, to);
    cluster.node_mut(to).kill9();
    let left = soon("a release ends", store.release(&waits.key)).await;
    assert!(matches!(left, Err(Error::Unavailable(_))), "{left:?}");
    let queue = tell(cluster.addrs()[from], &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"]);
    assert!(
        queue.lines().any(|key| key.contains(":queue:")),
        "the release has removed its queue entry: {queue}"
    );
    let released = soon("a release ends", store.release(&free.key)).await;
    assert!(matches!(released, Err(Error::Unavailable(_))), "{released:?}");
    waiter.abort();
}

/// All keys of a lock have moved, and some never existed: the old node redirects the request, and the new one refuses it until the slot
/// is its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_the_new_node_refuses_is_sent_again_until_the_slot_has_moved() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=60s", cluster.addrs()[0])).await;
    let before = take(&store, &request("orders/42")).await;
    assert_eq!(store.release(&before.key).await.unwrap(), ReleaseOutcome::Released);
    let slot = cluster.slot_of("lock:orders/42");
    let from = cluster.node_of_slot(slot);
    let to = (from + 1) % 3;
    let migration = cluster.begin_migration(slot, to);
    Moved::Everything.apply(&cluster, slot, from, to);
    let asked = tokio::spawn(async move { store.acquire(&request("orders/42")).await });
    let refusals = || {
        let errors = tell(cluster.addrs()[to], &["INFO", "errorstats"]);
        let count = |line: &str| line.strip_prefix("errorstat_TRYAGAIN:count=")?.parse::<usize>().ok();
        errors.lines().find_map(count).unwrap_or(0)
    };
    eventually("the new node has refused it twice", || async { refusals() >= 2 || asked.is_finished() })
        .await;
    assert!(!asked.is_finished(), "the first refusal ended the request: {:?}", asked.await);
    cluster.finish_migration(migration);
    let answer = soon("the request ends", asked).await.unwrap();
    let Ok(AcquireOutcome::Granted(grant)) = answer else { panic!("not granted: {answer:?}") };
    assert!(grant.fence > before.fence);
}

/// A client watches, so a script looks at more keys of a lock than it declares, and finds one missing. The next request of the same script
/// used to see that lock as free: the waiter at the front of its queue left it, and then the script failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_one_request_cannot_read_is_not_free_for_the_next_one_of_the_script() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = open(&format!("redis+cluster://{}?timeout=5s&poll=10s&claim=1m", cluster.addrs()[0])).await;
    // A plain hold: it was granted before a client watches.
    take(&store, &request("orders/42")).await;
    let _watch = store.watch("").await.unwrap();
    let first = with(request("orders/42"), |request| request.wait = lockkeeper_core::Wait::For(LONG));
    let waiter = join_queue(&store, &first, 1).await;
    let slot = cluster.slot_of("lock:orders/42");
    let from = cluster.node_of_slot(slot);
    let others = (0..20).map(|_| LockRequest { key: request("orders/42").key, ..first.clone() });
    let requests: Vec<_> = others.chain([first.clone()]).collect();
    // Tombstones that refuse no request: a script reads them before the locks.
    let keys = tell(cluster.addrs()[from], &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100"]);
    let flag = keys.lines().find_map(|key| key.strip_suffix("watched")).expect("a client watches");
    tell(cluster.addrs()[from], &["SET", &format!("{flag}released"), "1"]);
    for request in &requests {
        let tombstone = format!("{flag}released:{}", request.key.attempt.to_hex());
        tell(cluster.addrs()[from], &["SET", &tombstone, "-1"]);
    }
    let migration = cluster.begin_migration(slot, (from + 1) % 3);
    // The server holds back the first scripts, so the other requests share one. The last of them is that of the waiter.
    tell(cluster.addrs()[from], &["CLIENT", "PAUSE", "60000", "WRITE"]);
    let mut answers = std::pin::pin!(join_all(requests.iter().map(|request| store.acquire(request))));
    assert!(futures_util::poll!(answers.as_mut()).is_pending());
    tell(cluster.addrs()[from], &["CLIENT", "UNPAUSE"]);
    for answer in soon("the requests end", answers).await {
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    }
    waiter.abort();
    cluster.finish_migration(migration);
}

/// A revoke needs memory for its reason. A full server used to refuse it in a migration, after its watchers had heard that it happened.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_revokes_a_lock_in_a_migration() {
    let Ok(cluster) = servers::redis_cluster(3) else { return };
    let store = client_of(&cluster).await;
    let grant = take(&store, &request("orders/42")).await;
    let mut watch = store.watch("").await.unwrap();
    let slot = cluster.slot_of("lock:orders/42");
    let from = cluster.node_of_slot(slot);
    let migration = cluster.begin_migration(slot, (from + 1) % 3);
    for setting in [["maxmemory-policy", "noeviction"], ["maxmemory", "1"]] {
        tell(cluster.addrs()[from], &["CONFIG", "SET", setting[0], setting[1]]);
    }
    let fence = soon("a revoke ends", store.revoke(&name("orders/42"), "an upgrade")).await.unwrap();
    let event = soon("the watcher is notified", watch.next()).await;
    assert!(
        matches!(&event, Some(Ok(event)) if matches!(event.kind, EventKind::Revoked { .. })),
        "{event:?}"
    );
    assert!(fence > grant.fence);
    let renewal = common::renew(&store, &grant).await;
    assert!(matches!(&renewal, RenewOutcome::Revoked(reason) if &**reason == "an upgrade"), "{renewal:?}");
    cluster.finish_migration(migration);
}
