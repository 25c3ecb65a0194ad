//! What becomes of the locks, and above all of the fence, when something happens to the file.

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{Contender, Dir, name, open, open_by, request, take, wait_for_waiters, waiting};
use lockkeeper_core::{
    Error, Expect, LockRequest, Locks, Page, Records, ReleaseOutcome, RenewOutcome, WallTime, WriteOutcome,
};
use lockkeeper_host::VirtualClock;
use lockkeeper_sqlite::{Options, SqliteStore};
use rusqlite::Connection;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

fn remove(db: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{suffix}", db.display()));
    }
}

fn refusal(db: &Path) -> Error {
    SqliteStore::open(Options::new(db)).expect_err("it was to be refused")
}

#[tokio::test]
async fn a_deleted_file_and_a_clock_set_back_do_not_lower_the_fence() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let mut last = 0;
    for _ in 0..3 {
        let store = open_by(&dir.db(), &clock);
        let grant = take(&store, &request("a")).await;
        assert!(grant.fence.get() > last, "{} after {last}", grant.fence);
        last = take(&store, &request("b")).await.fence.get();
        drop(store);
        remove(&dir.db());
        clock.set_wall(WallTime::from_micros(1));
    }
}

#[tokio::test]
async fn a_restored_copy_and_a_clock_set_back_do_not_lower_the_fence() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let copy = dir.path().join("copy");
    let store = open_by(&dir.db(), &clock);
    take(&store, &request("a")).await;
    Connection::open(dir.db()).unwrap().execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
    clock.advance(Duration::from_secs(3600));
    let newest = take(&store, &request("b")).await.fence;
    drop(store);

    remove(&dir.db());
    fs::copy(&copy, dir.db()).unwrap();
    clock.set_wall(WallTime::from_micros(1));
    let store = open_by(&dir.db(), &clock);
    assert!(take(&store, &request("b")).await.fence > newest);
    let WriteOutcome::Written(version) = store.write(&name("r"), b"x", Expect::Any, None).await.unwrap()
    else {
        panic!("nothing was expected")
    };
    assert!(version.0 > newest.get(), "versions come from the same counter");
}

/// A copy that is younger than the last number that was reserved knows of it: fences and record versions began again
/// where the copy was made. Put in place as the page says, or written over the old file.
#[tokio::test]
async fn a_young_copy_repeats_no_fence_and_no_version() {
    for in_place in [false, true] {
        let dir = Dir::new();
        let clock = VirtualClock::default();
        let copy = dir.path().join("copy");
        let store = open_by(&dir.db(), &clock);
        take(&store, &request("a")).await;
        clock.set_wall(WallTime::from_micros(1));
        store.write(&name("r"), b"old", Expect::Any, None).await.unwrap();
        Connection::open(dir.db()).unwrap().execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
        let fence = take(&store, &request("b")).await.fence;
        let told = store.write(&name("r"), b"new", Expect::Any, None).await.unwrap();
        let WriteOutcome::Written(version) = told else { panic!("{told:?}") };
        drop(store);

        for suffix in ["-wal", "-shm"] {
            fs::remove_file(format!("{}{suffix}", dir.db().display())).unwrap();
        }
        if !in_place {
            fs::remove_file(dir.db()).unwrap();
        }
        fs::copy(&copy, dir.db()).unwrap();
        let store = open_by(&dir.db(), &clock);
        assert!(take(&store, &request("b")).await.fence > fence, "in place: {in_place}");
        let told = store.write(&name("r"), b"newer", Expect::Any, None).await.unwrap();
        let WriteOutcome::Written(next) = told else { panic!("{told:?}") };
        assert!(next > version, "in place: {in_place}");
    }
}

