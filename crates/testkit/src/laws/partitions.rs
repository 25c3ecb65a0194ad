//! Work split into partitions, each owned by one member of a group.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use lockkeeper::partitions::{Partition, PartitionChange, PartitionMember, Partitions};
use lockkeeper::{Error, Fence, Page};
use tokio::runtime::Runtime;

use super::register::has_records;
use super::*;

/// The number of partitions in these laws.
const COUNT: u32 = 8;
/// Reads the record often: a law waits for real on most stores.
const POLL: Duration = Duration::from_millis(50);

/// Whether the store has records; if not, a group must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let refused = keeper.partitions("g", COUNT).join().await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

fn group(keeper: &Lockkeeper, name: &str) -> Partitions {
    keeper.partitions("g", COUNT).member(name).ttl(LONG).grace(LONG).poll(POLL)
}

/// The state that all workers of a law share, and the violations.
#[derive(Default)]
struct Board {
    owned: Mutex<BTreeMap<(String, u32), Arc<Partition>>>,
    /// Every grant: number, fence, member.
    grants: Mutex<Vec<(u32, Fence, String)>>,
    revoked: Mutex<Vec<(String, u32)>>,
    ended: Mutex<BTreeMap<String, Option<Error>>>,
    wrong: Mutex<Vec<String>>,
}

impl Board {
    /// Works as `name`: takes what the member is given. A worker that obeys drops a partition when it is revoked.
    async fn work(self: Arc<Self>, name: String, mut member: PartitionMember, obeys: bool) {
        let mut last = None;
        while let Some(change) = member.next().await {
            match change {
                Ok(PartitionChange::Owned(partition)) => self.own(&name, partition),
                Ok(PartitionChange::Revoked { number, .. }) => {
                    self.revoked.lock().unwrap().push((name.clone(), number));
                    if obeys {
                        self.owned.lock().unwrap().remove(&(name.clone(), number));
                    }
                }
                Err(error) => last = Some(error),
            }
        }
        self.ended.lock().unwrap().insert(name, last);
    }

    fn own(&self, name: &str, partition: Partition) {
        let (number, fence) = (partition.number(), partition.fence());
        let mut owned = self.owned.lock().unwrap();
        for ((other, _), theirs) in owned.iter().filter(|((_, n), _)| *n == number) {
            if theirs.is_held() && partition.is_held() {
                self.wrong
                    .lock()
                    .unwrap()
                    .push(format!("partition {number} is owned by {other} and by {name}"));
            }
        }
        self.grants.lock().unwrap().push((number, fence, name.to_owned()));
        owned.insert((name.to_owned(), number), Arc::new(partition));
    }

    fn of(&self, name: &str) -> BTreeSet<u32> {
        let owned = self.owned.lock().unwrap();
        let held = owned.iter().filter(|((owner, _), partition)| owner == name && partition.is_held());
        held.map(|((_, number), _)| *number).collect()
    }

    fn drop_all(&self, name: &str) {
        self.owned.lock().unwrap().retain(|(owner, _), _| owner != name);
    }

    fn assert_right(&self) {
        let wrong = self.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "owned twice: {wrong:?}");
    }
}

/// Joins and works in the background.
async fn start(board: &Arc<Board>, partitions: Partitions, name: &str, obeys: bool) {
    let member = soon("a member joins", partitions.join()).await.unwrap();
    tokio::spawn(board.clone().work(name.to_owned(), member, obeys));
}

/// The same on a runtime of its own: dropping that is the death of the worker, whose keeper lives on and releases nothing of what is
/// leaked.
async fn start_apart(board: &Arc<Board>, partitions: Partitions, name: &str) -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (board, name) = (board.clone(), name.to_owned());
    let joined = runtime.spawn(async move {
        let member = partitions.join().await.unwrap();
        tokio::spawn(board.work(name, member, true));
    });
    soon("a member joins", joined).await.unwrap();
    runtime
}

