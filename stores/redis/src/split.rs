//! Renewing, releasing and breaking locks whose keys are on two nodes of a cluster, because their slot is being moved.
//!
//! A node refuses a script some of whose keys are missing there, and keys that were never made are missing too, so every script
//! of several keys is refused from the first moment of a move to its end. A script of one key is not: it runs where the key is.
//! The steps here declare one key each, and are taken in an order in which each may be the last:
//! - A hold in the lock key itself (a plain one) is renewed or released in one step.
//! - Of holds in a hash, the hash decides. A release takes the hold out of the hash, then its end out of the sorted set. A
//!   renewal first makes the sorted set and the lock key live longer, and counts when the hash says that the attempt still holds.
//! - Nothing is granted. The first waiter is let in by the polls, once the slot has moved.

use futures_util::future::join_all;
use lockkeeper_core::{Claim, Error, Fence, Renewal, Result};
use redis::{Value, cmd};

use crate::fault::Failure;
use crate::fleet::Split;
use crate::hold::{millis, odd, release_flags};
use crate::lane::run_replicated;
use crate::layout::Group;
use crate::script::{Call, SPLIT_ENDS, SPLIT_FENCE, SPLIT_HOLDS, SPLIT_LOCK, SPLIT_QUEUE, SPLIT_TOMBSTONE};
use crate::store::Shared;

/// One step at one key of a lock.
#[derive(Clone, Copy)]
struct Step<'a> {
    verb: &'static str,
    attempt: &'a str,
    flags: u8,
    limit: u64,
    /// Milliseconds that the key lives at least; of a break the new fence.
    number: u64,
}

impl<'a> Step<'a> {
    fn new(verb: &'static str, attempt: &'a str) -> Self {
        Step { verb, attempt, flags: 0, limit: 0, number: 0 }
    }
}

/// What the hash of the holds says.
struct Holds {
    answer: i64,
    /// How long the lock key is to live, in milliseconds.
    lives: u64,
    /// What is to be changed in the sorted set of their ends.
    ends: Vec<Vec<u8>>,
    /// Of a break: each attempt whose hold it took away, and another lock key that the attempt held.
    others: Vec<(String, String)>,
}

/// What a lock key says: the attempt does not hold, it does (and the step is done), or the holds are in the hash.
const NOT_HERE: i64 = 0;
const DONE: i64 = 1;
const IN_HASH: i64 = 2;
/// There is no hash of holds.
const NO_HASH: i64 = 2;

impl Shared {
    /// Renews holds of one group, each for itself. An error if there is no answer for any of them.
    pub(crate) async fn renew_split(&self, group: Group, claims: &[&Claim]) -> Result<Vec<Renewal>> {
        let answers = join_all(claims.iter().map(|claim| self.renew_one_split(group, claim))).await;
        if answers.iter().all(std::result::Result::is_err) {
            let first = answers.into_iter().next().ok_or_else(odd)?;
            return Err(first.err().map_or_else(odd, Error::from));
        }
        let known = |answer: std::result::Result<bool, Failure>| match answer {
            Ok(true) => Renewal::Renewed,
            Ok(false) => Renewal::Lost,
            Err(failure) => {
                tracing::warn!(
                    ?failure,
                    "renewal failed for a guard while its slot moves, will be tried again"
                );
                Renewal::Unknown
            }
        };
        Ok(answers.into_iter().map(known).collect())
    }

