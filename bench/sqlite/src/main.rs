//! The SQLite store against a bare INSERT and DELETE of the same durability, in one run on one disk: only ratios count.
//!
//!     cargo run --release -p bench-sqlite [ROUNDS [one|many|processes|crowd]]

mod bare;
mod crowd;
mod ours;
mod processes;
mod throughput;

use std::path::PathBuf;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, which, path] = &words[..]
        && role == "process"
    {
        return processes::child(which, path.as_ref());
    }
    let rounds = words.first().map_or(11, |text| text.parse().expect("ROUNDS is a number"));
    let dir = Dir::new();
    println!("SQLite {}, log synced, {rounds} rounds, medians, in {}", rusqlite::version(), dir.0.display());
    let only = words.get(1);
    let wanted = |row: &str| only.is_none_or(|only| only == row);
    if wanted("one") {
        throughput::run(&dir.0, 1, 1.0, rounds);
    }
    if wanted("many") {
        throughput::run(&dir.0, 64, 5.0, rounds);
    }
    if wanted("processes") {
        processes::run(&dir.0, 8, 1.0, rounds);
    }
    if wanted("crowd") {
        crowd::run(&dir.0, 10_000);
    }
}

/// A directory of this run.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("lockkeeper-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn median<T: Copy + PartialOrd>(mut list: Vec<T>) -> T {
    list.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
    list[list.len() / 2]
}

/// Each round beside its neighbour: what else the machine does hits both.
fn ratio(ours: &[f64], others: &[f64]) -> f64 {
    median(ours.iter().zip(others).map(|(ours, other)| ours / other).collect())
}
