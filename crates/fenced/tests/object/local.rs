//! What is special about a local directory: what its files, names and turns can do to a write.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use lockkeeper_core::Error;
use lockkeeper_fenced::Fenced;
use lockkeeper_fenced::object::ObjectFenced;
use lockkeeper_testkit::servers::{self, TempDir};

use crate::fence;

/// Each of them was `Unknown` or `Unavailable` once: send it again, and again, and nothing will ever happen.
#[tokio::test]
async fn what_will_never_work_is_not_told_as_if_it_might() {
    let dir = TempDir::new("objects");
    let fenced = ObjectFenced::local(dir.path()).unwrap();
    fs::write(dir.join("file"), "theirs").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    for name in ["dir", "file/below", "file/far/below", "a#1", "d/a#22"] {
        for told in [fenced.put(name, fence(9), b"x").await, fenced.delete(name, fence(9)).await] {
            assert!(matches!(told, Err(Error::Invalid(_))), "{name}: {told:?}");
        }
    }
    for name in ["a#1", &"n".repeat(300)] {
        assert!(matches!(fenced.read(name).await, Err(Error::Invalid(_))), "{name}");
    }
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"theirs");
    // No user can create files there.
    let denied = ObjectFenced::local("/sys").unwrap();
    for name in ["lockkeeper", "lockkeeper/below"] {
        let told = denied.put(name, fence(9), b"x").await;
        assert!(matches!(told, Err(Error::Denied(_))), "{name}: {told:?}");
    }
}

/// Two names for one object: the look went to where the link leads, the new contents took the place of the link. From then on each name had
/// a mark of its own.
#[tokio::test]
async fn a_link_is_not_written_over() {
    let dir = TempDir::new("objects");
    let fenced = ObjectFenced::local(dir.path()).unwrap();
    fenced.put("real", fence(7), b"seven").await.unwrap();
    symlink("real", dir.join("link")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    for name in ["link", "dangling"] {
        let told = fenced.put(name, fence(9), b"x").await;
        assert!(matches!(&told, Err(Error::Invalid(text)) if text.contains("no plain file")), "{told:?}");
        assert!(dir.join(name).is_symlink());
    }
    assert_eq!(fenced.read("real").await.unwrap().unwrap().fence, fence(7));
    // A directory may be a link: those who come by either name take turns at the same one.
    fs::create_dir(dir.join("in")).unwrap();
    symlink("in", dir.join("also")).unwrap();
    fenced.put("also/x", fence(7), b"seven").await.unwrap();
    crate::stale(&fenced.put("in/x", fence(6), b"late").await, 6, 7);
}

/// A process that was stopped in the middle of a write keeps its turn, for as long as it is stopped.
#[tokio::test]
async fn who_waits_for_one_directory_keeps_nobody_from_another() {
    let dir = TempDir::new("objects");
    for name in ["held", "free"] {
        fs::create_dir(dir.join(name)).unwrap();
    }
    let held = fs::File::open(dir.join("held")).unwrap();
    held.lock().unwrap();
    let fenced = ObjectFenced::local(dir.path()).unwrap();
    let [mut first, mut second] = [7, 8].map(|n| {
        let fenced = fenced.clone();
        Box::pin(async move { fenced.put("held/x", fence(n), b"x").await })
    });
    // Both are under way, in this order, before the other one comes.
    for waits in [&mut first, &mut second] {
        tokio::select! { biased; done = waits => panic!("it is not its turn: {done:?}"), () = async {} => {} }
    }
    let free = fenced.put("free/x", fence(7), b"x");
    let free = tokio::time::timeout(Duration::from_secs(60), free).await;
    free.expect("another directory is free").unwrap();
    held.unlock().unwrap();
    let (first, second) = tokio::join!(first, second);
    first.unwrap();
    second.unwrap();
    assert_eq!(fenced.read("held/x").await.unwrap().unwrap().fence, fence(8));
}

/// The contents were synced, and the new directories above them were not: a power cut could take all of it away.
#[test]
fn new_directories_are_on_the_disk_before_what_is_written_there() {
    if servers::require("strace", "strace", "strace").is_err() {
        return;
    }
    let dir = TempDir::new("objects");
    let log = dir.join("log");
    let done = Command::new("strace")
        .args(["-f", "-y", "-e", "trace=mkdir,mkdirat,fsync,rename,renameat,renameat2", "-o"])
        .args([&log, &std::env::current_exe().unwrap()])
        .args(["--ignored", "--exact", "local::writer_into_new_directories"])
        .env("LOCKKEEPER_DIR", dir.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let log = fs::read_to_string(log).unwrap();
    let root = dir.path().display();
    let mut lines = log.lines();
    // In this order, with others in between.
    for (call, place) in [
        ("mkdir", format!("\"{root}/a\"")),
        ("fsync", format!("<{root}>")),
        ("mkdir", format!("\"{root}/a/b\"")),
        ("fsync", format!("<{root}/a>")),
        ("rename", format!("\"{root}/a/b/x\"")),
        ("fsync", format!("<{root}/a/b>")),
    ] {
        let found =
            lines.any(|line| line.contains(call) && line.contains(&place) && !line.contains(" = -1 "));
        assert!(found, "{call} {place} is missing in its place:\n{log}");
    }
}

#[tokio::test]
#[ignore = "a process of the test above, started by it"]
async fn writer_into_new_directories() {
    let Ok(dir) = std::env::var("LOCKKEEPER_DIR") else { return };
    ObjectFenced::local(dir).unwrap().put("a/b/x", fence(7), b"x").await.unwrap();
}
