//! Who waits for whom, read from the file, so that an ask that would wait for ever is told so: also when the owners
//! are in different processes.

use std::collections::{BTreeMap, HashMap};

use lockkeeper_core::deadlock::{Want, circle};
use lockkeeper_core::rules::{Stake, refuse_self_wait};
use lockkeeper_core::{Ask, Error, LockName, Owner, Result};
use rusqlite::params;

use crate::post::Presence;
use crate::rows::{Hold, Ticket, Waiter};
use crate::script;
use crate::tx::Tx;

/// Everything that can be in the way of an ask, however far off. Names are numbers here.
#[derive(Default)]
struct Scene {
    names: Vec<LockName>,
    numbers: HashMap<LockName, usize>,
    held: HashMap<usize, Vec<Stake>>,
    line: BTreeMap<Ticket, Ask>,
    waits: HashMap<Owner, Vec<Waiter>>,
    open: Vec<Waiter>,
}

impl Tx<'_> {
    /// Refuses an ask of an explicit owner that would wait for ever at the end of its lines.
    pub fn refuse_deadlock(&mut self, owner: Owner, ask: &Ask) -> Result<()> {
        let mut scene = Scene::default();
        let waits = self.waits_of(&mut scene, owner)?;
        refuse_self_wait(waits.iter().map(|waiter| &waiter.ask), ask)?;
        let holds = self.one(script::OWNER_HOLDS, [owner.as_bytes()], |row| row.get::<_, bool>(0))?;
        // Who has nothing and wants nothing else keeps nobody waiting. So it is with nearly every ask.
        if waits.is_empty() && holds != Some(true) {
            return Ok(());
        }
        self.survey(&mut scene, owner, ask, Ticket::MAX)?;
        while let Some(waiter) = scene.open.pop() {
            if scene.line.insert(waiter.ticket, waiter.ask.clone()).is_none() {
                if let Some(owner) = waiter.ask.owner {
                    let more = self.waits_of(&mut scene, owner)?;
                    scene.open.extend(more);
                }
                self.survey(&mut scene, owner, &waiter.ask, waiter.ticket)?;
            }
        }
        match scene.circle(ask) {
            Some(names) => Err(Error::Deadlock(names)),
            None => Ok(()),
        }
    }

    /// Who is in the way of an ask at this place: those who hold its names, and the one just ahead in each line. Those
    /// further ahead are found from there.
    fn survey(&mut self, scene: &mut Scene, owner: Owner, ask: &Ask, place: Ticket) -> Result<()> {
        self.bury_holders(&ask.claim.names)?;
        for name in &ask.claim.names {
            let mut ahead =
                self.all(script::AHEAD, params![name.as_str(), place], |row| row.get(0))?.into_iter();
            let ahead = ahead.find_map(|ticket| self.present(ticket).transpose()).transpose()?;
            scene.open.extend(ahead);
            let number = scene.number(name);
            if scene.held.contains_key(&number) {
                continue;
            }
            let mut stakes = Vec::new();
            for stake in self.live(name)?.iter().map(Hold::stake) {
                let Some(who) = stake.owner else { continue };
                let waits = self.waits_of(scene, who)?;
                if who == owner || !waits.is_empty() {
                    stakes.push(stake);
                    scene.open.extend(waits);
                }
            }
            scene.held.insert(number, stakes);
        }
        Ok(())
    }

    /// The asks of an owner that stand in line.
    fn waits_of(&mut self, scene: &mut Scene, owner: Owner) -> Result<Vec<Waiter>> {
        if let Some(known) = scene.waits.get(&owner) {
            return Ok(known.clone());
        }
        let mut waits = self.all(script::WAITERS_OF_OWNER, [owner.as_bytes()], Waiter::read)?;
        waits.retain(|waiter| self.presence(&waiter.peer) != Presence::Gone);
        scene.waits.insert(owner, waits.clone());
        Ok(waits)
    }

    /// An ask in line whose store is there.
    fn present(&mut self, ticket: Ticket) -> Result<Option<Waiter>> {
        let waiter = self.waiter(ticket)?;
        Ok(waiter.filter(|waiter| self.presence(&waiter.peer) != Presence::Gone))
    }
}

impl Scene {
    fn number(&mut self, name: &LockName) -> usize {
        *self.numbers.entry(name.clone()).or_insert_with(|| {
            self.names.push(name.clone());
            self.names.len() - 1
        })
    }

    fn circle(mut self, ask: &Ask) -> Option<Vec<LockName>> {
        let asks: Vec<Ask> = std::mem::take(&mut self.line).into_values().chain([ask.clone()]).collect();
        let mut want = |ask: &Ask| Want {
            owner: ask.owner,
            mode: ask.mode,
            names: ask.claim.names.iter().map(|name| self.number(name)).collect(),
        };
        let line = asks.iter().map(&mut want).collect();
        let names = circle(self.held, line)?;
        Some(names.into_iter().map(|number| self.names[number].clone()).collect())
    }
}
