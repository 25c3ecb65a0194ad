//! The laws of resources that check the fence, for every adapter of `lockkeeper-fenced`, and the scenario that they exist for.
//!
//! An adapter's test is a [`FencedHarness`] and one line: `lockkeeper_testkit::fenced_laws!(MyHarness);`. Each law becomes a test of its
//! own, and so does the scenario of the paused process ([`paused_writer`]). Next to each law in the list below stand the
//! [bugs](ResourceBug) that it must catch; the first of them is the check itself, removed.

mod interleavings;
mod laws;
#[cfg(feature = "servers")]
pub mod paused_writer;
mod table;

pub use interleavings::*;
pub use laws::*;
pub use table::{FaultyResource, ResourceBug};

use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_fenced::Fenced;

/// One kind of resource, set up for one law.
#[async_trait]
pub trait FencedHarness: Send + Sync + Sized + 'static {
    /// How many interleavings are tried every day; with `LOCKKEEPER_FULL` it is 10,000 for all.
    const INTERLEAVINGS: u64 = 500;

    /// A fresh resource without any write; `None` if the tests are to run without its server, which has been said loudly.
    async fn start() -> Option<Self>;

    /// The address at which another process finds the resource.
    fn address(&self) -> String;

    /// One more client of it: another connection, as another process would have.
    async fn client(address: &str) -> Arc<dyn Fenced>;

    /// The twin: the same kind of thing in the same place, written to as people do who have no fence. It takes everything, and tells
    /// any fence when it is read.
    async fn twin(address: &str) -> Arc<dyn Fenced>;
}

/// Calls a macro with every law of resources, and the planted bugs that it must catch, each with a text of the assertion that it must fail.
#[macro_export]
macro_rules! every_fenced_law {
    ($then:ident $(, $arg:tt)*) => {
        $then! { [$($arg)*]
            a_late_write_is_refused_and_changes_nothing => [
                CheckRemoved: "fence 6 after 7 was to be refused",
                WritesWhatItRefuses: "what is in orders/42",
            ],
            a_refusal_says_what_was_presented_and_what_was_seen => [
                CheckRemoved: "fence 9 after 10 was to be refused",
                SwapsTheNumbers: "the numbers of the refusal",
            ],
            the_mark_rises_with_every_higher_fence => [
                CheckRemoved: "fence 1 after 2 was to be refused",
                MarkStandsStill: "what is in orders/42",
            ],
            the_same_fence_is_taken_again => [EqualIsRefused: "the same fence is taken again"],
            a_retry_is_harmless_and_a_late_one_is_refused => [
                CheckRemoved: "fence 5 after 6 was to be refused",
                EqualIsRefused: "the retry is taken",
            ],
            a_late_delete_is_refused => [
                CheckRemoved: "fence 6 after 7 was to be refused",
                DeleteUnchecked: "fence 6 after 7 was to be refused",
            ],
            deleting_keeps_the_mark => [
                CheckRemoved: "fence 6 after 7 was to be refused",
                DeleteForgets: "what is in orders/42",
            ],
            deleting_nothing_counts_as_a_write => [
                CheckRemoved: "fence 6 after 7 was to be refused",
                DeletesOnlyWhatIsThere: "what is in orders/42",
            ],
            every_resource_has_a_mark_of_its_own => [OneMarkForAll: "another resource has a mark of its own"],
            every_name_is_a_resource_of_its_own => [OneMarkForAll: "what is in orders/42", FoldsNames: "what is in orders/42"],
            every_value_comes_back_whole => [
                CutsValues: "value 1 came back as another",
                EmptyIsDeleted: "value 0 came back as another",
            ],
            fences_are_compared_as_whole_numbers => [
                CheckRemoved: "fence 9 after 10 was to be refused",
                ComparesAsText: "the higher fence is taken",
                ComparesAsFloats: "fence 4503599627370495 after 4503599627370496 was to be refused",
            ],
            racing_writers_never_take_the_mark_back => [ChecksFirst: "was seen after"],
            a_write_that_was_given_up_does_no_harm_later => [WritesLater: "what is in orders/"],
            taken_is_exactly_what_never_goes_back => [
                CheckRemoved: "was to be refused",
                EqualIsRefused: "was to be taken",
                MarkStandsStill: "against the rule",
                DeleteForgets: "against the rule",
                DeleteUnchecked: "was to be refused",
                WritesWhatItRefuses: "against the rule",
            ],
        }
    };
}

/// Turns every law of resources, and the scenario of the paused process, into a test of its own for one [`FencedHarness`].
#[macro_export]
macro_rules! fenced_laws {
    ($harness:ty) => {
        use $crate::fenced_law_tests;
        $crate::every_fenced_law!(fenced_law_tests, $harness);

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_paused_holder_that_writes_late_is_refused_and_its_twin_is_not() {
            if let Some(harness) = <$harness as $crate::fenced::FencedHarness>::start().await {
                $crate::fenced::paused_writer::run(
                    &harness,
                    concat!(module_path!(), "::writer_of_the_scenario"),
                )
                .await;
            }
        }

        #[tokio::test]
        #[ignore = "a process of the scenario, which starts it"]
        async fn writer_of_the_scenario() {
            $crate::fenced::paused_writer::write::<$harness>().await;
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! fenced_law_tests {
    ([$harness:ty] $($law:ident => [$($bug:ident: $text:literal),* $(,)?],)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                if let Some(harness) = <$harness as $crate::fenced::FencedHarness>::start().await {
                    $crate::fenced::$law(harness).await;
                }
            }
        )*
    };
}
