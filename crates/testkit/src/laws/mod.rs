//! The laws: what every store promises, each as a small function with a sentence for a name.
//!
//! A store's `tests/conformance.rs` is a [`Harness`] and one line: `lockkeeper_testkit::conformance!(MyHarness);`.
//! Each law becomes a test of its own, so that a failure reads `a_stale_release_is_harmless`. What a store's profile
//! does not declare must be refused as unsupported; what it declares is tested.
//!
//! Next to each law in the list below stands a [`Bug`](crate::bugs::Bug) that it must catch: a suite that stays green
//! with the fence removed proves nothing.

pub mod crowd;
pub mod doubt;
pub mod election;
pub mod exclusion;
pub mod fence;
pub mod guard;
pub mod interposed;
pub mod late;
pub mod line;
pub mod lossy;
pub mod modes;
pub mod once;
pub mod outage;
pub mod records;
pub mod register;
pub mod removal;
pub mod sight;
pub mod storm;
pub mod stormy;
mod tools;
pub mod wake;
pub mod windows;

pub use tools::*;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockkeeper::{Clock, Lockkeeper, Store};

/// One store, set up for one law.
#[async_trait]
pub trait Harness: Send + Sync + Sized + 'static {
    /// Whether nothing goes wrong meanwhile.
    const CALM: bool = true;

    /// Whether another process that asks with the same attempt has the same grant. If not, it is given a new one at once.
    const RESUMES: bool = true;

    /// A fresh, empty store; `None` if the tests are to run without its server, which has been said loudly then.
    async fn start() -> Option<Self>;

    /// One more client of it: another process would be best, another connection is good.
    async fn client(&self) -> Arc<dyn Store>;

    /// The clock that its clients go by.
    fn clock(&self) -> Arc<dyn Clock>;

    /// Whether the store is meant to be good enough for correctness.
    fn for_correctness() -> bool;

    /// Lets time pass: a virtual clock is turned, a real store really waits.
    async fn pass(&self, time: Duration);

    /// A keeper of one more client.
    async fn keeper(&self) -> Lockkeeper {
        Lockkeeper::with_store(self.client().await, self.clock())
    }
}

