//! Bugs that came to light when the naive table was written down and compared with the real one, each with its story.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::table::{Answer, Now, Table, TableEffect};
use lockkeeper_core::{
    AcquireOutcome, Attempt, BootInstant, Error, EventKind, Holder, LockName, LockRequest, Mode, Names,
    Owner, Wait, WallTime,
};

fn now(ms: u64) -> Now {
    Now { moment: BootInstant::from_nanos(ms * 1_000_000), wall: WallTime::from_micros(1) }
}

fn name(n: &str) -> LockName {
    LockName::new(n).unwrap()
}

/// An exclusive ask that waits for ever, with a ttl of one second.
fn request(who: u8, names: &str, with: impl FnOnce(&mut LockRequest)) -> LockRequest {
    let names = Names::new(names.split(' ').map(name)).unwrap();
    let holder = Arc::new(Holder::new("host", who.into(), None).unwrap());
    let mut request = LockRequest::new(Attempt::from_bytes([who; 16]), names, Duration::from_secs(1), holder);
    request.wait = Wait::Forever;
    with(&mut request);
    request
}

fn owned(owner: u8) -> impl FnOnce(&mut LockRequest) {
    move |request| request.owner = Some(Owner::from_bytes([owner; 16]))
}

/// Who was let in from the line, in order.
fn let_in(table: &mut Table) -> Vec<u8> {
    let granted = |effect| match effect {
        TableEffect::Answer(attempt, Ok(AcquireOutcome::Granted(_))) => Some(attempt.as_bytes()[0]),
        _ => None,
    };
    std::iter::from_fn(|| table.poll_effect()).filter_map(granted).collect()
}

/// A request without an owner was taken for one that waits for no other. But it was queued for two names, one of
/// them ours, and we were about to stand behind it for the other: both would have waited for ever.
#[test]
fn a_deadlock_through_an_ask_without_an_owner_is_told() {
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "a", owned(1))).unwrap();
    assert_eq!(table.handle_request(now(0), request(2, "a b", |_| ())).unwrap(), Answer::Waiting);
    let error = table.handle_request(now(0), request(3, "b", owned(1))).unwrap_err();
    assert!(matches!(&error, Error::Deadlock(names) if *names == [name("b"), name("a")]), "{error:?}");
}

/// "One of several permits has to go" was taken to mean any one. A request for the only permit needs all of them to be released.
#[test]
fn a_deadlock_over_the_only_permit_is_told() {
    let permits = |owner, n| {
        move |request: &mut LockRequest| {
            request.mode = Mode::Permit(n);
            owned(owner)(request);
        }
    };
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "q", owned(1))).unwrap();
    table.handle_request(now(0), request(2, "p", permits(2, 3))).unwrap();
    table.handle_request(now(0), request(3, "p", permits(3, 3))).unwrap();
    assert_eq!(table.handle_request(now(0), request(4, "q", owned(2))).unwrap(), Answer::Waiting);
    let only = table.handle_request(now(0), request(5, "p", permits(1, 1)));
    assert!(matches!(only, Err(Error::Deadlock(_))), "{only:?}");
}

/// An owner queued for two names was refused a second request for one of them as soon as another request was between the two,
/// though it re-enters as soon as the first is granted.
#[test]
fn an_owner_may_ask_again_for_a_part_of_what_it_stands_in_line_for() {
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "a", |_| ())).unwrap();
    table.handle_request(now(0), request(2, "a b", owned(2))).unwrap();
    table.handle_request(now(0), request(3, "b", owned(3))).unwrap();
    assert_eq!(table.handle_request(now(0), request(4, "b", owned(2))).unwrap(), Answer::Waiting);
    table.handle_release(now(1), &request(1, "a", |_| ()).key);
    assert_eq!(let_in(&mut table), [2, 4]);
}

/// A watcher of `b` never heard that the grant of `a` and `b` was gone.
#[test]
fn a_break_is_news_for_every_name_of_the_grant() {
    let mut table = Table::default();
    table.set_watched(true);
    table.handle_request(now(0), request(1, "a b c", |_| ())).unwrap();
    table.handle_break(now(1), &name("b"), "why").unwrap();
    let broken = |effect| match effect {
        TableEffect::Event(event) if matches!(event.kind, EventKind::Broken { .. }) => Some(event.name),
        _ => None,
    };
    let names: Vec<LockName> = std::iter::from_fn(|| table.poll_effect()).filter_map(broken).collect();
    assert_eq!(names, [name("b"), name("a"), name("c")]);
}

/// Readers of `a` were named as being in the way of another reader, who was kept out by the writer of `b`.
#[test]
fn busy_names_who_really_is_in_the_way() {
    let shared = |request: &mut LockRequest| (request.mode, request.wait) = (Mode::Shared, Wait::No);
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "a", shared)).unwrap();
    table.handle_request(now(0), request(2, "b", |_| ())).unwrap();
    let Answer::Busy(busy) = table.handle_request(now(0), request(3, "a b", shared)).unwrap() else {
        panic!()
    };
    assert_eq!((busy.name, busy.held[0].holder.pid), (name("b"), 2));
}

/// Of two leases that were over at the same look, the table ended one and granted its queue before it looked at the other.
/// So a waiter came in beside a grant that was over, and past the delay that this grant's end had begun.
#[test]
fn everything_that_is_over_has_ended_before_anybody_is_let_in() {
    let permit = |delay| {
        move |request: &mut LockRequest| {
            request.mode = Mode::Permit(2);
            request.lock_delay = Duration::from_millis(delay);
        }
    };
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "p", permit(0))).unwrap();
    table.handle_request(now(10), request(2, "p", permit(500))).unwrap();
    table.handle_request(now(10), request(3, "p", permit(0))).unwrap();
    table.handle_timeout(now(1100));
    assert_eq!(let_in(&mut table), []);
    table.handle_timeout(now(1510));
    assert_eq!(let_in(&mut table), [3]);
}

/// Who came in first when several leases ended together hung on the ids that the names happened to have. A table that
/// is built up again from what a store remembers has other ids, and would have given out other fences.
#[test]
fn those_who_came_first_are_let_in_first_across_names() {
    let mut table = Table::default();
    table.handle_request(now(0), request(1, "a", |_| ())).unwrap();
    table.handle_request(now(0), request(2, "b", |_| ())).unwrap();
    table.handle_request(now(1), request(3, "b", |_| ())).unwrap();
    table.handle_request(now(2), request(4, "a", |_| ())).unwrap();
    table.handle_timeout(now(1000));
    assert_eq!(let_in(&mut table), [3, 4]);
}
