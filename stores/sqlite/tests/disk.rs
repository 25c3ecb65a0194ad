//! A full disk, a power cut, a file system that is not a disk.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use common::{Contender, Dir, open, request, run, take};
use lockkeeper_core::{AcquireOutcome, Error, Fence, Guarantee, LockRequest, Locks, Purpose, ReleaseOutcome};
use lockkeeper_sqlite::{Options, SqliteStore};

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

/// A mounted file system that goes away with the test.
struct Mount(PathBuf);

impl Mount {
    fn new(at: PathBuf, args: &[&str]) -> Self {
        fs::create_dir_all(&at).unwrap();
        let mut words = args.to_vec();
        words.push(at.to_str().unwrap());
        run(words[0], &words[1..]);
        Mount(at)
    }

    fn db(&self) -> PathBuf {
        self.0.join("locks.db")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmount = || {
            std::process::Command::new("umount").arg(&self.0).output().is_ok_and(|out| out.status.success())
        };
        // A killed process may need a moment to close its files.
        let end = std::time::Instant::now() + common::PATIENCE;
        while !unmount() && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Only a file system that is known to keep what was synced will do for correctness.
#[test]
fn a_file_system_that_forgets_is_not_for_correctness() {
    if common::without_root() || common::without("ext4", common::has("mkfs.ext4"), "mkfs.ext4 (e2fsprogs)") {
        return;
    }
    let dir = Dir::new();
    let allows = |mount: &Mount| open(&mount.db()).profile().allows(Purpose::Correctness);
    for kind in ["tmpfs", "ramfs"] {
        let mount = Mount::new(dir.path().join(kind), &["mount", "-t", kind, "none"]);
        let refused = allows(&mount).expect_err("it forgets");
        assert!(refused.to_string().contains(kind), "{refused}");
        assert_eq!(open(&mount.db()).profile().exclusion, Guarantee::Kept);
    }
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    run("mkfs.ext4", &["-q", "-F", image.to_str().unwrap()]);
    let mount = Mount::new(dir.path().join("disk"), &["mount", "-o", "loop", image.to_str().unwrap()]);
    assert!(allows(&mount).is_ok());
}

/// Fills the disk to the last byte.
fn fill(mount: &Mount) -> PathBuf {
    use std::io::Write;
    let ballast = mount.0.join("ballast");
    let mut file = fs::File::create(&ballast).unwrap();
    for size in [1 << 16, 4096, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
    ballast
}

#[tokio::test]
async fn a_full_disk_gives_no_grant_and_recovers() {
    if common::without_root() {
        return;
    }
    let dir = Dir::new();
    let mount = Mount::new(dir.path().join("small"), &["mount", "-t", "tmpfs", "-o", "size=2m", "none"]);
    let store = open(&mount.db());
    let mut last = take(&store, &request("before")).await.fence;
    let mut refused = 0;
    let ballast = fill(&mount);
    for i in 0..200 {
        match store.acquire(&request(&format!("during/{i}/{}", "x".repeat(400)))).await {
            // What still fits into the log that is there is as good as any other grant.
            Ok(AcquireOutcome::Granted(grant)) => {
                assert!(refused == 0 && std::mem::replace(&mut last, grant.fence) < grant.fence)
            }
            Ok(AcquireOutcome::Busy(busy)) => panic!("{busy:?}"),
            Err(Error::Unavailable(text)) => {
                assert!(text.contains("full"), "{text}");
                refused += 1;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(refused > 0, "the disk was not full");
    // A new process gets nothing either.
    let other = SqliteStore::open(Options::new(mount.db()));
    let answer = match &other {
        Ok(other) => other.acquire(&request("late")).await.map(drop),
        Err(error) => Err(error.clone()),
    };
    assert!(matches!(&answer, Err(Error::Unavailable(_))), "{answer:?}");
    fs::remove_file(ballast).unwrap();
    let grant = take(&store, &request("after")).await;
    assert!(grant.fence > last);
    assert_eq!(store.release(&grant.key).await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test]
async fn a_power_cut_right_after_a_grant_loses_neither_grant_nor_fence() {
    if common::without_root()
        || common::without("ext4", common::has("mkfs.ext4"), "mkfs.ext4 (e2fsprogs)")
        || common::without("python3", common::has("python3"), "python3")
    {
        return;
    }
    let dir = Dir::new();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let image = image.to_str().unwrap();
    run("mkfs.ext4", &["-q", "-F", image]);
    let on_loop = || Mount::new(dir.path().join("disk"), &["mount", "-o", "loop", image]);
    let mut last: Option<Fence> = None;
    for round in 0..5 {
        let mount = on_loop();
        let mut holder = Contender::start(&mount.db());
        let fence = Contender::fence(&holder.request(&format!("take {round}")));
        fs::write(mount.0.join("unsynced"), "x").unwrap();
        pull_the_plug(&mount.0);
        assert!(holder.request("take late").starts_with("error"), "a grant after the disk was gone");
        holder.kill();
        drop(mount);

        let mount = on_loop();
        assert!(!mount.0.join("unsynced").exists(), "the plug was not pulled");
        // The holder is dead by now, and its lock would be free for that: look at what the disk kept.
        let file = rusqlite::Connection::open(mount.db()).unwrap();
        let kept: i64 = file
            .query_row("SELECT fence FROM hold WHERE names = ?1", [round.to_string()], |row| row.get(0))
            .unwrap();
        assert_eq!(kept.unsigned_abs(), fence, "the grant is lost");
        drop(file);
        let store = open(&mount.db());
        let next = take(&store, &request(&format!("next/{round}"))).await.fence;
        assert!(next.get() > fence && last < Some(next), "the fence went back");
        last = Some(next);
    }
}

/// A release without a waiter does not wait for the disk. A power cut may undo it, but not the next grant or a minimum hold
/// that follows it.
#[tokio::test]
async fn a_power_cut_undoes_at_most_a_release_without_a_later_grant() {
    if common::without_root()
        || common::without("ext4", common::has("mkfs.ext4"), "mkfs.ext4 (e2fsprogs)")
        || common::without("python3", common::has("python3"), "python3")
    {
        return;
    }
    let dir = Dir::new();
    let image = dir.path().join("image");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let image = image.to_str().unwrap();
    run("mkfs.ext4", &["-q", "-F", image]);
    let on_loop = || Mount::new(dir.path().join("disk"), &["mount", "-o", "loop", image]);
    let held = |mount: &Mount| -> Vec<(String, bool)> {
        let file = rusqlite::Connection::open(mount.db()).unwrap();
        let mut holds = file.prepare("SELECT names, status FROM hold ORDER BY names").unwrap();
        let rows = holds.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<Result<_, _>>().unwrap()
    };
    let mut last = None;
    for built_on in [false, true] {
        let mount = on_loop();
        let store = open(&mount.db());
        let released = take(&store, &request("released")).await;
        assert_eq!(store.release(&released.key).await.unwrap(), ReleaseOutcome::Released);
        if built_on {
            let again = take(&store, &request("released")).await;
            assert!(again.fence > released.fence);
            let brief = LockRequest { min_hold: std::time::Duration::from_secs(600), ..request("brief") };
            store.release(&take(&store, &brief).await.key).await.unwrap();
            last = Some(again.fence);
        }
        pull_the_plug(&mount.0);
        drop(store);
        drop(mount);

        let mount = on_loop();
        let held = held(&mount);
        match built_on {
            true => assert_eq!(held, [("brief".to_owned(), true), ("released".to_owned(), false)]),
            false => assert!(held.len() <= 1, "{held:?}"),
        }
        let file = rusqlite::Connection::open(mount.db()).unwrap();
        file.execute("UPDATE state SET boot = 'another'", []).unwrap();
        drop(file);
        let store = open(&mount.db());
        let next = take(&store, &request("released")).await;
        assert!(next.fence > released.fence && last < Some(next.fence), "the fence went back");
        store.release(&next.key).await.unwrap();
    }
}

/// What was not synced is gone, and nothing can be written any more.
fn pull_the_plug(mount: &Path) {
    let script = "import fcntl,os,struct,sys\n\
        fcntl.ioctl(os.open(sys.argv[1],0),(2<<30)|(4<<16)|(ord('X')<<8)|125,struct.pack('I',2))";
    run("python3", &["-c", script, mount.to_str().unwrap()]);
}

#[tokio::test]
async fn a_disk_that_fails_to_sync_gives_no_grant() {
    if common::without_root() || common::without("strace", common::has("strace"), "strace") {
        return;
    }
    let dir = Dir::new();
    let mut client = Contender::start(&dir.db());
    let before = Contender::fence(&client.request("take before"));
    let mut strace = std::process::Command::new("strace")
        .args(["-f", "-p", &client.pid.to_string(), "-e", "trace=fsync,fdatasync"])
        .args(["-e", "inject=fsync,fdatasync:error=EIO"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(strace.stderr.take().unwrap()).lines();
    assert!(said.by_ref().any(|line| line.unwrap().contains("attached")), "strace did not attach");
    // Every thread is attached once the first sync has failed; until then a grant is a good one.
    let answers: Vec<String> = (0..5).map(|i| client.request(&format!("take during/{i}"))).collect();
    let answer = answers.last().unwrap();
    assert!(answer.starts_with("error unknown"), "the commit may or may not be on the disk: {answers:?}");
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(strace.id() as i32).unwrap(),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert!(said.any(|line| line.unwrap().contains("INJECTED")), "nothing failed");
    strace.wait().unwrap();
    // The disk is well again, and nothing is stuck.
    let after = Contender::fence(&client.request("take after"));
    assert!(after > before);
    // The kernel reports pages that it could not write only once, and the log is read up to the first page that is missing. So the
    // database has by itself what the failed syncs were for.
    let alone = rusqlite::Connection::open(dir.path().join("alone.db")).unwrap();
    fs::copy(dir.db(), dir.path().join("alone.db")).unwrap();
    let kept = alone.query_row("SELECT count(*) FROM hold WHERE names = 'before'", [], |row| row.get(0));
    assert_eq!(kept, Ok(1), "the log goes on behind pages that may be missing");
    let granted = answers.iter().filter(|answer| answer.starts_with("granted")).count();
    let store = open(&dir.db());
    let held = store.list("during/", &lockkeeper_core::Page::FIRST).await.unwrap().locks.len();
    assert_eq!(held, granted, "a grant that no caller has seen, or a lost grant");
}

/// A running `strace`, which is killed when dropped.
struct Tracer(std::process::Child);

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sync inside the commit kept the write lock from all other processes.
#[tokio::test]
async fn a_process_that_waits_for_the_disk_keeps_no_other_from_its_locks() {
    if common::without_root() || common::without("strace", common::has("strace"), "strace") {
        return;
    }
    let dir = Dir::new();
    let mut slow = Contender::start(&dir.db());
    Contender::fence(&slow.request("take first"));
    let strace = std::process::Command::new("strace")
        .args(["-f", "-p", &slow.pid.to_string(), "-e", "trace=fdatasync"])
        .args(["-e", "inject=fdatasync:delay_enter=120s"])
        .stderr(std::process::Stdio::piped())
        .spawn();
    let mut strace = Tracer(strace.unwrap());
    let mut said = BufReader::new(strace.0.stderr.take().unwrap()).lines();
    assert!(said.by_ref().any(|line| line.unwrap().contains("attached")), "strace did not attach");
    let store = open(&dir.db());
    // Every thread is attached once a sync is delayed.
    let mut delayed = 0;
    common::until("a sync is delayed", || {
        delayed += 1;
        slow.tell(&format!("take delayed/{delayed}"));
        let end = std::time::Instant::now() + std::time::Duration::from_millis(500);
        while std::time::Instant::now() < end {
            if !slow.silent() {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        true
    });
    let waits = format!("delayed/{delayed}");
    while store.inspect(&common::name(&waits)).await.unwrap().is_none() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    common::refused(&store, &request(&waits)).await;
    take(&store, &request("another")).await;
    assert!(slow.silent(), "the other process did not wait for the disk");
    // First the tracer: the end of the process is reported to it, and it waits for the delay.
    drop(strace);
    slow.kill();
}

#[tokio::test]
async fn a_file_on_fuse_is_refused_unless_it_is_allowed() {
    let present = common::has("bindfs") && Path::new("/dev/fuse").exists();
    if common::without_root() || common::without("fuse", present, "bindfs and /dev/fuse") {
        return;
    }
    let dir = Dir::new();
    let below = dir.path().join("below");
    fs::create_dir_all(&below).unwrap();
    let mount = Mount::new(dir.path().join("fuse"), &["bindfs", below.to_str().unwrap()]);
    let error = SqliteStore::open(Options::new(mount.db())).expect_err("FUSE is refused");
    let Error::Unsupported(text) = &error else { panic!("{error:?}") };
    assert!(text.contains("FUSE") && text.contains("network_fs=allow"), "{text}");
    assert_eq!(fs::read_dir(&below).unwrap().count(), 0, "something was made there");

    let url = format!("sqlite:{}?network_fs=allow", mount.db().display());
    let store = SqliteStore::open(Options::from_url(&url).unwrap()).unwrap();
    take(&store, &request("a")).await;
    let profile = store.profile();
    assert!(profile.findings[0].text.contains("FUSE"));
    assert_eq!((profile.exclusion, profile.fence), (Guarantee::Likely, Guarantee::Likely));
    assert!(profile.allows(Purpose::Correctness).is_err());
}
