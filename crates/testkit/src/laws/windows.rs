//! One run per window of time.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use lockkeeper::{Error, Guard, Run, Window};

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
async fn ours(keeper: &Lockkeeper, guard: &Guard, at_ms: u64) -> Run {
    match keeper.windows("nightly").begin(guard, at_ms).await.unwrap() {
        Window::Ours(run) => run,
        Window::Done { newest_ms, .. } => panic!("{at_ms} was to be ours, but {newest_ms} is done"),
    }
}

async fn is_done(keeper: &Lockkeeper, guard: &Guard, at_ms: u64) -> bool {
    matches!(keeper.windows("nightly").begin(guard, at_ms).await.unwrap(), Window::Done { .. })
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
                assert_eq!(run.previous_ms, (day > 0).then(|| at - DAY));
                run.finish().await.unwrap();
            } else {
                assert!(is_done(keeper, &guard, at).await, "it was run twice");
                // Nor is one that is past.
                assert!(is_done(keeper, &guard, at - 1).await);
            }
            guard.release().await.unwrap();
        }
    }
}

pub async fn a_window_that_was_not_finished_is_taken_over<H: Harness>(h: H) {
    let (a, b) = (h.keeper().await, h.keeper().await);
    if !has(&h, &a).await {
        return;
    }
    let dead = locked(&h, &a).await;
    ours(&a, &dead, TODAY - DAY).await.finish().await.unwrap();
    let late = ours(&a, &dead, TODAY).await;
    // It is broken and does not know it yet, as after a pause.
    h.client().await.break_lock(&name("nightly"), "a law").await.unwrap();
    let guard = locked(&h, &b).await;
    let run = ours(&b, &guard, TODAY).await;
    assert!(run.taken_over && run.fence() > late.fence());
    assert_eq!(run.previous_ms, Some(TODAY - DAY), "what was before is not forgotten over it");
    match late.finish().await {
        Err(Error::Stale { presented, seen }) => assert_eq!((presented, seen), (dead.fence(), guard.fence())),
        other => panic!("a late end was to be refused: {other:?}"),
    }
    run.finish().await.unwrap();
    assert!(is_done(&b, &guard, TODAY).await);
}

pub async fn a_clock_that_is_far_off_is_told<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&h, &keeper).await {
        return;
    }
    let guard = locked(&h, &keeper).await;
    let now = h.clock().wall().as_micros() / 1000;
    ours(&keeper, &guard, now + 30 * DAY).await.finish().await.unwrap();
    let told = keeper.windows("nightly").begin(&guard, now).await;
    assert!(matches!(told, Err(Error::Unavailable(_))), "everything until then would be skipped: {told:?}");
    for bad in ["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)] {
        assert!(matches!(keeper.windows(bad).begin(&guard, now).await, Err(Error::Invalid(_))));
    }
}
