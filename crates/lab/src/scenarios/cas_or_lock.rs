//! Compare-and-swap against a lock as contention grows: throughput, wasted work, and where the curves cross.

use std::hint::black_box;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use lockkeeper::register::{Register, Swap};
use lockkeeper::{Lockkeeper, Result};

use crate::event::LabEventKind;
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::{ChartSeries, LabChart, ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const NEITHER: &str = "neither";
const CAS: &str = "compare-and-swap";
const LOCK: &str = "lock";
const KEY: &str = "counter";
/// The processor time of a computation.
const COST: Duration = Duration::from_millis(8);

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "cas-or-lock",
    title: "compare-and-swap or a lock, as contention grows",
    story: "Workers read a value, compute for 8 ms, and write it. With neither a lock nor a comparison, updates are lost. Compare-and-swap \
            needs no lock, and costs least when conflicts are rare; each conflict throws a computation away, and many workers keep the \
            processors busy with work that is thrown away. A lock costs two more round trips, and wastes nothing: the others wait \
            instead. Where the curves cross depends on the cost of the work and of the store.",
    watch: "updates that were kept per second, and computations that were thrown away",
    needs: &[],
    any_store: true,
    seconds: (32, 8),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    let number: u32 = worker.plan.role.parse().unwrap_or(1);
    worker.note("ready");
    loop {
        let command = worker.command().await;
        let Some(count) = command.strip_prefix("run ").and_then(|n| n.parse::<u32>().ok()) else {
            return Ok(());
        };
        let (mut kept, mut wasted) = (0u32, 0u32);
        let register = keeper.register::<u64>(worker.name(&format!("{KEY}-{count}")));
        let register = register.ttl(Duration::from_secs(600));
        let begin = Instant::now();
        // A few updates also on a machine that is busy with other things.
        while number <= count && (begin.elapsed() < worker.plan.work || kept < 5) {
            if update(&worker, &keeper, &register).await? { kept += 1 } else { wasted += 1 }
        }
        let seconds = begin.elapsed().as_secs_f64();
        worker.figure(&format!("kept/s {count}"), f64::from(kept) / seconds);
        worker.figure(&format!("wasted/s {count}"), f64::from(wasted) / seconds);
        worker.figure(&format!("kept {count}"), kept.into());
        worker.figure(&format!("wasted {count}"), wasted.into());
        worker.note(format!("ran {count}"));
        if number == count {
            worker.until("value").await;
            let value = register.read().await?.map_or(0, |entry| entry.value);
            worker.figure(&format!("value {count}"), value as f64);
            worker.note(format!("value {count}"));
        }
    }
}

/// One update. `false`: its computation was thrown away.
async fn update(worker: &LabWorker, keeper: &Lockkeeper, register: &Register<u64>) -> Result<bool> {
    let guard = match worker.plan.way.as_str() {
        LOCK => Some(keeper.lock(worker.name(KEY)).ttl(worker.plan.ttl).acquire().await?),
        _ => None,
    };
    let old = register.read().await?;
    let next = compute(old.as_ref().map_or(0, |entry| entry.value));
    let kept = match worker.plan.way.as_str() {
        CAS => {
            matches!(register.compare_and_set(old.map(|entry| entry.fence), &next).await?, Swap::Swapped(_))
        }
        _ => register.update(|_| next).await.map(|_| true)?,
    };
    if let Some(guard) = guard {
        guard.release().await?;
    }
    Ok(kept)
}

