//! The store beside the lock table of `core`, which is the reference: the same random requests, renewals, releases, breaks
//! and passing of time must have the same answers, fences and views, step by step.
//!
//! One open store must do exactly as the table does. Several that share a file do so as soon as they have woken each
//! other; which of two that are served at once is first, and so has the smaller fence, is then left open.

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::{Dir, name, open_by};
use lockkeeper_core::table::{Answer, Now, Table, TableEffect};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Fence, Holder, LockPage, LockRequest, LockView, Locks, Mode, Names,
    Owner, Page, RequestKey, Result, Wait,
};
use lockkeeper_host::{Clock, VirtualClock};
use lockkeeper_sqlite::SqliteStore;
use tokio::task::JoinHandle;

#[test]
#[ignore = "the other process of the tests here"]
fn contender() {
    common::contender();
}

/// Numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }
}

struct Pair {
    dice: Dice,
    clock: VirtualClock,
    stores: Vec<SqliteStore>,
    table: Table,
    attempts: u64,
    keys: Vec<RequestKey>,
    waiting: HashMap<Attempt, JoinHandle<Result<AcquireOutcome>>>,
    waited: usize,
    served: usize,
    /// How often the others were not woken, or only late.
    slow: usize,
}

impl Pair {
    fn now(&self) -> Now {
        Now { moment: self.clock.now(), wall: self.clock.wall() }
    }

    /// One store: everything is the same, at once.
    fn strict(&self) -> bool {
        self.stores.len() == 1
    }

    fn store(&mut self) -> SqliteStore {
        self.stores[self.dice.roll(self.stores.len() as u64) as usize].clone()
    }

    fn new_request(&mut self) -> LockRequest {
        let dice = &mut self.dice;
        let count = if dice.one_in(4) { 2 } else { 1 };
        let names = Names::new((0..count).map(|_| name(["a", "b", "c"][dice.roll(3) as usize]))).unwrap();
        self.attempts += 1;
        let attempt = Attempt::from_bytes(u128::from(self.attempts).to_be_bytes());
        let holder = Holder::new("here", 1, Some(self.attempts.to_string())).unwrap();
        let ttl = Duration::from_secs(1 + dice.roll(20));
        let mut request = LockRequest::new(attempt, names, ttl, std::sync::Arc::new(holder));
        request.mode =
            [Mode::Exclusive, Mode::Exclusive, Mode::Shared, Mode::Permit(2)][dice.roll(4) as usize];
        request.wait = match dice.roll(3) {
            0 => Wait::No,
            1 => Wait::For(Duration::from_secs(dice.roll(15))),
            _ => Wait::Forever,
        };
        if dice.one_in(2) {
            request.owner = Some(Owner::from_bytes([dice.roll(4) as u8; 16]));
        }
        if dice.one_in(5) {
            request.lock_delay = Duration::from_secs(dice.roll(8));
        }
        if dice.one_in(5) {
            request.min_hold = Duration::from_secs(dice.roll(8));
        }
        request
    }

    async fn request(&mut self) {
        let request = self.new_request();
        self.keys.push(request.key.clone());
        let expected = self.table.handle_request(self.now(), request.clone());
        let attempt = request.key.attempt;
        let (store, strict) = (self.store(), self.strict());
        let got = tokio::spawn(async move { store.acquire(&request).await });
        // Let the request reach the worker before the next one.
        tokio::task::yield_now().await;
        match expected {
            Ok(Answer::Waiting) => {
                self.waited += 1;
                self.waiting.insert(attempt, got);
            }
            Ok(Answer::Granted(grant)) => {
                same(got.await.unwrap(), Ok(AcquireOutcome::Granted(grant)), strict)
            }
            Ok(Answer::Busy(busy)) => same(got.await.unwrap(), Ok(AcquireOutcome::Busy(busy)), strict),
            Err(error) => same(got.await.unwrap(), Err(error), strict),
        }
    }

    fn any_key(&mut self) -> Option<RequestKey> {
        let recent = self.keys.len().min(12);
        let at = self.keys.len() - 1 - self.dice.roll(recent.max(1) as u64) as usize;
        self.keys.get(at).cloned()
    }

    async fn release(&mut self) {
        let Some(key) = self.any_key() else { return };
        let expected = self.table.handle_release(self.now(), &key);
        assert_eq!(self.store().release(&key).await.unwrap(), expected);
        if let Some(waiter) = self.waiting.remove(&key.attempt) {
            waiter.abort();
        }
    }

    async fn renew(&mut self) {
        let Some(key) = self.any_key() else { return };
        let expected = self.table.handle_renew(self.now(), &key.attempt);
        let grant = lockkeeper_core::Grant {
            key,
            fence: Fence::MAX,
            mode: Mode::Exclusive,
            ttl: Duration::from_secs(1),
            sent_at: BootInstant::default(),
            lease: Duration::from_secs(1),
        };
        assert_eq!(self.store().renew(&[grant]).await.unwrap(), [expected]);
    }

