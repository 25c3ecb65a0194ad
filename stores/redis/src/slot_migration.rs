//! Renews, releases and breaks locks while their slot is migrated from one node of a cluster to another.
//!
//! During a migration a node rejects a script if one of its keys is missing there, and keys that never existed are missing too. So
//! a node rejects every script of several keys until the migration ends, and runs a script of one key where that key is. The steps
//! here use one key each, in an order in which each step may be the last:
//! - A plain hold, which is in the lock key itself, is renewed or released in one step.
//! - For holds in a hash, the hash decides. A release removes the hold from the hash, then its end from the sorted set. A renewal
//!   first extends the life of the sorted set and of the lock key, and counts when the hash still has the hold.
//! - A revoke marks the holds, and the holders are notified at their next renewal. A repeated revoke marks the holds that the first one did not reach.
//! - No step grants a lock. The polls of the waiters do, after the migration.

use futures_util::future::join_all;
use lockkeeper_core::{Error, Fence, RenewOutcome, RequestKey, Result};
use redis::{Value, cmd};

use crate::codec::{decode_hold, decode_release, release_flags};
use crate::error::{Failure, unexpected_reply};
use crate::keys::KeyGroup;
use crate::router::OnSplitKeys;
use crate::runner::ScriptRunner;
use crate::statements::{
    MIGRATING_ENDS, MIGRATING_FENCE, MIGRATING_HOLDS, MIGRATING_LOCK, MIGRATING_QUEUE, MIGRATING_TOMBSTONE,
    ScriptCall, millis,
};

/// The operations on locks of one group whose slot is being migrated.
#[derive(Clone, Copy)]
pub(crate) struct SlotMigration<'a> {
    runner: &'a ScriptRunner,
    group: KeyGroup,
    /// Whether a step counts only once `wait_replicas` replicas have it.
    replicated: bool,
}

/// One step at one key of a lock.
#[derive(Clone, Copy)]
struct MigrationStep<'a> {
    verb: &'static str,
    attempt: &'a str,
    flags: u8,
    limit: u64,
    /// The least time to live of the key, in milliseconds; for a break or a revoke, the new fence.
    number: u64,
    /// The reason of a revoke.
    reason: &'a str,
}

impl<'a> MigrationStep<'a> {
    fn new(verb: &'static str, attempt: &'a str) -> Self {
        MigrationStep { verb, attempt, flags: 0, limit: 0, number: 0, reason: "" }
    }
}

/// The reply of a step at the hash of the holds.
struct HoldsReply {
    status: i64,
    /// The time to live of the lock key, in milliseconds.
    lives: u64,
    /// The changes of the sorted set of the ends.
    ends: Vec<Vec<u8>>,
    /// For a break: each attempt whose hold was removed, and another lock key that the attempt held. For a revoke: the revoked holds. For
    /// the renewal of a revoked hold: the reason.
    more: Vec<Vec<u8>>,
}

/// The reply of a step at a lock key.
enum LockReply {
    Status(i64),
    /// The hold that was revoked, or the reason of an earlier revoke.
    Revoked(Vec<u8>),
}

/// Replies of a step at a lock key: the attempt does not hold it, the step is done, or the holds are in the hash.
const NOT_HERE: i64 = 0;
const DONE: i64 = 1;
const IN_HASH: i64 = 2;
/// Another lock client holds it.
const FOREIGN: i64 = -1;
/// There is no hash of holds.
const NO_HASH: i64 = 2;
/// The hold is revoked.
const REVOKED: i64 = 3;

impl<'a> SlotMigration<'a> {
    pub fn new(runner: &'a ScriptRunner, group: KeyGroup) -> Self {
        SlotMigration { runner, group, replicated: false }
    }

    /// Renews holds, each for itself. An error if no renewal has a reply.
    pub async fn renew(self, keys: &[&RequestKey]) -> Result<Vec<RenewOutcome>> {
        // The lease ends earlier on a replica without the renewal. A release or a break loses nothing on such a replica.
        let replicated = SlotMigration { replicated: true, ..self };
        let replies = join_all(keys.iter().map(|key| replicated.renew_one(key))).await;
        if replies.iter().all(std::result::Result::is_err) {
            let first = replies.into_iter().next().ok_or_else(unexpected_reply)?;
            return Err(first.err().map_or_else(unexpected_reply, Error::from));
        }
        let outcome = |reply: std::result::Result<RenewOutcome, Failure>| match reply {
            Ok(outcome) => outcome,
            Err(failure) => {
                tracing::warn!(?failure, "renewal failed while the slot migrates; the guard renews again");
                RenewOutcome::Unknown
            }
        };
        Ok(replies.into_iter().map(outcome).collect())
    }

