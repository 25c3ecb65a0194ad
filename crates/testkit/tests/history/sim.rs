//! A lock service in a few lines, correct or with one bug, and clients that write down what they see. Time is simulated.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use lockkeeper_core::{Attempt, BootInstant, Fence, Mode, Outcome};
use lockkeeper_testkit::history::{
    History, HistoryEvent, Operation, Rule, Violation, laws, linearizability, resource, signals,
};
use lockkeeper_testkit::resource::Accepted;

const TTL: u64 = 1_000;
const CLIENTS: u64 = 4;
const ROUNDS: u64 = 400;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    GrantsWhatIsHeld,
    OnePermitTooMany,
    DeadlineFromReply,
    FenceStartsAgain,
    FenceIsGivenTwice,
    ReleasesForAnyClient,
    ReleasesTwice,
    TellsLate,
    NeverTells,
    NoFenceCheck,
    LosesAWrite,
}

impl Bug {
    pub const ALL: [(Bug, Rule); 11] = [
        (Bug::GrantsWhatIsHeld, Rule::Exclusion),
        (Bug::OnePermitTooMany, Rule::Exclusion),
        (Bug::DeadlineFromReply, Rule::Exclusion),
        (Bug::FenceStartsAgain, Rule::Fence),
        (Bug::FenceIsGivenTwice, Rule::Fence),
        (Bug::ReleasesForAnyClient, Rule::Owner),
        (Bug::ReleasesTwice, Rule::Owner),
        (Bug::TellsLate, Rule::Signal),
        (Bug::NeverTells, Rule::Signal),
        (Bug::NoFenceCheck, Rule::Resource),
        (Bug::LosesAWrite, Rule::Resource),
    ];
}

pub struct Run {
    pub history: History,
    accepted: Vec<Accepted>,
}

impl Run {
    pub fn violations(&self) -> Vec<Violation> {
        let mut found = laws(&self.history);
        found.extend(signals(&self.history, &[], Duration::from_nanos(1)));
        found.extend(linearizability(&self.history));
        found.extend(resource(&self.history, "x", &self.accepted));
        found
    }
}

/// What a client does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Ask,
    AskArrives,
    Granted,
    Write,
    Release,
    ReleaseArrives,
    Released,
    Lost,
}

/// What a client knows: its attempt, its grant, and how its release was answered.
#[derive(Clone, Copy, Default)]
struct Client {
    attempt: u64,
    sent: u64,
    fence: u64,
    deadline: u64,
    told: bool,
    answer: Option<bool>,
}

struct Holder {
    attempt: u64,
    expires: u64,
}

struct World {
    seed: u64,
    bug: Option<Bug>,
    mode: Mode,
    queue: BinaryHeap<Reverse<(u64, u64, u64, Step)>>,
    scheduled: u64,
    clients: Vec<Client>,
    attempts: u64,
    holders: Vec<Holder>,
    fence: u64,
    events: Vec<HistoryEvent>,
    accepted: Vec<Accepted>,
}

/// Runs one world to its end. The same seed gives the same history.
pub fn run(seed: u64, bug: Option<Bug>) -> Run {
    // Every second world has a semaphore in it.
    let permits = bug == Some(Bug::OnePermitTooMany) || (bug.is_none() && seed % 2 == 1);
    let mut world = World {
        seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        bug,
        mode: if permits { Mode::Permit(2) } else { Mode::Exclusive },
        queue: BinaryHeap::new(),
        scheduled: 0,
        clients: vec![Client::default(); CLIENTS as usize],
        attempts: 0,
        holders: Vec::new(),
        fence: 0,
        events: Vec::new(),
        accepted: Vec::new(),
    };
    for client in 0..CLIENTS {
        world.after(0, client, Step::Ask, 1, 500);
    }
    while let Some(Reverse((now, _, client, step))) = world.queue.pop() {
        world.step(now, client, step);
    }
    Run { history: History::new(world.events), accepted: world.accepted }
}

