//! Values that one caller computes, and all use.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::result::Result;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockkeeper::cached::{Cached, CachedError, CachedStart, CachedValue, RefreshPermit, ValueState};
use lockkeeper::{BootInstant, Error, Fence, Page, WallTime};
use lockkeeper_host::Timer;

use super::lossy::{self, LossyStore};
use super::register::has_records;
use super::*;

/// Whether the store has records; if not, a cached value must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let refused = keeper.cached("k").claim().await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

/// A value that stays fresh, and a refresher that is not taken over, however slow the machine is.
fn lasting(keeper: &Lockkeeper, key: &str) -> Cached {
    keeper.cached(key).ttl(LONG).lease(LONG).early_refresh(0.0).jitter(0.0)
}

/// It must be this caller's turn to compute.
async fn permit(cached: Cached) -> Box<RefreshPermit> {
    match soon("a claim is answered", cached.claim()).await.unwrap() {
        CachedStart::Refresh(permit) => permit,
        other => panic!("it was to be computed by this caller: {other:?}"),
    }
}

/// There must be a value.
async fn found(cached: Cached) -> CachedValue<Vec<u8>> {
    match soon("a claim is answered", cached.claim()).await.unwrap() {
        CachedStart::Value(value) => value,
        other => panic!("there was to be a value: {other:?}"),
    }
}

async fn store(cached: Cached, value: &[u8]) -> Fence {
    let permit = permit(cached).await;
    let fence = permit.fence();
    permit.finish(value).await.unwrap();
    fence
}

pub async fn a_value_is_computed_once_and_then_found<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let work = |fence: Fence| async move { Ok::<u64, String>(fence.get()) };
    let first = lasting(&a, "k").get(work).await.unwrap();
    assert_eq!((first.value, first.state), (first.fence.get(), ValueState::Computed));
    assert_eq!(first.not_stored, None);
    for keeper in [&a, &b] {
        let again = lasting(keeper, "k").get(work).await.unwrap();
        let told = (again.value, again.fence, again.state);
        assert_eq!(told, (first.value, first.fence, ValueState::Fresh), "it was computed again");
    }
    let other = lasting(&b, "other").get(work).await.unwrap();
    assert!(other.state == ValueState::Computed && other.fence > first.fence, "another key is another value");
    is_free(&h.client().await, "cached/k").await;
}

pub async fn all_who_want_a_cold_value_share_one_computation<H: Harness>(h: H) {
    let first = h.keeper().await;
    if !has(&first).await {
        return;
    }
    let runs = Arc::new(AtomicUsize::new(0));
    let mut callers = Vec::new();
    for _ in 0..6 {
        let (keeper, runs) = (h.keeper().await, runs.clone());
        let work = move |fence: Fence| async move {
            runs.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok::<u64, String>(fence.get())
        };
        callers.push(tokio::spawn(async move { lasting(&keeper, "k").get(work).await }));
    }
    let mut values = Vec::new();
    for caller in callers {
        let told = soon("every caller is answered", while_time_passes(&h, caller)).await.unwrap();
        values.push(told.map(|found| found.value).map_err(|error| error.to_string()));
    }
    let runs = runs.load(Ordering::SeqCst);
    let same = values.iter().all(|value| value.is_ok() && *value == values[0]);
    assert!(runs == 1 && same, "one computation was to serve all: {runs}, {values:?}");
}

pub async fn an_old_value_is_given_at_once_while_one_caller_computes<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let kept = |keeper: &Lockkeeper| lasting(keeper, "k").stale_while(LONG);
    let old = store(kept(&a).ttl(SHORT), b"old").await;
    h.pass(SHORT * 2).await;
    let refresh = match soon("a claim is answered", kept(&b).claim()).await.unwrap() {
        CachedStart::Refresh(permit) => permit,
        other => panic!("an old value is called fresh: {other:?}"),
    };
    let told = found(kept(&a)).await;
    assert_eq!((&told.value[..], told.fence, told.state), (&b"old"[..], old, ValueState::Stale));
    // One that waits gets the old value when its wait is over, or the new one.
    let waits = found(kept(&a).wait(Duration::from_millis(200)));
    assert_eq!(while_time_passes(&h, waits).await.state, ValueState::Stale);
    let waiter = kept(&a).wait(LONG);
    let waiter = tokio::spawn(async move { waiter.claim().await });
    queue_reaches(&h.client().await, &name("cached/k"), 1).await;
    let new = refresh.fence();
    refresh.finish(b"new").await.unwrap();
    match soon("the waiter is answered", while_time_passes(&h, waiter)).await.unwrap() {
        Ok(CachedStart::Value(value)) => assert_eq!((&value.value[..], value.fence), (&b"new"[..], new)),
        other => panic!("the waiter was to get the new value: {other:?}"),
    }
}

