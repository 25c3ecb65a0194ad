//! What the members of a group do when the store was unreachable for longer than their ttl.
#![cfg(feature = "memory")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::partitions::{PartitionChange, PartitionMember};
use lockkeeper::{Clock, Error, Lockkeeper, Result, Store, SystemClock};
use lockkeeper_core::{
    AcquireOutcome, DeleteOutcome, Expect, Grant, LockName, LockRequest, Page, Record, RecordPage, Records,
    ReleaseOutcome, RenewOutcome, RequestKey, WriteOutcome,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_memory::MemoryStore;

const TTL: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_secs(1);
const COUNT: u32 = 8;

/// The client of one member, which cannot reach the store, or cannot write to it, for a while.
struct FailingClient {
    store: Arc<dyn Store>,
    unreachable: AtomicBool,
    read_only: AtomicBool,
    /// The lock that it cannot acquire.
    refused: Option<LockName>,
    /// No release is answered with success.
    keeps_locks: AtomicBool,
}

impl FailingClient {
    fn new(store: Arc<dyn Store>) -> FailingClient {
        let [unreachable, read_only, keeps_locks] = std::array::from_fn(|_| AtomicBool::new(false));
        FailingClient { store, unreachable, read_only, refused: None, keeps_locks }
    }

    fn reach(&self, writes: bool) -> Result<()> {
        if self.unreachable.load(SeqCst) || writes && self.read_only.load(SeqCst) {
            return Err(Error::Unavailable("an outage".into()));
        }
        Ok(())
    }
}

lockkeeper_testkit::forward_locks!(FailingClient, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.reach(true)?;
        if self.refused.as_ref().is_some_and(|name| request.key.names.iter().any(|other| other == name)) {
            return Err(Error::Unavailable("its node is unreachable".into()));
        }
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.reach(true)?;
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.reach(true)?;
        if self.keeps_locks.load(SeqCst) {
            return Err(Error::Unavailable("a release fails".into()));
        }
        self.store.release(key).await
    }
});

#[async_trait]
impl Records for FailingClient {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        self.reach(false)?;
        self.store.read(key).await
    }
    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        self.reach(true)?;
        self.store.write(key, value, expect, ttl).await
    }
    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
        self.reach(true)?;
        self.store.delete(key, expect).await
    }
    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        self.reach(false)?;
        self.store.scan(prefix, page).await
    }
}

/// A group of two members, which give up what is revoked.
struct Group {
    clock: VirtualClock,
    clients: [Arc<FailingClient>; 2],
    keepers: [Lockkeeper; 2],
    owned: [Arc<Mutex<BTreeSet<u32>>>; 2],
    /// A client without faults.
    looks: Lockkeeper,
}

impl Group {
    async fn start(ttl: Duration, poll: Duration) -> Group {
        let clock = VirtualClock::default();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
        let client = || Arc::new(FailingClient::new(store.clone()));
        let clients = [client(), client()];
        let keeper = |client: &Arc<FailingClient>| {
            Lockkeeper::with_store(client.clone(), Arc::new(clock.clone()) as Arc<dyn Clock>)
        };
        let keepers = [keeper(&clients[0]), keeper(&clients[1])];
        let looks = Lockkeeper::with_store(store, Arc::new(clock.clone()) as Arc<dyn Clock>);
        let group = Group { clock, clients, keepers, owned: Default::default(), looks };
        for (i, name) in ["a", "b"].into_iter().enumerate() {
            let partitions = group.keepers[i].partitions("g", COUNT).member(name).ttl(ttl).poll(poll);
            let member = partitions.join().await.unwrap();
            tokio::spawn(work(member, group.owned[i].clone()));
        }
        group.until(|group| group.shares() == [4, 4]).await;
        // Each has read the heartbeats of the other.
        group.pass(ttl).await;
        group
    }

    fn shares(&self) -> [usize; 2] {
        [0, 1].map(|i| self.owned[i].lock().unwrap().len())
    }

