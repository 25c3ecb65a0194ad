use std::time::Duration;

use lockkeeper_core::{Busy, Error, LockName, Result};

use super::page::{Page, told_unkept};
use super::{Claim, Done, Once, Stored, Turn, nested, parts, turn};
use crate::builder::LockBuilder;
use crate::guard::Guard;
use crate::recipes::backoff::{Backoff, look_again};
use crate::recipes::cell::{Cell, Retry, Seen};
use crate::recipes::{name_of, need_records};

impl Once {
    /// The result if there is one, else the turn to make it. Waits while somebody else runs.
    pub async fn claim(self) -> Result<Claim> {
        need_records(&self.keeper, "a thing done once")?;
        self.check()?;
        let cell = Cell::new(&self.keeper, name_of("once/", &self.key)?);
        let before = cell.read().await?;
        if let Some(seen) = &before
            && let Some(done) = self.judge(&cell, seen).await?
        {
            return Ok(Claim::Done(done));
        }
        nested::check(&self.keeper, &cell.key)?;
        let guard = tokio::select! {
            biased;
            // Standing in line is the wait; looking now and then spares those at the end of a long line.
            done = self.watch_for_result(&cell) => return done.map(Claim::Done),
            guard = self.stand_in_line(&cell.key) => guard?,
        };
        self.begin(cell, guard, before).await
    }

    /// The result if there is one by now. Neither waits nor runs.
    pub async fn result(&self) -> Result<Option<Done<Stored>>> {
        need_records(&self.keeper, "a thing done once")?;
        self.look(&Cell::new(&self.keeper, name_of("once/", &self.key)?)).await
    }

    /// Whether the key is in use for something else than our fingerprint says.
    #[cfg(feature = "tower")]
    pub(crate) async fn stands_for_another(&self) -> Result<bool> {
        let Some(seen) = Cell::new(&self.keeper, name_of("once/", &self.key)?).read().await? else {
            return Ok(false);
        };
        let (page, _) = Page::parse(&self.key, &seen.value)?;
        Ok(page.check_print(&self.key, self.print.as_deref()).is_err())
    }

    fn check(&self) -> Result<()> {
        if self.keep < lockkeeper_core::limits::TTL_MIN {
            return Err(Error::invalid(format!(
                "the result is kept for {:?}: at least 100ms are needed",
                self.keep
            )));
        }
        Ok(())
    }

    async fn stand_in_line(&self, name: &LockName) -> Result<Guard> {
        let mut ask: LockBuilder = self.keeper.lock(name).ttl(self.ttl);
        if self.for_correctness {
            ask = ask.for_correctness();
        }
        match self.wait {
            Some(Duration::ZERO) => match ask.try_acquire().await? {
                Some(guard) => Ok(guard),
                None => Err(self.busy(name).await?),
            },
            Some(wait) => ask.wait(wait).acquire().await,
            None => ask.acquire().await,
        }
    }

    /// Who is at it, for one who does not wait.
    async fn busy(&self, name: &LockName) -> Result<Error> {
        let view = self.keeper.inspect(name).await?;
        let (held, waiting) = view.map_or_else(Default::default, |view| (view.held, view.waiting));
        Ok(Error::Busy(Box::new(Busy { name: name.clone(), held, waiting })))
    }

    async fn watch_for_result(&self, cell: &Cell) -> Result<Done<Stored>> {
        loop {
            look_again(&*self.keeper.0.clock, self.poll).await;
            // Trouble while looking is no trouble: the place in line will tell.
            match self.look(cell).await {
                Ok(Some(done)) => return Ok(done),
                Err(error @ Error::Invalid(_)) => return Err(error),
                _ => {}
            }
        }
    }

    /// The result, if there is one.
    async fn look(&self, cell: &Cell) -> Result<Option<Done<Stored>>> {
        match cell.read().await? {
            Some(seen) => self.judge(cell, &seen).await,
            None => Ok(None),
        }
    }

    /// The result that a page tells of; `None` if it tells of a run.
    async fn judge(&self, cell: &Cell, seen: &Seen) -> Result<Option<Done<Stored>>> {
        let (page, body) = Page::parse(&self.key, &seen.value)?;
        page.check_print(&self.key, self.print.as_deref())?;
        let Some(done) = &page.done else { return Ok(None) };
        if let Some(why) = &done.unkept {
            return Err(told_unkept(&self.key, page.fence, why));
        }
        let bytes = parts::gather(cell, &self.key, page.fence, done, body).await?;
        Ok(Some(Done { result: Stored { ok: done.ok, bytes }, fence: page.fence, replayed: true }))
    }

    /// Says in the record that we run, unless there is a result after all. It is not read for that: if it is not as it was
    /// before we stood in line, the write is refused, and the answer says what is there.
    async fn begin(&self, cell: Cell, guard: Guard, before: Option<Seen>) -> Result<Claim> {
        let mut old = before;
        let (mut backoff, mut refused) = (Backoff::new(&*self.keeper.0.clock), false);
        loop {
            if let Some(seen) = &old {
                if let Some(done) = self.judge(&cell, seen).await? {
                    guard.release().await.ok();
                    return Ok(Claim::Done(done));
                }
                let (page, _) = Page::parse(&self.key, &seen.value)?;
                if page.fence > guard.fence() {
                    // Somebody was let in after us: we are late, and do not know it yet.
                    return Err(Error::Stale { presented: guard.fence(), seen: page.fence });
                }
            }
            let page = Page::running(guard.fence(), self.print.clone()).bytes(&[]);
            let ttl = Some(turn::forgotten_after(self.keep));
            match guard.run(cell.swap(old.as_ref(), &page, ttl, Retry::Briefly)).await?? {
                Ok(running) => {
                    let (key, print) = (self.key.clone(), self.print.clone());
                    let (keep, on_failure) = (self.keep, self.on_failure);
                    let turn = Turn { cell, guard, running, key, print, keep, on_failure };
                    return Ok(Claim::Turn(Box::new(turn)));
                }
                // Somebody ran meanwhile, or the page before went.
                Err(found) => {
                    old = found;
                    // A store that refuses the write over and over is not asked without a pause.
                    if std::mem::replace(&mut refused, true) {
                        backoff.wait().await;
                    }
                }
            }
        }
    }
}
