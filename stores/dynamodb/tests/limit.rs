//! A rate limit that eight processes share. `lockkeeper-testkit` has the same test for the other stores; its processes know no DynamoDB, whose SDK
//! is larger than everything else.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::limit::PER_SECOND;
use lockkeeper::{Clock, Error, Lockkeeper, SystemClock};
use lockkeeper_testkit::laws::soon;
use lockkeeper_testkit::servers::TempDir;

const MEMBERS: usize = 8;
/// Moto answers a few hundred requests per second, and every take of each process needs two.
const RATE: u64 = 2;
/// Five seconds of tokens, which one take has at the start: the bucket overflows only if all processes stand still for that long.
const BURST: u64 = RATE * 5;
/// A client leaves its clock as it is if the time in a reply differs by less.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(1500);
/// The arguments of a process, which this program starts of itself.
const URL: &str = "LIMIT_TEST_URL";
const DIR: &str = "LIMIT_TEST_DIR";
const NUMBER: &str = "LIMIT_TEST_NUMBER";
const TAKE_FOR_MS: &str = "LIMIT_TEST_MS";

async fn keeper(url: &str) -> Lockkeeper {
    Lockkeeper::with_store(common::open(url).await, Arc::new(SystemClock))
}

/// A process that takes tokens one by one whenever the store may have one. It writes how many it got, when its last request, which was
/// refused, was sent and answered, and how long its slowest request took. As a test of its own it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taking_process() {
    let (Ok(url), Ok(dir)) = (std::env::var(URL), std::env::var(DIR)) else { return };
    let (dir, number) = (PathBuf::from(dir), std::env::var(NUMBER).unwrap());
    let span = Duration::from_millis(std::env::var(TAKE_FOR_MS).unwrap().parse().unwrap());
    let limit = keeper(&url).await.limit("hot").rate(RATE, PER_SECOND).burst(BURST);
    let _ = limit.peek().await.unwrap();
    std::fs::write(dir.join(format!("ready{number}")), "").unwrap();
    while !dir.join("go").exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let end = SystemClock.now() + span;
    let (mut taken, mut slowest) = (0, Duration::ZERO);
    loop {
        let sent = SystemClock.now();
        let outcome = match limit.take(1).await {
            // Nothing was taken: other clients were faster.
            Err(Error::Unavailable(_)) => continue,
            outcome => outcome.unwrap(),
        };
        let answered = SystemClock.now();
        slowest = slowest.max(answered.since(sent));
        if outcome.allowed() {
            taken += 1;
        } else if sent >= end {
            let line = format!("{taken} {} {} {}", sent.as_nanos(), answered.as_nanos(), slowest.as_nanos());
            std::fs::write(dir.join(format!("end{number}")), line).unwrap();
            return;
        } else {
            tokio::time::sleep(outcome.retry_after().min(end.since(answered))).await;
        }
    }
}

/// Processes that are killed when the test ends early.
struct TakingProcesses(Vec<Child>);

impl TakingProcesses {
    fn start(url: &str, dir: &Path, span: Duration) -> TakingProcesses {
        let start = |number: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "taking_process"])
                .env(URL, url)
                .env(DIR, dir)
                .env(NUMBER, number.to_string())
                .env(TAKE_FOR_MS, span.as_millis().to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        TakingProcesses((0..MEMBERS).map(start).collect())
    }
}

impl Drop for TakingProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The store gives at most rate x time + burst, counted from the first request to the last reply, and at least 0.98 of it, counted from the first
/// reply to the last request that was refused. A client corrects its clock by the time in a reply, so a reply that is seconds late sets the clock
/// back by as much: the lower bound is that much less.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_keep_to_a_limit() {
    let Some(server) = common::moto().await else { return };
    let url = common::url(server.addr(), &common::table(server.addr()).await);
    let dir = TempDir::new("limit-dynamodb");
    let full = std::env::var_os("LOCKKEEPER_FULL").is_some();
    let span = Duration::from_secs(if full { 10 } else { 3 });
    let mut processes = TakingProcesses::start(&url, dir.path(), span);
    soon("all processes are ready", async {
        while !(0..MEMBERS).all(|number| dir.join(&format!("ready{number}")).exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let limit = keeper(&url).await.limit("hot").rate(RATE, PER_SECOND).burst(BURST);
    let first_sent = SystemClock.now();
    assert!(limit.take(BURST).await.unwrap().allowed());
    let first_reply = SystemClock.now();
    std::fs::write(dir.join("go"), "").unwrap();
    let ends = tokio::task::spawn_blocking(move || {
        processes.0.iter_mut().for_each(|child| assert!(child.wait().unwrap().success()));
    });
    ends.await.unwrap();
    let each: Vec<Vec<u64>> = (0..MEMBERS)
        .map(|number| {
            let line = std::fs::read_to_string(dir.join(&format!("end{number}"))).unwrap();
            line.split(' ').map(|number| number.parse().unwrap()).collect()
        })
        .collect();
    let all = |at: usize| each.iter().map(move |numbers| numbers[at]);
    let taken = (BURST + all(0).sum::<u64>()) as f64;
    let (last_refused, last_reply) = (all(1).max().unwrap(), all(2).max().unwrap());
    let late = all(3).max().filter(|slowest| *slowest > CLOCK_TOLERANCE.as_nanos() as u64).unwrap_or(0);
    let tokens = |from: u64, to: u64| BURST as f64 + RATE as f64 * to.saturating_sub(from) as f64 / 1e9;
    let most = tokens(first_sent.as_nanos(), last_reply);
    let least = tokens(first_reply.as_nanos(), last_refused.saturating_sub(late));
    println!("{taken} taken, {least:.1} to {most:.1} tokens, {:.3} of it", taken / least);
    assert!(taken <= most + 1.0, "{taken} of {most}");
    assert!(taken >= 0.98 * least - 1.0, "{taken} of {least}");
    assert!(all(0).filter(|taken| *taken > 0).count() > 1, "one process took all: the test shows nothing");
}