/// Waits until each of these has as many partitions as that, and all together have all.
async fn shared<H: Harness>(h: &H, board: &Board, what: &str, shares: &[(&str, usize)]) {
    let complete = || async {
        shares.iter().all(|(name, count)| board.of(name).len() == *count)
            || !board.wrong.lock().unwrap().is_empty()
    };
    while_time_passes(h, eventually(what, complete)).await;
    board.assert_right();
}

pub async fn every_partition_is_owned_by_one_member<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let board = Arc::<Board>::default();
    start(&board, group(&keepers[0], "a"), "a", true).await;
    shared(&h, &board, "one member owns all", &[("a", 8)]).await;
    start(&board, group(&keepers[1], "b"), "b", true).await;
    shared(&h, &board, "two members share", &[("a", 4), ("b", 4)]).await;
    start(&board, group(&keepers[2], "c").weight(2), "c", true).await;
    shared(&h, &board, "the third has twice as many", &[("a", 2), ("b", 2), ("c", 4)]).await;
    let status = keepers[0].partition_status("g").await.unwrap().expect("there is a group");
    assert_eq!((status.count, status.members.len(), status.moving().count()), (8, 3, 0), "{status:?}");
    for partition in &status.partitions {
        let owner = partition.owner.as_ref().expect("every partition has an owner");
        assert_eq!(Some(&owner.member), partition.assigned.as_ref());
        assert!(board.of(&owner.member).contains(&partition.number), "{status:?}");
    }
    let named = |name: &str| status.members.iter().find(|member| member.name == name).unwrap().clone();
    assert_eq!((named("c").weight, named("c").owned, named("a").assigned), (2, 4, 2));
    // A store that is asked by the lock agrees.
    refused(&h.client().await, &request("partition/g/0")).await;
}

pub async fn a_join_takes_no_more_than_its_share<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let board = Arc::<Board>::default();
    let mut before: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    let shares = [vec![8], vec![4, 4], vec![3, 3, 2], vec![2, 2, 2, 2]];
    for (name, shares) in ["a", "b", "c", "d"].into_iter().zip(shares) {
        start(&board, group(&keeper, name), name, true).await;
        let complete = || async {
            let mut now: Vec<usize> =
                ["a", "b", "c", "d"].map(|name| board.of(name).len()).into_iter().collect();
            now.sort_unstable_by(|a, b| b.cmp(a));
            now.retain(|share| *share > 0);
            now == shares
        };
        while_time_passes(&h, eventually("each has its share", complete)).await;
        for (other, had) in &before {
            let more: Vec<u32> = board.of(other).difference(had).copied().collect();
            assert!(more.is_empty(), "{name} joined, and {more:?} moved to {other}, where it had not to be");
        }
        before.insert(name, BTreeSet::new());
        before = before.keys().map(|name| (*name, board.of(name))).collect();
    }
}

pub async fn an_owner_that_drains_keeps_the_next_one_out<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let board = Arc::<Board>::default();
    start(&board, group(&a, "a"), "a", false).await;
    shared(&h, &board, "one member owns all", &[("a", 8)]).await;
    start(&board, group(&b, "b"), "b", true).await;
    let told = || async { board.revoked.lock().unwrap().len() == 4 };
    while_time_passes(&h, eventually("the old owner is told first", told)).await;
    let revoked: Vec<u32> = board.revoked.lock().unwrap().iter().map(|(_, number)| *number).collect();
    // While it finishes its work the partitions stay its own.
    h.pass(POLL * 4).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(board.of("b").is_empty(), "the next owner started while the old one was draining");
    board.assert_right();
    for number in &revoked {
        let partition = board.owned.lock().unwrap()[&("a".to_owned(), *number)].clone();
        assert!(partition.is_held() && partition.is_revoked(), "it is told, and still its own");
        soon("the news is there", partition.revoked()).await;
    }
    let status = b.partition_status("g").await.unwrap().unwrap();
    assert_eq!(status.moving().map(|p| p.number).collect::<BTreeSet<_>>(), revoked.iter().copied().collect());
    board.owned.lock().unwrap().retain(|(_, number), _| !revoked.contains(number));
    shared(&h, &board, "the next owner starts after the release", &[("a", 4), ("b", 4)]).await;
}

