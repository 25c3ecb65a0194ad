//! Many workers, one lock: the wait grows with the queue, the hold does not. Finer names end the queue.

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::event::{LabEvent, LabEventKind, now};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::timeline::SpanKind;
use crate::worker::LabWorker;

const COARSE: &str = "one lock";
const FINE: &str = "a lock per shelf";
/// How many shelves there are.
const SHELVES: u32 = 10;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "contention",
    title: "50 workers, half a second each: wait against hold",
    story: "Each of 50 workers needs the warehouse for half a second. With one lock for the warehouse they work one after the other, and \
            the last one waits for 24.5 s to work for 0.5 s. The lock is not slow; it is held. A faster store changes nothing, \
            and neither does a shorter ttl. Two workers at different shelves have nothing to do with each other: a lock per \
            shelf lets them work at the same time.",
    watch: "the staircase of the waiting workers, and how it falls apart into ten",
    needs: &[],
    any_store: true,
    seconds: (28, 4),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    let process: u32 = worker.plan.role.parse().unwrap_or(0);
    let shelf = (process * 7 + worker.index) % SHELVES;
    let lock =
        if worker.plan.way == COARSE { "warehouse".into() } else { format!("warehouse/shelf-{shelf}") };
    worker.note("ready");
    worker.until("go").await;
    let asked = now();
    let guard = worker.acquire(&keeper, &lock).await?;
    worker.figure("wait", worker.seconds_since(asked));
    let granted = now();
    tokio::time::sleep(worker.plan.work).await;
    worker.figure("hold", worker.seconds_since(granted));
    worker.release(guard, &lock).await
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(COARSE, "each worker locks the warehouse")?,
        lab.half(FINE, "each worker locks the shelf that it works at, one of ten")?,
    ];
    for half in &mut halves {
        half.work = lab.millis(500, 150);
        half.ttl = std::time::Duration::from_secs(30);
    }
    let (processes, each) = if lab.is_fast() { (2, 6) } else { (10, 5) };
    let hold = halves[0].work.as_secs_f64();
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, |half| direct(half, processes, each))?);
    let workers = f64::from(processes * each);
    let [longest, mean, held] = ["longest_wait", "mean_wait", "mean_hold"].map(|key| outcome.number(0, key));
    let fine = outcome.number(1, "longest_wait");
    // True on every machine: the last grant comes after the holds of all others.
    let queued = outcome.number(0, "queue") >= (workers - 1.0) * hold * 0.99;
    let all = (0..2).all(|half| outcome.number(half, "done") == workers);
    let (one, several) = (outcome.number(0, "at_once"), outcome.number(1, "at_once"));
    Ok(outcome
        .fault("all workers asked for the lock", all)
        .naive("one worker worked at a time, and the last one waited for all others", one == 1.0 && queued)
        .safe("workers at different shelves worked at the same time", several > 1.0)
        .conclude(format!(
            "{workers} workers that held for {held:.2} s each waited for {mean:.1} s on average and {longest:.1} s at most; with a lock per shelf {fine:.1} s at most."
        )))
}

fn direct(half: &mut LabHalf, processes: u32, each: u32) -> std::result::Result<(), LabError> {
    half.start_crew("clerk", "", processes, each)?;
    half.begin();
    half.send_all("go");
    half.expect_all_ended()?;
    let (waits, holds) = (half.figures("wait"), half.figures("hold"));
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    half.count("longest_wait", waits.iter().copied().fold(0.0, f64::max), "s: the longest wait");
    half.count("mean_wait", mean(&waits), "s: the mean wait");
    half.count("mean_hold", mean(&holds), "s: the mean hold");
    half.count("at_once", most_at_once(half), "{worker|workers} at most at work at once");
    let is = |event: &&LabEvent, begin: bool| match event.kind {
        LabEventKind::Waits { .. } => begin,
        LabEventKind::Holds { .. } => !begin,
        _ => false,
    };
    let first = half.events().iter().filter(|event| is(event, true)).map(|event| event.t).min();
    let last = half.events().iter().filter(|event| is(event, false)).map(|event| event.t).max();
    let queue = last.unwrap_or(0).saturating_sub(first.unwrap_or(0)) as f64 / 1e9;
    half.evidence("queue", queue);
    half.count("done", waits.len() as u32, "{worker|workers} that got the work done");
    Ok(())
}

/// How many workers held a lock at the same moment, at most.
fn most_at_once(half: &LabHalf) -> u32 {
    let timeline = half.timeline();
    let spans = timeline.tracks.iter().flat_map(|track| &track.spans);
    let mut changes: Vec<(f64, i32)> = spans
        .filter(|span| span.kind == SpanKind::Holds)
        .flat_map(|span| [(span.from, 1), (span.to, -1)])
        .collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut now, mut most) = (0, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    most as u32
}
