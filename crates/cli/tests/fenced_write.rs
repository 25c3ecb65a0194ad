//! Files that are replaced as a whole or not at all, and never by a late writer: also when the program is killed, or the disk fails,
//! in every place where that can happen.

mod common;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use common::*;

fn write(place: &Place, fence: u64, contents: &str) -> Output {
    fs::write(place.dir.join("input"), contents).unwrap();
    let mut command = place.lk(["fenced-write", "data", "--fence", &fence.to_string()]);
    command.stdin(fs::File::open(place.dir.join("input")).unwrap()).output().unwrap()
}

fn beside(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(&place.dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.contains("data"));
    names.sort();
    names
}

#[test]
fn a_newer_fence_writes_and_a_late_one_is_told() {
    let place = Place::new("fenced_write");
    let done = write(&place, 7, "seven");
    assert_eq!((code(done.status), text(&done), errors(&done)), (0, String::new(), String::new()));
    let late = write(&place, 6, "late");
    assert_eq!(code(late.status), 65);
    assert!(
        errors(&late).contains("\"data\" is not written: fence 6 is stale: 7 was seen already"),
        "{}",
        errors(&late)
    );
    assert_eq!(place.read("data"), "seven");
    assert_eq!(code(write(&place, 7, "seven again").status), 0);
    assert_eq!(place.read("data"), "seven again");
    assert_eq!(beside(&place), [".data.fence", "data"]);

    let mut told = place.lk(["fenced-write", "data", "--fence", "8", "--json"]);
    let told = json(&told.output().unwrap());
    assert_eq!(told, serde_json::json!({ "file": "data", "fence": 8, "bytes": 0 }));
    let late = place.lk(["fenced-write", "data", "--fence", "7", "--json"]).output().unwrap();
    let error: serde_json::Value = serde_json::from_slice(&late.stderr).unwrap();
    assert_eq!((&error["error"]["outcome"], &error["error"]["exit_code"]), (&"stale".into(), &65.into()));
}

#[test]
fn a_job_has_its_fence_from_run() {
    let place = Place::new("fenced_write_run");
    let job = format!("echo \"$LOCKKEEPER_FENCE\" > fence; echo mine | {PROGRAM} fenced-write data");
    assert_eq!(code(place.lk(["run", "job", "--", "sh", "-c", &job]).output().unwrap().status), 0);
    let first: u64 = place.read("fence").trim().parse().unwrap();
    assert_eq!(code(place.lk(["run", "job", "--", "sh", "-c", &job]).output().unwrap().status), 0);
    assert_eq!(code(write(&place, first, "late").status), 65);
    assert_eq!(place.read("data"), "mine\n");
    let bare = place.lk(["fenced-write", "data"]).env_remove("LOCKKEEPER_FENCE").output().unwrap();
    assert_eq!(code(bare.status), 64);
    assert!(errors(&bare).contains("--fence"), "{}", errors(&bare));
    let bad = place.lk(["fenced-write", "data"]).env("LOCKKEEPER_FENCE", "many").output().unwrap();
    assert!(code(bad.status) == 64 && errors(&bad).contains("a fence is a number"), "{}", errors(&bad));
    let dir = place.lk(["fenced-write", ".", "--fence", "1"]).output().unwrap();
    assert_eq!(code(dir.status), 64, "{}", errors(&dir));
}

const OLD: &str = "old contents, written with 5";
const NEW: &str = "new contents, written with 9, and a little longer than the old ones";

