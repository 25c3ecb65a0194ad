//! The worth of a heartbeat: it keeps a slow holder, does nothing for a frozen one, and keeps a hung one for ever.

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;

use super::late_writer::{self, CHECKED, UNCHECKED};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const SLOW: &str = "slow";
const FROZEN: &str = "frozen, no check";
const FENCED: &str = "frozen, fence check";
const HUNG: &str = "hung, heartbeat only";
const PROGRESS: &str = "hung, must make progress";
const LOCK: &str = "settlement";
const A: &str = "worker A";
const B: &str = "worker B";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "heartbeat",
    title: "renewal keeps a slow holder, and does nothing for a frozen one",
    story: "A heartbeat renews the lease while the holder works. It keeps a slow holder, as it should. A frozen process sends none: its \
            lease ends, and it wakes up late, so the fence is still needed. And a process whose work hangs while its heartbeat \
            goes on keeps the lock for ever: all others wait for a worker that does nothing. `progress_within` couples the \
            renewal to the work: without a step of it, the renewal ends.",
    watch: "who gets the lock from a slow, a frozen and a hung worker A, and when",
    needs: &[],
    any_store: true,
    seconds: (12, 4),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if [FROZEN, FENCED].contains(&worker.plan.way.as_str()) {
        return late_writer::work(worker).await;
    }
    let keeper = worker.keeper().await?;
    if worker.plan.role != "first" {
        let guard = worker.acquire(&keeper, LOCK).await?;
        return worker.release(guard, LOCK).await;
    }
    worker.waits(LOCK);
    let mut request = keeper.lock(worker.name(LOCK)).ttl(worker.plan.ttl);
    if worker.plan.way == PROGRESS {
        request = request.progress_within(worker.plan.ttl);
    }
    let guard = request.acquire().await?;
    worker.holds(LOCK, Some(guard.fence()));
    if worker.plan.way == SLOW {
        tokio::time::sleep(worker.plan.work).await;
        worker.wrote("the slow work", Some(guard.fence()), Ok(()))?;
        return worker.release(guard, LOCK).await;
    }
    worker.note("hangs: its heartbeat goes on, its work does not");
    tokio::select! {
        error = guard.lost() => {
            worker.ends_at_deadline(&guard, LOCK, format!("{error}:"));
            Ok(())
        }
        () = worker.until("give up") => worker.release(guard, LOCK).await,
    }
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(FROZEN, "worker A is stopped, and so is its heartbeat; the resource takes every write")?,
        lab.half(FENCED, "the same, and the resource checks the fence")?,
        lab.half(HUNG, "the work of worker A hangs, and its heartbeat goes on")?,
        lab.half(PROGRESS, "the same, with progress_within: no progress, no renewal")?,
        lab.half(SLOW, "worker A works for three times the ttl, and its heartbeat renews the lease")?,
    ];
    for half in &mut halves {
        half.ttl = lab.millis(3000, 1500);
        half.work = half.ttl * 3;
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "fired") == 1.0);
    let stale: Vec<f64> = (0..2).map(|half| outcome.number(half, "stale_writes")).collect();
    let [hung, coupled] = [2, 3].map(|half| outcome.number(half, "stuck"));
    let slow = outcome.number(4, "kept") == 1.0 && outcome.number(4, "overlaps") == 0.0;
    let kept = outcome.number(4, "holds_of_ttl");
    Ok(outcome
        .fault("worker B got the lock while worker A was frozen", fired)
        .naive("the frozen worker wrote late", stale[0] == 1.0)
        .naive("no worker got the lock of the hung one", hung == 1.0)
        .safe("the fence refused the frozen worker", stale[1] == 0.0)
        .safe("without progress the lock of the hung worker ended", coupled == 0.0)
        .safe("the slow worker kept its lock, alone", slow)
        .conclude(format!(
            "A heartbeat kept a slow holder for {kept:.1} ttls; of a frozen one {} came through, and {} past a fence check; a hung one kept the lock until progress was asked for.",
            amount(stale[0], "stale {write|writes}"),
            stale[1]
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    match half.way() {
        way if way.ends_with(UNCHECKED) || way.ends_with(CHECKED) => late_writer::direct(half),
        SLOW => slow(half),
        _ => hung(half),
    }
}

fn slow(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    half.start(A, "first")?;
    let held = half.expect_hold(A)?;
    half.start(B, "second")?;
    half.expect_wait(B)?;
    let released = half.expect_release(A)?;
    let next = half.expect_hold(B)?;
    half.expect_all_ended()?;
    half.need_lease(A, half.has_lost(A))?;
    let kept = Duration::from_nanos(released.t - held.t).as_secs_f64() / half.ttl.as_secs_f64();
    let overlaps = half.overlaps();
    half.count("holds_of_ttl", kept, "ttls that worker A kept the lock");
    half.evidence("kept", u8::from(kept > 1.0 && released.t < next.t));
    half.harm("overlaps", overlaps, "{time|times} that two workers believed to hold the lock");
    Ok(())
}

fn hung(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    half.start(A, "first")?;
    half.expect_hold(A)?;
    half.start(B, "second")?;
    let waits = half.expect_wait(B)?;
    let stuck = half.way() == HUNG;
    if stuck {
        // As long as the slow one works, and nothing happens.
        half.pass(half.work)?;
        half.need_lease(A, half.has_lost(A))?;
        let got =
            half.events().iter().any(|e| e.is_by(B) && matches!(e.kind, crate::LabEventKind::Holds { .. }));
        half.harm("stuck", u8::from(!got), "{worker|workers} waiting for one that does nothing");
        half.damage(waits.t, "the lock is renewed, and no work is done");
        half.send(A, "give up");
    } else {
        half.expect_hold(B)?;
        half.harm("stuck", 0, "{worker|workers} waiting for one that does nothing");
    }
    half.expect_all_ended()
}
