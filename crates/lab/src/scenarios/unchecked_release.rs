//! A release that does not check its owner frees the lock of the next holder, and the cascade goes on.

use futures_util::FutureExt;
use lockkeeper::{ReleaseOutcome, Result};

use crate::event::{LabEvent, LabEventKind};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const NAIVE: &str = "bare DEL";
const SAFE: &str = "checked release";
const LOCK: &str = "deploy";
const A: &str = "worker A";
const B: &str = "worker B";
const C: &str = "worker C";
const D: &str = "worker D";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "unchecked-release",
    title: "a bare DEL frees the lock of the next holder, and of the one after it",
    story: "Worker A is stopped past its ttl, and worker B gets the lock: so far every lock does the same. Then worker A continues, \
            finishes and deletes the lock. A bare DEL deletes whatever is there: the lock of worker B, who still works. LabWorker C \
            gets in beside worker B; when B finishes, its DEL frees the lock of C, and D gets in beside C. One late holder has \
            turned the lock off for as long as there is a queue. Lockkeeper's release presents its attempt, 128 random bits, and \
            the store changes nothing if the lock has another holder.",
    watch: "after the release of worker A, worker C gets in beside worker B, and worker D beside worker C",
    needs: &[],
    any_store: true,
    seconds: (6, 2),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way == NAIVE {
        let naive = worker.naive_lock()?;
        // Only the ttl of worker A matters; the others get one that cannot end by itself here.
        let ttl = if worker.actor == A { worker.plan.ttl } else { worker.plan.ttl * 100 };
        worker.take(&naive, LOCK, Some(ttl)).await?;
        worker.until("release").await;
        worker.ends(LOCK, "deletes");
        return naive.free(&worker.name(LOCK));
    }
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    worker.until("release").await;
    worker.ends(LOCK, "releases");
    let gone = guard.release().await? == ReleaseOutcome::AlreadyGone;
    worker.note(if gone { "the store: the lock is not yours any more" } else { "the store: released" });
    worker.figure("already_gone", f64::from(u8::from(gone)));
    Ok(())
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "the release deletes the lock by its name")?,
        lab.half(
            SAFE,
            "the release presents the attempt; the store deletes the lock only if it is the holder's",
        )?,
    ];
    halves.iter_mut().for_each(|half| half.ttl = lab.millis(2000, 1500));
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "late_release") == 1.0);
    let (naive, safe) = (outcome.number(0, "freed"), outcome.number(1, "freed"));
    Ok(outcome
        .fault("worker A released after worker B had got the lock", fired)
        .naive("the release of A let C in beside B, and the release of B let D in beside C", naive == 2.0)
        .safe("each worker got in after the release of the one before it", safe == 0.0)
        .conclude(format!(
            "One late release freed {} of other holders by a bare DEL, and {safe} by a release that presents its attempt.",
            amount(naive, "{lock|locks}")
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let naive = half.way() == NAIVE;
    half.start(A, "worker")?;
    half.expect_hold(A)?;
    half.start(B, "worker")?;
    half.expect_wait(B)?;
    half.stop(A);
    let granted = half.expect_hold(B)?;
    half.start(C, "worker")?;
    half.expect_wait(C)?;
    half.beat()?;
    half.resume(A);
    half.send(A, "release");
    let late = half.expect_release(A)?;
    half.expect_end(A)?;
    // The naive worker C gets in now. The safe one must not, and its order is checked at the end.
    if naive {
        half.expect_hold(C)?;
    }
    half.beat()?;
    half.start(D, "worker")?;
    half.expect_wait(D)?;
    half.send(B, "release");
    half.expect_hold(C)?;
    if naive {
        half.expect_hold(D)?;
    }
    half.beat()?;
    half.send(C, "release");
    half.expect_hold(D)?;
    half.send(D, "release");
    half.expect_all_ended()?;
    let refused = half.figures("already_gone").iter().sum::<f64>();
    half.need_lease("another worker", refused > 1.0)?;
    let freed =
        [(B, C), (C, D)].into_iter().filter(|(earlier, later)| is_beside(half, earlier, later)).count();
    if let Some(at) = half.events().iter().find(|e| is_hold(e, C)).map(|e| e.t).filter(|_| freed > 0) {
        half.damage(at, "worker C is let in beside worker B");
    }
    if let Some(at) = half.events().iter().find(|e| is_hold(e, D)).map(|e| e.t).filter(|_| freed > 1) {
        half.damage(at, "worker D is let in beside worker C");
    }
    half.harm("freed", freed as u32, "{lock|locks} of other holders that a release freed");
    half.evidence("late_release", u8::from(granted.t < late.t));
    half.count("refused", refused, "{release|releases} that the store refused");
    Ok(())
}

fn is_hold(event: &LabEvent, actor: &str) -> bool {
    event.is_by(actor) && matches!(event.kind, LabEventKind::Holds { .. })
}

/// Whether `later` got the lock while `earlier` still held it.
fn is_beside(half: &LabHalf, earlier: &str, later: &str) -> bool {
    let ended =
        half.events().iter().find(|e| e.is_by(earlier) && matches!(e.kind, LabEventKind::Ends { .. }));
    let began = half.events().iter().find(|e| is_hold(e, later));
    matches!((ended, began), (Some(ended), Some(began)) if began.t < ended.t)
}
