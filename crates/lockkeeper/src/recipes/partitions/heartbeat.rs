//! A member's side of the group's record: its heartbeats, and what it does about the silence of other members.
//!
//! All members write one record by compare-and-swap, so each change of the members and the assignment that follows from it are one
//! step. No two clocks are compared: a member is silent if a reader has seen no new heartbeat for the member's ttl, by the reader's own
//! boot-time clock. A reader that was paused, or could not reach the store, has not looked meanwhile, and the others may have been unable to
//! write a heartbeat: for this reader every silence begins anew. Otherwise the first member that reaches the store after an outage would
//! remove all others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Result};
use lockkeeper_host::sleep_until;
use tokio::sync::{Notify, watch};

use super::record::{GroupRecord, MemberRecord};
use super::{PartitionNames, Partitions};
use crate::recipes::backoff::{JitteredBackoff, random_part};
use crate::recipes::cas_record::{CasRecord, Retry, Snapshot};

/// The view of the heartbeat task, for the task that owns the partitions.
#[derive(Clone, Debug)]
pub(super) enum GroupView {
    /// The newest record, and this member is in it.
    Joined(Arc<GroupRecord>),
    /// The group has no place for this member any more, and why.
    Ended(Arc<str>),
}

/// The changes that the task with the partitions requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Joined,
    /// Give the partitions to the others.
    Leaving,
    /// All partitions are released: remove the member.
    Gone,
}

/// The task that keeps a member in the group's record.
pub(super) struct Heartbeat {
    options: Partitions,
    cas_record: CasRecord,
    names: PartitionNames,
    me: MemberRecord,
    /// When the last heartbeat was sent that was written.
    beat_at: BootInstant,
    /// When the store last answered all calls of a step.
    answered_at: BootInstant,
    seen: HashMap<String, SeenMember>,
    pub wake: Arc<Notify>,
    pub presence: watch::Receiver<Presence>,
    pub view: watch::Sender<GroupView>,
}

/// The newest heartbeat that was read of another member.
struct SeenMember {
    id: String,
    beat: u64,
    /// When the reply of the read came that had it first.
    since: BootInstant,
}

impl Heartbeat {
    /// Writes the member into the record, which is the join. The count is checked against every record that is read.
    pub async fn join(
        options: Partitions,
        names: PartitionNames,
        me: MemberRecord,
        presence: watch::Receiver<Presence>,
    ) -> Result<Heartbeat> {
        let cas_record = names.cas_record(&options.keeper);
        let clock = options.keeper.0.clock.clone();
        let mut backoff = JitteredBackoff::new(&*clock);
        let (beat_at, record) = loop {
            let old = cas_record.read().await?;
            let mut record = parse(&names, options.count, old.as_ref())?;
            record.put(me.clone());
            record.rebalance();
            let sent_at = clock.now();
            let written =
                cas_record.swap(old.as_ref(), &record.bytes(), Some(record.ttl()), Retry::Briefly).await?;
            if written.is_ok() {
                break (sent_at, record);
            }
            backoff.wait().await;
        };
        let view = watch::Sender::new(GroupView::Joined(Arc::new(record)));
        let (wake, seen, answered_at) = (Arc::new(Notify::new()), HashMap::new(), clock.now());
        Ok(Heartbeat { options, cas_record, names, me, beat_at, answered_at, seen, wake, presence, view })
    }

