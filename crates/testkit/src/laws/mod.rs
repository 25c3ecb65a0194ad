//! The laws: what every store promises, each as a small function with a sentence for a name.
//!
//! A store's `tests/conformance.rs` is a [`Harness`] and one line: `lockkeeper_testkit::conformance!(MyHarness);`.
//! Each law becomes a test of its own, so that a failure reads `a_stale_release_is_harmless`. A store must
//! refuse as unsupported what its profile does not declare; the laws test what it declares.
//!
//! Next to each law in the list below stands a [`Bug`](crate::bugs::Bug) that it must catch: a suite that stays green
//! with the fence removed proves nothing.

pub mod cached;
pub mod claim;
pub mod election;
pub mod exclusion;
#[cfg(feature = "servers")]
pub mod fault_scenario;
pub mod fence;
pub mod guard;
pub mod hand_off;
pub mod inspect;
pub mod interposed;
pub mod late_writers;
pub mod leader_fault;
pub mod limit;
pub mod lossy;
pub mod many_waiters;
pub mod modes;
pub mod once;
pub mod outage;
pub mod partitions;
pub mod queue;
pub mod records;
pub mod register;
pub mod removal;
pub mod shapes;
pub mod silence;
mod tools;
pub mod unknown;
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

    /// Sets the wall clock back, where the harness can; the boot-time clock goes on.
    async fn set_wall_clock_back(&self, _by: Duration) {}

    /// How many buckets of rate limits the store keeps outside of its records, where the harness can count them.
    async fn stored_buckets(&self) -> usize {
        0
    }

    /// A keeper of one more client.
    async fn keeper(&self) -> Lockkeeper {
        Lockkeeper::with_store(self.client().await, self.clock())
    }
}

