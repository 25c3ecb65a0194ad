//! Work that is split into partitions, each owned by one member of a group: no lock per job is needed.

mod heartbeat;
mod member;
mod ownership;
mod partition;
mod record;
mod status;

use std::time::Duration;

use lockkeeper_core::assignment::{PARTITIONS_MAX, WEIGHT_MAX};
use lockkeeper_core::{Attempt, Error, Holder, LockName, Purpose, Result, limits};
use lockkeeper_host::{host_name, random_128};

use super::cas_record::CasRecord;
use super::{name_of, need_records};
use crate::keeper::Lockkeeper;
pub use lockkeeper_core::assignment::partition_of;
pub use member::{PartitionChange, PartitionMember};
pub use partition::Partition;
use record::{GroupRecord, MemberRecord};
pub use status::{GroupStatus, MemberStatus, PartitionOwner, PartitionStatus};

/// The most bytes of a member's name.
pub const MEMBER_BYTES: usize = 128;

/// A group of workers that share `count` partitions. Nothing happens before [`Partitions::join`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// use lockkeeper::partitions::PartitionChange;
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// # async fn work(_: u32, _: lockkeeper::Fence) {}
/// let mut member = keeper.partitions("orders", 4).member("worker-1").join().await?;
/// # let mut started = Vec::new();
/// while let Some(change) = member.next().await {
///     let PartitionChange::Owned(partition) = change? else { continue };
///     // One task per partition. Dropping the partition, here at the end of the task, gives it up.
///     let task = tokio::spawn(async move {
///         tokio::select! {
///             () = partition.revoked() => {}                              // finish what is under way
///             _ = partition.run(work(partition.number(), partition.fence())) => {}
///         }
///     });
/// #   started.push(task);
/// #   if started.len() == 4 { break }
/// }
/// member.leave().await
/// # }
/// ```
///
/// Every process that calls this with the same group and the same count gets its share of the partitions, by its weight. A key
/// belongs to the partition [`partition_of`]`(key, count)`. Each owned partition is a lock, `partition/GROUP/NUMBER`, whose fence is
/// the partition's epoch: the group's record says who *should* own what, and the lock alone says who *does*.
#[must_use = "nothing happens before join()"]
#[derive(Clone, Debug)]
pub struct Partitions {
    keeper: Lockkeeper,
    group: String,
    count: u32,
    member: Option<String>,
    weight: u32,
    ttl: Duration,
    grace: Duration,
    poll: Duration,
    purpose: Purpose,
}

impl Lockkeeper {
    /// The partitions of the group called `group`, which has 1 to [`KEY_BYTES`](crate::KEY_BYTES) bytes. All members must give the same
    /// `count`, 1 to 1024. The first call reports a bad name or count.
    pub fn partitions(&self, group: impl Into<String>, count: u32) -> Partitions {
        Partitions {
            keeper: self.clone(),
            group: group.into(),
            count,
            member: None,
            weight: 1,
            ttl: Duration::from_secs(30),
            grace: Duration::from_secs(10),
            poll: Duration::from_secs(1),
            purpose: Purpose::Efficiency,
        }
    }

    /// The members and partitions of a group as they are now. `None`: no member has joined it, or all have left.
    pub async fn partition_status(&self, group: impl AsRef<str>) -> Result<Option<GroupStatus>> {
        let names = PartitionNames::new(self, group.as_ref())?;
        status::read(self, &names).await
    }
}

impl Partitions {
    /// The name of this member: 1 to 128 bytes. By default the host's name with random digits, new for each process.
    ///
    /// A process that joins with the name of an earlier member takes its place and its partitions. So a worker with a fixed name that is
    /// started again within its ttl gets the same partitions, and no other worker has to give one up. Two processes that run with one
    /// name take the place from each other: the older one ends with [`Error::Lost`].
    pub fn member(mut self, name: impl Into<String>) -> Self {
        self.member = Some(name.into());
        self
    }

    /// The share of this member, relative to the others: 1 to 10,000, by default 1.
    pub fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// How long the others wait for this member when it is silent, before they take its partitions: 100 ms to 24 h, 30 s by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long a partition may be finished after it was revoked; then its guard is lost. 10 s by default, 24 h at most.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How often the member reads the group's record: every second by default, give or take a quarter; at least 10 ms. Events of the
    /// partitions' locks make it read earlier on a store that can be watched, but for Redis Cluster, where watching is expensive.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Refuses a store that can forget a lock or repeat a fence.
    pub fn for_correctness(mut self) -> Self {
        self.purpose = Purpose::Correctness;
        self
    }