pub async fn a_grace_that_is_over_ends_the_old_owner_first<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let board = Arc::<Board>::default();
    // The next owner is patient, and revokes no lock within this law: the old owner's member alone ends its guards. The old owner keeps its
    // handles, so the locks are free when their leases are over.
    start(&board, group(&a, "a").ttl(SHORT * 2).grace(POLL * 4), "a", false).await;
    shared(&h, &board, "one member owns all", &[("a", 8)]).await;
    let before: Vec<Arc<Partition>> = board.owned.lock().unwrap().values().cloned().collect();
    start(&board, group(&b, "b"), "b", true).await;
    let ended = || async { before.iter().filter(|partition| !partition.is_held()).count() >= 4 };
    while_time_passes(&h, eventually("the old owner's guards end with its grace", ended)).await;
    for partition in before.iter().filter(|partition| !partition.is_held()) {
        let why = soon("a guard that ended says why", partition.lost()).await.to_string();
        assert!(
            why.contains("the grace to finish is over"),
            "the old owner was not ended by its grace: {why}"
        );
    }
    shared(
        &h,
        &board,
        "the next owner starts when the lease of the stuck one is over",
        &[("a", 4), ("b", 4)],
    )
    .await;
    let revoked = board.revoked.lock().unwrap().clone();
    assert!(
        revoked.iter().filter(|(name, _)| name == "a").count() >= 4,
        "the old owner was not told first: {revoked:?}"
    );
}

pub async fn epochs_grow_from_owner_to_owner<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let board = Arc::<Board>::default();
    start(&board, group(&a, "a"), "a", true).await;
    shared(&h, &board, "one member owns all", &[("a", 8)]).await;
    start(&board, group(&b, "b"), "b", true).await;
    shared(&h, &board, "two members share", &[("a", 4), ("b", 4)]).await;
    // Given up, and not revoked: it comes back with a new epoch.
    board.drop_all("a");
    shared(&h, &board, "what is given up comes back", &[("a", 4), ("b", 4)]).await;
    let mut newest: BTreeMap<u32, Fence> = BTreeMap::new();
    for (number, fence, member) in board.grants.lock().unwrap().iter() {
        let last = newest.insert(*number, *fence);
        assert!(
            last < Some(*fence),
            "an epoch is not newer: {fence} after {last:?}, of {number} by {member}"
        );
    }
}

pub async fn a_living_member_keeps_its_partitions<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let board = Arc::<Board>::default();
    // Long enough for a busy machine, and short enough to wait for it.
    let ttl = SHORT * 4;
    start(&board, group(&a, "a").ttl(ttl), "a", true).await;
    start(&board, group(&b, "b").ttl(ttl), "b", true).await;
    shared(&h, &board, "two members share", &[("a", 4), ("b", 4)]).await;
    let generation = a.partition_status("g").await.unwrap().unwrap().generation;
    let grants = board.grants.lock().unwrap().len();
    for _ in 0..32 {
        h.pass(ttl / 16).await;
        // On a clock that is turned the members need real time to write their heartbeats.
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let status = a.partition_status("g").await.unwrap().expect("the group of living members is there");
    assert_eq!(status.generation, generation, "a living member was taken for dead");
    assert_eq!(board.grants.lock().unwrap().len(), grants, "a partition of a living member was lost");
    // The members believe what the store has.
    let owned = status.partitions.iter().filter(|partition| partition.owner.is_some()).count();
    assert_eq!(owned, 8, "the lock of a living member's partition has expired");
}

