//! Two locks in two orders: a wait for ever, and three ways out of it.

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::{Error, Guard, Lockkeeper, Owner, Result};

use crate::event::{LabEventKind, now};
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const NAIVE: &str = "two orders";
const ALL: &str = "one request for both";
const DETECTED: &str = "detected by the store";
const WAIT: &str = "a wait time";
const ACTORS: [&str; 2] = ["worker A", "worker B"];

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "deadlock",
    title: "two locks in two orders",
    story: "A transfer locks both accounts. Worker A locks account 1, then account 2; worker B locks account 2, then account 1. Each \
            holds what the other one waits for, and both wait for ever, without an error. Three ways out: request both locks at \
            once, which holds none while it waits; say who the owner is, and the store refuses the request that would close the \
            cycle; or give each wait an end, and start over.",
    watch: "two blue bars that never end, and the three halves in which both workers finish",
    needs: &[],
    any_store: true,
    seconds: (6, 4),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    let (first, second) =
        if worker.actor == ACTORS[0] { ("account-1", "account-2") } else { ("account-2", "account-1") };
    if worker.plan.way == NAIVE {
        let naive = worker.naive_lock()?;
        worker.take(&naive, first, None).await?;
        worker.until("go").await;
        return worker.take(&naive, second, None).await;
    }
    let keeper = worker.keeper().await?;
    let began = now();
    if worker.plan.way == ALL {
        worker.until("go").await;
        worker.waits("both");
        let names = [worker.name(first), worker.name(second)];
        let guard = keeper.lock_all(names).ttl(worker.plan.ttl).acquire().await?;
        worker.holds("both", Some(guard.fence()));
        transfer(&worker).await?;
        worker.release(guard, "both").await?;
    } else {
        one_after_the_other(&mut worker, &keeper, first, second).await?;
    }
    worker.figure("seconds", worker.seconds_since(began));
    Ok(())
}

async fn one_after_the_other(
    worker: &mut LabWorker,
    keeper: &Lockkeeper,
    first: &str,
    second: &str,
) -> Result<()> {
    let owner = Owner::from_bytes(lockkeeper_host::random_128());
    let mut tries = 0;
    loop {
        let one = ask(worker, keeper, &owner, first).await?;
        if tries == 0 {
            worker.until("go").await;
        }
        tries += 1;
        match ask(worker, keeper, &owner, second).await {
            Ok(two) => {
                transfer(worker).await?;
                worker.release(two, second).await?;
                return worker.release(one, first).await;
            }
            Err(Error::Deadlock(_)) => {
                worker.ends(second, "the store refuses the wait for");
                worker.figure("refused", 1.0);
            }
            Err(Error::Busy(_)) => {
                worker.ends(second, "gives up after the wait time:");
                worker.figure("gave_up", 1.0);
            }
            Err(error) => return Err(error),
        }
        worker.release(one, first).await?;
        // The other worker gets its turn.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn ask(worker: &LabWorker, keeper: &Lockkeeper, owner: &Owner, lock: &str) -> Result<Guard> {
    worker.waits(lock);
    let mut request = keeper.lock(worker.name(lock)).ttl(worker.plan.ttl);
    if worker.plan.way == DETECTED {
        request = request.owner(*owner);
    } else {
        // Different times, so that the two do not give up and start over in step.
        request = request.wait(worker.plan.work * if worker.actor == ACTORS[0] { 1 } else { 8 });
    }
    let guard = request.acquire().await?;
    worker.holds(lock, Some(guard.fence()));
    Ok(guard)
}

async fn transfer(worker: &LabWorker) -> Result<()> {
    tokio::time::sleep(Duration::from_millis(200)).await;
    worker.wrote(&format!("transfer by {}", worker.actor), None, Ok(()))
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = vec![
        lab.half(NAIVE, "each worker locks one account, then the other, and waits for ever")?,
        lab.half(ALL, "lock_all: one request for both names, which holds neither while it waits")?,
        lab.half(WAIT, "a wait ends after a while; the worker releases what it holds and starts over")?,
    ];
    // Some stores find no cycles, and say so in their profile.
    let detects = lab.finds_deadlocks()?;
    if detects {
        let how = "each request names its owner, and the store refuses the wait that would close the cycle";
        halves.push(lab.half(DETECTED, how)?);
    }
    for half in &mut halves {
        half.ttl = Duration::from_secs(30);
        half.work = lab.millis(1000, 500);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let done = |half: usize| outcome.number(half, "done");
    let crossed = outcome.number(0, "crossed") == 2.0;
    let (stuck, both, waited) = (done(0), done(1), done(2));
    let gave_up = outcome.number(2, "gave_up");
    let detected = detects.then(|| (done(3), outcome.number(3, "refused")));
    let by_store = match detected {
        Some((done, refused)) => {
            format!("a store that refused {} did {done}", amount(refused, "{wait|waits}"))
        }
        None => "this store finds no cycles".to_owned(),
    };
    let outcome = outcome
        .fault("each worker held the lock that the other one waited for", crossed)
        .naive("no transfer was done", stuck == 0.0)
        .safe("with one request for both, both transfers were done", both == 2.0)
        .safe("a wait time ended the deadlock, and both transfers were done", waited == 2.0 && gave_up >= 1.0)
        .conclude(format!(
            "Of 2 transfers, two orders did {stuck}; one request for both did {both}, waits with an end ({gave_up} given up) did {waited}, and {by_store}."
        ));
    Ok(match detected {
        Some((done, refused)) => outcome.safe(
            "the store refused the wait that closed the cycle, and both transfers were done",
            done == 2.0 && refused >= 1.0,
        ),
        None => outcome,
    })
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let way = half.way().to_owned();
    for actor in ACTORS {
        half.start(actor, "clerk")?;
        if way != ALL {
            half.expect_hold(actor)?;
        }
    }
    half.send_all("go");
    let mut crossed = 0;
    if way == NAIVE {
        let waits = |actor: &'static str| {
            move |event: &crate::event::LabEvent| {
                event.is_by(actor) && matches!(event.kind, LabEventKind::Waits { .. })
            }
        };
        for actor in ACTORS {
            half.expect_count("the second wait", 2, waits(actor))?;
            crossed += 1;
        }
        half.pass(half.work * 3)?;
        let at = half.events().iter().map(|event| event.t).max().unwrap_or(0);
        half.damage(at, "both workers wait for each other, for ever");
        ACTORS.iter().for_each(|actor| half.kill(actor));
        let naive = half.naive_lock()?;
        ["account-1", "account-2"].iter().try_for_each(|lock| naive.free(&half.name(lock)))?;
    } else {
        half.expect_all_ended()?;
    }
    let done = half.events().iter().filter(|event| event.is_write()).count();
    half.count("done", done as u32, "{transfer|transfers} of 2 done");
    half.harm("stuck", 2u32.saturating_sub(done as u32), "{worker|workers} that {waits|wait} for ever");
    half.evidence("crossed", crossed);
    for (key, words) in [
        ("refused", "{wait|waits} that the store refused"),
        ("gave_up", "{wait|waits} that ended by the wait time"),
    ] {
        let number = half.figures(key).len() as u32;
        half.count(key, number, words);
    }
    Ok(())
}
