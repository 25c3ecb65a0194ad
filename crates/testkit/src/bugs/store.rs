use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use lockkeeper_core::{
    Acquired, Ask, Attempt, Claim, Delete, EventKind, EventStream, Expect, Fence, Grant, LockName, LockPage,
    LockView, Locks, Mode, Names, Owner, Page, Profile, Promise, Record, RecordPage, Records, Release,
    Renewal, Result, Store, Version, Wait, Write, limits,
};
use lockkeeper_host::random_128;
use tokio::sync::Notify;

use super::{Bug, recipe};

/// A store with one [`Bug`].
pub struct Bugged {
    store: Arc<dyn Store>,
    bug: Bug,
    notes: Arc<Notes>,
    own_count: AtomicU64,
    /// The fence of the newest grant of this client; zero without one.
    own_fence: AtomicU64,
}

/// What the clients of one spoilt store share.
#[derive(Default)]
struct Notes {
    count: AtomicU64,
    counts: Mutex<HashMap<LockName, u64>>,
    grants: Mutex<HashMap<Attempt, Grant>>,
    /// The attempts that the store knows under another name.
    alias: Mutex<HashMap<Attempt, Vec<Attempt>>>,
    told: Mutex<HashSet<Attempt>>,
    /// The first thing that was ever read of each record.
    read: Mutex<HashMap<LockName, Record>>,
    served: Notify,
}

impl Bugged {
    /// Spoils a store; `client` makes the next client of the same spoilt store.
    pub fn new(store: Arc<dyn Store>, bug: Bug) -> Self {
        Bugged {
            store,
            bug,
            notes: Arc::default(),
            own_count: AtomicU64::new(0),
            own_fence: AtomicU64::new(0),
        }
    }

    /// One more client of the same spoilt store.
    pub fn client(&self) -> Self {
        Bugged { notes: self.notes.clone(), ..Bugged::new(self.store.clone(), self.bug) }
    }

    fn made_up(&self, ask: &Ask, like: Fence) -> Grant {
        let n = self.notes.count.fetch_add(1, Ordering::Relaxed);
        let fence = Fence::new(like.get() + 1_000_000 + n).expect("a fence");
        Grant {
            claim: ask.claim.clone(),
            fence,
            mode: ask.mode,
            ttl: ask.ttl,
            sent_at: lockkeeper_core::Moment::from_nanos(0),
            lease: ask.ttl,
        }
    }

    /// A grant that is as good as any, for a lock that nobody asked for: it lasts, and can be renewed.
    async fn grant_beside(&self, ask: &Ask) -> Result<Option<Grant>> {
        let n = self.notes.count.fetch_add(1, Ordering::Relaxed);
        let mut beside = Ask { wait: Wait::No, ..ask.clone() };
        beside.claim.names = LockName::new(format!("beside/{n}"))?.into();
        match self.store.acquire(&beside).await? {
            Acquired::Granted(grant) => Ok(Some(Grant { claim: ask.claim.clone(), ..grant })),
            Acquired::Busy(_) => Ok(None),
        }
    }

    fn made_up_version(&self) -> u64 {
        1_000_000 + self.notes.count.fetch_add(1, Ordering::Relaxed)
    }

    /// A record as it is told, spoilt.
    fn twist_record(&self, record: Record) -> Record {
        recipe::twist_read(self.bug, Fence::new(self.own_fence.load(Ordering::Relaxed)).ok(), record)
    }

    /// The key of a record, spoilt.
    fn twist_key(&self, key: &LockName) -> LockName {
        match self.bug {
            Bug::CutsRecordNames => {
                LockName::new(key.as_str().chars().take(20).collect::<String>()).expect("a name")
            }
            _ => key.clone(),
        }
    }

