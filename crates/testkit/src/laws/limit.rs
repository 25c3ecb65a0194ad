//! Rate limits that processes share.
#![allow(missing_docs, reason = "a law's name is its sentence")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use lockkeeper::limit::{EnterOutcome, PER_HOUR, PER_MINUTE, PER_SECOND, RateLimit};
use lockkeeper::{Error, LimitSupport, Page};
use lockkeeper_core::limit::{LimitOperation, LimitOutcome, LimitRequest};
use lockkeeper_core::{AcquireOutcome, Grant, LockRequest, ReleaseOutcome, RenewOutcome, RequestKey, Result};

use super::*;

/// Whether the store has rate limits; if not, a take must be refused.
async fn has(keeper: &Lockkeeper) -> bool {
    if keeper.profile().limits != LimitSupport::No {
        return true;
    }
    let refused = keeper.limit("l").rate(1, PER_SECOND).take(1).await;
    assert!(matches!(refused, Err(Error::Unsupported(_))), "undeclared and not refused: {refused:?}");
    false
}

/// A limit that does not refill within a law, however slow the machine is.
fn slow(keeper: &Lockkeeper, key: &str, burst: u64) -> RateLimit {
    keeper.limit(key).rate(1, PER_HOUR).burst(burst)
}

/// Takes `n` tokens, and returns whether they were given.
async fn takes(limit: &RateLimit, n: u64) -> bool {
    soon("a take is answered", limit.take(n)).await.unwrap().allowed()
}

/// How many tokens are left.
async fn left(limit: &RateLimit) -> u64 {
    limit.peek().await.unwrap().remaining
}

pub async fn a_bucket_gives_its_burst_and_no_more<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let limits = keepers.each_ref().map(|keeper| slow(keeper, "mail", 20));
    // Many at once, of two clients.
    let race = limits.iter().cycle().take(40).map(|limit| async { takes(limit, 1).await });
    let given = futures_util::future::join_all(race).await.into_iter().filter(|given| *given).count();
    assert!(given <= 20, "more than the burst was taken: {given} of 20");
    assert_eq!(given, 20, "tokens were refused that the bucket had");
    let refused = limits[0].take(1).await.unwrap();
    assert_eq!((refused.allowed(), refused.remaining(), refused.refused()), (false, 0, Some("mail")));
    let (retry, reset) = (refused.retry_after(), refused.reset_after());
    assert!(retry <= PER_HOUR && reset > retry && reset <= PER_HOUR * 20, "{retry:?} {reset:?}");
    assert!(matches!(refused.require(), Err(Error::Limited(_))));
}

pub async fn a_bucket_refills_at_its_rate_and_no_faster<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    // Ten tokens per second: how many come back is measured with the clock of the client, around all that happens.
    let clock = h.clock();
    let limit = keeper.limit("mail").rate(10, PER_SECOND).burst(4);
    let start = clock.now();
    let mut taken = 0;
    for _ in 0..3 {
        while takes(&limit, 1).await {
            taken += 1;
        }
        let most = 4 + clock.now().since(start).as_millis() as u64 / 100 + 1;
        assert!(taken <= most, "more than rate x time + burst was taken: {taken} of {most}");
        h.pass(Duration::from_millis(250)).await;
    }
    assert!(taken >= 4 + 2, "only {taken} were given, and two tokens refill in each of three pauses");
    // No longer than the answer says.
    let refused = soon("the bucket is emptied", async {
        loop {
            let outcome = limit.take(1).await.unwrap();
            if !outcome.allowed() {
                return outcome.retry_after();
            }
        }
    });
    h.pass(refused.await + Duration::from_millis(1)).await;
    assert!(takes(&limit, 1).await, "it was refused after the time that the answer had named");
}

pub async fn a_refused_take_takes_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 10);
    assert!(takes(&limit, 7).await);
    for _ in 0..3 {
        assert!(!takes(&limit, 4).await);
    }
    assert_eq!(left(&limit).await, 3, "a refused take took something");
    assert!(takes(&limit, 3).await);
}

pub async fn a_peek_changes_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 3);
    for _ in 0..5 {
        let status = limit.peek().await.unwrap();
        assert_eq!((status.allowed, status.remaining), (true, 3), "a peek took something");
    }
    assert!(takes(&limit, 3).await);
    let status = limit.peek().await.unwrap();
    assert_eq!((status.allowed, status.remaining, status.burst), (false, 0, 3));
    assert!(status.retry_after <= PER_HOUR && status.reset_after > PER_HOUR * 2, "{status:?}");
}

