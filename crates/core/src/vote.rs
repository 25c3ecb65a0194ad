//! The quorum vote over a lock that several independent servers keep: a state machine that takes replies and times, and says what to send to
//! each server next and whether the lock is granted.
//!
//! One [`Vote`] is one try to get one lock. The client first requests the lock at every node. Once a majority has granted it, the client chooses a fence
//! above every fence that this majority has seen, and writes it to each node that granted the lock; the grant counts once a majority has
//! the lock *and* the fence. A node that may have granted the lock is released in every other case ([`NodeAction::Release`]): a lost vote, a late
//! reply and a withdrawn request leave nothing behind.
//!
//! The lease counts from before the first request was sent, so every reply that counts belongs to a lock that ends later than the
//! client's deadline.

use std::time::Duration;

use crate::lease::margin;
use crate::{BootInstant, Error, Fence, Result, WallTime};

#[cfg(test)]
mod tests;

/// How many of `nodes` are a majority.
///
/// # Errors
/// [`Error::Invalid`] for less than three nodes or an even number of them: a fourth node is one more that can fail and
/// not one more that may.
pub fn majority(nodes: usize) -> Result<usize> {
    if nodes < 3 || nodes.is_multiple_of(2) {
        return Err(Error::invalid(format!("{nodes} nodes cannot vote: an odd number is needed, 3 or more")));
    }
    Ok(nodes / 2 + 1)
}

/// A node's reply to the request for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockAnswer {
    /// The node granted the lock.
    Locked {
        /// The highest fence it knows.
        counter: Option<Fence>,
        /// Its wall clock.
        clock: WallTime,
        /// The fence that this attempt has at the node already: then the request is a retry.
        fence: Option<Fence>,
    },
    /// Another client has it; the number distinguishes holders.
    Taken(u64),
    /// The node refused (it is too young), or was not reached.
    Refused,
    /// There is no reply: the node may have granted it.
    NoReply,
}

/// The next step of the client at one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAction {
    /// Wait for the answer to the request for the lock.
    Await,
    /// Nothing yet.
    Wait,
    /// Write this fence, if this attempt still has the lock there.
    Write(Fence),
    /// Release the lock, now and until the node has confirmed it.
    Release,
    /// Nothing any more.
    Done,
}

/// How a vote ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteOutcome {
    /// A majority has the lock and the fence for this attempt.
    Granted(Fence),
    /// A majority has the lock for one other client.
    Taken,
    /// Enough nodes replied, but no client has a majority: several try at once, or an earlier client left a lock behind.
    Contested,
    /// Too few nodes replied in time.
    Silent,
    /// The request was withdrawn.
    Withdrawn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeVote {
    Asked,
    Locked {
        counter: Option<Fence>,
        clock: WallTime,
        fence: Option<Fence>,
    },
    Written,
    /// The node may have granted the lock; it does not count.
    NoReply,
    Taken(u64),
    Out,
    Freed,
}

/// One try to get a lock from several nodes.
#[derive(Clone, Debug)]
pub struct Vote {
    quorum: usize,
    nodes: Vec<NodeVote>,
    floor: Option<Fence>,
    reply_timeout: Duration,
    deadline: BootInstant,
    /// When the answers of this phase must be there.
    due: BootInstant,
    fence: Option<Fence>,
    verdict: Option<VoteOutcome>,
    /// The grant was reported to the caller: only a release ends it.
    accepted: bool,
}

impl Vote {
    /// A vote of `nodes` nodes, all of them asked at `sent_at`. Each has `reply_timeout` to reply. `floor` is a fence
    /// that the chosen one must be above, whatever the nodes say.
    ///
    /// # Errors
    /// As [`majority`].
    pub fn new(
        nodes: usize,
        ttl: Duration,
        reply_timeout: Duration,
        floor: Option<Fence>,
        sent_at: BootInstant,
    ) -> Result<Self> {
        Ok(Vote {
            quorum: majority(nodes)?,
            nodes: vec![NodeVote::Asked; nodes],
            floor,
            reply_timeout,
            deadline: sent_at + (ttl - margin(ttl)),
            due: sent_at + reply_timeout,
            fence: None,
            verdict: None,
            accepted: false,
        })
    }

