//! Rate limits over a reboot, and the rows that are left.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Dir, open_by};
use lockkeeper::Lockkeeper;
use lockkeeper::limit::PER_HOUR;
use lockkeeper_core::{Expect, LockName, Records};
use lockkeeper_host::VirtualClock;
use lockkeeper_sqlite::SqliteStore;
use rusqlite::Connection;

fn keeper(store: &SqliteStore, clock: &VirtualClock) -> Lockkeeper {
    Lockkeeper::with_store(Arc::new(store.clone()), Arc::new(clock.clone()))
}

/// The boot-time clock starts again at a reboot, before or behind the instants in the file: neither is a reason to refill a bucket.
#[tokio::test]
async fn a_reboot_refills_no_bucket() {
    for uptime in [Duration::ZERO, Duration::from_secs(1_000_000)] {
        let dir = Dir::new();
        let before = VirtualClock::default();
        let store = open_by(&dir.db(), &before);
        let limit = keeper(&store, &before).limit("mail").rate(1, PER_HOUR).burst(5);
        assert!(limit.take(5).await.unwrap().allowed());
        drop((limit, store));
        Connection::open(dir.db()).unwrap().execute("UPDATE state SET boot = 'another'", []).unwrap();
        let after = VirtualClock::default();
        after.advance(uptime);
        let store = open_by(&dir.db(), &after);
        let limit = keeper(&store, &after).limit("mail").rate(1, PER_HOUR).burst(5);
        assert!(!limit.take(1).await.unwrap().allowed(), "a reboot gave tokens, {uptime:?} after the start");
        after.advance(PER_HOUR * 2);
        assert!(limit.take(2).await.unwrap().allowed() && !limit.take(1).await.unwrap().allowed());
    }
}

#[tokio::test]
async fn full_buckets_leave_no_row_whatever_is_written_next() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    let keeper = keeper(&store, &clock);
    for user in 0..50 {
        assert!(
            keeper.limit(format!("user/{user}")).rate(1, PER_HOUR).burst(2).take(2).await.unwrap().allowed()
        );
    }
    let rows = || {
        let sql = Connection::open(dir.db()).unwrap();
        sql.query_row("SELECT count(*) FROM limit_bucket", [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(rows(), 50);
    clock.advance(PER_HOUR * 2);
    // One transaction in sixteen sweeps.
    for n in 0..64_u32 {
        let key = LockName::new("record").unwrap();
        store.write(&key, &n.to_be_bytes(), Expect::Any, None).await.unwrap();
    }
    assert_eq!(rows(), 0, "the rows of full buckets are left");
}
