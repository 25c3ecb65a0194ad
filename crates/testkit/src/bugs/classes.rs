//! The classes of bugs that lock managers have had, and the planted bug of each class with the law or the test that catches it.

use super::Bug;

/// A class of bugs, as the reliability notes number them.
#[derive(Clone, Copy, Debug)]
pub struct BugClass {
    /// Its number: B1 to B22.
    pub number: u8,
    /// The mistake.
    pub what: &'static str,
    /// The laws and tests that catch a bug of this class, at least one.
    pub caught_by: &'static [CaughtBy],
}

/// The law or the test that catches a planted bug.
#[derive(Clone, Copy, Debug)]
pub enum CaughtBy {
    /// A law, which the tests of the planted bugs run against a store with the bug.
    Law(Bug, &'static str),
    /// A test that makes the fault itself, in a file of this repository.
    Test {
        /// The planted fault.
        planted: &'static str,
        /// The file.
        file: &'static str,
        /// The name of the test function.
        test: &'static str,
    },
}

use CaughtBy::{Law, Test};

const fn class(number: u8, what: &'static str, caught_by: &'static [CaughtBy]) -> BugClass {
    BugClass { number, what, caught_by }
}

/// Every class.
pub const CLASSES: &[BugClass] = &[
    class(
        1,
        "renewals stop silently",
        &[
            Law(Bug::RenewalStopsAfterAnOutage, "a_guard_outlives_a_short_outage"),
            Law(Bug::RenewalDoesNothing, "a_guard_outlives_its_ttl"),
        ],
    ),
    class(2, "a renewal outlives the release", &[Law(Bug::RenewalRevives, "a_stale_renewal_is_harmless")]),
    class(
        3,
        "a client releases the lock of another one",
        &[Law(Bug::ReleaseWithoutOwnerCheck, "a_stale_release_is_harmless")],
    ),
    class(
        4,
        "a client forgets its lock before the release is confirmed",
        &[Law(Bug::ReleaseIsLost, "a_dropped_guard_frees_its_lock")],
    ),
    class(
        5,
        "a request without a reply leaves a queue entry",
        &[
            Law(Bug::RetryDoublesTheEntry, "a_queued_request_is_not_doubled"),
            Law(Bug::GhostInQueue, "a_dropped_request_can_be_withdrawn"),
        ],
    ),
    class(
        6,
        "a waiter that left is granted the lock",
        &[Law(Bug::GhostInQueue, "a_waiter_that_left_is_never_served")],
    ),
    class(
        7,
        "a waiter whose own lease ended believes that it has the lock",
        &[Law(Bug::WaiterExpiresUnseen, "a_waiter_that_waited_for_longer_than_its_ttl_has_the_lock")],
    ),
    class(
        8,
        "a client takes the hold of another session for its own",
        &[Law(Bug::EveryoneIsOneOwner, "strangers_do_not_reenter")],
    ),
    class(9, "a client stays disconnected", &[Law(Bug::NeverReconnects, "a_guard_outlives_a_short_outage")]),
    class(
        10,
        "a wake-up is lost",
        &[
            Law(Bug::NoWaiterIsWoken, "the_next_waiter_is_let_in_within_the_declared_time"),
            Law(Bug::SharerIsNotWoken, "requests_that_no_holder_excludes_are_all_granted"),
        ],
    ),
    class(
        11,
        "a store ends a lease that is renewed",
        &[Law(Bug::RenewalDoesNothing, "renewal_keeps_the_lock_and_its_fence")],
    ),
    class(
        12,
        "a client believes in its lock after the deadline",
        &[Law(Bug::CountsFromTomorrow, "loss_is_told_before_anyone_else_gets_in")],
    ),
    class(
        13,
        "the deadline counts from the reply",
        &[Law(Bug::CountsFromTheReply, "loss_is_told_before_anyone_else_gets_in")],
    ),
    class(
        14,
        "a vote is counted wrongly",
        &[Test {
            planted: "a minority counts, a late or young node counts, the fence is not written, and others",
            file: "crates/core/src/vote/tests.rs",
            test: "every_planted_mistake_is_noticed",
        }],
    ),
    class(
        15,
        "a session of a pool has the locks of several users",
        &[Law(Bug::SessionsAreShared, "one_name_has_one_holder")],
    ),
    class(
        16,
        "clocks are compared, or counted too coarsely",
        &[
            Law(Bug::TtlInMilliseconds, "a_ttl_may_have_a_fraction_of_a_millisecond"),
            Law(Bug::ClockBackRefills, "a_clock_that_goes_back_gives_nothing_twice"),
        ],
    ),
    class(
        17,
        "the lock is released while its holder works",
        &[Law(Bug::RevokeLetsTheNextIn, "a_revoked_holder_is_told_why_and_let_finish")],
    ),
    class(
        18,
        "a command outlives its lock",
        &[Test {
            planted: "a command that ignores TERM, under a store that falls silent",
            file: "crates/cli/tests/loss.rs",
            test: "a_silent_store_ends_everything_before_the_deadline",
        }],
    ),
    class(
        19,
        "a dropped future leaves something",
        &[
            Law(Bug::GhostInQueue, "a_cancelled_acquire_leaves_nothing"),
            Law(Bug::RefundIsLost, "a_dropped_wait_gives_its_place_back"),
        ],
    ),
    class(
        20,
        "a release wakes more than one waiter",
        &[Law(Bug::ServesTwo, "one_release_serves_one_waiter")],
    ),
    class(
        21,
        "a script is gone from the server's cache",
        &[Test {
            planted: "a server that forgets its scripts between two calls, and one that restarts",
            file: "stores/redis/tests/setup/trouble.rs",
            test: "scripts_that_the_server_forgot_are_loaded_again",
        }],
    ),
    class(
        22,
        "a lock without its fence, or a fence that goes back",
        &[
            Law(Bug::FenceDiesWithTheLock, "the_fence_outlives_release_and_expiry"),
            Law(Bug::FenceStandsStill, "fences_grow_from_grant_to_grant"),
        ],
    ),
];
