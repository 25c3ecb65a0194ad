//! Many instances, one hot key that has just expired: each of them computes it, or one does.

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::half::{LabHalf, lines_of};
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NAIVE: &str = "a cache";
const SAFE: &str = "cached";
const KEY: &str = "catalogue";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "stampede",
    title: "200 instances, one hot key that has just expired",
    story: "A page is cached for five minutes, and computing it costs a second of a database. When it expires, every instance misses it \
            in the same moment, and every one of them computes it: the database gets 200 times its load, exactly when the load \
            is highest. Lockkeeper's `cached` lets one caller compute; the others wait for its value, or get the old one.",
    watch: "blue: an instance computes; dots: it waits for the value",
    needs: &[],
    any_store: true,
    seconds: (6, 4),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    worker.note("ready");
    worker.until("go").await;
    worker.waits(KEY);
    if worker.plan.way == NAIVE {
        // The common way: look, compute on a miss, put.
        let cache = worker.path("cache");
        if fs::read_to_string(&cache).is_err() {
            let page = compute(&worker).await?;
            fs::write(&cache, page).map_err(unavailable)?;
        }
    } else {
        let cached =
            keeper.cached(worker.name(KEY)).ttl(Duration::from_secs(300)).lease(Duration::from_secs(60));
        let page = cached.get(async |_| compute(&worker).await.map_err(|e| e.to_string())).await;
        page.map_err(|e| unavailable(format!("{e:?}")))?;
    }
    worker.ends(KEY, "has");
    worker.figure("served", 1.0);
    Ok(())
}

async fn compute(worker: &LabWorker) -> Result<String> {
    worker.holds(KEY, None);
    let file = File::options().create(true).append(true).open(worker.path("queries"));
    file.and_then(|mut file| file.write_all(b"SELECT\n")).map_err(unavailable)?;
    tokio::time::sleep(worker.plan.work).await;
    Ok(format!("the page, computed by {}", worker.actor))
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "look into the cache, compute on a miss, put the value into the cache")?,
        lab.half(SAFE, "keeper.cached(key): one caller of all processes computes, the others wait for it")?,
    ];
    for half in &mut halves {
        half.work = lab.millis(1500, 700);
        half.holders = 0;
    }
    let (processes, each) = if lab.is_fast() { (3, 8) } else { (10, 20) };
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, |half| direct(half, processes, each))?);
    let (naive, safe) = (outcome.number(0, "queries"), outcome.number(1, "queries"));
    let all = f64::from(processes * each);
    let served = (0..2).all(|half| outcome.number(half, "served") == all);
    Ok(outcome
        .fault("every instance asked for the value that was not there", served)
        .naive("several instances computed the value", naive > 1.0)
        .safe("one instance computed it, and all were served", safe == 1.0)
        .conclude(format!(
            "{all} instances missed one key at once: a plain cache sent {} to the database, cached {safe}.",
            amount(naive, "{query|queries}")
        )))
}

fn direct(half: &mut LabHalf, processes: u32, each: u32) -> std::result::Result<(), LabError> {
    half.start_crew("web", "instance", processes, each)?;
    half.begin();
    half.send_all("go");
    half.expect_all_ended()?;
    let queries = lines_of(&half.path("queries"));
    let served = half.figures("served").len() as u32;
    half.count("queries", queries, "{query|queries} of the database");
    half.harm("wasted", queries.saturating_sub(1), "{query|queries} too many");
    half.count("served", served, "{instance|instances} served");
    Ok(())
}
