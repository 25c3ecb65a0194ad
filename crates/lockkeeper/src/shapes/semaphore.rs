//! A lock of which up to a number of holders have a permit at the same time.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper_core::{BootInstant, Error, Mode, Owner, ReleaseOutcome, Result, limits};

use super::{HoldOptions, hold_options, hold_owner, need};
use crate::builder::LockBuilder;
use crate::guard::Guard;
use crate::keeper::Lockkeeper;
use crate::recipes::backoff::pause_between_polls;
use crate::recipes::need_records;
use crate::register::Register;

/// A semaphore by name. Nothing happens before [`Semaphore::acquire`] or [`Semaphore::try_acquire`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let keeper = lockkeeper::Lockkeeper::open("memory:").await?;
/// let transcoders = keeper.semaphore("transcoders", 3);
/// let permit = transcoders.acquire().await?;              // one of at most three, in the whole fleet
/// transcoders.resize(1).await?;                           // for all callers, from now on
/// assert!(permit.is_held());                              // a holder above the limit finishes its work
/// assert!(transcoders.try_acquire().await?.is_none());
/// permit.release().await?;
/// # Ok(())
/// # }
/// ```
///
/// Every permit has a lease and a fence (fencing token) of its own. Several holders are valid at once, so a
/// resource that they share must not check their fences: it would refuse all but the newest. A fence helps
/// where each permit has a resource of its own.
#[must_use = "nothing happens before acquire() or try_acquire()"]
#[derive(Clone, Debug)]
pub struct Semaphore {
    keeper: Lockkeeper,
    name: String,
    given: u32,
    /// The limit that this semaphore and its clones saw last.
    seen: Arc<AtomicU32>,
    poll: Duration,
    options: HoldOptions,
}

/// One permit of a [`Semaphore`]. Dropping it releases it, as with a [`Guard`].
#[must_use = "a permit that is dropped is released"]
#[derive(Debug)]
pub struct SemaphorePermit {
    guard: Guard,
    semaphore: Semaphore,
    owner: Option<Owner>,
}

impl Lockkeeper {
    /// The semaphore called `name` with `permits` permits, unless [`Semaphore::resize`] has set another
    /// number. The first call reports an invalid name or number.
    ///
    /// It is the lock of that name, so `lockkeeper run NAME --permits N` takes a permit of it too. If
    /// requests and holders name different numbers, the smallest applies.
    pub fn semaphore(&self, name: impl Into<String>, permits: u32) -> Semaphore {
        Semaphore {
            keeper: self.clone(),
            name: name.into(),
            given: permits,
            seen: Arc::new(AtomicU32::new(permits)),
            poll: Duration::from_millis(500),
            options: HoldOptions::default(),
        }
    }
}

impl Semaphore {
    hold_options!();

    /// How often a waiting request checks whether the limit was changed. Every 500 ms by default.
    pub fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Waits for a permit.
    pub async fn acquire(&self) -> Result<SemaphorePermit> {
        let clock = &*self.keeper.0.clock;
        let give_up = self.options.wait.map(|wait| clock.now() + wait);
        if let Some(permit) = self.try_acquire().await? {
            return Ok(permit);
        }
        loop {
            let (limit, owner) = (self.read_limit().await?, hold_owner(&self.keeper));
            let mut request = self.request(limit, owner)?;
            if let Some(give_up) = give_up {
                request = request.wait(rest(give_up, clock.now()));
            }
            let acquired = tokio::select! {
                biased;
                acquired = request.acquire() => acquired?,
                // A request with an old limit would hold up the queue, or exceed the new limit.
                () = self.limit_changes(limit) => continue,
            };
            if let Some(permit) = self.confirm(acquired, limit, owner).await? {
                return Ok(permit);
            }
        }
    }

    /// A permit, if one is free.
    pub async fn try_acquire(&self) -> Result<Option<SemaphorePermit>> {
        loop {
            let (limit, owner) = (self.seen.load(Ordering::Relaxed), hold_owner(&self.keeper));
            let found = self.request(limit, owner)?.try_acquire().await?;
            match found {
                Some(guard) => {
                    if let Some(permit) = self.confirm(guard, limit, owner).await? {
                        return Ok(Some(permit));
                    }
                }
                // The limit may have been raised since this semaphore saw it.
                None if self.read_limit().await? <= limit => return Ok(None),
                None => {}
            }
        }
    }

    /// The permit, if its request named the limit that applies after the grant. Otherwise the permit is
    /// released, because it may be above the limit.
    async fn confirm(
        &self,
        guard: Guard,
        limit: u32,
        owner: Option<Owner>,
    ) -> Result<Option<SemaphorePermit>> {
        if guard.run(self.read_limit()).await?? == limit {
            return Ok(Some(SemaphorePermit { guard, semaphore: self.clone(), owner }));
        }
        let _ = guard.release().await;
        Ok(None)
    }

