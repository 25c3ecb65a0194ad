//! Drives a store beside the lock table of `core`, which is the reference: the same random requests, renewals, releases, breaks,
//! revocations and passing of time must have the same answers and views, step by step.
//!
//! Time passes by setting the server's clock forward, ten seconds at a time: the test itself takes much less, so every lease
//! ends in the server when it ends in the table, and not before.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::table::{Answer, Now, Table, TableEffect};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Error, Fence, Grant, Holder, HolderView, LockName, LockPage,
    LockRequest, LockView, Mode, Names, Owner, Page, RequestKey, Result, Store, Wait, WallTime,
};
use tokio::task::JoinHandle;

use crate::laws::{name, soon};
use crate::servers::ClockShim;

/// Every duration is a multiple of this.
const UNIT: Duration = Duration::from_secs(10);
/// How long the store may take to do by itself what the table does at once.
const PATIENCE: Duration = Duration::from_secs(30);

/// Numbers that are the same for the same seed.
struct SeededDice(u64);

impl SeededDice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }

    fn units(&mut self, most: u64) -> Duration {
        UNIT * self.roll(most) as u32
    }
}

struct Driver {
    dice: SeededDice,
    clock: ClockShim,
    passed: Duration,
    stores: Vec<Arc<dyn Store>>,
    table: Table,
    attempts: u64,
    keys: Vec<RequestKey>,
    waiting: HashMap<Attempt, (usize, JoinHandle<Result<AcquireOutcome>>)>,
    /// The fence that the store gave for each fence of the table, by name. Two requests for different names that are granted at the same
    /// moment may get their fences in either order.
    fences: HashMap<LockName, BTreeMap<Fence, Fence>>,
    waited: usize,
    granted: usize,
}

impl Driver {
    fn new(seed: u64, clock: ClockShim, stores: Vec<Arc<dyn Store>>) -> Self {
        Driver {
            dice: SeededDice(seed),
            clock,
            passed: Duration::ZERO,
            stores,
            table: Table::default(),
            attempts: 0,
            keys: Vec::new(),
            waiting: HashMap::new(),
            fences: HashMap::new(),
            waited: 0,
            granted: 0,
        }
    }

    /// One history.
    async fn run(mut self) -> Self {
        self.request().await;
        for _ in 0..150 {
            match self.dice.roll(10) {
                0..=3 => self.request().await,
                4..=6 => self.release().await,
                7 => self.renew().await,
                8 if self.dice.one_in(3) => self.break_lock_now().await,
                8 if self.dice.one_in(2) => self.revoke().await,
                _ => self.pass().await,
            }
            self.compare().await;
        }
        self
    }

    fn now(&self) -> Now {
        let passed = self.passed.as_nanos() as u64;
        Now { moment: BootInstant::from_nanos(passed), wall: WallTime::from_micros(1 + passed / 1000) }
    }

    fn any_store(&mut self) -> usize {
        self.dice.roll(self.stores.len() as u64) as usize
    }

    fn new_request(&mut self) -> LockRequest {
        let dice = &mut self.dice;
        let count = if dice.one_in(4) { 2 } else { 1 };
        let names = Names::new((0..count).map(|_| name(["a", "b", "c"][dice.roll(3) as usize]))).unwrap();
        self.attempts += 1;
        let attempt = Attempt::from_bytes(u128::from(self.attempts).to_be_bytes());
        let holder = Holder::new("here", 1, Some(self.attempts.to_string())).unwrap();
        let mut request = LockRequest::new(attempt, names, UNIT + dice.units(6), Arc::new(holder));
        request.mode =
            [Mode::Exclusive, Mode::Exclusive, Mode::Shared, Mode::Permit(2)][dice.roll(4) as usize];
        request.wait = if dice.one_in(3) { Wait::No } else { Wait::Forever };
        if dice.one_in(3) {
            request.owner = Some(Owner::from_bytes([dice.roll(4) as u8; 16]));
        }
        if dice.one_in(5) {
            request.lock_delay = dice.units(5);
        }
        if dice.one_in(5) {
            request.min_hold = dice.units(5);
        }
        request
    }

