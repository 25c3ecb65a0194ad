//! The vote over a lock that several independent servers keep. Told answers and times; says what each server is to be
//! asked next, and whether the lock is ours.
//!
//! One [`Vote`] is one try to get one lock. First every node is asked for the lock; once a majority has it for us, the
//! fence is chosen above everything that this majority has seen, and written to each node that has the lock for us;
//! the grant counts once a majority has the lock *and* the fence. Whatever else happens, a node that may have the lock
//! for us is to be released ([`Duty::Release`]): a lost vote, a late answer and a withdrawn ask leave nothing behind.
//!
//! The lease counts from the moment before the first request was sent, so every answer that is counted belongs to a
//! lock that ends later than we stop believing in it.

use std::time::Duration;

use crate::lease::margin;
use crate::{Error, Fence, Moment, Result, Wall};

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

/// What a node says to the request for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockAnswer {
    /// It keeps the lock for us now.
    Locked {
        /// The highest fence it knows.
        counter: Option<Fence>,
        /// Its wall clock.
        clock: Wall,
        /// The fence that our own attempt has there already: then this is the same ask once more.
        fence: Option<Fence>,
    },
    /// Somebody else has it; the number tells one holder from another.
    Taken(u64),
    /// It did not do it, for a reason of its own (it is too young), or was not reached at all.
    Refused,
    /// It may have done it.
    Unheard,
}

/// What is to be done at one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Wait for the answer to the request for the lock.
    Await,
    /// Nothing yet.
    Wait,
    /// Write this fence, if the lock is still ours there.
    Write(Fence),
    /// Release what may be there, now and until it is known to be gone.
    Release,
    /// Nothing any more.
    Done,
}

/// How a vote ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A majority has the lock and the fence for us.
    Granted(Fence),
    /// A majority has the lock for one somebody else.
    Taken,
    /// Enough nodes answered, but no one has a majority: several try at once, or somebody left something behind.
    Contested,
    /// Too few nodes answered (well) in time.
    Silent,
    /// It was taken back.
    Withdrawn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Asked,
    Locked {
        counter: Option<Fence>,
        clock: Wall,
        fence: Option<Fence>,
    },
    Written,
    /// It may have the lock for us, and does not count.
    Unheard,
    Taken(u64),
    Out,
    Freed,
}

/// One try to get a lock from several nodes.
#[derive(Clone, Debug)]
pub struct Vote {
    quorum: usize,
    nodes: Vec<Node>,
    floor: Option<Fence>,
    patience: Duration,
    deadline: Moment,
    /// When the answers of this phase must be there.
    due: Moment,
    fence: Option<Fence>,
    verdict: Option<Verdict>,
    /// The grant was passed on: from here on only a release takes it back.
    accepted: bool,
}

impl Vote {
    /// A vote of `nodes` nodes, all of them asked at `sent_at`. Each has `patience` for an answer. `floor` is a fence
    /// that the chosen one must be above, whatever the nodes say.
    ///
    /// # Errors
    /// As [`majority`].
    pub fn new(
        nodes: usize,
        ttl: Duration,
        patience: Duration,
        floor: Option<Fence>,
        sent_at: Moment,
    ) -> Result<Self> {
        Ok(Vote {
            quorum: majority(nodes)?,
            nodes: vec![Node::Asked; nodes],
            floor,
            patience,
            deadline: sent_at + (ttl - margin(ttl)),
            due: sent_at + patience,
            fence: None,
            verdict: None,
            accepted: false,
        })
    }

    /// A node's answer to the request for the lock, heard at `now`.
    pub fn handle_lock(&mut self, now: Moment, node: usize, answer: LockAnswer) {
        self.handle_timeout(now);
        if self.nodes[node] != Node::Asked {
            return;
        }
        self.nodes[node] = match answer {
            LockAnswer::Locked { counter, clock, fence } => Node::Locked { counter, clock, fence },
            LockAnswer::Taken(by) => Node::Taken(by),
            LockAnswer::Refused => Node::Out,
            LockAnswer::Unheard => Node::Unheard,
        };
        self.count(now, false);
    }

    /// A node's answer to the fence, heard at `now`: whether the lock was still ours there and has the fence now.
    pub fn handle_write(&mut self, now: Moment, node: usize, written: bool) {
        self.handle_timeout(now);
        if matches!(self.nodes[node], Node::Locked { .. }) {
            self.nodes[node] = if written { Node::Written } else { Node::Unheard };
            self.count(now, false);
        }
    }

    /// A node has nothing of ours any more.
    pub fn handle_release(&mut self, node: usize) {
        self.nodes[node] = Node::Freed;
    }

    /// It is `now`: whoever has not answered in time is not waited for any more.
    pub fn handle_timeout(&mut self, now: Moment) {
        if self.verdict.is_some() {
            return;
        }
        if now >= self.deadline {
            self.verdict = Some(Verdict::Silent);
        } else if now >= self.due {
            let choosing = self.fence.is_none();
            self.count(now, true);
            if !choosing && self.verdict.is_none() {
                self.verdict = Some(self.loss());
            }
        }
    }