/// Calls a macro with every law, and the planted bug that it must catch.
#[macro_export]
macro_rules! every_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            exclusion::one_name_has_one_holder => GrantsEverybody,
            exclusion::different_names_do_not_block_each_other => OneLockForAll,
            exclusion::every_legal_name_is_a_lock_of_its_own => FoldsNames,
            exclusion::an_expired_lock_goes_to_the_next => NeverExpires,
            exclusion::an_expired_holder_is_told_so => RenewalAlwaysYes,
            exclusion::renewal_keeps_the_lock_and_its_fence => RenewalDoesNothing,
            exclusion::a_stale_release_is_harmless => ReleaseWithoutOwnerCheck,
            exclusion::a_stale_renewal_is_harmless => RenewalRevives,
            exclusion::a_second_release_says_already_gone => ReleaseAlwaysYes,
            exclusion::the_same_attempt_gets_the_same_fence => RetryIsANewAsk,
            exclusion::a_retry_counts_the_lease_anew => RetryKeepsTheOldLease,
            exclusion::racing_clients_never_hold_together => GrantsEverybody,
            exclusion::a_bad_ask_is_refused_and_leaves_nothing => TtlUnchecked,
            exclusion::a_ttl_may_have_a_fraction_of_a_millisecond => TtlInMilliseconds,
            fence::fences_grow_from_grant_to_grant => FenceStandsStill,
            fence::the_fence_outlives_release_and_expiry => FenceDiesWithTheLock,
            fence::fences_grow_across_names_and_clients => FencePerClient,
            fence::a_break_moves_the_fence_on => BreakKeepsTheFence,
            fence::a_broken_holder_is_told_so => RenewalAlwaysYes,
            fence::a_break_of_a_free_lock_moves_the_fence_too => BreakKeepsTheFence,
            fence::a_revoked_holder_is_told_why_and_let_finish => RevokeLetsTheNextIn,
            fence::a_revoked_lease_is_not_renewed => RevokeIsForgotten,
            fence::a_revoked_holder_cannot_begin_anew => RevokeIsForgotten,
            fence::a_grant_of_several_names_is_revoked_as_a_whole => RevokeIsForgotten,
            line::waiters_are_served_in_order => NoLine,
            line::one_release_serves_one_waiter => ServesTwo,
            line::a_waiter_gives_up_on_time => PatienceIgnored,
            line::a_waiter_that_left_is_never_served => GhostInLine,
            line::a_dropped_ask_can_be_taken_back => GhostInLine,
            line::an_ask_in_line_is_not_doubled => RetryDoublesThePlace,
            line::nobody_overtakes_the_line => NoLine,
            line::a_waiter_is_served_when_the_holder_expires => NeverExpires,
            line::a_circle_of_owners_is_told_deadlock => DeadlockUnseen,
            line::an_upgrade_is_told_deadlock => DeadlockUnseen,
            wake::the_next_waiter_is_let_in_within_the_declared_time => NobodyIsWoken,
            modes::shared_holders_share_and_keep_writers_out => SharedLetsWritersIn,
            modes::shared_holders_do_share => SharedIsExclusive,
            modes::a_waiting_writer_is_not_starved => ReadersBarge,
            modes::permits_are_counted => PermitsUncounted,
            modes::the_smallest_number_of_permits_counts => PermitsUncounted,
            modes::several_names_are_all_or_nothing => PartialGrants,
            modes::several_names_hold_nothing_while_they_wait => OneByOne,
            modes::reentry_keeps_the_fence_and_counts_holds => ReentryNewFence,
            modes::strangers_do_not_reenter => EveryoneIsOneOwner,
            modes::lock_delay_holds_back_after_an_unclean_end => NoLockDelay,
            modes::lock_delay_spares_a_clean_release => DelaysAlways,
            modes::min_hold_outlasts_the_release => NoMinHold,
            crowd::a_reentry_behind_a_long_queue_keeps_others_out => FirstReleaseFreesAll,
            crowd::requests_that_nobody_excludes_are_all_let_in => SharedIsExclusive,
            sight::inspect_tells_who_holds_and_who_waits => InspectIsBlind,
            sight::list_pages_through_all_in_order => ListForgetsPages,
            sight::watch_tells_what_happens_in_order => WatchDropsReleases,
            sight::the_attempt_is_never_shown => ShowsTheAttempt,
            records::a_record_is_written_only_as_expected => ExpectIgnored,
            records::a_record_made_again_has_a_new_version => VersionsStartAgain,
            records::a_record_with_a_ttl_goes => RecordsNeverExpire,
            records::concurrent_updates_lose_nothing => ExpectIgnored,
            records::a_scan_pages_through_all_in_order => ListForgetsPages,
            guard::a_guard_outlives_its_ttl => RenewalDoesNothing,
            guard::many_guards_of_one_lock_do_not_cost_each_other_the_lock => RenewalDoesNothing,
            guard::a_dropped_guard_frees_its_lock => ReleaseIsLost,
            guard::a_cancelled_acquire_leaves_nothing => GhostInLine,
            guard::loss_is_told_before_anyone_else_gets_in => CountsFromTheReply,
            guard::a_broken_guard_is_told_so => RenewalAlwaysYes,
            guard::a_revoked_guard_is_told_why_and_gives_back => RevokeHasNoReason,
            guard::max_hold_and_missing_progress_end_a_guard => NeverExpires,
            guard::work_is_ended_before_the_deadline => CountsFromTheReply,
            guard::lock_all_is_one_guard => PartialGrants,
            guard::correctness_is_refused_where_it_is_not_kept => OverstatesItself,
        }
    };
}

/// Calls a macro with every law of the recipes, and the planted bug that it must catch.
#[macro_export]
macro_rules! every_recipe_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            register::updates_of_many_lose_nothing => ExpectIgnored,
            register::an_update_whose_answer_is_lost_counts_once => ExpectIgnored,
            register::a_value_is_set_only_over_the_one_that_was_seen => ExpectIgnored,
            register::every_write_has_a_newer_fence => VersionsStartAgain,
            register::who_loses_too_often_is_told_so => ExpectIgnored,
            removal::a_removal_whose_reply_is_lost_spares_what_came_after => ExpectIgnored,
            removal::a_first_write_that_comes_late_does_not_revive_a_removed_value => ExpectIgnored,
            register::a_watcher_sees_the_truth_and_nothing_twice => ReadsAreStale,
            register::a_value_with_a_ttl_goes => RecordsNeverExpire,
            register::bad_input_is_refused_and_leaves_nothing => RecordsUnchecked,
            once::it_is_run_once_and_then_replayed => WritesAreLost,
            once::all_who_ask_at_once_share_one_run => GrantsEverybody,
            once::who_does_not_wait_is_told_who_runs => GrantsEverybody,
            once::a_silent_runner_is_taken_over => NeverExpires,
            once::a_late_result_is_refused => ExpectIgnored,
            once::a_late_result_counts_if_nobody_took_over => WritesAreLost,
            once::another_request_under_the_same_key_is_refused => WritesAreLost,
            once::a_failure_is_retried_or_kept => WritesAreLost,
            once::a_result_goes_when_its_time_is_over => RecordsNeverExpire,
            once::large_results_come_back_byte_for_byte => CutsRecordNames,
            once::a_dropped_run_leaves_the_turn_to_the_next => ReleaseIsLost,
            once::a_result_whose_answer_is_lost_is_kept_once => ExpectIgnored,
            once::a_result_outlives_an_outage_of_the_store => RetryIsANewWrite,
            once::what_cannot_be_kept_is_not_done_again => WritesAreLost,
            once::bad_input_to_once_leaves_nothing => WritesAreLost,
            election::there_is_one_leader_at_a_time => GrantsEverybody,
            election::terms_grow_from_leader_to_leader => FenceDiesWithTheLock,
            election::a_resignation_lets_the_next_one_in => ReleaseIsLost,
            election::a_silent_leader_is_replaced => NeverExpires,
            election::a_late_leader_cannot_proclaim => FenceStandsStill,
            election::an_observer_sees_everything_once_in_order => ReadsAreStale,
            election::an_observer_that_was_away_sees_the_truth => ReadsAreStale,
            election::a_leader_resumes_its_term_with_its_attempt => RetryIsANewAsk,
            election::bad_input_to_an_election_leaves_nothing => WritesAreLost,
            windows::a_window_is_run_once_by_all => WritesAreLost,
            windows::a_window_that_was_not_finished_is_taken_over => ExpectIgnored,
            windows::a_window_that_ends_in_an_outage_is_done => RetryIsANewWrite,
            windows::a_window_that_failed_is_told_and_run_again_as_often_as_it_may => WritesAreLost,
            windows::a_clock_that_is_far_off_is_told => WritesAreLost,
            late::a_write_that_no_record_remembers_is_unknown => ExpectIgnored,
            late::a_large_result_that_is_late_spoils_and_leaves_nothing => ExpectIgnored,
            late::a_large_result_with_a_part_missing_is_not_given_back => WritesAreLost,
            late::a_caller_that_begins_late_does_not_take_the_turn_back => ExpectIgnored,
            late::a_holder_that_begins_a_window_late_does_not_take_it_back => WritesAreLost,
        }
    };
}

