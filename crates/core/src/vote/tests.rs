//! Votes in a small world of nodes that are slow, restart empty and deliver different times; and mistakes that are planted
//! to see that the world notices.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const TTL: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_millis(50);

/// Common mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// Half of an even number is taken for a majority.
    HalfIsEnough,
    /// One node less than a majority is enough.
    MinorityCounts,
    /// Answers count whenever they come.
    LateCounts,
    /// The bug: a grant by a late answer is kept.
    LateIsKept,
    /// The lease counts from the last reply.
    CountsFromTheReply,
    /// The fence is not above what the majority has seen.
    FenceIsBlind,
    /// The fence counts without having been written to a majority.
    FenceIsNotWritten,
    /// A node that came back empty counts at once.
    YoungCounts,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Begin,
    Lock(usize),
    LockReply(usize, LockAnswer),
    Write(usize, Fence),
    WriteReply(usize, bool),
    Release(usize),
    Released(usize),
    Tick,
    GiveBack,
    Restart(usize),
}

#[derive(Clone, Copy, Default)]
struct Server {
    key: Option<(usize, u64)>,
    counter: Option<Fence>,
    born: Option<u64>,
    ahead: u64,
}

struct Client {
    vote: Option<Vote>,
    sent_at: u64,
    /// The last request to each node, so that it is sent once; and when it will have arrived.
    sent: Vec<(Option<NodeAction>, u64)>,
    /// From, until, fence.
    grant: Option<(u64, u64, Fence)>,
}

struct World {
    mistake: Option<Mistake>,
    dice: u64,
    time: u64,
    events: BTreeMap<(u64, u64), (usize, Message)>,
    servers: Vec<Server>,
    clients: Vec<Client>,
    grants: usize,
    last: Option<Fence>,
}

fn millis(ms: u64) -> BootInstant {
    BootInstant::from_nanos(ms * 1_000_000)
}

impl World {
    fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.dice;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn at(&mut self, time: u64, client: usize, message: Message) {
        let order = self.roll(u64::MAX);
        self.events.insert((time, order), (client, message));
    }

    /// Mostly quick, now and then very slow.
    fn delay(&mut self) -> u64 {
        match self.roll(12) {
            0 => self.roll(400),
            1 | 2 => self.roll(60),
            _ => 1 + self.roll(8),
        }
    }

    /// One connection to each node: what is sent later arrives later.
    fn send(&mut self, client: usize, node: usize, message: Message) {
        let arrives = (self.time + self.delay()).max(self.clients[client].sent[node].1 + 1);
        self.clients[client].sent[node].1 = arrives;
        self.at(arrives, client, message);
    }

    fn reply(&mut self, client: usize, message: Message) {
        let arrives = self.time + self.delay();
        self.at(arrives, client, message);
    }

    fn new(seed: u64, mistake: Option<Mistake>) -> World {
        let mut world = World {
            mistake,
            dice: seed,
            time: 1000,
            events: BTreeMap::new(),
            servers: Vec::new(),
            clients: Vec::new(),
            grants: 0,
            last: None,
        };
        let nodes = if mistake == Some(Mistake::HalfIsEnough) { 4 } else { 3 + 2 * world.roll(2) as usize };
        // Clocks that differ, or nodes that forget: against both at once nothing helps.
        let forgetful = world.roll(2) == 0;
        for node in 0..nodes {
            let ahead = if forgetful { 0 } else { world.roll(2000) };
            world.servers.push(Server { ahead, ..Server::default() });
            if forgetful && world.roll(3) > 0 {
                let when = 1000 + world.roll(1500);
                world.at(when, 0, Message::Restart(node));
            }
        }
        for client in 0..2 + world.roll(6) as usize {
            let sent = vec![(None, 0); nodes];
            world.clients.push(Client { vote: None, sent_at: 0, sent, grant: None });
            let when = 1000 + world.roll(1500);
            world.at(when, client, Message::Begin);
        }
        world
    }

    fn run(mut self) -> std::result::Result<usize, String> {
        while let Some(((time, _), (client, message))) = self.events.pop_first() {
            self.time = time;
            self.step(client, message)?;
        }
        for (node, server) in self.servers.iter().enumerate() {
            if let Some((client, _)) = server.key
                && self.clients[client].grant.is_none_or(|(_, until, _)| until == 0)
            {
                return Err(format!("client {client} left something at node {node}"));
            }
        }
        Ok(self.grants)
    }

