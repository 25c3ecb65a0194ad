//! A process that uses a recipe, for tests that kill and stop real processes.
//!
//! ```text
//! recipe add  store=URL name=KEY times=N               adds to a register, one by one
//! recipe once store=URL keys=N dir=DIR results=FILE    does N keys in an order of its own, each once
//! recipe lead store=URL name=NAME ttl_ms=N file=FILE   leads whenever it can, and writes down when it believed so
//! recipe windows store=URL windows=N file=FILE start_ns=N offset_ms=N    runs a window every 10 ms, by a clock that is off
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper::{Clock, Error, Fence, Lockkeeper, Moment, SystemClock, Wall, Window};
use lockkeeper_host::Timer;
use rustix::fs::{FlockOperation, flock};

type Failure = Box<dyn std::error::Error>;

struct Process {
    args: HashMap<String, String>,
    keeper: Lockkeeper,
}

impl Process {
    fn arg(&self, key: &str) -> &str {
        self.args.get(key).unwrap_or_else(|| panic!("recipe: {key}= is missing"))
    }

    async fn add(&self) -> Result<(), Failure> {
        let register = self.keeper.register::<u64>(self.arg("name"));
        let mut conflicts = 0;
        for _ in 0..self.arg("times").parse()? {
            conflicts += register.update(|old| old.unwrap_or(0) + 1).await?.conflicts;
        }
        println!("conflicts {conflicts}");
        Ok(())
    }

    async fn once(&self) -> Result<(), Failure> {
        let keys: u64 = self.arg("keys").parse()?;
        let dir = Path::new(self.arg("dir"));
        let mut results = File::options().create(true).append(true).open(self.arg("results"))?;
        // A step that shares no factor with the number of keys visits them all, each process in another order.
        let start = u64::from(std::process::id());
        for i in 0..keys {
            let key = format!("key-{}", (start + i * 7919) % keys);
            let done = loop {
                let once = self.keeper.once(&key).ttl(Duration::from_secs(5)).poll(Duration::from_millis(50));
                match once.run(|fence| effect(dir, &key, fence)).await {
                    Ok(done) => break done,
                    // Somebody took over, because we were slow: their result counts.
                    Err(Error::Stale { .. } | Error::Lost(_) | Error::Unavailable(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            };
            let value = done.result.map_err(|e| format!("the work failed: {e}"))?;
            // One call: a kill comes before or after it, never within.
            results.write_all(format!("{key} {value} {}\n", done.fence).as_bytes())?;
        }
        Ok(())
    }
}

impl Process {
    /// Leads in terms of a few dozen looks each. Each look is a line: the term, a moment before and a moment after.
    async fn lead(&self) -> Result<(), Failure> {
        let ttl = Duration::from_millis(self.arg("ttl_ms").parse()?);
        let mut file = File::options().create(true).append(true).open(self.arg("file"))?;
        loop {
            let election = self.keeper.election(self.arg("name")).ttl(ttl);
            let Ok(leader) = election.campaign(std::process::id().to_string()).await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            for look in 0..100 {
                let before = SystemClock.now().as_nanos();
                if !leader.guard().is_held() {
                    break;
                }
                let after = SystemClock.now().as_nanos();
                file.write_all(format!("{} {before} {after}\n", leader.term()).as_bytes())?;
                if look % 20 == 0 {
                    let _ = leader.proclaim(format!("{} {look}", std::process::id())).await;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let _ = leader.resign().await;
        }
    }

    async fn windows(&self) -> Result<(), Failure> {
        let offset_us: i64 = self.arg("offset_ms").parse::<i64>()? * 1000;
        let start = Moment::from_nanos(self.arg("start_ns").parse()?);
        let clock = Arc::new(Off { start, offset_us });
        let keeper = Lockkeeper::with_store(self.keeper.store().clone(), clock.clone());
        let windows = keeper.windows("job");
        let mut file = File::options().create(true).append(true).open(self.arg("file"))?;
        for n in 0..self.arg("windows").parse()? {
            let at_ms = Off::FIRST_MS + n * 60_000;
            while clock.wall().as_micros() / 1000 < at_ms {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let guard = keeper.lock("job").acquire().await?;
            if let Window::Ours(run) = windows.begin(&guard, at_ms).await? {
                file.write_all(format!("{n} {}\n", run.fence()).as_bytes())?;
                run.finish().await?;
            }
            guard.release().await?;
        }
        Ok(())
    }
}

/// A wall clock on which a minute passes every 10 ms, and which is off by a little.
#[derive(Debug)]
struct Off {
    start: Moment,
    offset_us: i64,
}

impl Off {
    /// The first window begins ten minutes after the clock does.
    const FIRST_MS: u64 = 1_000_000_200_000;
}

impl Clock for Off {
    fn now(&self) -> Moment {
        SystemClock.now()
    }

    fn wall(&self) -> Wall {
        let passed = SystemClock.now().since(self.start).as_micros() as u64 * 6000;
        let wall = (Self::FIRST_MS - 600_000) * 1000 + passed;
        Wall::from_micros(wall.saturating_add_signed(self.offset_us))
    }

    fn call_at(&self, at: Moment, then: Box<dyn FnOnce() + Send>) -> Timer {
        SystemClock.call_at(at, then)
    }
}

/// Leaves its mark in the key's own file, unless an earlier run did: what is there is the result. The file takes one mark, as
/// a unique key would; it does not compare fences.
async fn effect(dir: &Path, key: &str, fence: Fence) -> Result<String, String> {
    let apply = || -> std::io::Result<String> {
        let mut file = File::options().create(true).append(true).read(true).open(dir.join(key))?;
        flock(&file, FlockOperation::LockExclusive)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        if text.is_empty() {
            text = format!("{key}-{fence}-{}", std::process::id());
            file.write_all(text.as_bytes())?;
        }
        Ok(text)
    };
    // Every run is counted, also those that find the effect done.
    let counted = File::options().create(true).append(true).open(dir.join("runs"));
    counted.and_then(|mut runs| writeln!(runs, "{key} {fence}")).map_err(|e| e.to_string())?;
    let before = apply().map_err(|e| e.to_string())?;
    // Time for a kill between the effect and the word about it.
    tokio::time::sleep(Duration::from_millis(2)).await;
    Ok(before)
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let args: HashMap<String, String> = args
        .filter_map(|arg| arg.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = args.get("store").ok_or("recipe: store= is missing")?;
        let keeper = loop {
            match Lockkeeper::open(store).await {
                // Started while the store is away: that is part of the test.
                Err(Error::Unavailable(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
                opened => break opened?,
            }
        };
        let process = Process { keeper, args };
        match what.as_str() {
            "add" => process.add().await,
            "once" => process.once().await,
            "lead" => process.lead().await,
            "windows" => process.windows().await,
            _ => Err(format!("recipe: {what:?} is not add, once, lead or windows").into()),
        }
    })
}