/// A writer that shares a file by a group took it away from the group; and one that is not in the group showed what was for
/// the group to its own.
#[test]
fn the_group_of_a_file_is_kept_or_loses_its_rights() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let place = Place::new("fenced_group");
    let (path, dir) = (place.dir.join("data"), &place.dir);
    let mode = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can run as another user");
    }
    for (groups, after) in [("--groups=61000", (61_000, 0o640)), ("--clear-groups", (61_001, 0o600))] {
        std::fs::write(&path, "old").unwrap();
        chown(&path, Some(61_001), Some(61_000)).unwrap();
        mode(&path, 0o640);
        mode(dir, 0o777);
        let mut write = std::process::Command::new("setpriv");
        write.args(["--reuid=61001", "--regid=61001", groups, PROGRAM, "fenced-write", "--fence", "5"]);
        match write.arg(&path).stdin(std::process::Stdio::null()).output() {
            // 126 and 127: setpriv(1) may not run the program.
            Ok(output) if !matches!(code(output.status), 126 | 127) => {
                assert_eq!(code(output.status), 0, "{}", errors(&output));
            }
            other => return eprintln!("SKIPPED: cannot run as another user here: {other:?}"),
        }
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o777), after, "{groups}");
        assert_eq!(found.len(), 0, "it was written");
    }
}

/// The writer with 9, while something happens at the `nth` call of `syscall`; whether that happened, and how the writer ended.
fn with_fault(place: &Place, syscall: &str, nth: u32, fault: &str) -> (bool, ExitStatus) {
    let status = faulty(place, syscall, nth, fault).wait().unwrap();
    // A kill ends strace in the same way, and its own log says what was injected.
    let fired = status.signal() == Some(9) || place.read("strace").contains("INJECTED");
    (fired, status)
}