    /// Time goes on, in steps that are short beside a poll.
    async fn pass(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            left = self.clock.step(left);
            for keeper in &self.keepers {
                keeper.quiesce().await;
            }
            // A turn for every task that a reply wakes, and for those that it wakes.
            for _ in 0..32 {
                tokio::task::yield_now().await;
            }
        }
    }

    async fn until(&self, is: impl Fn(&Group) -> bool) {
        for _ in 0..1000 {
            if is(self) {
                return;
            }
            self.pass(Duration::from_millis(100)).await;
        }
        panic!("it did not happen: {:?}", self.owned);
    }

    fn fail(&self, fault: impl Fn(&FailingClient) -> &AtomicBool, on: bool) {
        self.clients.iter().for_each(|client| fault(client).store(on, SeqCst));
    }

    /// The number of changes of the assignment, and the names of the members.
    async fn assignment(&self) -> (u64, Vec<String>) {
        let status = self.looks.partition_status("g").await.unwrap().expect("there is a group");
        (status.generation, status.members.into_iter().map(|member| member.name).collect())
    }
}

async fn work(mut member: PartitionMember, owned: Arc<Mutex<BTreeSet<u32>>>) {
    while let Some(change) = member.next().await {
        let Ok(PartitionChange::Owned(partition)) = change else { continue };
        let owned = owned.clone();
        tokio::spawn(async move {
            let number = partition.number();
            owned.lock().unwrap().insert(number);
            partition.revoked().await;
            owned.lock().unwrap().remove(&number);
        });
    }
}

/// The first member that reached the store again took the others for dead, because it had read no heartbeat for a ttl: it removed them
/// all, and each partition moved twice.
#[tokio::test]
async fn an_outage_longer_than_a_ttl_moves_no_partition() {
    let faults: [fn(&FailingClient) -> &AtomicBool; 2] = [|c| &c.unreachable, |c| &c.read_only];
    for (kind, fault) in faults.into_iter().enumerate() {
        // The record of the group lasts for three ttls.
        for lasts in [TTL * 2, TTL * 4] {
            let group = Group::start(TTL, POLL).await;
            let (before, had) =
                (group.assignment().await, group.owned.clone().map(|o| o.lock().unwrap().clone()));
            group.fail(fault, true);
            group.pass(lasts).await;
            assert_eq!(group.shares(), [0, 0], "the leases are over");
            group.fail(fault, false);
            group.until(|group| group.shares() == [4, 4]).await;
            group.pass(TTL * 2).await;
            assert_eq!(
                group.assignment().await,
                before,
                "fault {kind}, {lasts:?}: a living member was removed"
            );
            assert_eq!(group.owned.clone().map(|o| o.lock().unwrap().clone()), had);
        }
    }
}

/// A member that could not look for as long as a ttl must still find the dead ones, a ttl later.
#[tokio::test]
async fn a_member_that_died_in_an_outage_is_removed_a_ttl_later() {
    let group = Group::start(TTL, POLL).await;
    group.fail(|client| &client.unreachable, true);
    group.pass(TTL * 2).await;
    group.clients[0].unreachable.store(false, SeqCst);
    group.pass(TTL / 2).await;
    assert_eq!(group.assignment().await.1, ["a", "b"], "the silence of before the outage was counted");
    group.pass(TTL).await;
    assert_eq!(group.assignment().await.1, ["a"], "the dead member is still there");
    assert_eq!(group.shares()[0], 8);
}

/// A heartbeat left an eighth of a poll after the last step at the earliest, however short the ttl was: the members removed each other.
#[tokio::test]
async fn a_ttl_far_below_the_poll_keeps_the_living() {
    let group = Group::start(Duration::from_millis(100), POLL * 4).await;
    let before = group.assignment().await;
    for _ in 0..30 {
        group.pass(Duration::from_secs(1)).await;
        assert_eq!(group.assignment().await, before, "a living member was removed");
    }
}