    /// When to call [`Vote::handle_timeout`], at the latest.
    pub fn poll_timeout(&self) -> Option<Moment> {
        self.verdict.is_none().then(|| self.due.min(self.deadline))
    }

    /// The ask is taken back: whatever comes, it is not granted, and everything is released; except for the nodes that
    /// have an accepted grant, which is released by whoever has it.
    pub fn withdraw(&mut self) {
        self.verdict = Some(Verdict::Withdrawn);
    }

    /// The grant, if it is one, is passed on to whoever asked. From here on the nodes that have it are theirs to release.
    pub fn accept(&mut self) {
        self.accepted = matches!(self.verdict, Some(Verdict::Granted(_)));
    }

    /// How it ended, if it did.
    pub fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// What is to be done at a node now.
    pub fn duty(&self, node: usize) -> Duty {
        let granted = match self.verdict {
            None => false,
            Some(Verdict::Granted(_)) => true,
            Some(_) => {
                // Of a grant that was passed on, what is whole is for its holder to release, who does so by itself.
                let theirs = self.accepted && self.nodes[node] == Node::Written;
                let clean = matches!(self.nodes[node], Node::Taken(_) | Node::Out | Node::Freed);
                return if clean || theirs { Duty::Done } else { Duty::Release };
            }
        };
        match (self.nodes[node], self.fence) {
            (Node::Asked, _) => Duty::Await,
            (Node::Locked { .. }, Some(fence)) => Duty::Write(fence),
            (Node::Locked { .. }, None) => Duty::Wait,
            (Node::Written | Node::Unheard, _) if !granted || !self.accepted => Duty::Wait,
            _ => Duty::Done,
        }
    }

    /// At how many nodes something of ours may be left.
    pub fn unclean(&self) -> usize {
        self.tally(|node| !matches!(node, Node::Taken(_) | Node::Out | Node::Freed))
    }

    /// Whether every node that answered, and had something of ours, has been released.
    pub fn tidy(&self) -> bool {
        self.tally(|node| matches!(node, Node::Locked { .. } | Node::Written)) == 0
    }

    fn tally(&self, which: impl Fn(&Node) -> bool) -> usize {
        self.nodes.iter().filter(|node| which(node)).count()
    }

    /// Looks at what is there. `last`: nobody else is waited for.
    fn count(&mut self, now: Moment, last: bool) {
        if self.verdict.is_some() {
            return;
        }
        if self.fence.is_none() {
            self.choose(now, last);
        }
        let written = self.tally(|node| *node == Node::Written);
        let locked = self.tally(|node| matches!(node, Node::Locked { .. }));
        let open = if last && self.fence.is_none() { 0 } else { self.tally(|node| *node == Node::Asked) };
        if let Some(fence) = self.fence.filter(|_| written >= self.quorum) {
            self.verdict = Some(Verdict::Granted(fence));
        } else if written + locked + open < self.quorum {
            // It is lost. Too few answers to say why are no reason to say that nobody answers, while answers still come.
            let loss = self.loss();
            if loss != Verdict::Silent || open == 0 || last {
                self.verdict = Some(loss);
            }
        }
    }

    /// Chooses the fence, once a majority has the lock for us.
    fn choose(&mut self, now: Moment, last: bool) {
        let locked = || {
            self.nodes.iter().filter_map(|node| match node {
                Node::Locked { counter, clock, fence } => Some((*counter, *clock, *fence)),
                _ => None,
            })
        };
        if locked().count() < self.quorum {
            return;
        }
        // The same ask once more. If a majority has it under one fence, nobody else can have had it in between.
        let same =
            |fence: &Fence| locked().filter(|(.., other)| *other == Some(*fence)).count() >= self.quorum;
        let known = locked().find_map(|(.., fence)| fence.filter(same));
        let again = locked().any(|(.., fence)| fence.is_some());
        if known.is_none() && again && !last && self.nodes.contains(&Node::Asked) {
            return;
        }
        let highest = locked().filter_map(|(counter, ..)| counter).max().max(self.floor);
        let clock = locked().map(|(_, clock, _)| clock).max().unwrap_or_default();
        let Ok(fence) = known.map_or_else(|| Fence::after(highest, clock), Ok) else {
            self.verdict = Some(Verdict::Silent);
            return;
        };
        for node in &mut self.nodes {
            if matches!(node, Node::Locked { fence: Some(has), .. } if *has == fence) {
                *node = Node::Written;
            }
        }
        self.fence = Some(fence);
        self.due = now + self.patience;
    }

    /// Why it is not ours.
    fn loss(&self) -> Verdict {
        let holders = || {
            self.nodes.iter().filter_map(|node| match node {
                Node::Taken(by) => Some(*by),
                _ => None,
            })
        };
        let answered =
            holders().count() + self.tally(|node| matches!(node, Node::Locked { .. } | Node::Written));
        if holders().any(|by| holders().filter(|other| *other == by).count() >= self.quorum) {
            Verdict::Taken
        } else if answered >= self.quorum {
            Verdict::Contested
        } else {
            Verdict::Silent
        }
    }
}

/// What a majority says to a plain question: a renewal, a release.
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