/// Calls a macro with every law, the planted bug that it must catch, and what the law says then: a law that fails at a
/// helper, or at another promise, has not caught its bug.
#[macro_export]
macro_rules! every_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            exclusion::one_name_has_one_holder => GrantsEveryRequest: "a second holder: ",
            exclusion::different_names_do_not_block_each_other => OneLockForAll: "another name: [\"orders/4\"]",
            exclusion::every_legal_name_is_a_lock_of_its_own => FoldsNames: "a name of its own: [\"a\"]",
            exclusion::an_expired_lock_goes_to_the_next => NeverExpires: "an expired lock: ",
            exclusion::an_expired_holder_is_told_so => RenewalAlwaysYes: "an expired holder is not told",
            exclusion::renewal_keeps_the_lock_and_its_fence => RenewalDoesNothing: "a lock that was renewed: ",
            exclusion::a_stale_release_is_harmless => ReleaseWithoutOwnerCheck: "a stale release ended the next holder's lock",
            exclusion::a_stale_renewal_is_harmless => RenewalRevives: "a stale renewal ended the next holder's lock",
            exclusion::a_second_release_says_already_gone => ReleaseAlwaysYes: "a second release is not told apart",
            exclusion::the_same_attempt_gets_the_same_fence => RetryIsANewRequest: "the same attempt again: ",
            exclusion::a_retry_counts_the_lease_anew => RetryKeepsTheOldLease: "the retry's lease counts from the retry",
            exclusion::racing_clients_never_hold_together => GrantsEveryRequest: "winners of one race: [Grant",
            exclusion::retries_after_lost_replies_let_no_two_in => GrantsEveryRequest: "two were let in after a lost reply",
            exclusion::a_bad_ask_is_refused_and_leaves_nothing => TtlUnchecked: " gave Ok(Granted(",
            exclusion::a_ttl_may_have_a_fraction_of_a_millisecond => TtlInMilliseconds: "the ttl was not kept to its fraction",
            fence::fences_grow_from_grant_to_grant => FenceStandsStill: "7 after Some(Fence(7))",
            fence::the_fence_outlives_release_and_expiry => FenceDiesWithTheLock: "a release took the fence back",
            fence::fences_grow_across_names_and_clients => FencePerClient: "1 after Some(Fence(",
            fence::a_break_moves_the_fence_on => BreakKeepsTheFence: "the old holder's writes would still be taken",
            fence::a_broken_holder_is_told_so => RenewalAlwaysYes: "a broken holder is not told",
            fence::a_break_of_a_free_lock_moves_the_fence_too => BreakKeepsTheFence: "a break of a free lock left the fence",
            fence::a_revoked_holder_is_told_why_and_let_finish => RevokeLetsTheNextIn: "the next one was let in before the holder had stopped",
            fence::a_revoked_lease_is_not_renewed => RevokeIsForgotten: "a revoked lease was renewed",
            fence::a_revoked_holder_cannot_begin_anew => RevokeIsForgotten: "it began anew: Ok(Granted(",
            fence::a_grant_of_several_names_is_revoked_as_a_whole => RevokeIsForgotten: "orders/1 was not revoked",
            queue::waiters_are_served_in_order => NoQueue: "the first waiter was overtaken",
            queue::one_release_serves_one_waiter => ServesTwo: "two were served",
            queue::a_waiter_gives_up_on_time => WaitTimeIgnored: "a waiter gives up",
            queue::a_waiter_that_left_is_never_served => GhostInQueue: "the one that left was served",
            queue::a_dropped_request_can_be_withdrawn => GhostInQueue: "is free after a dropped request",
            queue::a_queued_request_is_not_doubled => RetryDoublesTheEntry: "the request that was sent again has two queue entries",
            queue::no_request_overtakes_the_queue => NoQueue: "a newcomer behind a waiter: ",
            queue::a_waiter_is_served_when_the_holder_expires => NeverExpires: "a waiter is served",
            queue::a_cycle_of_owners_is_a_deadlock => DeadlockUnseen: "a cycle is reported",
            queue::an_upgrade_is_a_deadlock => DeadlockUnseen: "an upgrade is answered",
            queue::a_waiter_that_waited_for_longer_than_its_ttl_has_the_lock => WaiterExpiresUnseen: "a lock that was granted after a long wait: ",
            wake::the_next_waiter_is_let_in_within_the_declared_time => NoWaiterIsWoken: "the next waiter is let in after a release",
            modes::shared_holders_share_and_keep_writers_out => SharedLetsWritersIn: "a writer beside a reader: ",
            modes::shared_holders_do_share => SharedIsExclusive: "a reader beside a reader: ",
            modes::a_waiting_writer_is_not_starved => ReadersBarge: "a reader behind a writer: ",
            modes::permits_are_counted => PermitsUncounted: "a fourth of three permits: ",
            modes::the_smallest_number_of_permits_counts => PermitsUncounted: "a third of two permits: ",
            modes::several_names_are_all_or_nothing => PartialGrants: "two names, one of them held: ",
            modes::several_names_hold_nothing_while_they_wait => OneByOne: "held while it waits",
            modes::reentry_keeps_the_fence_and_counts_holds => ReentryNewFence: "a re-entry has a fence of its own",
            modes::strangers_do_not_reenter => EveryoneIsOneOwner: "a stranger: ",
            modes::lock_delay_holds_back_after_an_unclean_end => NoLockDelay: "a lock in its lock-delay: ",
            modes::lock_delay_spares_a_clean_release => DelaysAlways: "a lock after a clean release: ",
            modes::min_hold_outlasts_the_release => NoMinHold: "a lock in its minimum hold: ",
            many_waiters::a_reentry_behind_a_long_queue_keeps_others_out => FirstReleaseFreesAll: "a waiter was let in beside the second hold",
            many_waiters::what_a_reentry_behind_a_long_queue_holds_back_stays_so => NoMinHold: "a waiter was let in though the min-hold of the second hold",
            many_waiters::requests_that_no_holder_excludes_are_all_granted => SharerIsNotWoken: "all requests that no holder excludes are granted",
            inspect::inspect_tells_who_holds_and_who_waits => InspectIsBlind: "the holder is not seen",
            inspect::list_pages_through_all_in_order => ListForgetsPages: "the pages are not the whole",
            inspect::watch_tells_what_happens_in_order => WatchDropsReleases: "an event is missing",
            inspect::watch_tells_of_a_hold_that_expired => WatchDropsExpiries: "the expiry was not told",
            inspect::the_attempt_is_never_shown => ShowsTheAttempt: "the proof of ownership is shown",
            records::a_record_is_written_only_as_expected => ExpectIgnored: "written, and not as expected",
            records::a_record_made_again_has_a_new_version => VersionsStartAgain: "a client that saw the first would take the second for it",
            records::a_record_with_a_ttl_goes => RecordsNeverExpire: "a record outlived its ttl",
            records::concurrent_updates_lose_nothing => ExpectIgnored: "updates were lost",
            records::a_scan_pages_through_all_in_order => ListForgetsPages: "the pages are not the whole",
            guard::a_guard_outlives_its_ttl => RenewalDoesNothing: "a lock with a guard: ",
            guard::a_guard_outlives_a_short_outage => RenewalStopsAfterAnOutage: "a lock that was renewed again after an outage: ",
            guard::many_guards_of_one_lock_do_not_cost_each_other_the_lock => RenewsOneOfMany: "guards of one process cost each other the lock",
            guard::a_dropped_guard_frees_its_lock => ReleaseIsLost: "is free after a dropped guard",
            guard::a_cancelled_acquire_leaves_nothing => GhostInQueue: "is free after a cancelled acquire",
            guard::loss_is_told_before_anyone_else_gets_in => CountsFromTheReply: "the rival was served while the guard still believed",
            guard::a_broken_guard_is_told_so => RenewalAlwaysYes: "the break is told",
            guard::a_revoked_guard_is_told_why_and_gives_back => RevokeHasNoReason: "the reason is not told",
            guard::max_hold_and_missing_progress_end_a_guard => CountsFromTomorrow: "the longest hold is over",
            guard::work_is_ended_before_the_deadline => CountsFromTheReply: "the work is ended within the ttl",
            guard::lock_all_is_one_guard => PartialGrants: "a name of the guard: [\"b\"]",
            guard::correctness_is_refused_where_it_is_not_kept => OverstatesItself: "correctness was to be refused: Ok",
        }
    };
}