/// The store writes the newest fence without waiting for the disk, so a power cut may lose it; then the next fence continues from
/// the reserved number. If the first call after the reboot was no acquire, the next one continued from the fence of the copy.
#[tokio::test]
async fn a_young_copy_after_a_power_cut_repeats_no_fence() {
    for first in ["acquire", "list", "renew", "release"] {
        let dir = Dir::new();
        let clock = VirtualClock::default();
        let (copy, floor) = (dir.path().join("copy"), dir.path().join("locks.db.floor"));
        let store = open_by(&dir.db(), &clock);
        let held = take(&store, &request("a")).await;
        Connection::open(dir.db()).unwrap().execute("VACUUM INTO ?1", [copy.to_str()]).unwrap();
        let unsynced = fs::read(&floor).unwrap();
        clock.advance(Duration::from_secs(30));
        let fence = take(&store, &request("b")).await.fence;
        drop(store);
        remove(&dir.db());
        fs::copy(&copy, dir.db()).unwrap();
        fs::write(&floor, unsynced).unwrap();
        Connection::open(dir.db()).unwrap().execute("UPDATE state SET boot = 'another'", []).unwrap();
        clock.set_wall(WallTime::from_micros(1));

        let store = open_by(&dir.db(), &clock);
        match first {
            "list" => assert_eq!(store.list("", &Page::FIRST).await.unwrap().locks, []),
            "renew" => {
                assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Lost]);
            }
            "release" => {
                assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
            }
            _ => {}
        }
        drop(store);
        let next = take(&open_by(&dir.db(), &clock), &request("b")).await.fence;
        assert!(next > fence, "after {first}: {next} follows {fence}");
    }
}

#[tokio::test]
async fn a_lost_floor_is_made_again() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    take(&store, &request("a")).await;
    fs::remove_file(dir.path().join("locks.db.floor")).unwrap();
    let last = take(&store, &request("b")).await.fence;
    drop(store);
    remove(&dir.db());
    clock.set_wall(WallTime::from_micros(1));
    assert!(take(&open_by(&dir.db(), &clock), &request("b")).await.fence > last);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_deleted_while_open_is_not_used_any_more() {
    let dir = Dir::new();
    let (mine, other) = (open(&dir.db()), open(&dir.db()));
    let held = take(&mine, &request("jobs")).await;
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { take(&other, &waiting("jobs")).await }
    });
    wait_for_waiters(&mine, "jobs", 1).await;
    remove(&dir.db());
    // Both meet again in the new file: the old grant is lost there, and the waiter gets the lock by itself.
    assert_eq!(mine.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Lost]);
    let next = common::soon("the waiter stands in the new line", waiter).await.unwrap();
    assert!(next.fence > held.fence);
    assert_eq!(mine.release(&held.key).await.unwrap(), ReleaseOutcome::AlreadyGone);
    assert_eq!(common::refused(&mine, &request("jobs")).await.held[0].fence, next.fence);
}

#[tokio::test]
async fn a_file_that_is_replaced_while_open_is_read_anew() {
    let (dir, elsewhere) = (Dir::new(), Dir::new());
    let store = open(&dir.db());
    let held = take(&store, &request("old")).await;
    {
        let other = open(&elsewhere.db());
        take(&other, &request("new")).await;
        Connection::open(elsewhere.db())
            .unwrap()
            .execute("VACUUM INTO ?1", [elsewhere.path().join("copy").to_str()])
            .unwrap();
    }
    fs::rename(elsewhere.path().join("copy"), dir.db()).unwrap();
    for suffix in ["-wal", "-shm"] {
        fs::remove_file(format!("{}{suffix}", dir.db().display())).unwrap();
    }
    let names: Vec<_> =
        store.list("", &Page::FIRST).await.unwrap().locks.into_iter().map(|lock| lock.name).collect();
    assert_eq!(names, [name("new")]);
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Lost]);
    assert!(take(&store, &request("old")).await.fence > held.fence);
}