    /// Joins the group, and returns the handle that yields the partitions as this member comes to own them. Needs a tokio runtime
    /// that runs until the member has left.
    ///
    /// [`Error::Invalid`] if the group has another count of partitions; nothing is written then, nor for any other bad input.
    /// Dropping the future may leave a member behind that the others remove after a ttl.
    pub async fn join(self) -> Result<PartitionMember> {
        let names = self.check()?;
        let record = self.member_record();
        member::join(self, names, record).await
    }

    fn check(&self) -> Result<PartitionNames> {
        let names = PartitionNames::new(&self.keeper, &self.group)?;
        self.keeper.profile().allows(self.purpose)?;
        check_count(self.count)?;
        if !(1..=WEIGHT_MAX).contains(&self.weight) {
            return Err(Error::invalid(format!(
                "the weight is {}: 1 to {WEIGHT_MAX} are possible",
                self.weight
            )));
        }
        if self.ttl < limits::TTL_MIN || self.ttl > limits::TTL_MAX {
            return Err(Error::invalid(format!("the ttl is {:?}: 100ms to 24h are possible", self.ttl)));
        }
        if self.grace > limits::TTL_MAX {
            return Err(Error::invalid(format!("the grace is {:?}: at most 24h are possible", self.grace)));
        }
        if self.poll < Duration::from_millis(10) {
            return Err(Error::invalid(format!(
                "the poll interval is {:?}: at least 10ms are needed",
                self.poll
            )));
        }
        if let Some(name) = &self.member {
            if name.is_empty() || name.len() > MEMBER_BYTES {
                let len = name.len();
                return Err(Error::invalid(format!(
                    "the member's name has {len} bytes: 1 to {MEMBER_BYTES} are possible"
                )));
            }
            Holder::new("", 0, Some(name.clone()))?;
        }
        Ok(names)
    }

    fn member_record(&self) -> MemberRecord {
        let id = Attempt::from_bytes(random_128()).to_hex()[..16].to_owned();
        let host = host_name();
        let random_name = || {
            let host: String = host.chars().filter(|c| !c.is_control()).take(24).collect();
            format!("{host}-{}", &id[..8])
        };
        MemberRecord {
            name: self.member.clone().unwrap_or_else(random_name),
            weight: self.weight,
            ttl_ms: millis(self.ttl),
            grace_ms: millis(self.grace),
            beat: 0,
            leaving: false,
            pid: std::process::id(),
            since_us: self.keeper.0.clock.wall(),
            id,
            host,
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn check_count(count: u32) -> Result<()> {
    if (1..=PARTITIONS_MAX).contains(&count) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{count} partitions: 1 to {PARTITIONS_MAX} are possible; take several times as many as you will ever have workers"
    )))
}

/// The record and the locks of a group.
#[derive(Clone, Debug)]
struct PartitionNames {
    group: String,
    record: LockName,
}

impl PartitionNames {
    fn new(keeper: &Lockkeeper, group: &str) -> Result<PartitionNames> {
        need_records(keeper, "a group of partitions")?;
        Ok(PartitionNames { group: group.to_owned(), record: name_of("partition-group/", group)? })
    }

    /// The beginning of the names of the partitions' locks. The rest is a number without a slash, so no two groups share a lock.
    fn prefix(&self) -> String {
        format!("partition/{}/", self.group)
    }

    fn lock(&self, partition: u32) -> String {
        format!("{}{partition}", self.prefix())
    }

    fn cas_record(&self, keeper: &Lockkeeper) -> CasRecord {
        CasRecord::new(keeper, self.record.clone())
    }

    /// Refuses a group with another count.
    fn check_count(&self, record: &GroupRecord, count: u32) -> Result<()> {
        if record.count == count {
            return Ok(());
        }
        let (group, there, ttl) = (&self.group, record.count, record.ttl());
        Err(Error::invalid(format!(
            "the group {group:?} has {there} partitions, and this call says {count}: a key would belong to two of them. Give the same \
             count everywhere; to change it, stop all members, and wait for {ttl:?} if one of them was killed"
        )))
    }
}
