//! One round of votes: the state machine of `core::vote`, and a task for each node that carries out its actions.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::vote::{LockAnswer, NodeAction, Vote, VoteOutcome};
use lockkeeper_core::{BootInstant, Error, Fence, IgnorePoison, WallTime};
use lockkeeper_host::{Clock, sleep_until};
use lockkeeper_redis::Failure;
use redis::Value;
use tokio::sync::watch;

use crate::codec::NodeLock;
use crate::connection::{NodeRelease, RedlockNode};
use crate::statements::{FENCE, ScriptCall};
use crate::unknown::{PendingAttempt, PendingRound};

/// The replies of the nodes, for the answer to the caller.
#[derive(Default)]
pub struct RoundReplies {
    pub seen: Vec<NodeLock>,
    pub failures: Vec<Failure>,
    /// How many nodes locked the key for this attempt.
    pub granted_nodes: usize,
    /// How many nodes are too young to vote.
    pub young: usize,
    /// Why the grant of this attempt was revoked, if a node says so.
    pub revoked: Option<Arc<str>>,
}

/// The request of a round, for every node.
pub struct RoundRequest {
    pub lock: ScriptCall,
    pub keys: [String; 3],
    pub attempt: String,
    pub release: NodeRelease,
    pub clock: Arc<dyn Clock>,
}

/// One round. Its tasks run in the background until every node has finished.
pub struct Round {
    number: u64,
    vote: Mutex<Vote>,
    replies: Mutex<RoundReplies>,
    changed: watch::Sender<()>,
    // Keeps the attempt registered while the round runs, so that a release finds the round.
    _pending: Arc<PendingAttempt>,
}

impl Round {
    /// Begins a round: tasks on the store's thread send the request to all nodes at once.
    pub fn begin(
        pending: &Arc<PendingAttempt>,
        number: u64,
        vote: Vote,
        request: RoundRequest,
        nodes: &[Arc<RedlockNode>],
        io_thread: &tokio::runtime::Handle,
    ) -> Arc<Self> {
        let round = Arc::new(Round {
            number,
            vote: Mutex::new(vote),
            replies: Mutex::default(),
            changed: watch::Sender::default(),
            _pending: pending.clone(),
        });
        pending.add(&(round.clone() as Arc<dyn PendingRound>));
        let request = Arc::new(request);
        for node in nodes {
            io_thread.spawn(round.clone().run_node(node.clone(), request.clone()));
        }
        round
    }

