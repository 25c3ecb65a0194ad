//! What must be true in every state that can be reached.

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Law {
    /// No two clients believe that they hold the lock, and the table has given it to one at most.
    X,
    /// Fences grow from grant to grant.
    F,
    /// The fenced register takes no write older than one it has taken, and refuses no valid holder.
    R,
    /// A renewal keeps a grant that is there. It never makes one, not even for a former holder.
    Keeps,
    /// Who was told of its loss does not believe again.
    L,
    /// Every waiter is granted, and a lease without renewals ends, within a bound.
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

    /// What if this client wrote now, whatever its lease says? It looked, was stopped, and goes on. The place of its grant
    /// in the order of grants is the truth.
    fn late_write(&self, i: usize) -> Result<(), Broken> {
        let (Some(place), Some((fence, _))) = (self.place(i), self.fence(i)) else { return Ok(()) };
        match self.written {
            Some((newest, _)) if fence < newest && self.believes(i) => {
                Err((Law::R, format!("client {i} rightly holds with {fence}, and is refused")))
            }
            Some((newest, latest)) if fence >= newest && place < latest => {
                Err((Law::R, format!("a write of grant {place} is taken after one of grant {latest}")))
            }
            _ => Ok(()),
        }
    }

    fn fence(&self, i: usize) -> Option<(Fence, bool)> {
        match self.clients[i].phase {
            Phase::Holding { fence, lost, .. } => Some((fence, lost)),
            _ => None,
        }
    }

    fn place(&self, i: usize) -> Option<usize> {
        let (fence, _) = self.fence(i)?;
        self.grants.iter().rposition(|grant| *grant == (self.clients[i].id, fence))
    }

    /// Whether a write now would be older than one that an unfenced register has taken.
    pub fn would_harm(&self, i: usize) -> bool {
        self.place(i).is_some_and(|place| place < self.unfenced)
    }

    pub fn check(&self) -> Result<(), Broken> {
        let believers: Vec<usize> = (0..CLIENTS).filter(|i| self.believes(*i)).collect();
        if believers.len() > 1 {
            return Err((Law::X, format!("{believers:?} believe that they hold the lock")));
        }
        // The table's own clock is asked at its beginning: it has not been told that anything is over.
        let held = self.table.inspect(BootInstant::default(), &NAME).map_or(Vec::new(), |view| view.held);
        if held.len() > 1 {
            return Err((Law::X, format!("granted twice: {held:?}")));
        }
        (0..CLIENTS).try_for_each(|i| self.late_write(i))?;
        for i in believers {
            let Some((fence, lost)) = self.fence(i) else { continue };
            if lost {
                return Err((Law::L, format!("client {i} was told of its loss, and believes again")));
            }
            let mut held = held.iter().map(|held| (Id::of_pid(held.holder.pid), held.fence));
            if !held.any(|held| held == (self.clients[i].id, fence)) {
                return Err((Law::Truth, format!("client {i} believes, and the table knows nothing of it")));
            }
        }
        self.ends_well()
    }

    /// From here on every request arrives once and no client sends another. Then every waiter is granted, each
    /// for no longer than a lease, and the lock is free.
    fn ends_well(&self) -> Result<(), Broken> {
        let mut world = self.clone();
        let requests = std::mem::take(&mut world.soup);
        for message in requests.iter().filter(|m| matches!(m.body, Body::Ask | Body::Renew | Body::Release)) {
            world.deliver(*message)?;
        }
        world.pass_on()?;
        let before = world.grants.len();
        let requests = world.table.waiting();
        for _ in 0..=requests {
            world.now = world.now + TTL;
            world.table.handle_timeout(world.time());
            world.pass_on()?;
        }
        if world.grants.len() - before != requests {
            return Err((Law::W, format!("{requests} waiting, {} granted", world.grants.len() - before)));
        }
        match world.table.inspect(world.now, &NAME) {
            Some(view) => Err((Law::W, format!("still there: {view:?}"))),
            None => Ok(()),
        }
    }
}
