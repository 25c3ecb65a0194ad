//! One run per window of time.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper::windows::{Window, WindowRun};

use lockkeeper::{Error, Guard};

use super::lossy::{self, LossyStore};
use super::outage::{self, FirstLoss, OutageStart, OutageStore};
use super::register::has_records;
use super::*;

const DAY: u64 = 86_400_000;
/// A day that every clock here has behind it.
const TODAY: u64 = 10_000 * DAY;

async fn locked<H: Harness>(h: &H, keeper: &Lockkeeper) -> Guard {
    let lock = keeper.lock("nightly").ttl(LONG).acquire();
    soon("the lock is free", while_time_passes(h, lock)).await.unwrap()
}

/// It must be ours.
async fn ours(keeper: &Lockkeeper, guard: &Guard, at_ms: u64) -> WindowRun {
    match keeper.windows("nightly").begin(guard, at_ms).await.unwrap() {
        Window::Ours(run) => *run,
        Window::Done(newest) => panic!("{at_ms} was to be ours, but {} is done", newest.at_ms),
    }
}

async fn is_done(keeper: &Lockkeeper, guard: &Guard, at_ms: u64) -> bool {
    matches!(keeper.windows("nightly").begin(guard, at_ms).await.unwrap(), Window::Done(_))
}

/// Whether the store has records; if not, windows must be refused.
async fn has<H: Harness>(h: &H, keeper: &Lockkeeper) -> bool {
    if has_records(keeper).await {
        return true;
    }
    let guard = locked(h, keeper).await;
    let refused = keeper.windows("nightly").begin(&guard, TODAY).await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

pub async fn a_window_is_run_once_by_all<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await, h.keeper().await];
    if !has(&h, &keepers[0]).await {
        return;
    }
    for day in 0..3 {
        let at = TODAY + day * DAY;
        for (i, keeper) in keepers.iter().enumerate() {
            let guard = locked(&h, keeper).await;
            if i == 0 {
                let run = ours(keeper, &guard, at).await;
                assert_eq!((run.fence(), run.taken_over), (guard.fence(), false));
                assert_eq!(run.previous_ms(), (day > 0).then(|| at - DAY));
                run.finish(&guard, 0).await.unwrap();
            } else {
                assert!(is_done(keeper, &guard, at).await, "it was run twice");
                // Nor is one that is past.
                assert!(is_done(keeper, &guard, at - 1).await);
            }
            guard.release().await.unwrap();
        }
    }
    // Also where replies and requests get lost, or come late.
    let mut delivered_late = 0;
    for (i, seed) in lossy::seeds().into_iter().enumerate() {
        let network = LossyStore::new(h.client().await, seed);
        let lossy = Lockkeeper::with_store(network.clone(), h.clock());
        for round in 0..4 {
            let at = TODAY + (10 + 4 * i as u64 + round) * DAY;
            let guard = locked(&h, &lossy).await;
            let run = soon("it begins", while_time_passes(&h, ours(&lossy, &guard, at))).await;
            soon("it ends", while_time_passes(&h, run.finish(&guard, 0))).await.unwrap();
            guard.release().await.unwrap();
            for _ in 0..2 {
                let guard = locked(&h, &keepers[0]).await;
                assert!(is_done(&keepers[0], &guard, at).await, "it was run twice after replies were lost");
                guard.release().await.unwrap();
                network.deliver().await;
            }
        }
        delivered_late += network.delivered_late();
    }
    assert!(delivered_late > 0, "no request came late: the law shows nothing");
}

pub async fn a_window_that_was_not_finished_is_taken_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&h, &a).await {
        return;
    }
    let dead = locked(&h, &a).await;
    ours(&a, &dead, TODAY - DAY).await.finish(&dead, 0).await.unwrap();
    let late = ours(&a, &dead, TODAY).await;
    // It is broken and does not know it yet, as after a pause.
    h.client().await.break_lock(&name("nightly"), "a law").await.unwrap();
    let guard = locked(&h, &b).await;
    let run = ours(&b, &guard, TODAY).await;
    assert!(run.taken_over && run.fence() > late.fence());
    assert_eq!(run.previous_ms(), Some(TODAY - DAY), "what was before is not forgotten over it");
    match late.finish(&dead, 0).await {
        Err(Error::Stale { presented, seen }) => assert_eq!((presented, seen), (dead.fence(), guard.fence())),
        other => panic!("a late end was to be refused: {other:?}"),
    }
    run.finish(&guard, 0).await.unwrap();
    assert!(is_done(&b, &guard, TODAY).await);
}

