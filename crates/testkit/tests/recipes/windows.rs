use std::process::Child;

use lockkeeper::{Clock, SystemClock};
use lockkeeper_testkit::servers::TempDir;

use super::crowd::{recipe, times};

/// Twelve processes whose clocks are up to five seconds off, and a window every minute of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twelve_processes_with_clocks_that_differ_run_each_window_once() {
    let count = times(1000, 60);
    let dir = TempDir::new("windows");
    let file = dir.join("runs");
    let start = SystemClock.now().as_nanos();
    let children: Vec<Child> = (0..12)
        .map(|i| {
            let offset_ms = -5000 + i * 10_000 / 11;
            let args = [
                format!("store=sqlite:{}", dir.join("locks.db").display()),
                format!("windows={count}"),
                format!("file={}", file.display()),
                format!("start_ns={start}"),
                format!("offset_ms={offset_ms}"),
            ];
            recipe("windows", &args)
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let runs = std::fs::read_to_string(&file).unwrap();
    let numbers: Vec<u64> = runs.lines().map(|l| l.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(
        numbers,
        (0..count).collect::<Vec<_>>(),
        "a window was run twice, or not at all, or out of order"
    );
}
