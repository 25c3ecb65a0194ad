//! One round of votes: the machine of `core::vote`, with a task for each node that does what it says.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::vote::{Duty, LockAnswer, Verdict, Vote};
use lockkeeper_core::{Error, Fence, Moment, Wall};
use lockkeeper_host::{Clock, sleep_until};
use lockkeeper_redis::Failure;
use redis::Value;
use tokio::sync::watch;

use crate::entry::Seen;
use crate::errand::Errand;
use crate::node::{Debt, Node};
use crate::script::{Call, FENCE};

/// What the nodes said, for whoever wants to know why.
#[derive(Default)]
pub struct Said {
    pub seen: Vec<Seen>,
    pub failures: Vec<Failure>,
    /// Nodes that gave us the lock.
    pub given: usize,
    /// Nodes that are too young to count.
    pub young: usize,
    /// Why the grant of this attempt was revoked, if a node says so.
    pub revoked: Option<Arc<str>>,
}

/// What is said to every node.
pub struct Job {
    pub lock: Call,
    pub keys: [String; 3],
    pub attempt: String,
    pub debt: Debt,
    pub clock: Arc<dyn Clock>,
}

/// One round. It goes on in the background until every node is done with it.
pub struct Round {
    number: u64,
    vote: Mutex<Vote>,
    said: Mutex<Said>,
    changed: watch::Sender<()>,
    // Whoever takes the ask back finds the round by it.
    _errand: Arc<Errand>,
}

impl Round {
    /// Begins a round: every node is asked at once, by tasks on the reactor.
    pub fn begin(
        errand: &Arc<Errand>,
        number: u64,
        vote: Vote,
        job: Job,
        nodes: &[Arc<Node>],
        reactor: &tokio::runtime::Handle,
    ) -> Arc<Self> {
        let round = Arc::new(Round {
            number,
            vote: Mutex::new(vote),
            said: Mutex::default(),
            changed: watch::Sender::default(),
            _errand: errand.clone(),
        });
        errand.add(&round);
        let job = Arc::new(job);
        for node in nodes {
            reactor.spawn(round.clone().serve(node.clone(), job.clone()));
        }
        round
    }

    fn vote(&self) -> MutexGuard<'_, Vote> {
        self.vote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, what: impl FnOnce(&mut Vote)) {
        what(&mut self.vote());
        self.changed.send_replace(());
    }

    /// Whatever comes, it is not granted, and everything is released.
    pub fn withdraw(&self) {
        self.tell(Vote::withdraw);
    }

    /// At how many nodes something of ours may be left.
    pub fn unclean(&self) -> usize {
        self.vote().unclean()
    }

    /// The verdict; a grant is the caller's from here on. If this is dropped before, the round is withdrawn.
    pub async fn verdict(&self, clock: &dyn Clock) -> Verdict {
        let open = Withdraw(self);
        let mut changes = self.changed.subscribe();
        loop {
            let due = {
                changes.borrow_and_update();
                let mut vote = self.vote();
                vote.handle_timeout(clock.now());
                if let Some(verdict) = vote.verdict() {
                    vote.accept();
                    drop(vote);
                    std::mem::forget(open);
                    self.changed.send_replace(());
                    return verdict;
                }
                vote.poll_timeout().unwrap_or(Moment::NEVER)
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep_until(clock, due) => {}
            }
        }
    }

    /// Waits until what a lost vote left behind is released, as far as the nodes answer.
    pub async fn tidy(&self, clock: &dyn Clock, patience: Duration) {
        let mut changes = self.changed.subscribe();
        let until = clock.now() + patience;
        while !self.vote().tidy() && clock.now() < until {
            tokio::select! {
                _ = changes.changed() => {}
                () = sleep_until(clock, until) => {}
            }
        }
    }

    /// Does at one node what the vote says, to the end.
    async fn serve(self: Arc<Self>, node: Arc<Node>, job: Arc<Job>) {
        let i = node.index;
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            let duty = self.vote().duty(i);
            match duty {
                Duty::Await => self.lock(&node, &job).await,
                Duty::Write(fence) => self.write(&node, &job, fence).await,
                Duty::Wait => _ = changes.changed().await,
                Duty::Release => {
                    // It goes the way of the request, behind it: whatever that did, and however late, this undoes it.
                    if node.give_back(job.debt.clone()).await.is_ok() {
                        self.tell(|vote| vote.handle_release(i));
                    }
                    return;
                }
                Duty::Done => return,
            }
        }
    }

    async fn lock(&self, node: &Node, job: &Job) {
        let answer = tokio::select! {
            answer = job.lock.run(&node.link) => answer,
            () = self.given_up(node.index) => return node.note_unanswered(&job.attempt),
        };
        if answer.as_ref().is_err_and(Failure::may_have_happened) {
            node.note_unanswered(&job.attempt);
        }
        let answer = match answer {
            Ok(value) => self.read(&value),
            Err(failure) => {
                // A script that ended in an error that nobody foresaw may have done a part of its work.
                let unheard = matches!(Error::from(failure.clone()), Error::Unknown(_));
                self.said().failures.push(failure);
                if unheard { LockAnswer::Unheard } else { LockAnswer::Refused }
            }
        };
        self.tell(|vote| vote.handle_lock(job.clock.now(), node.index, answer));
    }

    fn read(&self, value: &Value) -> LockAnswer {
        let Value::Array(parts) = value else { return LockAnswer::Unheard };
        let fence = |n: &i64| u64::try_from(*n).ok().and_then(|n| Fence::new(n).ok());
        match &parts[..] {
            [Value::Int(1), Value::Int(counter), Value::Int(now), Value::Int(known)] => {
                self.said().given += 1;
                let clock = Wall::from_micros(u64::try_from(*now).unwrap_or(0));
                LockAnswer::Locked { counter: fence(counter), clock, fence: fence(known) }
            }
            [Value::Int(0), seen] => match Seen::read(seen) {
                Some(seen) => {
                    let by = seen.by;
                    self.said().seen.push(seen);
                    LockAnswer::Taken(by)
                }
                None => LockAnswer::Refused,
            },
            [Value::Int(2), _] => {
                self.said().young += 1;
                LockAnswer::Refused
            }
            [Value::Int(4), Value::BulkString(reason)] => {
                self.said().revoked = Some(String::from_utf8_lossy(reason).into());
                LockAnswer::Refused
            }
            // A later round of the same ask has taken over here.
            [Value::Int(3)] => LockAnswer::Refused,
            _ => LockAnswer::Unheard,
        }
    }

    async fn write(&self, node: &Node, job: &Job, fence: Fence) {
        let call = Call::new(&FENCE, &job.keys[..]).arg(&job.attempt).arg(self.number).arg(fence.get());
        let answer = tokio::select! {
            answer = call.run(&node.link) => answer,
            () = self.given_up(node.index) => return,
        };
        let written = answer.is_ok_and(|answer| answer == Value::Int(1));
        self.tell(|vote| vote.handle_write(job.clock.now(), node.index, written));
    }

    /// Ends when nothing more is wanted of a node than a release.
    async fn given_up(&self, node: usize) {
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if self.vote().duty(node) == Duty::Release {
                return;
            }
            _ = changes.changed().await;
        }
    }
}

/// Withdraws a round when it is dropped.
struct Withdraw<'a>(&'a Round);

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}
