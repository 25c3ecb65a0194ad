//! The machine against a naive token bucket, and the laws that hold in every history.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::LockName;

const S: u64 = 1_000_000_000;
/// Where the clocks of these tests start.
const START: u64 = 1_800_000_000 * S;

fn spec(key: &str, tokens: u64, period: Duration, burst: u64) -> BucketSpec {
    BucketSpec::new(LockName::new(key).unwrap(), Rate::new(tokens, period).unwrap(), burst).unwrap()
}

fn request(operation: LimitOperation, spec: &BucketSpec, tokens: u64, taken: u64) -> LimitRequest {
    LimitRequest { operation, buckets: vec![LimitBucket { spec: spec.clone(), tokens, taken }] }
}

/// One bucket as a store keeps it.
#[derive(Default)]
struct Stored(Option<u64>);

impl Stored {
    fn run(&mut self, request: &LimitRequest, now: u64) -> LimitOutcome {
        request.check().unwrap();
        let (outcome, changes) = decide(request, now, &[self.0]);
        match changes[0] {
            BucketChange::Keep => {}
            BucketChange::Set(at) => self.0 = Some(at),
            BucketChange::Remove => self.0 = None,
        }
        outcome
    }

    fn take(&mut self, spec: &BucketSpec, tokens: u64, now: u64, wait: Duration) -> LimitOutcome {
        self.run(&request(LimitOperation::Take { wait }, spec, tokens, 0), now)
    }

    fn refund(&mut self, spec: &BucketSpec, tokens: u64, now: u64, taken: u64) -> LimitOutcome {
        self.run(&request(LimitOperation::Refund, spec, tokens, taken), now)
    }
}

/// A token bucket as a textbook has it: a level that refills, in nanoseconds of tokens.
struct Naive {
    level: u128,
    at: u64,
}

impl Naive {
    fn take(&mut self, spec: &BucketSpec, tokens: u64, now: u64) -> bool {
        self.level = (self.level + u128::from(now - self.at)).min(u128::from(spec.fill_nanos()));
        self.at = now;
        let cost = u128::from(spec.cost_nanos(tokens));
        let allowed = self.level >= cost;
        self.level -= if allowed { cost } else { 0 };
        allowed
    }
}

/// Whether the uses (instant, cost) keep to the limit in every window: at most the burst, and what refills in it.
fn keeps_to_the_limit(spec: &BucketSpec, uses: &[(u64, u64)]) -> bool {
    let mut uses = uses.to_vec();
    uses.sort_unstable();
    let mut full_at = 0;
    uses.iter().all(|(at, cost)| {
        full_at = full_at.max(*at) + cost;
        full_at <= at + spec.fill_nanos()
    })
}

fn specs() -> impl Strategy<Value = BucketSpec> {
    (1_u64..2000, prop_oneof![Just(1_u64), Just(60), Just(3600)], 1_u64..300)
        .prop_map(|(tokens, seconds, burst)| spec("k", tokens, Duration::from_secs(seconds), burst))
}

