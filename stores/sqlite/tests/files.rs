//! The files of a store are deleted, replaced or shared, one at a time.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Contender, Dir, name, open, request, take, wait_for_waiters, waiting};
use lockkeeper_core::{Expect, Locks, Records};
use rusqlite::Connection;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn beside(dir: &Dir, suffix: &str) -> PathBuf {
    format!("{}{suffix}", dir.db().display()).into()
}

/// The log of the deleted database was read as that of the new one, and its index was shared by both: "disk I/O error",
/// or a file that is damaged.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_database_is_deleted_again_and_again_while_others_use_it() {
    let dir = Dir::new();
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..4)
        .map(|i| {
            let (db, stop) = (dir.db(), stop.clone());
            tokio::spawn(async move {
                let mut fences = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    // As a job does that is started anew each time.
                    let store = open(&db);
                    for _ in 0..3 {
                        let grant = take(&store, &request(&format!("job/{i}"))).await;
                        fences.push(grant.fence);
                        store.release(&grant.key).await.unwrap();
                    }
                }
                fences
            })
        })
        .collect();
    for _ in 0..50 {
        common::until("a process creates the file", || fs::remove_file(dir.db()).is_ok());
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut all = BTreeSet::new();
    for task in tasks {
        let fences = task.await.unwrap();
        assert!(fences.windows(2).all(|two| two[0] < two[1]), "a fence went back");
        let count = fences.len();
        assert_eq!(fences.into_iter().filter(|fence| all.insert(*fence)).count(), count, "a fence twice");
    }
    let whole: String = Connection::open(dir.db())
        .unwrap()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(whole, "ok");
}

/// The log of the old database was written into the new one.
#[tokio::test]
async fn a_copy_that_is_put_in_place_beside_the_old_log_is_not_damaged_by_it() {
    let dir = Dir::new();
    let copy = dir.path().join("copy");
    let store = open(&dir.db());
    store.write(&name("r"), b"old", Expect::Any, None).await.unwrap();
    Connection::open(dir.db()).unwrap().execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
    for i in 0..40 {
        store.write(&name(&format!("later/{i}")), &[b'x'; 300], Expect::Any, None).await.unwrap();
    }
    let newest = take(&store, &request("a")).await.fence;
    drop(store);
    for _ in 0..2 {
        // An inode is soon used again: the second time it is that of the first.
        fs::remove_file(dir.db()).unwrap();
        fs::copy(&copy, dir.db()).unwrap();
        let store = open(&dir.db());
        assert_eq!(store.read(&name("r")).await.unwrap().unwrap().value, b"old");
        assert!(store.read(&name("later/1")).await.unwrap().is_none(), "it is of the old file");
        assert!(take(&store, &request("a")).await.fence > newest);
        store.write(&name("later/1"), &[b'y'; 300], Expect::Any, None).await.unwrap();
        let whole: String = Connection::open(dir.db())
            .unwrap()
            .query_row("PRAGMA integrity_check", [], |row| row.get(0))
            .unwrap();
        assert_eq!(whole, "ok");
    }
}

/// Opening the file failed, and closing it again copied the log of before into the copy for good.
#[tokio::test]
async fn a_copy_that_is_written_over_the_file_is_whole_once_the_old_log_is_removed() {
    let dir = Dir::new();
    let copy = dir.path().join("copy");
    let store = open(&dir.db());
    store.write(&name("r"), b"old", Expect::Any, None).await.unwrap();
    Connection::open(dir.db()).unwrap().execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
    for i in 0..8 {
        store.write(&name(&format!("later/{i}")), &[b'x'; 300], Expect::Any, None).await.unwrap();
    }
    drop(store);
    fs::write(dir.db(), fs::read(&copy).unwrap()).unwrap();
    let told = lockkeeper_sqlite::SqliteStore::open(lockkeeper_sqlite::Options::new(dir.db()));
    let told = told.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(told.contains("damaged") && told.contains("remove its -wal and -shm"), "{told}");
    for suffix in ["-wal", "-shm"] {
        fs::remove_file(beside(&dir, suffix)).unwrap();
    }
    assert_eq!(open(&dir.db()).read(&name("r")).await.unwrap().unwrap().value, b"old");
}

/// The log of a directory that was moved as a whole is its own, though all its files are others.
#[tokio::test]
async fn a_directory_that_was_copied_keeps_its_log() {
    let (dir, moved) = (Dir::new(), Dir::new());
    let store = open(&dir.db());
    store.write(&name("r"), b"in the log", Expect::Any, None).await.unwrap();
    drop(store);
    drop(open(&dir.db()));
    for entry in fs::read_dir(dir.path()).unwrap().map(Result::unwrap).filter(|e| e.path().is_file()) {
        fs::copy(entry.path(), moved.path().join(entry.file_name())).unwrap();
    }
    let record = open(&moved.db()).read(&name("r")).await.unwrap();
    assert_eq!(record.unwrap().value, b"in the log");
}