    async fn renew_one(self, key: &RequestKey) -> Result<RenewOutcome, Failure> {
        let attempt = key.attempt.to_hex();
        for name in key.names.iter() {
            match self.renew_name(&self.runner.keys.lock_key(name), &attempt).await? {
                RenewOutcome::Renewed => {}
                other => return Ok(other),
            }
        }
        Ok(RenewOutcome::Renewed)
    }

    async fn renew_name(self, key: &str, attempt: &str) -> Result<RenewOutcome, Failure> {
        let renewed = |done| if done { RenewOutcome::Renewed } else { RenewOutcome::Lost };
        let revoked = |reason: &[u8]| RenewOutcome::Revoked(String::from_utf8_lossy(reason).into());
        match self.step_lock(key, MigrationStep::new("renew", attempt)).await? {
            LockReply::Status(IN_HASH) => {}
            LockReply::Status(status) => return Ok(renewed(status == DONE)),
            LockReply::Revoked(reason) => return Ok(revoked(&reason)),
        }
        let look = self.step_holds(key, MigrationStep::new("look", attempt)).await?;
        if look.status == NO_HASH {
            // The lock key says that there are holds, but not which: the attempt has not lost its hold for certain.
            return Err(holds_missing(key));
        }
        if look.status != DONE {
            return Ok(RenewOutcome::Lost);
        }
        self.step_ends(key, look.lives, &look.ends).await?;
        let keep = MigrationStep { number: look.lives, ..MigrationStep::new("keep", attempt) };
        if !matches!(self.step_lock(key, keep).await.map_err(after_a_write)?, LockReply::Status(DONE)) {
            return Ok(RenewOutcome::Lost);
        }
        let renewal =
            self.step_holds(key, MigrationStep::new("renew", attempt)).await.map_err(after_a_write)?;
        Ok(match (renewal.status, &renewal.more[..]) {
            (REVOKED, [reason]) => revoked(reason),
            (status, _) => renewed(status == DONE),
        })
    }

    /// Releases the holds of one attempt, or removes its request from the queue. `release`: the argument of the usual script.
    pub async fn release(self, keys: &[String], release: &[u8]) -> Result<Value, Failure> {
        let (attempt, flags, generation, limit) =
            decode_release(release).ok_or_else(|| Failure::NoReply("a malformed release".into()))?;
        let step = MigrationStep { flags, limit, ..MigrationStep::new("release", attempt) };
        // Whether a step has written. Then no failure of a later one means that nothing happened.
        let mut written = false;
        let released = async {
            if flags & release_flags::UNANSWERED != 0 {
                self.leave_tombstone(attempt, generation, &mut written).await?;
            }
            let left = self.leave_queue(keys, step, &mut written).await?;
            let released = self.release_holds(keys, step, &mut written).await?;
            Ok(Value::Int((left || released).into()))
        };
        let released = released.await;
        released.map_err(|failure| if written { after_a_write(failure) } else { failure })
    }

    async fn release_holds(
        self,
        keys: &[String],
        step: MigrationStep<'_>,
        written: &mut bool,
    ) -> Result<bool, Failure> {
        let mut gone = false;
        for key in keys {
            gone |= match self.step_lock(key, step).await? {
                LockReply::Status(NOT_HERE) => false,
                LockReply::Status(IN_HASH) => self.release_from_hash(key, step, written).await?,
                _ => true,
            };
            *written |= gone;
        }
        let unconfirmed = format!("{}unconfirmed:{}", self.prefix(), self.runner.client);
        self.call(cmd("SREM").arg(unconfirmed).arg(step.attempt)).await?;
        Ok(gone)
    }

    async fn release_from_hash(
        self,
        key: &str,
        step: MigrationStep<'_>,
        written: &mut bool,
    ) -> Result<bool, Failure> {
        let holds = self.step_holds(key, step).await?;
        *written |= holds.status != NO_HASH;
        self.follow_holds(key, &holds).await?;
        Ok(holds.status == DONE)
    }

    /// Changes the other keys of a lock to match the hash of its holds.
    async fn follow_holds(self, key: &str, holds: &HoldsReply) -> Result<(), Failure> {
        if !holds.ends.is_empty() {
            self.step_ends(key, holds.lives, &holds.ends).await?;
        }
        if holds.lives > 0 {
            let keep = MigrationStep { number: holds.lives, ..MigrationStep::new("keep", "") };
            self.step_lock(key, keep).await?;
        }
        Ok(())
    }

