//! A store with a planted bug: a memory store whose answers are wrong in one way.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use lockkeeper_core::{
    AcquireOutcome, Attempt, DeleteOutcome, EventKind, EventStream, Expect, Fence, Grant, Guarantee,
    LockName, LockPage, LockRequest, LockView, Locks, Mode, Names, Owner, Page, Profile, Record, RecordPage,
    Records, ReleaseOutcome, RenewOutcome, RequestKey, Result, Store, Version, Wait, WallTime, WriteOutcome,
    limits,
};
use lockkeeper_host::{Clock, random_128};
use tokio::sync::Notify;

use super::client::RenewalTimes;
use super::{Bug, recipe};

/// A store with one [`Bug`].
pub struct Bugged {
    store: Arc<dyn Store>,
    bug: Bug,
    /// The clock of the store, for bugs that count by the wall clock.
    clock: Option<Arc<dyn Clock>>,
    notes: Arc<Notes>,
    own_count: AtomicU64,
    /// The fence of the newest grant of this client; zero without one.
    own_fence: AtomicU64,
    /// The first thing that this client ever read of each record.
    read: Mutex<HashMap<LockName, Option<Record>>>,
    /// The records that this client has written to.
    written: Mutex<HashSet<LockName>>,
}

/// The state that the clients of one spoilt store share.
#[derive(Default)]
struct Notes {
    count: AtomicU64,
    counts: Mutex<HashMap<LockName, u64>>,
    grants: Mutex<HashMap<Attempt, Grant>>,
    /// The attempts that the store knows under another name.
    alias: Mutex<HashMap<Attempt, Vec<Attempt>>>,
    told: Mutex<HashSet<Attempt>>,
    /// The waiters without a queue, the newest last.
    polling: Mutex<Vec<RequestKey>>,
    served: Notify,
    /// When the client has last renewed its grants.
    leases: RenewalTimes,
    /// The newest wall clock of a take, in µs.
    limit_clock: AtomicU64,
}

impl Bugged {
    /// Spoils a store; `client` makes the next client of the same spoilt store.
    pub fn new(store: Arc<dyn Store>, bug: Bug) -> Self {
        Bugged {
            store,
            bug,
            clock: None,
            notes: Arc::default(),
            own_count: AtomicU64::new(0),
            own_fence: AtomicU64::new(0),
            read: Mutex::default(),
            written: Mutex::default(),
        }
    }

    /// One more client of the same spoilt store.
    pub fn client(&self) -> Self {
        let clock = self.clock.clone();
        Bugged { notes: self.notes.clone(), clock, ..Bugged::new(self.store.clone(), self.bug) }
    }