pub async fn a_caller_without_a_value_waits_no_longer_than_it_says<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let refresh = permit(lasting(&a, "k")).await;
    for wait in [Duration::ZERO, Duration::from_millis(200)] {
        let waits = lasting(&b, "k").wait(wait).claim();
        match soon("the wait is over", while_time_passes(&h, waits)).await {
            Err(Error::Busy(busy)) => assert_eq!(busy.held[0].fence, refresh.fence()),
            other => panic!("another caller computes: {other:?}"),
        }
    }
    refresh.finish(b"x").await.unwrap();
    assert_eq!(found(lasting(&b, "k").wait(Duration::ZERO)).await.value, b"x");
}

pub async fn an_old_value_goes_when_its_time_is_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let kept = |keeper: &Lockkeeper| lasting(keeper, "k").ttl(SHORT).stale_while(SHORT);
    store(kept(&a), b"old").await;
    // A refresh that fails gives the old value no more time.
    h.pass(SHORT * 3 / 2).await;
    let _ = permit(kept(&b)).await.fail("no").await.unwrap();
    h.pass(SHORT).await;
    let told = kept(&a).current().await.unwrap();
    assert_eq!(told, None, "an old value outlived its time");
}

pub async fn a_failed_refresh_keeps_the_old_value_and_others_back_off<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let kept = |keeper: &Lockkeeper| lasting(keeper, "k").stale_while(LONG).back_off(LONG);
    let old = store(kept(&a).ttl(SHORT), b"\"old\"").await;
    h.pass(SHORT * 2).await;
    let fails = |_| async { Err::<String, _>("the source is down".to_owned()) };
    let told = kept(&a).get(fails).await.unwrap();
    let why = told.refresh_error.as_deref();
    assert_eq!((&*told.value, told.fence, told.state), ("old", old, ValueState::Stale));
    assert_eq!(why, Some("the source is down"));
    for keeper in [&a, &b] {
        let tried = |_| async { panic!("a failed refresh is tried by the next caller at once") };
        let told = kept(keeper).get::<String, String, _>(tried).await.unwrap();
        assert_eq!((&*told.value, told.refresh_error.as_deref()), ("old", Some("the source is down")));
    }
    // When the back-off is over one caller tries again.
    let mine = |keeper: &Lockkeeper| lasting(keeper, "soon").stale_while(LONG).back_off(SHORT);
    store(mine(&a).ttl(SHORT), b"old").await;
    h.pass(SHORT * 2).await;
    permit(mine(&a)).await.fail("no").await.unwrap().expect("the old value");
    h.pass(SHORT * 2).await;
    assert!(store(mine(&b), b"new").await > old);
    assert_eq!(found(mine(&a)).await.value, b"new");
}

pub async fn a_failure_is_the_answer_for_a_while_if_so_chosen<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let fails = |_| async { Err::<u64, _>("no such page".to_owned()) };
    let negative = |keeper: &Lockkeeper| lasting(keeper, "k").negative(LONG);
    let told = negative(&a).get(fails).await;
    assert!(matches!(&told, Err(CachedError::Work(why)) if why == "no such page"), "{told:?}");
    let tried = |_| async { panic!("a failure that is the answer is tried again") };
    let told = soon("it is answered", negative(&b).get::<u64, String, _>(tried)).await;
    assert!(matches!(&told, Err(CachedError::Failed(failed)) if failed.error == "no such page"), "{told:?}");
    // Otherwise a caller waits until the back-off is over, and tries again.
    let patient = |keeper: &Lockkeeper| lasting(keeper, "patient").back_off(SHORT);
    assert!(patient(&a).get(fails).await.is_err());
    let tries = patient(&b).get(|_| async { Ok::<u64, String>(7) });
    assert_eq!(soon("it is tried again", while_time_passes(&h, tries)).await.unwrap().value, 7);
}