    async fn leave_tombstone(self, attempt: &str, generation: u8, written: &mut bool) -> Result<(), Failure> {
        let prefix = self.prefix();
        for (key, value) in
            [(format!("{prefix}released:{attempt}"), generation), (format!("{prefix}released"), 1)]
        {
            let ttl = millis(self.runner.tombstone_ttl());
            let call = ScriptCall::new(&MIGRATING_TOMBSTONE, &[key]).arg(value).arg(ttl);
            self.runner.run(self.group, &call).await?;
            *written = true;
        }
        Ok(())
    }

    /// Removes a queue entry. The entry counts only while the request is in the process's hash too, so the hash comes last and
    /// the release can be sent again.
    async fn leave_queue(
        self,
        keys: &[String],
        step: MigrationStep<'_>,
        written: &mut bool,
    ) -> Result<bool, Failure> {
        let (prefix, client) = (self.prefix(), &self.runner.client);
        let MigrationStep { attempt, limit, .. } = step;
        let mut left = false;
        for key in keys {
            let call = ScriptCall::new(&MIGRATING_QUEUE, &[format!("{prefix}queue:{key}")]);
            let call = call.arg(format!("{attempt}{client}")).arg(limit);
            left |= self.runner.run(self.group, &call).await? == Value::Int(1);
            *written |= left;
        }
        if left || limit == 0 {
            let requests = format!("{prefix}client:{client}");
            left |= self.call(cmd("HDEL").arg(requests).arg(attempt)).await? == Value::Int(1);
            *written |= left;
        }
        Ok(left)
    }

    /// Takes a lock away from its holders.
    pub async fn break_lock(self, key: &str, reason: &str) -> Result<Fence> {
        let fence = self.next_fence().await?;
        let step = MigrationStep { number: fence.get(), ..MigrationStep::new("break", reason) };
        if !matches!(self.step_lock(key, step).await?, LockReply::Status(IN_HASH)) {
            return Ok(fence);
        }
        let holds = self.step_holds(key, step).await?;
        if holds.status == NO_HASH {
            // The holders are not known, and no script grants this lock before its key is gone.
            self.step_lock(key, MigrationStep::new("drop", "")).await?;
            return Ok(fence);
        }
        self.follow_break(key, &holds).await.map_err(after_a_write)?;
        Ok(fence)
    }

    async fn follow_break(self, key: &str, holds: &HoldsReply) -> Result<(), Failure> {
        // A grant of several names is lost as a whole.
        for pair in holds.more.chunks_exact(2) {
            let (attempt, other) = (String::from_utf8_lossy(&pair[0]), String::from_utf8_lossy(&pair[1]));
            let taken = self.step_holds(&other, MigrationStep::new("take", &attempt)).await?;
            self.follow_holds(&other, &taken).await?;
        }
        self.follow_holds(key, holds).await
    }

    /// Marks the holds of a lock as revoked, or that of one attempt. Returns the fence of the revoke and the marked holds as they are
    /// stored; `None` if another lock client holds the lock.
    pub async fn revoke(
        self,
        key: &str,
        reason: &str,
        attempt: &str,
    ) -> Result<Option<(Fence, Vec<Vec<u8>>)>> {
        let fence = self.next_fence().await?;
        let step = MigrationStep { number: fence.get(), reason, ..MigrationStep::new("revoke", attempt) };
        match self.step_lock(key, step).await? {
            LockReply::Status(FOREIGN) => return Ok(None),
            LockReply::Status(IN_HASH) => {}
            LockReply::Status(_) => return Ok(Some((fence, Vec::new()))),
            LockReply::Revoked(hold) => return Ok(Some((fence, vec![hold]))),
        }
        let holds = self.step_holds(key, step).await?;
        if holds.status == NO_HASH {
            return Err(holds_missing(key).into());
        }
        self.follow_revoke(key, &holds, step).await.map_err(after_a_write)?;
        Ok(Some((fence, holds.more)))
    }

    async fn follow_revoke(
        self,
        key: &str,
        holds: &HoldsReply,
        step: MigrationStep<'_>,
    ) -> Result<(), Failure> {
        self.follow_holds(key, holds).await?;
        // A grant of several names is revoked as a whole.
        for packed in &holds.more {
            let attempt = String::from_utf8_lossy(packed.get(..32).unwrap_or_default());
            let keys = decode_hold(packed).map(|hold| hold.keys).unwrap_or_default();
            for other in keys.iter().filter(|other| *other != key) {
                let mark = MigrationStep { attempt: &attempt, ..step };
                let marked = self.step_holds(other, mark).await?;
                self.follow_holds(other, &marked).await?;
            }
        }
        Ok(())
    }