pub async fn a_silent_member_is_replaced<H: Harness>(h: H) {
    let (dies, lives) = (h.keeper().await, h.keeper().await);
    if !has(&dies).await {
        return;
    }
    let (dead, board) = (Arc::<Board>::default(), Arc::<Board>::default());
    let runtime = start_apart(&dead, group(&dies, "dead").ttl(SHORT * 2), "dead").await;
    shared(&h, &dead, "one member owns all", &[("dead", 8)]).await;
    // It is stuck for ever: no heartbeats, and its thread goes on renewing the locks.
    runtime.shutdown_background();
    start(&board, group(&lives, "alive").grace(POLL), "alive", true).await;
    shared(&h, &board, "a silent member is replaced", &[("alive", 8)]).await;
    assert!(
        dead.of("dead").is_empty(),
        "the silent member still believes that it owns {:?}",
        dead.of("dead")
    );
    let status = lives.partition_status("g").await.unwrap().unwrap();
    assert_eq!(status.members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["alive"]);
}

pub async fn a_member_that_is_started_again_has_its_partitions_back<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let (dead, board) = (Arc::<Board>::default(), Arc::<Board>::default());
    start(&board, group(&keepers[0], "a"), "a", true).await;
    shared(&h, &board, "one member owns all", &[("a", 8)]).await;
    let runtime = start_apart(&dead, group(&keepers[1], "b"), "b").await;
    shared(&h, &dead, "each has its share", &[("b", 4)]).await;
    let had = dead.of("b");
    runtime.shutdown_background();
    // Its locks are free, and no member knows that it has gone.
    dead.drop_all("b");
    keepers[1].settle().await;
    h.pass(POLL * 4).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    start(&board, group(&keepers[2], "b"), "b", true).await;
    shared(&h, &board, "it has its share again", &[("a", 4), ("b", 4)]).await;
    assert_eq!(board.of("b"), had, "a restart moved partitions");
    assert_eq!(board.grants.lock().unwrap().len(), 8 + 4, "a restart moved partitions of others");
}

pub async fn a_second_process_takes_the_name_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let (old, new) = (Arc::<Board>::default(), Arc::<Board>::default());
    start(&old, group(&a, "w"), "w", true).await;
    shared(&h, &old, "one member owns all", &[("w", 8)]).await;
    start(&new, group(&b, "w"), "w", true).await;
    let ended = || async { old.ended.lock().unwrap().contains_key("w") };
    while_time_passes(&h, eventually("the older process is told", ended)).await;
    let told = old.ended.lock().unwrap()["w"].clone();
    assert!(matches!(told, Some(Error::Lost(_))), "why is not told: {told:?}");
    shared(&h, &new, "the newer process owns all", &[("w", 8)]).await;
    assert!(old.of("w").is_empty());
}

/// A member slept through three ttls while its keeper went on renewing its locks. The record expired, and the group was made anew with
/// another count. The member failed at every read without a word, and kept partitions that other members owned under other numbers.
pub async fn a_member_of_a_group_that_was_made_anew_ends<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let (old, new) = (Arc::<Board>::default(), Arc::<Board>::default());
    let runtime = start_apart(&old, group(&a, "a").ttl(SHORT), "a").await;
    shared(&h, &old, "one member owns all", &[("a", 8)]).await;
    let (sleeps, asleep) = tokio::sync::oneshot::channel();
    let (wake, woken) = std::sync::mpsc::channel::<()>();
    // The only thread of that runtime.
    runtime.spawn(async move {
        let _ = sleeps.send(());
        let _ = woken.recv();
    });
    asleep.await.unwrap();
    let store = h.client().await;
    let expired = || async { store.read(&name("partition-group/g")).await.unwrap().is_none() };
    while_time_passes(&h, eventually("the record of a silent group expires", expired)).await;
    start(&new, b.partitions("g", 3).member("b").ttl(LONG).grace(LONG).poll(POLL), "b", true).await;
    drop(wake);
    let ended = || async { old.ended.lock().unwrap().contains_key("a") };
    while_time_passes(&h, eventually("the member of the older group ends", ended)).await;
    let told = old.ended.lock().unwrap()["a"].clone();
    let why = |told: &Error| told.to_string().contains("has 3 partitions");
    assert!(matches!(&told, Some(told @ Error::Lost(_)) if why(told)), "why is not told: {told:?}");
    assert!(old.of("a").is_empty(), "it kept {:?}", old.of("a"));
    shared(&h, &new, "the newer group owns its partitions", &[("b", 3)]).await;
    runtime.shutdown_background();
}