pub async fn a_reset_fills_the_bucket<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 5);
    assert!(takes(&limit, 5).await);
    limit.reset().await.unwrap();
    assert_eq!(left(&limit).await, 5, "the bucket is full after a reset");
    assert!(takes(&limit, 5).await && !takes(&limit, 1).await);
}

pub async fn two_keys_do_not_share_a_bucket<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let long = "x".repeat(lockkeeper::KEY_BYTES);
    for key in ["a", "A", "a/b", "{a}", "a b", "a*", "'a'", "ä", &long] {
        let limit = slow(&keeper, key, 2);
        assert!(takes(&limit, 2).await, "the bucket {key} was used by another key");
        assert!(!takes(&limit, 1).await);
    }
}

/// Two limits that every store can take from in one step: in a cluster they share a hash slot.
fn pair(keeper: &Lockkeeper) -> [RateLimit; 2] {
    [slow(keeper, "{acme}/user", 2), slow(keeper, "{acme}/tenant", 5)]
}

pub async fn several_limits_are_all_or_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let [user, tenant] = pair(&keeper);
    for both in [keeper.limits([user.clone(), tenant.clone()]), keeper.limits([tenant.clone(), user.clone()])]
    {
        assert!(both.take(1).await.unwrap().allowed());
    }
    for both in [keeper.limits([user.clone(), tenant.clone()]), keeper.limits([tenant.clone(), user.clone()])]
    {
        let refused = both.take(1).await.unwrap();
        assert_eq!((refused.allowed(), refused.refused()), (false, Some("{acme}/user")));
        assert!(!both.wait(Duration::from_millis(1)).await.unwrap().allowed());
    }
    let states = keeper.limits([user.clone(), tenant.clone()]).peek().await.unwrap();
    let remaining: Vec<u64> = states.iter().map(|status| status.remaining).collect();
    assert_eq!(remaining, [0, 3], "a refused take of several took from one of them");
    // A refund gives back to all of them.
    tenant.reset().await.unwrap();
    user.reset().await.unwrap();
    let mut taken = keeper.limits([user.clone(), tenant.clone()]).take(2).await.unwrap();
    taken.refund(1).await.unwrap();
    assert_eq!((left(&user).await, left(&tenant).await), (1, 4));
}

pub async fn a_refund_brings_back_no_more_than_was_taken<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 10);
    assert!(takes(&limit, 6).await);
    let mut first = limit.take(4).await.unwrap();
    for n in [0, 5] {
        assert!(matches!(first.refund(n).await, Err(Error::Invalid(_))), "a refund of {n} of 4");
    }
    first.refund(3).await.unwrap();
    assert_eq!(left(&limit).await, 3, "a refund brought back another number than was given back");
    assert!(matches!(first.refund(2).await, Err(Error::Invalid(_))), "more than was left of the take");
    first.refund(1).await.unwrap();
    assert!(matches!(first.refund(1).await, Err(Error::Invalid(_))), "a second time");
    assert_eq!(left(&limit).await, 4);
    // The limit refuses the return of tokens that it never gave, and a full bucket does not overflow.
    let mut refused = limit.take(5).await.unwrap();
    assert!(matches!(refused.refund(1).await, Err(Error::Invalid(_))));
    limit.reset().await.unwrap();
    first = limit.take(10).await.unwrap();
    limit.reset().await.unwrap();
    first.refund(10).await.unwrap();
    assert!(takes(&limit, 10).await && !takes(&limit, 1).await);
}

pub async fn a_refund_brings_nothing_back_once_others_have_taken<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 10);
    let mut first = limit.take(4).await.unwrap();
    let mut last = limit.take(6).await.unwrap();
    first.refund(4).await.unwrap();
    assert_eq!(left(&limit).await, 0, "a refund brought tokens back after another take");
    last.refund(6).await.unwrap();
    assert_eq!(left(&limit).await, 6, "the last take comes back");
    // Five tokens refill in the pause. If the first refund brought tokens back, the tokens of the second one would have refilled, too.
    let (limit, clock) = (keeper.limit("fast").rate(2, PER_SECOND).burst(20), h.clock());
    let mut early = limit.take(5).await.unwrap();
    let mut late = limit.take(5).await.unwrap();
    early.refund(5).await.unwrap();
    h.pass(Duration::from_millis(2600)).await;
    let start = clock.now();
    assert!(takes(&limit, 3).await);
    late.refund(5).await.unwrap();
    let used = 3 + left(&limit).await;
    let most = 20 + clock.now().since(start).as_millis() as u64 / 500 + 1;
    assert!(used <= most, "{used} of {most} tokens are there for one window after two refunds");
}

