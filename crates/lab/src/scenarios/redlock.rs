//! A majority of clocks jumps: Redlock grants the lock twice. And five data centres with delays, one of them cut off.

use std::time::Duration;

use futures_util::FutureExt;
use lockkeeper::Result;
use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Proxy};
use lockkeeper_testkit::servers::{self, ClockShim, RedisOptions, Server};

use super::late_writer::{self, ABOUT_TO_WRITE, CHECKED, UNCHECKED};
use crate::event::now;
use crate::half::LabHalf;
use crate::lab::{Lab, LabError};
use crate::needs::Need;
use crate::outcome::{ScenarioOutcome, amount};
use crate::scenario::Scenario;
use crate::worker::LabWorker;

const NAIVE: &str = "clocks jump, no check";
const SAFE: &str = "clocks jump, fence check";
const CENTRES: &str = "five data centres, one cut off";
const NODES: usize = 5;
const QUORUM: usize = 3;
const LOCK: &str = "settlement";
const A: &str = "worker A";
const B: &str = "worker B";
/// The way of a message to each data centre.
const DELAYS: [u64; NODES] = [2, 10, 20, 40, 80];
/// How many grants are measured before the cut, and after it.
const ROUNDS: usize = 5;

/// See its story.
pub const SCENARIO: Scenario = Scenario {
    name: "redlock",
    title: "a majority of clocks jumps, and five data centres with one cut off",
    story: "Redlock takes a lock at a majority of independent Redis servers. It survives a lost minority: five data centres, one cut off, and \
            locks are granted, after each of them gave the silent server its time. But each server ends the lock by its own wall clock. \
            When the clocks of three servers jump forward, the lock of worker A is over there, and worker B gets a majority. Both \
            believe that they hold, and worker A was not even slow. Exclusion is gone; the fence still tells who is newer.",
    watch: "the jump of the clocks (◆), and worker B beside worker A",
    needs: &[Need::Redis, Need::Compiler],
    any_store: false,
    seconds: (6, 5),
    run,
    work: |worker| work(worker).boxed_local(),
};

async fn work(mut worker: LabWorker) -> Result<()> {
    if worker.plan.way != CENTRES {
        return late_writer::work(worker).await;
    }
    let keeper = worker.keeper().await?;
    for phase in ["all", "cut"] {
        worker.until(phase).await;
        for _ in 0..ROUNDS {
            let asked = now();
            let guard = worker.acquire(&keeper, LOCK).await?;
            worker.figure(phase, worker.seconds_since(asked) * 1000.0);
            worker.release(guard, LOCK).await?;
        }
        worker.note(phase);
    }
    Ok(())
}

fn run(lab: &Lab) -> std::result::Result<ScenarioOutcome, LabError> {
    let mut halves = [
        lab.half(NAIVE, "five servers, a lock of 60 s, and the clocks of three servers jump by an hour")?,
        lab.half(SAFE, "the same, and the resource refuses a lower fence")?,
        lab.half(CENTRES, "2, 10, 20, 40 and 80 ms to the servers; then the nearest one is cut off")?,
    ];
    halves.iter_mut().for_each(|half| half.ttl = Duration::from_secs(60));
    let outcome = ScenarioOutcome::new(lab.side_by_side(halves, direct)?);
    let fired = (0..2).all(|half| outcome.number(half, "both_held") == 1.0);
    let stale: Vec<f64> = (0..2).map(|half| outcome.number(half, "stale_writes")).collect();
    let granted = outcome.number(2, "granted_cut");
    let (all, cut) = (outcome.number(2, "all"), outcome.number(2, "cut"));
    Ok(outcome
        .fault("the clocks of a majority jumped, and worker B got the lock while worker A held it", fired)
        .naive("the resource without a check took the stale write", stale[0] == 1.0)
        .safe("the fence refused it", stale[1] == 0.0)
        .safe("with one of five servers cut off locks were granted", granted == ROUNDS as f64)
        .conclude(format!(
            "Clocks that jumped made two holders: {} without a check, {} with it; with one of five data centres cut off a grant took {cut:.0} ms instead of {all:.0} ms.",
            amount(stale[0], "stale {write|writes}"),
            stale[1]
        )))
}

fn url(addrs: impl Iterator<Item = std::net::SocketAddr>) -> String {
    let hosts: Vec<String> = addrs.map(|addr| addr.to_string()).collect();
    // The servers have just started, and remember all that they have ever granted.
    // The time for a server is 50 ms by default, too short for the farthest one, and for a busy machine.
    format!("redlock://{}?max_ttl=60s&young_node=0s&timeout=2s&node_timeout=2s", hosts.join(","))
}

fn direct(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    if half.way() == CENTRES { five_centres(half) } else { jump(half) }
}

fn jump(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let clocks: Vec<ClockShim> =
        (0..NODES).map(|_| ClockShim::build()).collect::<std::result::Result<_, _>>()?;
    let server = |clock: &ClockShim| {
        servers::redis(RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() })
    };
    let servers: Vec<Server> = clocks.iter().map(server).collect::<std::result::Result<_, _>>()?;
    half.store = url(servers.iter().map(Server::addr));
    half.begin();
    half.start(A, "first")?;
    let held = half.expect_note(A, ABOUT_TO_WRITE)?;
    half.beat()?;
    clocks[..QUORUM].iter().for_each(|clock| clock.jump(3600 * ClockShim::SECOND));
    half.fault("clocks", "the clocks of 3 of 5 servers jump forward by an hour");
    half.start(B, "second")?;
    let granted = half.expect_hold(B)?;
    let written = half.expect_write(B)?;
    half.beat()?;
    half.send(A, "write");
    let late = half.expect_write(A)?;
    half.expect_end(A)?;
    half.beat()?;
    half.send(B, "release");
    half.expect_end(B)?;
    late_writer::count(half, &written, &late);
    debug_assert!(half.way().ends_with(CHECKED) || half.way().ends_with(UNCHECKED));
    let both = held.t < granted.t && granted.t < late.t;
    half.count("both_held", u8::from(both), "{lock|locks} with two holders");
    Ok(())
}

fn five_centres(half: &mut LabHalf) -> std::result::Result<(), LabError> {
    let start = |_| servers::redis(RedisOptions::default());
    let servers: Vec<Server> = (0..NODES).map(start).collect::<std::result::Result<_, _>>()?;
    let proxies: Vec<Proxy> =
        servers.iter().map(|server| Proxy::start(server.addr(), Framing::Resp)).collect();
    half.store = url(proxies.iter().map(Proxy::addr));
    half.begin();
    half.start("client", "client")?;
    for (proxy, delay) in proxies.iter().zip(DELAYS) {
        proxy.inject(Fault::at_request(1).and_every_later_one().delay(Duration::from_millis(delay)));
    }
    half.send("client", "all");
    half.expect_note("client", "all")?;
    [Direction::Requests, Direction::Replies].into_iter().for_each(|way| proxies[0].hold(way));
    half.fault("network", "the nearest data centre is cut off");
    half.send("client", "cut");
    half.expect_note("client", "cut")?;
    half.expect_end("client")?;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (all, cut) = (half.figures("all"), half.figures("cut"));
    half.count("all", mean(&all), "ms for a grant from all five");
    half.count("cut", mean(&cut), "ms for a grant with one cut off");
    half.count("granted_cut", cut.len() as u32, "{grant|grants} while one was cut off");
    Ok(())
}