pub async fn a_group_that_all_have_left_is_forgotten<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let mut members = Vec::new();
    for (keeper, name) in [(&a, "a"), (&b, "b")] {
        members.push(soon("a member joins", group(keeper, name).join()).await.unwrap());
    }
    // The partitions are in the stream of changes, and dropped with it.
    for member in members {
        soon("a member leaves", while_time_passes(&h, member.leave())).await.unwrap();
    }
    let store = h.client().await;
    for number in 0..COUNT {
        is_free(&store, &format!("partition/g/{number}")).await;
    }
    let forgotten = || async { store.read(&name("partition-group/g")).await.unwrap().is_none() };
    while_time_passes(&h, eventually("the group's record goes", forgotten)).await;
    assert_eq!(a.partition_status("g").await.unwrap(), None);
    assert!(store.list("partition", &Page::FIRST).await.unwrap().locks.is_empty(), "a lock is left");
    // Another count is fine now.
    let member = soon("a new group", a.partitions("g", 3).poll(POLL).join()).await.unwrap();
    soon("a member leaves", while_time_passes(&h, member.leave())).await.unwrap();
}

pub async fn bad_input_to_a_group_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let long = "x".repeat(lockkeeper::KEY_BYTES + 1);
    let bad = [
        keeper.partitions("", COUNT),
        keeper.partitions("a\nb", COUNT),
        keeper.partitions(&long, COUNT),
        keeper.partitions("g", 0),
        keeper.partitions("g", 1_000_000),
        group(&keeper, "a").weight(0),
        group(&keeper, "a").weight(10_001),
        group(&keeper, "a").ttl(Duration::from_millis(1)),
        group(&keeper, "a").grace(LONG * 1000),
        group(&keeper, "a").poll(Duration::ZERO),
        group(&keeper, ""),
        group(&keeper, "a\nb"),
        group(&keeper, &"x".repeat(129)),
    ];
    for bad in bad {
        let told = format!("{bad:?}");
        let refused = bad.join().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{told}: {refused:?}");
    }
    assert!(matches!(keeper.partition_status("").await, Err(Error::Invalid(_))));
    assert!(keeper.registers("", &Page::FIRST).await.unwrap().0.is_empty(), "something was written");
    // Another count would give a key two owners.
    let board = Arc::<Board>::default();
    start(&board, group(&keeper, "a"), "a", true).await;
    let refused = h.keeper().await.partitions("g", COUNT * 2).join().await;
    let why = |told: &Error| told.to_string().contains("has 8 partitions");
    assert!(
        matches!(&refused, Err(told @ Error::Invalid(_)) if why(told)),
        "another count was to be refused: {refused:?}"
    );
    assert_eq!(keeper.partition_status("g").await.unwrap().unwrap().members.len(), 1);
    // A record of another program is reported and not overwritten.
    keeper.register::<u64>("partition-group/f").update(|_| 7).await.unwrap();
    let refused = keeper.partitions("f", COUNT).join().await;
    let named = |told: &Error| told.to_string().contains("the record partition-group/f was");
    assert!(matches!(&refused, Err(told @ Error::Invalid(_)) if named(told)), "{refused:?}");
    assert_eq!(keeper.register::<u64>("partition-group/f").read().await.unwrap().unwrap().value, 7);
}
