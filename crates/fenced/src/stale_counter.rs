//! The counter of the stale writes that the adapters refuse, for the metrics recorder of the user.

use metrics::{Counter, Unit, counter, describe_counter};

use crate::{Error, Result};

/// How many writes an adapter has refused because a higher fence was seen. Without a recorder it counts nothing.
pub(crate) fn stale_counter(adapter: &'static str) -> Counter {
    const NAME: &str = "lockkeeper_fenced_stale_writes_total";
    describe_counter!(NAME, Unit::Count, "Writes that were refused because a higher fence was seen.");
    counter!(NAME, "adapter" => adapter)
}

/// Counts the verdict on a write. An accepted write counts as 0, so that the counter exists before the first refusal: Prometheus sees
/// no increase in a counter that was not there before.
pub(crate) fn count_verdict<T>(adapter: &'static str, verdict: Result<T>) -> Result<T> {
    let is_stale = matches!(verdict, Err(Error::Stale { .. }));
    stale_counter(adapter).increment(u64::from(is_stale));
    verdict
}
