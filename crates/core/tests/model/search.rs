//! Breadth first, so that the first broken law has the shortest story.

use std::collections::{HashSet, VecDeque};

use super::*;

/// What keeps the space finite. Time needs no bound: only differences of time are part of a state.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Asks of all clients together. Not of each: clients are interchangeable.
    pub requests: u8,
    /// Messages in flight before a client sends another.
    pub in_flight: usize,
    pub crashes: usize,
    /// How many requests that have arrived may be about to arrive again, however late.
    pub copies: usize,
    /// An upper bound for a run that only looks for a bug.
    pub states: usize,
}

/// What the search met.
#[derive(Debug, Default)]
pub struct Found {
    pub states: usize,
    pub steps: usize,
    pub exhausted: bool,
    /// States in which a late write would harm a register that checks nothing.
    pub harm: usize,
    pub jeopardy: usize,
    pub orphans: usize,
    pub longest_line: usize,
    /// The first broken law, and the actions that lead to it.
    pub broken: Option<(Broken, Vec<String>)>,
}

impl World {
    fn actions(&self, limits: &Limits) -> Vec<Action> {
        let mut all = vec![Action::Tick];
        let copies = self.soup.iter().filter(|message| message.copy).count();
        let room = self.soup.len() - copies < limits.in_flight;
        let requests: u8 = self.clients.iter().map(|client| client.id.nth).sum();
        let asking = |id: Id| self.soup.iter().any(|m| m.id == id && m.body == Body::Ask && !m.copy);
        let crashed = self.clients.iter().filter(|c| matches!(c.phase, Phase::Crashed)).count();
        for (i, client) in self.clients.iter().enumerate() {
            match &client.phase {
                Phase::Crashed => continue,
                Phase::Idle if requests < limits.requests && room => all.push(Action::Ask(i)),
                Phase::Idle => {}
                Phase::Asking if room => {
                    all.push(Action::Release(i));
                    if !asking(client.id) {
                        all.push(Action::AskAgain(i));
                    }
                }
                Phase::Asking => {}
                Phase::Holding { lease, .. } => {
                    if room {
                        all.push(Action::Release(i));
                    }
                    if room && lease.poll_timeout().is_some_and(|at| at <= self.now) {
                        all.push(Action::ClientWakes(i));
                    }
                }
            }
            if crashed < limits.crashes && !matches!(client.phase, Phase::Idle) {
                all.push(Action::Crash(i));
            }
        }
        for message in &self.soup {
            all.extend([Action::Deliver(*message), Action::Lose(*message)]);
            let request = matches!(message.body, Body::Ask | Body::Renew | Body::Release);
            if copies < limits.copies && request && !message.copy {
                all.push(Action::DeliverACopy(*message));
            }
        }
        all
    }

    fn note(&self, found: &mut Found) {
        found.harm += usize::from((0..CLIENTS).any(|i| self.would_harm(i)));
        let jeopardy = |client: &Client| match &client.phase {
            Phase::Holding { lease, .. } => lease.state(self.now) == lease::LeaseState::Jeopardy,
            _ => false,
        };
        found.jeopardy += usize::from(self.clients.iter().any(jeopardy));
        found.longest_line = found.longest_line.max(self.table.waiting());
        let view = self.table.inspect(self.now, &NAME);
        let held = view.and_then(|view| view.held.first().map(|held| Id::of_pid(held.holder.pid)));
        let gone = |id: Id| {
            let client = &self.clients[usize::from(id.client)];
            client.id != id || matches!(client.phase, Phase::Idle | Phase::Crashed)
        };
        found.orphans += usize::from(held.is_some_and(gone));
    }
}

/// Goes through every state that can be reached, until a law is broken.
pub fn explore(bug: Option<Bug>, limits: &Limits, laws: impl Fn(Law) -> bool) -> Found {
    let mut found = Found::default();
    let mut visited = HashSet::new();
    let mut open = VecDeque::new();
    // Of each state, the one before it and the action between them.
    let mut stories: Vec<(u32, Option<Action>)> = vec![(0, None)];
    let first = World::new(bug);
    visited.insert(first.fingerprint());
    open.push_back((0_u32, first));
    while let Some((at, world)) = open.pop_front() {
        world.note(&mut found);
        for action in world.actions(limits) {
            found.steps += 1;
            let mut next = world.clone();
            let outcome = next.apply(action);
            let new = outcome.is_err() || visited.insert(next.fingerprint());
            if !new {
                continue;
            }
            if let Err(broken) = outcome.and_then(|()| next.check())
                && laws(broken.0)
            {
                let mut story = vec![format!("{action:?}")];
                let mut step = at;
                while let (before, Some(action)) = stories[step as usize] {
                    story.push(format!("{action:?}"));
                    step = before;
                }
                story.reverse();
                found.states = visited.len();
                found.broken = Some((broken, story));
                return found;
            }
            stories.push((at, Some(action)));
            open.push_back((stories.len() as u32 - 1, next));
        }
        if visited.len() > limits.states {
            found.states = visited.len();
            return found;
        }
    }
    found.states = visited.len();
    found.exhausted = true;
    found
}
