//! The holder is cut off from ZooKeeper, for less and for more than its session: who has the lock afterwards?

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::{Guard, Result};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::resource::{CheckedFile, UncheckedFile};
use lockkeeper_testkit::servers::{self, ZooKeeperOptions};

use crate::event::LabEventKind;
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::needs::Need;
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const DEAF: &str = "a long cut, a holder that does not look";
const SAFE: &str = "a long cut, a guard and a fence check";
const SHORT: &str = "a short cut";
const LOCK: &str = "leader";
const A: &str = "worker A";
const B: &str = "worker B";

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "partition",
    title: "the holder is cut off for less and for more than its session",
    story: "A ZooKeeper session lasts 2 s without a word from its client. A cut of half a second changes nothing: the client connects again, \
            within its session, and holds as before. A cut of 3 s ends the session at the servers, and worker B gets the lock. \
            Worker A hears nothing of that: the news would have to come through the cut. A client that waits for the news goes on \
            writing. Lockkeeper's guard counts the time itself, and reports the loss before the servers can grant the lock again.",
    watch: "when worker A stops to believe that it holds, and when worker B begins",
    needs: &[Need::ZooKeeper],
    any_store: false,
    seconds: (9, 7),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    let guard = worker.acquire(&keeper, LOCK).await?;
    if worker.plan.role == "second" {
        write(&worker, &guard)?;
        worker.until("release").await;
        return worker.release(guard, LOCK).await;
    }
    match worker.plan.way.as_str() {
        SAFE => {
            let error = guard.lost().await;
            worker.figure("reported", 1.0);
            worker.ends_at_deadline(&guard, LOCK, format!("{error}:"));
            worker.until("write").await;
            // A part of the program that did not hear of the loss.
            write(&worker, &guard)?;
        }
        SHORT => {
            worker.until("write").await;
            worker.figure("still_held", f64::from(u8::from(guard.is_held())));
            write(&worker, &guard)?;
            worker.until("release").await;
            return worker.release(guard, LOCK).await;
        }
        _ => {
            worker.until("write").await;
            write(&worker, &guard)?;
            worker.ends(LOCK, "never looked at");
        }
    }
    // Its connection may be cut still: the session ends the hold.
    Ok(())
}

fn write(worker: &LabWorker, guard: &Guard) -> Result<()> {
    let (path, fence) = (worker.path("resource"), guard.fence());
    let answer = match worker.plan.way.as_str() {
        DEAF => UncheckedFile::new(path).write(fence, &worker.actor),
        _ => CheckedFile::new(path).write(fence, &worker.actor),
    };
    worker.wrote(&format!("written by {}", worker.actor), Some(fence), answer)
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(DEAF, "cut off for longer than the session; the holder waits for news, and its resource checks nothing")?,
        lab.half(SAFE, "cut off for longer than the session; the guard counts the time itself, and the resource checks the fence")?,
        lab.half(SHORT, "cut off for half a second, with a session of 4 s")?,
    ];
    halves.iter_mut().for_each(|half| half.ttl = Duration::from_secs(2));
    // Room for a busy machine: the cut is an eighth of the session.
    halves[2].ttl = Duration::from_secs(4);
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let taken = (0..2).all(|half| outcome.number(half, "granted_to_b") == 1.0);
    let (stale, refused) = (outcome.number(0, "stale_writes"), outcome.number(1, "stale_writes"));
    let both = [outcome.number(0, "overlaps"), outcome.number(1, "overlaps")];
    let kept = outcome.number(2, "still_held") == 1.0 && outcome.number(2, "granted_to_b") == 0.0;
    Ok(outcome
        .fault("the long cut ended the session, and worker B got the lock", taken)
        .naive("the holder that did not look wrote beside worker B", stale == 1.0 && both[0] > 0.0)
        .safe("the guard reported the loss before worker B got the lock", both[1] == 0.0)
        .safe("the fence refused the late write", refused == 0.0)
        .safe("after the short cut worker A still had the lock", kept)
        .conclude(format!(
            "After a cut past the session worker B had the lock: {} by a holder that waited for news, {refused} past the fence; after a short cut worker A had it still.",
            amount(stale, "stale {write|writes}")
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let server = servers::zookeeper(ZooKeeperOptions::default())?;
    let proxy = Proxy::start(server.addr(), Framing::Bytes);
    half.store = format!("zk://{}", proxy.addr());
    half.begin();
    half.start(A, "first")?;
    half.expect_hold(A)?;
    half.store = format!("zk://{}", server.addr());
    half.start(B, "second")?;
    half.expect_wait(B)?;
    half.beat()?;
    [Direction::Requests, Direction::Replies].into_iter().for_each(|way| proxy.hold(way));
    if half.way() == SHORT {
        short_cut(half, &proxy)?
    } else {
        long_cut(half, &proxy)?
    }
    let got = half
        .events()
        .iter()
        .find(|e| e.is_by(B) && matches!(e.kind, LabEventKind::Holds { .. }))
        .map(|e| e.t);
    let late = half.expect_write(A)?;
    let before = got.is_some_and(|got| got < late.t);
    let stale = before && matches!(late.kind, LabEventKind::Wrote { .. });
    if stale {
        half.damage(late.t, "a holder of before wrote beside worker B");
    }
    half.send_all("release");
    half.expect_all_ended()?;
    let overlaps = half.overlaps();
    half.harm("stale_writes", u8::from(stale), "stale {write|writes} that the resource took");
    half.harm("overlaps", overlaps, "{time|times} that two workers believed to hold the lock");
    half.count("granted_to_b", u8::from(before), "{grant|grants} to worker B after the cut");
    let held = half.figures("still_held").iter().sum::<f64>();
    half.need_lease(A, half.way() == SHORT && held == 0.0)?;
    half.count("still_held", held, "{holder|holders} of before with the lock after the cut");
    Ok(())
}

fn long_cut(half: &mut LabHalf, proxy: &Proxy) -> std::result::Result<(), LabError> {
    half.fault("network", "worker A is cut off");
    half.expect_write(B)?;
    half.beat()?;
    half.send(A, "write");
    half.expect_write(A)?;
    half.beat()?;
    proxy.heal();
    half.fault("network", "the cut is over");
    Ok(())
}

fn short_cut(half: &mut LabHalf, proxy: &Proxy) -> std::result::Result<(), LabError> {
    half.fault("network", "worker A is cut off for a moment");
    half.pass(Duration::from_millis(500))?;
    proxy.heal();
    half.fault("network", "the cut is over");
    half.send(A, "write");
    half.expect_write(A).map(drop)
}