/// The request for one partition had failed when another process took the member's name. The owner's task asked for the time of the next
/// request again and again, and never gave the thread back: on a runtime with one thread no task ran until the grace was over, so no work ended.
#[test]
fn a_member_that_ends_lets_its_users_finish() {
    let (send, finished) = std::sync::mpsc::channel();
    let work = async move {
        let store = Lockkeeper::open("memory:").await.unwrap().store().clone();
        let refused = Some(LockName::new("partition/g/0").unwrap());
        let client = Arc::new(FailingClient { refused, ..FailingClient::new(store.clone()) });
        let keeper = Lockkeeper::with_store(client, Arc::new(SystemClock));
        let options = |keeper: &Lockkeeper| {
            keeper
                .partitions("g", 2)
                .member("a")
                .poll(Duration::from_millis(200))
                .grace(Duration::from_secs(600))
        };
        let mut member = options(&keeper).join().await.unwrap();
        let Some(Ok(PartitionChange::Owned(partition))) = member.next().await else { panic!("it owns one") };
        // Another process takes its name.
        let other = Lockkeeper::with_store(store, Arc::new(SystemClock));
        let second = options(&other).join().await.unwrap();
        partition.revoked().await;
        // The pause after the failed request passes.
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(partition);
        while let Some(change) = member.next().await {
            drop(change);
        }
        drop(second);
        send.send(()).unwrap();
    };
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work);
    });
    finished.recv_timeout(Duration::from_secs(60)).expect("its users end their work, and the member ends");
}

/// A member that leaves waited for every release of its keeper, also for that of another lock, whose ttl may be a day.
#[tokio::test]
async fn a_member_leaves_although_the_release_of_another_lock_fails() {
    let clock = VirtualClock::default();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
    let client = Arc::new(FailingClient::new(store));
    let keeper = Lockkeeper::with_store(client.clone(), Arc::new(clock.clone()));
    let member = keeper.partitions("g", 1).member("a").ttl(TTL).poll(POLL).join().await.unwrap();
    let other = keeper.lock("other").ttl(Duration::from_secs(24 * 60 * 60)).acquire().await.unwrap();
    client.keeps_locks.store(true, SeqCst);
    drop(other);
    let left = tokio::spawn(member.leave());
    for _ in 0..TTL.as_secs() * 20 {
        clock.advance(Duration::from_millis(100));
        keeper.quiesce().await;
        for _ in 0..32 {
            tokio::task::yield_now().await;
        }
    }
    assert!(left.is_finished(), "it waits for the release of another lock");
    assert!(keeper.partition_status("g").await.unwrap().is_none_or(|status| status.members.is_empty()));
}

/// The owner could not stop all of its work: its partition has no next owner, not even itself, before the lease is over.
#[tokio::test]
async fn a_partition_that_is_left_to_expire_is_owned_again_when_its_lease_is_over() {
    let clock = VirtualClock::default();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
    let keeper = Lockkeeper::with_store(store, Arc::new(clock.clone()));
    let mut member = keeper.partitions("g", 1).member("a").ttl(TTL).poll(POLL).join().await.unwrap();
    let Some(Ok(PartitionChange::Owned(partition))) = member.next().await else { panic!("it owns it") };
    let (fence, began) = (partition.fence(), clock.now());
    partition.let_expire();
    let mut next = std::pin::pin!(member.next());
    let again = loop {
        keeper.quiesce().await;
        for _ in 0..32 {
            tokio::task::yield_now().await;
        }
        match tokio::time::timeout(Duration::ZERO, next.as_mut()).await {
            Ok(Some(Ok(PartitionChange::Owned(again)))) => break again,
            Ok(other) => panic!("it is owned again: {other:?}"),
            Err(_) => assert!(clock.now().since(began) < TTL * 4, "it has no owner any more"),
        }
        clock.advance(Duration::from_millis(100));
    };
    assert!(again.fence() > fence);
    assert!(clock.now().since(began) >= TTL, "it was released after {:?}", clock.now().since(began));
}