impl World {
    fn dice(&mut self, from: u64, to: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        from + self.seed % (to - from)
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn after(&mut self, now: u64, client: u64, step: Step, from: u64, to: u64) {
        let at = now + self.dice(from, to);
        self.at(at, client, step);
    }

    fn at(&mut self, at: u64, client: u64, step: Step) {
        self.scheduled += 1;
        self.queue.push(Reverse((at, self.scheduled, client, step)));
    }

    fn record(&mut self, now: u64, client: u64, event: HistoryEvent) {
        let attempt = Attempt::from_bytes(u128::from(self.clients[client as usize].attempt).to_be_bytes());
        let event = event.attempt(&attempt).mode(self.mode);
        self.events.push(HistoryEvent { t: now, proc: format!("p{client}"), ..event });
    }

    fn step(&mut self, now: u64, client: u64, step: Step) {
        let me = self.clients[client as usize];
        match step {
            Step::Ask => self.request(now, client),
            Step::AskArrives => self.ask_arrives(now, client),
            Step::Granted => self.granted(now, client),
            Step::Write => self.write(now, client),
            Step::Release => {
                self.record(now, client, HistoryEvent::invoke(Operation::Release, "x"));
                self.after(now, client, Step::ReleaseArrives, 1, 200);
            }
            Step::ReleaseArrives => {
                self.clients[client as usize].answer = Some(self.give_back(now, me.attempt));
                self.after(now, client, Step::Released, 1, 200);
            }
            Step::Released => self.released(now, client, me.answer == Some(true)),
            Step::Lost if me.told => {}
            Step::Lost => {
                self.clients[client as usize].told = true;
                self.record(now, client, HistoryEvent::signal("x"));
            }
        }
    }

    fn request(&mut self, now: u64, client: u64) {
        if self.attempts >= ROUNDS {
            return;
        }
        self.attempts += 1;
        self.clients[client as usize] = Client { attempt: self.attempts, sent: now, ..Client::default() };
        self.record(now, client, HistoryEvent::invoke(Operation::Acquire, "x"));
        self.after(now, client, Step::AskArrives, 1, 200);
    }

    fn ask_arrives(&mut self, now: u64, client: u64) {
        self.holders.retain(|holder| holder.expires > now);
        let room = match self.mode {
            Mode::Permit(n) => n as usize + usize::from(self.is(Bug::OnePermitTooMany)),
            _ => 1 + usize::from(self.is(Bug::GrantsWhatIsHeld)),
        };
        if self.holders.len() >= room {
            self.record(now + 1, client, HistoryEvent::refused(Operation::Acquire, "x", Outcome::Busy));
            return self.after(now, client, Step::Ask, 2, 400);
        }
        let me = &mut self.clients[client as usize];
        self.holders.push(Holder { attempt: me.attempt, expires: now + TTL });
        self.fence += 1;
        me.fence = self.fence;
        let slip = self.dice(0, 4) == 0;
        if slip && self.is(Bug::FenceStartsAgain) {
            self.fence = 0;
        }
        if slip && self.is(Bug::FenceIsGivenTwice) {
            self.fence -= 1;
        }
        self.after(now, client, Step::Granted, 1, 300);
    }

    fn granted(&mut self, now: u64, client: u64) {
        let from_reply = self.is(Bug::DeadlineFromReply);
        let me = &mut self.clients[client as usize];
        me.deadline = if from_reply { now } else { me.sent } + TTL;
        let (fence, deadline) = (Fence::new(me.fence).unwrap(), me.deadline);
        let event = HistoryEvent::ok(Operation::Acquire, "x")
            .fence(fence)
            .deadline(BootInstant::from_nanos(deadline));
        self.record(now, client, event);
        let late = if self.is(Bug::TellsLate) { 50 } else { 0 };
        if !self.is(Bug::NeverTells) {
            self.at(deadline + late, client, Step::Lost);
        }
        // Some work for too long, and write when they have lost the lock.
        let long = self.dice(0, 3) == 0;
        let (from, to) = if long { (TTL, TTL * 2) } else { (10, TTL / 4) };
        self.after(now, client, Step::Write, from, to);
    }

    fn write(&mut self, now: u64, client: u64) {
        let me = self.clients[client as usize];
        let (fence, value) = (Fence::new(me.fence).unwrap(), format!("by {}", me.attempt));
        let event = |event: HistoryEvent| event.fence(fence).value(&value);
        self.record(now, client, event(HistoryEvent::invoke(Operation::Write, "x")));
        // What it takes, it takes in order: the last one is the highest.
        let seen = self.accepted.last().map(|write| write.fence);
        if seen.is_some_and(|seen| seen > fence) && !self.is(Bug::NoFenceCheck) {
            self.record(now + 1, client, event(HistoryEvent::refused(Operation::Write, "x", Outcome::Stale)));
        } else {
            if !self.is(Bug::LosesAWrite) || self.dice(0, 10) > 0 {
                self.accepted.push(Accepted { fence, value: value.clone() });
            }
            self.record(now + 1, client, event(HistoryEvent::ok(Operation::Write, "x")));
        }
        self.after(now, client, Step::Release, 2, 50);
    }

    fn give_back(&mut self, now: u64, attempt: u64) -> bool {
        self.holders.retain(|holder| holder.expires > now);
        let before = self.holders.len();
        let any_client = self.is(Bug::ReleasesForAnyClient);
        self.holders.retain(|holder| !any_client && holder.attempt != attempt);
        self.holders.len() < before
    }

    fn released(&mut self, now: u64, client: u64, done: bool) {
        // Released in time: no loss is reported any more.
        self.clients[client as usize].told |= now < self.clients[client as usize].deadline;
        if done {
            self.record(now, client, HistoryEvent::ok(Operation::Release, "x"));
        } else {
            self.record(now, client, HistoryEvent::refused(Operation::Release, "x", Outcome::Lost));
        }
        if done && self.is(Bug::ReleasesTwice) {
            self.record(now, client, HistoryEvent::invoke(Operation::Release, "x"));
            self.record(now + 1, client, HistoryEvent::ok(Operation::Release, "x"));
        }
        self.after(now, client, Step::Ask, 2, 300);
    }
}
