//! What must be true in every state that can be reached.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Law {
    /// No two clients believe that they hold the lock.
    X,
    /// Fences grow from grant to grant.
    F,
    /// The fenced register takes no write older than one it has taken, and refuses nobody who rightly believes.
    R,
    /// Who was told of its loss does not believe again.
    L,
    /// Whoever stands in line is let in, and what nobody renews is over, within a bound.
    W,
    /// Who believes is right: the table has that grant, with that fence. Stronger than X, and nearer to the cause.
    Truth,
}

impl World {
    pub fn fence_grows(&self, fence: Fence) -> Result<(), Broken> {
        match self.grants.last() {
            Some((_, last)) if fence <= *last => Err((Law::F, format!("{fence} after {last}"))),
            _ => Ok(()),
        }
    }

    /// A write to both registers. The place of the writer's grant in the order of grants is the truth.
    pub fn write(&mut self, i: usize) -> Result<(), Broken> {
        let Phase::Holding { fence, .. } = self.clients[i].phase else { return Ok(()) };
        let mine = (self.clients[i].id, fence);
        let place = self.grants.iter().rposition(|grant| *grant == mine).unwrap_or(0);
        self.unfenced = self.unfenced.max(place);
        match self.written {
            Some((newest, _)) if fence < newest => {
                if self.believes(i) {
                    return Err((Law::R, format!("client {i} holds with {fence} and is refused")));
                }
            }
            Some((_, newest)) if place < newest => {
                return Err((Law::R, format!("a write of grant {place} was taken after one of {newest}")));
            }
            _ => self.written = Some((fence, place)),
        }
        Ok(())
    }

    /// Whether a write now would be older than one that the unfenced register has taken.
    pub fn would_harm(&self, i: usize) -> bool {
        let Phase::Holding { fence, .. } = self.clients[i].phase else { return false };
        let mine = (self.clients[i].id, fence);
        self.grants.iter().rposition(|grant| *grant == mine).is_some_and(|place| place < self.unfenced)
    }

    pub fn check(&self) -> Result<(), Broken> {
        let believers: Vec<usize> = (0..CLIENTS).filter(|i| self.believes(*i)).collect();
        if believers.len() > 1 {
            return Err((Law::X, format!("{believers:?} believe that they hold the lock")));
        }
        for i in believers.iter().copied() {
            let Client { id, phase: Phase::Holding { fence, told, .. } } = &self.clients[i] else { continue };
            if *told {
                return Err((Law::L, format!("client {i} was told of its loss, and believes again")));
            }
            // The table's own clock is asked at its beginning: it has not been told that anything is over.
            let view = self.table.inspect(Moment::default(), &NAME);
            let held = view.into_iter().flat_map(|view| view.held);
            let mut held = held.map(|held| (Id::of_pid(held.holder.pid), held.fence));
            if !held.any(|held| held == (*id, *fence)) {
                return Err((Law::Truth, format!("client {i} believes, and the table knows nothing of it")));
            }
        }
        self.ends_well()
    }

    /// From here on every request arrives once and nobody says anything more. Then everybody in line has its turn, each
    /// for no longer than a lease, and the lock is free.
    fn ends_well(&self) -> Result<(), Broken> {
        let mut world = self.clone();
        let requests = std::mem::take(&mut world.soup);
        for message in requests.iter().filter(|m| matches!(m.body, Body::Ask | Body::Renew | Body::Release)) {
            world.deliver(*message);
        }
        world.pass_on()?;
        let before = world.grants.len();
        let asks = world.table.waiting();
        for _ in 0..=asks {
            world.now = world.now + TTL;
            world.table.handle_timeout(world.time());
            world.pass_on()?;
        }
        if world.grants.len() - before != asks {
            return Err((Law::W, format!("{asks} in line, {} let in", world.grants.len() - before)));
        }
        match world.table.inspect(world.now, &NAME) {
            Some(view) => Err((Law::W, format!("still there: {view:?}"))),
            None => Ok(()),
        }
    }
}