    /// A node's answer to the request for the lock, heard at `now`.
    pub fn handle_lock(&mut self, now: BootInstant, node: usize, answer: LockAnswer) {
        self.handle_timeout(now);
        if self.nodes[node] != NodeVote::Asked {
            return;
        }
        self.nodes[node] = match answer {
            LockAnswer::Locked { counter, clock, fence } => NodeVote::Locked { counter, clock, fence },
            LockAnswer::Taken(by) => NodeVote::Taken(by),
            LockAnswer::Refused => NodeVote::Out,
            LockAnswer::NoReply => NodeVote::NoReply,
        };
        self.count(now, false);
    }

    /// A node's answer to the fence, heard at `now`: whether the lock was still ours there and has the fence now.
    pub fn handle_write(&mut self, now: BootInstant, node: usize, written: bool) {
        self.handle_timeout(now);
        if matches!(self.nodes[node], NodeVote::Locked { .. }) {
            self.nodes[node] = if written { NodeVote::Written } else { NodeVote::NoReply };
            self.count(now, false);
        }
    }

    /// A node has confirmed that this attempt has nothing there.
    pub fn handle_release(&mut self, node: usize) {
        self.nodes[node] = NodeVote::Freed;
    }

    /// Gives up the nodes whose replies are overdue at `now`.
    pub fn handle_timeout(&mut self, now: BootInstant) {
        if self.verdict.is_some() {
            return;
        }
        if now >= self.deadline {
            self.verdict = Some(VoteOutcome::Silent);
        } else if now >= self.due {
            let choosing = self.fence.is_none();
            self.count(now, true);
            if !choosing && self.verdict.is_none() {
                self.verdict = Some(self.loss());
            }
        }
    }

    /// When to call [`Vote::handle_timeout`], at the latest.
    pub fn poll_timeout(&self) -> Option<BootInstant> {
        self.verdict.is_none().then(|| self.due.min(self.deadline))
    }

    /// Withdraws the request: it is not granted any more, and every node is released, except the nodes of an accepted grant, whose holder
    /// releases them.
    pub fn withdraw(&mut self) {
        self.verdict = Some(VoteOutcome::Withdrawn);
    }

    /// Reports the grant, if there is one, to the caller, which releases its nodes from here on.
    pub fn accept(&mut self) {
        self.accepted = matches!(self.verdict, Some(VoteOutcome::Granted(_)));
    }

    /// How it ended, if it did.
    pub fn verdict(&self) -> Option<VoteOutcome> {
        self.verdict
    }

    /// The next step at a node.
    pub fn action(&self, node: usize) -> NodeAction {
        let granted = match self.verdict {
            None => false,
            Some(VoteOutcome::Granted(_)) => true,
            Some(_) => {
                // The holder releases the nodes of an accepted grant itself.
                let theirs = self.accepted && self.nodes[node] == NodeVote::Written;
                let clean = matches!(self.nodes[node], NodeVote::Taken(_) | NodeVote::Out | NodeVote::Freed);
                return if clean || theirs { NodeAction::Done } else { NodeAction::Release };
            }
        };
        match (self.nodes[node], self.fence) {
            (NodeVote::Asked, _) => NodeAction::Await,
            (NodeVote::Locked { .. }, Some(fence)) => NodeAction::Write(fence),
            (NodeVote::Locked { .. }, None) => NodeAction::Wait,
            (NodeVote::Written | NodeVote::NoReply, _) if !granted || !self.accepted => NodeAction::Wait,
            _ => NodeAction::Done,
        }
    }

    /// At how many nodes this attempt may still have something.
    pub fn unclean(&self) -> usize {
        self.tally(|node| !matches!(node, NodeVote::Taken(_) | NodeVote::Out | NodeVote::Freed))
    }

