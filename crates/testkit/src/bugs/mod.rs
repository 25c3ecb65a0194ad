//! Planted bugs: a good store, spoilt in one way each, or a recipe that forgets a check. Every law must catch one of them; see
//! [`crate::every_law`].

mod classes;
mod client;
mod limit;
mod recipe;
mod store;

pub use classes::{BugClass, CLASSES, CaughtBy};
pub use store::Bugged;

/// Ways in which real lock managers have been wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "each name says it all")]
pub enum Bug {
    GrantsEveryRequest,
    OneLockForAll,
    FoldsNames,
    NeverExpires,
    RenewalAlwaysYes,
    RenewalDoesNothing,
    RenewsOneOfMany,
    RenewalRevives,
    ReleaseWithoutOwnerCheck,
    ReleaseAlwaysYes,
    ReleaseIsLost,
    RetryIsANewRequest,
    RetryKeepsTheOldLease,
    RetryDoublesTheEntry,
    TtlUnchecked,
    TtlInMilliseconds,
    FenceStandsStill,
    FenceDiesWithTheLock,
    FencePerClient,
    BreakKeepsTheFence,
    RevokeLetsTheNextIn,
    RevokeIsForgotten,
    RevokeHasNoReason,
    NoQueue,
    ServesTwo,
    WaitTimeIgnored,
    GhostInQueue,
    NoWaiterIsWoken,
    DeadlockUnseen,
    SharedLetsWritersIn,
    SharedIsExclusive,
    SharerIsNotWoken,
    ReadersBarge,
    PermitsUncounted,
    PartialGrants,
    OneByOne,
    ReentryNewFence,
    EveryoneIsOneOwner,
    FirstReleaseFreesAll,
    NoLockDelay,
    DelaysAlways,
    NoMinHold,
    InspectIsBlind,
    ListForgetsPages,
    WatchDropsReleases,
    WatchDropsExpiries,
    ShowsTheAttempt,
    ExpectIgnored,
    VersionsStartAgain,
    RecordsNeverExpire,
    RecordsUnchecked,
    WritesAreLost,
    ReadsAreStale,
    CutsRecordNames,
    CountsFromTheReply,
    CountsFromTomorrow,
    OverstatesItself,
    // Clients that are wrong about themselves.
    RenewalStopsAfterAnOutage,
    NeverReconnects,
    WaiterExpiresUnseen,
    SessionsAreShared,
    // In the recipes, on a store that is fine.
    UpdateUnchecked,
    WriteLogForgotten,
    LateResultKept,
    PrintUnchecked,
    TermUnchecked,
    OnlyTheNewestIsKept,
    WindowForgotten,
    LateEndKept,
    RetryIsANewWrite,
    MarksForgotten,
    NoTombstones,
    TooLargeForgotten,
    SizeUnchecked,
    ForeignPageTaken,
    EndForgotten,
    LeaseUnchecked,
    LeaseRevived,
    LeaseTombstonesForgotten,
    LateCompletionKept,
    AttemptUnchecked,
    AttemptsUncounted,
    FailureForgotten,
    DurationForgotten,
    ValueOutlivesItsTime,
    FreshnessUnchecked,
    LateValueKept,
    FirstClaimForgotten,
    LimitForgotten,
    OwnersForgotten,
    JoinMovesOwners,
    BeatsForgotten,
    // Rate limits.
    LimitNeverRefuses,
    RefillsThrice,
    RefusedTakeTakes,
    PeekTakes,
    ResetIsForgotten,
    OneBucketForAll,
    TakesOneByOne,
    RefundFills,
    RefundIsLost,
    FullBucketStays,
    ClockBackRefills,
    WaitReservesNothing,
    WaitsOutOfTurn,
    TakesTwice,
    LimitUnchecked,
}

/// Implements [`lockkeeper_core::Locks`], [`lockkeeper_core::Records`] and [`lockkeeper_core::Limits`] for a type with a field `store` by passing
/// everything on, but for `acquire`, `renew` and `release`, which are given: for stores that fail on demand.
#[macro_export]
macro_rules! forward {
    ($type:ty, { $($given:tt)* }) => {
        $crate::forward_locks!($type, { $($given)* });
        $crate::forward_records!($type, {
            async fn write(
                &self,
                key: &lockkeeper_core::LockName,
                value: &[u8],
                expect: lockkeeper_core::Expect,
                ttl: Option<std::time::Duration>,
            ) -> lockkeeper_core::Result<lockkeeper_core::WriteOutcome> {
                self.store.write(key, value, expect, ttl).await
            }
        });
    };
}

