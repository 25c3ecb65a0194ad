//! A rate limit for each user: behind a lock, or as a token bucket. One client stops in the middle of its decision.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use lockkeeper::limit::PER_SECOND;
use lockkeeper::{Lockkeeper, Result};

use crate::event::{LabEventKind, now};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NAIVE: &str = "a lock per user";
const SAFE: &str = "a token bucket";
const USER: &str = "rate/user-7";
const CLIENTS: u32 = 3;
/// Decisions per second that are allowed, and at once.
const RATE: u64 = 20;
/// The decisions of the bucket that the director waits for while one client is stopped.
const ENOUGH: usize = 20;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "bucket-or-lock",
    title: "a rate limit: a lock per user, or a token bucket",
    story: "A service allows 20 requests per second and user. The obvious way: lock the user, read the times of the last requests, decide, \
            write them back, release. Every request of the user pays for a lock, and when one web server stops in the middle, no \
            request of that user gets an answer until the lease ends. A token bucket decides in one atomic step of the store: no \
            process ever holds anything, so none can keep it from the others.",
    watch: "client 1 is stopped in the middle: how many answers the others get",
    needs: &[],
    any_store: true,
    seconds: (8, 3),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let keeper = worker.keeper().await?;
    worker.note("ready");
    if worker.plan.role == "stops" {
        worker.until("go").await;
        return stop(&mut worker, &keeper).await;
    }
    worker.until("go").await;
    let mut commands = worker.later_commands();
    while commands.is_empty() {
        let asked = now();
        let allowed = match worker.plan.way.as_str() {
            NAIVE => {
                let guard = keeper.lock(worker.name(USER)).ttl(worker.plan.ttl).acquire();
                // The end of the run also ends a wait for the stopped client.
                let guard = tokio::select! {
                    guard = guard => guard?,
                    _ = commands.recv() => return Ok(()),
                };
                let allowed = decide(&worker)?;
                guard.release().await?;
                allowed
            }
            _ => keeper.limit(worker.name(USER)).rate(RATE, PER_SECOND).take(1).await?.allowed(),
        };
        worker.figure("decision", worker.seconds_since(asked));
        worker.figure("allowed", f64::from(u8::from(allowed)));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// The client that is stopped: in the critical section, or after its token.
async fn stop(worker: &mut LabWorker, keeper: &Lockkeeper) -> Result<()> {
    if worker.plan.way == NAIVE {
        let guard = worker.acquire(keeper, USER).await?;
        worker.note("in the middle");
        worker.until("end").await;
        return worker.release(guard, USER).await;
    }
    let _taken = keeper.limit(worker.name(USER)).rate(RATE, PER_SECOND).take(1).await?;
    worker.note("in the middle");
    worker.until("end").await;
    Ok(())
}

/// The decision in the critical section: the times of the last second, from a file.
fn decide(worker: &LabWorker) -> Result<bool> {
    let path = worker.path("times");
    let text = fs::read_to_string(&path).unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut times: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    times.retain(|time| now - time < 1.0);
    let allowed = (times.len() as u64) < RATE;
    if allowed {
        times.push(now);
    }
    let text: String = times.iter().map(|time| format!("{time}\n")).collect();
    fs::write(path, text).map_err(unavailable)?;
    Ok(allowed)
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "lock the user, read, decide, write, release")?,
        lab.half(SAFE, "keeper.limit(user).rate(20, PER_SECOND).take(1): one step of the store")?,
    ];
    for half in &mut halves {
        half.ttl = Duration::from_secs(30);
        half.work = lab.millis(3000, 700);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let before = (0..2).all(|half| outcome.number(half, "before") > 0.0);
    let (naive, safe) = (outcome.number(0, "during"), outcome.number(1, "during"));
    let (lock, bucket) = (outcome.number(0, "millis"), outcome.number(1, "millis"));
    Ok(outcome
        .fault("clients got decisions, and then one client was stopped in the middle", before)
        .naive("no other client got a decision meanwhile", naive == 0.0)
        .safe("the others got their decisions", safe >= ENOUGH as f64)
        .conclude(format!(
            "While one client was stopped the others got {naive} decisions behind the lock and {safe} from the bucket; a decision took {lock:.1} ms and {bucket:.1} ms."
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    for number in 2..CLIENTS + 2 {
        half.start(&format!("client {number}"), "asks")?;
    }
    half.expect_notes("ready", CLIENTS as usize)?;
    half.send_all("go");
    let is_decision = |event: &crate::LabEvent| matches!(&event.kind, LabEventKind::Figure { name, .. } if name == "decision");
    half.expect_count("decisions", 30, is_decision)?;
    half.start("client 1", "stops")?;
    half.expect_notes("ready", CLIENTS as usize + 1)?;
    half.send("client 1", "go");
    let middle = half.expect_note("client 1", "in the middle")?.t;
    half.stop("client 1");
    let stopped = half.events().last().map_or(middle, |event| event.t);
    half.pass(half.work)?;
    let after = |half: &LabHalf, t: u64| half.events().iter().filter(|e| is_decision(e) && e.t > t).count();
    if half.way() == SAFE {
        while after(half, stopped) < ENOUGH {
            half.pass(Duration::from_millis(20))?;
        }
    }
    let (during, times) = (after(half, stopped) as u32, half.figures("decision"));
    let before = half.events().iter().filter(|e| is_decision(e) && e.t < middle).count() as u32;
    if during == 0 {
        half.damage(stopped, "no request of this user gets an answer");
    }
    half.send_all("end");
    half.resume("client 1");
    half.expect_all_ended()?;
    let mean = times.iter().sum::<f64>() / times.len().max(1) as f64 * 1000.0;
    half.count("before", before, "{decision|decisions} before the stop");
    half.count("during", during, "{decision|decisions} while client 1 was stopped");
    half.harm("silent", u8::from(during == 0), "{user|users} without any answer");
    half.count("millis", mean, "ms per decision");
    Ok(())
}
