//! Waiting for a lock: in no order, by looking again after a while.

use std::time::Duration;

use lockkeeper_core::{Acquired, Ask, Busy, Error, Grant, Mode, Moment, Result, Wait};
use lockkeeper_host::sleep_until;

use crate::acquire::Got;
use crate::book::millis_up;
use crate::errand::Errand;
use crate::layout::mark;
use crate::step::{Slot, Step, jitter};
use crate::store::Shared;

/// One ask, on its way.
pub struct Asking<'a> {
    pub ask: &'a Ask,
    pub mark: String,
    until: Moment,
    /// It was blocked before, and waits.
    pub waits: bool,
}

impl Shared {
    pub async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        let errand = self.errands.begin(ask.claim.attempt);
        let mut asking = Asking { ask, mark: mark(&ask.claim.attempt), until, waits: false };
        let busy = match self.ask_once(&asking).await? {
            Ok(grant) => return self.hand_over(&errand, grant).await,
            Err((busy, _)) if ask.wait == Wait::No => busy,
            Err(first) => {
                asking.waits = true;
                match self.wait(&asking, &errand, first).await? {
                    Ok(grant) => return self.hand_over(&errand, grant).await,
                    Err(busy) => busy,
                }
            }
        };
        self.bear_witness(ask).await;
        Ok(Acquired::Busy(busy))
    }

    /// A grant that was taken back while it came is nobody's.
    async fn hand_over(&self, errand: &Errand, grant: Grant) -> Result<Acquired> {
        if !errand.is_withdrawn() {
            return Ok(Acquired::Granted(grant));
        }
        _ = self.give_back(&grant.claim).await;
        Err(left())
    }

    async fn wait(
        &self,
        asking: &Asking<'_>,
        errand: &Errand,
        (mut busy, mut lasts): (Busy, Duration),
    ) -> Result<Result<Grant, Busy>> {
        let clock = &*self.options.clock;
        let gate = self.errands.gate(asking.ask.claim.names.first());
        let mut turn = None;
        let mut tried = false;
        loop {
            if turn.is_none() {
                tokio::select! {
                    got = gate.turn() => turn = Some(got),
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, asking.until) => {}
                }
                // Those in front have looked a moment ago: whoever comes next tries at once.
                lasts = if tried { lasts } else { Duration::ZERO };
            }
            if turn.is_some() && !lasts.is_zero() {
                let poll = self.options.poll / 2 + jitter(self.options.poll / 2);
                let at = clock.now() + poll.min(lasts + Duration::from_millis(1));
                tokio::select! {
                    () = gate.hint() => {}
                    () = errand.withdrawn() => return Err(left()),
                    () = sleep_until(clock, at.min(asking.until)) => {}
                }
            }
            tried = true;
            let last = clock.now() >= asking.until;
            match self.ask_once(asking).await {
                Ok(Ok(grant)) => return Ok(Ok(grant)),
                Ok(Err(now)) => (busy, lasts) = now,
                // Whoever waits goes on waiting while DynamoDB is away.
                Err(error @ (Error::Unavailable(_) | Error::Unknown(_) | Error::Limited(_)))
                    if !last && !errand.is_withdrawn() =>
                {
                    tracing::debug!(%error, "still waiting");
                    lasts = self.options.poll;
                }
                Err(error) => return Err(error),
            }
            if errand.is_withdrawn() {
                return Err(left());
            }
            if last {
                self.withdraw_intent(asking).await;
                return Ok(Err(busy));
            }
        }
    }

    async fn ask_once(&self, asking: &Asking<'_>) -> Result<Result<Grant, (Busy, Duration)>> {
        let ask = asking.ask;
        let (got, sent_at) = self.step(&ask.claim.names, |slots| self.decide(asking, slots)).await?;
        match got {
            Got::Busy(busy, lasts) => Ok(Err((busy, lasts))),
            Got::Granted { fence, mode, ttl } => {
                // The item has whole milliseconds; the holder keeps the ttl that it asked for.
                let same = ttl == Duration::from_millis(millis_up(ask.ttl));
                let ttl = if same { ask.ttl } else { ttl };
                self.mine.granted(&asking.mark, sent_at, ttl);
                let claim = ask.claim.clone();
                Ok(Ok(Grant { claim, fence, mode, ttl, sent_at, lease: ttl }))
            }
        }
    }

    async fn withdraw_intent(&self, asking: &Asking<'_>) {
        if asking.ask.mode != Mode::Exclusive {
            return;
        }
        let drop = |slots: &mut [Slot]| {
            slots.iter_mut().for_each(|slot| slot.unwant(&asking.mark));
            Ok(if slots.iter().any(|slot| slot.dirty) { Step::Write(()) } else { Step::Tell(()) })
        };
        if let Err(error) = self.step(&asking.ask.claim.names, drop).await {
            tracing::debug!(%error, "it goes by itself");
        }
    }

    /// Leaves a note of what we saw, for the next process of this machine: one that never waits would else never see anything
    /// for long enough.
    async fn bear_witness(&self, ask: &Ask) {
        let note = |slots: &mut [Slot]| {
            let looker = self.looker();
            slots.iter_mut().for_each(|slot| slot.dirty |= looker.witness(&mut slot.page));
            Ok(if slots.iter().any(|slot| slot.dirty) { Step::Write(()) } else { Step::Tell(()) })
        };
        if let Err(error) = self.step(&ask.claim.names, note).await {
            tracing::debug!(%error, "nobody will know that we were here");
        }
    }
}

fn left() -> Error {
    Error::Unknown("the ask was taken back".into())
}
