//! What a held lock costs, counted: bytes, and pieces of memory asked for. A program of its own, because every
//! allocation of the process is counted.

use std::alloc::System;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::table::{Answer, Now, Table};
use lockkeeper_core::{
    Attempt, BootInstant, Holder, LockName, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey, WallTime,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MILLION: usize = 1_000_000;
const TTL: Duration = Duration::from_secs(3600);

fn now(ms: u64) -> Now {
    Now { moment: BootInstant::from_nanos(ms * 1_000_000), wall: WallTime::from_micros(ms * 1000) }
}

fn attempt(n: usize) -> Attempt {
    // Spread, as random ones are.
    let n = (n as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    Attempt::from_bytes(n.to_be_bytes())
}

fn name(n: usize) -> LockName {
    LockName::new(format!("orders/{:09}", n * 7919 % 1_000_000_007)).unwrap()
}

fn request(n: usize, holder: &Arc<Holder>) -> LockRequest {
    LockRequest::new(attempt(n), name(n), TTL, holder.clone())
}

fn bytes(region: &Region<'_, System>) -> isize {
    let stats = region.change();
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

/// What one operation costs.
#[derive(Clone, Copy)]
struct Cost {
    what: &'static str,
    allocated: f64,
    nanos: f64,
}

const BATCH: usize = 1000;

// The machines must not ask for the time; a test that measures them has to.
#[allow(clippy::disallowed_methods)]
fn measure(what: &'static str, mut one: impl FnMut(usize)) -> Cost {
    let region = Region::new(COUNTED);
    let start = std::time::Instant::now();
    (0..BATCH).for_each(&mut one);
    let nanos = start.elapsed().as_nanos() as f64 / BATCH as f64;
    Cost { what, allocated: region.change().bytes_allocated as f64 / BATCH as f64, nanos }
}

/// A batch of each operation on locks of its own, beside those that are held. Leaves the table as it was.
fn work(table: &mut Table, holder: &Arc<Holder>) -> [Cost; 5] {
    let own = |n: usize| 2 * MILLION + n * 37;
    let requests: Vec<LockRequest> = (0..BATCH).map(|n| request(own(n), holder)).collect();
    let keys: Vec<RequestKey> = requests.iter().map(|request| request.key.clone()).collect();
    let short: Vec<LockRequest> = requests
        .iter()
        .map(|request| LockRequest { ttl: Duration::from_secs(1), ..request.clone() })
        .collect();
    let at = now(2000);
    let grant = measure("grant", |n| {
        assert!(matches!(table.handle_request(at, requests[n].clone()), Ok(Answer::Granted(_))));
    });
    let renew =
        measure("renew", |n| assert_eq!(table.handle_renew(at, &keys[n].attempt), RenewOutcome::Renewed));
    let busy = measure("busy", |n| {
        let key = RequestKey { attempt: attempt(own(n) + 1), ..keys[n].clone() };
        let other = LockRequest { key, ..requests[n].clone() };
        assert!(matches!(table.handle_request(at, other), Ok(Answer::Busy(_))));
    });
    let release =
        measure("release", |n| assert_eq!(table.handle_release(at, &keys[n]), ReleaseOutcome::Released));
    for (n, request) in short.into_iter().enumerate() {
        let at = Now { moment: at.moment + Duration::from_micros(n as u64), ..at };
        assert!(matches!(table.handle_request(at, request), Ok(Answer::Granted(_))));
    }
    let held = table.held();
    let expire = measure("expiry", |n| {
        let moment = at.moment + Duration::from_secs(1) + Duration::from_micros(n as u64);
        table.handle_timeout(Now { moment, ..at });
        assert_eq!(table.held(), held - n - 1);
    });
    [grant, renew, busy, release, expire]
}

/// The best of several, because other processes get in the way.
fn best(table: &mut Table, holder: &Arc<Holder>) -> [Cost; 5] {
    let mut best = work(table, holder);
    for _ in 0..9 {
        for (best, again) in best.iter_mut().zip(work(table, holder)) {
            best.nanos = best.nanos.min(again.nanos);
            best.allocated = best.allocated.min(again.allocated);
        }
    }
    best
}

/// One test, so that nothing else allocates meanwhile.
///
/// That nothing scans cannot be seen in allocations alone, as a scan allocates nothing. So time is measured as well, but
/// only as a ratio within one process, with a bound that is generous for caches that no longer suffice and still far
/// below the factor of a thousand that a scan would show.
#[test]
fn a_million_held_locks_are_small_and_no_operation_scans_them() {
    let holder = Arc::new(Holder::new("host", 1, None).unwrap());
    let names: usize = (0..MILLION).map(|n| name(n).as_str().len()).sum();
    let mut few = None;

    let region = Region::new(COUNTED);
    let mut table = Table::default();
    for n in 0..MILLION {
        if n == 1000 {
            few = Some(best(&mut table, &holder));
        }
        let answer = table.handle_request(now(n as u64 / 1000), request(n, &holder));
        assert!(matches!(answer, Ok(Answer::Granted(_))));
    }
    assert_eq!(table.held(), MILLION);
    let each = (bytes(&region) as f64 - names as f64) / MILLION as f64;
    println!("{each:.1} bytes for each of {MILLION} held locks, beyond its name");
    assert!(each <= 250.0, "{each:.1} bytes for each lock");

    for (few, many) in few.unwrap().into_iter().zip(best(&mut table, &holder)) {
        let story = format!(
            "{}: {:.0} bytes and {:.0} ns with a thousand held, {:.0} bytes and {:.0} ns with a million",
            few.what, few.allocated, few.nanos, many.allocated, many.nanos
        );
        println!("{story}");
        assert!(many.allocated <= few.allocated * 1.5 + 64.0, "{story}");
        assert!(many.nanos <= few.nanos * 12.0 + 2_000.0, "{story}");
    }
}