/// Calls a macro with every law of the recipes, and the planted bug that it must catch.
#[macro_export]
macro_rules! every_recipe_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            register::updates_of_many_lose_nothing => ExpectIgnored: "increments were lost, or counted twice",
            register::an_update_whose_answer_is_lost_counts_once => ExpectIgnored: "increments were lost, or counted twice",
            register::a_value_is_set_only_over_the_one_that_was_seen => ExpectIgnored: "written over a value that was not seen",
            register::every_write_has_a_newer_fence => VersionsStartAgain: "a write is not newer: 1 after",
            register::who_loses_too_often_is_told_so => ExpectIgnored: "who loses too often is not told",
            removal::a_removal_whose_reply_is_lost_spares_what_came_after => ExpectIgnored: "a removal deleted a value that was written after it",
            removal::a_first_write_that_comes_late_does_not_revive_a_removed_value => ExpectIgnored: "a late duplicate revived a removed value",
            removal::a_removal_over_a_lossy_network_removes_one_value => ExpectIgnored: "a removal that came late deleted a newer value",
            register::a_watcher_sees_the_truth_and_nothing_twice => ReadsAreStale: "the watcher sees the last value",
            register::a_value_with_a_ttl_goes => RecordsNeverExpire: "a value outlived its ttl",
            register::bad_input_is_refused_and_leaves_nothing => RecordsUnchecked: "bad input was taken",
            once::it_is_run_once_and_then_replayed => WritesAreLost: "it was run again",
            once::all_who_ask_at_once_share_one_run => GrantsEveryRequest: "it was run more than once",
            once::who_does_not_wait_is_told_who_runs => GrantsEveryRequest: "another caller runs: Ok(Run",
            once::a_silent_runner_is_taken_over => NeverExpires: "it is taken over",
            once::a_late_result_is_refused => ExpectIgnored: "a late result was to be refused: Ok",
            once::a_late_result_counts_if_nobody_took_over => WritesAreLost: "it was to be done, but it is our turn",
            once::another_request_under_the_same_key_is_refused => WritesAreLost: "it is refused at once",
            once::a_failure_is_retried_or_kept => WritesAreLost: "a failure was not kept",
            once::a_result_goes_when_its_time_is_over => RecordsNeverExpire: "replayed: true } after Done",
            once::large_results_come_back_byte_for_byte => CutsRecordNames: "2100000 bytes did not come back",
            once::a_dropped_run_leaves_the_turn_to_the_next => ReleaseIsLost: "the next one runs",
            once::a_result_whose_answer_is_lost_is_kept_once => ExpectIgnored: "a late result was kept: Ok",
            once::a_failed_run_over_a_lossy_network_is_removed_once => ExpectIgnored: "a removal that came late took the result of the next run",
            once::a_result_outlives_an_outage_of_the_store => RetryIsANewWrite: "a finished result was thrown away after an outage",
            once::what_cannot_be_kept_is_not_done_again => WritesAreLost: "what was done is done again",
            once::bad_input_to_once_leaves_nothing => ForeignPageTaken: "another's record was written over: Ok",
            election::there_is_one_leader_at_a_time => GrantsEveryRequest: "two lead at once",
            election::terms_grow_from_leader_to_leader => FenceDiesWithTheLock: "a term is not newer: 1 after",
            election::a_resignation_lets_the_next_one_in => ReleaseIsLost: "a candidate is elected after a resignation",
            election::a_silent_leader_is_replaced => NeverExpires: "a candidate is elected after a silent leader's ttl",
            election::a_late_leader_cannot_proclaim => FenceStandsStill: "a late leader was to be refused: Ok",
            election::an_observer_sees_everything_once_in_order => ReadsAreStale: "all is heard",
            election::an_observer_that_was_away_sees_the_truth => ReadsAreStale: "what was said meanwhile is told",
            election::a_leader_resumes_its_term_with_its_attempt => RetryIsANewRequest: "a leader resumes its term",
            election::bad_input_to_an_election_leaves_nothing => ReleaseIsLost: "election/e is free",
            windows::a_window_is_run_once_by_all => WritesAreLost: "it was run twice",
            windows::a_window_that_was_not_finished_is_taken_over => ExpectIgnored: "a late end was to be refused: Ok",
            windows::a_window_that_ends_in_an_outage_is_done => RetryIsANewWrite: "a window that was run counts as not run after an outage",
            windows::a_window_that_failed_is_told_and_run_again_as_often_as_it_may => WritesAreLost: "a run that failed is told",
            windows::a_clock_that_is_far_off_is_told => WritesAreLost: "everything until then would be skipped",
            claim::an_item_is_claimed_by_one_at_a_time => ExpectIgnored: "two workers have one item",
            claim::a_dead_workers_items_return_with_a_higher_fence => RecordsNeverExpire: "a dead worker's item returns",
            claim::a_late_completion_is_refused => ExpectIgnored: "a late completion was to be refused: Ok",
            claim::a_claimer_that_was_paused_spares_the_next_worker => AttemptUnchecked: "a paused claimer wrote over the attempt of the next worker: Err",
            claim::a_late_completion_counts_if_no_worker_took_over => WritesAreLost: "what is done was claimed again",
            claim::what_failed_too_often_is_kept_apart => WritesAreLost: "it was tried more often than it may",
            claim::what_failed_is_not_tried_again_at_once => WritesAreLost: "it was tried again before its back-off was over",
            claim::batches_are_disjoint => ExpectIgnored: "one item is in two batches",
            claim::an_extended_item_stays_with_its_worker => WritesAreLost: "an extended item went to another worker",
            claim::work_is_dropped_when_its_lease_is_lost => LeaseRevived: "the work is dropped",
            claim::what_is_given_back_is_free_at_once => VersionsStartAgain: "what was given back is not free",
            claim::a_first_write_that_comes_late_holds_no_item => LeaseTombstonesForgotten: "is held for no worker by a request that came late",
            claim::a_lost_reply_neither_loses_nor_doubles_an_item => ExpectIgnored: "an item was completed twice",
            claim::bad_input_to_a_claim_leaves_nothing => ForeignPageTaken: "another's record was written over: Ok",
            claim::nothing_is_left_of_what_was_done => RecordsNeverExpire: "something is left",
            partitions::every_partition_is_owned_by_one_member => GrantsEveryRequest: "owned twice",
            partitions::a_join_takes_no_more_than_its_share => WritesAreLost: "each has its share",
            partitions::an_owner_that_drains_keeps_the_next_one_out => GrantsEveryRequest: "the next owner started while the old one was draining",
            partitions::a_grace_that_is_over_ends_the_old_owner_first => GrantsEveryRequest: "owned twice",
            partitions::epochs_grow_from_owner_to_owner => FenceStandsStill: "an epoch is not newer: 7 after",
            partitions::a_living_member_keeps_its_partitions => RenewalDoesNothing: "the lock of a living member's partition has expired",
            partitions::a_silent_member_is_replaced => RevokeIsForgotten: "a silent member is replaced",
            partitions::a_member_that_is_started_again_has_its_partitions_back => JoinMovesOwners: "a restart moved partitions",
            partitions::a_second_process_takes_the_name_over => WritesAreLost: "the older process is told",
            partitions::a_member_of_a_group_that_was_made_anew_ends => WritesAreLost: "the member of the older group ends",
            partitions::a_group_that_all_have_left_is_forgotten => RecordsNeverExpire: "the group's record goes",
            partitions::bad_input_to_a_group_leaves_nothing => WritesAreLost: "another count was to be refused: Ok",
            limit::a_bucket_gives_its_burst_and_no_more => LimitNeverRefuses: "more than the burst was taken",
            limit::a_bucket_refills_at_its_rate_and_no_faster => RefillsThrice: "more than rate x time + burst was taken",
            limit::a_refused_take_takes_nothing => RefusedTakeTakes: "a refused take took something",
            limit::a_peek_changes_nothing => PeekTakes: "a peek took something",
            limit::a_reset_fills_the_bucket => ResetIsForgotten: "the bucket is full after a reset",
            limit::two_keys_do_not_share_a_bucket => OneBucketForAll: "was used by another key",
            limit::several_limits_are_all_or_nothing => TakesOneByOne: "a refused take of several took from one of them",
            limit::a_refund_brings_back_no_more_than_was_taken => RefundFills: "a refund brought back another number than was given back",
            limit::a_refund_brings_nothing_back_once_others_have_taken => RefundFills: "a refund brought tokens back after another take",
            limit::a_full_bucket_leaves_nothing => FullBucketStays: "a full bucket was left behind",
            limit::a_clock_that_goes_back_gives_nothing_twice => ClockBackRefills: "tokens were given twice",
            limit::waits_are_served_in_turn_and_keep_the_limit => WaitsOutOfTurn: "a caller was served before one that came earlier",
            limit::no_two_waits_have_one_turn => WaitReservesNothing: "two callers got one place",
            limit::a_dropped_wait_gives_its_place_back => RefundIsLost: "a dropped wait kept its place",
            limit::a_take_whose_reply_is_lost_is_unknown_and_counts_once => TakesTwice: "a take whose reply was lost counts once",
            limit::prefetched_tokens_keep_their_bound => LimitNeverRefuses: "members x batch above the limit was exceeded",
            limit::a_permit_and_a_token_come_together_or_not_at_all => RefundIsLost: "a pass that was cancelled gives its token back",
            limit::bad_input_to_a_limit_leaves_nothing => LimitUnchecked: "the store took more than the burst",
            late_writers::a_write_that_no_record_remembers_is_unknown => ExpectIgnored: "many/applied, after 40 other writes: Ok(Swapped",
            late_writers::a_large_result_that_is_late_spoils_and_leaves_nothing => ExpectIgnored: "a late runner spoilt the result that counts",
            late_writers::a_large_result_with_a_part_missing_is_not_given_back => SizeUnchecked: "a damaged result was given back: Ok",
            late_writers::a_caller_that_begins_late_does_not_take_the_turn_back => ExpectIgnored: "a late caller was to be refused: Ok(Run",
            late_writers::a_holder_that_begins_a_window_late_does_not_take_it_back => WritesAreLost: "a late holder was to be refused: Ok(Ours",
            cached::a_value_is_computed_once_and_then_found => WritesAreLost: "it was computed again",
            cached::all_who_want_a_cold_value_share_one_computation => GrantsEveryRequest: "one computation was to serve all",
            cached::an_old_value_is_given_at_once_while_one_caller_computes => RecordsNeverExpire: "an old value is called fresh",
            cached::a_caller_without_a_value_waits_no_longer_than_it_says => GrantsEveryRequest: "another caller computes: Ok(Refresh",
            cached::an_old_value_goes_when_its_time_is_over => ValueOutlivesItsTime: "an old value outlived its time",
            cached::a_failed_refresh_keeps_the_old_value_and_others_back_off => FailureForgotten: "a failed refresh is tried by the next caller at once",
            cached::a_failure_is_the_answer_for_a_while_if_so_chosen => FailureForgotten: "a failure that is the answer is tried again",
            cached::a_late_refresher_does_not_overwrite_a_newer_value => ExpectIgnored: "a late refresher overwrote a newer value",
            cached::a_late_refresher_writes_nothing_where_a_newer_value_has_ended => ExpectIgnored: "a late refresher brought an old value back",
            cached::a_refresher_that_dies_is_taken_over => NeverExpires: "it is taken over",
            cached::a_dropped_refresh_lets_the_next_caller_compute => ReleaseIsLost: "the next caller computes",
            cached::a_value_that_takes_long_is_refreshed_early => DurationForgotten: "a value is refreshed early",
            cached::the_clock_of_the_store_decides_what_is_fresh => RecordsNeverExpire: "a caller whose clock is off calls an old value fresh",
            cached::large_cached_values_come_back_byte_for_byte => CutsRecordNames: "2100000 bytes did not come back",
            cached::a_damaged_value_is_computed_again => SizeUnchecked: "a damaged value was given back",
            cached::a_late_request_brings_no_old_value_back => WritesAreLost: "a late request brought an old value back",
            cached::a_cached_value_leaves_nothing => RecordsNeverExpire: "nothing is left behind",
            cached::bad_input_to_a_cached_value_leaves_nothing => ForeignPageTaken: "another's record was written over: Ok",
            shapes::a_semaphore_has_as_many_permits_as_it_says => PermitsUncounted: "a fourth of three permits was granted",
            shapes::a_smaller_limit_stops_no_holder_and_admits_no_more => LimitForgotten: "a permit above the new limit was granted",
            shapes::a_larger_limit_lets_waiters_in => LimitForgotten: "the larger limit is not seen",
            shapes::readers_share_and_a_writer_is_alone => SharedLetsWritersIn: "a writer was let in beside readers",
            shapes::a_writer_in_the_queue_keeps_new_readers_out => ReadersBarge: "a reader overtook a writer that waits",
            shapes::a_downgrade_keeps_other_writers_out => FirstReleaseFreesAll: "another writer was let in by a downgrade",
            shapes::an_upgrade_is_refused_with_the_reason => SharedLetsWritersIn: "the read lock is gone after an upgrade that was refused",
            shapes::requests_for_several_names_in_any_order_end => PartialGrants: "two held one of several names at once",
            shapes::several_names_have_one_deadline => NeverExpires: "a outlived the deadline that it shares",
            shapes::bad_input_to_a_shape_leaves_nothing => ReleaseIsLost: "pool is free",
        }
    };
}