    async fn request(&mut self) {
        let request = self.new_request();
        let expected = self.table.handle_request(self.now(), request.clone());
        let (key, place) = (request.key.clone(), self.any_store());
        self.keys.push(key.clone());
        let store = self.stores[place].clone();
        let mut got = tokio::spawn(async move { store.acquire(&request).await });
        match expected {
            Ok(Answer::Waiting) => {
                self.waited += 1;
                self.waiting.insert(key.attempt, (place, got));
            }
            // A deadlock of owners, which this store does not detect: release the request. An upgrade is reported at once.
            Err(Error::Deadlock(_)) => {
                if tokio::time::timeout(Duration::from_millis(50), &mut got).await.is_err() {
                    got.abort();
                    self.stores[place].release(&key).await.unwrap();
                }
            }
            Ok(Answer::Granted(grant)) => self.same(got.await.unwrap(), Ok(AcquireOutcome::Granted(grant))),
            Ok(Answer::Busy(busy)) => self.same(got.await.unwrap(), Ok(AcquireOutcome::Busy(busy))),
            Err(error) => self.same(got.await.unwrap(), Err(error)),
        }
    }

    fn any_key(&mut self) -> RequestKey {
        let recent = self.keys.len().min(12) as u64;
        self.keys[self.keys.len() - 1 - self.dice.roll(recent) as usize].clone()
    }

    async fn release(&mut self) {
        let key = self.any_key();
        let expected = self.table.handle_release(self.now(), &key);
        let waiter = self.waiting.remove(&key.attempt);
        // A waiter is released by its own client; a hold can be released by any client.
        let place = waiter.as_ref().map_or_else(|| self.any_store(), |(place, _)| *place);
        assert_eq!(self.stores[place].release(&key).await.unwrap(), expected, "{key:?}");
        if let Some((_, waiter)) = waiter {
            waiter.abort();
        }
    }

    async fn renew(&mut self) {
        let key = self.any_key();
        let expected = self.table.handle_renew(self.now(), &key.attempt);
        let (fence, mode, ttl, sent_at) = (Fence::MAX, Mode::Exclusive, UNIT, BootInstant::default());
        let place = self.any_store();
        let answers =
            self.stores[place].renew(&[Grant { key, fence, mode, ttl, sent_at, lease: ttl }]).await.unwrap();
        assert_eq!(answers, [expected]);
    }

    async fn break_lock_now(&mut self) {
        let target = name(["a", "b", "c"][self.dice.roll(3) as usize]);
        let expected = self.table.handle_break(self.now(), &target, "test").unwrap();
        let place = self.any_store();
        let got = self.stores[place].break_lock(&target, "test").await.unwrap();
        self.note(&target, expected, got);
    }

    async fn revoke(&mut self) {
        let target = name(["a", "b", "c"][self.dice.roll(3) as usize]);
        let expected = self.table.handle_revoke(self.now(), &target, "test").unwrap();
        let place = self.any_store();
        let got = self.stores[place].revoke(&target, "test").await.unwrap();
        self.note(&target, expected, got);
    }

    async fn pass(&mut self) {
        for _ in 0..self.dice.roll(5) {
            self.passed += UNIT;
            self.clock.jump(UNIT.as_nanos() as i64);
            self.table.handle_timeout(self.now());
            self.compare().await;
        }
    }

