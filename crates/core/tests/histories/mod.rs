//! Random histories: how they are made, and how the table is compared with the naive one after every step.

mod profile;

pub use profile::{BROAD, DEADLOCKS, EXPIRY, Kind, PERMITS, Profile};

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::naive::{Bug, Naive, Seen, Told};
use lockkeeper_core::table::{Now, Table, TableEffect};
use lockkeeper_core::{
    Attempt, BootInstant, Error, Fence, Holder, LockName, LockRequest, Names, Owner, Page, RequestKey,
    WallTime,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

/// One step, as bytes: each shrinks towards zero, and zero is the plainest choice.
pub type Step = [u8; 8];
/// Where the fences begin, and the steps.
pub type History = (u8, Vec<Step>);

static NAMES: LazyLock<Vec<LockName>> =
    LazyLock::new(|| ["a", "aa", "b", "ä"].iter().map(|n| LockName::new(n).unwrap()).collect());
static HOLDERS: LazyLock<Vec<Arc<Holder>>> =
    LazyLock::new(|| (0..12).map(|i| Arc::new(Holder::new("host", i, None).unwrap())).collect());

/// What is done in one step.
#[derive(Debug)]
enum Op {
    Ask(LockRequest),
    Renew(Attempt),
    Release(RequestKey),
    Break(LockName),
    Wait,
}

fn pick<T: Copy>(from: &[T], byte: u8) -> T {
    from[usize::from(byte) % from.len()]
}

fn decode(profile: &Profile, step: &Step) -> Op {
    let [kind, who, what, whose, mode, wait, terms, _] = *step;
    let who = who % 12;
    let attempt = Attempt::from_bytes([who + 1; 16]);
    let names = Names::new(pick(profile.names, what).iter().map(|i| NAMES[*i].clone())).unwrap();
    match pick(profile.kinds, kind) {
        Kind::Ask => {
            let (ttl, lock_delay, min_hold) = pick(profile.terms, terms);
            let owner = whose % (profile.owners + 1);
            Op::Ask(LockRequest {
                key: RequestKey { attempt, names },
                owner: (owner > 0).then(|| Owner::from_bytes([owner; 16])),
                mode: pick(profile.modes, mode),
                wait: pick(profile.waits, wait),
                ttl: Duration::from_millis(ttl),
                lock_delay: Duration::from_millis(lock_delay),
                min_hold: Duration::from_millis(min_hold),
                holder: HOLDERS[usize::from(who)].clone(),
            })
        }
        Kind::Renew => Op::Renew(attempt),
        Kind::Release => Op::Release(RequestKey { attempt, names }),
        Kind::Break => Op::Break(names.first().clone()),
        Kind::Wait => Op::Wait,
    }
}

/// How far time goes before the step: not at all, exactly to the next thing that is due, a hair before or after it, or
/// some way that has nothing to do with it.
fn later(now: BootInstant, due: Option<BootInstant>, byte: u8) -> BootInstant {
    let due = due.map_or(now, |due| due.max(now));
    match byte % 16 {
        0..=6 => now,
        7 | 8 => due,
        9 => due.before(Duration::from_nanos(1)).max(now),
        10 => due + Duration::from_nanos(1),
        11 | 12 => now + Duration::from_millis(50),
        13 => now + Duration::from_millis(100),
        14 => now + Duration::from_micros(333_333),
        _ => now + Duration::from_millis(1000),
    }
}

/// The wall clock mostly follows the other one; now and then it is set back.
fn wall(moment: BootInstant, byte: u8) -> WallTime {
    let micros = 2_000_000 + moment.as_nanos() / 1000;
    WallTime::from_micros(if byte >= 208 { micros - 1_500_000 } else { micros })
}

macro_rules! same {
    ($what:expr, $table:expr, $naive:expr) => {
        let (table, naive) = ($table, $naive);
        if table != naive {
            return Err(format!("{}\n  table: {table:?}\n  naive: {naive:?}", $what));
        }
    };
}

/// Runs a history on both; the error tells where they part.
pub fn compare(profile: &Profile, bug: Option<Bug>, history: &History) -> Result<Seen, String> {
    let (start, steps) = history;
    let last = (*start == 15).then(|| Fence::new(Fence::MAX.get() - 4).unwrap());
    let mut table = Table::after(last);
    table.set_watched(true);
    let mut naive = Naive { bug, fence: last, ..Naive::default() };
    let mut moment = BootInstant::from_nanos(1_000_000_000);
    for (i, step) in steps.iter().enumerate() {
        if !profile.still || step[7] % 16 == 11 {
            moment = later(moment, naive.due(), step[7]);
        }
        let now = Now { moment, wall: wall(moment, step[7]) };
        let op = decode(profile, step);
        one_step(&mut table, &mut naive, now, &op)
            .and_then(|()| look(&mut table, &mut naive, now, step[6]))
            .map_err(|what| format!("step {i} at {now:?}, {op:?}: {what}"))?;
    }
    Ok(naive.seen)
}

fn one_step(table: &mut Table, naive: &mut Naive, now: Now, op: &Op) -> Result<(), String> {
    match op {
        Op::Ask(request) => {
            let answer = table.handle_request(now, request.clone());
            if let Err(Error::Deadlock(names)) = &answer {
                let asked = |n: &LockName| request.key.names.iter().any(|m| m == n);
                same!("the deadlock begins with an asked name", names.first().map(asked), Some(true));
            }
            same!("answer", answer.map_err(|e| e.outcome()), naive.request(now, request.clone()));
        }
        Op::Renew(attempt) => {
            same!("renewal", table.handle_renew(now, attempt), naive.renew(now, attempt));
        }
        Op::Release(key) => {
            same!("release", table.handle_release(now, key), naive.release(now, key));
        }
        Op::Break(name) => {
            let fence = table.handle_break(now, name, "why").map_err(|e| e.outcome());
            same!("break", fence, naive.break_lock(now, name, "why"));
        }
        Op::Wait => {
            table.handle_timeout(now);
            naive.settle(now);
            // A driver that is woken at once, again and again, burns a core.
            same!("still due", table.poll_timeout().filter(|at| *at <= now.moment), None);
        }
    }
    Ok(())
}

/// Everything that can be seen from outside.
fn look(table: &mut Table, naive: &mut Naive, now: Now, byte: u8) -> Result<(), String> {
    let effects: Vec<Told> = std::iter::from_fn(|| table.poll_effect()).map(told).collect();
    same!("effects", effects, std::mem::take(&mut naive.told));
    same!("held", table.held(), naive.holds.len());
    same!("waiting", table.waiting(), naive.line.len());
    same!("fence", table.last_fence(), naive.fence);
    same!("due", table.poll_timeout(), naive.due());
    for name in NAMES.iter() {
        same!(name, table.inspect(now.moment, name), naive.inspect(now.moment, name));
    }
    // Looking does not turn the clock: a lease that is over by then must not be shown, though no call has ended it.
    let then = now.moment + Duration::from_millis(u64::from(byte) * 2);
    let name = &NAMES[usize::from(byte) % 4];
    same!("then", table.inspect(then, name), naive.inspect(then, name));
    for prefix in ["", "a"] {
        let mut page = Page { limit: 1 + usize::from(byte % 3), after: None };
        loop {
            let found = table.list(then, prefix, &page);
            same!("list", &found, &naive.list(then, &NAMES, prefix, &page));
            let Some(next) = found.next else { break };
            page.after = Some(next);
        }
    }
    Ok(())
}

fn told(effect: TableEffect) -> Told {
    match effect {
        TableEffect::Answer(attempt, answer) => Told::Answer(attempt, answer.map_err(|e| e.outcome())),
        TableEffect::Event(event) => Told::Event(event),
    }
}

fn seed() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let given = std::env::var("LOCKKEEPER_SEED").ok().and_then(|s| u128::from_str_radix(&s, 16).ok());
    let fresh = || {
        let state = RandomState::new();
        u128::from(state.hash_one(1)) << 64 | u128::from(state.hash_one(2))
    };
    given.unwrap_or_else(fresh).to_be_bytes()
}

/// Compares over `cases` histories. The error has the smallest history that was found, and the seed.
pub fn run(profile: &Profile, bug: Option<Bug>, cases: u32) -> Result<Seen, String> {
    let seed = seed();
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::XorShift, &seed));
    let steps = proptest::collection::vec(proptest::array::uniform8(any::<u8>()), 5..=40);
    let seen = std::cell::RefCell::new(Seen::default());
    let outcome = runner.run(&(0..16_u8, steps), |history| {
        let one = compare(profile, bug, &history).map_err(TestCaseError::fail)?;
        seen.borrow_mut().add(&one);
        Ok(())
    });
    match outcome {
        Ok(()) => Ok(seen.into_inner()),
        Err(TestError::Fail(what, history)) => {
            let ops: Vec<String> =
                history.1.iter().map(|step| format!("{:?}", decode(profile, step))).collect();
            let seed = u128::from_be_bytes(seed);
            Err(format!("{what}\nLOCKKEEPER_SEED={seed:032x}\n{history:?}\n{}", ops.join("\n")))
        }
        Err(TestError::Abort(why)) => Err(format!("gave up: {why}")),
    }
}
