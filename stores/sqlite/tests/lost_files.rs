//! The log or its index is deleted while processes have the database open.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use common::{Contender, Dir, open, request, take};
use lockkeeper_core::{Locks, ReleaseOutcome, RenewOutcome};
use rusqlite::Connection;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn beside(dir: &Dir, suffix: &str) -> PathBuf {
    format!("{}{suffix}", dir.db().display()).into()
}

/// All processes acquire and release locks at the same time: no fence comes twice, and the database stays whole.
fn use_together(dir: &Dir, processes: &mut [&mut Contender]) {
    processes.iter_mut().for_each(|process| process.tell("cycles 100"));
    let mut all = BTreeSet::new();
    for process in processes {
        let line = process.hear();
        let fences: Vec<u64> =
            line.split(' ').map(|text| text.parse().unwrap_or_else(|_| panic!("{line}"))).collect();
        assert_eq!(fences.len(), 100);
        for fence in fences {
            assert!(all.insert(fence), "two grants with the fence {fence}");
        }
    }
    check_integrity(dir);
}

fn check_integrity(dir: &Dir) {
    let sql = Connection::open(dir.db()).unwrap();
    let whole: String = sql.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(whole, "ok");
}

/// A process with the deleted index went on with it while a new process had an index of its own: each had its own write lock
/// and its own holders. A second store in the process kept the index open even after the first had closed it.
#[test]
fn a_deleted_index_lets_in_no_second_holder() {
    for second in [false, true] {
        let dir = Dir::new();
        let mut old = Contender::start(&dir.db());
        if second {
            assert_eq!(old.request("second"), "open");
        }
        Contender::fence(&old.request("take jobs"));
        fs::remove_file(beside(&dir, "-shm")).unwrap();
        assert_eq!(old.request("renew"), "Renewed");
        let mut new = Contender::start(&dir.db());
        assert_eq!(new.request("take jobs"), "busy");
        use_together(&dir, &mut [&mut old, &mut new]);
        assert_eq!(old.request("release"), "Released");
        Contender::fence(&new.request("take jobs"));
        assert_eq!(old.request("take jobs"), "busy");
    }
}

/// The second process that saved its deleted log wrote frames into the database that belong to the new log.
#[test]
fn a_deleted_log_of_two_processes_is_saved_once() {
    let dir = Dir::new();
    let [mut one, mut two] = [Contender::start(&dir.db()), Contender::start(&dir.db())];
    for process in [&mut one, &mut two] {
        assert_eq!(process.request("cycles 6").split(' ').count(), 6);
    }
    Contender::fence(&two.request("take mine"));
    fs::remove_file(beside(&dir, "-wal")).unwrap();
    // The first process saves it and writes a new one before the second looks at its files.
    for i in 0..6 {
        Contender::fence(&one.request(&format!("take jobs/{i}")));
    }
    assert_eq!(two.request("take jobs/5"), "busy");
    let mut third = Contender::start(&dir.db());
    for i in 0..6 {
        assert_eq!(third.request(&format!("take jobs/{i}")), "busy");
    }
    assert_eq!(third.request("take mine"), "busy");
    use_together(&dir, &mut [&mut one, &mut two, &mut third]);
}

/// A log whose frames are all in the database was not missed by a new process, which began another one. The old process then
/// wrote frames of its deleted log into the database: a lock of the new process was lost.
#[test]
fn a_deleted_log_that_is_in_the_database_is_not_saved_again() {
    let dir = Dir::new();
    let mut old = Contender::start(&dir.db());
    // The same pages each time, as a store of few locks does.
    assert_eq!(old.request("cycles 6").split(' ').count(), 6);
    let sql = Connection::open(dir.db()).unwrap();
    sql.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap();
    drop(sql);
    fs::remove_file(beside(&dir, "-wal")).unwrap();
    let mut new = Contender::start(&dir.db());
    for i in 0..3 {
        Contender::fence(&new.request(&format!("take jobs/{i}")));
    }
    assert_eq!(old.request("take jobs/0"), "busy");
    let mut third = Contender::start(&dir.db());
    for i in 0..3 {
        assert_eq!(third.request(&format!("take jobs/{i}")), "busy");
    }
    use_together(&dir, &mut [&mut old, &mut new, &mut third]);
}

