//! Hash ownership instead of a lock per item, and a worker that dies: a fixed assignment leaves its items, the group takes them over.

use std::fs::File;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;
use lockkeeper::partitions::{Partition, PartitionChange, partition_of};

use crate::event::LabEventKind;
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::outcome::ScenarioOutcome;
use crate::scenario::Scenario;
use crate::worker::{LabWorker, unavailable};

const NAIVE: &str = "hash modulo workers";
const SAFE: &str = "partitions";
const WORKERS: [&str; 3] = ["worker 0", "worker 1", "worker 2"];
const PARTITIONS: u32 = 12;
const ITEMS: u32 = 90;
/// How long one item takes.
const ITEM: Duration = Duration::from_millis(40);

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "partitioned",
    title: "ownership by hash instead of a lock per item, and a worker dies",
    story: "Ninety items and three workers. A lock per item would work, and would cost two round trips for each. A hash of the key says \
            whose item it is, without any lock. The simple form, hash modulo the number of workers, leaves the items of a worker \
            that dies to no one. Lockkeeper's partitions are owned under a lease: the others take them over, with a higher epoch, \
            and there is one grant per partition instead of one per item.",
    watch: "worker 1 is killed; its partitions (blue) begin again at the others, or its items are left",
    needs: &[],
    any_store: true,
    seconds: (9, 6),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way == NAIVE {
        let own = WORKERS.iter().position(|name| *name == worker.actor).unwrap_or(0) as u32;
        worker.note("ready");
        worker.until("go").await;
        worker.holds(&format!("items of {}", worker.actor), None);
        for item in (0..ITEMS).filter(|item| partition_of(key(*item), WORKERS.len() as u32) == own) {
            pack(&worker, item).await?;
        }
        worker.ends(&format!("items of {}", worker.actor), "has done");
        return Ok(());
    }
    let keeper = worker.keeper().await?;
    worker.note("ready");
    worker.until("go").await;
    let group = keeper.partitions(worker.name("packing"), PARTITIONS).member(&worker.actor);
    let mut member = group.ttl(worker.plan.ttl).poll(Duration::from_millis(100)).join().await?;
    let mut commands = worker.later_commands();
    let (worker, mut packing) = (Rc::new(worker), Vec::new());
    loop {
        tokio::select! {
            // The only command that is left: all items are packed.
            _ = commands.recv() => break,
            change = member.next() => match change {
                Some(change) => if let PartitionChange::Owned(partition) = change? {
                    packing.push(tokio::task::spawn_local(pack_all(worker.clone(), partition)));
                },
                None => break,
            },
        }
    }
    member.leave().await?;
    for task in packing {
        task.await.map_err(unavailable)??;
    }
    Ok(())
}

fn key(item: u32) -> String {
    format!("item-{item}")
}

/// Packs the items of one partition that no owner before has packed.
async fn pack_all(worker: Rc<LabWorker>, partition: Partition) -> Result<()> {
    let lock = format!("partition {}", partition.number());
    worker.holds(&lock, Some(partition.fence()));
    for item in (0..ITEMS).filter(|item| partition.has(key(*item))) {
        if partition.is_revoked() {
            break;
        }
        pack(&worker, item).await?;
    }
    partition.revoked().await;
    if partition.is_held() {
        worker.ends(&lock, "gives back");
    } else {
        worker.ends_at_deadline(partition.guard(), &lock, "has lost");
    }
    Ok(())
}

/// Packs an item once: the file of an item is made by one process only.
async fn pack(worker: &LabWorker, item: u32) -> Result<()> {
    let dir = worker.path("packed");
    std::fs::create_dir_all(&dir).map_err(unavailable)?;
    match File::create_new(dir.join(key(item))) {
        Ok(_) => {
            worker.figure("packed", f64::from(item));
            tokio::time::sleep(ITEM).await;
        }
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(unavailable(e)),
    }
    Ok(())
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "worker hash(key) % 3 packs the item; no process knows who is alive")?,
        lab.half(SAFE, "keeper.partitions: each partition has one owner, under a lease with an epoch")?,
    ];
    for half in &mut halves {
        half.ttl = Duration::from_secs(3);
    }
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "left_at_kill") > 0.0);
    let (naive, safe) = (outcome.number(0, "left"), outcome.number(1, "left"));
    let (moved, overlaps) = (outcome.number(1, "taken_over"), outcome.number(1, "overlaps"));
    let grants = outcome.number(1, "grants");
    Ok(outcome
        .fault("a worker was killed before all its items were packed", fired)
        .naive("items of the dead worker were left", naive > 0.0)
        .safe("every item was packed, and no partition had two owners", safe == 0.0 && overlaps == 0.0)
        .safe("the partitions of the dead worker were taken over", moved > 0.0)
        .conclude(format!(
            "When one of three workers died, hash modulo left {naive} of {ITEMS} items, and partitions left {safe}, with {grants} grants instead of one lock per item."
        )))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    for worker in WORKERS {
        half.start(worker, "packer")?;
    }
    half.expect_notes("ready", WORKERS.len())?;
    half.send_all("go");
    let victim = WORKERS[1];
    half.expect_count("worker 1 packs", 3, |event| {
        event.is_by(victim) && matches!(event.kind, LabEventKind::Figure { .. })
    })?;
    half.kill(victim);
    half.fault("killed", "worker 1 is killed");
    let killed = half.events().last().map_or(0, |event| event.t);
    let left_at_kill = ITEMS.saturating_sub(packed(half));
    if half.way() == NAIVE {
        half.expect_end(WORKERS[0])?;
        half.expect_end(WORKERS[2])?;
    } else {
        while packed(half) < ITEMS {
            half.pass(Duration::from_millis(50))?;
        }
        half.send_all("finish");
        half.expect_end(WORKERS[0])?;
        half.expect_end(WORKERS[2])?;
    }
    let left = ITEMS - packed(half);
    if left > 0 {
        half.damage(killed, format!("{left} items are left to a dead worker"));
    }
    count(half, killed, left, left_at_kill);
    Ok(())
}

/// The items that have a file.
fn packed(half: &LabHalf) -> u32 {
    std::fs::read_dir(half.path("packed")).map_or(0, |files| files.count() as u32)
}

fn count(half: &mut LabHalf, killed: u64, left: u32, left_at_kill: u32) {
    let of = |actor: &'static str| {
        half.events().iter().filter(move |e| e.is_by(actor)).filter_map(|e| match &e.kind {
            LabEventKind::Holds { lock, .. } => Some((e.t, lock.clone())),
            _ => None,
        })
    };
    let dead: Vec<String> = of(WORKERS[1]).map(|(_, lock)| lock).collect();
    let taken = of(WORKERS[0]).chain(of(WORKERS[2]));
    let taken = taken.filter(|(t, lock)| *t > killed && dead.contains(lock)).count() as u32;
    let grants = WORKERS.iter().map(|worker| of(worker).count() as u32).sum::<u32>();
    let overlaps = half.overlaps();
    half.harm("left", left, format!("{{item|items}} of {ITEMS} that no worker packed"));
    half.count("left_at_kill", left_at_kill, "{item|items} not packed when worker 1 was killed");
    half.count("taken_over", taken, "{partition|partitions} of the dead worker that another one took over");
    half.count("grants", grants, "{grant|grants} of a lock");
    half.harm("overlaps", overlaps, "{time|times} that a partition had two owners");
}