/// Calls a macro with every check that a recipe could forget, and the law that must notice.
#[macro_export]
macro_rules! every_recipe_bug {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            register::updates_of_many_lose_nothing => UpdateUnchecked: "increments were lost, or counted twice",
            register::an_update_whose_answer_is_lost_counts_once => WriteLogForgotten: "it is not known whether it counts",
            removal::a_removal_whose_reply_is_lost_spares_what_came_after => MarksForgotten: "a removal deleted a value that was written after it",
            removal::a_first_write_that_comes_late_does_not_revive_a_removed_value => NoTombstones: "a late duplicate revived a removed value",
            once::a_late_result_is_refused => LateResultKept: "a late result was to be refused: Ok",
            once::what_cannot_be_kept_is_not_done_again => TooLargeForgotten: "what was done is done again",
            once::another_request_under_the_same_key_is_refused => PrintUnchecked: "it is refused at once",
            election::a_late_leader_cannot_proclaim => TermUnchecked: "a late leader was to be refused: Ok",
            election::an_observer_sees_everything_once_in_order => OnlyTheNewestIsKept: "all is heard",
            claim::an_item_is_claimed_by_one_at_a_time => LeaseUnchecked: "two workers have one item",
            claim::a_late_completion_is_refused => LateCompletionKept: "a late completion was to be refused: Ok",
            claim::what_failed_too_often_is_kept_apart => AttemptsUncounted: "it was tried more often than it may",
            cached::all_who_want_a_cold_value_share_one_computation => FreshnessUnchecked: "one computation was to serve all",
            cached::a_late_refresher_does_not_overwrite_a_newer_value => LateValueKept: "a late refresher overwrote a newer value",
            cached::a_late_refresher_writes_nothing_where_a_newer_value_has_ended => FirstClaimForgotten: "a late refresher brought an old value back",
            partitions::a_join_takes_no_more_than_its_share => OwnersForgotten: "where it had not to be",
            partitions::a_living_member_keeps_its_partitions => BeatsForgotten: "a living member was taken for dead",
            windows::a_window_is_run_once_by_all => WindowForgotten: "it was run twice",
            windows::a_window_that_was_not_finished_is_taken_over => LateEndKept: "a late end was to be refused: Ok",
            windows::a_window_that_failed_is_told_and_run_again_as_often_as_it_may => EndForgotten: "how the run ended is not kept",
        }
    };
}