    /// Whether every node that replied and had something of this attempt has been released.
    pub fn is_released(&self) -> bool {
        self.tally(|node| matches!(node, NodeVote::Locked { .. } | NodeVote::Written)) == 0
    }

    fn tally(&self, which: impl Fn(&NodeVote) -> bool) -> usize {
        self.nodes.iter().filter(|node| which(node)).count()
    }

    /// Evaluates the replies. `last`: no further reply is expected.
    fn count(&mut self, now: BootInstant, last: bool) {
        if self.verdict.is_some() {
            return;
        }
        if self.fence.is_none() {
            self.choose(now, last);
        }
        let written = self.tally(|node| *node == NodeVote::Written);
        let locked = self.tally(|node| matches!(node, NodeVote::Locked { .. }));
        let open = if last && self.fence.is_none() { 0 } else { self.tally(|node| *node == NodeVote::Asked) };
        if let Some(fence) = self.fence.filter(|_| written >= self.quorum) {
            self.verdict = Some(VoteOutcome::Granted(fence));
        } else if written + locked + open < self.quorum {
            // The vote is lost. While replies still come, too few of them do not mean that the nodes are silent.
            let loss = self.loss();
            if loss != VoteOutcome::Silent || open == 0 || last {
                self.verdict = Some(loss);
            }
        }
    }

    /// Chooses the fence, once a majority has granted the lock.
    fn choose(&mut self, now: BootInstant, last: bool) {
        let locked = || {
            self.nodes.iter().filter_map(|node| match node {
                NodeVote::Locked { counter, clock, fence } => Some((*counter, *clock, *fence)),
                _ => None,
            })
        };
        if locked().count() < self.quorum {
            return;
        }
        // A retry. If a majority has the lock under one fence, no other client can have held it in between.
        let same =
            |fence: &Fence| locked().filter(|(.., other)| *other == Some(*fence)).count() >= self.quorum;
        let known = locked().find_map(|(.., fence)| fence.filter(same));
        let again = locked().any(|(.., fence)| fence.is_some());
        if known.is_none() && again && !last && self.nodes.contains(&NodeVote::Asked) {
            return;
        }
        let highest = locked().filter_map(|(counter, ..)| counter).max().max(self.floor);
        let clock = locked().map(|(_, clock, _)| clock).max().unwrap_or_default();
        let Ok(fence) = known.map_or_else(|| Fence::after(highest, clock), Ok) else {
            self.verdict = Some(VoteOutcome::Silent);
            return;
        };
        for node in &mut self.nodes {
            if matches!(node, NodeVote::Locked { fence: Some(has), .. } if *has == fence) {
                *node = NodeVote::Written;
            }
        }
        self.fence = Some(fence);
        self.due = now + self.reply_timeout;
    }

    /// Why the vote is lost.
    fn loss(&self) -> VoteOutcome {
        let holders = || {
            self.nodes.iter().filter_map(|node| match node {
                NodeVote::Taken(by) => Some(*by),
                _ => None,
            })
        };
        let answered = holders().count()
            + self.tally(|node| matches!(node, NodeVote::Locked { .. } | NodeVote::Written));
        if holders().any(|by| holders().filter(|other| *other == by).count() >= self.quorum) {
            VoteOutcome::Taken
        } else if answered >= self.quorum {
            VoteOutcome::Contested
        } else {
            VoteOutcome::Silent
        }
    }
}

/// The majority's reply to a plain question: a renewal, a release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Nodes that said yes.
    pub yes: usize,
    /// Nodes that said no.
    pub no: usize,
}

impl Tally {
    /// Yes or no, if that cannot change any more, whatever the other nodes say.
    ///
    /// # Errors
    /// As [`majority`].
    pub fn verdict(self, nodes: usize) -> Result<Option<bool>> {
        let quorum = majority(nodes)?;
        Ok(match self {
            Tally { yes, .. } if yes >= quorum => Some(true),
            Tally { no, .. } if no > nodes - quorum => Some(false),
            _ => None,
        })
    }
}