pub async fn a_full_bucket_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    for n in 0..3 {
        assert!(takes(&keeper.limit(format!("mail/{n}")).rate(10, PER_SECOND).burst(10), 10).await);
    }
    eventually("full buckets are gone: a full bucket was left behind", || async {
        h.pass(Duration::from_millis(1200)).await;
        h.client().await.scan("", &Page::FIRST).await.unwrap().records.is_empty()
            && h.stored_buckets().await == 0
    })
    .await;
}

pub async fn a_clock_that_goes_back_gives_nothing_twice<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = slow(&keeper, "mail", 5);
    assert!(takes(&limit, 5).await);
    for hours in [1, 24, 24 * 365] {
        h.set_wall_clock_back(Duration::from_secs(3600 * hours)).await;
        assert!(!takes(&limit, 1).await, "tokens were given twice");
    }
}

/// The earliest end of wait number `n`, counted from before the take of the only token, and the end that it had.
type TurnAndEnd = (Duration, Duration);

/// Four callers of two clients wait for two tokens per second, in the order in which each reservation was seen, and the bucket is empty.
async fn turns_and_ends<H: Harness>(h: &H, keepers: &[Lockkeeper; 2]) -> Vec<TurnAndEnd> {
    const STEP: Duration = Duration::from_millis(500);
    let limits = keepers.each_ref().map(|keeper| keeper.limit("mail").rate(2, PER_SECOND).burst(1));
    let clock = h.clock();
    let start = clock.now();
    assert!(takes(&limits[0], 1).await);
    let mut waits: Vec<tokio::task::JoinHandle<Duration>> = Vec::new();
    for n in 0..4_u32 {
        let (limit, clock2) = (limits[n as usize % 2].clone(), clock.clone());
        waits.push(tokio::spawn(async move {
            let outcome = limit.wait(Duration::from_secs(600)).await.unwrap();
            assert!(outcome.allowed(), "a wait was refused though its turn comes in time");
            clock2.now().since(start)
        }));
        let newest = &waits[n as usize];
        // The reservation moves the instant at which the bucket is full. A wait that has ended has reserved, too.
        eventually("a place is reserved", || async {
            let before = clock.now().since(start);
            before + limits[0].peek().await.unwrap().reset_after >= STEP * (n + 2) - STEP / 2
                || newest.is_finished()
        })
        .await;
    }
    let ends = soon("all waits end", while_time_passes(h, futures_util::future::join_all(waits))).await;
    (1..).map(|n| STEP * n).zip(ends.into_iter().map(|end| end.expect("a wait ends well"))).collect()
}

/// The order is compared by lower bounds only: no caller ends before its own turn, so no caller has the turn of an earlier one.
pub async fn waits_are_served_in_turn_and_keep_the_limit<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let seen = turns_and_ends(&h, &keepers).await;
    // Clocks of two machines differ a little.
    let early = |(turn, end): &TurnAndEnd| *end + Duration::from_millis(50) < *turn;
    assert!(!seen.iter().any(early), "a caller was served before one that came earlier: {seen:?}");
}

pub async fn no_two_waits_have_one_turn<H: Harness>(h: H) {
    let keepers = [h.keeper().await, h.keeper().await];
    if !has(&keepers[0]).await {
        return;
    }
    let limits = keepers.each_ref().map(|keeper| keeper.limit("mail").rate(2, PER_SECOND).burst(1));
    let clock = h.clock();
    assert!(takes(&limits[0], 1).await);
    let start = clock.now();
    let ends = Mutex::new(Vec::new());
    let waits = (0..4_usize).map(|n| {
        let (limits, ends, clock) = (&limits, &ends, &clock);
        async move {
            let outcome = limits[n % 2].wait(Duration::from_secs(20)).await.unwrap();
            assert!(outcome.allowed(), "a wait was refused though its turn comes in time");
            ends.lock().unwrap().push(clock.now().since(start));
        }
    });
    soon("all waits end", while_time_passes(&h, futures_util::future::join_all(waits))).await;
    let mut ends = ends.into_inner().unwrap();
    ends.sort();
    // Turn number n comes n half seconds after the first take at the earliest, and that take was before `start`.
    let early = |(n, end): (usize, &Duration)| {
        *end + Duration::from_millis(500) < Duration::from_millis(500) * (n as u32 + 1)
    };
    assert!(!ends.iter().enumerate().any(early), "two callers got one place: {ends:?}");
    // A caller whose turn comes too late is refused at once, and takes no place.
    let slow = slow(&keepers[0], "slow", 1);
    assert!(takes(&slow, 1).await);
    let refused = soon("it is refused at once", slow.wait(Duration::from_secs(60))).await.unwrap();
    assert!(!refused.allowed() && refused.retry_after() <= PER_HOUR, "{refused:?}");
}