    async fn take_away(&mut self) {
        let what = name(["a", "b", "c"][self.dice.roll(3) as usize]);
        let expected = self.table.handle_break(self.now(), &what, "test").unwrap();
        let fence = self.store().break_lock(&what, "test").await.unwrap();
        assert!(fence == expected || !self.strict());
    }

    async fn pass(&mut self) {
        let end = self.clock.now() + Duration::from_secs(self.dice.roll(8));
        while self.clock.now() < end {
            let next = self.table.poll_timeout().map_or(end, |at| at.min(end));
            self.clock.advance(next.since(self.clock.now()));
            self.table.handle_timeout(self.now());
            self.compare().await;
        }
    }

    /// Lets the worker finish what it has told itself to do, then compares everything that can be seen.
    async fn compare(&mut self) {
        for store in self.stores.iter().chain(&self.stores).chain(&self.stores) {
            store.inspect(&name("nothing")).await.unwrap();
        }
        // A request that waits for no time is in the queue for no time.
        self.table.handle_timeout(self.now());
        let strict = self.strict();
        let expected = seen(self.table.list(self.clock.now(), "", &Page::FIRST), strict);
        let began = std::time::Instant::now();
        let mut got = seen(self.stores[0].list("", &Page::FIRST).await.unwrap(), strict);
        while got != expected && !strict && began.elapsed() < common::PATIENCE {
            tokio::time::sleep(Duration::from_millis(1)).await;
            got = seen(self.stores[0].list("", &Page::FIRST).await.unwrap(), strict);
        }
        self.slow += usize::from(began.elapsed() > Duration::from_millis(300));
        if got != expected {
            for (attempt, waiter) in self.waiting.drain() {
                if let Ok(answer) = tokio::time::timeout(Duration::from_millis(100), waiter).await {
                    println!("answered: {attempt:?} {answer:?}");
                }
            }
            panic!("{got:#?}\ninstead of {expected:#?}");
        }
        while let Some(effect) = self.table.poll_effect() {
            let TableEffect::Answer(attempt, expected) = effect else { continue };
            let waiter = self.waiting.remove(&attempt).expect("it waits");
            same(common::soon("a waiter is answered", waiter).await.unwrap(), expected, strict);
            self.served += 1;
        }
        tokio::task::yield_now().await;
        assert!(self.waiting.values().all(|waiter| !waiter.is_finished()), "answered out of turn");
    }
}

/// What is compared.
fn seen(page: LockPage, strict: bool) -> Vec<LockView> {
    let mut locks = page.locks;
    if !strict {
        for lock in &mut locks {
            lock.held.iter_mut().for_each(|held| held.fence = Fence::MAX);
            lock.held.sort_by(|a, b| a.holder.label.cmp(&b.holder.label));
        }
    }
    locks
}

fn same(got: Result<AcquireOutcome>, expected: Result<AcquireOutcome>, strict: bool) {
    match (got, expected) {
        (Ok(AcquireOutcome::Granted(got)), Ok(AcquireOutcome::Granted(expected))) if !strict => {
            assert_eq!(got.key, expected.key);
        }
        // Two requests that time out together may still see each other in the queue.
        (Ok(AcquireOutcome::Busy(_)), Ok(AcquireOutcome::Busy(_))) if !strict => {}
        (Ok(got), Ok(expected)) => assert_eq!(got, expected),
        (Err(got), Err(expected)) => assert_eq!(got.outcome(), expected.outcome(), "{got} {expected}"),
        (got, expected) => panic!("{got:?} instead of {expected:?}"),
    }
}

#[tokio::test]
async fn the_store_does_what_the_table_does() {
    compare(1).await;
}

#[tokio::test]
async fn several_stores_do_together_what_the_table_does() {
    compare(3).await;
}

/// `LOCKKEEPER_SEED` repeats one run, `LOCKKEEPER_SEEDS` makes more of them.
async fn compare(stores: usize) {
    let count = std::env::var("LOCKKEEPER_SEEDS").map_or(15, |count| count.parse().unwrap());
    let seeds = match std::env::var("LOCKKEEPER_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=count).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect(),
    };
    let (mut waited, mut served, mut slow) = (0, 0, 0);
    for seed in seeds {
        println!("LOCKKEEPER_SEED={seed}");
        let dir = Dir::new();
        let clock = VirtualClock::default();
        let stores = (0..stores).map(|_| open_by(&dir.db(), &clock)).collect();
        let mut pair = Pair {
            dice: Dice(seed),
            clock,
            stores,
            table: Table::default(),
            attempts: 0,
            keys: Vec::new(),
            waiting: HashMap::new(),
            waited: 0,
            served: 0,
            slow: 0,
        };
        pair.request().await;
        for _ in 0..150 {
            match pair.dice.roll(10) {
                0..=3 => pair.request().await,
                4..=6 => pair.release().await,
                7 => pair.renew().await,
                8 if pair.dice.one_in(3) => pair.take_away().await,
                _ => pair.pass().await,
            }
            pair.compare().await;
        }
        waited += pair.waited;
        served += pair.served;
        slow += pair.slow;
    }
    println!("{waited} waited, {served} of them were answered; {slow} times it took longer than 300 ms");
    assert!(waited > served && served > 10, "nothing was tested: {waited} {served}");
}
