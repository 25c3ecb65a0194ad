//! A lock without a ttl: its holder dies, and everyone waits until a person looks.

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::event::{LabEvent, LabEventKind};
use crate::half::{LabHalf, seconds_between};
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const NAIVE: &str = "no ttl";
const SAFE: &str = "a lease";
const LOCK: &str = "import";
const WAITERS: [&str; 3] = ["worker B", "worker C", "worker D"];

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "no-ttl",
    title: "the holder dies, and everyone waits until a person looks",
    story: "A lock file, a row `locked = true`, a SETNX without an expiry: the holder is killed, and nothing ends the lock. The other \
            workers wait, without an error, until an operator finds out which row to delete, and hopes that the holder is really \
            dead. The run lets the operator come after a few seconds; at night it takes longer. A lease ends by itself.",
    watch: "after the kill nothing happens until the operator deletes the lock (◆)",
    needs: &[],
    any_store: true,
    seconds: (9, 3),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let task = Duration::from_millis(100);
    if worker.plan.way == NAIVE {
        let naive = worker.naive_lock()?;
        worker.take(&naive, LOCK, None).await?;
        done(&mut worker, task).await?;
        worker.ends(LOCK, "releases");
        return naive.free(&worker.name(LOCK));
    }
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    done(&mut worker, task).await?;
    worker.release(guard, LOCK).await
}

/// The first worker works until it is killed.
async fn done(worker: &mut LabWorker, task: Duration) -> Result<()> {
    if worker.plan.role == "first" {
        worker.until("never").await;
    }
    tokio::time::sleep(task).await;
    worker.wrote(&format!("imported by {}", worker.actor), None, Ok(()))
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "the lock is taken until its holder deletes it")?,
        lab.half(
            SAFE,
            "the lock ends with its lease, or at once where the store sees that the process is dead",
        )?,
    ];
    for half in &mut halves {
        half.ttl = lab.millis(2000, 700);
        // When the operator comes, in the naive half.
        half.work = half.ttl * 3;
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "killed_holder") == 1.0);
    let stood = outcome.number(0, "operators") == 1.0 && outcome.number(0, "before_operator") == 0.0;
    let by_itself =
        outcome.number(1, "operators") == 0.0 && outcome.number(1, "done") == WAITERS.len() as f64;
    let conclusion = format!(
        "Without a ttl nothing worked for {:.1} s, until a person deleted the lock; with a lease the next worker began after {:.2} s by itself.",
        outcome.number(0, "standstill"),
        outcome.number(1, "standstill")
    );
    Ok(outcome
        .fault("the holder was killed while three workers waited", fired)
        .naive("no worker got the lock before the operator deleted it", stood)
        .safe("every waiter worked, and no operator was needed", by_itself)
        .conclude(conclusion))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let naive = half.way() == NAIVE;
    half.start("worker A", "first")?;
    let held = half.expect_hold("worker A")?;
    for waiter in WAITERS {
        half.start(waiter, "next")?;
        half.expect_wait(waiter)?;
    }
    half.beat()?;
    half.kill("worker A");
    let killed = half.events().last().cloned().unwrap_or_else(|| held.clone());
    let is_hold = |event: &&LabEvent| event.t > killed.t && matches!(event.kind, LabEventKind::Holds { .. });
    if naive {
        half.pass(half.work)?;
        let before = half.events().iter().filter(is_hold).count();
        half.evidence("before_operator", before as u32);
        half.fault("operator", "an operator deletes the lock by hand");
        half.naive_lock()?.free(&half.name(LOCK))?;
    }
    half.expect_all_ended()?;
    let first = half.events().iter().filter(is_hold).min_by_key(|event| event.t).cloned();
    let standstill = first.map_or(0.0, |event| seconds_between(&killed, &event));
    if naive {
        half.damage(killed.t, format!("no work for {standstill:.1} s"));
    }
    half.count("standstill", standstill, "s in which no worker worked");
    half.harm("operators", u8::from(naive), "{person|persons} who had to look");
    let done = half.events().iter().filter(|event| event.is_write()).count();
    half.count("done", done as u32, "{import|imports} of 3 done in the end");
    half.evidence("killed_holder", u8::from(held.t < killed.t));
    Ok(())
}
