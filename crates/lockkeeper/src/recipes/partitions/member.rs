//! The handle of a member: it yields the changes of its partitions, and leaves the group.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::stream::Stream;
use lockkeeper_core::{Error, Fence, Result};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::heartbeat::{GroupView, Heartbeat, Presence};
use super::ownership::PartitionOwnership;
use super::partition::Partition;
use super::record::MemberRecord;
use super::{PartitionNames, Partitions};

/// A change of the partitions of this member.
#[derive(Debug)]
pub enum PartitionChange {
    /// This process owns the partition now.
    Owned(Partition),
    /// The group wants the partition back: [`Partition::revoked`] of its handle has completed too.
    Revoked {
        /// The partition's number.
        number: u32,
        /// The fence with which it was owned.
        fence: Fence,
    },
}

/// A member of a group, as [`Partitions::join`] returned it: a stream of [`PartitionChange`]s.
///
/// Dropping it leaves the group in the background, with the same grace as [`PartitionMember::leave`], for as long as the runtime runs.
#[must_use = "a member that is dropped leaves the group"]
pub struct PartitionMember {
    name: String,
    changes: mpsc::UnboundedReceiver<Result<PartitionChange>>,
    presence: watch::Sender<Presence>,
    task: Option<JoinHandle<()>>,
}

impl fmt::Debug for PartitionMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartitionMember({:?})", self.name)
    }
}

/// Writes the member into the group's record, and starts its task.
pub(super) async fn join(
    options: Partitions,
    names: PartitionNames,
    me: MemberRecord,
) -> Result<PartitionMember> {
    // A keeper that cannot renew must not join.
    options.keeper.0.driver()?;
    let name = me.name.clone();
    let presence = watch::Sender::new(Presence::Joined);
    let heartbeat = Heartbeat::join(options.clone(), names.clone(), me.clone(), presence.subscribe()).await?;
    let (send_change, changes) = mpsc::unbounded_channel();
    let task = tokio::spawn(run(heartbeat, options, names, me, presence.clone(), send_change));
    Ok(PartitionMember { name, changes, presence, task: Some(task) })
}

/// Runs the heartbeats and the partitions side by side: a store call that hangs delays no grace.
async fn run(
    heartbeat: Heartbeat,
    options: Partitions,
    names: PartitionNames,
    me: MemberRecord,
    presence: watch::Sender<Presence>,
    changes: mpsc::UnboundedSender<Result<PartitionChange>>,
) {
    let (view, wake, wanted) = (heartbeat.view.subscribe(), heartbeat.wake.clone(), presence.subscribe());
    let last = view.clone();
    let ownership = PartitionOwnership::new(options, names, me, changes.clone());
    tokio::join!(heartbeat.run(), ownership.run(view, &presence, wanted, wake));
    if let GroupView::Ended(why) = &*last.borrow() {
        let _ = changes.send(Err(Error::Lost(why.to_string())));
    }
}

impl PartitionMember {
    /// The member's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The next change. `None` once the member has left.
    ///
    /// The last item is [`Error::Lost`] if another process has joined with this member's name, or if the group was made anew with another
    /// count while this member was silent for three ttls; every partition is revoked then, with the usual grace. An unreachable store is
    /// no error: the member tries again, and the guards of its partitions say until when they are held.
    ///
    /// Dropping the future loses no change.
    pub async fn next(&mut self) -> Option<Result<PartitionChange>> {
        self.changes.recv().await
    }

    /// Asks the group to give the partitions to other members, without waiting: every partition is revoked, and the stream of changes ends
    /// when they are given up, or when the grace is over.
    pub fn start_leaving(&self) {
        self.presence.send_if_modified(|presence| {
            let joined = *presence == Presence::Joined;
            if joined {
                *presence = Presence::Leaving;
            }
            joined
        });
    }

    /// Leaves the group: every partition is revoked, and `leave` returns when all of them are dropped, or when the grace is over. Their
    /// guards are lost then.
    ///
    /// If the store is unreachable for a ttl, the member gives up on removing itself; the others remove it after its ttl. Dropping the
    /// future goes on leaving in the background.
    pub async fn leave(mut self) -> Result<()> {
        self.start_leaving();
        // Partitions that the caller was never given are dropped here.
        let drain = async { while self.changes.recv().await.is_some() {} };
        let task = self.task.take();
        tokio::join!(drain, async {
            if let Some(task) = task {
                let _ = task.await;
            }
        });
        Ok(())
    }
}

impl Drop for PartitionMember {
    fn drop(&mut self) {
        self.start_leaving();
    }
}

impl Stream for PartitionMember {
    type Item = Result<PartitionChange>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.changes.poll_recv(cx)
    }
}
