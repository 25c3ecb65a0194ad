//! A pause that is longer than the ttl, and the two stories that follow: the next holder has finished, or is in the middle.

use futures_util::FutureExt;
use lockkeeper::{Fence, Result};
use lockkeeper_testkit::resource::Ledger;

use crate::event::LabEvent;
use crate::event::LabEventKind;
use crate::half::{LabHalf, seconds_between};
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const DONE_UNCHECKED: &str = "B has finished: no check";
const DONE_CHECKED: &str = "B has finished: writes checked";
const MIDDLE_WRITES: &str = "B is in the middle: writes checked";
const MIDDLE_READS: &str = "B is in the middle: reads checked too";
const LOCK: &str = "account";
const A: &str = "worker A";
const B: &str = "worker B";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "gc",
    title: "a pause of 8 s with a ttl of 5 s: two stories, and what fencing changes in each",
    story: "Two workers add 10 to an account. Worker A reads the balance and pauses past its ttl, for instance to collect garbage. Story \
            one: worker B reads, writes and finishes meanwhile; the late write of A replaces it, and a fence check of writes \
            prevents that. Story two: B has read and not yet written when A continues. Now a check of writes alone lets A in, \
            because the resource has not seen the fence of B yet, and then B overwrites A: an addition is lost although every write \
            was checked. The resource must see the fence with the read as well: reading for a write is part of the write.",
    watch: "in which order worker B reads and writes, and when worker A continues",
    needs: &[],
    any_store: true,
    seconds: (11, 3),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    let (way, fence) = (worker.plan.way.clone(), guard.fence());
    let dir = worker.path("accounts");
    std::fs::create_dir_all(&dir).map_err(unavailable)?;
    let ledger = if way == DONE_UNCHECKED { Ledger::unfenced(dir) } else { Ledger::new(dir) };
    if way == MIDDLE_READS {
        // From here on the account refuses lower fences.
        ledger.look(LOCK, fence)?;
    }
    let balance = balance(&ledger)?;
    worker.note(format!("reads the balance {balance}"));
    worker.until("write").await;
    enter(&worker, &ledger, fence, balance + 10)?;
    worker.release(guard, LOCK).await
}

fn balance(ledger: &Ledger) -> Result<u32> {
    let last = ledger.entries(LOCK)?.pop();
    last.map_or(Ok(0), |entry| entry.value.parse().map_err(unavailable))
}

fn enter(worker: &LabWorker, ledger: &Ledger, fence: Fence, balance: u32) -> Result<()> {
    let answer = ledger.enter(LOCK, fence, &balance.to_string());
    worker.wrote(&format!("balance {balance}"), Some(fence), answer)
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(
            DONE_UNCHECKED,
            "story one: worker B has written before worker A continues; nothing is checked",
        )?,
        lab.half(
            DONE_CHECKED,
            "story one: the account refuses a write with a lower fence than one it has seen",
        )?,
        lab.half(
            MIDDLE_WRITES,
            "story two: worker B has read, and not yet written; only writes show their fence",
        )?,
        lab.half(MIDDLE_READS, "story two: the account sees the fence with the read already")?,
    ];
    for half in &mut halves {
        half.ttl = lab.millis(5000, 1500);
        // The pause.
        half.work = lab.millis(8000, 2400);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..4).all(|half| outcome.number(half, "paused_past_ttl") == 1.0);
    let lost: Vec<f64> = (0..4).map(|half| outcome.number(half, "lost_updates")).collect();
    Ok(outcome
        .fault("worker B read the balance while worker A was stopped", fired)
        .naive("story one without a check: an addition was lost", lost[0] == 1.0)
        .naive("story two with a check of writes only: an addition was lost", lost[2] == 1.0)
        .safe("story one with a check of writes: no accepted addition was lost", lost[1] == 0.0)
        .safe("story two with a check of reads: no accepted addition was lost", lost[3] == 0.0)
        .conclude(format!(
            "Lost additions when B had finished: {} without a check, {} with checked writes; when B was in the middle: {} with checked writes, {} with checked reads.",
            lost[0], lost[1], lost[2], lost[3]
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    half.start(A, "worker")?;
    expect_read(half, A)?;
    half.start(B, "worker")?;
    half.expect_wait(B)?;
    half.stop(A);
    let stopped = half.events().last().map_or(0, |event| event.t);
    let read = expect_read(half, B)?;
    let finished = half.way() == DONE_UNCHECKED || half.way() == DONE_CHECKED;
    if finished {
        half.send(B, "write");
        half.expect_end(B)?;
    }
    let paused =
        seconds_between(&LabEvent { t: stopped, ..read.clone() }, &LabEvent::now(A, LabEventKind::Gone));
    half.pass(half.work.saturating_sub(std::time::Duration::from_secs_f64(paused)))?;
    half.send(A, "write");
    half.resume(A);
    let late = half.expect_write(A)?;
    half.expect_end(A)?;
    half.beat()?;
    if !finished {
        half.send(B, "write");
        half.expect_end(B)?;
    }
    count(half, &read, &late, stopped)
}

fn expect_read(half: &mut LabHalf, actor: &str) -> std::result::Result<LabEvent, LabError> {
    half.expect("a read", |event| {
        event.is_by(actor) && matches!(&event.kind, LabEventKind::Note { text } if text.starts_with("reads"))
    })
}

fn count(
    half: &mut LabHalf,
    read: &LabEvent,
    late: &LabEvent,
    stopped: u64,
) -> std::result::Result<(), LabError> {
    let taken =
        half.events().iter().filter(|event| matches!(event.kind, LabEventKind::Wrote { .. })).count() as u32;
    let last = balance(&Ledger::new(half.path("accounts")))?;
    let lost = taken.saturating_sub(last / 10);
    let at = half.events().iter().filter(|event| event.is_write()).map(|event| event.t).max().unwrap_or(0);
    if lost > 0 {
        half.damage(at, format!("{taken} additions were taken, and the balance is {last}"));
    }
    let refused = matches!(late.kind, LabEventKind::Refused { .. });
    half.harm("lost_updates", lost, "accepted {addition|additions} lost");
    half.count("accepted", taken, "{addition|additions} that the account took");
    half.count("refused", u8::from(refused), "late {addition|additions} that the account refused");
    half.evidence("paused_past_ttl", u8::from(stopped < read.t && read.t < late.t));
    Ok(())
}
