//! A holder is killed: how long the next one waits, with a long ttl without renewal, and on each store at hand.

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::half::{LabHalf, seconds_between};
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::servers;
use crate::worker::LabWorker;

const NAIVE: &str = "no renewal";
const LOCK: &str = "report";
/// The ttl on the SQLite store, which does not wait for it: the kernel says that a process is dead.
const LONG: Duration = Duration::from_secs(30);

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "crash",
    title: "a holder is killed: how long until the next one works?",
    story: "Worker A holds the lock and is killed by kill -9; worker B waits. A lock without renewal needs a ttl that is longer than \
            the longest work, and after a crash every waiter pays all of it. A lock that is renewed can have a short ttl, \
            whatever the work takes. On one host no ttl is needed: the SQLite store sees that the process is dead.",
    watch: "the gap between the kill (✖) and the grant to worker B, on each store at hand",
    needs: &[],
    any_store: true,
    seconds: (12, 4),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way == NAIVE {
        let naive = worker.naive_lock()?;
        worker.take(&naive, LOCK, Some(worker.plan.ttl)).await?;
        worker.until("release").await;
        worker.ends(LOCK, "releases");
        return naive.free(&worker.name(LOCK));
    }
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    worker.until("release").await;
    worker.release(guard, LOCK).await
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let ttl = lab.millis(2000, 800);
    let mut naive = lab.half(NAIVE, "the ttl has to cover the longest work, so it is four times as long")?;
    naive.ttl = ttl * 4;
    let mut halves = vec![naive];
    // They live as long as the halves.
    let servers = if lab.store().is_none() && !lab.is_fast() { servers::at_hand()? } else { Vec::new() };
    let default = lab.store().and_then(|url| url.split(':').next()).unwrap_or("sqlite").to_owned();
    let how = |ttl: Duration| format!("Lockkeeper renews a lease of {} s", ttl.as_secs_f64());
    let mut own = lab.half(&default, &how(if default == "sqlite" { LONG } else { ttl }))?;
    own.ttl = if default == "sqlite" { LONG } else { ttl };
    halves.push(own);
    for server in &servers {
        let mut half = lab.half(server.name, &how(ttl))?;
        (half.ttl, half.store) = (ttl, server.url.clone());
        halves.push(half);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let stores = 1..outcome.halves.len();
    let fired = (0..stores.end).all(|half| outcome.number(half, "killed_holder") == 1.0);
    let waited = outcome.number(0, "whole_ttl") == 1.0;
    let exclusive = stores.clone().all(|half| outcome.number(half, "overlaps") == 0.0);
    let at_once = default != "sqlite" || outcome.number(1, "take_over") < LONG.as_secs_f64();
    let list = stores.map(|half| {
        let (way, gap) = (&outcome.halves[half].way, outcome.number(half, "take_over"));
        format!("{way} {gap:.2} s")
    });
    let conclusion = format!(
        "After the kill the next worker waited {:.2} s without renewal, and with Lockkeeper: {}.",
        outcome.number(0, "take_over"),
        list.collect::<Vec<_>>().join(", ")
    );
    Ok(outcome
        .fault("worker A was killed while it held the lock and worker B waited", fired)
        .naive("the next worker waited for the whole ttl", waited)
        .safe("no two workers held the lock at once", exclusive)
        .safe("on SQLite the next worker did not wait for the ttl", at_once)
        .conclude(conclusion))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    half.start("worker A", "worker")?;
    let asked = half.expect_wait("worker A")?;
    let held = half.expect_hold("worker A")?;
    half.start("worker B", "worker")?;
    half.expect_wait("worker B")?;
    half.kill("worker A");
    let killed = half.events().last().cloned().unwrap_or_else(|| held.clone());
    let next = half.expect_hold("worker B")?;
    half.send("worker B", "release");
    half.expect_end("worker B")?;
    let ttl = half.ttl.as_secs_f64();
    let overlaps = half.overlaps();
    half.count("take_over", seconds_between(&killed, &next), format!("s without a worker (ttl {ttl} s)"));
    half.harm("overlaps", overlaps, "{time|times} that two workers believed to hold the lock");
    half.evidence("killed_holder", u8::from(held.t < killed.t && killed.t < next.t));
    if half.way() == NAIVE {
        // The ttl counts from a moment after the request. A hundredth of leeway: the row has the wall clock.
        let whole = seconds_between(&asked, &next) > ttl * 0.99;
        half.evidence("whole_ttl", u8::from(whole));
    }
    Ok(())
}