/// The run has ended when the connection fails for some seconds: the window counts as run, and no host runs it again.
pub async fn a_window_that_ends_in_an_outage_is_done<H: Harness>(h: H) {
    let calm = h.keeper().await;
    if !has(&h, &calm).await {
        return;
    }
    for (day, first) in [(0, FirstLoss::Applied), (1, FirstLoss::NotSent)] {
        let outage = Arc::new(OutageStore::new(h.client().await, h.clock(), OutageStart::Done, first));
        let keeper = Lockkeeper::with_store(outage.clone(), h.clock());
        let lock = keeper.lock("nightly").ttl(outage::TTL).acquire();
        let guard = soon("the lock is free", while_time_passes(&h, lock)).await.unwrap();
        let at = TODAY + day * DAY;
        let run = ours(&keeper, &guard, at).await;
        let told = soon("it ends", while_time_passes(&h, run.finish(&guard, 0))).await;
        assert!(
            told.is_ok(),
            "a window that was run counts as not run after an outage ({first:?}): {told:?}"
        );
        assert!(outage.refused() > 1, "the outage refused nothing: the law shows nothing");
        soon("it is given back", while_time_passes(&h, guard.release())).await.unwrap();
        let guard = locked(&h, &calm).await;
        assert!(is_done(&calm, &guard, at).await, "it was run twice");
        guard.release().await.unwrap();
    }
}

pub async fn a_clock_that_is_far_off_is_told<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&h, &keeper).await {
        return;
    }
    let guard = locked(&h, &keeper).await;
    let now = h.clock().wall().as_micros() / 1000;
    ours(&keeper, &guard, now + 30 * DAY).await.finish(&guard, 0).await.unwrap();
    let told = keeper.windows("nightly").begin(&guard, now).await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "everything until then would be skipped: {told:?}");
    for bad in ["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)] {
        assert!(matches!(keeper.windows(bad).begin(&guard, now).await, Err(Error::Invalid(_))));
    }
}

/// A run that failed is reported, and the job runs again as often as its limit allows.
pub async fn a_window_that_failed_is_told_and_run_again_as_often_as_it_may<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&h, &a).await {
        return;
    }
    let guard = locked(&h, &a).await;
    ours(&a, &guard, TODAY).await.finish(&guard, 7).await.unwrap();
    let record = b.windows("nightly").record().await.unwrap().expect("a run that failed is told");
    assert_eq!(record.exit_code(), Some(7), "how the run ended is not kept");
    let run = record.ended.clone().expect("it has ended");
    assert_eq!((run.at_ms, run.fence, record.succeeded.is_none()), (TODAY, guard.fence(), true));
    assert!(!run.host.is_empty() && run.started_ms <= run.ended_ms);
    assert!(is_done(&a, &guard, TODAY).await, "without retries a run that fails is a run");
    let windows = a.windows("nightly").retry_failed(2);
    for failures in 1..=2 {
        let Window::Ours(run) = windows.begin(&guard, TODAY).await.unwrap() else {
            panic!("a window that failed was not run again")
        };
        assert_eq!((run.failures(), run.taken_over), (failures, false));
        run.finish(&guard, 7).await.unwrap();
    }
    assert!(matches!(windows.begin(&guard, TODAY).await.unwrap(), Window::Done(_)), "it is run for ever");
    // The next one goes well, and the one before it is not forgotten.
    ours(&a, &guard, TODAY + DAY).await.finish(&guard, 0).await.unwrap();
    let Window::Ours(run) = windows.begin(&guard, TODAY + 2 * DAY).await.unwrap() else {
        panic!("it is ours")
    };
    drop(run);
    let Window::Ours(next) = windows.begin(&guard, TODAY + 3 * DAY).await.unwrap() else {
        panic!("it is ours")
    };
    assert_eq!(next.unfinished.as_ref().map(|run| run.at_ms), Some(TODAY + 2 * DAY), "who died is not told");
    let record = b.windows("nightly").record().await.unwrap().unwrap();
    assert_eq!(record.succeeded.map(|run| run.at_ms), Some(TODAY + DAY));
    // Another zone is another count.
    let told = b.windows("nightly").zone("Europe/Berlin").begin(&guard, TODAY + 4 * DAY).await;
    assert!(matches!(told, Ok(Window::Ours(_))), "the first who says a zone sets it: {told:?}");
    let told = b.windows("nightly").zone("UTC").begin(&guard, TODAY + 5 * DAY).await;
    assert!(matches!(told, Err(Error::Invalid(_))), "two zones would run some windows twice: {told:?}");
}
