//! Fences are zxids with a base added: a number that was written once, and that is checked in every transaction that
//! grants. So they begin where the clock is, and go on growing when everything in the ensemble was deleted.
//!
//! The base is the name of a node, not what is written in it: one that was deleted and made again has another name, so
//! whoever remembers the old one is refused. What is written in it is until when somebody watches.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use lockkeeper_core::{Error, Fence, Result};
use zookeeper_client as zk;

use crate::fault::Failure;
use crate::link::Session;
use crate::script::{ANY, Op, check, create, delete, set};
use crate::store::Shared;

/// What we know of the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base {
    pub number: u64,
    /// Changes when somebody begins to watch.
    pub version: i32,
    /// Somebody watches until then, by the ensemble's clock.
    pub watched: u64,
}

/// The fence of a write with this number. The upper half of a zxid counts elections: about 1.6 million of them fit.
pub fn fence_at(base: u64, zxid: i64) -> Result<Fence> {
    let fence = base.saturating_add(zxid.unsigned_abs());
    Fence::new(fence).map_err(|_| Error::Limited("the fences of this store are used up".into()))
}

impl Shared {
    /// What is added to a zxid, as far as we know.
    pub fn base(&self) -> Base {
        *self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The base is still this one, and nobody has begun to watch.
    pub fn base_stands(&self, base: Base) -> Op {
        check(self.layout.base(base.number), base.version)
    }

    /// The highest fence that we have seen.
    pub fn floor(&self) -> u64 {
        self.floor.load(Ordering::Relaxed)
    }

    pub fn note(&self, fence: Fence) {
        self.floor.fetch_max(fence.get(), Ordering::Relaxed);
    }

    /// Reads the base. One that is missing is made, and one that may let a fence go back is raised: whoever deleted or
    /// restored it did not mean to lock every fenced resource out.
    pub async fn learn_base(&self, session: &Session, suspect: bool) -> Result<(), Failure> {
        let floor = self.floor();
        loop {
            let (known, found) = (self.base(), self.bases(session).await?.into_iter().max());
            // Another one than we had: whoever made it may not know of the highest fence.
            let doubtful = found.is_none() || suspect || (known.number != 0 && found != Some(known.number));
            let good = match found.filter(|_| !doubtful) {
                Some(number) => Some(number),
                None => self.raise_base(session, floor).await?,
            };
            if let Some(number) = good
                && self.take_over(session, number).await?
            {
                return Ok(());
            }
        }
    }

    /// The bases that are there: one, as a rule.
    async fn bases(&self, session: &Session) -> Result<Vec<u64>, Failure> {
        let bases = self.layout.bases();
        loop {
            match session.children(&bases).await {
                Ok((children, _)) => {
                    let numbers = children.iter().filter_map(|child| child.parse::<u64>().ok());
                    return Ok(numbers.filter(|n| *n < 1 << 53).collect());
                }
                Err(failure) if failure.is(&zk::Error::NoNode) => {
                    self.make_root(session).await?;
                    session.make_all(&bases, self.link.acls()).await?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// A base that lets no fence go back below the floor: the one that is there, or one that is made. `None`: somebody else
    /// was faster.
    async fn raise_base(&self, session: &Session, floor: u64) -> Result<Option<u64>, Failure> {
        // A write, to learn where the zxids are. What is listed after it can only change by a write that the version refuses;
        // what was listed before may have: two who found nothing would each make a base, and have fences of their own.
        let bases = self.layout.bases();
        let Some(stat) = Failure::gone(session.set(&bases, b"", ANY).await)? else { return Ok(None) };
        self.link.heard(stat.mtime);
        let all = self.bases(session).await?;
        let zxid = stat.mzxid.unsigned_abs();
        let needed = floor.saturating_sub(zxid);
        if let [number] = all[..]
            && number >= needed
        {
            return Ok(Some(number));
        }
        let clock = self.clock.wall().as_micros().min(Fence::MAX.get() / 2);
        let highest = all.iter().copied().max().unwrap_or(0);
        let number = clock.saturating_sub(zxid).max(needed).max(highest);
        let mut ops = vec![set(bases, Vec::new(), stat.version)];
        ops.extend(all.iter().map(|old| delete(self.layout.base(*old), ANY)));
        ops.push(create(self.layout.base(number), Vec::new()));
        match session.multi(&ops).await {
            Ok(_) => tracing::info!(number, "the base of the fences was written"),
            // Somebody else was faster.
            Err(Failure::Refused(_, zk::Error::BadVersion | zk::Error::NoNode | zk::Error::NodeExists)) => {
                return Ok(None);
            }
            Err(failure) => return Err(failure),
        }
        Ok(Some(number))
    }

    /// False: it is gone.
    async fn take_over(&self, session: &Session, number: u64) -> Result<bool, Failure> {
        let Some((data, stat)) = Failure::gone(session.get(&self.layout.base(number)).await)? else {
            return Ok(false);
        };
        let watched = std::str::from_utf8(&data).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        *self.base.lock().unwrap_or_else(PoisonError::into_inner) =
            Base { number, version: stat.version, watched };
        Ok(true)
    }

    /// The node that everything is below.
    pub async fn make_root(&self, session: &Session) -> Result<(), Failure> {
        session.make_all(self.layout.root(), self.link.acls()).await
    }

    /// What the ensemble's clock shows, at least, in milliseconds.
    pub async fn ensemble_time(&self, session: &Session) -> Result<u64, Failure> {
        if self.link.tide().is_none() {
            let stat = session.set(&self.layout.bases(), b"", ANY).await?;
            self.link.heard(stat.mtime);
        }
        Ok(self.link.tide().unwrap_or(0))
    }
}