pub async fn a_dropped_wait_gives_its_place_back<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let limit = keeper.limit("mail").rate(1, PER_MINUTE).burst(2);
    assert!(takes(&limit, 2).await);
    let before = limit.peek().await.unwrap().reset_after;
    let waiter = tokio::spawn({
        let limit = limit.clone();
        async move { limit.wait(Duration::from_secs(3600)).await }
    });
    eventually("a place is reserved", || async { limit.peek().await.unwrap().reset_after > before }).await;
    waiter.abort();
    let _ = waiter.await;
    soon("the place is given back", keeper.settle()).await;
    let after = limit.peek().await.unwrap().reset_after;
    assert!(after <= before, "a dropped wait kept its place: {after:?} after {before:?}");
}

/// A client whose next take reaches the store, and whose reply is lost.
struct LostReply {
    store: Arc<dyn Store>,
    lost: AtomicU32,
}

#[async_trait]
impl lockkeeper_core::Limits for LostReply {
    async fn limit(&self, request: &LimitRequest) -> Result<LimitOutcome> {
        let outcome = self.store.limit(request).await?;
        let takes = matches!(request.operation, LimitOperation::Take { .. });
        match takes && self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
            true => Err(Error::Unknown("the reply was lost".into())),
            false => Ok(outcome),
        }
    }
}

crate::forward_calls!(LostReply, {
    async fn acquire(&self, request: &LockRequest) -> Result<AcquireOutcome> {
        self.store.acquire(request).await
    }
    async fn renew(&self, grants: &[Grant]) -> Result<Vec<RenewOutcome>> {
        self.store.renew(grants).await
    }
    async fn release(&self, key: &RequestKey) -> Result<ReleaseOutcome> {
        self.store.release(key).await
    }
});

crate::forward_records!(LostReply, {
    async fn write(
        &self,
        key: &lockkeeper_core::LockName,
        value: &[u8],
        expect: lockkeeper_core::Expect,
        ttl: Option<Duration>,
    ) -> Result<lockkeeper_core::WriteOutcome> {
        self.store.write(key, value, expect, ttl).await
    }
});

pub async fn a_take_whose_reply_is_lost_is_unknown_and_counts_once<H: Harness>(h: H) {
    let other = h.keeper().await;
    if !has(&other).await {
        return;
    }
    let lossy = LostReply { store: h.client().await, lost: AtomicU32::new(0) };
    let keeper = Lockkeeper::with_store(Arc::new(lossy), h.clock());
    let answer = slow(&keeper, "mail", 10).take(3).await;
    assert!(matches!(answer, Err(Error::Unknown(_))), "a lost reply was taken for an answer: {answer:?}");
    assert_eq!(left(&slow(&other, "mail", 10)).await, 7, "a take whose reply was lost counts once");
}

pub async fn prefetched_tokens_keep_their_bound<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    // Each member takes one token, prefetches the rest of its batch, and holds it while the bucket fills up again.
    let (members, batch, burst) = (3_u64, 5_u64, 20_u64);
    let mut prefetched = Vec::new();
    for _ in 0..members {
        let limit = slow(&h.keeper().await, "hot", burst).prefetch(batch);
        assert!(limit.take(1).await.unwrap().allowed);
        prefetched.push(limit);
    }
    slow(&keeper, "hot", burst).reset().await.unwrap();
    let mut used = 0;
    for limit in prefetched.iter().cycle().take(100) {
        used += u64::from(limit.take(1).await.unwrap().allowed);
    }
    let most = burst + members * batch;
    assert!(used <= most, "members x batch above the limit was exceeded: {used} of {most}");
    assert_eq!(
        used,
        burst + members * (batch - 1),
        "what is left of the batches is used, and all of the burst"
    );
    // A batch that the bucket has no more is no refusal for those who need less.
    let limit = slow(&keeper, "rest", 7).prefetch(5);
    let mut given = 0;
    while limit.take(1).await.unwrap().allowed {
        given += 1;
    }
    assert_eq!(given, 7, "tokens are left in the bucket");
}

