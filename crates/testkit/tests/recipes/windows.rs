//! Windows that many processes run, while clocks differ and some are killed.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use lockkeeper::{Clock, SystemClock};
use lockkeeper_testkit::servers::{self, RedisOptions, TempDir};

use super::crowd::{Crowd, below, times};

/// What was done in one window: who began it with which fence, in order, and who ended it.
#[derive(Debug, Default)]
struct Story {
    begun: Vec<(u64, u32)>,
    ended: Vec<(u64, u32)>,
}

fn stories(file: &Path) -> BTreeMap<u64, Story> {
    let mut all: BTreeMap<u64, Story> = BTreeMap::new();
    for line in std::fs::read_to_string(file).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
        let story = all.entry(numbers[0]).or_default();
        let list = if words[0] == "begins" { &mut story.begun } else { &mut story.ended };
        list.push((numbers[1], numbers[2] as u32));
    }
    all
}

/// Who is in the middle of a window that takes its time, as soon as there is one; none, if the last window is near.
fn in_the_middle(file: &Path, count: u64, seen: &mut usize) -> Option<u32> {
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let news = text.len() > std::mem::replace(seen, text.len());
        let last: Vec<&str> = text.lines().last().unwrap_or_default().split(' ').collect();
        if let [what, window, _, pid] = last[..]
            && let Ok(window) = window.parse::<u64>()
        {
            match what {
                _ if window + 8 > count => return None,
                "begins" if news && window % 8 == 3 => return pid.parse().ok(),
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Twelve processes whose clocks are up to five seconds off, and a window every minute of them; some are killed in the middle.
fn twelve_run_each_window_once(store: &str) {
    let (count, kills) = (times(1000, 60), times(60, 5));
    let (dir, started) = (TempDir::new("windows"), Instant::now());
    let file = dir.join("runs");
    let start = SystemClock.now().as_nanos();
    let args = (0..12).map(|i| {
        let offset_ms = -5000 + i * 10_000 / 11;
        vec![
            format!("store={store}"),
            format!("windows={count}"),
            format!("file={}", file.display()),
            format!("start_ns={start}"),
            format!("offset_ms={offset_ms}"),
        ]
    });
    let mut crowd = Crowd::new("windows", args.collect());
    let mut seen = 0;
    for _ in 0..kills {
        let runner = in_the_middle(&file, count, &mut seen);
        std::thread::sleep(Duration::from_millis(below(10) as u64));
        crowd.kill_one(runner);
    }
    let killed: Vec<u32> = crowd.killed.iter().map(|(pid, _)| *pid).collect();
    for (status, said) in crowd.finish() {
        assert!(status.success(), "{said}");
    }
    let stories = stories(&file);
    assert_eq!(
        stories.keys().copied().collect::<Vec<_>>(),
        (0..count).collect::<Vec<_>>(),
        "a window was not run"
    );
    let mut taken_over = 0;
    let mut newest = 0;
    for (window, Story { begun, ended }) in &stories {
        let told =
            || format!("window {window}: begun by {begun:?}, ended by {ended:?}, killed were {killed:?}");
        assert!(ended.len() <= 1, "ended twice: {}", told());
        // Only what was broken off by a kill is begun again, and with a newer fence.
        let (last, broken_off) = begun.split_last().unwrap();
        assert!(broken_off.iter().all(|(_, pid)| killed.contains(pid)), "run twice: {}", told());
        assert!(begun.is_sorted_by(|a, b| a.0 < b.0) && begun[0].0 > newest, "not a newer fence: {}", told());
        assert!(ended.first() == Some(last) || killed.contains(&last.1), "left unfinished: {}", told());
        newest = last.0;
        taken_over += broken_off.len();
    }
    println!(
        "{store}: {count} windows, {} kills, {taken_over} taken over, {:?}",
        killed.len(),
        started.elapsed()
    );
}

#[test]
fn twelve_processes_with_clocks_that_differ_run_each_window_once_on_a_file() {
    let dir = TempDir::new("windows-store");
    twelve_run_each_window_once(&format!("sqlite:{}", dir.join("locks.db").display()));
}

#[test]
fn twelve_processes_with_clocks_that_differ_run_each_window_once_on_redis() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    twelve_run_each_window_once(&format!("redis://{}", server.addr()));
}
