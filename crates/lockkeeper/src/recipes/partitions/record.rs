//! The stored record of a group: its number of partitions, its members with their heartbeats, and the owner of each partition.

use std::time::Duration;

use lockkeeper_core::assignment::{PARTITIONS_MAX, WEIGHT_MAX, WeightedMember, assign};
use lockkeeper_core::{Error, Result, WallTime, limits};
use serde::{Deserialize, Serialize};

use crate::recipes::format;

/// The record stays for this many ttls after its last heartbeat.
const TTLS_KEPT: u32 = 3;

/// A member in the record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemberRecord {
    pub name: String,
    /// Random for each join: tells a process from an earlier one with the same name.
    pub id: String,
    pub weight: u32,
    pub ttl_ms: u64,
    pub grace_ms: u64,
    /// The number of the last heartbeat.
    pub beat: u64,
    /// Whether it gives up its partitions, and gets no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    pub host: String,
    pub pid: u32,
    /// When it joined, by its own wall clock.
    pub since_us: WallTime,
}

impl MemberRecord {
    pub fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupRecord {
    pub count: u32,
    /// Grows with every change of the assignment.
    pub generation: u64,
    /// Sorted by name.
    pub members: Vec<MemberRecord>,
    /// For each partition the index of its owner in `members`. The owner may still wait for the lock.
    owners: Vec<Option<usize>>,
}

impl GroupRecord {
    pub fn new(count: u32) -> GroupRecord {
        GroupRecord { count, generation: 0, members: Vec::new(), owners: vec![None; count as usize] }
    }

    pub fn parse(group: &str, bytes: &[u8]) -> Result<GroupRecord> {
        let key = format!("partition-group/{group}");
        let record: GroupRecord = format::decode(&key, bytes)?;
        let sound = (1..=PARTITIONS_MAX).contains(&record.count)
            && record.owners.len() == record.count as usize
            && record.owners.iter().flatten().all(|owner| *owner < record.members.len())
            && record.members.is_sorted_by(|a, b| a.name < b.name)
            && record.members.iter().all(|member| (1..=WEIGHT_MAX).contains(&member.weight));
        if sound {
            return Ok(record);
        }
        Err(Error::invalid(format!(
            "the record {key} was not written by this program (its parts do not fit together): use another name, or delete the record"
        )))
    }

    pub fn bytes(&self) -> Vec<u8> {
        format::encode(self)
    }

    /// How long the store keeps the record without a further heartbeat. A group without members is forgotten at once.
    pub fn ttl(&self) -> Duration {
        let longest = self.members.iter().map(MemberRecord::ttl).max();
        longest.map_or(limits::TTL_MIN, |ttl| ttl * TTLS_KEPT)
    }

    pub fn member(&self, name: &str) -> Option<&MemberRecord> {
        self.members.iter().find(|member| member.name == name)
    }

    /// The member that is to own the partition.
    pub fn owner(&self, partition: u32) -> Option<&MemberRecord> {
        self.owners.get(partition as usize).copied().flatten().map(|owner| &self.members[owner])
    }

    /// Adds the member, or replaces the one with its name, which keeps its partitions.
    pub fn put(&mut self, member: MemberRecord) {
        match self.members.binary_search_by(|other| other.name.as_str().cmp(&member.name)) {
            Ok(index) => self.members[index] = member,
            Err(index) => {
                self.members.insert(index, member);
                self.owners
                    .iter_mut()
                    .flatten()
                    .filter(|owner| **owner >= index)
                    .for_each(|owner| *owner += 1);
            }
        }
    }

    /// Removes the members for which `gone` is true.
    pub fn remove(&mut self, gone: impl Fn(&MemberRecord) -> bool) {
        let mut index = self.members.len();
        while index > 0 {
            index -= 1;
            if gone(&self.members[index]) {
                self.members.remove(index);
                for owner in &mut self.owners {
                    *owner = owner.filter(|o| *o != index).map(|o| if o > index { o - 1 } else { o });
                }
            }
        }
    }