/// A process whose index was deleted made a checkpoint by that index when it closed the store, though the log had other frames.
#[test]
fn a_store_with_a_deleted_index_closes_without_a_checkpoint_by_it() {
    let dir = Dir::new();
    let mut old = Contender::start(&dir.db());
    // After many transactions a store makes a checkpoint when it is closed.
    assert_eq!(old.request("cycles 300").split(' ').count(), 300);
    fs::remove_file(beside(&dir, "-shm")).unwrap();
    let mut new = Contender::start(&dir.db());
    for i in 0..20 {
        Contender::fence(&new.request(&format!("take jobs/{i}")));
    }
    // The log begins again from its start.
    let sql = Connection::open(dir.db()).unwrap();
    sql.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).unwrap();
    drop(sql);
    use_together(&dir, &mut [&mut new]);
    assert_eq!(old.request("close"), "closed");
    let mut third = Contender::start(&dir.db());
    for i in 0..20 {
        assert_eq!(third.request(&format!("take jobs/{i}")), "busy");
    }
    use_together(&dir, &mut [&mut new, &mut third]);
}

/// Everything was unavailable for as long as an old process lived.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_log_is_saved_by_a_process_that_has_it_open() {
    for suffix in ["-wal", "-shm"] {
        let dir = Dir::new();
        let old = open(&dir.db());
        let held = take(&old, &request("jobs")).await;
        fs::remove_file(beside(&dir, suffix)).unwrap();
        assert_eq!(
            old.renew(std::slice::from_ref(&held)).await.unwrap(),
            [RenewOutcome::Renewed],
            "{suffix}"
        );
        let new = open(&dir.db());
        assert_eq!(common::refused(&new, &request("jobs")).await.held[0].fence, held.fence, "{suffix}");
        assert_eq!(old.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
        assert!(take(&new, &request("jobs")).await.fence > held.fence);
        common::refused(&old, &request("jobs")).await;
    }
}

/// Who opened the file then was told of a disk I/O error, for as long as the process with the log did nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_log_is_saved_by_a_process_that_does_nothing() {
    let dir = Dir::new();
    let idle = open(&dir.db());
    let held = take(&idle, &request("jobs")).await;
    fs::remove_file(beside(&dir, "-wal")).unwrap();
    let new = open(&dir.db());
    assert_eq!(common::refused(&new, &request("jobs")).await.held[0].fence, held.fence);
    assert_eq!(idle.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
    assert!(take(&new, &request("jobs")).await.fence > held.fence);
}

/// A process that is stopped cannot save it: that is told, with what to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_log_of_a_stopped_process_is_reported() {
    let dir = Dir::new();
    let mut stopped = Contender::start(&dir.db());
    let fence = Contender::fence(&stopped.request("take jobs"));
    stopped.stop(&dir.db());
    fs::remove_file(beside(&dir, "-wal")).unwrap();
    let told = lockkeeper_sqlite::SqliteStore::open(lockkeeper_sqlite::Options::new(dir.db())).unwrap_err();
    assert!(told.to_string().contains("was deleted") && told.to_string().contains("-wal"), "{told}");
    stopped.signal(rustix::process::Signal::CONT);
    let again = || lockkeeper_sqlite::SqliteStore::open(lockkeeper_sqlite::Options::new(dir.db()));
    common::until("the log is saved", || again().is_ok());
    let held = common::refused(&again().unwrap(), &request("jobs")).await.held;
    assert_eq!(held[0].fence.get(), fence, "nothing is lost");
}