    fn request(&self, limit: u32, owner: Option<Owner>) -> Result<LockBuilder> {
        need(&self.keeper, self.keeper.profile().permits, "a semaphore", "permits")?;
        Ok(self.options.apply(self.keeper.lock(&self.name), owner).permits(limit))
    }

    /// The number of permits that applies now.
    pub async fn limit(&self) -> Result<u32> {
        check(self.given)?;
        self.read_limit().await
    }

    async fn read_limit(&self) -> Result<u32> {
        let limit = match self.keeper.profile().records {
            true => self.register()?.read().await?.map_or(self.given, |entry| entry.value),
            false => self.given,
        };
        check(limit)?;
        self.seen.store(limit, Ordering::Relaxed);
        Ok(limit)
    }

    /// Completes when the limit is another one. Ignores a failed poll.
    async fn limit_changes(&self, limit: u32) {
        if !self.keeper.profile().records {
            return std::future::pending().await;
        }
        loop {
            pause_between_polls(&*self.keeper.0.clock, self.poll).await;
            if self.read_limit().await.is_ok_and(|now| now != limit) {
                return;
            }
        }
    }

    /// Sets the number of permits for all callers, whatever number they name, also for those that wait
    /// now: they notice it with their next poll.
    ///
    /// With fewer permits no holder is stopped: the holders above the limit finish their work, and no
    /// request is granted until fewer than the limit are left. More permits apply as soon as no holder is
    /// left that was granted its permit under the smaller limit, since the smallest number that a holder
    /// names applies; a holder that goes on for long takes the new limit over with
    /// [`SemaphorePermit::adopt_limit`].
    ///
    /// The number is the register `semaphore/NAME`, as text: `lockkeeper record set semaphore/NAME 5` does
    /// the same. [`Error::Unsupported`] on a store without records.
    pub async fn resize(&self, permits: u32) -> Result<()> {
        check(permits)?;
        self.register()?.update(|_| permits).await.map(drop)
    }

    /// Removes the number that [`Semaphore::resize`] has set: each caller's own number applies again.
    pub async fn reset_limit(&self) -> Result<()> {
        self.register()?.remove(None).await.map(drop)
    }

    fn register(&self) -> Result<Register<u32>> {
        need_records(&self.keeper, "the limit of a semaphore that is resized")?;
        let name = crate::recipes::name_of("semaphore/", &self.name)?;
        Ok(self.keeper.register(name.as_str()))
    }
}

fn check(permits: u32) -> Result<()> {
    match permits {
        0 => Err(Error::invalid(format!("0 permits: 1 to {} are possible", limits::PERMITS))),
        n if n > limits::PERMITS => {
            Err(Error::invalid(format!("{n} permits: 1 to {} are possible", limits::PERMITS)))
        }
        _ => Ok(()),
    }
}

/// The rest of a wait. A request needs some time to be answered at all.
fn rest(give_up: BootInstant, now: BootInstant) -> Duration {
    give_up.since(now).max(Duration::from_millis(1))
}

impl Deref for SemaphorePermit {
    type Target = Guard;
    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl SemaphorePermit {
    /// The limit that applied when this permit was granted, or that it has adopted.
    pub fn limit(&self) -> u32 {
        match self.guard.mode() {
            Mode::Permit(limit) => limit,
            _ => self.semaphore.given,
        }
    }

    /// Takes over a limit that was raised since the grant, so that this holder keeps no request out that the
    /// new limit admits. The fence stays the same, and there is no moment without a permit. Returns the
    /// limit that applies to this permit now. A limit that was lowered changes nothing here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a store without re-entry; [`Error::Lost`] if the permit was lost. The
    /// permit stays as it is.
    pub async fn adopt_limit(&mut self) -> Result<u32> {
        let limit = self.semaphore.read_limit().await?;
        if limit <= self.limit() {
            return Ok(self.limit());
        }
        need(
            &self.semaphore.keeper,
            self.owner.is_some(),
            "a permit that adopts a limit",
            "re-entry by an owner",
        )?;
        let request = self.semaphore.request(limit, self.owner)?.try_acquire();
        match self.guard.run(request).await?? {
            Some(raised) if raised.fence() == self.guard.fence() => {
                let old = std::mem::replace(&mut self.guard, raised);
                // A release that fails is repeated in the background.
                let _ = old.release().await;
                Ok(limit)
            }
            Some(_) | None => Err(Error::Lost(format!("the permit of {} was lost", self.guard.names()))),
        }
    }

    /// Releases the permit: see [`Guard::release`].
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.guard.release().await
    }
}