#[tokio::test]
async fn another_boot_empties_the_locks_and_keeps_the_fence() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    let held = take(&store, &request("a")).await;
    let delayed = LockRequest { lock_delay: Duration::from_secs(600), ..request("b") };
    take(&store, &delayed).await;
    store.break_lock(&name("b"), "test").await.unwrap();
    let ttl = Some(Duration::from_secs(100));
    store.write(&name("brief"), b"x", Expect::Any, ttl).await.unwrap();
    store.write(&name("kept"), b"x", Expect::Any, None).await.unwrap();
    clock.advance(Duration::from_secs(90));
    drop(store);

    Connection::open(dir.db()).unwrap().execute("UPDATE state SET boot = 'another'", []).unwrap();
    let store = open_by(&dir.db(), &clock);
    assert_eq!(store.list("", &Page::FIRST).await.unwrap().locks, []);
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Lost]);
    assert!(take(&store, &request("a")).await.fence > held.fence);
    take(&store, &request("b")).await;
    clock.advance(Duration::from_secs(90));
    assert!(store.read(&name("brief")).await.unwrap().is_some(), "its ttl began anew");
    clock.advance(Duration::from_secs(20));
    assert!(store.read(&name("brief")).await.unwrap().is_none());
    assert!(store.read(&name("kept")).await.unwrap().is_some());
}

#[tokio::test]
async fn a_wall_clock_that_jumps_changes_nothing() {
    let dir = Dir::new();
    let clock = VirtualClock::default();
    let store = open_by(&dir.db(), &clock);
    let held = take(&store, &request("a")).await;
    clock.set_wall(WallTime::from_micros(u64::MAX));
    common::refused(&store, &request("a")).await;
    clock.set_wall(WallTime::from_micros(0));
    common::refused(&store, &request("a")).await;
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    assert!(take(&store, &request("b")).await.fence > held.fence);
}

#[tokio::test]
async fn a_file_of_another_application_is_refused_and_unchanged() {
    let dir = Dir::new();
    let untouched = |db: &Path, kind: fn(&Error) -> bool, why: &str| {
        let before = fs::read(db).unwrap();
        let files = || fs::read_dir(dir.path()).unwrap().count();
        let count = files();
        let error = refusal(db);
        assert!(kind(&error) && error.to_string().contains(why), "{error:?}");
        assert_eq!(fs::read(db).unwrap(), before, "it was changed");
        assert_eq!(files(), count, "something was made beside it");
    };
    let unavailable = |e: &Error| matches!(e, Error::Unavailable(_));
    let invalid = |e: &Error| matches!(e, Error::Invalid(_));

    let text = dir.path().join("notes.txt");
    fs::write(&text, "this is not a database, it is a shopping list\n".repeat(100)).unwrap();
    untouched(&text, unavailable, "not an SQLite database");

    for mode in ["DELETE", "WAL"] {
        let foreign = dir.path().join(format!("foreign-{mode}.db"));
        let file = Connection::open(&foreign).unwrap();
        file.query_row(&format!("PRAGMA journal_mode={mode}"), [], |_| Ok(())).unwrap();
        file.execute_batch("CREATE TABLE hold(x); INSERT INTO hold VALUES(1)").unwrap();
        drop(file);
        untouched(&foreign, invalid, "another application");
    }
    assert!(matches!(refusal(dir.path()), Error::Invalid(_)), "a directory");
    let lost = dir.path().join("missing/locks.db");
    assert!(matches!(refusal(&lost), Error::Unavailable(_)), "no such directory");
    SqliteStore::open(Options { create_dir: true, ..Options::new(&lost) }).unwrap();
}

#[tokio::test]
async fn a_newer_version_is_refused() {
    let dir = Dir::new();
    drop(open(&dir.db()));
    Connection::open(dir.db()).unwrap().execute_batch("PRAGMA user_version = 4").unwrap();
    let error = refusal(&dir.db());
    assert!(matches!(&error, Error::Unsupported(text) if text.contains("newer Lockkeeper")), "{error:?}");
}

#[tokio::test]
async fn a_damaged_file_gives_no_grant() {
    let dir = Dir::new();
    let store = open(&dir.db());
    take(&store, &request("a")).await;
    drop(store);
    Connection::open(dir.db()).unwrap().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    let mut bytes = fs::read(dir.db()).unwrap();
    bytes[4096..].fill(0xa5);
    fs::write(dir.db(), &bytes).unwrap();
    let error = match SqliteStore::open(Options::new(dir.db())) {
        Ok(store) => store.acquire(&request("b")).await.expect_err("a grant from a damaged file"),
        Err(error) => error,
    };
    assert!(matches!(&error, Error::Unavailable(text) if text.contains("damaged")), "{error:?}");
}

