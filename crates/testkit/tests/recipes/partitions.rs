//! Partitions among processes that join, leave, are killed, and are stopped past their leases.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockkeeper::{Clock, Lockkeeper, Profile, SystemClock};
use lockkeeper_testkit::history::{self, Demand, History, HistoryEvent, Operation, OperationPhase};
use lockkeeper_testkit::resource::CheckedFile;
use lockkeeper_testkit::servers::{
    self, AppendOnly, EtcdOptions, PostgresOptions, RedisOptions, Server, TempDir,
};
use lockkeeper_testkit::stop;
use rustix::process::{Pid, Signal, kill_process};

use super::control::Control;
use super::crowd::{below, recipe, times};

/// As in the program.
const PARTITIONS: u32 = 32;
const WORKERS: usize = 5;
const TTL: Duration = Duration::from_millis(2000);
const POLL: Duration = Duration::from_millis(200);
/// As in the program: the time to finish a partition.
const GRACE: Duration = Duration::from_secs(2);

/// A process believed to own a partition, at some moment between these.
#[derive(Clone, Copy, Debug)]
struct Look {
    number: u32,
    fence: u64,
    before: u64,
    after: u64,
    pid: u32,
}

fn parse(line: &str) -> Option<Look> {
    // A kill may leave half a line.
    let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [number, fence, before, after, pid] = numbers[..] else { return None };
    Some(Look { number: number as u32, fence, before, after, pid: pid as u32 })
}

fn looks(dir: &Path) -> Vec<Look> {
    std::fs::read_to_string(dir.join("looks")).unwrap_or_default().lines().filter_map(parse).collect()
}