/// A refresher that is paused, and whose lock is taken by another: once over an old value, and once over nothing.
pub async fn a_late_refresher_does_not_overwrite_a_newer_value<H: Harness>(h: H) {
    let (a, b, client) = (h.keeper().await, h.keeper().await, h.client().await);
    if !has(&a).await {
        return;
    }
    for key in ["cold", "warm"] {
        let kept = |keeper: &Lockkeeper| lasting(keeper, key).stale_while(LONG);
        if key == "warm" {
            store(kept(&a).ttl(SHORT), b"old").await;
            h.pass(SHORT * 2).await;
        }
        let late = permit(kept(&a)).await;
        client.break_lock(&name(&format!("cached/{key}")), "a law").await.unwrap();
        let newer = store(kept(&b), b"new").await;
        let told = late.finish(b"late").await;
        let kept = kept(&b).current().await.unwrap().expect("a value");
        assert_eq!(kept.value, b"new", "a late refresher overwrote a newer value");
        assert!(matches!(told, Err(Error::Stale { seen, .. }) if seen == newer), "{told:?}");
        assert_eq!(kept.state, ValueState::Fresh, "a late refresher took the mark of a newer value away");
    }
}

pub async fn a_late_refresher_writes_nothing_where_a_newer_value_has_ended<H: Harness>(h: H) {
    let (a, b, client) = (h.keeper().await, h.keeper().await, h.client().await);
    if !has(&a).await {
        return;
    }
    let late = permit(lasting(&a, "k").lease(SHORT * 15)).await;
    client.break_lock(&name("cached/k"), "a law").await.unwrap();
    store(lasting(&b, "k").ttl(SHORT), b"new").await;
    h.pass(SHORT * 2).await;
    // The next renewal tells the late one of the break.
    let lost = soon("the loss is told", while_time_passes(&h, late.guard().lost())).await;
    let told = late.finish(b"late").await;
    let found = lasting(&b, "k").stale_while(LONG).current().await.unwrap();
    assert_eq!(found, None, "a late refresher brought an old value back, after {lost}");
    assert!(told.is_err(), "{told:?}");
}

/// A refresher that begins, and is never heard of again.
pub async fn a_refresher_that_dies_is_taken_over<H: Harness>(h: H) {
    let (keeper, client) = (h.keeper().await, h.client().await);
    if !has(&keeper).await {
        return;
    }
    let dead = take(&client, &with(request("cached/k"), |request| request.ttl = SHORT)).await;
    let record = format!("{{\"v\":1,\"fence\":{}}}\n", dead.fence);
    let absent = lockkeeper_core::Expect::Absent;
    client.write(&name("cached/k"), record.as_bytes(), absent, None).await.unwrap();
    let work = |fence: Fence| async move { Ok::<u64, String>(fence.get()) };
    let takes_over = lasting(&keeper, "k").get(work);
    let told = soon("it is taken over", while_time_passes(&h, takes_over)).await.unwrap();
    assert!(told.fence > dead.fence && told.state == ValueState::Computed, "{told:?}");
}

pub async fn a_dropped_refresh_lets_the_next_caller_compute<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    let dropped = permit(lasting(&a, "k")).await;
    let old = dropped.fence();
    let waits = tokio::spawn(async move { lasting(&b, "k").claim().await });
    drop(dropped);
    match soon("the next caller computes", while_time_passes(&h, waits)).await.unwrap().unwrap() {
        CachedStart::Refresh(next) => assert!(next.fence() > old),
        other => panic!("{other:?}"),
    }
}

