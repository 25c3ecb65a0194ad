//! Ten thousand rows, eight worker processes, kills and stops: every row is done, and none twice at a fenced resource.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockkeeper::jobs::{Jobs, TakenJob};
use lockkeeper::{Error, Fence};
use lockkeeper_testkit::resource::Ledger;
use lockkeeper_testkit::servers::TempDir;
use rustix::process::{Pid, Signal, kill_process};

use super::common::{Database, LONG};

const WORKERS: usize = 8;
/// Longer than a machine that is busy stops a process by itself, most of the time.
const LEASE: Duration = Duration::from_secs(2);
/// The address of the database, for the processes that this program starts of itself.
const URL: &str = "JOBS_TEST_URL";
const DIR: &str = "JOBS_TEST_DIR";

/// A worker process. Started by the test below; as a test of its own it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_process() {
    let (Ok(url), Some(dir)) = (std::env::var(URL), std::env::var_os(DIR)) else { return };
    let dir = PathBuf::from(dir);
    let ms = Duration::from_millis;
    let jobs = Jobs::open(&url, "work").await.unwrap().rules(LEASE, 1_000_000, ms(1), ms(100)).unwrap();
    loop {
        let batch = match jobs.claim(4).await {
            Ok(batch) => batch,
            Err(Error::Unknown(_) | Error::Unavailable(_)) => continue,
            Err(error) => panic!("{error}"),
        };
        if batch.is_empty() {
            let counts = jobs.counts().await.unwrap();
            if counts.due + counts.waiting + counts.taken == 0 {
                return;
            }
            tokio::time::sleep(ms(20)).await;
        }
        for job in batch {
            work_on(&dir, job).await;
        }
    }
}

async fn work_on(dir: &Path, job: TakenJob) {
    let (place, key, fence) = (dir.to_owned(), job.key().to_owned(), job.fence());
    // In a thread, because a thread cannot be cancelled: a worker that lost its lease goes on, and tries to enter.
    let effect = tokio::task::spawn_blocking(move || enter_once(&place, &key, fence));
    match job.run(effect).await {
        Ok(entered) => {
            let ended = match entered.expect("the thread ends well") {
                Ok(()) => job.complete().await,
                Err(Error::Stale { .. }) => job.fail("refused by the ledger").await.map(drop),
                Err(error) => panic!("{error}"),
            };
            match ended {
                Ok(()) => {}
                Err(Error::Stale { .. }) => count(dir, "late"),
                Err(Error::Lost(_) | Error::Unknown(_) | Error::Unavailable(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        Err(Error::Lost(_)) => count(dir, "lost"),
        Err(error) => panic!("{error}"),
    }
}

/// Looks, and enters only if there is nothing; with time between, for a kill or a stop.
fn enter_once(dir: &Path, key: &str, fence: Fence) -> lockkeeper::Result<()> {
    count(dir, "runs");
    let ledger = Ledger::new(dir.join("ledger"));
    let number: u64 = key.parse().unwrap();
    if ledger.look(key, fence)?.is_none() {
        std::thread::sleep(Duration::from_millis(number % 7));
        ledger.enter(key, fence, "done").inspect_err(|_| count(dir, "refused"))?;
    }
    std::thread::sleep(Duration::from_millis(number % 5));
    Ok(())
}

fn count(dir: &Path, what: &str) {
    let file = File::options().create(true).append(true).open(dir.join(what));
    file.and_then(|mut file| file.write_all(b".")).expect("it can be written");
}

fn counted(dir: &Path, what: &str) -> u64 {
    std::fs::metadata(dir.join(what)).map_or(0, |file| file.len())
}

/// Eight worker processes, of which any may be killed, and begins anew, or be stopped for a while.
struct WorkerCrowd {
    url: String,
    dir: PathBuf,
    children: Vec<Child>,
}

impl WorkerCrowd {
    fn start(url: String, dir: PathBuf) -> WorkerCrowd {
        let mut crowd = WorkerCrowd { url, dir, children: Vec::new() };
        crowd.children = (0..WORKERS).map(|_| crowd.worker()).collect();
        crowd
    }

    fn worker(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crowd::worker_process"])
            .env(URL, &self.url)
            .env(DIR, &self.dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn signal(&self, at: usize, signal: Signal) {
        // One that has ended already is no error.
        let _ = kill_process(Pid::from_raw(self.children[at].id() as i32).unwrap(), signal);
    }

    fn kill(&mut self, at: usize) {
        self.children[at].kill().unwrap();
        self.children[at].wait().unwrap();
        self.children[at] = self.worker();
    }
}

impl Drop for WorkerCrowd {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_is_done_once_while_workers_are_killed_and_stopped() {
    let Some(db) = Database::start().await else { return };
    let rows: i64 = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 10_000 } else { 1_000 };
    db.jobs(rows as usize, LONG).await;
    let (dir, started) = (TempDir::new("jobs"), Instant::now());
    std::fs::create_dir(dir.join("ledger")).unwrap();
    let mut crowd = WorkerCrowd::start(db.url(), dir.path().to_owned());
    let done = "SELECT count(*) FROM work WHERE lk_state = 'done'";
    let (mut kills, mut stopped) = (0, Vec::new());
    // Each time when some more are done, so that it happens while there is work. The others go on beside a worker that is stopped.
    for round in 1..=20 {
        while db.number(done).await < rows * round / 25 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let at = round as usize % WORKERS;
        if round % 4 == 0 {
            crowd.signal(at, Signal::STOP);
            stopped.push(at);
        } else {
            crowd.kill(at);
            kills += 1;
        }
    }
    // Past their leases: the others have their rows when they go on.
    tokio::time::sleep(LEASE + LEASE / 4).await;
    let stops = stopped.len();
    stopped.into_iter().for_each(|at| crowd.signal(at, Signal::CONT));
    for child in &mut crowd.children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(db.number(done).await, rows, "a row was lost");
    let ledger = Ledger::new(dir.join("ledger"));
    for key in 1..=rows {
        let entries = ledger.entries(&key.to_string()).unwrap();
        assert_eq!(entries.len(), 1, "row {key} was done more than once, or not at all: {entries:?}");
    }
    let again = counted(dir.path(), "runs") as i64 - rows;
    assert!(again > 0, "no worker was killed in the middle of its work: the test shows nothing");
    println!(
        "{rows} rows, {WORKERS} workers, {kills} kills, {stops} stops: {again} attempts were repeated, {} refused by the ledger, {} \
         late ends refused by the table, {} leases lost in time, {:?}",
        counted(dir.path(), "refused"),
        counted(dir.path(), "late"),
        counted(dir.path(), "lost"),
        started.elapsed()
    );
}
