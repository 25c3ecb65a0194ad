//! The events of a history: what a client process did and saw, one JSON object per line.

use std::fmt;

use lockkeeper_core::{Attempt, BootInstant, Error, Fence, Grant, Mode, Outcome, Owner};
use serde::{Deserialize, Serialize};

/// An operation of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// A lock was asked for.
    Acquire,
    /// A lease was renewed.
    Renew,
    /// A lock was given back.
    Release,
    /// Something was written to what the lock protects.
    Write,
    /// The library reported to a holder that its lock is lost. The event has no beginning: it is recorded with [`OperationPhase::Info`].
    Signal,
}

/// How far it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperationPhase {
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
pub enum HoldKind {
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
pub struct HistoryEvent {
    /// When, in nanoseconds of the boot-time clock.
    pub t: u64,
    /// By which process or task: one that is alive or not as a whole.
    pub proc: String,
    /// On which lock.
    pub lock: String,
    /// The operation.
    pub op: Operation,
    /// How far it got.
    pub phase: OperationPhase,
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
    pub mode: Option<HoldKind>,
    /// Of how many permits it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permits: Option<u32>,
    /// The word for what went wrong, from the table of outcomes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The value that the client wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

impl HistoryEvent {
    fn new(op: Operation, phase: OperationPhase, lock: impl AsRef<str>) -> HistoryEvent {
        HistoryEvent {
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
    pub fn invoke(op: Operation, lock: impl AsRef<str>) -> HistoryEvent {
        HistoryEvent::new(op, OperationPhase::Invoke, lock)
    }

    /// It was done.
    pub fn ok(op: Operation, lock: impl AsRef<str>) -> HistoryEvent {
        HistoryEvent::new(op, OperationPhase::Ok, lock)
    }

    /// It was not done, because the answer was another one: *Busy*, *Lost*, *AlreadyGone* (which is recorded as lost).
    pub fn refused(op: Operation, lock: impl AsRef<str>, answer: Outcome) -> HistoryEvent {
        let event = HistoryEvent::new(op, OperationPhase::Fail, lock);
        HistoryEvent { error: Some(answer.as_str().to_owned()), ..event }
    }

    /// It failed; an unknown outcome may still have been done.
    pub fn failed(op: Operation, lock: impl AsRef<str>, error: &Error) -> HistoryEvent {
        let phase =
            if matches!(error, Error::Unknown(_)) { OperationPhase::Info } else { OperationPhase::Fail };
        HistoryEvent { phase, ..HistoryEvent::refused(op, lock, error.outcome()) }
    }

    /// The guard reports that the lock is lost.
    pub fn signal(lock: impl AsRef<str>) -> HistoryEvent {
        HistoryEvent::new(Operation::Signal, OperationPhase::Info, lock)
    }

    /// By this attempt. Only its fingerprint is kept.
    #[must_use]
    pub fn attempt(self, attempt: &Attempt) -> HistoryEvent {
        HistoryEvent { attempt: Some(attempt.fingerprint()), ..self }
    }

    /// By this owner. Only its fingerprint is kept.
    #[must_use]
    pub fn owner(self, owner: &Owner) -> HistoryEvent {
        HistoryEvent { owner: Some(owner.fingerprint()), ..self }
    }

    /// With this fence.
    #[must_use]
    pub fn fence(self, fence: Fence) -> HistoryEvent {
        HistoryEvent { fence: Some(fence.get()), ..self }
    }

    /// Believed to be held until then.
    #[must_use]
    pub fn deadline(self, deadline: BootInstant) -> HistoryEvent {
        HistoryEvent { deadline: Some(deadline.as_nanos()), ..self }
    }

    /// Held like this.
    #[must_use]
    pub fn mode(self, mode: Mode) -> HistoryEvent {
        let (mode, permits) = match mode {
            Mode::Exclusive => (HoldKind::Exclusive, None),
            Mode::Shared => (HoldKind::Shared, None),
            Mode::Permit(n) => (HoldKind::Permit, Some(n)),
        };
        HistoryEvent { mode: Some(mode), permits, ..self }
    }

    /// With the attempt, fence and mode of this grant.
    #[must_use]
    pub fn grant(self, grant: &Grant) -> HistoryEvent {
        self.attempt(&grant.key.attempt).fence(grant.fence).mode(grant.mode)
    }

    /// Writing this.
    #[must_use]
    pub fn value(self, value: impl fmt::Display) -> HistoryEvent {
        HistoryEvent { value: Some(value.to_string()), ..self }
    }
}

impl fmt::Display for HistoryEvent {
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