    fn step(&mut self, client: usize, message: Message) -> std::result::Result<(), String> {
        let now = self.time;
        match message {
            Message::Begin => self.begin(client),
            Message::Restart(node) => {
                let ahead = self.servers[node].ahead;
                self.servers[node] = Server { born: Some(now), ahead, ..Server::default() };
            }
            Message::Lock(node) => {
                let answer = self.lock(client, node);
                self.reply(client, Message::LockReply(node, answer));
            }
            Message::Write(node, fence) => {
                let server = &mut self.servers[node];
                let ours = server.key.is_some_and(|(owner, until)| owner == client && until > now);
                if ours {
                    server.counter = server.counter.max(Some(fence));
                }
                self.reply(client, Message::WriteReply(node, ours));
            }
            Message::Release(node) => {
                if self.servers[node].key.is_some_and(|(owner, _)| owner == client) {
                    self.servers[node].key = None;
                }
                self.reply(client, Message::Released(node));
            }
            Message::LockReply(..) | Message::WriteReply(..) | Message::Released(_) | Message::Tick => {
                self.deliver(client, message)?;
            }
            Message::GiveBack => {
                if let Some(grant) = &mut self.clients[client].grant {
                    grant.1 = 0;
                }
                (0..self.servers.len()).for_each(|node| self.send(client, node, Message::Release(node)));
            }
        }
        Ok(())
    }

    fn begin(&mut self, client: usize) {
        let nodes = self.servers.len();
        let mut vote = match Vote::new(nodes, TTL, PATIENCE, None, millis(self.time)) {
            Ok(vote) => vote,
            Err(_) => Vote {
                quorum: nodes / 2,
                nodes: vec![NodeVote::Asked; nodes],
                ..Vote::new(3, TTL, PATIENCE, None, millis(self.time)).expect("three can vote")
            },
        };
        if self.is(Mistake::MinorityCounts) {
            vote.quorum -= 1;
        }
        self.clients[client].vote = Some(vote);
        self.clients[client].sent_at = self.time;
        (0..nodes).for_each(|node| self.send(client, node, Message::Lock(node)));
        let tick = self.time + PATIENCE.as_millis() as u64;
        self.at(tick, client, Message::Tick);
    }

    fn lock(&mut self, client: usize, node: usize) -> LockAnswer {
        let (now, ttl) = (self.time, TTL.as_millis() as u64);
        let young = self.servers[node].born.is_some_and(|born| now < born + ttl);
        if young && !self.is(Mistake::YoungCounts) {
            return LockAnswer::Refused;
        }
        let server = &mut self.servers[node];
        match server.key {
            Some((owner, until)) if until > now && owner != client => LockAnswer::Taken(owner as u64),
            _ => {
                server.key = Some((client, now + ttl));
                let clock = WallTime::from_micros((now + server.ahead) * 1000);
                LockAnswer::Locked { counter: server.counter, clock, fence: None }
            }
        }
    }

    fn deliver(&mut self, client: usize, message: Message) -> std::result::Result<(), String> {
        let mistake = self.mistake;
        let sent_at = millis(self.clients[client].sent_at);
        let now = if mistake == Some(Mistake::LateCounts) { sent_at } else { millis(self.time) };
        let vote = self.clients[client].vote.as_mut().expect("it has begun");
        match message {
            Message::LockReply(node, LockAnswer::Locked { clock, fence, .. })
                if mistake == Some(Mistake::FenceIsBlind) =>
            {
                vote.handle_lock(now, node, LockAnswer::Locked { counter: None, clock, fence });
            }
            Message::LockReply(node, answer) => vote.handle_lock(now, node, answer),
            Message::WriteReply(node, written) => vote.handle_write(now, node, written),
            Message::Released(node) => vote.handle_release(node),
            _ => vote.handle_timeout(now),
        }
        self.follow(client)
    }

    /// Does what the vote says, and looks whether it may say so.
    fn follow(&mut self, client: usize) -> std::result::Result<(), String> {
        let vote = self.clients[client].vote.clone().expect("it has begun");
        if let Some(VoteOutcome::Granted(fence)) = vote.verdict()
            && self.clients[client].grant.is_none()
        {
            self.granted(client, fence)?;
        }
        if let Some(at) = vote.poll_timeout().map(|at| at.as_nanos() / 1_000_000)
            && at > self.time
        {
            self.at(at, client, Message::Tick);
        }
        for node in 0..self.servers.len() {
            let action = vote.action(node);
            if self.clients[client].sent[node].0 == Some(action) {
                continue;
            }
            match action {
                NodeAction::Write(_) if self.is(Mistake::FenceIsNotWritten) => {
                    self.clients[client].sent[node].0 = Some(action);
                    self.reply(client, Message::WriteReply(node, true));
                }
                NodeAction::Write(fence) => self.send(client, node, Message::Write(node, fence)),
                NodeAction::Release
                    if self.is(Mistake::LateIsKept)
                        && self.time >= self.clients[client].sent_at + PATIENCE.as_millis() as u64 => {}
                NodeAction::Release => self.send(client, node, Message::Release(node)),
                _ => continue,
            }
            self.clients[client].sent[node].0 = Some(action);
        }
        Ok(())
    }

