//! A plain file cannot check a fence: a lock around it is an efficiency lock in a correctness costume. `fenced-write` can.

use futures_util::FutureExt;

use super::late_writer::{self, FENCED_WRITE, PLAIN_FILE};
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "costume",
    title: "a plain file: an efficiency lock in a correctness costume",
    story: "The report must never go back to an older version, so every writer takes a lock, replaces the file by a careful rename, and \
            releases the lock. It looks correct. But a file takes every writer, and so one that was stopped past its ttl puts \
            the old report back. With `lockkeeper fenced-write` the file keeps the highest fence beside it, and refuses the late writer.",
    watch: "worker A continues after worker B has written, and renames its old report over the new one",
    needs: &[],
    any_store: true,
    seconds: (5, 2),
    run,
    work: |worker| late_writer::work(worker).boxed_local(),
};

fn run(lab: &Lab) -> Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(PLAIN_FILE, "each writer holds the lock and renames a new file over the old one")?,
        lab.half(FENCED_WRITE, "the same, by fenced-write: the highest fence stands beside the file")?,
    ];
    halves.iter_mut().for_each(|half| half.ttl = lab.millis(4000, 1500));
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, late_writer::direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "fired") == 1.0);
    let (wrong, kept) = (outcome.number(0, "wrong_value"), outcome.number(1, "wrong_value"));
    Ok(outcome
        .fault("worker B got the lock with a higher fence while worker A was stopped", fired)
        .naive("the plain file went back to the report of worker A", wrong == 1.0)
        .safe("fenced-write kept the report of worker B", kept == 0.0)
        .conclude(format!(
            "A lock around a plain file let {} through; fenced-write let {kept} through.",
            amount(wrong, "stale {report|reports}")
        )))
}