    /// The ask, spoilt.
    fn twist(&self, ask: &Ask) -> Ask {
        let mut ask = ask.clone();
        let rename = |ask: &mut Ask, to: fn(&str) -> String| {
            let names = ask.claim.names.iter().map(|name| LockName::new(to(name.as_str())).expect("a name"));
            ask.claim.names = Names::new(names.collect::<Vec<_>>()).expect("names");
        };
        match self.bug {
            Bug::OneLockForAll => rename(&mut ask, |_| "everything".into()),
            Bug::FoldsNames => rename(&mut ask, |name| name.to_lowercase()),
            Bug::PartialGrants => ask.claim.names = ask.claim.names.first().clone().into(),
            Bug::NeverExpires => ask.ttl = limits::TTL_MAX,
            Bug::TtlUnchecked => {
                ask.ttl = ask.ttl.clamp(limits::TTL_MIN, limits::TTL_MAX);
                ask.lock_delay = ask.lock_delay.min(limits::TTL_MAX);
                ask.min_hold = ask.min_hold.min(limits::TTL_MAX);
            }
            Bug::GrantsEverybody => ask.wait = Wait::No,
            Bug::PatienceIgnored if ask.wait != Wait::No => ask.wait = Wait::Forever,
            Bug::DeadlockUnseen => ask.owner = None,
            Bug::EveryoneIsOneOwner => ask.owner = Some(Owner::from_bytes([1; 16])),
            Bug::SharedLetsWritersIn if ask.mode == Mode::Exclusive => ask.mode = Mode::Shared,
            Bug::SharedIsExclusive if ask.mode == Mode::Shared => ask.mode = Mode::Exclusive,
            Bug::PermitsUncounted if matches!(ask.mode, Mode::Permit(_)) => ask.mode = Mode::Shared,
            Bug::NoLockDelay => ask.lock_delay = Duration::ZERO,
            Bug::NoMinHold => ask.min_hold = Duration::ZERO,
            Bug::RetryIsANewAsk | Bug::RetryDoublesThePlace => {
                let other = Attempt::from_bytes(random_128());
                self.notes.alias.lock().unwrap().entry(ask.claim.attempt).or_default().push(other);
                ask.claim.attempt = other;
            }
            _ => {}
        }
        ask
    }

    /// The grant, spoilt.
    async fn colour(&self, ask: &Ask, mut grant: Grant) -> Grant {
        grant.claim = ask.claim.clone();
        grant.ttl = ask.ttl;
        let small = |n: u64| Fence::new(n).expect("a fence");
        match self.bug {
            Bug::FenceStandsStill => grant.fence = small(7),
            Bug::FenceDiesWithTheLock => {
                let mut counts = self.notes.counts.lock().unwrap();
                let count = counts.entry(ask.claim.names.first().clone()).or_default();
                *count += 1;
                grant.fence = small(*count);
            }
            Bug::FencePerClient => grant.fence = small(self.own_count.fetch_add(1, Ordering::Relaxed) + 1),
            Bug::ReentryNewFence if ask.owner.is_some() => {
                grant.fence = small(grant.fence.get() + self.notes.count.fetch_add(1, Ordering::Relaxed));
            }
            Bug::TtlInMilliseconds => grant.ttl = Duration::from_millis(ask.ttl.as_millis() as u64),
            Bug::CountsFromTheReply => grant.sent_at = grant.sent_at + ask.ttl / 2,
            _ => {}
        }
        self.own_fence.store(grant.fence.get(), Ordering::Relaxed);
        self.notes.grants.lock().unwrap().insert(ask.claim.attempt, grant.clone());
        grant
    }

    async fn ask(&self, ask: &Ask) -> Result<Acquired> {
        let twisted = self.twist(ask);
        match self.bug {
            Bug::NoLine => self.poll_without_a_line(&twisted).await,
            Bug::OneByOne => {
                for name in &twisted.claim.names {
                    let mut one = twisted.clone();
                    one.claim =
                        Claim { attempt: Attempt::from_bytes(random_128()), names: name.clone().into() };
                    let answer = self.store.acquire(&one).await?;
                    if matches!(answer, Acquired::Busy(_)) {
                        return Ok(answer);
                    }
                }
                Ok(Acquired::Granted(self.made_up(ask, Fence::new(1)?)))
            }
            Bug::ServesTwo => {
                let mut served = std::pin::pin!(self.notes.served.notified());
                // It listens before it can be seen in line.
                served.as_mut().enable();
                tokio::select! {
                    biased;
                    () = served => Ok(Acquired::Granted(self.made_up(ask, Fence::new(1)?))),
                    answer = self.store.acquire(&twisted) => {
                        self.notes.served.notify_waiters();
                        answer
                    }
                }
            }
            Bug::NobodyIsWoken => {
                let mut asked = std::pin::pin!(self.store.acquire(&twisted));
                match futures_util::poll!(&mut asked) {
                    std::task::Poll::Ready(answer) => answer,
                    std::task::Poll::Pending => {
                        let answer = asked.await;
                        tokio::time::sleep(Duration::from_secs(3600)).await;
                        answer
                    }
                }
            }
            Bug::GhostInLine => {
                let store = self.store.clone();
                let detached = tokio::spawn(async move { store.acquire(&twisted).await });
                let answer = detached.await.expect("it ends well");
                self.notes.told.lock().unwrap().insert(ask.claim.attempt);
                answer
            }
            _ => self.store.acquire(&twisted).await,
        }
    }

