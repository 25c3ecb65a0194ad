//! Tasks that want one cached value, all at the same moment: through the guard, or without it.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use lockkeeper::{Clock, Fence, SystemClock};
use lockkeeper_host::host_name;

use crate::{RecipeFailure, RecipeProcess};

/// Work that takes a moment, and writes a line when it begins: `FENCE PID NANOSECONDS`. The first run of all takes `first`.
async fn compute(runs: String, fence: u64, first: Duration) -> Result<Vec<u8>, String> {
    let line = format!("{fence} {} {}\n", std::process::id(), SystemClock.now().as_nanos());
    let file = File::options().create(true).append(true).open(&runs);
    file.and_then(|mut file| file.write_all(line.as_bytes())).map_err(|e| e.to_string())?;
    let is_first = std::fs::read_to_string(&runs).is_ok_and(|text| text.lines().count() == 1);
    tokio::time::sleep(if is_first { first } else { Duration::from_millis(50) }).await;
    Ok(format!("computed by {} with {fence}", host_name()).into_bytes())
}

impl RecipeProcess {
    /// Every task looks, and finds no value that it could use. When all processes have looked and `go` exists, every task
    /// gets the value: with `guard=no` each one computes it, as callers of a cache do that have no guard.
    pub async fn cached(&self) -> Result<(), RecipeFailure> {
        let (tasks, lease): (usize, u64) = (self.arg("tasks").parse()?, self.arg("lease_ms").parse()?);
        let first = Duration::from_millis(self.arg("first_ms").parse()?);
        let mut callers = Vec::new();
        for _ in 0..tasks {
            let key = self.arg("key");
            let cached =
                self.keeper.cached(key).lease(Duration::from_millis(lease)).ttl(Duration::from_secs(3600));
            assert!(cached.current().await?.is_none(), "there is a value before the start");
            callers.push(cached);
        }
        File::create(format!("{}.{}", self.arg("looked"), std::process::id()))?;
        while !Path::new(self.arg("go")).exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let guarded = self.arg("guard") == "yes";
        let mut running = tokio::task::JoinSet::new();
        for cached in callers {
            let runs = self.arg("runs").to_owned();
            running.spawn(async move {
                let work = |fence: Fence| compute(runs.clone(), fence.get(), first);
                if guarded {
                    cached.get_bytes(work).await.map(|found| found.value).map_err(|e| e.to_string())
                } else {
                    compute(runs.clone(), 0, Duration::from_millis(50)).await
                }
            });
        }
        // One call each: a kill comes before or after it, never within.
        let mut values = File::options().create(true).append(true).open(self.arg("values"))?;
        while let Some(value) = running.join_next().await {
            let value = String::from_utf8(value??)?;
            values.write_all(format!("{value}\n").as_bytes())?;
        }
        Ok(())
    }
}