#[tokio::test]
async fn a_link_to_the_file_leads_to_the_same_locks() {
    let dir = Dir::new();
    let store = open(&dir.db());
    take(&store, &request("a")).await;
    let link = dir.path().join("link.db");
    std::os::unix::fs::symlink(dir.db(), &link).unwrap();
    let other = open(&link);
    common::refused(&other, &request("a")).await;
    take(&other, &request("b")).await;
    assert!(!dir.path().join("link.db.floor").exists(), "a second floor");
}

/// By a hard link in another directory the log and the locks beside it are others: both names had their own holder.
#[tokio::test]
async fn a_hard_link_is_refused_by_either_name() {
    let (dir, other) = (Dir::new(), Dir::new());
    let store = open(&dir.db());
    let held = take(&store, &request("jobs")).await;
    fs::hard_link(dir.db(), other.db()).unwrap();
    for db in [dir.db(), other.db()] {
        let error = refusal(&db);
        assert!(
            matches!(&error, Error::Unsupported(text) if text.contains("share the directory")),
            "{error:?}"
        );
    }
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 1, "something was made beside it");
    // Who had it open goes on.
    assert_eq!(store.renew(std::slice::from_ref(&held)).await.unwrap(), [RenewOutcome::Renewed]);
    fs::remove_file(other.db()).unwrap();
    common::refused(&open(&dir.db()), &request("jobs")).await;
}

#[tokio::test]
async fn only_its_owner_may_read_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let store = open(&dir.db());
    take(&store, &request("a")).await;
    let _events = store.watch("").await.unwrap();
    for entry in fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o077;
        assert_eq!(mode, 0, "{:?} can be read by others, and attempts are secrets", entry.path());
    }
}

#[test]
fn a_file_without_write_permission_is_denied() {
    if common::without_root() || common::without("setpriv", common::has("setpriv"), "setpriv (util-linux)") {
        return;
    }
    let dir = Dir::new();
    drop(open(&dir.db()));
    let unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    // The program has to be where this user may read it.
    let said = |db: &Path| Contender::begin_copy(&unprivileged, dir.path(), db).hear();
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(dir.path(), 0o755);
    mode(&dir.db(), 0o644);
    assert!(said(&dir.db()).starts_with("error denied"), "a file that cannot be written");
    assert!(
        said(&dir.path().join("new.db")).starts_with("error denied"),
        "a directory that cannot be written"
    );
    mode(&dir.db(), 0o666);
    for suffix in ["-wal", "-shm", ".floor"] {
        let _ = fs::remove_file(format!("{}{suffix}", dir.db().display()));
    }
    assert!(said(&dir.db()).starts_with("error denied"), "no room for the log beside it");
    assert!(!dir.path().join("new.db").exists());
}

#[tokio::test]
async fn a_reader_does_not_wait_for_a_writer() {
    // A process that is stopped in the middle of a transaction keeps the write lock; the person on call wants to know
    // whose lock it is all the same. Each look is by a process that was just started, and has not looked before.
    let dir = Dir::new();
    let store = open(&dir.db());
    let held = take(&store, &request("a")).await;
    let stopped = Connection::open(dir.db()).unwrap();
    stopped.execute_batch("BEGIN IMMEDIATE").unwrap();
    let looker = open(&dir.db());
    let view = looker.inspect(&name("a")).await.unwrap().unwrap();
    assert_eq!(view.held[0].fence, held.fence);
    assert_eq!(open(&dir.db()).list("", &Page::FIRST).await.unwrap().locks.len(), 1);
    assert_eq!(open(&dir.db()).read(&name("r")).await.unwrap(), None);
    stopped.execute_batch("ROLLBACK").unwrap();
    assert_eq!(store.release(&held.key).await.unwrap(), ReleaseOutcome::Released);
}