    /// Compares everything that can be seen, as soon as the next waiters were granted their locks.
    async fn compare(&mut self) {
        let expected = seen(self.table.list(self.now().moment, "", &Page::FIRST));
        let began = Instant::now();
        loop {
            let got = seen(self.stores[0].list("", &Page::FIRST).await.unwrap());
            if got == expected {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "{got:#?}\ninstead of {expected:#?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        while let Some(effect) = self.table.poll_effect() {
            let TableEffect::Answer(attempt, expected) = effect else { continue };
            let (place, waiter) = self.waiting.remove(&attempt).expect("it waits");
            // The notifications that its store has sent for the waiter have arrived before this is answered.
            self.stores[place].inspect(&name("a")).await.unwrap();
            let got = soon("a waiter is answered", waiter).await.unwrap();
            self.same(got, expected);
            self.granted += 1;
        }
        tokio::task::yield_now().await;
        let early = self.waiting.iter().find(|(_, (_, waiter))| waiter.is_finished());
        assert!(early.is_none(), "answered out of turn: {early:?}");
    }

    fn same(&mut self, got: Result<AcquireOutcome>, expected: Result<AcquireOutcome>) {
        match (got, expected) {
            (Ok(AcquireOutcome::Granted(got)), Ok(AcquireOutcome::Granted(expected))) => {
                assert_eq!((&got.key, got.mode, got.ttl), (&expected.key, expected.mode, expected.ttl));
                for name in &got.key.names {
                    self.note(name, expected.fence, got.fence);
                }
            }
            (Ok(AcquireOutcome::Busy(got)), Ok(AcquireOutcome::Busy(expected))) => {
                assert_eq!((&got.name, got.waiting), (&expected.name, expected.waiting));
                assert_eq!(labels(&got.held), labels(&expected.held));
            }
            (Err(got), Err(expected)) => assert_eq!(got.outcome(), expected.outcome(), "{got} {expected}"),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    /// The same fence of the table is always the same of the store, and they grow together.
    fn note(&mut self, name: &LockName, expected: Fence, got: Fence) {
        let fences = self.fences.entry(name.clone()).or_default();
        let known = *fences.entry(expected).or_insert(got);
        assert_eq!(known, got, "another fence for the same grant");
        let below = fences.range(..expected).next_back().is_none_or(|(_, below)| *below < got);
        let above = fences.range(expected..).nth(1).is_none_or(|(_, above)| got < *above);
        assert!(below && above, "{got} is out of order for {name}: {fences:?}");
    }
}

/// The compared parts of a holder: label, mode, whether it lingers, the units that are left, why it is revoked.
type Label = (Option<String>, Mode, bool, u64, Option<String>);

fn labels(held: &[HolderView]) -> Vec<Label> {
    let view = |held: &HolderView| {
        (
            held.holder.label.clone(),
            held.mode,
            held.lingering,
            units(held.expires_in_ms),
            held.revoked.clone(),
        )
    };
    let mut labels: Vec<_> = held.iter().map(view).collect();
    labels.sort_by(|a, b| a.0.cmp(&b.0));
    labels
}

fn units(ms: u64) -> u64 {
    ms.div_ceil(UNIT.as_millis() as u64)
}

/// The compared parts of a view: all but the numbers that depend on the time of day.
fn seen(page: LockPage) -> Vec<String> {
    let queue = |view: &LockView| -> Vec<_> {
        view.queue.iter().map(|queued| (queued.holder.label.clone(), queued.mode)).collect()
    };
    let locks = page.locks.iter();
    let shown = locks.map(|v| (&v.name, labels(&v.held), v.waiting, queue(v), v.delayed_ms.map(units)));
    shown.map(|view| format!("{view:?}")).collect()
}

/// Drives `clients` stores and the table with the same random steps. `open` opens a store for one client; the number is new for each
/// history, so that its locks are new too. The server's clock is `clock`.
///
/// `LOCKKEEPER_SEED` repeats one history, `LOCKKEEPER_SEEDS` runs more than ten of them.
///
/// # Panics
/// If a store answers differently from the table.
pub async fn compare_with_table(
    clients: usize,
    clock: &ClockShim,
    open: impl AsyncFn(u64) -> Arc<dyn Store>,
) {
    let count = std::env::var("LOCKKEEPER_SEEDS").map_or(10, |count| count.parse().unwrap());
    let seeds = match std::env::var("LOCKKEEPER_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=count).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect(),
    };
    let (mut waited, mut granted) = (0, 0);
    for seed in seeds {
        println!("LOCKKEEPER_SEED={seed}");
        let mut stores = Vec::new();
        for _ in 0..clients {
            stores.push(open(seed).await);
        }
        let driver = Driver::new(seed, clock.clone(), stores).run().await;
        waited += driver.waited;
        granted += driver.granted;
    }
    println!("{waited} waited, {granted} of them were answered");
    assert!(waited > granted && granted > 10, "nothing was tested: {waited} {granted}");
}
