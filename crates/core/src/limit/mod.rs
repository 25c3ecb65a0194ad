//! Rate limits: what a bucket is, what a client requests of it, and the machine that decides, without IO and without a clock.
//!
//! The algorithm is the [generic cell rate algorithm](https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm) in its virtual-scheduling form. It is
//! a token bucket that needs no refill job, because a bucket is one number: the instant at which it will be full again. A token costs a fixed
//! number of nanoseconds; a take moves the instant by the cost, and is refused if the instant would be further away than a full bucket lasts. All of
//! it is integer arithmetic, so nothing drifts however many tokens are taken.
//!
//! A store does one of two things: it runs [`decide`] in one atomic step, or it does the same arithmetic in the language of its server and
//! describes the result with [`LimitOutcome::observed`].

mod bucket;
mod outcome;
mod rate;
mod request;
#[cfg(test)]
mod tests;

pub use bucket::{BucketChange, decide};
pub use outcome::{BucketState, LimitOutcome};
pub use rate::{BucketSpec, Rate};
pub use request::{LimitBucket, LimitOperation, LimitRequest};