    async fn renew_one_split(&self, group: Group, claim: &Claim) -> Result<bool, Failure> {
        let attempt = claim.attempt.to_hex();
        for name in claim.names.iter() {
            if !self.renew_name_split(group, &self.layout.key(name), &attempt).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn renew_name_split(&self, group: Group, key: &str, attempt: &str) -> Result<bool, Failure> {
        match self.step_lock(group, key, Step::new("renew", attempt)).await? {
            IN_HASH => {}
            answer => return Ok(answer == DONE),
        }
        let look = self.step_holds(group, key, Step::new("look", attempt)).await?;
        if look.answer == NO_HASH {
            // The lock key says that there are holds: which ones is not known, so the attempt has not lost it for certain.
            return Err(Failure::Away(format!("TRYAGAIN the holds of {key} are missing")));
        }
        if look.answer != DONE {
            return Ok(false);
        }
        self.step_ends(group, key, look.lives, &look.ends).await?;
        let keep = Step { number: look.lives, ..Step::new("keep", attempt) };
        if self.step_lock(group, key, keep).await? != DONE {
            return Ok(false);
        }
        Ok(self.step_holds(group, key, Step::new("renew", attempt)).await?.answer == DONE)
    }

    /// Releases the holds of one attempt, or takes its request out of the queue. `release`: as the usual script has it.
    pub(crate) async fn release_split(
        &self,
        group: Group,
        keys: &[String],
        release: &[u8],
    ) -> Result<Value, Failure> {
        let nonsense = || Failure::Unheard("a release that makes no sense".into());
        let (attempt, more) = release.split_at_checked(32).ok_or_else(nonsense)?;
        let attempt = std::str::from_utf8(attempt).map_err(|_| nonsense())?;
        let (flags, generation, limit) = match more {
            [] => (0, 0, 0),
            [flags, _, generation, limit @ ..] => {
                let limit = limit.try_into().map_err(|_| nonsense())?;
                (*flags, *generation, f64::from_be_bytes(limit) as u64)
            }
            _ => return Err(nonsense()),
        };
        if flags & release_flags::UNANSWERED != 0 {
            self.leave_tombstone_split(group, attempt, generation).await?;
        }
        let mut gone = self.leave_queue_split(group, keys, attempt, limit).await?;
        for key in keys {
            let step = Step { flags, limit, ..Step::new("release", attempt) };
            gone |= match self.step_lock(group, key, step).await? {
                NOT_HERE => false,
                IN_HASH => self.release_from_hash(group, key, step).await?,
                _ => true,
            };
        }
        let base = self.layout.base(group);
        let confirmed = cmd("SREM").arg(format!("{base}in:{}", self.client)).arg(attempt).to_owned();
        self.fleet.call(group.slot(), &confirmed).await?;
        Ok(Value::Int(gone.into()))
    }

    async fn release_from_hash(&self, group: Group, key: &str, step: Step<'_>) -> Result<bool, Failure> {
        let holds = self.step_holds(group, key, step).await?;
        self.follow_holds(group, key, &holds).await?;
        Ok(holds.answer == DONE)
    }

    /// Changes the other keys of a lock as the hash of its holds was changed.
    async fn follow_holds(&self, group: Group, key: &str, holds: &Holds) -> Result<(), Failure> {
        if !holds.ends.is_empty() {
            self.step_ends(group, key, holds.lives, &holds.ends).await?;
        }
        if holds.lives > 0 {
            let keep = Step { number: holds.lives, ..Step::new("keep", "") };
            self.step_lock(group, key, keep).await?;
        }
        Ok(())
    }

    async fn leave_tombstone_split(
        &self,
        group: Group,
        attempt: &str,
        generation: u8,
    ) -> Result<(), Failure> {
        let base = self.layout.base(group);
        for (key, value) in
            [(format!("{base}released:{attempt}"), generation), (format!("{base}released"), 1)]
        {
            let call = Call::new(&SPLIT_TOMBSTONE, &[key]).arg(value).arg(millis(self.tombstone()));
            call.run(&self.fleet, group.slot()).await?;
        }
        Ok(())
    }

    /// A queue entry counts while its process has it on record too, so that goes last: the release can be sent again.
    async fn leave_queue_split(
        &self,
        group: Group,
        keys: &[String],
        attempt: &str,
        limit: u64,
    ) -> Result<bool, Failure> {
        let base = self.layout.base(group);
        let mut left = false;
        for key in keys {
            let call = Call::new(&SPLIT_QUEUE, &[format!("{base}line:{key}")]);
            let call = call.arg(format!("{attempt}{}", self.client)).arg(limit);
            left |= call.run(&self.fleet, group.slot()).await? == Value::Int(1);
        }
        if left || limit == 0 {
            let record = cmd("HDEL").arg(format!("{base}client:{}", self.client)).arg(attempt).to_owned();
            left |= self.fleet.call(group.slot(), &record).await? == Value::Int(1);
        }
        Ok(left)
    }

    pub(crate) async fn break_split(&self, group: Group, key: &str, reason: &str) -> Result<Fence> {
        let counter = format!("{}fence", self.layout.base(group));
        let call = Call::new(&SPLIT_FENCE, &[counter]).arg(self.floor());
        let Value::Int(fence) = call.run(&self.fleet, group.slot()).await? else { return Err(odd()) };
        let fence = self.seen(fence)?;
        let step = Step { number: fence.get(), ..Step::new("break", reason) };
        if self.step_lock(group, key, step).await? != IN_HASH {
            return Ok(fence);
        }
        let holds = self.step_holds(group, key, step).await?;
        if holds.answer == NO_HASH {
            // Who holds is not known, and no script grants this lock before its key is gone.
            self.step_lock(group, key, Step::new("drop", "")).await?;
            return Ok(fence);
        }
        // A grant of several names is lost as a whole.
        for (attempt, other) in &holds.others {
            let taken = self.step_holds(group, other, Step::new("take", attempt)).await?;
            self.follow_holds(group, other, &taken).await?;
        }
        self.follow_holds(group, key, &holds).await?;
        Ok(fence)
    }

    async fn step_lock(&self, group: Group, key: &str, step: Step<'_>) -> Result<i64, Failure> {
        let call = self.with_step(Call::new(&SPLIT_LOCK, &[key]), group, step);
        match self.run_one_key(group, &call).await? {
            Value::Int(answer) => Ok(answer),
            _ => Err(nonsense()),
        }
    }

    async fn step_holds(&self, group: Group, key: &str, step: Step<'_>) -> Result<Holds, Failure> {
        let holds = format!("{}holds:{key}", self.layout.base(group));
        let call = self.with_step(Call::new(&SPLIT_HOLDS, &[holds]), group, step);
        let Value::Array(parts) = self.run_one_key(group, &call).await? else { return Err(nonsense()) };
        let [Value::Int(answer), Value::Int(lives), Value::Array(ends), Value::Array(others)] = &parts[..]
        else {
            return Err(nonsense());
        };
        let others = texts(others).map(|text| String::from_utf8_lossy(text).into_owned()).collect::<Vec<_>>();
        Ok(Holds {
            answer: *answer,
            lives: u64::try_from(*lives).unwrap_or(0),
            ends: texts(ends).map(<[u8]>::to_vec).collect(),
            others: others.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect(),
        })
    }

    async fn step_ends(&self, group: Group, key: &str, lives: u64, ends: &[Vec<u8>]) -> Result<(), Failure> {
        let call = Call::new(&SPLIT_ENDS, &[format!("{}ends:{key}", self.layout.base(group))]).arg(lives);
        let call = ends.iter().fold(call, |call, part| call.arg(&part[..]));
        self.run_one_key(group, &call).await.map(|_| ())
    }

    fn with_step(&self, call: Call, group: Group, step: Step<'_>) -> Call {
        let call = call.arg(self.layout.base(group)).arg(step.verb).arg(step.attempt);
        call.arg(step.flags).arg(step.limit).arg(step.number)
    }

    /// Runs a script of one key where that key is, and waits for the replicas if the store is to.
    async fn run_one_key(&self, group: Group, call: &Call) -> Result<Value, Failure> {
        match &self.grants {
            Some(grants) => {
                let (answer, replicated) =
                    run_replicated(self, grants, group, call, Split::SendAgain).await?;
                replicated.map(|()| answer)
            }
            None => call.run(&self.fleet, group.slot()).await,
        }
    }
}

fn texts(values: &[Value]) -> impl Iterator<Item = &[u8]> {
    values.iter().filter_map(|value| match value {
        Value::BulkString(text) => Some(&text[..]),
        _ => None,
    })
}

fn nonsense() -> Failure {
    Failure::Unheard("Redis gave an answer that makes no sense".into())
}