    /// The same with the clock of the store, which bugs need that count by the wall clock.
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Bugged { clock: Some(clock), ..self }
    }

    pub(super) fn bug(&self) -> Bug {
        self.bug
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(super) fn wall(&self) -> Option<WallTime> {
        self.clock.as_ref().map(|clock| clock.wall())
    }

    pub(super) fn limit_clock(&self) -> &AtomicU64 {
        &self.notes.limit_clock
    }

    fn made_up(&self, request: &LockRequest, like: Fence) -> Grant {
        let n = self.notes.count.fetch_add(1, Ordering::Relaxed);
        let fence = Fence::new(like.get() + 1_000_000 + n).expect("a fence");
        Grant {
            key: request.key.clone(),
            fence,
            mode: request.mode,
            ttl: request.ttl,
            sent_at: lockkeeper_core::BootInstant::from_nanos(0),
            lease: request.ttl,
        }
    }

    /// A valid grant of a lock that no test uses: it lasts, and can be renewed.
    async fn grant_beside(&self, request: &LockRequest) -> Result<Option<Grant>> {
        let n = self.notes.count.fetch_add(1, Ordering::Relaxed);
        let mut beside = LockRequest { wait: Wait::No, ..request.clone() };
        beside.key.names = LockName::new(format!("beside/{n}"))?.into();
        match self.store.acquire(&beside).await? {
            AcquireOutcome::Granted(grant) => Ok(Some(Grant { key: request.key.clone(), ..grant })),
            AcquireOutcome::Busy(_) => Ok(None),
        }
    }

    fn made_up_version(&self) -> u64 {
        1_000_000 + self.notes.count.fetch_add(1, Ordering::Relaxed)
    }

    /// The record as the client reads it, spoilt.
    fn twist_record(&self, record: Record) -> Record {
        if self.bug == Bug::JoinMovesOwners && !self.written.lock().unwrap().contains(&record.key) {
            return recipe::with_owners_moved(record);
        }
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

    /// The request, as the bug changes it.
    fn twist(&self, request: &LockRequest) -> LockRequest {
        let mut request = request.clone();
        let rename = |request: &mut LockRequest, to: fn(&str) -> String| {
            let names =
                request.key.names.iter().map(|name| LockName::new(to(name.as_str())).expect("a name"));
            request.key.names = Names::new(names.collect::<Vec<_>>()).expect("names");
        };
        match self.bug {
            Bug::OneLockForAll => rename(&mut request, |_| "everything".into()),
            Bug::FoldsNames => rename(&mut request, |name| name.to_lowercase()),
            Bug::PartialGrants => request.key.names = request.key.names.first().clone().into(),
            Bug::NeverExpires => request.ttl = limits::TTL_MAX,
            Bug::TtlUnchecked => {
                request.ttl = request.ttl.clamp(limits::TTL_MIN, limits::TTL_MAX);
                request.lock_delay = request.lock_delay.min(limits::TTL_MAX);
                request.min_hold = request.min_hold.min(limits::TTL_MAX);
            }
            Bug::GrantsEveryRequest => request.wait = Wait::No,
            Bug::WaitTimeIgnored if request.wait != Wait::No => request.wait = Wait::Forever,
            Bug::DeadlockUnseen => request.owner = None,
            Bug::EveryoneIsOneOwner => request.owner = Some(Owner::from_bytes([1; 16])),
            Bug::SharedLetsWritersIn if request.mode == Mode::Exclusive => request.mode = Mode::Shared,
            Bug::SharedIsExclusive if request.mode == Mode::Shared => request.mode = Mode::Exclusive,
            Bug::PermitsUncounted if matches!(request.mode, Mode::Permit(_)) => request.mode = Mode::Shared,
            Bug::NoLockDelay => request.lock_delay = Duration::ZERO,
            Bug::NoMinHold => request.min_hold = Duration::ZERO,
            Bug::RetryIsANewRequest | Bug::RetryDoublesTheEntry => {
                let other = Attempt::from_bytes(random_128());
                self.notes.alias.lock().unwrap().entry(request.key.attempt).or_default().push(other);
                request.key.attempt = other;
            }
            _ => {}
        }
        request
    }

    /// The grant, spoilt.
    async fn colour(&self, request: &LockRequest, mut grant: Grant) -> Grant {
        grant.key = request.key.clone();
        grant.ttl = request.ttl;
        let small = |n: u64| Fence::new(n).expect("a fence");
        match self.bug {
            Bug::FenceStandsStill => grant.fence = small(7),
            Bug::FenceDiesWithTheLock => {
                let mut counts = self.notes.counts.lock().unwrap();
                let count = counts.entry(request.key.names.first().clone()).or_default();
                *count += 1;
                grant.fence = small(*count);
            }
            Bug::FencePerClient => grant.fence = small(self.own_count.fetch_add(1, Ordering::Relaxed) + 1),
            Bug::ReentryNewFence if request.owner.is_some() => {
                grant.fence = small(grant.fence.get() + self.notes.count.fetch_add(1, Ordering::Relaxed));
            }
            Bug::TtlInMilliseconds => grant.ttl = Duration::from_millis(request.ttl.as_millis() as u64),
            Bug::CountsFromTheReply => grant.sent_at = grant.sent_at + request.ttl / 2,
            Bug::CountsFromTomorrow => grant.sent_at = grant.sent_at + limits::TTL_MAX,
            _ => {}
        }
        self.own_fence.store(grant.fence.get(), Ordering::Relaxed);
        self.notes.grants.lock().unwrap().insert(request.key.attempt, grant.clone());
        grant
    }

    async fn request(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let twisted = self.twist(request);
        match self.bug {
            Bug::NoQueue => self.poll_without_a_line(&twisted).await,
            Bug::OneByOne => {
                for name in &twisted.key.names {
                    let mut one = twisted.clone();
                    one.key =
                        RequestKey { attempt: Attempt::from_bytes(random_128()), names: name.clone().into() };
                    let answer = self.store.acquire(&one).await?;
                    if matches!(answer, AcquireOutcome::Busy(_)) {
                        return Ok(answer);
                    }
                }
                Ok(AcquireOutcome::Granted(self.made_up(request, Fence::new(1)?)))
            }
            Bug::ServesTwo => {
                let mut served = std::pin::pin!(self.notes.served.notified());
                // It subscribes before inspect shows it in the queue.
                served.as_mut().enable();
                tokio::select! {
                    biased;
                    () = served => Ok(AcquireOutcome::Granted(self.made_up(request, Fence::new(1)?))),
                    answer = self.store.acquire(&twisted) => {
                        self.notes.served.notify_waiters();
                        answer
                    }
                }
            }
            // Requests behind another one that may share the lock miss its grant, and look again much later.
            Bug::SharerIsNotWoken if request.mode != Mode::Exclusive => {
                if self.notes.count.fetch_add(1, Ordering::Relaxed) > 0 {
                    tokio::time::sleep(Duration::from_secs(3600)).await;
                }
                self.store.acquire(&twisted).await
            }
            Bug::NoWaiterIsWoken => {
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
            Bug::GhostInQueue => {
                let store = self.store.clone();
                let detached = tokio::spawn(async move { store.acquire(&twisted).await });
                let answer = detached.await.expect("it ends well");
                self.notes.told.lock().unwrap().insert(request.key.attempt);
                answer
            }
            _ => self.store.acquire(&twisted).await,
        }
    }

    /// The waiters poll, and the store grants the lock to the newest of them first.
    async fn poll_without_a_line(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        let hasty = LockRequest { wait: Wait::No, ..request.clone() };
        if request.wait == Wait::No {
            return self.store.acquire(&hasty).await;
        }
        let _polling = Polling::begin(&self.notes, &request.key);
        loop {
            let newest = self.notes.polling.lock().unwrap().last() == Some(&request.key);
            if newest && let granted @ AcquireOutcome::Granted(_) = self.store.acquire(&hasty).await? {
                return Ok(granted);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// One who waits without a line, until it is dropped.
struct Polling(Arc<Notes>, RequestKey);

impl Polling {
    fn begin(notes: &Arc<Notes>, key: &RequestKey) -> Polling {
        notes.polling.lock().unwrap().push(key.clone());
        Polling(notes.clone(), key.clone())
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        self.0.polling.lock().unwrap().retain(|key| *key != self.1);
    }
}

#[async_trait]
impl Locks for Bugged {
    fn profile(&self) -> Profile {
        let mut profile = self.store.profile();
        if self.bug == Bug::OverstatesItself {
            (profile.fence, profile.durable) = (Guarantee::Kept, Guarantee::Kept);
        }
        profile
    }

    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        if self.bug == Bug::RetryKeepsTheOldLease
            && let Some(grant) = self.notes.grants.lock().unwrap().get(&request.key.attempt)
        {
            return Ok(AcquireOutcome::Granted(grant.clone()));
        }
        if self.bug == Bug::FenceDiesWithTheLock
            && self.store.inspect(request.key.names.first()).await?.is_none()
        {
            self.notes.counts.lock().unwrap().remove(request.key.names.first());
        }
        let began = self.clock.as_ref().map(|clock| clock.now());
        let waited = || self.clock.as_ref().zip(began).map(|(clock, began)| clock.now().since(began));
        match self.request(request).await? {
            // The client does not notice that its own lease ended while it waited.
            AcquireOutcome::Granted(grant)
                if self.bug == Bug::WaiterExpiresUnseen && waited() > Some(request.ttl) =>
            {
                self.store.release(&grant.key).await?;
                Ok(AcquireOutcome::Granted(grant))
            }
            AcquireOutcome::Granted(grant) => Ok(AcquireOutcome::Granted(self.colour(request, grant).await)),
            AcquireOutcome::Busy(busy) => {
                let lets_in = match self.bug {
                    Bug::GrantsEveryRequest => true,
                    Bug::ReadersBarge => request.mode == Mode::Shared,
                    // The store knows the session, and not which of its users requests the lock.
                    Bug::SessionsAreShared => {
                        let own = self.own_fence.load(Ordering::Relaxed);
                        busy.held.iter().any(|held| held.fence.get() == own)
                    }
                    _ => false,
                };
                let like = busy.held.first().map_or(Fence::new(1)?, |held| held.fence);
                if self.bug == Bug::GrantsEveryRequest
                    && let Some(grant) = self.grant_beside(request).await?
                {
                    Ok(AcquireOutcome::Granted(grant))
                } else if lets_in {
                    Ok(AcquireOutcome::Granted(self.made_up(request, like)))
                } else {
                    Ok(AcquireOutcome::Busy(busy))
                }
            }
        }
    }

    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        if self.bug == Bug::RenewalDoesNothing {
            return Ok(vec![RenewOutcome::Renewed; grants.len()]);
        }
        if let Some(clock) = &self.clock
            && let Some(answer) = self.notes.leases.renew(self.bug, clock.now(), grants)
        {
            return answer;
        }
        let mut answers = self.store.renew(grants).await?;
        if self.bug == Bug::RenewsOneOfMany {
            answers.iter_mut().skip(1).for_each(|answer| *answer = RenewOutcome::Lost);
        }
        for (answer, grant) in answers.iter_mut().zip(grants) {
            if *answer == RenewOutcome::Renewed {
                continue;
            }
            if self.bug == Bug::RenewalRevives {
                self.store.break_lock(grant.key.names.first(), "mine!").await?;
                let me = Arc::new(lockkeeper_core::Holder::new("host", 1, None)?);
                let request = LockRequest::new(grant.key.attempt, grant.key.names.clone(), grant.ttl, me);
                self.store.acquire(&request).await?;
            }
            if matches!(self.bug, Bug::RenewalRevives | Bug::RenewalAlwaysYes) {
                *answer = RenewOutcome::Renewed;
            }
        }
        Ok(answers)
    }

    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        match self.bug {
            Bug::ReleaseIsLost => return Ok(ReleaseOutcome::Released),
            Bug::GhostInQueue if !self.notes.told.lock().unwrap().contains(&key.attempt) => {
                return Ok(ReleaseOutcome::Released);
            }
            Bug::DelaysAlways | Bug::FirstReleaseFreesAll => {
                self.store.break_lock(key.names.first(), "released").await?;
                return Ok(ReleaseOutcome::Released);
            }
            _ => {}
        }
        let aliases = self.notes.alias.lock().unwrap().remove(&key.attempt).unwrap_or_default();
        for attempt in aliases {
            self.store.release(&RequestKey { attempt, names: key.names.clone() }).await?;
        }
        let answer = self.store.release(key).await?;
        if self.bug == Bug::ReleaseWithoutOwnerCheck && answer == ReleaseOutcome::AlreadyGone {
            self.store.break_lock(key.names.first(), "released").await?;
            return Ok(ReleaseOutcome::Released);
        }
        if self.bug == Bug::ReleaseAlwaysYes { Ok(ReleaseOutcome::Released) } else { Ok(answer) }
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockView>> {
        let mut view = self.store.inspect(name).await?;
        if let Some(view) = view.as_mut().filter(|_| self.bug == Bug::NoQueue) {
            let polling = self.notes.polling.lock().unwrap();
            view.waiting += polling.iter().filter(|key| key.names.first() == name).count();
        }
        if let Some(held) = view.as_mut().map(|view| &mut view.held) {
            match self.bug {
                Bug::InspectIsBlind => held.clear(),
                Bug::ShowsTheAttempt => {
                    let grants = self.notes.grants.lock().unwrap();
                    let attempt = grants.values().find(|grant| grant.fence == held[0].fence);
                    held[0].holder.label = attempt.map(|grant| grant.key.attempt.to_hex());
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
        let bug = self.bug;
        let kept = events.filter(move |event| {
            let dropped = match event.as_ref().map(|event| &event.kind) {
                Ok(EventKind::Released { .. }) => bug == Bug::WatchDropsReleases,
                Ok(EventKind::Expired { .. }) => bug == Bug::WatchDropsExpiries,
                _ => false,
            };
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
            // A replica that has fallen behind serves those who only read.
            found if self.bug == Bug::ReadsAreStale && !self.written.lock().unwrap().contains(key) => {
                Ok(self.read.lock().unwrap().entry(key.clone()).or_insert(found).clone())
            }
            Some(record) if self.bug == Bug::ForeignPageTaken && recipe::is_foreign(&record) => Ok(None),
            found => Ok(found.map(|record| self.twist_record(record))),
        }
    }

    async fn write(
        &self,
        key: &LockName,
        value: &[u8],
        expect: Expect,
        ttl: Option<Duration>,
    ) -> Result<WriteOutcome> {
        let ignored = matches!(self.bug, Bug::ExpectIgnored | Bug::ForeignPageTaken);
        let expect = if ignored { Expect::Any } else { expect };
        if self.bug == Bug::ReadsAreStale {
            self.written.lock().unwrap().insert(key.clone());
        }
        if self.bug == Bug::NoTombstones && value.starts_with(b"lk0 ")
            || self.bug == Bug::LeaseTombstonesForgotten && recipe::is_lease_tombstone(key, value)
        {
            return Ok(match self.store.delete(key, expect).await? {
                DeleteOutcome::Deleted => WriteOutcome::Written(Version(self.made_up_version())),
                DeleteOutcome::Absent => WriteOutcome::Conflict(None),
                DeleteOutcome::Conflict(found) => WriteOutcome::Conflict(Some(found)),
            });
        }
        let (value, expect) = recipe::twist_write(self.bug, key, value, expect);
        let mut ttl = if self.bug == Bug::RecordsNeverExpire { None } else { ttl };
        match self.bug {
            Bug::FailureForgotten if key.as_str().starts_with("cached-failed/") => {
                return Ok(WriteOutcome::Written(Version(self.made_up_version())));
            }
            Bug::LimitForgotten if key.as_str().starts_with("semaphore/") => {
                return Ok(WriteOutcome::Written(Version(self.made_up_version())));
            }
            Bug::ValueOutlivesItsTime if key.as_str().starts_with("cached/") => ttl = ttl.map(|ttl| ttl * 4),
            _ => {}
        }
        let mut value = &value[..];
        match self.bug {
            Bug::WritesAreLost => {
                return Ok(WriteOutcome::Written(Version(self.made_up_version())));
            }
            Bug::RecordsUnchecked => {
                ttl = ttl.map(|ttl| ttl.max(limits::TTL_MIN));
                value = &value[..value.len().min(limits::VALUE_BYTES)];
            }
            _ => {}
        }
        let written = self.store.write(&self.twist_key(key), value, expect, ttl).await?;
        match written {
            WriteOutcome::Written(_) if self.bug == Bug::VersionsStartAgain => {
                Ok(WriteOutcome::Written(Version(1)))
            }
            WriteOutcome::Written(_) if self.bug == Bug::JoinMovesOwners => {
                self.written.lock().unwrap().insert(key.clone());
                Ok(written)
            }
            WriteOutcome::Conflict(found) => {
                Ok(WriteOutcome::Conflict(found.map(|record| self.twist_record(record))))
            }
            written => Ok(written),
        }
    }

    async fn delete(&self, key: &LockName, expect: Expect) -> Result<DeleteOutcome> {
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