/// Implements [`lockkeeper_core::Locks`] and [`lockkeeper_core::Limits`] for a type with a field `store` by passing everything on, but
/// for `acquire`, `renew` and `release`, which are given.
#[macro_export]
macro_rules! forward_locks {
    ($type:ty, { $($given:tt)* }) => {
        $crate::forward_calls!($type, { $($given)* });
        #[async_trait::async_trait]
        impl lockkeeper_core::Limits for $type {
            async fn limit(
                &self,
                request: &lockkeeper_core::limit::LimitRequest,
            ) -> lockkeeper_core::Result<lockkeeper_core::limit::LimitOutcome> {
                self.store.limit(request).await
            }
        }
    };
}

/// Implements [`lockkeeper_core::Locks`] and [`lockkeeper_core::Examine`] for a type with a field `store` by passing everything on, but
/// for `acquire`, `renew` and `release`, which are given.
#[macro_export]
macro_rules! forward_calls {
    ($type:ty, { $($given:tt)* }) => {
        #[async_trait::async_trait]
        impl lockkeeper_core::Locks for $type {
            $($given)*
            fn profile(&self) -> lockkeeper_core::Profile {
                self.store.profile()
            }
            async fn inspect(
                &self,
                name: &lockkeeper_core::LockName,
            ) -> lockkeeper_core::Result<Option<lockkeeper_core::LockView>> {
                self.store.inspect(name).await
            }
            async fn list(
                &self,
                prefix: &str,
                page: &lockkeeper_core::Page,
            ) -> lockkeeper_core::Result<lockkeeper_core::LockPage> {
                self.store.list(prefix, page).await
            }
            async fn watch(&self, prefix: &str) -> lockkeeper_core::Result<lockkeeper_core::EventStream> {
                self.store.watch(prefix).await
            }
            async fn revoke(
                &self,
                name: &lockkeeper_core::LockName,
                reason: &str,
            ) -> lockkeeper_core::Result<lockkeeper_core::Fence> {
                self.store.revoke(name, reason).await
            }
            async fn break_lock(
                &self,
                name: &lockkeeper_core::LockName,
                reason: &str,
            ) -> lockkeeper_core::Result<lockkeeper_core::Fence> {
                self.store.break_lock(name, reason).await
            }
        }
        $crate::forward_examine!($type);
    };
}

/// Implements [`lockkeeper_core::Examine`] for a type with a field `store` by passing everything on.
#[macro_export]
macro_rules! forward_examine {
    ($type:ty) => {
        #[async_trait::async_trait]
        impl lockkeeper_core::Examine for $type {
            async fn examine(&self) -> lockkeeper_core::Result<lockkeeper_core::Examination> {
                self.store.examine().await
            }
            async fn read_clocks(&self) -> lockkeeper_core::Result<Vec<lockkeeper_core::ClockReading>> {
                self.store.read_clocks().await
            }
        }
    };
}

/// Implements [`lockkeeper_core::Records`] for a type with a field `store` by passing everything on, but for `write`, which
/// is given.
#[macro_export]
macro_rules! forward_records {
    ($type:ty, { $($given:tt)* }) => {
        #[async_trait::async_trait]
        impl lockkeeper_core::Records for $type {
            $($given)*
            async fn read(
                &self,
                key: &lockkeeper_core::LockName,
            ) -> lockkeeper_core::Result<Option<lockkeeper_core::Record>> {
                self.store.read(key).await
            }
            async fn delete(
                &self,
                key: &lockkeeper_core::LockName,
                expect: lockkeeper_core::Expect,
            ) -> lockkeeper_core::Result<lockkeeper_core::DeleteOutcome> {
                self.store.delete(key, expect).await
            }
            async fn scan(
                &self,
                prefix: &str,
                page: &lockkeeper_core::Page,
            ) -> lockkeeper_core::Result<lockkeeper_core::RecordPage> {
                self.store.scan(prefix, page).await
            }
        }
    };
}
