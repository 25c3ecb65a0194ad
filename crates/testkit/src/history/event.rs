use std::fmt;

use lockkeeper_core::{Attempt, Error, Fence, Grant, Mode, Moment, Outcome, Owner};
use serde::{Deserialize, Serialize};

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// A lock was asked for.
    Acquire,
    /// A lease was renewed.
    Renew,
    /// A lock was given back.
    Release,
    /// Something was written to what the lock protects.
    Write,
    /// A holder was told that its lock is lost. It has no beginning: it is recorded with [`Phase::Info`].
    Signal,
}

/// How far it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It begins: recorded before anything is sent.
    Invoke,
    /// It was done.
    Ok,
    /// It was not done.
    Fail,
    /// It may have been done.
    Info,
}

/// How a lock is held, without the number of permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// By one alone.
    Exclusive,
    /// By many.
    Shared,
    /// By so many.
    Permit,
}

/// One line of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// When, in nanoseconds of the boot-time clock.
    pub t: u64,
    /// By which process or task: one that is alive or not as a whole.
    pub proc: String,
    /// On which lock.
    pub lock: String,
    /// What was done.
    pub op: Op,
    /// How far it got.
    pub phase: Phase,
    /// The fingerprint of the attempt, never the attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<String>,
    /// The fingerprint of the owner, if there is an explicit one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The fence of the grant, or of the write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Until when the holder believes to hold it, on the same clock as `t`. Never, if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<u64>,
    /// How it is held; exclusively, if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Kind>,
    /// Of how many permits it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permits: Option<u32>,
    /// The word for what went wrong, from the table of outcomes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

impl Event {
    fn new(op: Op, phase: Phase, lock: impl AsRef<str>) -> Event {
        Event {
            t: 0,
            proc: String::new(),
            lock: lock.as_ref().to_owned(),
            op,
            phase,
            attempt: None,
            owner: None,
            fence: None,
            deadline: None,
            mode: None,
            permits: None,
            error: None,
            value: None,
        }
    }

    /// It begins.
    pub fn invoke(op: Op, lock: impl AsRef<str>) -> Event {
        Event::new(op, Phase::Invoke, lock)
    }

    /// It was done.
    pub fn ok(op: Op, lock: impl AsRef<str>) -> Event {
        Event::new(op, Phase::Ok, lock)
    }

    /// It was not done, because the answer was another one: *Busy*, *Lost*, *AlreadyGone* (which is recorded as lost).
    pub fn refused(op: Op, lock: impl AsRef<str>, answer: Outcome) -> Event {
        let event = Event::new(op, Phase::Fail, lock);
        Event { error: Some(answer.word().to_owned()), ..event }
    }

    /// It failed; an unknown outcome may still have been done.
    pub fn failed(op: Op, lock: impl AsRef<str>, error: &Error) -> Event {
        let phase = if matches!(error, Error::Unknown(_)) { Phase::Info } else { Phase::Fail };
        Event { phase, ..Event::refused(op, lock, error.outcome()) }
    }

    /// The holder is told that the lock is lost.
    pub fn signal(lock: impl AsRef<str>) -> Event {
        Event::new(Op::Signal, Phase::Info, lock)
    }

    /// By this attempt. Only its fingerprint is kept.
    #[must_use]
    pub fn attempt(self, attempt: &Attempt) -> Event {
        Event { attempt: Some(attempt.fingerprint()), ..self }
    }

    /// By this owner. Only its fingerprint is kept.
    #[must_use]
    pub fn owner(self, owner: &Owner) -> Event {
        Event { owner: Some(owner.fingerprint()), ..self }
    }

    /// With this fence.
    #[must_use]
    pub fn fence(self, fence: Fence) -> Event {
        Event { fence: Some(fence.get()), ..self }
    }

    /// Believed to be held until then.
    #[must_use]
    pub fn deadline(self, deadline: Moment) -> Event {
        Event { deadline: Some(deadline.as_nanos()), ..self }
    }

    /// Held like this.
    #[must_use]
    pub fn mode(self, mode: Mode) -> Event {
        let (mode, permits) = match mode {
            Mode::Exclusive => (Kind::Exclusive, None),
            Mode::Shared => (Kind::Shared, None),
            Mode::Permit(n) => (Kind::Permit, Some(n)),
        };
        Event { mode: Some(mode), permits, ..self }
    }

    /// With the attempt, fence and mode of this grant.
    #[must_use]
    pub fn grant(self, grant: &Grant) -> Event {
        self.attempt(&grant.claim.attempt).fence(grant.fence).mode(grant.mode)
    }

    /// Writing this.
    #[must_use]
    pub fn value(self, value: impl fmt::Display) -> Event {
        Event { value: Some(value.to_string()), ..self }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.t as f64 / 1e9;
        write!(f, "{seconds:.6} s  {}  {:?} {:?} {:?}", self.proc, self.op, self.phase, self.lock)?;
        let numbers =
            [("fence", self.fence), ("deadline", self.deadline), ("permits", self.permits.map(u64::from))];
        for (what, number) in numbers {
            number.map_or(Ok(()), |n| write!(f, "  {what} {n}"))?;
        }
        let texts = [
            ("attempt", &self.attempt),
            ("owner", &self.owner),
            ("error", &self.error),
            ("value", &self.value),
        ];
        for (what, text) in texts {
            text.as_ref().map_or(Ok(()), |text| write!(f, "  {what} {text}"))?;
        }
        Ok(())
    }
}