pub async fn a_permit_and_a_token_come_together_or_not_at_all<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await || !keeper.profile().permits {
        return;
    }
    let work = |burst| slow(&keeper, "api", burst).permits(2).ttl(LONG);
    let enter = async || match work(4).enter().await.unwrap() {
        EnterOutcome::Entered(pass) => pass,
        refused => panic!("work was to begin: {refused:?}"),
    };
    let (first, second) = (enter().await, enter().await);
    assert!(matches!(work(4).enter().await.unwrap(), EnterOutcome::NoPermit(_)), "three work at once");
    assert_eq!(left(&slow(&keeper, "api", 4)).await, 2, "a refused permit cost a token");
    first.release().await.unwrap();
    second.cancel().await.unwrap();
    is_free(&h.client().await, "limit/api").await;
    assert_eq!(left(&slow(&keeper, "api", 4)).await, 3, "a pass that was cancelled gives its token back");
    for _ in 0..3 {
        enter().await.release().await.unwrap();
    }
    assert!(matches!(work(4).enter().await.unwrap(), EnterOutcome::NoToken(_)));
    is_free(&h.client().await, "limit/api").await;
}

pub async fn bad_input_to_a_limit_leaves_nothing<H: Harness>(h: H) {
    let keeper = h.keeper().await;
    if !has(&keeper).await {
        return;
    }
    let bad = |what: &str, result: Result<bool>| {
        assert!(matches!(result, Err(Error::Invalid(_))), "{what} gave {result:?}")
    };
    let take = async |limit: RateLimit, n| limit.take(n).await.map(|outcome| outcome.allowed());
    let fine = || keeper.limit("l").rate(5, PER_SECOND);
    bad("no rate", take(keeper.limit("l"), 1).await);
    bad("a rate of 0", take(keeper.limit("l").rate(0, PER_SECOND), 1).await);
    bad("a period of 0", take(keeper.limit("l").rate(1, Duration::ZERO), 1).await);
    bad("a rate too high", take(keeper.limit("l").rate(u64::MAX, PER_SECOND), 1).await);
    bad("a burst of 0", take(fine().burst(0), 1).await);
    bad("a burst too high", take(fine().burst(u64::MAX), 1).await);
    bad("a burst below the take", take(fine().burst(5), 6).await);
    bad("no tokens", take(fine(), 0).await);
    for key in ["", "a\nb", &"x".repeat(lockkeeper::KEY_BYTES + 1)] {
        bad("a bad key", take(keeper.limit(key).rate(1, PER_SECOND), 1).await);
    }
    bad(
        "the same limit twice",
        keeper.limits([fine(), fine()]).take(1).await.map(|outcome| outcome.allowed()),
    );
    bad("no limits", keeper.limits([]).take(1).await.map(|outcome| outcome.allowed()));
    bad("a batch of 0", fine().prefetch(0).take(1).await.map(|outcome| outcome.allowed));
    bad("a batch above the burst", fine().prefetch(6).take(1).await.map(|outcome| outcome.allowed));
    bad("a wait of years", fine().wait(Duration::from_secs(1 << 40)).await.map(|outcome| outcome.allowed()));
    // The store checks too: a client may send what no builder makes.
    let spec = slow(&keeper, "l", 5).take(1).await.map(|_| ()).and_then(|()| {
        lockkeeper_core::limit::BucketSpec::new(
            name("limit/m"),
            lockkeeper_core::limit::Rate::new(1, PER_HOUR)?,
            5,
        )
    });
    slow(&keeper, "l", 5).reset().await.unwrap();
    let buckets = vec![lockkeeper_core::limit::LimitBucket { spec: spec.unwrap(), tokens: 6, taken: 0 }];
    let request = LimitRequest { operation: LimitOperation::Take { wait: Duration::ZERO }, buckets };
    let answer = h.client().await.limit(&request).await;
    assert!(matches!(answer, Err(Error::Invalid(_))), "the store took more than the burst: {answer:?}");
    assert_eq!(left(&slow(&keeper, "m", 5)).await, 5);
    h.pass(Duration::from_millis(200)).await;
    let records = h.client().await.scan("", &Page::FIRST).await.unwrap().records;
    assert!(records.is_empty() && h.stored_buckets().await == 0, "something was left: {records:?}");
}
