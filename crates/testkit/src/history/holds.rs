//! From events to holds: who believed to have which lock, from when until when.

use std::collections::{BTreeMap, HashMap};

use lockkeeper_core::{Mode, Outcome};

use super::{Event, History, Kind, Op, Phase};

/// The story of one ask for one lock.
#[derive(Clone, Debug)]
pub(super) struct Hold<'h> {
    /// The first time it was asked for: the store may have granted it then already.
    pub asked: &'h Event,
    /// The first good answer. Without one it was never believed to be held, whatever the store thinks.
    pub granted: Option<&'h Event>,
    /// Good answers to repetitions of the ask.
    pub repeated: Vec<&'h Event>,
    /// Until when it was believed to be held, if nothing ended it before.
    pub deadline: u64,
    /// When its holder learned that it is lost.
    pub lost: Option<&'h Event>,
    pub signal: Option<&'h Event>,
    pub release: Option<&'h Event>,
    pub released: Option<&'h Event>,
}

impl Hold<'_> {
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
        let told = |event: &&Event| event.mode.is_some();
        let event = self.granted.filter(told).unwrap_or(self.asked);
        match event.mode {
            Some(Kind::Shared) => Mode::Shared,
            Some(Kind::Permit) => Mode::Permit(event.permits.unwrap_or(1)),
            Some(Kind::Exclusive) | None => Mode::Exclusive,
        }
    }

    /// Whether both belong to one explicit owner: these do not exclude each other.
    pub fn same_owner(&self, other: &Hold<'_>) -> bool {
        self.owner().is_some() && self.owner() == other.owner()
    }

    pub fn owner(&self) -> Option<&str> {
        self.asked.owner.as_deref().or(self.granted.and_then(|event| event.owner.as_deref()))
    }

    fn is_over(&self) -> bool {
        self.release.is_some() || self.lost.is_some() || self.signal.is_some()
    }

    fn extend(&mut self, event: &Event) {
        // Good news after the deadline comes too late: a lock that was lost stays lost.
        if event.t <= self.deadline {
            self.deadline = self.deadline.max(event.deadline.unwrap_or(0));
        }
    }
}

/// All asks of a history, by lock, in the order in which they were first made.
pub(super) fn holds(history: &History) -> BTreeMap<&str, Vec<Hold<'_>>> {
    let mut locks: BTreeMap<&str, Vec<Hold<'_>>> = BTreeMap::new();
    // A fingerprint has 32 bits, so in a long run one comes again: an ask after the end of a hold is another ask.
    let mut current: HashMap<(&str, &str, &str), usize> = HashMap::new();
    for event in history.events() {
        let Some(attempt) = event.attempt.as_deref() else { continue };
        let holds = locks.entry(&event.lock).or_default();
        let key = (&*event.lock, &*event.proc, attempt);
        let known = current.get(&key).copied();
        match known {
            Some(at) if !(event.op == Op::Acquire && event.phase == Phase::Invoke && holds[at].is_over()) => {
                note(&mut holds[at], event);
            }
            // The story may begin in the middle only with an ask; owners::check complains of anything else.
            _ if event.op == Op::Acquire => {
                current.insert(key, holds.len());
                holds.push(Hold::new(event));
            }
            _ => {}
        }
    }
    locks
}

impl<'h> Hold<'h> {
    fn new(event: &'h Event) -> Hold<'h> {
        let mut hold = Hold {
            asked: event,
            granted: None,
            repeated: Vec::new(),
            deadline: u64::MAX,
            lost: None,
            signal: None,
            release: None,
            released: None,
        };
        if event.phase != Phase::Invoke {
            note(&mut hold, event);
        }
        hold
    }
}

fn note<'h>(hold: &mut Hold<'h>, event: &'h Event) {
    match (event.op, event.phase) {
        (Op::Acquire, Phase::Ok) if hold.granted.is_none() => {
            hold.granted = Some(event);
            hold.deadline = event.deadline.unwrap_or(u64::MAX);
        }
        (Op::Acquire, Phase::Ok) => {
            hold.repeated.push(event);
            hold.extend(event);
        }
        (Op::Renew, Phase::Ok) => hold.extend(event),
        (Op::Signal, _) => {
            hold.signal.get_or_insert(event);
        }
        (Op::Release, Phase::Invoke) => {
            hold.release.get_or_insert(event);
        }
        (Op::Release, Phase::Ok) => {
            hold.released.get_or_insert(event);
        }
        (Op::Renew, Phase::Fail) if event.error.as_deref() == Some(Outcome::Lost.word()) => {
            hold.lost.get_or_insert(event);
        }
        _ => {}
    }
}