pub async fn a_value_that_takes_long_is_refreshed_early<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&a).await {
        return;
    }
    // The work takes a second, and with the largest beta about every third caller begins it a hundred seconds early.
    let early = |keeper: &Lockkeeper, beta| lasting(keeper, "k").ttl(SHORT * 100).early_refresh(beta);
    let slow = permit(early(&a, 0.0)).await;
    h.pass(SHORT).await;
    slow.finish(b"first").await.unwrap();
    for _ in 0..50 {
        assert_eq!(found(early(&b, 0.0)).await.state, ValueState::Fresh, "beta 0 refreshes nothing early");
    }
    let refreshed = async {
        loop {
            if let CachedStart::Refresh(permit) = early(&b, 100.0).claim().await.unwrap() {
                break permit;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let refresh = soon("a value is refreshed early", refreshed).await;
    // One caller does it, and the others are not held up.
    for _ in 0..20 {
        assert_eq!(found(early(&a, 100.0)).await.value, b"first");
    }
    refresh.finish(b"second").await.unwrap();
    assert_eq!(found(early(&a, 0.0)).await.value, b"second");
}

/// A clock whose wall time is a day off.
#[derive(Debug)]
struct DayOff {
    clock: Arc<dyn Clock>,
    ahead: bool,
}

impl Clock for DayOff {
    fn now(&self) -> BootInstant {
        self.clock.now()
    }
    fn wall(&self) -> WallTime {
        let (wall, day) = (self.clock.wall().as_micros(), 86_400_000_000);
        WallTime::from_micros(if self.ahead { wall + day } else { wall - day })
    }
    fn start(&self) -> std::io::Result<()> {
        self.clock.start()
    }
    fn call_at(&self, at: BootInstant, then: Box<dyn FnOnce() + Send>) -> Timer {
        self.clock.call_at(at, then)
    }
}

/// Wall clocks of callers that are off change neither that a value is fresh nor that it ends.
pub async fn the_clock_of_the_store_decides_what_is_fresh<H: Harness>(h: H) {
    let right = h.keeper().await;
    if !has(&right).await {
        return;
    }
    for (key, ahead) in [("ahead", true), ("behind", false)] {
        let clock = Arc::new(DayOff { clock: h.clock(), ahead });
        let wrong = Lockkeeper::with_store(h.client().await, clock);
        let kept = |keeper: &Lockkeeper| lasting(keeper, key).early_refresh(100.0);
        store(kept(&wrong), b"long").await;
        for _ in 0..20 {
            assert_eq!(found(kept(&right)).await.state, ValueState::Fresh);
        }
        let short = format!("{key}/short");
        let brief = |keeper: &Lockkeeper| lasting(keeper, &short).ttl(SHORT);
        store(brief(&right), b"short").await;
        h.pass(SHORT * 2).await;
        let told = brief(&wrong).current().await.unwrap();
        assert_eq!(told, None, "a caller whose clock is off calls an old value fresh");
    }
}

pub async fn large_cached_values_come_back_byte_for_byte<H: Harness>(h: H) {
    let (a, b, client) = (h.keeper().await, h.keeper().await, h.client().await);
    if !has(&a).await {
        return;
    }
    let chunks = || async {
        let found = client.scan("cached-part/", &Page::FIRST).await.unwrap();
        found.records.len()
    };
    let kept = |keeper: &Lockkeeper| lasting(keeper, "k").ttl(SHORT).stale_while(LONG);
    // In the record, in one chunk, in three; and then in the record again.
    for (size, count) in [(1000, 0), (70_000, 1), (2_100_000, 3), (10, 0)] {
        let bytes: Vec<u8> = (0..size).map(|i| (i * 31 + i / 251) as u8).collect();
        store(kept(&a), &bytes).await;
        let told = kept(&b).current().await.unwrap();
        assert!(told.is_some_and(|told| told.value == bytes), "{size} bytes did not come back");
        assert_eq!(chunks().await, count, "the chunks of a value that was replaced are left");
        h.pass(SHORT * 2).await;
    }
    let huge = permit(kept(&a)).await.finish(&vec![0; (64 << 20) + 1]).await;
    assert!(matches!(&huge, Err(Error::Limited(why)) if why.contains("67108864")), "{huge:?}");
}

/// A value of which a chunk is missing is computed again, and not given back.
pub async fn a_damaged_value_is_computed_again<H: Harness>(h: H) {
    let (a, client) = (h.keeper().await, h.client().await);
    if !has(&a).await {
        return;
    }
    store(lasting(&a, "k"), &vec![7; 1_600_000]).await;
    let found = client.scan("cached-part/", &Page::FIRST).await.unwrap().records;
    let last = found.last().expect("it is in chunks");
    client.delete(&last.key, lockkeeper_core::Expect::Any).await.unwrap();
    match soon("a claim is answered", lasting(&a, "k").claim()).await.unwrap() {
        CachedStart::Refresh(permit) => permit.finish(b"again").await.unwrap(),
        CachedStart::Value(value) => panic!("a damaged value was given back: {} bytes", value.value.len()),
        other => panic!("{other:?}"),
    }
}

pub async fn a_late_request_brings_no_old_value_back<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&calm).await {
        return;
    }
    let mut delivered_late = 0;
    let work = |value: &'static [u8]| move |_| async move { Ok::<_, String>(value.to_vec()) };
    let mut networks = Vec::new();
    for seed in lossy::seeds() {
        let client = h.client().await;
        for round in 0..10 {
            // A network for each key: otherwise the requests for one key deliver those for another.
            let network = LossyStore::new(client.clone(), seed * 100 + round);
            let (key, keeper) =
                (format!("{seed}/{round}"), Lockkeeper::with_store(network.clone(), h.clock()));
            let first = lasting(&keeper, &key).ttl(SHORT).stale_while(LONG).get_bytes(work(b"first"));
            let _ = soon("it ends", while_time_passes(&h, first)).await;
            networks.push((key, network));
        }
    }
    h.pass(SHORT * 3 / 2).await;
    for (key, network) in networks {
        let kept = || lasting(&calm, &key).stale_while(LONG);
        let second = soon("it ends", while_time_passes(&h, kept().get_bytes(work(b"second")))).await.unwrap();
        network.deliver().await;
        let told = kept().current().await.unwrap();
        let told = told.map(|told| (told.value, told.fence, told.state));
        let newest = Some((second.value, second.fence, ValueState::Fresh));
        assert_eq!(told, newest, "a late request brought an old value back");
        delivered_late += network.delivered_late();
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
}

pub async fn a_cached_value_leaves_nothing<H: Harness>(h: H) {
    let (a, client) = (h.keeper().await, h.client().await);
    if !has(&a).await {
        return;
    }
    let brief = |key: &str| a.cached(key).ttl(SHORT).stale_while(SHORT).lease(SHORT).back_off(SHORT);
    store(brief("stored"), &[1; 10]).await;
    assert_eq!(permit(brief("failed")).await.fail("no").await.unwrap(), None);
    drop(permit(brief("dropped")).await);
    h.pass(SHORT * 4).await;
    eventually("nothing is left behind", || async {
        client.scan("cached", &Page::FIRST).await.unwrap().records.is_empty()
    })
    .await;
    for key in ["stored", "failed", "dropped"] {
        is_free(&client, &format!("cached/{key}")).await;
    }
}

pub async fn bad_input_to_a_cached_value_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let (short, key) = (Duration::from_millis(1), || keeper.cached("k"));
    let mut bad = vec![
        key().ttl(short),
        key().lease(short),
        key().lease(Duration::from_secs(90_000)),
        key().back_off(short),
        key().negative(short),
    ];
    bad.extend([-0.1, 100.1, f64::NAN, f64::INFINITY].map(|beta| key().early_refresh(beta)));
    bad.extend([-0.1, 0.6, f64::NAN].map(|part| key().jitter(part)));
    bad.extend(["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)].map(|key| keeper.cached(key)));
    for bad in bad {
        let shown = format!("{bad:?}");
        let refused: Result<_, Error> = bad.claim().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{shown}: {refused:?}");
    }
    is_free(&h.client().await, "cached/k").await;
    assert!(keeper.registers("", &Page::FIRST).await.unwrap().0.is_empty());
    // A record of another program under that name is reported, and not overwritten.
    keeper.register::<u64>("cached/k").update(|_| 7).await.unwrap();
    let refused = keeper.cached("k").claim().await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "another's record was written over: {refused:?}");
    assert_eq!(keeper.register::<u64>("cached/k").read().await.unwrap().unwrap().value, 7);
    let longest = "x".repeat(lockkeeper::KEY_BYTES);
    store(lasting(&keeper, &longest), &vec![0; 100_000]).await;
    // For ever is a time like any other.
    store(lasting(&keeper, "long").ttl(Duration::MAX).stale_while(Duration::MAX), b"x").await;
    assert_eq!(found(lasting(&keeper, "long")).await.value, b"x");
}
