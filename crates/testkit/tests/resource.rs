//! The fenced file keeps a late writer out, its twin does not, and the counter loses updates.

use std::process::Command;
use std::sync::Barrier;

use lockkeeper_core::{Error, Fence};
use lockkeeper_testkit::history::stale_writes;
use lockkeeper_testkit::resource::{CheckedFile, CounterFile, Ledger, UncheckedFile};
use lockkeeper_testkit::servers::TempDir;

fn fence(n: u64) -> Fence {
    Fence::new(n).unwrap()
}

#[test]
fn a_late_writer_is_told_what_was_seen() {
    let dir = TempDir::new("fenced");
    let file = CheckedFile::new(dir.join("f"));
    assert!(file.read().unwrap().is_none());
    file.write(fence(5), "five").unwrap();
    file.write(fence(5), "five again").unwrap();
    file.write(fence(7), "seven\nlines").unwrap();
    let late = file.write(fence(6), "six");
    assert!(
        matches!(late, Err(Error::Stale { presented, seen }) if presented == fence(6) && seen == fence(7))
    );
    let now = file.read().unwrap().unwrap();
    assert_eq!((now.fence, &*now.value), (fence(7), "seven\nlines"));
    let values: Vec<String> = file.accepted().unwrap().into_iter().map(|write| write.value).collect();
    assert_eq!(values, ["five", "five again", "seven\nlines"]);
    assert!(file.write(fence(8), "x".repeat(100_000)).is_err(), "too long");
    for n in 8..3000 {
        file.write(fence(n), "y".repeat(100)).unwrap();
    }
    assert_eq!(file.read().unwrap().unwrap().fence, fence(2999));
}

/// Not a test of its own: the next one runs it in several processes.
#[test]
#[ignore = "run by another test"]
fn child_writes() {
    let dir = std::path::PathBuf::from(std::env::var("TEST_DIR").unwrap());
    let me: u64 = std::env::var("TEST_ME").unwrap().parse().unwrap();
    let (fenced, unfenced) = (CheckedFile::new(dir.join("fenced")), UncheckedFile::new(dir.join("unfenced")));
    let counter = CounterFile::new(dir.join("counter"));
    let mut refused = 0;
    for n in 1..=300 {
        // The processes take their fences in turn, and use them out of turn.
        let mine = fence(n * 4 + me);
        unfenced.write(mine, n.to_string()).unwrap();
        match fenced.write(mine, n.to_string()) {
            Ok(()) => {}
            Err(Error::Stale { presented, seen }) if presented < seen => refused += 1,
            Err(e) => panic!("{e}"),
        }
        counter.increment().unwrap();
    }
    println!("\nrefused={refused}");
}

#[test]
fn processes_that_overtake_each_other_are_kept_in_order_by_the_fence_only() {
    let dir = TempDir::new("fenced");
    let children: Vec<_> = (0..4)
        .map(|me: u64| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", "--nocapture", "child_writes"]);
            command.env("TEST_DIR", dir.path()).env("TEST_ME", me.to_string());
            command.stdout(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut refused = 0;
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        refused += text.lines().find_map(|l| l.strip_prefix("refused=")).unwrap().parse::<usize>().unwrap();
    }
    let fenced = CheckedFile::new(dir.join("fenced")).accepted().unwrap();
    assert_eq!(stale_writes(&fenced).count(), 0);
    assert_eq!(fenced.len() + refused, 4 * 300);
    let unfenced = UncheckedFile::new(dir.join("unfenced")).accepted().unwrap();
    assert_eq!(unfenced.len(), 4 * 300, "it takes everything, and loses nothing");
    assert!(stale_writes(&unfenced).count() > 0, "the twin has to show the harm");
}

#[test]
fn threads_are_kept_in_order_too() {
    let dir = TempDir::new("fenced");
    let file = CheckedFile::new(dir.join("f"));
    std::thread::scope(|scope| {
        for me in 0..4 {
            let file = &file;
            scope.spawn(move || {
                for n in 1..200 {
                    // Stale or not: the order of what was taken is what counts.
                    let _ = file.write(fence(n * 4 + me), "x");
                }
            });
        }
    });
    assert_eq!(stale_writes(&file.accepted().unwrap()).count(), 0);
}

#[test]
fn the_counter_loses_an_update_when_two_meet_and_none_when_they_do_not() {
    let dir = TempDir::new("counter");
    let counter = CounterFile::new(dir.join("c"));
    assert_eq!(counter.get().unwrap(), 0);
    for n in 1..=10 {
        assert_eq!(counter.increment().unwrap(), n);
    }
    let met = Barrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| counter.increment_with(|| _ = met.wait()).unwrap());
        }
    });
    assert_eq!(counter.get().unwrap(), 11, "two were added, and one is lost");
}

#[tokio::test]
async fn tasks_lose_updates_as_well() {
    let dir = TempDir::new("counter");
    let counter = CounterFile::new(dir.join("c"));
    let (a, b) = tokio::join!(counter.increment_async(), counter.increment_async());
    assert_eq!((a.unwrap(), b.unwrap(), counter.get().unwrap()), (1, 1, 1));
}

#[test]
fn who_looked_and_was_stopped_cannot_enter_what_its_successor_has() {
    // The twin without a fence takes it twice: insert-if-absent in two steps is not enough.
    for (fenced, entries) in [(true, 1), (false, 2)] {
        let dir = TempDir::new("ledger");
        let ledger = if fenced { Ledger::new(dir.path()) } else { Ledger::unfenced(dir.path()) };
        assert_eq!(ledger.look("k", fence(5)).unwrap(), None);
        // Here it is stopped, and its lease goes to another.
        assert_eq!(ledger.look("k", fence(9)).unwrap(), None);
        ledger.enter("k", fence(9), "successor").unwrap();
        match ledger.enter("k", fence(5), "late") {
            Err(Error::Stale { presented, seen }) => {
                assert!(fenced && (presented, seen) == (fence(5), fence(9)))
            }
            taken => assert!(!fenced && taken.is_ok()),
        }
        assert_eq!(ledger.entries("k").unwrap().len(), entries);
        // The next process finds the entry of a process that died after it, and enters nothing.
        assert_eq!(ledger.look("k", fence(12)).unwrap().as_deref(), Some("successor"));
        assert_eq!(ledger.look("other", fence(1)).unwrap(), None);
    }
}