    /// Assigns the partitions to the members that stay. Without a change of members nothing changes.
    pub fn rebalance(&mut self) {
        let staying: Vec<usize> = (0..self.members.len()).filter(|i| !self.members[*i].leaving).collect();
        let weighted: Vec<WeightedMember<'_>> = staying
            .iter()
            .map(|i| WeightedMember { name: &self.members[*i].name, weight: self.members[*i].weight })
            .collect();
        let previous: Vec<Option<usize>> =
            self.owners.iter().map(|owner| staying.iter().position(|i| Some(*i) == *owner)).collect();
        let next = assign(&weighted, &previous).into_iter().map(|owner| owner.map(|owner| staying[owner]));
        let next: Vec<Option<usize>> = next.collect();
        if next != self.owners {
            self.owners = next;
            self.generation += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str) -> MemberRecord {
        MemberRecord {
            name: name.into(),
            id: format!("{name}-1"),
            weight: 1,
            ttl_ms: 1000,
            grace_ms: 1000,
            beat: 0,
            leaving: false,
            host: "h".into(),
            pid: 1,
            since_us: WallTime::from_micros(1),
        }
    }

    fn owned(group: &GroupRecord, name: &str) -> Vec<u32> {
        (0..group.count).filter(|p| group.owner(*p).is_some_and(|owner| owner.name == name)).collect()
    }

    #[test]
    fn members_come_and_go_and_the_others_keep_what_they_have() {
        let mut group = GroupRecord::new(32);
        for name in ["m", "a", "z"] {
            group.put(member(name));
            group.rebalance();
        }
        assert_eq!((group.generation, group.ttl()), (3, Duration::from_secs(3)));
        let before = owned(&group, "z");
        group.put(member("b"));
        assert_eq!(owned(&group, "z"), before, "a new index is the same owner");
        group.rebalance();
        assert_eq!(owned(&group, "b").len(), 8);
        assert!(owned(&group, "z").iter().all(|p| before.contains(p)));
        let before = owned(&group, "m");
        group.remove(|member| member.name == "b");
        group.rebalance();
        assert!(before.iter().all(|p| owned(&group, "m").contains(p)));
        assert_eq!(GroupRecord::parse("g", &group.bytes()).unwrap(), group);
    }

    #[test]
    fn a_restarted_member_keeps_its_partitions_and_a_leaving_one_does_not() {
        let mut group = GroupRecord::new(8);
        ["a", "b"].iter().for_each(|name| group.put(member(name)));
        group.rebalance();
        let (before, generation) = (owned(&group, "a"), group.generation);
        group.put(MemberRecord { id: "another".into(), ..member("a") });
        group.rebalance();
        assert_eq!((owned(&group, "a"), group.generation), (before, generation));
        group.put(MemberRecord { leaving: true, ..member("a") });
        group.rebalance();
        assert_eq!((owned(&group, "a").len(), owned(&group, "b").len()), (0, 8));
        group.remove(|_| true);
        group.rebalance();
        assert!(group.owner(0).is_none());
        assert_eq!(group.ttl(), limits::TTL_MIN);
    }

    #[test]
    fn a_record_whose_parts_do_not_fit_is_refused() {
        let mut group = GroupRecord::new(4);
        group.put(member("a"));
        group.owners[3] = Some(1);
        assert!(matches!(GroupRecord::parse("g", &group.bytes()), Err(Error::Invalid(_))));
        for bytes in [&b"7"[..], b"{}", br#"{"v":1,"count":0,"generation":0,"members":[],"owners":[]}"#] {
            assert!(matches!(GroupRecord::parse("g", bytes), Err(Error::Invalid(_))));
        }
    }

    #[test]
    fn the_largest_group_fits_into_a_record() {
        let mut group = GroupRecord::new(PARTITIONS_MAX);
        (0..1000).for_each(|n| group.put(member(&format!("{n:0>128}"))));
        group.rebalance();
        assert!(group.bytes().len() < crate::register::VALUE_BYTES);
    }
}