fn faulty(place: &Place, syscall: &str, nth: u32, fault: &str) -> Child {
    let log = place.dir.join("strace");
    fs::write(&log, "").unwrap();
    fs::write(place.dir.join("input"), NEW).unwrap();
    Command::new("strace")
        .args(["-qq", "-o", log.to_str().unwrap(), "-e", &format!("trace=?{syscall}")])
        .args(["-e", &format!("inject=?{syscall}:{fault}:when={nth}")])
        .args([PROGRAM, "fenced-write", "data", "--fence", "9"])
        .current_dir(&place.dir)
        .stdin(fs::File::open(place.dir.join("input")).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Whatever happened: the file is whole, its mark is not below it, an older writer gets in only where the new contents never
/// were, and the same write can be repeated.
fn is_safe(place: &Place, what: &str) -> bool {
    let (data, mark) = (place.read("data"), place.read(".data.fence"));
    assert!(data == OLD || data == NEW, "{what}: {data:?}");
    assert!(mark == "9\n" || mark == "5\n" && data == OLD, "{what}: the mark is {mark:?}, the file {data:?}");
    let late = code(write(place, 7, OLD).status);
    assert_eq!(late, if mark == "9\n" { 65 } else { 0 }, "{what}");
    assert_eq!(place.read("data"), data, "{what}");
    assert_eq!(code(write(place, 9, NEW).status), 0, "{what}");
    assert_eq!(place.read("data"), NEW, "{what}");
    assert_eq!(beside(place), [".data.fence", "data"], "{what}: something is left over");
    data == NEW
}

fn strace_is_left_out() -> bool {
    lockkeeper_testkit::servers::require("strace", "strace", "strace").is_err()
}

/// Every place where the fault can strike; how often it did.
fn everywhere(test: &str, syscalls: &[&str], fault: &str, check: impl Fn(&Place, &str, ExitStatus)) -> u32 {
    let mut struck = 0;
    for syscall in syscalls {
        for nth in 1.. {
            let place = Place::new(&format!("{test}_{syscall}_{nth}"));
            assert_eq!(code(write(&place, 5, OLD).status), 0);
            let (fired, status) = with_fault(&place, syscall, nth, fault);
            if !fired {
                assert_eq!(code(status), 0, "{syscall} {nth}");
                break;
            }
            struck += 1;
            check(&place, &format!("{fault} at {syscall} {nth}"), status);
        }
    }
    struck
}

#[test]
fn killed_anywhere_it_leaves_the_old_file_or_the_new_one() {
    if strace_is_left_out() {
        return;
    }
    let (old, new) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let calls = [
        "flock",
        "rename",
        "fsync",
        "copy_file_range",
        "unlink",
        "fchmod",
        "fchown",
        "getdents64",
        "read",
        "exit_group",
    ];
    let struck = everywhere("killed", &calls, "signal=KILL", |place, what, _| {
        let count = if is_safe(place, what) { &new } else { &old };
        count.set(count.get() + 1);
    });
    assert!(struck > 15 && old.get() > 5 && new.get() > 2, "{struck} kills: {old:?} old, {new:?} new");
}

#[test]
fn a_disk_that_fails_anywhere_is_told_and_does_no_harm() {
    if strace_is_left_out() {
        return;
    }
    for (fault, calls) in [
        ("error=EIO", &["fsync", "rename", "copy_file_range"][..]),
        ("error=ENOSPC", &["copy_file_range", "write"]),
    ] {
        let struck = everywhere("failed", calls, fault, |place, what, status| {
            let written = place.read("data") == NEW;
            match code(status) {
                0 | 74 => assert!(written, "{what}: said to be written"),
                69 | 72 => assert!(!written, "{what}: said not to be written"),
                other => panic!("{what}: exit {other}"),
            }
            is_safe(place, what);
        });
        assert!(struck >= 2, "{fault} struck {struck} times");
    }
}

#[test]
fn stopped_anywhere_it_does_not_undo_what_its_successor_writes() {
    if strace_is_left_out() {
        return;
    }
    const NEWEST: &str = "written with 11, while the writer with 9 was stopped";
    let (mut waited, mut overtaken) = (0, 0);
    for syscall in ["flock", "rename", "fsync", "copy_file_range", "fchmod", "getdents64", "read"] {
        for nth in 1.. {
            let what = format!("stopped after {syscall} {nth}");
            let place = Place::new(&format!("stopped_{syscall}_{nth}"));
            assert_eq!(code(write(&place, 5, OLD).status), 0);
            let mut stopped = faulty(&place, syscall, nth, "signal=STOP");
            let ended = || stopped.try_wait().unwrap();
            if !eventually(ended, || place.read("strace").contains("stopped by SIGSTOP")) {
                assert_eq!(code(stopped.wait().unwrap()), 0, "{what}");
                break;
            }
            fs::write(place.dir.join("newest"), NEWEST).unwrap();
            let mut successor = place.lk(["fenced-write", "data", "--fence", "11"]);
            let mut successor =
                successor.stdin(fs::File::open(place.dir.join("newest")).unwrap()).spawn().unwrap();
            let waits = format!(" {} ", successor.id());
            let queue_reaches = || {
                let locks = fs::read_to_string("/proc/locks").unwrap();
                locks.lines().any(|line| line.contains("-> FLOCK") && line.contains(&waits))
            };
            let ended = || successor.try_wait().unwrap();
            if eventually(ended, queue_reaches) {
                waited += 1
            } else {
                overtaken += 1
            }
            continue_child_of(&stopped);
            let late = code(stopped.wait().unwrap());
            assert!(late == 0 || late == 65, "{what}: exit {late}");
            assert_eq!(code(successor.wait().unwrap()), 0, "{what}");
            assert_eq!(
                (place.read("data").as_str(), place.read(".data.fence").as_str()),
                (NEWEST, "11\n"),
                "{what}"
            );
            assert_eq!(beside(&place), [".data.fence", "data"], "{what}: something is left over");
        }
    }
    assert!(waited > 3 && overtaken > 3, "{waited} waited, {overtaken} did not");
}

/// Whether something has come to be, before a process ended.
fn eventually(mut ended: impl FnMut() -> Option<ExitStatus>, so: impl Fn() -> bool) -> bool {
    loop {
        let ended = ended().is_some();
        if so() || ended {
            return so();
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// The program that strace looks at.
fn continue_child_of(strace: &Child) {
    let children = format!("/proc/{0}/task/{0}/children", strace.id());
    let pid = fs::read_to_string(children).unwrap();
    assert!(Command::new("kill").args(["-CONT", pid.trim()]).status().unwrap().success());
}