/// Costs processor time, and adds one.
fn compute(value: u64) -> u64 {
    let begin = Instant::now();
    let mut waste = value;
    while begin.elapsed() < COST {
        waste = black_box(waste.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
    value + 1
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let counts: &[u32] = if lab.is_fast() { &[1, 4] } else { &[1, 2, 4, 8, 12] };
    let ways = [
        (NEITHER, "read, compute, write"),
        (CAS, "register.compare_and_set: a write of an old value is refused, and computed anew"),
        (LOCK, "lock, read, compute, write, release"),
    ];
    // One after the other: beside each other they would measure each other.
    let mut halves = Vec::new();
    for (way, how) in ways {
        let mut half = lab.half(way, how)?;
        half.work = lab.millis(2000, 700);
        half.ttl = Duration::from_secs(30);
        half.holders = 0;
        halves.extend(lab.side_by_side([half], |half| direct(half, counts))?);
    }
    let curve = |half: &LabHalf, figure: &str| ChartSeries {
        name: half.way().to_owned(),
        points: counts.iter().map(|n| (f64::from(*n), total(half, figure, *n))).collect(),
    };
    let chart = |title: &str, y: &str, figure: &str| LabChart {
        title: title.to_owned(),
        x: "workers".to_owned(),
        y: y.to_owned(),
        series: halves[1..].iter().map(|half| curve(half, figure)).collect(),
    };
    let charts = vec![
        chart("Updates that were kept", "per second", "kept/s"),
        chart("Computations that were thrown away", "per second", "wasted/s"),
    ];
    let crossing = crossing(&charts[0]);
    let mut outcome = ScenarioOutcome::new(halves);
    outcome.charts = charts;
    let wasted: Vec<f64> = (0..3).map(|half| outcome.number(half, "wasted")).collect();
    let lost: Vec<f64> = (0..3).map(|half| outcome.number(half, "lost_updates")).collect();
    let all = (0..3).all(|half| outcome.number(half, "kept") > 0.0);
    let alone = outcome.number(1, "wasted_alone") == 0.0;
    Ok(outcome
        .fault("the workers updated the same value at the same time", all)
        .naive("with neither, updates were lost", lost[0] > 0.0)
        .naive("compare-and-swap threw computations away under contention, and none without", wasted[1] > 0.0 && alone)
        .safe("no update was lost by compare-and-swap or by the lock", lost[1] == 0.0 && lost[2] == 0.0)
        .safe("the lock threw no computation away", wasted[2] == 0.0)
        .conclude(format!(
            "Neither lost {}; compare-and-swap lost {} and threw {} away, the lock lost {} and threw {} away; {crossing}.",
            amount(lost[0], "{update|updates}"),
            lost[1],
            amount(wasted[1], "{computation|computations}"),
            lost[2],
            wasted[2]
        )))
}

/// Where the lock overtakes compare-and-swap.
fn crossing(chart: &LabChart) -> String {
    let [cas, lock] = &chart.series[..] else { return String::new() };
    let over = cas.points.iter().zip(&lock.points).find(|(cas, lock)| lock.1 > cas.1);
    match over {
        Some((point, _)) => {
            format!("from {} on the lock kept more updates per second", amount(point.0, "{worker|workers}"))
        }
        None => "compare-and-swap kept more updates per second throughout".to_owned(),
    }
}

/// The sum of a figure over the workers of one step.
fn total(half: &LabHalf, figure: &str, count: u32) -> f64 {
    half.figures(&format!("{figure} {count}")).iter().sum()
}

fn direct(half: &mut LabHalf, counts: &[u32]) -> std::result::Result<(), LabError> {
    let most = counts.iter().copied().max().unwrap_or(1);
    half.start_crew("worker", "", most, 1)?;
    let mut lost = 0.0;
    for count in counts {
        half.send_all(&format!("run {count}"));
        half.expect_notes(&format!("ran {count}"), most as usize)?;
        half.send(&format!("worker {count}"), "value");
        let value = format!("value {count}");
        half.expect("the value", |e| matches!(&e.kind, LabEventKind::Note { text } if *text == value))?;
        lost += total(half, "kept", *count) - total(half, "value", *count);
    }
    half.send_all("end");
    half.expect_all_ended()?;
    let sum = |figure: &str| counts.iter().map(|n| total(half, figure, *n)).sum::<f64>();
    let (kept, wasted, alone) = (sum("kept"), sum("wasted"), total(half, "wasted", counts[0]));
    half.harm("lost_updates", lost, "{update|updates} lost");
    half.count("kept", kept, "{update|updates} that the workers believed to be kept");
    half.count("wasted", wasted, "{computation|computations} thrown away");
    half.evidence("wasted_alone", alone);
    Ok(())
}
