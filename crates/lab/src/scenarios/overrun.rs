//! Work that takes longer than the ttl: without renewal two workers believe that they hold, with it one.

use std::fs;

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::event::LabEventKind;
use crate::half::{LabHalf, seconds_between};
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NAIVE: &str = "no renewal";
const SAFE: &str = "renewal";
const LOCK: &str = "account";
const ACTORS: [&str; 2] = ["worker A", "worker B"];

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "overrun",
    title: "the work takes twice as long as the ttl",
    story: "Two workers add 10 to an account: they read the balance when they get the lock, and write it when the work is done. \
            The ttl was chosen for a good day, and today the work takes twice as long. Without renewal the lock ends in the \
            middle of the work, the second worker reads the old balance, and one of the two additions is lost. No process was \
            paused and no server failed. Lockkeeper's guard renews its lease while the worker works.",
    watch: "without renewal both workers believe that they hold the lock (red); with it worker B waits",
    needs: &[],
    any_store: true,
    seconds: (9, 3),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way == NAIVE {
        let naive = worker.naive_lock()?;
        worker.take(&naive, LOCK, Some(worker.plan.ttl)).await?;
        add(&mut worker).await?;
        worker.ends(LOCK, "releases");
        naive.free(&worker.name(LOCK))
    } else {
        let keeper = worker.keeper().await?;
        let guard = worker.acquire(&keeper, LOCK).await?;
        add(&mut worker).await?;
        worker.release(guard, LOCK).await
    }
}

async fn add(worker: &mut LabWorker) -> Result<()> {
    let path = worker.path("balance");
    let balance: u32 = match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().map_err(unavailable)?,
        Err(_) => 0,
    };
    worker.note(format!("reads the balance {balance}, and works"));
    tokio::time::sleep(worker.plan.work).await;
    worker.until("finish").await;
    let balance = balance + 10;
    fs::write(&path, balance.to_string()).map_err(unavailable)?;
    worker.wrote(&format!("balance {balance}"), None, Ok(()))
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(
            NAIVE,
            "a row with a time stamp, or SET NX PX: the lock ends after the ttl, whatever its holder does",
        )?,
        lab.half(SAFE, "Lockkeeper renews the lease while the holder works")?,
    ];
    for half in &mut halves {
        half.ttl = lab.millis(2000, 1500);
        half.work = half.ttl * 2;
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "over_ttl") > 0.0);
    let (lost, kept) = (outcome.number(0, "lost_updates"), outcome.number(1, "lost_updates"));
    let (two, one) = (outcome.number(0, "overlaps"), outcome.number(1, "overlaps"));
    let clean = kept == 0.0 && one == 0.0;
    Ok(outcome
        .fault("the work took longer than the ttl", fired)
        .naive("both workers believed that they hold the lock, and an addition was lost", two > 0.0 && lost > 0.0)
        .safe("one worker at a time, and no addition was lost", clean)
        .conclude(format!(
            "A ttl is a guess about the slowest day: without renewal it cost {lost} of 2 additions, with renewal {kept}."
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let [first, second] = ACTORS;
    half.start(first, "worker")?;
    let held = half.expect_hold(first)?;
    half.start(second, "worker")?;
    half.expect_wait(second)?;
    if half.way() == NAIVE {
        // Only then does worker A finish: the second belief does not depend on a quick machine.
        half.expect("worker B reads the balance", |event| {
            event.is_by(second) && matches!(event.kind, LabEventKind::Note { .. })
        })?;
    }
    half.send(first, "finish");
    let written = half.expect_write(first)?;
    half.expect_hold(second)?;
    half.send(second, "finish");
    let last = half.expect_write(second)?;
    half.expect_all_ended()?;
    half.need_lease(first, half.has_lost(first))?;
    let balance: u32 = fs::read_to_string(half.path("balance"))?.trim().parse().unwrap_or(0);
    let lost = 2u32.saturating_sub(balance / 10);
    if lost > 0 {
        half.damage(last.t, format!("the balance is {balance} instead of 20"));
    }
    let overlaps = half.overlaps();
    half.harm("overlaps", overlaps, "{time|times} that two workers believed to hold the lock");
    half.harm("lost_updates", lost, "lost {addition|additions}");
    half.count("balance", balance, "balance at the end, of 20");
    let over = seconds_between(&held, &written) - half.ttl.as_secs_f64();
    half.count("over_ttl", over, "s that the work went on after the ttl");
    Ok(())
}
