//! From events to holds: who believed to have which lock, from when until when.

use std::collections::{BTreeMap, HashMap};

use lockkeeper_core::{Mode, Outcome};

use super::{History, HistoryEvent, HoldKind, Operation, OperationPhase};

/// The story of one ask for one lock.
#[derive(Clone, Debug)]
pub(super) struct HeldInterval<'h> {
    /// The first time it was asked for: the store may have granted it then already.
    pub asked: &'h HistoryEvent,
    /// The first good answer. Without one it was never believed to be held, whatever the store thinks.
    pub granted: Option<&'h HistoryEvent>,
    /// Good answers to retries of the request.
    pub repeated: Vec<&'h HistoryEvent>,
    /// Until when it was believed to be held, if nothing ended it before.
    pub deadline: u64,
    /// When its holder learned that it is lost.
    pub lost: Option<&'h HistoryEvent>,
    pub signal: Option<&'h HistoryEvent>,
    pub release: Option<&'h HistoryEvent>,
    pub released: Option<&'h HistoryEvent>,
}

impl HeldInterval<'_> {
    /// From when it was believed to be held.
    pub fn from(&self) -> u64 {
        self.granted.map_or(u64::MAX, |event| event.t)
    }

    /// Until when it was believed to be held.
    pub fn until(&self) -> u64 {
        let ends = [self.release, self.lost, self.signal];
        ends.into_iter().flatten().map(|event| event.t).fold(self.deadline, u64::min)
    }

    pub fn fence(&self) -> Option<u64> {
        self.granted.and_then(|event| event.fence)
    }

    pub fn mode(&self) -> Mode {
        let told = |event: &&HistoryEvent| event.mode.is_some();
        let event = self.granted.filter(told).unwrap_or(self.asked);
        match event.mode {
            Some(HoldKind::Shared) => Mode::Shared,
            Some(HoldKind::Permit) => Mode::Permit(event.permits.unwrap_or(1)),
            Some(HoldKind::Exclusive) | None => Mode::Exclusive,
        }
    }

    /// Whether both belong to one explicit owner: these do not exclude each other.
    pub fn same_owner(&self, other: &HeldInterval<'_>) -> bool {
        self.owner().is_some() && self.owner() == other.owner()
    }

    pub fn owner(&self) -> Option<&str> {
        self.asked.owner.as_deref().or(self.granted.and_then(|event| event.owner.as_deref()))
    }

    fn is_over(&self) -> bool {
        self.release.is_some() || self.lost.is_some() || self.signal.is_some()
    }

    fn extend(&mut self, event: &HistoryEvent) {
        // Good news after the deadline comes too late: a lock that was lost stays lost.
        if event.t <= self.deadline {
            self.deadline = self.deadline.max(event.deadline.unwrap_or(0));
        }
    }
}

/// All asks of a history, by lock, in the order in which they were first made.
pub(super) fn holds(history: &History) -> BTreeMap<&str, Vec<HeldInterval<'_>>> {
    let mut locks: BTreeMap<&str, Vec<HeldInterval<'_>>> = BTreeMap::new();
    // A fingerprint has 32 bits, so in a long run one repeats: a request after the end of a hold is another request.
    let mut current: HashMap<(&str, &str, &str), usize> = HashMap::new();
    for event in history.events() {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let holds = locks.entry(&event.lock).or_default();
        let key = (&*event.lock, &*event.proc, attempt);
        let known = current.get(&key).copied();
        match known {
            Some(at)
                if !(event.op == Operation::Acquire
                    && event.phase == OperationPhase::Invoke
                    && holds[at].is_over()) =>
            {
                note(&mut holds[at], event);
            }
            // A history may begin in the middle only with a request; owners::check reports anything else.
            _ if event.op == Operation::Acquire => {
                current.insert(key, holds.len());
                holds.push(HeldInterval::new(event));
            }
            _ => {}
        }
    }
    locks
}

impl<'h> HeldInterval<'h> {
    fn new(event: &'h HistoryEvent) -> HeldInterval<'h> {
        let mut hold = HeldInterval {
            asked: event,
            granted: None,
            repeated: Vec::new(),
            deadline: u64::MAX,
            lost: None,
            signal: None,
            release: None,
            released: None,
        };
        if event.phase != OperationPhase::Invoke {
            note(&mut hold, event);
        }
        hold
    }
}

fn note<'h>(hold: &mut HeldInterval<'h>, event: &'h HistoryEvent) {
    match (event.op, event.phase) {
        (Operation::Acquire, OperationPhase::Ok) if hold.granted.is_none() => {
            hold.granted = Some(event);
            hold.deadline = event.deadline.unwrap_or(u64::MAX);
        }
        (Operation::Acquire, OperationPhase::Ok) => {
            hold.repeated.push(event);
            hold.extend(event);
        }
        (Operation::Renew, OperationPhase::Ok) => hold.extend(event),
        (Operation::Signal, _) => {
            hold.signal.get_or_insert(event);
        }
        (Operation::Release, OperationPhase::Invoke) => {
            hold.release.get_or_insert(event);
        }
        (Operation::Release, OperationPhase::Ok) => {
            hold.released.get_or_insert(event);
        }
        (Operation::Renew, OperationPhase::Fail)
            if event.error.as_deref() == Some(Outcome::Lost.as_str()) =>
        {
            hold.lost.get_or_insert(event);
        }
        _ => {}
    }
}