    /// Runs until the member is removed from the record, or the record has no place for it.
    pub async fn run(mut self) {
        let clock = self.options.keeper.0.clock.clone();
        let mut gone_since = None;
        let mut backoff = JitteredBackoff::new(&*clock);
        loop {
            let presence = *self.presence.borrow_and_update();
            let step = self.step(presence).await;
            if step.is_ok() {
                self.answered_at = clock.now();
            }
            match step {
                Ok(StepOutcome::Written) if presence == Presence::Gone => return,
                Ok(StepOutcome::Written) => backoff = JitteredBackoff::new(&*clock),
                Ok(StepOutcome::NoPlace(why)) => {
                    self.view.send_replace(GroupView::Ended(why.into()));
                    return;
                }
                Ok(StepOutcome::Conflict) => {
                    backoff.wait().await;
                    continue;
                }
                Err(error) if presence == Presence::Gone => {
                    // The others remove a silent member after its ttl in any case.
                    let since = *gone_since.get_or_insert(clock.now());
                    if clock.now().since(since) >= self.options.ttl {
                        tracing::info!(group = self.names.group, %error, "could not leave the group; the others remove this member");
                        return;
                    }
                }
                Err(error) => {
                    tracing::debug!(group = self.names.group, %error, "the group's record cannot be read or written; trying again");
                }
            }
            let poll = self.options.poll;
            let next = clock.now() + poll * 3 / 4 + random_part(poll / 2);
            let due = (self.beat_at + self.options.ttl / 3)
                .max(clock.now() + (poll / 8).min(self.options.ttl / 8))
                .min(next);
            tokio::select! {
                () = sleep_until(&*clock, due) => {}
                // Locks change together: one read for all of them.
                () = self.wake.notified() => sleep_until(&*clock, clock.now() + poll / 50).await,
                changed = self.presence.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Reads the record, and writes what is due.
    async fn step(&mut self, presence: Presence) -> Result<StepOutcome> {
        let clock = self.options.keeper.0.clock.clone();
        let asked = clock.now();
        let old = self.cas_record.read().await?;
        let mut record = match (&old, &*self.view.borrow()) {
            // It expired while no member could reach the store: the owners stay the same.
            (None, GroupView::Joined(last)) => GroupRecord::clone(last),
            // It stays so: the group was made anew with another count while this member was silent, or another program has written the
            // record. If the member kept its partitions, keys would have two owners.
            _ => match parse(&self.names, self.options.count, old.as_ref()) {
                Ok(record) => record,
                Err(Error::Invalid(why) | Error::Unsupported(why)) => return Ok(StepOutcome::NoPlace(why)),
                Err(error) => return Err(error),
            },
        };
        if record.member(&self.me.name).is_some_and(|member| member.id != self.me.id) {
            let (group, name) = (&self.names.group, &self.me.name);
            let why = format!("another process has joined {group:?} as {name:?}, and has its partitions now");
            return Ok(StepOutcome::NoPlace(why));
        }
        let before = record.clone();
        let silent = self.silent(&record, asked, clock.now());
        record.remove(|member| silent.contains(&member.name));
        let due = clock.now().since(self.beat_at) >= self.options.ttl / 3;
        match presence {
            Presence::Gone => record.remove(|member| member.name == self.me.name),
            _ => {
                let here = record.member(&self.me.name).is_some();
                self.me.leaving = presence == Presence::Leaving;
                self.me.beat += u64::from(due || !here);
                record.put(self.me.clone());
            }
        }
        record.rebalance();
        if record != before || old.is_none() {
            let sent_at = clock.now();
            let written = self
                .cas_record
                .swap(old.as_ref(), &record.bytes(), Some(record.ttl()), Retry::Briefly)
                .await?;
            if written.is_err() {
                return Ok(StepOutcome::Conflict);
            }
            for name in &silent {
                tracing::info!(
                    group = self.names.group,
                    member = name,
                    "removed a silent member from the group"
                );
            }
            if before.member(&self.me.name).is_none_or(|member| member.beat != self.me.beat) {
                self.beat_at = sent_at;
            }
        }
        self.view.send_replace(GroupView::Joined(Arc::new(record)));
        Ok(StepOutcome::Written)
    }

    /// The names of the members whose last heartbeat was first read a ttl before this read was sent, and who could have been heard since.
    fn silent(&mut self, record: &GroupRecord, asked: BootInstant, now: BootInstant) -> Vec<String> {
        // How long this member has not looked, beyond a poll. A heartbeat is written every third of a ttl, so a quarter more hides none.
        let blind_for = asked.since(self.answered_at + self.options.poll * 5 / 4);
        self.seen.retain(|name, _| record.member(name).is_some());
        let others = record.members.iter().filter(|member| member.name != self.me.name);
        let mut silent = Vec::new();
        for member in others {
            let fresh = || SeenMember { id: member.id.clone(), beat: member.beat, since: now };
            let seen = self.seen.entry(member.name.clone()).or_insert_with(fresh);
            if (&seen.id, seen.beat) != (&member.id, member.beat) || blind_for >= member.ttl() / 4 {
                *seen = fresh();
            } else if asked.since(seen.since) >= member.ttl() + member.ttl() / 50 + LEAST_SLACK {
                silent.push(member.name.clone());
            }
        }
        silent
    }
}

/// Clocks of two machines differ in rate; and a heartbeat travels.
const LEAST_SLACK: Duration = Duration::from_millis(50);

enum StepOutcome {
    Written,
    Conflict,
    /// The record has no place for this member, and why.
    NoPlace(String),
}

fn parse(names: &PartitionNames, count: u32, old: Option<&Snapshot>) -> Result<GroupRecord> {
    let Some(snapshot) = old else { return Ok(GroupRecord::new(count)) };
    let record = GroupRecord::parse(&names.group, &snapshot.value)?;
    match names.check_count(&record, count) {
        // A group without members is about to be forgotten.
        Err(_) if record.members.is_empty() => Ok(GroupRecord::new(count)),
        checked => checked.map(|()| record),
    }
}
