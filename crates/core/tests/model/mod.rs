//! The world of the model check: the real table, three clients with the real lease, and the messages between them.

mod fingerprint;
mod laws;
mod search;

pub use laws::Law;
pub use search::{Found, Limits, explore};

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lockkeeper_core::lease::{self, Lease, Terms};
use lockkeeper_core::table::{Answer, Now, Table, TableEffect};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, EventKind, Fence, Grant, Holder, LockName, LockRequest,
    ReleaseOutcome, RenewOutcome, RequestKey, Wait, WallTime,
};

pub const CLIENTS: usize = 3;
/// With the margin of 53 ms a lease is believed at the tick at which it was sent and at two more, and over in the table
/// at the third; it is renewed after one tick, and in jeopardy after two.
pub const TTL: Duration = Duration::from_millis(300);
pub const TICK: Duration = Duration::from_millis(100);

/// A way in which the harness misuses the machines on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The lease counts from the moment at which the reply came.
    CountsFromTheReply,
    /// A release takes the lock away from its present holder.
    ReleaseByAnyone,
    /// A renewal that finds the grant gone takes the lock again, and says nothing about it.
    RenewalRevives,
    /// The fences begin again when the lock is free.
    FenceStartsAgain,
    /// A holder that was told of its loss believes a late good answer.
    LostIsRevived,
}

/// Which ask: of which client, and its how manieth. It is also the attempt and the holder's pid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Id {
    pub client: u8,
    pub nth: u8,
}

impl Id {
    fn attempt(self) -> Attempt {
        Attempt::from_bytes([self.client * 16 + self.nth; 16])
    }

    pub fn of_pid(pid: u32) -> Id {
        Id { client: (pid / 16) as u8, nth: (pid % 16) as u8 }
    }

    fn of(attempt: &Attempt) -> Id {
        Id::of_pid(u32::from(attempt.as_bytes()[0]))
    }

    fn claim(self) -> RequestKey {
        RequestKey { attempt: self.attempt(), names: NAME.clone().into() }
    }

    fn request(self) -> LockRequest {
        let holder = HOLDERS[usize::from(self.client * 16 + self.nth)].clone();
        LockRequest { wait: Wait::Forever, ..LockRequest::new(self.attempt(), NAME.clone(), TTL, holder) }
    }
}

pub static NAME: LazyLock<LockName> = LazyLock::new(|| LockName::new("the lock").unwrap());
static HOLDERS: LazyLock<Vec<Arc<Holder>>> =
    LazyLock::new(|| (0..48).map(|pid| Arc::new(Holder::new("host", pid, None).unwrap())).collect());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Ask,
    Renew,
    Release,
    Granted(Fence),
    /// Whether it was renewed.
    Renewed(bool),
}

/// A request or a reply. Both carry the moment at which the request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: Id,
    pub sent: BootInstant,
    pub body: Body,
    /// It was delivered once already.
    pub copy: bool,
}

#[derive(Clone, Debug)]
pub enum Phase {
    Idle,
    Asking,
    Holding {
        lease: Box<Lease>,
        fence: Fence,
        /// A renewal is under way.
        renewing: bool,
        /// It was lost at some time: a client that looked then knows it.
        lost: bool,
    },
    Crashed,
}

#[derive(Clone, Debug)]
pub struct Client {
    pub id: Id,
    pub phase: Phase,
}

#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Time passes, and the table is told so; a client may sleep through it.
    Tick,
    ClientWakes(usize),
    Ask(usize),
    AskAgain(usize),
    /// Gives back what it holds, or leaves the line.
    Release(usize),
    Crash(usize),
    Deliver(Message),
    DeliverACopy(Message),
    Lose(Message),
}

/// What was broken, and how.
pub type Broken = (Law, String);

#[derive(Clone)]
pub struct World {
    pub bug: Option<Bug>,
    pub now: BootInstant,
    pub table: Table,
    pub clients: [Client; CLIENTS],
    pub soup: Vec<Message>,
    /// When the newest message of this request was sent that the table has seen: a later grant from the queue answers that one.
    pub asked: Vec<(Id, BootInstant)>,
    /// Every grant in order. Only the watcher knows it.
    pub grants: Vec<(Id, Fence)>,
    /// The newest write that a fenced register has taken: its fence, and the place of its grant in the order. Every
    /// holder writes as soon as it can, which is the worst that can happen to those who write late.
    pub written: Option<(Fence, usize)>,
    /// The same for a register that takes everything.
    pub unfenced: usize,
}