    async fn poll_without_a_line(&self, ask: &Ask) -> Result<Acquired> {
        let hasty = Ask { wait: Wait::No, ..ask.clone() };
        loop {
            match self.store.acquire(&hasty).await? {
                Acquired::Busy(_) if ask.wait != Wait::No => {
                    tokio::time::sleep(Duration::from_millis(1)).await
                }
                answer => return Ok(answer),
            }
        }
    }
}

#[async_trait]
impl Locks for Bugged {
    fn profile(&self) -> Profile {
        let mut profile = self.store.profile();
        if self.bug == Bug::OverstatesItself {
            (profile.fence, profile.durable) = (Promise::Kept, Promise::Kept);
        }
        profile
    }

    async fn acquire(&self, ask: &Ask) -> Result<Acquired> {
        if self.bug == Bug::RetryKeepsTheOldLease
            && let Some(grant) = self.notes.grants.lock().unwrap().get(&ask.claim.attempt)
        {
            return Ok(Acquired::Granted(grant.clone()));
        }
        if self.bug == Bug::FenceDiesWithTheLock
            && self.store.inspect(ask.claim.names.first()).await?.is_none()
        {
            self.notes.counts.lock().unwrap().remove(ask.claim.names.first());
        }
        match self.ask(ask).await? {
            Acquired::Granted(grant) => Ok(Acquired::Granted(self.colour(ask, grant).await)),
            Acquired::Busy(busy) => {
                let lets_in = match self.bug {
                    Bug::GrantsEverybody => true,
                    Bug::ReadersBarge => ask.mode == Mode::Shared,
                    _ => false,
                };
                let like = busy.held.first().map_or(Fence::new(1)?, |held| held.fence);
                if self.bug == Bug::GrantsEverybody
                    && let Some(grant) = self.grant_beside(ask).await?
                {
                    Ok(Acquired::Granted(grant))
                } else if lets_in {
                    Ok(Acquired::Granted(self.made_up(ask, like)))
                } else {
                    Ok(Acquired::Busy(busy))
                }
            }
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<Renewal>> {
        if self.bug == Bug::RenewalDoesNothing {
            return Ok(vec![Renewal::Renewed; grants.len()]);
        }
        let mut answers = self.store.renew(grants).await?;
        for (answer, grant) in answers.iter_mut().zip(grants) {
            if *answer == Renewal::Renewed {
                continue;
            }
            if self.bug == Bug::RenewalRevives {
                self.store.break_lock(grant.claim.names.first(), "mine!").await?;
                let me = Arc::new(lockkeeper_core::Holder::new("host", 1, None)?);
                let ask = Ask::new(grant.claim.attempt, grant.claim.names.clone(), grant.ttl, me);
                self.store.acquire(&ask).await?;
            }
            if matches!(self.bug, Bug::RenewalRevives | Bug::RenewalAlwaysYes) {
                *answer = Renewal::Renewed;
            }
        }
        Ok(answers)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        match self.bug {
            Bug::ReleaseIsLost => return Ok(Release::Released),
            Bug::GhostInLine if !self.notes.told.lock().unwrap().contains(&claim.attempt) => {
                return Ok(Release::Released);
            }
            Bug::DelaysAlways | Bug::FirstReleaseFreesAll => {
                self.store.break_lock(claim.names.first(), "released").await?;
                return Ok(Release::Released);
            }
            _ => {}
        }
        let aliases = self.notes.alias.lock().unwrap().remove(&claim.attempt).unwrap_or_default();
        for attempt in aliases {
            self.store.release(&Claim { attempt, names: claim.names.clone() }).await?;
        }
        let answer = self.store.release(claim).await?;
        if self.bug == Bug::ReleaseWithoutOwnerCheck && answer == Release::AlreadyGone {
            self.store.break_lock(claim.names.first(), "released").await?;
            return Ok(Release::Released);
        }
        if self.bug == Bug::ReleaseAlwaysYes { Ok(Release::Released) } else { Ok(answer) }
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let mut view = self.store.inspect(name).await?;
        if let Some(held) = view.as_mut().map(|view| &mut view.held) {
            match self.bug {
                Bug::InspectIsBlind => held.clear(),
                Bug::ShowsTheAttempt => {
                    let grants = self.notes.grants.lock().unwrap();
                    let attempt = grants.values().find(|grant| grant.fence == held[0].fence);
                    held[0].holder.label = attempt.map(|grant| grant.claim.attempt.to_hex());
                }
                _ => {}
            }
        }
        Ok(view)
    }

    async fn list(&self, prefix: &str, page: &Page) -> Result<LockPage> {
        let mut page = page.clone();
        if self.bug == Bug::ListForgetsPages {
            page.after = None;
        }
        self.store.list(prefix, &page).await
    }

    async fn watch(&self, prefix: &str) -> Result<EventStream> {
        let events = self.store.watch(prefix).await?;
        if self.bug != Bug::WatchDropsReleases {
            return Ok(events);
        }
        let kept = events.filter(|event| {
            let dropped = matches!(event.as_ref().map(|event| &event.kind), Ok(EventKind::Released { .. }));
            std::future::ready(!dropped)
        });
        Ok(Box::pin(kept))
    }

    async fn revoke(&self, name: &LockName, reason: &str) -> Result<Fence> {
        match self.bug {
            Bug::RevokeLetsTheNextIn => self.store.break_lock(name, reason).await,
            Bug::RevokeIsForgotten => Ok(Fence::MAX),
            Bug::RevokeHasNoReason => self.store.revoke(name, "broken").await,
            _ => self.store.revoke(name, reason).await,
        }
    }

    async fn break_lock(&self, name: &LockName, reason: &str) -> Result<Fence> {
        let fence = self.store.break_lock(name, reason).await?;
        if self.bug == Bug::BreakKeepsTheFence { Fence::new(1) } else { Ok(fence) }
    }
}

#[async_trait]
impl Records for Bugged {
    async fn read(&self, key: &LockName) -> Result<Option<Record>> {
        let found = self.store.read(&self.twist_key(key)).await?;
        match found {
            Some(record) if self.bug == Bug::ReadsAreStale => {
                Ok(Some(self.notes.read.lock().unwrap().entry(key.clone()).or_insert(record).clone()))
            }
            found => Ok(found.map(|record| self.twist_record(record))),
        }
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<Write> {
        let expect = if self.bug == Bug::ExpectIgnored { Expect::Any } else { expect };
        if self.bug == Bug::NoTombstones && value.starts_with(b"lk0 ") {
            return Ok(match self.store.delete(key, expect).await? {
                Delete::Deleted => Write::Written(Version(self.made_up_version())),
                Delete::Absent => Write::Conflict(None),
                Delete::Conflict(found) => Write::Conflict(Some(found)),
            });
        }
        let (value, expect) = recipe::twist_write(self.bug, key, value, expect);
        let mut ttl = if self.bug == Bug::RecordsNeverExpire { None } else { ttl };
        let mut value = &value[..];
        match self.bug {
            Bug::WritesAreLost => {
                return Ok(Write::Written(Version(self.made_up_version())));
            }
            Bug::RecordsUnchecked => {
                ttl = ttl.map(|ttl| ttl.max(limits::TTL_MIN));
                value = &value[..value.len().min(limits::VALUE_BYTES)];
            }
            _ => {}
        }
        let written = self.store.write(&self.twist_key(key), value, expect, ttl).await?;
        match written {
            Write::Written(_) if self.bug == Bug::VersionsStartAgain => Ok(Write::Written(Version(1))),
            Write::Conflict(found) => Ok(Write::Conflict(found.map(|record| self.twist_record(record)))),
            written => Ok(written),
        }
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<Delete> {
        self.store.delete(&self.twist_key(key), expect).await
    }

    async fn scan(&self, prefix: &str, page: &Page) -> Result<RecordPage> {
        let mut page = page.clone();
        if self.bug == Bug::ListForgetsPages {
            page.after = None;
        }
        self.store.scan(prefix, &page).await
    }
}
