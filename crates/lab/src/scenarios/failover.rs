//! The grant that was not replicated: a Redis primary dies, its replica is promoted, and a second holder gets in.

use futures_util::FutureExt;
use lockkeeper::Result;
use lockkeeper_testkit::servers::{self, RedisOptions};

use super::late_writer::{self, ABOUT_TO_WRITE, CHECKED};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::needs::Need;
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NAIVE: &str = "SET NX PX";
const SAFE: &str = "Lockkeeper on Redis, fence check";
const LOCK: &str = "settlement";
const A: &str = "worker A";
const B: &str = "worker B";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "failover",
    title: "the grant that was not replicated",
    story: "Redis acknowledges a write before its replica has it. Worker A gets the lock from the primary; the primary dies before the \
            replica hears of it; the replica is promoted and gives the lock to worker B. Both hold it, and neither was slow. \
            Lockkeeper's Redis store cannot prevent this either, and says so: it refuses locks for correctness on such a pair. \
            Its fences still grow, so a resource that checks them refuses worker A.",
    watch: "worker B gets the lock after the failover, while worker A still believes that it holds it",
    needs: &[Need::Redis],
    any_store: false,
    seconds: (5, 3),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way != NAIVE {
        return late_writer::work(worker).await;
    }
    let naive = worker.naive_lock()?;
    worker.take(&naive, LOCK, Some(worker.plan.ttl)).await?;
    if worker.plan.role == "first" {
        worker.note(ABOUT_TO_WRITE);
        worker.until("write").await;
        worker.figure("held_at_write", 1.0);
    }
    std::fs::write(worker.path("resource"), &worker.actor).map_err(unavailable)?;
    worker.wrote(&format!("written by {}", worker.actor), None, Ok(()))?;
    if worker.plan.role != "first" {
        worker.until("release").await;
    }
    worker.ends(LOCK, "leaves");
    Ok(())
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "the common lock on Redis, and a resource that takes every write")?,
        lab.half(SAFE, "the same failover, and a resource that refuses a lower fence")?,
    ];
    halves.iter_mut().for_each(|half| half.ttl = std::time::Duration::from_secs(60));
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "both_held") == 1.0);
    let (naive, safe) = (outcome.number(0, "wrong_value"), outcome.number(1, "wrong_value"));
    let refused = outcome.number(1, "refused");
    Ok(outcome
        .fault("worker B got the lock from the promoted replica while worker A held it", fired)
        .naive("the write of worker A replaced that of worker B", naive == 1.0)
        .safe("the resource refused worker A by its fence", safe == 0.0 && refused == 1.0)
        .conclude(format!(
            "The failover made two holders of one lock both times; SET NX PX let {} through, the fence {safe}.",
            amount(naive, "old {write|writes}")
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let mut pair = servers::redis_pair(RedisOptions::default())?;
    half.begin();
    pair.cut_replication();
    half.fault("replication", "the replica hears nothing more of the primary");
    half.store = format!("redis://{}", pair.primary().addr());
    half.start(A, "first")?;
    let held = half.expect_note(A, ABOUT_TO_WRITE)?;
    half.beat()?;
    pair.promote();
    half.fault("failover", "the primary dies, and the replica takes its place");
    half.store = format!("redis://{}", pair.replica().addr());
    half.start(B, "second")?;
    let granted = half.expect_hold(B)?;
    let written = half.expect_write(B)?;
    half.beat()?;
    half.send(A, "write");
    let late = half.expect_write(A)?;
    half.expect_end(A)?;
    half.beat()?;
    half.send(B, "release");
    half.expect_end(B)?;
    let believed = half.figures("held_at_write").iter().sum::<f64>() == 1.0;
    let both = believed && held.t < granted.t && granted.t < late.t;
    if half.way().ends_with(CHECKED) {
        late_writer::count(half, &written, &late);
    } else {
        let last = std::fs::read_to_string(half.path("resource"))?;
        half.damage(late.t, "the old write replaced the newer one");
        half.harm("wrong_value", u8::from(last == A), format!("wrong value at the end: by {last}"));
    }
    half.count("both_held", u8::from(both), "{lock|locks} with two holders");
    Ok(())
}