/// Calls a macro with further ways in which a client may be wrong about its lease or its session, and the law that must notice.
#[macro_export]
macro_rules! every_client_bug {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            exclusion::one_name_has_one_holder => SessionsAreShared: "a lock that is held: ",
            guard::a_guard_outlives_a_short_outage => NeverReconnects: "a lock that was renewed again after an outage: ",
            guard::loss_is_told_before_anyone_else_gets_in => CountsFromTomorrow: "the rival was served while the guard still believed",
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

/// Turns every law that contends into a test of its own for several [`Harness`]es, whose clients are [`leader_fault::RetryingStore`]. They
/// run side by side, since most of the time each of them waits for its servers to come round.
#[macro_export]
macro_rules! conformance_under_faults {
    ($($harness:ty),+) => {
        use $crate::fault_tests;
        $crate::every_contending_law!(fault_tests, ($($harness),+));
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! fault_tests {
    ([$harnesses:tt] $($group:ident::$law:ident $(($long:ident))?,)*) => {
        $( $crate::fault_test! { $harnesses $group::$law $($long)? } )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! fault_test {
    ($harnesses:tt $group:ident::$law:ident long) => {
        $crate::fault_test! { $harnesses $group::$law #[ignore = "long: ./scripts/test --full runs it"] }
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
    ([$harness:ty] $($group:ident::$law:ident => $bug:ident: $text:literal,)*) => {
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