    fn vote(&self) -> MutexGuard<'_, Vote> {
        self.vote.lock().ignore_poison()
    }

    pub fn replies(&self) -> MutexGuard<'_, RoundReplies> {
        self.replies.lock().ignore_poison()
    }

    fn update_vote(&self, change: impl FnOnce(&mut Vote)) {
        change(&mut self.vote());
        self.changed.send_replace(());
    }

    /// At how many nodes the key may still be locked for this attempt.
    pub fn unclean(&self) -> usize {
        self.vote().unclean()
    }

    /// The verdict. From here on a grant belongs to the caller. If this future is dropped before, the round is cancelled.
    pub async fn verdict(&self, clock: &dyn Clock) -> VoteOutcome {
        let cancel = CancelOnDrop(self);
        let mut changes = self.changed.subscribe();
        loop {
            let due = {
                changes.borrow_and_update();
                let mut vote = self.vote();
                vote.handle_timeout(clock.now());
                if let Some(verdict) = vote.verdict() {
                    vote.accept();
                    drop(vote);
                    std::mem::forget(cancel);
                    self.changed.send_replace(());
                    return verdict;
                }
                vote.poll_timeout().unwrap_or(BootInstant::NEVER)
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep_until(clock, due) => {}
            }
        }
    }

    /// Waits until the nodes have released the locks of a lost vote, for `node_timeout` at most.
    pub async fn wait_until_released(&self, clock: &dyn Clock, node_timeout: Duration) {
        let mut changes = self.changed.subscribe();
        let until = clock.now() + node_timeout;
        while !self.vote().is_released() && clock.now() < until {
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep_until(clock, until) => {}
            }
        }
    }

    /// Carries out the actions of the vote at one node.
    async fn run_node(self: Arc<Self>, node: Arc<RedlockNode>, request: Arc<RoundRequest>) {
        let i = node.index;
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            let action = self.vote().action(i);
            match action {
                NodeAction::Await => self.lock_node(&node, &request).await,
                NodeAction::Write(fence) => self.write_fence(&node, &request, fence).await,
                NodeAction::Wait => _ = changes.changed().await,
                NodeAction::Release => {
                    // The release follows the request on the same connection, so it undoes the request however late both arrive.
                    if node.release_or_enqueue(request.release.clone()).await.is_ok() {
                        self.update_vote(|vote| vote.handle_release(i));
                    }
                    return;
                }
                NodeAction::Done => return,
            }
        }
    }

    async fn lock_node(&self, node: &RedlockNode, request: &RoundRequest) {
        let answer = tokio::select! {
            answer = request.lock.run(&node.connection) => answer,
            () = self.release_wanted(node.index) => return node.note_unanswered(&request.attempt),
        };
        if answer.as_ref().is_err_and(Failure::may_have_happened) {
            node.note_unanswered(&request.attempt);
        }
        let answer = match answer {
            Ok(value) => self.decode_reply(&value),
            Err(failure) => {
                // A script that ended in an unexpected error may have written a part.
                let unknown = matches!(Error::from(failure.clone()), Error::Unknown(_));
                self.replies().failures.push(failure);
                if unknown { LockAnswer::NoReply } else { LockAnswer::Refused }
            }
        };
        self.update_vote(|vote| vote.handle_lock(request.clock.now(), node.index, answer));
    }

    fn decode_reply(&self, value: &Value) -> LockAnswer {
        let Value::Array(parts) = value else { return LockAnswer::NoReply };
        let fence = |n: &i64| u64::try_from(*n).ok().and_then(|n| Fence::new(n).ok());
        match &parts[..] {
            [Value::Int(1), Value::Int(counter), Value::Int(now), Value::Int(known)] => {
                self.replies().granted_nodes += 1;
                let clock = WallTime::from_micros(u64::try_from(*now).unwrap_or(0));
                LockAnswer::Locked { counter: fence(counter), clock, fence: fence(known) }
            }
            [Value::Int(0), seen] => match NodeLock::read(seen) {
                Some(seen) => {
                    let by = seen.by;
                    self.replies().seen.push(seen);
                    LockAnswer::Taken(by)
                }
                None => LockAnswer::Refused,
            },
            [Value::Int(2), _] => {
                self.replies().young += 1;
                LockAnswer::Refused
            }
            [Value::Int(4), Value::BulkString(reason)] => {
                self.replies().revoked = Some(String::from_utf8_lossy(reason).into());
                LockAnswer::Refused
            }
            // A later round of the same attempt has replaced this one at the node.
            [Value::Int(3)] => LockAnswer::Refused,
            _ => LockAnswer::NoReply,
        }
    }

    async fn write_fence(&self, node: &RedlockNode, request: &RoundRequest, fence: Fence) {
        let call = ScriptCall::new(&FENCE, &request.keys[..])
            .arg(&request.attempt)
            .arg(self.number)
            .arg(fence.get());
        let answer = tokio::select! {
            answer = call.run(&node.connection) => answer,
            () = self.release_wanted(node.index) => return,
        };
        let written = answer.is_ok_and(|answer| answer == Value::Int(1));
        self.update_vote(|vote| vote.handle_write(request.clock.now(), node.index, written));
    }

    /// Returns when the vote wants nothing but a release from a node.
    async fn release_wanted(&self, node: usize) {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if self.vote().action(node) == NodeAction::Release {
                return;
            }
            _ = changes.changed().await;
        }
    }
}

impl PendingRound for Round {
    fn cancel(&self) {
        self.update_vote(Vote::withdraw);
    }
}

/// Cancels a round when it is dropped.
struct CancelOnDrop<'a>(&'a Round);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}