/// The file was made by the link's way, and its helpers beside the link: a process that used the file's own path had others.
#[tokio::test]
async fn a_link_to_a_file_that_is_yet_to_be_made_leads_to_one_set_of_files() {
    let (dir, links) = (Dir::new(), Dir::new());
    let second = links.path().join("second");
    symlink(dir.db(), links.db()).unwrap();
    symlink("locks.db", &second).unwrap();
    let store = open(&second);
    let held = take(&store, &request("jobs")).await;
    let other = open(&dir.db());
    common::refused(&other, &request("jobs")).await;
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { take(&other, &waiting("jobs")).await }
    });
    wait_for_waiters(&store, "jobs", 1).await;
    store.release(&held.key).await.unwrap();
    assert!(common::soon("it is woken", waiter).await.unwrap().fence > held.fence);
    assert_eq!(fs::read_dir(links.path()).unwrap().count(), 2, "something was made beside the links");
    let circle = links.path().join("circle");
    symlink(&circle, &circle).unwrap();
    assert!(lockkeeper_sqlite::SqliteStore::open(lockkeeper_sqlite::Options::new(circle)).is_err());
}

/// The log that the first user made belonged to a group of his own.
#[test]
fn two_users_share_a_file_by_a_group() {
    if common::without_root() || common::without("setpriv", common::has("setpriv"), "setpriv (util-linux)") {
        return;
    }
    let (dir, programs) = (Dir::new(), Dir::new());
    let mode = |path: &std::path::Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    fs::write(dir.db(), "").unwrap();
    for (path, bits) in [(dir.path().to_owned(), 0o770), (dir.db(), 0o660)] {
        chown(&path, None, Some(61_000)).unwrap();
        mode(&path, bits);
    }
    mode(programs.path(), 0o755);
    let start = |uid: u32| {
        let (user, group) = (format!("--reuid={uid}"), format!("--regid={uid}"));
        let wrapper = ["setpriv", &user, &group, "--groups=61000"];
        Contender::begin_copy(&wrapper, programs.path(), &dir.db()).ready()
    };
    let mut one = start(61_001);
    let fence = Contender::fence(&one.request("take jobs"));
    let mut two = start(61_002);
    assert_eq!(two.request("take jobs"), "busy");
    two.tell("wait jobs");
    let mut three = start(61_001);
    common::until("it waits", || fs::read_dir(beside(&dir, ".wake")).is_ok_and(|list| list.count() == 1));
    assert_eq!(three.request("take jobs"), "busy");
    assert_eq!(one.request("release"), "Released");
    assert!(Contender::fence(&two.hear()) > fence);
    assert_eq!(two.request("release"), "Released");
    for entry in fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        let meta = entry.metadata().unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o667), (61_000, 0o660), "{:?}", entry.path());
    }
}

/// Between its making and a chmod others could open the file, and read attempts from it later.
#[test]
fn a_new_file_is_never_open_to_others() {
    if common::without("strace", common::has("strace"), "strace") {
        return;
    }
    let dir = Dir::new();
    let log = dir.path().join("strace.log");
    let trace = ["strace", "-f", "-e", "trace=openat,open,creat", "-o", log.to_str().unwrap()];
    let mut contender = Contender::begin(&trace, &dir.db()).ready();
    Contender::fence(&contender.request("take jobs"));
    drop(contender);
    let text = fs::read_to_string(&log).unwrap();
    let made: Vec<&str> =
        text.lines().filter(|line| line.contains("locks.db") && line.contains("O_CREAT")).collect();
    assert!(!made.is_empty(), "{text}");
    for line in made {
        // The log and its index are made with the mode of the file.
        assert!(line.contains(", 0600)"), "{line}");
    }
}

/// Every killed process left its pipe; only one process in 64 removed such pipes.
#[tokio::test(flavor = "multi_thread")]
async fn pipes_of_ended_processes_do_not_stay() {
    let dir = Dir::new();
    let store = open(&dir.db());
    let held = take(&store, &request("jobs")).await;
    for _ in 0..3 {
        let all: Vec<_> = (0..20).map(|_| Contender::begin(&[], &dir.db())).collect();
        let mut all: Vec<_> = all.into_iter().map(Contender::ready).collect();
        all.iter_mut().for_each(|contender| contender.tell("wait jobs"));
        wait_for_waiters(&store, "jobs", 20).await;
        all.into_iter().for_each(Contender::kill);
        wait_for_waiters(&store, "jobs", 0).await;
    }
    let pipes = || fs::read_dir(beside(&dir, ".wake")).unwrap().count();
    // Leave some pipes without a row.
    for i in 0..20 {
        let path = beside(&dir, ".wake").join(format!("{i:032x}"));
        common::run("mkfifo", &[path.to_str().unwrap()]);
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    let mut one = Contender::start(&dir.db());
    one.tell("wait jobs");
    wait_for_waiters(&store, "jobs", 1).await;
    assert_eq!(pipes(), 1, "only who waits has a pipe");
    store.release(&held.key).await.unwrap();
    Contender::fence(&one.hear());
}
