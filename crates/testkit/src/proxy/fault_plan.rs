//! The plan of faults: the test writes it, and the connections of the proxy follow it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lockkeeper_core::IgnorePoison;
use tokio::sync::watch;

use super::fault::{ConnectionEnd, Fault, FaultAction, Pick};
use super::framing::{Framing, MessageMark};
use super::{Direction, Injected};

/// The actions that a connection takes on one message.
#[derive(Debug)]
pub(super) enum Plan {
    Pass,
    PassThenEnd(ConnectionEnd),
    End(ConnectionEnd),
    Drop,
    Duplicate,
    Hold(Option<Duration>, watch::Receiver<bool>),
    DeliverLate(watch::Receiver<bool>),
}

/// The faults that hold for all connections at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Conditions {
    pub refusing: bool,
    pub held: [bool; 2],
    pub bytes_per_second: Option<u32>,
}

/// One connection, as the script sees it.
pub(super) struct ProxiedConnection {
    pub index: u64,
    pub sent: Mutex<Vec<u8>>,
    pub told: watch::Sender<Option<ConnectionEnd>>,
    /// The server's side stays open when the client closes its own.
    pub outlives_client: AtomicBool,
    counts: [AtomicU64; 2],
}

impl ProxiedConnection {
    fn taken_by(&self, pick: &Pick) -> bool {
        pick.takes(self.index, &locked(&self.sent))
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

#[derive(Clone, Copy)]
enum FaultStage {
    Waiting,
    Answer { line: u64, order: u64, stream: Option<u32> },
    Over,
}

struct Armed {
    fault: Fault,
    seen: u64,
    stage: FaultStage,
    handle: Injected,
}

/// The whole of it.
pub(super) struct FaultPlan {
    pub framing: Framing,
    pub weather: watch::Sender<Conditions>,
    pub connections: AtomicU64,
    pub messages: [AtomicU64; 2],
    pub fired: AtomicU64,
    pub trouble: Mutex<Option<String>>,
    faults: Mutex<Vec<Armed>>,
    lines: Mutex<BTreeMap<u64, Arc<ProxiedConnection>>>,
}

impl FaultPlan {
    pub fn new(framing: Framing) -> Self {
        FaultPlan {
            framing,
            weather: watch::Sender::default(),
            connections: AtomicU64::default(),
            messages: Default::default(),
            fired: AtomicU64::default(),
            trouble: Mutex::default(),
            faults: Mutex::default(),
            lines: Mutex::default(),
        }
    }

    pub fn add(&self, fault: Fault) -> Injected {
        let handle = Injected::default();
        let armed = Armed { fault, seen: 0, stage: FaultStage::Waiting, handle: handle.clone() };
        locked(&self.faults).push(armed);
        handle
    }

    /// Forgets all faults and lets go of everything that one of them holds.
    pub fn clear(&self) {
        for armed in locked(&self.faults).drain(..) {
            armed.handle.release();
        }
    }

    pub fn open_line(&self) -> Arc<ProxiedConnection> {
        let index = self.connections.fetch_add(1, Ordering::Relaxed);
        let told = watch::Sender::new(None);
        let line = Arc::new(ProxiedConnection {
            index,
            sent: Mutex::default(),
            told,
            outlives_client: AtomicBool::default(),
            counts: Default::default(),
        });
        locked(&self.lines).insert(index, line.clone());
        line
    }

    pub fn close_line(&self, line: &ProxiedConnection) {
        locked(&self.lines).remove(&line.index);
    }

    pub fn open_lines(&self) -> usize {
        locked(&self.lines).len()
    }

    /// Ends the connections that are meant, and says how many these were.
    pub fn end(&self, pick: &Pick, end: ConnectionEnd) -> usize {
        let lines = locked(&self.lines);
        let meant: Vec<_> = lines.values().filter(|line| line.taken_by(pick)).collect();
        meant.iter().for_each(|line| line.told.send_modify(|told| *told = Some(end)));
        meant.len()
    }

    /// Returns the actions for the message that begins now, and counts the message.
    pub fn plan(&self, line: &ProxiedConnection, direction: Direction, mark: MessageMark) -> Plan {
        if mark.aside {
            return Plan::Pass;
        }
        self.messages[direction as usize].fetch_add(1, Ordering::Relaxed);
        let order = line.counts[direction as usize].fetch_add(1, Ordering::Relaxed);
        let mut faults = locked(&self.faults);
        // All of them count this message; the first that has a say in it, has it.
        let mut plan = Plan::Pass;
        for armed in faults.iter_mut() {
            let wants = armed.see(self.framing, line, direction, order, mark);
            if let (Some(wants), Plan::Pass) = (wants, &plan) {
                plan = wants;
                self.fired.fetch_add(1, Ordering::Relaxed);
                armed.handle.fire();
            }
        }
        plan
    }
}

impl Armed {
    fn see(
        &mut self,
        framing: Framing,
        line: &ProxiedConnection,
        to: Direction,
        order: u64,
        mark: MessageMark,
    ) -> Option<Plan> {
        match self.stage {
            FaultStage::Over => None,
            FaultStage::Waiting => self.count(line, to, order, mark),
            FaultStage::Answer { line: asked, order: nth, stream } => {
                let answers = match (framing, stream) {
                    (Framing::Bytes, _) => true,
                    (_, Some(stream)) => mark.stream == Some(stream),
                    (_, None) => order >= nth,
                };
                if to != Direction::Replies || line.index != asked || !answers {
                    return None;
                }
                self.stage = if self.fault.at.repeat { FaultStage::Waiting } else { FaultStage::Over };
                self.plan()
            }
        }
    }

    fn count(
        &mut self,
        line: &ProxiedConnection,
        direction: Direction,
        order: u64,
        mark: MessageMark,
    ) -> Option<Plan> {
        let at = &self.fault.at;
        if direction != at.direction || !line.taken_by(&at.pick) {
            return None;
        }
        self.seen += 1;
        if self.seen < at.n {
            return None;
        }
        if matches!(self.fault.what, FaultAction::EndAtReply(_)) && direction == Direction::Requests {
            self.stage = FaultStage::Answer { line: line.index, order, stream: mark.stream };
            return None;
        }
        if !at.repeat {
            self.stage = FaultStage::Over;
        }
        self.plan()
    }

    fn plan(&self) -> Option<Plan> {
        Some(match self.fault.what {
            FaultAction::EndBefore(end) | FaultAction::EndAtReply(end) => Plan::End(end),
            FaultAction::EndAfter(end) => Plan::PassThenEnd(end),
            FaultAction::Hold(span) => Plan::Hold(span, self.handle.released()),
            FaultAction::DeliverLate => Plan::DeliverLate(self.handle.released()),
            FaultAction::Drop => Plan::Drop,
            FaultAction::Duplicate => Plan::Duplicate,
        })
    }
}
