//! A holder is stopped for longer than its ttl, and writes when it continues.

use futures_util::FutureExt;

use super::late_writer::{self, CHECKED, UNCHECKED};
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "pause",
    title: "a holder is stopped past its ttl, and writes when it continues",
    story: "Worker A gets the lock with fence 33, checks that it still holds it, and is stopped before it writes: a garbage \
            collection, a virtual machine that is moved, a laptop lid. Its lease ends, worker B gets the lock with fence 34 and \
            writes. Then worker A continues, in the middle of the line after its check, and writes as well. Both halves use \
            the same lock of the same store: no lock can prevent this. Only the resource can, if it compares fences.",
    watch: "worker A is stopped (▒); worker B gets the lock and writes; then worker A continues and writes late",
    needs: &[],
    any_store: true,
    seconds: (5, 2),
    run,
    work: |worker| late_writer::work(worker).boxed_local(),
};

fn run(lab: &Lab) -> Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(UNCHECKED, "the resource takes every write")?,
        lab.half(CHECKED, "the resource refuses a fence that is lower than one it has seen")?,
    ];
    for half in &mut halves {
        half.ttl = lab.millis(4000, 1500);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, late_writer::direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "fired") == 1.0);
    let (stale, refused) = (outcome.number(0, "stale_writes"), outcome.number(1, "refused"));
    let kept = outcome.number(1, "wrong_value") == 0.0;
    Ok(outcome
        .fault("worker B got the lock with a higher fence while worker A was stopped", fired)
        .naive("the resource without a check took the stale write", stale == 1.0)
        .safe("the resource with a check refused it, and kept the value of worker B", refused == 1.0 && kept)
        .conclude(format!(
            "The same lock, the same pause: without a fence check the resource took {}, with it {} (it refused {refused}).",
            amount(stale, "stale {write|writes}"),
            1.0 - refused
        )))
}
