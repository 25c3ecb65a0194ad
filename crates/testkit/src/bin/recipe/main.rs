//! A process that uses a recipe, for tests that kill and stop real processes.
//!
//! ```text
//! recipe add  store=URL name=KEY times=N file=FILE     adds to a register, one by one, and writes down how far it is
//! recipe once store=URL keys=N dir=DIR results=FILE    does N keys in an order of its own, each with an entry in a ledger
//! recipe lead store=URL name=NAME ttl_ms=N file=FILE history=FILE    leads whenever it can, and writes down when it believed so
//! recipe claim store=URL items=N dir=DIR               works through a list of items, each with an entry in a ledger
//! recipe partitions store=URL name=GROUP ttl_ms=N poll_ms=N dir=DIR    owns partitions, works on their items, and writes down when it believed so
//! recipe windows store=URL windows=N file=FILE start_ns=N offset_ms=N    runs a window every 10 ms, by a clock that is off
//! recipe cached store=URL key=KEY tasks=N lease_ms=N first_ms=N guard=yes|no looked=PREFIX go=FILE runs=FILE values=FILE
//!                                                         N tasks want one value at once
//! recipe semaphore store=URL name=NAME permits=N ttl_ms=N history=FILE         takes permits, and writes down when it believed to hold
//! recipe rw_lock store=URL name=NAME role=reader|writer ttl_ms=N history=FILE  the same with shared or exclusive holds
//! recipe limit store=URL rate=N burst=N ready=FILE go=FILE for_ms=N    takes all that it gets, and prints how much and when
//! recipe prefetch store=URL rate=N burst=N batch=N ready=FILE go=FILE    holds a batch until it may go, then takes all that it gets
//! ```

mod cached;
mod limit;
mod shapes;

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper::once::{OnceStart, Stored};
use lockkeeper::partitions::{Partition, PartitionChange};

use lockkeeper::windows::Window;

use lockkeeper::{
    Attempt, BootInstant, Clock, Error, Fence, Lockkeeper, Outcome, ReleaseOutcome, SystemClock, WallTime,
};
use lockkeeper_host::Timer;
use lockkeeper_testkit::history::{HistoryEvent, HistoryRecorder, Operation};
use lockkeeper_testkit::resource::{CheckedFile, Ledger};

type RecipeFailure = Box<dyn std::error::Error>;

/// The partitions of the group that `recipe partitions` joins.
const PARTITIONS: u32 = 32;

struct RecipeProcess {
    args: HashMap<String, String>,
    keeper: Lockkeeper,
}

impl RecipeProcess {
    fn arg(&self, key: &str) -> &str {
        self.args.get(key).unwrap_or_else(|| panic!("recipe: {key}= is missing"))
    }

    /// Writes a `t` before each addition and a `d` after it. One that is started again goes on where it was killed.
    async fn add(&self) -> Result<(), RecipeFailure> {
        let register = self.keeper.register::<u64>(self.arg("name"));
        let path = self.arg("file");
        let tried = std::fs::read(path).unwrap_or_default().iter().filter(|c| **c == b't').count();
        let mut file = File::options().create(true).append(true).open(path)?;
        let mut conflicts = 0;
        for _ in tried..self.arg("times").parse()? {
            file.write_all(b"t")?;
            conflicts += register.update(|old| old.unwrap_or(0) + 1).await?.conflicts;
            file.write_all(b"d")?;
        }
        println!("conflicts {conflicts}");
        Ok(())
    }

    async fn once(&self) -> Result<(), RecipeFailure> {
        let keys: u64 = self.arg("keys").parse()?;
        let mut results = File::options().create(true).append(true).open(self.arg("results"))?;
        // A step that shares no factor with the number of keys visits them all, each process in another order.
        let start = u64::from(std::process::id());
        for i in 0..keys {
            let number = (start + i * 7919) % keys;
            let (fence, bytes) = loop {
                match self.answer(number).await {
                    // This process was slow and another took over; or the store was unreachable.
                    Err(Error::Stale { .. } | Error::Lost(_) | Error::Unavailable(_) | Error::Unknown(_)) => {
                    }
                    answer => break answer?,
                }
            };
            let mut hash = DefaultHasher::new();
            bytes.hash(&mut hash);
            // One call: a kill comes before or after it, never within.
            let line = format!("key-{number} {:016x} {} {fence}\n", hash.finish(), bytes.len());
            results.write_all(line.as_bytes())?;
        }
        Ok(())
    }