    fn granted(&mut self, client: usize, fence: Fence) -> std::result::Result<(), String> {
        let now = self.time;
        let life = (TTL - margin(TTL)).as_millis() as u64;
        let from = if self.is(Mistake::CountsFromTheReply) { now } else { self.clients[client].sent_at };
        let until = from + life;
        if until <= now {
            return Err(format!("client {client} got at {now} a grant that ended at {until}"));
        }
        for (other, (began, ends, _)) in
            self.clients.iter().enumerate().filter_map(|(i, c)| Some((i, c.grant?)))
        {
            if ends > now {
                return Err(format!(
                    "{client} was let in at {now}, and {other} believes from {began} to {ends}"
                ));
            }
        }
        if self.last.is_some_and(|last| last >= fence) {
            return Err(format!("the fence went from {:?} to {fence}", self.last));
        }
        self.last = Some(fence);
        self.clients[client].grant = Some((now, until, fence));
        self.clients[client].vote.as_mut().expect("it has begun").accept();
        self.grants += 1;
        if self.roll(2) == 0 {
            let soon = now + self.roll(until - now);
            self.at(soon, client, Message::GiveBack);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn nobody_is_let_in_beside_another_and_fences_grow(seed: u64) {
        prop_assert!(World::new(seed, None).run().is_ok(), "{:?}", World::new(seed, None).run());
    }
}

#[test]
fn the_world_is_not_hollow() {
    let grants: usize = (0..1000).map(|seed| World::new(seed, None).run().expect("no mistake")).sum();
    assert!(grants > 1500, "{grants} grants in a thousand worlds");
}

#[test]
fn every_planted_mistake_is_noticed() {
    for mistake in [
        Mistake::HalfIsEnough,
        Mistake::MinorityCounts,
        Mistake::LateCounts,
        Mistake::LateIsKept,
        Mistake::CountsFromTheReply,
        Mistake::FenceIsBlind,
        Mistake::FenceIsNotWritten,
        Mistake::YoungCounts,
    ] {
        let noticed = (0..20_000).find_map(|seed| World::new(seed, Some(mistake)).run().err());
        println!("{mistake:?}: {noticed:?}");
        assert!(noticed.is_some(), "no check noticed {mistake:?}");
    }
}

fn vote() -> Vote {
    Vote::new(5, Duration::from_secs(10), PATIENCE, None, millis(0)).unwrap()
}

fn locked(counter: u64, fence: Option<u64>) -> LockAnswer {
    let fence = fence.map(|n| Fence::new(n).unwrap());
    LockAnswer::Locked { counter: Fence::new(counter).ok(), clock: WallTime::from_micros(10), fence }
}

#[test]
fn only_odd_numbers_vote() {
    for bad in [0, 1, 2, 4, 6, 100] {
        assert!(matches!(majority(bad), Err(Error::Invalid(_))), "{bad}");
    }
    assert_eq!((majority(3).unwrap(), majority(5).unwrap(), majority(7).unwrap()), (2, 3, 4));
}

#[test]
fn a_grant_needs_a_majority_for_the_lock_and_for_the_fence() {
    let mut vote = vote();
    for (node, counter) in [(0, 40), (1, 7), (2, 90)] {
        assert_eq!((vote.verdict(), vote.action(node)), (None, NodeAction::Await));
        vote.handle_lock(millis(1), node, locked(counter, None));
    }
    let fence = Fence::new(91).unwrap();
    assert_eq!((vote.action(0), vote.action(3)), (NodeAction::Write(fence), NodeAction::Await));
    vote.handle_write(millis(2), 0, true);
    vote.handle_write(millis(2), 1, false);
    vote.handle_write(millis(2), 2, true);
    assert_eq!(vote.verdict(), None, "two of five have the fence");
    // A straggler makes it whole.
    vote.handle_lock(millis(3), 3, locked(200, None));
    vote.handle_write(millis(4), 3, true);
    assert_eq!(vote.verdict(), Some(VoteOutcome::Granted(fence)));
    // The caller has not seen the grant yet: it may still be withdrawn, at every node.
    assert_eq!(vote.action(0), NodeAction::Wait);
    let mut withdrawn = vote.clone();
    withdrawn.withdraw();
    assert!((0..5).all(|node| withdrawn.action(node) == NodeAction::Release));
    // Passed on, it is its holder's: only what comes late is still for us to clean up.
    vote.accept();
    vote.withdraw();
    assert_eq!(
        [0, 1, 2, 3, 4].map(|node| vote.action(node) == NodeAction::Release),
        [false, true, false, false, true]
    );
}

#[test]
fn the_same_ask_keeps_its_fence_if_a_majority_has_it() {
    let mut vote = vote();
    // The first three to answer are not those that have it.
    for (node, fence) in [(0, None), (1, Some(50)), (2, Some(50)), (3, Some(50))] {
        vote.handle_lock(millis(1), node, locked(60, fence));
    }
    assert_eq!(vote.verdict(), Some(VoteOutcome::Granted(Fence::new(50).unwrap())));
    assert_eq!(vote.action(0), NodeAction::Write(Fence::new(50).unwrap()));
}

#[test]
fn a_fence_that_a_minority_has_is_passed_over() {
    let mut vote = vote();
    for (node, fence) in [(0, None), (1, Some(50)), (2, Some(50))] {
        vote.handle_lock(millis(1), node, locked(60, fence));
    }
    assert_eq!(vote.action(1), NodeAction::Wait, "the others may have it too");
    vote.handle_timeout(millis(50));
    assert_eq!(vote.action(1), NodeAction::Write(Fence::new(61).unwrap()));
}

#[test]
fn a_lost_vote_says_why_and_what_to_release() {
    let answers = |answers: &[LockAnswer]| {
        let mut vote = vote();
        answers.iter().enumerate().for_each(|(node, answer)| vote.handle_lock(millis(1), node, *answer));
        vote.handle_timeout(millis(50));
        vote
    };
    let (mine, taken) = (locked(1, None), LockAnswer::Taken);
    let vote = answers(&[taken(1), taken(1), taken(1), mine]);
    assert_eq!(vote.verdict(), Some(VoteOutcome::Taken));
    assert_eq!(
        (vote.action(0), vote.action(3), vote.action(4)),
        (NodeAction::Done, NodeAction::Release, NodeAction::Release)
    );
    assert_eq!(answers(&[taken(1), taken(1), taken(2), mine, mine]).verdict(), Some(VoteOutcome::Contested));
    let mut vote = answers(&[mine, taken(1), LockAnswer::Refused, LockAnswer::NoReply]);
    assert_eq!((vote.verdict(), vote.unclean(), vote.is_released()), (Some(VoteOutcome::Silent), 3, false));
    vote.handle_release(0);
    assert_eq!((vote.action(0), vote.unclean(), vote.is_released()), (NodeAction::Done, 2, true));
}

/// Node 0 is down and answers first. The lock is held; that must not be reported as a store that is unavailable.
#[test]
fn a_node_that_is_down_does_not_hide_who_has_the_lock() {
    let mut vote = vote();
    vote.handle_lock(millis(1), 0, LockAnswer::Refused);
    vote.handle_lock(millis(2), 1, LockAnswer::Taken(7));
    vote.handle_lock(millis(3), 2, LockAnswer::Taken(7));
    assert_eq!(vote.verdict(), None, "two are still to answer");
    vote.handle_lock(millis(4), 3, LockAnswer::Taken(7));
    assert_eq!(vote.verdict(), Some(VoteOutcome::Taken));
    // The vote does not wait longer for them than for other nodes.
    let mut vote = self::vote();
    vote.handle_lock(millis(1), 0, LockAnswer::Refused);
    vote.handle_lock(millis(2), 1, LockAnswer::Taken(7));
    vote.handle_lock(millis(3), 2, LockAnswer::Taken(7));
    vote.handle_timeout(vote.poll_timeout().unwrap());
    assert_eq!(vote.verdict(), Some(VoteOutcome::Silent));
}

#[test]
fn a_tally_is_decided_when_nobody_can_change_it() {
    let verdict = |yes, no| Tally { yes, no }.verdict(5).unwrap();
    assert_eq!((verdict(3, 0), verdict(0, 3), verdict(2, 2)), (Some(true), Some(false), None));
}