/// A step of time that often is about as long as a token needs.
fn pause(spec: &BucketSpec, eighths: u64) -> u64 {
    spec.token_nanos() * eighths / 8
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_decides_as_a_naive_token_bucket(
        spec in specs(),
        steps in prop::collection::vec((0_u64..40, 1_u64..20), 1..200),
    ) {
        let (mut bucket, mut now) = (Stored::default(), START);
        let mut naive = Naive { level: u128::from(spec.fill_nanos()), at: now };
        for (eighths, tokens) in steps {
            now += pause(&spec, eighths);
            let tokens = tokens.min(spec.burst());
            let outcome = bucket.take(&spec, tokens, now, Duration::ZERO);
            prop_assert_eq!(outcome.allowed, naive.take(&spec, tokens, now));
            prop_assert_eq!(outcome.buckets[0].remaining, (naive.level / u128::from(spec.token_nanos())) as u64);
            let missing = u128::from(spec.fill_nanos()) - naive.level;
            prop_assert_eq!(outcome.buckets[0].reset_after.as_nanos(), missing);
            if !outcome.allowed {
                let at = now + outcome.retry_after().as_nanos() as u64;
                let early = request(LimitOperation::Peek, &spec, tokens, 0);
                prop_assert!(!bucket.run(&early, at - 1).allowed && bucket.run(&early, at).allowed, "it names the first instant");
            }
        }
    }

    #[test]
    fn no_window_gets_more_than_its_share_whatever_is_reserved_and_given_back(
        spec in specs(),
        steps in prop::collection::vec((0_u64..24, 1_u64..6, 0_u8..8, 0_u64..40, any::<prop::sample::Index>()), 1..150),
    ) {
        let (mut bucket, mut now) = (Stored::default(), START);
        // The grants that are not given back: instant of use, tokens, and what the answer said.
        let mut grants: Vec<(u64, u64, u64)> = Vec::new();
        for (eighths, tokens, action, wait, which) in steps {
            now += pause(&spec, eighths);
            let tokens = tokens.min(spec.burst());
            if action < 5 || grants.is_empty() {
                let wait = if action % 2 == 0 { 0 } else { pause(&spec, wait) };
                let outcome = bucket.take(&spec, tokens, now, Duration::from_nanos(wait));
                if outcome.allowed {
                    prop_assert!(outcome.wait <= Duration::from_nanos(wait));
                    let at = now + outcome.wait.as_nanos() as u64;
                    grants.push((at, tokens, outcome.buckets[0].full_at));
                }
            } else {
                // A caller that has not used its tokens gives some or all back: it was dropped, or its work was not needed.
                let which = which.index(grants.len());
                let (at, had, full_at) = grants.remove(which);
                let back = tokens.min(had);
                bucket.refund(&spec, back, now, full_at);
                if back < had {
                    grants.insert(which, (at, had - back, full_at - spec.cost_nanos(back)));
                }
            }
            let uses: Vec<(u64, u64)> = grants.iter().map(|(at, n, _)| (*at, spec.cost_nanos(*n))).collect();
            prop_assert!(keeps_to_the_limit(&spec, &uses), "{grants:?}");
        }
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_twice(
        spec in specs(),
        steps in prop::collection::vec((0_u64..200, 1_u64..8), 1..150),
    ) {
        // The clock wanders in a range. All that is taken is what one pass through the range gives.
        let (mut bucket, mut taken) = (Stored::default(), 0);
        let mut newest = START;
        for (place, tokens) in steps {
            let now = START + pause(&spec, place);
            newest = newest.max(now);
            let tokens = tokens.min(spec.burst());
            if bucket.take(&spec, tokens, now, Duration::ZERO).allowed {
                taken += spec.cost_nanos(tokens);
            }
            prop_assert!(taken <= spec.fill_nanos() + (newest - START));
        }
    }
}

#[test]
fn a_million_takes_do_not_drift() {
    let spec = spec("k", 3, Duration::from_secs(1), 3);
    let (mut bucket, mut now, mut taken) = (Stored::default(), START, 0_u64);
    for _ in 0..1_000_000 {
        let outcome = bucket.take(&spec, 1, now, Duration::from_secs(1));
        assert!(outcome.allowed);
        now += outcome.wait.as_nanos() as u64;
        taken += 1;
    }
    let most = 3 + (now - START) * 3 / S;
    assert!(taken <= most && taken + 2 >= most, "{taken} of {most}");
}

#[test]
fn a_full_bucket_gives_its_burst_and_is_removed() {
    let spec = spec("k", 3, Duration::from_secs(1), 7);
    let mut bucket = Stored::default();
    for left in (0..7).rev() {
        let outcome = bucket.take(&spec, 1, START, Duration::ZERO);
        assert_eq!((outcome.allowed, outcome.remaining()), (true, left));
    }
    let refused = bucket.take(&spec, 1, START, Duration::ZERO);
    assert_eq!((refused.allowed, refused.refused, refused.remaining()), (false, Some(0), 0));
    // One nanosecond more than the period: a third of a second is rounded up, so that the limit is never exceeded.
    assert_eq!(refused.retry_after(), Duration::from_nanos(333_333_334));
    bucket.run(&request(LimitOperation::Reset, &spec, 1, 0), START);
    assert_eq!(bucket.0, None, "a full bucket leaves nothing");
}

#[test]
fn places_are_given_in_order_and_only_the_last_comes_back() {
    let spec = spec("k", 1, Duration::from_secs(1), 1);
    let (mut bucket, long) = (Stored::default(), Duration::from_secs(60));
    let waits: Vec<LimitOutcome> = (0..4).map(|_| bucket.take(&spec, 1, START, long)).collect();
    assert_eq!(waits.iter().map(|outcome| outcome.wait.as_secs()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(
        !bucket.take(&spec, 1, START, Duration::from_millis(3999)).allowed,
        "the fifth would wait for 4 s"
    );
    assert_eq!(bucket.0, Some(START + 4 * S), "a refused take takes nothing");
    bucket.refund(&spec, 1, START, waits[1].buckets[0].full_at);
    assert_eq!(bucket.0, Some(START + 4 * S), "others have places behind it");
    bucket.refund(&spec, 1, START, waits[3].buckets[0].full_at);
    bucket.refund(&spec, 1, START, waits[2].buckets[0].full_at);
    assert_eq!(bucket.0, Some(START + 2 * S));
}

/// Two takes are given back, the earlier one first. The tokens of the later one have refilled by then, and a third caller has taken.
#[test]
fn a_refund_after_another_refund_brings_back_no_token_that_has_refilled() {
    let spec = spec("k", 1, Duration::from_secs(1), 20);
    let mut bucket = Stored::default();
    let full_at = |outcome: LimitOutcome| outcome.buckets[0].full_at;
    let first = full_at(bucket.take(&spec, 5, START, Duration::ZERO));
    let second = full_at(bucket.take(&spec, 5, START, Duration::ZERO));
    bucket.refund(&spec, 5, START + S, first);
    assert!(bucket.take(&spec, 3, START + 6 * S, Duration::ZERO).allowed);
    bucket.refund(&spec, 5, START + 6 * S, second);
    let left = bucket.run(&request(LimitOperation::Peek, &spec, 1, 0), START + 6 * S).remaining();
    assert!(left <= 17, "{left} of 20 are left after a take of 3 at this instant");
}

#[test]
fn the_last_take_comes_back_in_parts_and_without_what_has_refilled() {
    let spec = spec("k", 1, Duration::from_secs(1), 10);
    let mut bucket = Stored::default();
    let earlier = bucket.take(&spec, 2, START, Duration::ZERO).buckets[0].full_at;
    let last = bucket.take(&spec, 4, START, Duration::ZERO).buckets[0].full_at;
    bucket.refund(&spec, 1, START, last);
    assert_eq!(bucket.0, Some(START + 5 * S));
    bucket.refund(&spec, 3, START, last - S);
    assert_eq!(bucket.0, Some(earlier), "now the take before it is the last one");
    bucket.refund(&spec, 2, START + S, earlier);
    assert_eq!(bucket.0, None, "one of the two tokens had refilled");
}

#[test]
fn several_buckets_are_all_or_nothing_and_the_slowest_is_named() {
    let (user, tenant) =
        (spec("user", 1, Duration::from_secs(1), 2), spec("tenant", 1, Duration::from_secs(60), 3));
    let both = |tokens: [u64; 2]| LimitRequest {
        operation: LimitOperation::Take { wait: Duration::ZERO },
        buckets: vec![
            LimitBucket { spec: user.clone(), tokens: tokens[0], taken: 0 },
            LimitBucket { spec: tenant.clone(), tokens: tokens[1], taken: 0 },
        ],
    };
    let (first, changes) = decide(&both([2, 3]), START, &[None, None]);
    assert!(first.allowed);
    let stored: Vec<Option<u64>> = first.buckets.iter().map(|bucket| Some(bucket.full_at)).collect();
    assert_eq!(changes, stored.iter().map(|at| BucketChange::Set(at.unwrap())).collect::<Vec<_>>());
    let (refused, changes) = decide(&both([1, 1]), START + 5 * S, &stored);
    assert_eq!((refused.allowed, refused.refused), (false, Some(1)), "the user's bucket has refilled");
    assert_eq!(changes, [BucketChange::Keep, BucketChange::Keep]);
    assert_eq!(refused.retry_after(), Duration::from_secs(55));
    let mut waits = both([1, 1]);
    waits.operation = LimitOperation::Take { wait: Duration::from_secs(1) };
    assert!(matches!(waits.check(), Err(crate::Error::Unsupported(_))));
}

#[test]
fn bad_rates_bursts_and_requests_are_refused() {
    let second = Duration::from_secs(1);
    let invalid =
        |result: crate::Result<()>| assert!(matches!(result, Err(crate::Error::Invalid(_))), "{result:?}");
    invalid(Rate::new(0, second).map(drop));
    invalid(Rate::new(1, Duration::ZERO).map(drop));
    invalid(Rate::new(1_000_001, second).map(drop));
    invalid(Rate::new(u64::MAX, Duration::MAX).map(drop));
    let key = LockName::new("k").unwrap();
    let rate = |tokens, period| Rate::new(tokens, period).unwrap();
    invalid(BucketSpec::new(key.clone(), rate(1, second), 0).map(drop));
    invalid(BucketSpec::new(key.clone(), rate(1, second), u64::MAX).map(drop));
    invalid(BucketSpec::new(key, rate(1, Duration::from_secs(86_400)), 3651).map(drop));
    let one = spec("k", 1, second, 5);
    let take = LimitOperation::Take { wait: Duration::ZERO };
    invalid(request(take, &one, 6, 0).check());
    invalid(request(take, &one, 0, 0).check());
    invalid(request(LimitOperation::Take { wait: Duration::MAX }, &one, 1, 0).check());
    invalid(LimitRequest { operation: take, buckets: Vec::new() }.check());
    let twice = vec![request(take, &one, 1, 0).buckets[0].clone(); 2];
    invalid(LimitRequest { operation: take, buckets: twice }.check());
}
