//! The cells: the rule for each row, and the stores that differ from it.

use super::Deployment::*;
use super::FaultKind::*;
use super::{Deployment, Exclusion, Expectation, FaultCell, FaultKind, WaitBound};
use crate::Guarantee::{self, Kept, Likely, No};

const GOOD: Expectation =
    Expectation { exclusion: Exclusion::WhileRatesAgree, fence: Kept, durable: Kept, wait: WaitBound::Lease };

const fn can_break(fence: Guarantee, durable: Guarantee) -> Expectation {
    Expectation { exclusion: Exclusion::CanBreak, fence, durable, ..GOOD }
}

const fn forgets(fence: Guarantee, durable: Guarantee) -> Expectation {
    Expectation { exclusion: Exclusion::Kept, fence, durable, ..GOOD }
}

type Exception = (&'static [Deployment], &'static [FaultKind], Expectation);

/// The cells that differ from [`GOOD`]; the first that fits counts.
const EXCEPTIONS: &[Exception] = &[
    // A process that ends frees its locks at once: the others watch it.
    (
        &[Sqlite, SqliteVolatile, SqliteNetwork],
        &[HolderKilled],
        Expectation { wait: WaitBound::Wake, ..GOOD },
    ),
    // The store ends together with its holders, so no grant is left to break exclusion. Fences go on from the wall clock.
    (&[Memory], &[StoreKilled], forgets(Likely, No)),
    // The same for a host, with all processes that use the file.
    (&[SqliteVolatile], &[PowerCut], forgets(Likely, Likely)),
    // The file locks and the shared memory of SQLite do not reach from host to host.
    (&[SqliteNetwork], &[HolderCutOff, OneWayCut], can_break(Likely, Likely)),
    // `now()` follows the wall clock: leases end early.
    (
        &[Postgres, PostgresUnsynced, PostgresNoFsync, PostgresStandby],
        &[StoreClockForward],
        can_break(Kept, Kept),
    ),
    (&[PostgresUnsynced], &[StoreKilled, PowerCut], can_break(Likely, Likely)),
    (&[PostgresNoFsync], &[PowerCut], can_break(Likely, No)),
    (&[PostgresStandby], &[FailOver], can_break(Likely, Likely)),
    // Redis ends keys by its wall clock.
    (&[RedisAlways], &[StoreClockForward], can_break(Kept, Kept)),
    (
        &[RedisEverySecond, RedisVolatile, RedisReplicated, RedisEvicting],
        &[StoreClockForward],
        can_break(Likely, Kept),
    ),
    (&[RedisEverySecond], &[PowerCut], can_break(Likely, Likely)),
    (&[RedisVolatile], &[StoreKilled, PowerCut], can_break(Likely, No)),
    (&[RedisReplicated], &[FailOver], can_break(Likely, Likely)),
    (&[RedisEvicting], &[MemoryLimit], can_break(Likely, No)),
    // A majority of clocks that jump, or of servers that forget. A server that has just started does not vote for the longest ttl.
    (&[Redlock], &[StoreClockForward], can_break(Likely, No)),
    (&[Redlock], &[StoreKilled, PowerCut], forgets(Likely, No)),
    // etcd issue 15247: a leader whose disk is slow ends leases that another leader has renewed.
    (&[EtcdOld], &[SlowDisk], can_break(Kept, Kept)),
    (&[ZooKeeperOld], &[FailOver], can_break(Kept, Likely)),
    // A waiter has to observe the lock for a whole ttl, and the holder may have renewed it just after the first look.
    (
        &[DynamoDb],
        &[HolderKilled, HolderStopped, HolderCutOff, OneWayCut],
        Expectation { wait: WaitBound::TwoLeases, ..GOOD },
    ),
    (&[DynamoDbGlobal], &[FailOver], can_break(Likely, Likely)),
    (
        &[DynamoDbGlobal],
        &[HolderKilled, HolderStopped, HolderCutOff, OneWayCut],
        Expectation { wait: WaitBound::TwoLeases, ..GOOD },
    ),
    // Holders are notified at their next renewal. The numbers go on from a clock, or from the engine's own counter.
    (
        &[Sqlite, SqliteVolatile, SqliteNetwork, Etcd, EtcdOld, ZooKeeper, ZooKeeperOld],
        &[DataDeleted],
        can_break(Kept, No),
    ),
    (Deployment::ALL.as_slice(), &[DataDeleted], can_break(Likely, No)),
];

const FILES: &[Deployment] = &[Sqlite, SqliteVolatile];
const SERVICE: &[Deployment] = &[DynamoDb, DynamoDbGlobal];

type Absence = (&'static [Deployment], &'static [FaultKind], &'static str);

/// The faults that cannot happen to a store.
const ABSENT: &[Absence] = &[
    (&[Memory], &[HolderKilled], "the store ends with its only process: see row 7"),
    (&[Memory], &[HolderStopped], "the process of the holder is that of the store: both stop together"),
    (
        &[Memory],
        &[StoreClockForward, StoreClockBack, DataDeleted],
        "the store is in the memory of the process, and leases count on the boot-time clock: see row 12",
    ),
    (&[Memory], &[PowerCut, DiskFull, SyncFails, SlowDisk], "the store has no disk"),
    (
        &[Memory, Sqlite, SqliteVolatile],
        &[HolderCutOff, OneWayCut, SlowNetwork, ReplyLost, LateReplies, MalformedReplies],
        "there is no network between client and store",
    ),
    (
        &[Memory, Sqlite, SqliteVolatile, SqliteNetwork],
        &[FailOver],
        "there is one store, and no other server",
    ),
    (FILES, &[StoreKilled], "there is no server: a client that is killed is row 1"),
    (
        FILES,
        &[StoreClockForward, StoreClockBack],
        "the store has no clock of its own: the clocks of the clients are row 12",
    ),
    (
        &[SqliteNetwork],
        &[StoreKilled, StoreClockForward, StoreClockBack],
        "the file server decides nothing about locks",
    ),
    (&[Postgres, PostgresUnsynced, PostgresNoFsync], &[FailOver], "no other server takes over"),
    (
        &[RedisAlways, RedisEverySecond, RedisVolatile, RedisEvicting],
        &[FailOver],
        "no other server takes over",
    ),
    (
        &[RedisVolatile, RedisEvicting],
        &[DiskFull, SyncFails, SlowDisk],
        "the server writes nothing to its disk",
    ),
    (
        SERVICE,
        &[StoreKilled, PowerCut, StoreClockForward, StoreClockBack, DiskFull, SyncFails, SlowDisk],
        "Amazon runs the servers, and the store takes no time from them",
    ),
    (&[DynamoDb], &[FailOver], "Amazon replicates inside the region before it replies"),
    (
        &[Memory, Sqlite, SqliteVolatile, SqliteNetwork, DynamoDb, DynamoDbGlobal],
        &[MemoryLimit],
        "there is no server whose memory could be full",
    ),
];

pub(super) fn cell(deployment: Deployment, fault: FaultKind) -> FaultCell {
    let fits = |deployments: &[Deployment], faults: &[FaultKind]| {
        deployments.contains(&deployment) && faults.contains(&fault)
    };
    if let Some((_, _, why)) = ABSENT.iter().find(|(deployments, faults, _)| fits(deployments, faults)) {
        return FaultCell::NotApplicable(why);
    }
    let exception = EXCEPTIONS.iter().find(|(deployments, faults, _)| fits(deployments, faults));
    FaultCell::Declared(exception.map_or(GOOD, |(_, _, expected)| *expected))
}