impl World {
    pub fn new(bug: Option<Bug>) -> Self {
        let mut table = Table::default();
        table.set_watched(true);
        let client = |client| Client { id: Id { client, nth: 0 }, phase: Phase::Idle };
        World {
            bug,
            now: BootInstant::from_nanos(1_000_000_000),
            table,
            clients: [client(0), client(1), client(2)],
            soup: Vec::new(),
            asked: Vec::new(),
            grants: Vec::new(),
            written: None,
            unfenced: 0,
        }
    }

    /// The wall clock stands at zero: fences are counted, one by one.
    pub fn time(&self) -> Now {
        Now { moment: self.now, wall: WallTime::from_micros(0) }
    }

    pub fn send(&mut self, id: Id, sent: BootInstant, body: Body) {
        let message = Message { id, sent, body, copy: false };
        if !self.soup.contains(&message) {
            self.soup.push(message);
        }
    }

    /// Every client that has lost the lock by now might have looked, and know it.
    fn look(&mut self) {
        for i in 0..CLIENTS {
            let believes = self.believes(i);
            if let Phase::Holding { lost, .. } = &mut self.clients[i].phase {
                *lost |= !believes;
            }
        }
    }

    /// Whether this client believes that the lock is its own.
    pub fn believes(&self, client: usize) -> bool {
        match &self.clients[client].phase {
            Phase::Holding { lease, .. } => !matches!(lease.state(self.now), lease::LeaseState::Lost(_)),
            _ => false,
        }
    }

    pub fn apply(&mut self, action: Action) -> Result<(), Broken> {
        match action {
            Action::Tick => {
                self.now = self.now + TICK;
                self.table.handle_timeout(self.time());
            }
            Action::ClientWakes(i) => self.wake(i),
            Action::Ask(i) => {
                self.clients[i].phase = Phase::Asking;
                self.clients[i].id.nth += 1;
                self.send(self.clients[i].id, self.now, Body::Ask);
            }
            Action::AskAgain(i) => self.send(self.clients[i].id, self.now, Body::Ask),
            Action::Release(i) => {
                self.clients[i].phase = Phase::Idle;
                self.send(self.clients[i].id, self.now, Body::Release);
            }
            Action::Crash(i) => self.clients[i].phase = Phase::Crashed,
            Action::Deliver(message) => {
                self.soup.retain(|other| *other != message);
                self.deliver(message)?;
            }
            Action::DeliverACopy(message) => {
                self.soup.retain(|other| *other != message);
                self.soup.push(Message { copy: true, ..message });
                self.deliver(message)?;
            }
            Action::Lose(message) => {
                self.soup.retain(|other| *other != message);
                if message.body == Body::Renew {
                    // The connection breaks, and the client knows that it knows nothing. A lost reply is silence.
                    self.hear(message.id, message.sent, None);
                }
            }
        }
        self.pass_on()?;
        self.look();
        self.drop_dead_letters();
        Ok(())
    }

    /// Replies that no client reads any more are removed. Requests never are: the table reads them all.
    fn drop_dead_letters(&mut self) {
        let World { soup, clients, now, bug, .. } = self;
        soup.retain(|message| {
            let Client { id, phase } = &clients[usize::from(message.id.client)];
            let late = *now >= message.sent + TTL && *bug != Some(Bug::CountsFromTheReply);
            match message.body {
                Body::Granted(_) => *id == message.id && matches!(phase, Phase::Asking) && !late,
                Body::Renewed(_) => *id == message.id && matches!(phase, Phase::Holding { .. }),
                Body::Ask | Body::Renew | Body::Release => true,
            }
        });
    }

    fn deliver(&mut self, message: Message) -> Result<(), Broken> {
        let Message { id, sent, body, .. } = message;
        match body {
            Body::Ask => {
                self.asked.retain(|(other, before)| *other != id || *before > sent);
                if !self.asked.iter().any(|(other, _)| *other == id) {
                    self.asked.push((id, sent));
                }
                if let Ok(Answer::Granted(grant)) = self.table.handle_request(self.time(), id.request()) {
                    self.send(id, sent, Body::Granted(grant.fence));
                }
            }
            Body::Renew => {
                self.pass_on()?;
                let grants = self.grants.len();
                let answer = self.renew(id);
                self.pass_on()?;
                if self.grants[grants..].iter().any(|(other, _)| *other == id) {
                    return Err((Law::Keeps, format!("a renewal of {id:?} made a new grant")));
                }
                self.send(id, sent, Body::Renewed(answer == RenewOutcome::Renewed));
            }
            Body::Release => self.release(id),
            Body::Granted(fence) => self.granted(id, sent, fence),
            Body::Renewed(true) => self.hear(id, sent, Some(RenewOutcome::Renewed)),
            Body::Renewed(false) => self.hear(id, sent, Some(RenewOutcome::Lost)),
        }
        Ok(())
    }

