//! Twelve instances of a nightly job, one settlement: with nothing, with a lock, and with `once` alone.

use std::fs::File;
use std::io::Write;

use futures_util::FutureExt;
use lockkeeper::Result;

use crate::half::{LabHalf, lines_of};
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NOTHING: &str = "nothing";
const WAIT: &str = "a lock, waited for";
const SKIP: &str = "a lock, skipped if busy";
const ONCE: &str = "once, no lock";
const JOB: &str = "settlement";
/// The hosts, and the one whose clock is late.
const HOSTS: u32 = 12;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "cron",
    title: "twelve hosts, one settlement: what a lock really buys",
    story: "The same crontab on twelve hosts. Eleven of them start at 02:00:00, and the clock of one is a few seconds late. With nothing, \
            twelve settlements run. A lock that each host waits for lets them run one after the other: still twelve. A lock \
            that a busy host skips leaves two: the late host finds the lock free, because a lock says who is at work, and not \
            what is done. `once` records that the work is done, under a key such as the date, and needs no lock around it.",
    watch: "how many hosts get to work (●), and when the late host comes",
    needs: &[],
    any_store: true,
    seconds: (8, 5),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let late = worker.index == 0 && worker.plan.role == "late";
    let keeper = worker.keeper().await?;
    worker.note("ready");
    worker.until(if late { "go late" } else { "go" }).await;
    match worker.plan.way.as_str() {
        ONCE => {
            worker.waits(JOB);
            let once = keeper.once(worker.name(JOB)).keep(std::time::Duration::from_secs(60));
            let done = once
                .run(async |fence| {
                    worker.holds(JOB, Some(fence));
                    settle(&worker).await.map_err(|e| e.to_string())
                })
                .await?;
            worker.ends(JOB, if done.replayed { "finds done" } else { "has done" });
        }
        SKIP => match keeper.lock(worker.name(JOB)).ttl(worker.plan.ttl).try_acquire().await? {
            Some(guard) => {
                worker.holds(JOB, Some(guard.fence()));
                settle(&worker).await?;
                worker.release(guard, JOB).await?;
            }
            None => worker.note("skips: the lock is busy"),
        },
        WAIT => {
            let guard = worker.acquire(&keeper, JOB).await?;
            settle(&worker).await?;
            worker.release(guard, JOB).await?;
        }
        _ => {
            worker.holds(JOB, None);
            settle(&worker).await?;
            worker.ends(JOB, "has done");
        }
    }
    worker.note("done");
    Ok(())
}

async fn settle(worker: &LabWorker) -> Result<()> {
    tokio::time::sleep(worker.plan.work).await;
    let file = File::options().create(true).append(true).open(worker.path("ledger"));
    let line = format!("paid by {}\n", worker.actor);
    file.and_then(|mut file| file.write_all(line.as_bytes())).map_err(unavailable)?;
    worker.wrote(&format!("paid by {}", worker.actor), None, Ok(()))
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NOTHING, "each host runs the job")?,
        lab.half(WAIT, "each host waits for the lock, then runs the job")?,
        lab.half(SKIP, "a host runs the job if the lock is free")?,
        lab.half(ONCE, "the store records that the job of this date is done")?,
    ];
    for half in &mut halves {
        half.work = lab.millis(400, 200);
    }
    // More processes, or more instances in each.
    let processes = if lab.is_fast() { 2 } else { HOSTS };
    let halves = lab.side_by_side(halves, |half| direct(half, processes))?;
    let outcome = ScenarioOutcome::new(halves);
    let paid: Vec<f64> = (0..4).map(|half| outcome.number(half, "settlements")).collect();
    let fired = (0..4).all(|half| outcome.number(half, "late") == 1.0);
    Ok(outcome
        .fault("the late host came after the first settlement had ended", fired)
        .naive("with nothing each host settled", paid[0] == f64::from(HOSTS))
        .naive("with a lock that is waited for each host settled too", paid[1] == f64::from(HOSTS))
        .naive("with a lock that is skipped the late host settled again", paid[2] >= 2.0)
        .safe("with once there was one settlement", paid[3] == 1.0)
        .conclude(format!(
            "Of one settlement that was due, nothing made {}, a lock that is waited for {}, a lock that is skipped {}, and once {}.",
            paid[0], paid[1], paid[2], paid[3]
        )))
}

fn direct(half: &mut LabHalf, processes: u32) -> std::result::Result<(), LabError> {
    // Each host is there before one starts.
    for number in 1..=processes {
        let role = if number == processes { "late" } else { "in time" };
        half.start_many(&format!("host {number}"), role, HOSTS / processes)?;
    }
    half.expect_notes("ready", HOSTS as usize)?;
    half.send_all("go");
    half.expect_notes("done", HOSTS as usize - 1)?;
    let first = half.expect("the first settlement", |event| event.is_write())?;
    half.fault("late host", "the clock of the last host strikes 02:00");
    let late = half.events().last().map_or(0, |event| event.t);
    half.send_all("go late");
    half.expect_all_ended()?;
    let settlements = lines_of(&half.path("ledger"));
    if settlements > 1 {
        half.damage(late, format!("{settlements} settlements instead of 1"));
    }
    half.count("settlements", settlements, "{settlement|settlements}, of the 1 that was due");
    half.harm("double", settlements.saturating_sub(1), "{payment|payments} too many");
    let overlaps = half.overlaps();
    half.count("overlaps", overlaps, "{time|times} that hosts settled at once");
    half.evidence("late", u8::from(first.t < late));
    Ok(())
}
