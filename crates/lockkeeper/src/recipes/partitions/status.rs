//! The view of a group from outside: its members, the owner of each partition, and what is moving.

use std::collections::BTreeMap;
use std::time::Duration;

use lockkeeper_core::{Fence, Page, Result, WallTime};
use serde::Serialize;

use super::record::{GroupRecord, MemberRecord};
use super::{PartitionNames, partition_of};
use crate::keeper::Lockkeeper;

/// A group of members and their partitions at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupStatus {
    /// The number of partitions.
    pub count: u32,
    /// Grows with every change of the assignment.
    pub generation: u64,
    /// The members, by name.
    pub members: Vec<MemberStatus>,
    /// The partitions, by number.
    pub partitions: Vec<PartitionStatus>,
}

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemberStatus {
    /// Its name.
    pub name: String,
    /// The host that it runs on.
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
    /// Its share, relative to the others.
    pub weight: u32,
    /// When it joined, by its own wall clock.
    #[serde(rename = "since_us")]
    pub since: WallTime,
    /// How long the others wait for it when it is silent.
    pub ttl_ms: u64,
    /// Whether it is leaving.
    pub leaving: bool,
    /// How many partitions the group assigns to it.
    pub assigned: u32,
    /// How many partitions it owns.
    pub owned: u32,
}

/// A partition of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartitionStatus {
    /// Its number.
    pub number: u32,
    /// The member that the group assigns it to. `None`: the group has no member that could take it.
    pub assigned: Option<String>,
    /// Its owner now. `None`: its lock is free.
    pub owner: Option<PartitionOwner>,
    /// Whether the member that it is assigned to does not own it yet.
    pub moving: bool,
}

/// The owner of a partition: the holder of its lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartitionOwner {
    /// The member's name.
    pub member: String,
    /// The host that it runs on.
    pub host: String,
    /// Its process on that host.
    pub pid: u32,
    /// The partition's epoch.
    pub fence: Fence,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: WallTime,
    /// For how much longer, if the owner does not renew the lease.
    pub expires_in_ms: u64,
}

impl GroupStatus {
    /// The partition that `key` belongs to.
    pub fn partition_of(&self, key: impl AsRef<[u8]>) -> &PartitionStatus {
        &self.partitions[partition_of(key, self.count) as usize]
    }

    /// The partitions that are moving.
    pub fn moving(&self) -> impl Iterator<Item = &PartitionStatus> {
        self.partitions.iter().filter(|partition| partition.moving)
    }
}

impl MemberStatus {
    /// The member's ttl.
    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

impl PartitionOwner {
    /// Whether it is the process that is in the record, and not an earlier one with the same name.
    fn is(&self, member: &MemberRecord) -> bool {
        (&self.member, &self.host, self.pid) == (&member.name, &member.host, member.pid)
    }
}

/// Reads the record and the locks. They are read one after the other, so a partition that changes its owner meanwhile may look as if it
/// were moving.
pub(super) async fn read(keeper: &Lockkeeper, names: &PartitionNames) -> Result<Option<GroupStatus>> {
    let Some(snapshot) = names.cas_record(keeper).read().await? else { return Ok(None) };
    let record = GroupRecord::parse(&names.group, &snapshot.value)?;
    if record.members.is_empty() {
        return Ok(None);
    }
    let mut owners = owners(keeper, names).await?;
    let mut partitions = Vec::new();
    for number in 0..record.count {
        let (assigned, owner) = (record.owner(number), owners.remove(&number));
        let moving = match (assigned, &owner) {
            (Some(assigned), Some(owner)) => !owner.is(assigned),
            (assigned, owner) => assigned.is_some() || owner.is_some(),
        };
        let assigned = assigned.map(|member| member.name.clone());
        partitions.push(PartitionStatus { number, assigned, owner, moving });
    }
    let members = record.members.iter().map(|member| {
        let count = |has: &dyn Fn(&PartitionStatus) -> bool| {
            partitions.iter().filter(|partition| has(partition)).count() as u32
        };
        MemberStatus {
            name: member.name.clone(),
            host: member.host.clone(),
            pid: member.pid,
            weight: member.weight,
            since: member.since_us,
            ttl_ms: member.ttl_ms,
            leaving: member.leaving,
            assigned: count(&|partition| partition.assigned.as_ref() == Some(&member.name)),
            owned: count(&|partition| partition.owner.as_ref().is_some_and(|owner| owner.is(member))),
        }
    });
    let (members, count, generation) = (members.collect(), record.count, record.generation);
    Ok(Some(GroupStatus { count, generation, members, partitions }))
}

/// The holders of the partitions' locks.
async fn owners(keeper: &Lockkeeper, names: &PartitionNames) -> Result<BTreeMap<u32, PartitionOwner>> {
    let (prefix, mut page, mut owners) = (names.prefix(), Page::FIRST, BTreeMap::new());
    loop {
        let found = keeper.list(&prefix, &page).await?;
        for lock in found.locks {
            let number = lock.name.as_str().strip_prefix(&prefix).and_then(|number| number.parse().ok());
            let (Some(number), Some(held)) = (number, lock.held.into_iter().next()) else { continue };
            let owner = PartitionOwner {
                member: held.holder.label.unwrap_or_default(),
                host: held.holder.host,
                pid: held.holder.pid,
                fence: held.fence,
                since: held.since,
                expires_in_ms: held.expires_in_ms,
            };
            owners.insert(number, owner);
        }
        match found.next {
            Some(next) => page = Page::after(next),
            None => return Ok(owners),
        }
    }
}