    fn renew(&mut self, id: Id) -> RenewOutcome {
        let answer = self.table.handle_renew(self.time(), &id.attempt());
        if answer == RenewOutcome::Lost && self.bug == Some(Bug::RenewalRevives) {
            let again = LockRequest { wait: Wait::No, ..id.request() };
            if let Ok(Answer::Granted(_)) = self.table.handle_request(self.time(), again) {
                return RenewOutcome::Renewed;
            }
        }
        answer
    }

    fn release(&mut self, id: Id) {
        let answer = self.table.handle_release(self.time(), &id.claim());
        if answer == ReleaseOutcome::AlreadyGone && self.bug == Some(Bug::ReleaseByAnyone) {
            let view = self.table.inspect(self.now, &NAME);
            if let Some(held) = view.and_then(|view| view.held.first().cloned()) {
                self.table.handle_release(self.time(), &Id::of_pid(held.holder.pid).claim());
            }
        }
        if self.bug == Some(Bug::FenceStartsAgain) && self.table.held() + self.table.waiting() == 0 {
            self.table = Table::default();
            self.table.set_watched(true);
        }
    }

    fn granted(&mut self, id: Id, sent: BootInstant, fence: Fence) {
        let Client { id: current, phase } = &mut self.clients[usize::from(id.client)];
        if *current != id || !matches!(phase, Phase::Asking) {
            return;
        }
        let sent = if self.bug == Some(Bug::CountsFromTheReply) { self.now } else { sent };
        let terms = Terms { ttl: TTL, max_hold: None, progress_within: None, jitter: 0 };
        let lease = Lease::new(sent, TTL, terms);
        // A grant that waited for too long is lost on arrival. Asking again counts it anew.
        if !matches!(lease.state(self.now), lease::LeaseState::Lost(_)) {
            let place = self.grants.iter().rposition(|grant| *grant == (id, fence)).unwrap_or(0);
            self.written = self.written.max(Some((fence, place)));
            self.unfenced = self.unfenced.max(place);
            *phase = Phase::Holding { lease: Box::new(lease), fence, renewing: false, lost: false };
        }
    }

    /// The answer to a renewal, or the news that there is none.
    fn hear(&mut self, id: Id, sent: BootInstant, answer: Option<RenewOutcome>) {
        let Client { id: current, phase } = &mut self.clients[usize::from(id.client)];
        let Phase::Holding { lease, lost, .. } = phase else { return };
        if *current != id {
            return;
        }
        if self.bug == Some(Bug::LostIsRevived) && *lost && answer == Some(RenewOutcome::Renewed) {
            let terms = Terms { ttl: TTL, max_hold: None, progress_within: None, jitter: 0 };
            **lease = Lease::new(sent, TTL, terms);
        }
        lease.handle_renewal(sent, self.now, answer);
        if let Phase::Holding { renewing, .. } = phase {
            *renewing = false;
        }
        self.act_on_lease(usize::from(id.client));
    }

    fn wake(&mut self, i: usize) {
        if let Phase::Holding { lease, .. } = &mut self.clients[i].phase {
            lease.handle_timeout(self.now);
        }
        self.act_on_lease(i);
    }

    fn act_on_lease(&mut self, i: usize) {
        let id = self.clients[i].id;
        let mut sends = false;
        if let Phase::Holding { lease, renewing, .. } = &mut self.clients[i].phase {
            while let Some(effect) = lease.poll_effect() {
                match effect {
                    lease::LeaseEffect::SendRenew => (sends, *renewing) = (true, true),
                    lease::LeaseEffect::Tell(lease::LeaseState::Jeopardy) => *renewing = false,
                    lease::LeaseEffect::Tell(_) => {}
                }
            }
        }
        if sends {
            self.send(id, self.now, Body::Renew);
        }
    }

    /// What the table has to say, to the clients and to the watcher.
    fn pass_on(&mut self) -> Result<(), Broken> {
        while let Some(effect) = self.table.poll_effect() {
            match effect {
                TableEffect::Answer(attempt, Ok(AcquireOutcome::Granted(Grant { fence, .. }))) => {
                    let id = Id::of(&attempt);
                    let sent = self.asked.iter().find(|(other, _)| *other == id).map(|(_, sent)| *sent);
                    self.send(id, sent.unwrap(), Body::Granted(fence));
                }
                TableEffect::Event(event) => {
                    if let (EventKind::Granted { fence }, Some(holder)) = (event.kind, event.holder) {
                        let grows = self.fence_grows(fence);
                        self.grants.push((Id::of_pid(holder.pid), fence));
                        grows?;
                    }
                }
                TableEffect::Answer(_, answer) => {
                    unreachable!("a request that waits for ever got {answer:?}")
                }
            }
        }
        Ok(())
    }
}