    async fn next_fence(self) -> Result<Fence> {
        let counter = format!("{}fence", self.prefix());
        let call = ScriptCall::new(&MIGRATING_FENCE, &[counter]).arg(self.runner.highest_fence_seen());
        let Value::Int(fence) = self.runner.run(self.group, &call).await? else {
            return Err(unexpected_reply());
        };
        self.runner.record_fence(fence)
    }

    async fn step_lock(self, key: &str, step: MigrationStep<'_>) -> Result<LockReply, Failure> {
        let call = self.with_step(ScriptCall::new(&MIGRATING_LOCK, &[key]), step);
        match self.run_one_key(&call).await? {
            Value::Int(status) => Ok(LockReply::Status(status)),
            Value::Array(parts) => match &parts[..] {
                [Value::BulkString(text)] => Ok(LockReply::Revoked(text.clone())),
                _ => Err(Failure::unexpected_reply()),
            },
            _ => Err(Failure::unexpected_reply()),
        }
    }

    async fn step_holds(self, key: &str, step: MigrationStep<'_>) -> Result<HoldsReply, Failure> {
        let holds = format!("{}holds:{key}", self.prefix());
        let call = self.with_step(ScriptCall::new(&MIGRATING_HOLDS, &[holds]), step);
        let Value::Array(parts) = self.run_one_key(&call).await? else {
            return Err(Failure::unexpected_reply());
        };
        let [Value::Int(status), Value::Int(lives), Value::Array(ends), Value::Array(more)] = &parts[..]
        else {
            return Err(Failure::unexpected_reply());
        };
        Ok(HoldsReply {
            status: *status,
            lives: u64::try_from(*lives).unwrap_or(0),
            ends: texts(ends).map(<[u8]>::to_vec).collect(),
            more: texts(more).map(<[u8]>::to_vec).collect(),
        })
    }

    async fn step_ends(self, key: &str, lives: u64, ends: &[Vec<u8>]) -> Result<(), Failure> {
        let call = ScriptCall::new(&MIGRATING_ENDS, &[format!("{}ends:{key}", self.prefix())]).arg(lives);
        let call = ends.iter().fold(call, |call, part| call.arg(&part[..]));
        self.run_one_key(&call).await.map(|_| ())
    }

    fn with_step(self, call: ScriptCall, step: MigrationStep<'_>) -> ScriptCall {
        let call = call.arg(self.prefix()).arg(step.verb).arg(step.attempt);
        call.arg(step.flags).arg(step.limit).arg(step.number).arg(step.reason)
    }

    /// Runs a script of one key on the node that has the key, and waits for the replicas if the step counts only then.
    async fn run_one_key(self, call: &ScriptCall) -> Result<Value, Failure> {
        match &self.runner.grant_router {
            Some(grants) if self.replicated => {
                let (reply, replicated) =
                    self.runner.run_replicated(grants, self.group, call, OnSplitKeys::Retry).await?;
                // The script has written: whatever `WAIT` replies, the step may have happened.
                replicated.map(|()| reply).map_err(|failure| Failure::NoReply(failure.to_string()))
            }
            _ => self.runner.run(self.group, call).await,
        }
    }

    async fn call(self, command: &redis::Cmd) -> Result<Value, Failure> {
        self.runner.router.call(self.group.slot(), command).await
    }

    fn prefix(self) -> String {
        self.runner.keys.group_prefix(self.group)
    }
}

/// The failure of a step after another one that may have written: the operation may be done in part.
fn after_a_write(failure: Failure) -> Failure {
    match failure {
        Failure::NoReply(text) => Failure::NoReply(text),
        failure => Failure::NoReply(format!("a part of it may be done: {failure}")),
    }
}

/// The failure of a step at a lock whose key says that there are holds, while their hash is on neither node.
fn holds_missing(key: &str) -> Failure {
    Failure::NotSent(format!("TRYAGAIN the holds of {key} are missing"))
}

fn texts(values: &[Value]) -> impl Iterator<Item = &[u8]> {
    values.iter().filter_map(|value| match value {
        Value::BulkString(text) => Some(&text[..]),
        _ => None,
    })
}
