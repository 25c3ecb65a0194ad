//! A process that uses a recipe, for tests that kill and stop real processes.
//!
//! ```text
//! recipe add  store=URL name=KEY times=N               adds to a register, one by one
//! recipe once store=URL keys=N dir=DIR results=FILE    does N keys in an order of its own, each once
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use lockkeeper::{Error, Fence, Lockkeeper};
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

/// Leaves its mark in the key's own file, unless an earlier run did or a newer one was seen: what it leaves is the result.
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
        let process = Process { keeper: Lockkeeper::open(store).await?, args };
        match what.as_str() {
            "add" => process.add().await,
            "once" => process.once().await,
            _ => Err(format!("recipe: {what:?} is not add or once").into()),
        }
    })
}