/// For each partition the first look from `since` on by a process other than `not`, once there is one for all.
async fn all_owned(dir: &Path, since: u64, not: Option<u32>) -> u64 {
    let patience = Instant::now() + Duration::from_secs(120);
    loop {
        let mut first: BTreeMap<u32, u64> = BTreeMap::new();
        for look in looks(dir).into_iter().filter(|look| look.before >= since && Some(look.pid) != not) {
            let after = first.entry(look.number).or_insert(u64::MAX);
            *after = look.after.min(*after);
        }
        if first.len() == PARTITIONS as usize {
            return *first.values().max().expect("there are partitions");
        }
        assert!(
            Instant::now() < patience,
            "only {} partitions were owned again within two minutes",
            first.len()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The workers, and how they have ended.
struct Workers {
    args: Vec<String>,
    dir: PathBuf,
    running: Vec<Child>,
    killed: Vec<(u32, u64)>,
}

impl Workers {
    fn start(&mut self) {
        self.running.push(recipe("partitions", &self.args));
    }

    fn any(&self) -> u32 {
        self.running[below(self.running.len())].id()
    }

    fn take(&mut self, pid: u32) -> Child {
        let at = self.running.iter().position(|child| child.id() == pid).expect("it runs");
        self.running.remove(at)
    }

    /// Stops one that has a lock neither on the file of the store nor on one of the items: the others could not go on before it continues.
    fn stop(&self, pid: u32) {
        let mut files: Vec<PathBuf> =
            (0..PARTITIONS).map(|number| self.dir.join(format!("items-{number}"))).collect();
        if let Some(store) = self.args.iter().find_map(|arg| arg.strip_prefix("store=sqlite:")) {
            files.extend(stop::files_with_locks(store.as_ref()));
        }
        stop::stop_without_locks(pid, &files);
    }

    fn proceed(&self, pid: u32) {
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::CONT).unwrap();
    }

    fn kill(&mut self, pid: u32) {
        let mut child = self.take(pid);
        self.killed.push((pid, SystemClock.now().as_nanos()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Asks it to leave. It ends by itself.
    fn leave(&mut self, pid: u32) -> Child {
        std::fs::write(self.dir.join(format!("leave-{pid}")), "").unwrap();
        self.take(pid)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until the group has as many members, and nothing moves.
async fn settled(keeper: &Lockkeeper, members: usize) {
    let patience = Instant::now() + Duration::from_secs(120);
    loop {
        let status = keeper.partition_status("g").await;
        if let Ok(Some(status)) = &status
            && status.members.len() == members
            && status.moving().count() == 0
        {
            return;
        }
        assert!(Instant::now() < patience, "the group did not settle for two minutes: {status:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What the members' comings and goings have cost at least, as seen by a process that looks every 50 ms: what a member had when it went, and
/// its share when it came. On a machine that stalls for a ttl the living go, too.
struct IdealMoves {
    task: tokio::task::JoinHandle<()>,
    moves: Arc<AtomicUsize>,
}

impl IdealMoves {
    fn count(keeper: Lockkeeper) -> IdealMoves {
        let moves = Arc::new(AtomicUsize::new(0));
        let counter = moves.clone();
        let task = tokio::spawn(async move {
            let mut before: BTreeMap<String, usize> = BTreeMap::new();
            loop {
                if let Ok(Some(status)) = keeper.partition_status("g").await {
                    // One that is leaving has given away what it had.
                    let staying = status.members.iter().filter(|member| !member.leaving);
                    let now: BTreeMap<String, usize> =
                        staying.map(|member| (member.name.clone(), member.assigned as usize)).collect();
                    let gone =
                        before.iter().filter(|(name, _)| !now.contains_key(*name)).map(|(_, had)| *had);
                    let came = now
                        .keys()
                        .filter(|name| !before.contains_key(*name))
                        .map(|_| PARTITIONS as usize / now.len());
                    if !before.is_empty() {
                        counter.fetch_add(gone.chain(came).sum(), Ordering::Relaxed);
                    }
                    before = now;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        IdealMoves { task, moves }
    }

    fn end(self) -> usize {
        self.task.abort();
        self.moves.load(Ordering::Relaxed)
    }
}

/// The history, in which the dead believe nothing any more.
fn history_of(dir: &Path, killed: &[(u32, u64)]) -> History {
    let told = History::read(dir.join("history")).unwrap();
    let granted = |event: &&HistoryEvent| event.op == Operation::Acquire && event.phase == OperationPhase::Ok;
    let deaths = told.events().iter().filter(granted).filter_map(|event| {
        let (_, t) = killed.iter().find(|(pid, t)| pid.to_string() == event.proc && *t >= event.t)?;
        let (proc, attempt) = (event.proc.clone(), event.attempt.clone());
        Some(HistoryEvent { t: *t, proc, attempt, ..HistoryEvent::signal(&event.lock) })
    });
    History::new(told.events().iter().cloned().chain(deaths.collect::<Vec<_>>()))
}

/// How often a partition went from one process to another, after the grants up to `since`.
fn moves(dir: &Path, since: u64) -> usize {
    let mut owners: BTreeMap<u32, BTreeMap<u64, (u32, u64)>> = BTreeMap::new();
    for look in looks(dir) {
        owners.entry(look.number).or_default().entry(look.fence).or_insert((look.pid, look.before));
    }
    let of_one = owners.values().map(|grants| {
        let grants: Vec<_> = grants.values().collect();
        grants.windows(2).filter(|two| two[0].0 != two[1].0 && two[1].1 >= since).count()
    });
    of_one.sum()
}

/// Each item of each partition was taken once, and in order. Returns how many there are.
fn assert_items_taken_once(dir: &Path) -> u64 {
    let mut all = 0;
    for number in 0..PARTITIONS {
        let accepted = CheckedFile::new(dir.join(format!("items-{number}"))).accepted().unwrap();
        assert!(accepted.is_sorted_by(|a, b| a.fence <= b.fence), "the file of {number} took an older fence");
        let items: Vec<u64> =
            accepted.iter().filter_map(|write| write.value.strip_prefix("item ")?.parse().ok()).collect();
        let expected: Vec<u64> = (1..=items.len() as u64).collect();
        assert_eq!(items, expected, "an item of partition {number} was taken twice, or left out");
        all += items.len() as u64;
    }
    all
}

/// No older epoch of a partition is believed in after a newer one has begun.
fn assert_one_owner_at_a_time(looks: &[Look]) {
    let mut epochs: BTreeMap<(u32, u64), (u64, u64)> = BTreeMap::new();
    for look in looks {
        let (begun, believed) = epochs.entry((look.number, look.fence)).or_insert((look.after, look.before));
        (*begun, *believed) = ((*begun).min(look.after), (*believed).max(look.before));
    }
    let mut newer: BTreeMap<u32, u64> = BTreeMap::new();
    for ((number, fence), (begun, believed)) in epochs.iter().rev() {
        let newer_begun = newer.entry(*number).or_insert(u64::MAX);
        assert!(
            believed < newer_begun,
            "epoch {fence} of partition {number} was believed in beside a newer one"
        );
        *newer_begun = (*newer_begun).min(*begun);
    }
}

/// Where they meet, and how much longer than a ttl that store keeps what a dead process had.
struct Ground {
    store: String,
    _server: Option<Server>,
    lasts: Duration,
}

/// The bound that `docs/partitions.md` declares after the death of an owner: its ttl, two polls of another member, and the store's
/// wake-up.
fn bound(profile: &Profile, lasts: Duration) -> Duration {
    TTL + TTL / 50 + Duration::from_millis(50) + POLL * 5 / 2 + profile.wake + lasts
}

async fn five_workers(ground: Ground) {
    let Ground { store, _server, lasts } = ground;
    let (dir, started) = (TempDir::new("partitions"), Instant::now());
    let dir = dir.join("run");
    std::fs::create_dir_all(&dir).unwrap();
    let args = [
        format!("store={store}"),
        "name=g".into(),
        format!("ttl_ms={}", TTL.as_millis()),
        format!("poll_ms={}", POLL.as_millis()),
        format!("dir={}", dir.display()),
    ];
    let mut workers =
        Workers { args: args.to_vec(), dir: dir.clone(), running: Vec::new(), killed: Vec::new() };
    (0..WORKERS).for_each(|_| workers.start());
    let keeper = Lockkeeper::open(&store).await.unwrap();
    settled(&keeper, WORKERS).await;
    all_owned(&dir, SystemClock.now().as_nanos(), None).await;
    let control = Control::start(&store);
    let first = SystemClock.now().as_nanos();
    let end = Instant::now() + Duration::from_secs(times(60, 8));
    let (mut rounds, mut kills, mut stops, mut leaves) = (0, 0, 0, 0);
    let (ideal, mut slowest) = (IdealMoves::count(keeper.clone()), Duration::ZERO);
    // Each fault at least once, then at random until the time is over.
    while Instant::now() < end || rounds < 3 {
        settled(&keeper, WORKERS).await;
        let victim = workers.any();
        control.reset();
        let began = SystemClock.now().as_nanos();
        let mut leaving = None;
        let (fault, may_take) = match if rounds < 3 { rounds } else { below(3) } {
            0 => {
                kills += 1;
                workers.kill(victim);
                ("a kill", bound(&keeper.profile(), lasts))
            }
            1 => {
                stops += 1;
                workers.stop(victim);
                ("a stop", bound(&keeper.profile(), lasts))
            }
            _ => {
                leaves += 1;
                leaving = Some(workers.leave(victim));
                ("a leave", GRACE + POLL * 5 / 2 + keeper.profile().wake)
            }
        };
        let owned_again = all_owned(&dir, began, Some(victim)).await;
        let took = Duration::from_nanos(owned_again - began);
        // Nothing is quicker than the machine and the store are just then: a take-over is a read, a write and an acquire,
        // with retries among five members.
        let slow = control.longest() * 6 + Duration::from_secs(1);
        assert!(
            took <= may_take + slow,
            "round {rounds}: owned again {took:?} after {fault}, and the bound is {may_take:?} + {slow:?}"
        );
        slowest = slowest.max(took);
        match fault {
            "a stop" => workers.proceed(victim),
            _ => workers.start(),
        }
        if let Some(mut child) = leaving {
            assert!(child.wait().unwrap().success(), "a worker that left reports an error");
        }
        rounds += 1;
    }
    settled(&keeper, WORKERS).await;
    let last = SystemClock.now().as_nanos();
    all_owned(&dir, last, None).await;
    let (moved, ideal) = (moves(&dir, first), ideal.end());
    // The end, as a kill of all: nothing is left behind when all leases are over.
    for pid in workers.running.iter().map(Child::id).collect::<Vec<_>>() {
        workers.kill(pid);
    }
    drop(control);
    let gone = Instant::now() + Duration::from_secs(120);
    while keeper.partition_status("g").await.unwrap().is_some() {
        assert!(Instant::now() < gone, "the group's record is left behind");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    while !keeper.list("partition/", &lockkeeper::Page::FIRST).await.unwrap().locks.is_empty() {
        assert!(Instant::now() < gone, "a lock is left behind");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    assert_one_owner_at_a_time(&looks(&dir));
    let history = history_of(&dir, &workers.killed);
    let demand = Demand { operations: PARTITIONS as usize + moved, faults: 2, contended: 0 };
    history::verdict(&history, demand, kills + stops, history::laws(&history)).assert_green();
    let items = assert_items_taken_once(&dir);
    assert!(moved as f64 <= 1.2 * ideal as f64, "{moved} moves, and {ideal} would have been enough");
    let all: BTreeSet<u32> = looks(&dir).iter().map(|look| look.pid).collect();
    println!(
        "{store}: {:?}, {rounds} rounds, {kills} kills, {stops} stops, {leaves} leaves, {} processes, {items} items, {moved} moves for \
         an ideal of {ideal}; the slowest take-over after {slowest:?}",
        started.elapsed(),
        all.len()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_workers_on_a_file_never_own_a_partition_together() {
    let dir = TempDir::new("partitions-store");
    let store = format!("sqlite:{}", dir.join("locks.db").display());
    five_workers(Ground { store, _server: None, lasts: Duration::ZERO }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_workers_on_redis_never_own_a_partition_together() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(server) = servers::redis(options) else { return };
    let store = format!("redis://{}?poll=250ms&claim=500ms", server.addr());
    five_workers(Ground { store, _server: Some(server), lasts: Duration::ZERO }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_workers_on_postgres_never_own_a_partition_together() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = format!("postgres://postgres@{}/postgres?poll=250ms&claim=1s", server.addr());
    five_workers(Ground { store, _server: Some(server), lasts: Duration::ZERO }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_workers_on_etcd_never_own_a_partition_together() {
    let Ok(()) = servers::only_with_full() else { return };
    let Ok(server) = servers::etcd(EtcdOptions::default()) else { return };
    let store = format!("etcd://{}?poll=250ms&claim=2s", server.addr());
    // A second more, and half a second until etcd looks for leases that are over.
    five_workers(Ground { store, _server: Some(server), lasts: Duration::from_millis(1500) }).await;
}