/// Calls a macro with every check that a recipe could forget, and the law that must notice.
#[macro_export]
macro_rules! every_recipe_bug {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            register::updates_of_many_lose_nothing => UpdateUnchecked,
            register::an_update_whose_answer_is_lost_counts_once => TrailForgotten,
            removal::a_removal_whose_reply_is_lost_spares_what_came_after => MarksForgotten,
            removal::a_first_write_that_comes_late_does_not_revive_a_removed_value => NoTombstones,
            once::a_late_result_is_refused => LateResultKept,
            once::what_cannot_be_kept_is_not_done_again => UnkeptForgotten,
            once::another_request_under_the_same_key_is_refused => PrintUnchecked,
            election::a_late_leader_cannot_proclaim => TermUnchecked,
            election::an_observer_sees_everything_once_in_order => OnlyTheNewestIsKept,
            windows::a_window_is_run_once_by_all => WindowForgotten,
            windows::a_window_that_was_not_finished_is_taken_over => LateEndKept,
            windows::a_window_that_failed_is_told_and_run_again_as_often_as_it_may => EndForgotten,
        }
    };
}

/// Turns every law of the recipes into a test of its own for one [`Harness`].
#[macro_export]
macro_rules! recipes {
    ($harness:ty) => {
        use $crate::law_tests;
        $crate::every_recipe_law!(law_tests, $harness);
    };
}

/// Turns every law into a test of its own for one [`Harness`].
#[macro_export]
macro_rules! conformance {
    ($harness:ty) => {
        use $crate::law_tests;
        $crate::every_law!(law_tests, $harness);
    };
}

/// Turns every law that contends into a test of its own for several [`Harness`]es, whose clients are [`storm::Patient`]. They
/// run side by side, since most of the time each of them waits for its servers to come round.
#[macro_export]
macro_rules! conformance_in_storms {
    ($($harness:ty),+) => {
        use $crate::storm_tests;
        $crate::every_contending_law!(storm_tests, ($($harness),+));
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! storm_tests {
    ([$harnesses:tt] $($group:ident::$law:ident $(($long:ident))?,)*) => {
        $( $crate::storm_test! { $harnesses $group::$law $($long)? } )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! storm_test {
    ($harnesses:tt $group:ident::$law:ident long) => {
        $crate::storm_test! { $harnesses $group::$law #[ignore = "long: ./scripts/test --full runs it"] }
    };
    (($($harness:ty),+) $group:ident::$law:ident $(#[$when:meta])?) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        $(#[$when])?
        async fn $law() {
            let storms = [$(tokio::spawn(async {
                if let Some(harness) = <$harness as $crate::laws::Harness>::start().await {
                    $crate::laws::$group::$law(harness).await;
                }
            })),+];
            for storm in storms {
                storm.await.expect("the law holds in every storm");
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! law_tests {
    ([$harness:ty] $($group:ident::$law:ident => $bug:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                if let Some(harness) = <$harness as $crate::laws::Harness>::start().await {
                    $crate::laws::$group::$law(harness).await;
                }
            }
        )*
    };
}