    /// The answer to a key: the result of an earlier run, or of a run now.
    async fn answer(&self, number: u64) -> lockkeeper::Result<(Fence, Vec<u8>)> {
        let key = format!("key-{number}");
        let once = self.keeper.once(&key).ttl(Duration::from_secs(1)).poll(Duration::from_millis(50));
        let turn = match once.claim().await? {
            OnceStart::Done(done) => return Ok((done.fence, done.result.bytes)),
            OnceStart::Run(turn) => turn,
        };
        let (fence, dir) = (turn.fence(), PathBuf::from(self.arg("dir")));
        // In a thread, because a thread cannot be cancelled: a runner that lost its lease goes on, and tries to enter.
        let work = tokio::task::spawn_blocking(move || effect(&dir, &key, fence, number));
        let entered = turn.guard().run(work).await?.expect("the thread ends well")?;
        // Every run would leave another result, some in several records. There must be one for all.
        let mut bytes = format!("{entered}, says {} with {fence} ", std::process::id()).into_bytes();
        bytes.resize(if number % 40 == 7 { 70_000 } else { 200 }, number as u8);
        turn.finish(Stored { ok: true, bytes: bytes.clone() }).await?;
        Ok((fence, bytes))
    }
}

impl RecipeProcess {
    /// Works until every item is done.
    async fn claim(&self) -> Result<(), RecipeFailure> {
        let (items, dir): (u64, _) = (self.arg("items").parse()?, PathBuf::from(self.arg("dir")));
        let (ms, second) = (Duration::from_millis, Duration::from_secs(1));
        let group = self.keeper.claim("work")?.lease(second).poll(ms(50)).max_attempts(1_000_000);
        let mut source = group.backoff(ms(0), ms(100)).from((0..items).map(|n| format!("key-{n}")))?;
        loop {
            let item = match source.next().await {
                Ok(Some(item)) => item,
                Ok(None) => return Ok(()),
                Err(Error::Unavailable(_) | Error::Unknown(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            let (key, fence, place) = (item.id().to_owned(), item.fence(), dir.clone());
            let number = key.trim_start_matches("key-").parse()?;
            // In a thread, because a thread cannot be cancelled: a worker that lost its lease goes on, and tries to enter.
            let work = tokio::task::spawn_blocking(move || effect(&place, &key, fence, number));
            let ended = match item.run(work).await {
                Ok(entered) => match entered.expect("the thread ends well") {
                    Ok(_) => item.complete().await,
                    Err(Error::Stale { .. }) => item.fail("refused by the ledger").await.map(drop),
                    Err(error) => return Err(error.into()),
                },
                Err(lost) => Err(lost),
            };
            match ended {
                Ok(())
                | Err(Error::Lost(_) | Error::Stale { .. } | Error::Unavailable(_) | Error::Unknown(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Looks, and enters only if there is nothing; with time between, and after, for a kill or a stop.
fn effect(dir: &Path, key: &str, fence: Fence, number: u64) -> lockkeeper::Result<String> {
    let pause = Duration::from_millis(2 + number * 7 % 40);
    // Every run is counted, also those that find it done.
    count(dir, "runs", key, fence);
    let ledger = Ledger::new(dir);
    let entered = ledger.look(key, fence)?;
    std::thread::sleep(pause);
    let entered = match entered {
        Some(entered) => entered,
        None => {
            let value = format!("{key} by {}", std::process::id());
            ledger.enter(key, fence, &value).inspect_err(|_| count(dir, "refused", key, fence))?;
            value
        }
    };
    std::thread::sleep(pause);
    Ok(entered)
}

fn count(dir: &Path, what: &str, key: &str, fence: Fence) {
    let file = File::options().create(true).append(true).open(dir.join(what));
    file.and_then(|mut file| file.write_all(format!("{key} {fence} {}\n", std::process::id()).as_bytes()))
        .expect("it can be written");
}

impl RecipeProcess {
    /// Leads in terms of up to a hundred looks each. Each look is a line: the term, a moment before, a moment after, and who.
    /// The process records the same in its history, for the checkers.
    async fn lead(&self) -> Result<(), RecipeFailure> {
        let (name, me) = (self.arg("name"), std::process::id());
        let ttl = Duration::from_millis(self.arg("ttl_ms").parse()?);
        let mut file = File::options().create(true).append(true).open(self.arg("file"))?;
        let history = HistoryRecorder::new(self.arg("history"), me.to_string())?;
        loop {
            let story = Lockkeeper::new_attempt();
            let tell = |event: HistoryEvent| history.record(event.attempt(&story));
            tell(HistoryEvent::invoke(Operation::Acquire, name));
            let leader = match self.keeper.election(name).ttl(ttl).campaign(me.to_string()).await {
                Ok(leader) => leader,
                Err(error) => {
                    tell(HistoryEvent::failed(Operation::Acquire, name, &error));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let mut told = leader.guard().deadline();
            tell(HistoryEvent::ok(Operation::Acquire, name).fence(leader.term()).deadline(told));
            for look in 0..100 {
                let before = SystemClock.now().as_nanos();
                if !leader.guard().is_held() {
                    tell(HistoryEvent::signal(name));
                    break;
                }
                let after = SystemClock.now().as_nanos();
                file.write_all(format!("{} {before} {after} {me}\n", leader.term()).as_bytes())?;
                if leader.guard().deadline() > told {
                    told = leader.guard().deadline();
                    tell(HistoryEvent::ok(Operation::Renew, name).deadline(told));
                }
                if look % 20 == 19 {
                    let _ = leader.proclaim(format!("{me} {look}")).await;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tell(HistoryEvent::invoke(Operation::Release, name));
            tell(match leader.resign().await {
                Ok(ReleaseOutcome::Released) => HistoryEvent::ok(Operation::Release, name),
                Ok(ReleaseOutcome::AlreadyGone) => {
                    HistoryEvent::refused(Operation::Release, name, Outcome::Lost)
                }
                Err(error) => HistoryEvent::failed(Operation::Release, name, &error),
            });
        }
    }

    /// Owns partitions until there is a file `leave-PID`, with one task for each. A task takes the next item of its partition at a
    /// file that checks fences. Each look is a line: the partition, the fence, a moment before, a moment after, and the process.
    async fn partitions(&self) -> Result<(), RecipeFailure> {
        let (dir, me) = (PathBuf::from(self.arg("dir")), std::process::id());
        let ms = |key| self.arg(key).parse().map(Duration::from_millis);
        let story = Arc::new(PartitionStory {
            history: HistoryRecorder::new(dir.join("history"), me.to_string())?,
            looks: File::options().create(true).append(true).open(dir.join("looks"))?,
            asked: (0..PARTITIONS).map(|_| Mutex::new(Lockkeeper::new_attempt())).collect(),
            group: self.arg("name").to_owned(),
            dir: dir.clone(),
        });
        // Before anything is sent.
        for number in 0..PARTITIONS {
            story.ask(number);
        }
        let group = self.keeper.partitions(self.arg("name"), PARTITIONS);
        let group = group.member(format!("w{me}")).ttl(ms("ttl_ms")?).poll(ms("poll_ms")?);
        let mut member = group.grace(Duration::from_secs(2)).join().await?;
        let leave = dir.join(format!("leave-{me}"));
        while !leave.exists() {
            let change = tokio::time::timeout(Duration::from_millis(20), member.next()).await;
            match change {
                Ok(Some(Ok(PartitionChange::Owned(partition)))) => {
                    tokio::spawn(story.clone().work(partition));
                }
                Ok(None | Some(Err(_))) => return Err("the membership has ended".into()),
                _ => {}
            }
        }
        Ok(member.leave().await?)
    }

    /// Writes a line when it begins a window and another when it has finished it.
    async fn windows(&self) -> Result<(), RecipeFailure> {
        let offset_us: i64 = self.arg("offset_ms").parse::<i64>()? * 1000;
        let start = BootInstant::from_nanos(self.arg("start_ns").parse()?);
        let clock = Arc::new(Off { start, offset_us });
        let keeper = Lockkeeper::with_store(self.keeper.store().clone(), clock.clone());
        let windows = keeper.windows("job");
        let mut file = File::options().create(true).append(true).open(self.arg("file"))?;
        // One that is started again need not look at all that is done.
        let first = windows.record().await?.map_or(0, |newest| (newest.at_ms - Off::FIRST_MS) / 60_000);
        for n in first..self.arg("windows").parse()? {
            let at_ms = Off::FIRST_MS + n * 60_000;
            while clock.wall().as_micros() / 1000 < at_ms {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let guard = keeper.lock("job").ttl(Duration::from_secs(2)).acquire().await?;
            if let Window::Ours(run) = windows.begin(&guard, at_ms).await? {
                let (fence, me) = (run.fence(), std::process::id());
                file.write_all(format!("begins {n} {fence} {me}\n").as_bytes())?;
                // Time for a kill, now and then.
                tokio::time::sleep(Duration::from_millis(if n % 8 == 3 { 60 } else { 1 })).await;
                run.finish(&guard, 0).await?;
                file.write_all(format!("ends {n} {fence} {me}\n").as_bytes())?;
            }
            guard.release().await?;
        }
        Ok(())
    }
}

/// The record that a process with partitions keeps.
struct PartitionStory {
    history: HistoryRecorder,
    looks: File,
    /// The request that the next grant of each partition answers. It is written down before the partition is given up.
    asked: Vec<Mutex<Attempt>>,
    group: String,
    dir: PathBuf,
}

impl PartitionStory {
    fn lock(&self, number: u32) -> String {
        format!("partition/{}/{number}", self.group)
    }

    /// Writes down that the partition may be requested from now on. Returns the request before that.
    fn ask(&self, number: u32) -> Attempt {
        let next = Lockkeeper::new_attempt();
        self.history.record(HistoryEvent::invoke(Operation::Acquire, self.lock(number)).attempt(&next));
        std::mem::replace(&mut *self.asked[number as usize].lock().unwrap(), next)
    }

    /// Works until the partition is revoked or lost.
    async fn work(self: Arc<Self>, partition: Partition) {
        let (number, fence, me) = (partition.number(), partition.fence(), std::process::id());
        let (lock, asked) = (self.lock(number), *self.asked[number as usize].lock().unwrap());
        let tell = |event: HistoryEvent| self.history.record(event.attempt(&asked));
        let mut told = partition.guard().deadline();
        tell(HistoryEvent::ok(Operation::Acquire, &lock).fence(fence).deadline(told));
        let items = CheckedFile::new(self.dir.join(format!("items-{number}")));
        // From here on the file refuses every earlier owner, so the last item in it stays the last one.
        let mut next = items.write(fence, "begins").ok().map(|()| 1 + last_item(&items));
        while !partition.is_revoked() {
            let before = SystemClock.now().as_nanos();
            if !partition.is_held() {
                break;
            }
            let after = SystemClock.now().as_nanos();
            let line = format!("{number} {fence} {before} {after} {me}\n");
            (&self.looks).write_all(line.as_bytes()).expect("the looks can be written");
            if partition.guard().deadline() > told {
                told = partition.guard().deadline();
                tell(HistoryEvent::ok(Operation::Renew, &lock).deadline(told));
            }
            next = next.and_then(|item| items.write(fence, format!("item {item}")).ok().map(|()| item + 1));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        if !partition.is_held() {
            // A late owner tries all the same: the file takes it only if no other owner has begun.
            let _ = next.map(|item| items.write(fence, format!("item {item}")));
        }
        // The next request is sent only after this partition is dropped.
        self.ask(number);
        if !partition.is_held() {
            return tell(HistoryEvent::signal(&lock));
        }
        tell(HistoryEvent::invoke(Operation::Release, &lock));
        tell(match partition.release().await {
            Ok(ReleaseOutcome::Released) => HistoryEvent::ok(Operation::Release, &lock),
            Ok(ReleaseOutcome::AlreadyGone) => {
                HistoryEvent::refused(Operation::Release, &lock, Outcome::Lost)
            }
            Err(error) => HistoryEvent::failed(Operation::Release, &lock, &error),
        });
    }
}

/// The number of the newest item that the file has.
fn last_item(items: &CheckedFile) -> u64 {
    let accepted = items.accepted().unwrap_or_default();
    accepted.iter().rev().find_map(|write| write.value.strip_prefix("item ")?.parse().ok()).unwrap_or(0)
}

/// A wall clock on which a minute passes every 10 ms, and which is off by a little.
#[derive(Debug)]
struct Off {
    start: BootInstant,
    offset_us: i64,
}

impl Off {
    /// The first window begins ten minutes after the clock does.
    const FIRST_MS: u64 = 1_000_000_200_000;
}

impl Clock for Off {
    fn now(&self) -> BootInstant {
        SystemClock.now()
    }

    fn wall(&self) -> WallTime {
        let passed = SystemClock.now().since(self.start).as_micros() as u64 * 6000;
        let wall = (Self::FIRST_MS - 600_000) * 1000 + passed;
        WallTime::from_micros(wall.saturating_add_signed(self.offset_us))
    }

    fn start(&self) -> std::io::Result<()> {
        SystemClock.start()
    }

    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        SystemClock.call_at(at, then)
    }
}

/// A keeper for a process that may be started while the store is unreachable, or busy.
async fn open(store: &str) -> Result<Lockkeeper, RecipeFailure> {
    loop {
        match Lockkeeper::open(store).await {
            // Started while the store is unreachable: that is part of the test.
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {
                tokio::time::sleep(Duration::from_millis(100)).await
            }
            opened => return Ok(opened?),
        }
    }
}

fn main() -> Result<(), RecipeFailure> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let args: HashMap<String, String> = args
        .filter_map(|arg| arg.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = args.get("store").ok_or("recipe: store= is missing")?;
        let keeper = open(store).await?;
        let process = RecipeProcess { keeper, args };
        match what.as_str() {
            "add" => process.add().await,
            "once" => process.once().await,
            "lead" => process.lead().await,
            "claim" => process.claim().await,
            "windows" => process.windows().await,
            "cached" => process.cached().await,
            "semaphore" => process.semaphore().await,
            "rw_lock" => process.rw_lock().await,
            "partitions" => process.partitions().await,
            "limit" => process.limit().await,
            "prefetch" => process.prefetch().await,
            _ => Err(format!("recipe: there is no {what:?}").into()),
        }
    })
}
