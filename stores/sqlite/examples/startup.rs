//! How long the shortest use of a lock takes: open the file, acquire, release, close.
//!
//! `cargo run --release -p lockkeeper-sqlite --example startup -- /var/tmp/startup.db 200`: each round is a new process,
//! as a command in cron would be.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{Attempt, Holder, LockName, LockRequest, Locks, Result};
use lockkeeper_host::{host_name, random_128};
use lockkeeper_sqlite::{Options, SqliteStore};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, rounds] = &args[..] else { panic!("startup PATH ROUNDS") };
    if rounds == "once" {
        return once(path);
    }
    let me = std::env::current_exe().expect("a program has a path");
    let mut parts = vec![Vec::new(); 5];
    for _ in 0..rounds.parse::<usize>().expect("a number of rounds") {
        let began = Instant::now();
        let out = Command::new(&me).args([path, "once"]).output().expect("it can be started");
        let whole = began.elapsed().as_micros();
        let text = String::from_utf8_lossy(&out.stdout);
        let told = text.split_whitespace().map(|word| word.parse::<u128>().expect("a number"));
        for (part, time) in parts.iter_mut().zip(told.chain([whole])) {
            part.push(time);
        }
    }
    for (what, mut times) in
        ["open", "acquire", "release", "all three", "whole process"].into_iter().zip(parts)
    {
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100];
        println!("{what:>14}: median {} µs, 90 of 100 within {} µs", at(50), at(90));
    }
    Ok(())
}

fn once(path: &str) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let began = Instant::now();
    let store = SqliteStore::open(Options::new(path))?;
    let opened = began.elapsed();
    let holder = Arc::new(Holder::new(host_name(), std::process::id(), None)?);
    let attempt = Attempt::from_bytes(random_128());
    let request = LockRequest::new(attempt, LockName::new("startup")?, Duration::from_secs(30), holder);
    runtime.block_on(store.acquire(&request))?;
    let acquired = began.elapsed();
    runtime.block_on(store.release(&request.key))?;
    let released = began.elapsed();
    let micros =
        [opened, acquired - opened, released - acquired, released].map(|d| d.as_micros().to_string());
    println!("{}", micros.join(" "));
    Ok(())
}
