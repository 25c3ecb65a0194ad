//! a client sets the server's clock. Redis ends keys by its wall clock: set forward, leases end early, which the store
//! cannot help and says so; set back, they would last for an hour more, which it does not let happen.

mod common;

use std::time::Duration;

use common::{ask_for, client_of, grow, keeper, pttl, renew, tell};
use lockkeeper_core::{Expect, Mode, Outcome, ReleaseOutcome, RenewOutcome, WriteOutcome};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, ClockShim, RedisOptions, Server};

const HOUR: i64 = 3600 * ClockShim::SECOND;

fn server_on_a_clock() -> Option<(Server, ClockShim)> {
    let clock = ClockShim::build().ok()?;
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    Some((servers::redis(options).ok()?, clock))
}

/// A 60-second key was once seen to stay for 13 minutes after a jump back. A client that looks at such a lock shortens it to
/// one ttl from now.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_keeps_others_out_for_one_ttl_more_at_most() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    // Long enough for a busy machine to set the clock before its end.
    let ttl = Duration::from_secs(6);
    let dead = client_of(&server).await;
    let old = take(&dead, &ask_for("jobs", ttl)).await;
    drop(dead);
    clock.jump(-HOUR);
    assert!(pttl(server.addr(), "lock:jobs") > 3_500_000, "the jump did not reach the server");

    let store = client_of(&server).await;
    refused(&store, &request("jobs")).await;
    assert!(pttl(server.addr(), "lock:jobs") <= 6000, "it stays for longer than it was given");
    // An hour would be beyond every patience.
    let waiter = join_queue(&store, &request("jobs"), 1).await;
    grow(&[old.fence, granted(waiter).await.fence]);
}

/// The same if the waiter waited in the queue before the jump: it is its poll that looks.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_in_line_is_not_forgotten_when_the_clock_is_set_back() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let (dead, store) = (client_of(&server).await, client_of(&server).await);
    let old = take(&dead, &ask_for("jobs", Duration::from_secs(6))).await;
    let waiter = join_queue(&store, &request("jobs"), 1).await;
    drop(dead);
    clock.jump(-HOUR);
    grow(&[old.fence, granted(waiter).await.fence]);
}

/// The end of a minimum hold is a time of day, too: a job of twenty seconds must not keep its lock for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_hold_lasts_one_more_at_most_when_the_clock_is_set_back() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let store = client_of(&server).await;
    let brief = |text| with(request(text), |request| request.min_hold = Duration::from_secs(20));
    let (before, after) = (take(&store, &brief("before")).await, take(&store, &brief("after")).await);
    give_back(&store, &before.key).await;
    clock.jump(-HOUR);
    give_back(&store, &after.key).await;
    for text in ["before", "after"] {
        let busy = refused(&store, &request(text)).await;
        assert!(busy.held[0].lingering && busy.held[0].expires_in_ms <= 20_000, "{text}: {busy:?}");
        assert!(pttl(server.addr(), &format!("lock:{text}")) <= 20_000, "the key of {text} stays for longer");
    }
}

/// Many readers, and some of them have a longer ttl: every one is shortened to one ttl from now.
#[tokio::test(flavor = "multi_thread")]
async fn every_reader_is_over_after_one_ttl_more_when_the_clock_is_set_back() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let (dead, store) = (client_of(&server).await, client_of(&server).await);
    let reader =
        |secs| with(ask_for("jobs", Duration::from_secs(secs)), |request| request.mode = Mode::Shared);
    for secs in [4, 6, 2] {
        take(&dead, &reader(secs)).await;
    }
    drop(dead);
    clock.jump(-HOUR);
    let waiter = join_queue(&store, &request("jobs"), 1).await;
    assert!(pttl(server.addr(), "lock:jobs") <= 6000, "it stays for longer than it was given");
    granted(waiter).await;
}

/// The documented break: two hold the lock at once. The fence tells them apart, and the first learns of it at its next
/// renewal, not at the end of its ttl.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_forward_ends_leases_early_and_the_holder_is_told() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    assert!(one.profile().findings.iter().any(|finding| finding.text.contains("set forward")));
    let old = take(&one, &ask_for("jobs", Duration::from_secs(60))).await;
    refused(&two, &request("jobs")).await;
    clock.jump(HOUR);
    let new = take(&two, &ask_for("jobs", Duration::from_secs(60))).await;
    grow(&[old.fence, new.fence]);
    assert_eq!(renew(&one, &old).await, RenewOutcome::Lost);
    assert_eq!(give_back(&one, &old.key).await, ReleaseOutcome::AlreadyGone);
    assert_eq!(renew(&two, &new).await, RenewOutcome::Renewed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_is_lost_at_its_next_renewal_when_the_clock_is_set_forward() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let keeper = keeper(&client_of(&server).await);
    let guard = keeper.lock("jobs").ttl(Duration::from_secs(6)).acquire().await.unwrap();
    clock.jump(HOUR);
    let loss = soon("the guard is told", guard.lost()).await;
    assert_eq!(loss.outcome(), Outcome::Lost);
    assert!(!guard.is_held());
}

/// The queue entries have an end as well, and a jump forward is past it: the waiters notice and waits in the queue anew.
#[tokio::test(flavor = "multi_thread")]
async fn the_line_and_the_records_outlive_a_jump_forward() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    let two_hours = Duration::from_secs(2 * 3600);
    let held = take(&one, &ask_for("jobs", two_hours)).await;
    let written = one.write(&name("note"), b"here", Expect::Absent, None).await.unwrap();
    let waiter = join_queue(&two, &ask_for("jobs", two_hours), 1).await;
    clock.jump(HOUR);
    eventually("the queue entries is lost", || async {
        tell(server.addr(), &["EXISTS", "lockkeeper:{all}:queue:lock:jobs"]) == "0"
            || two.inspect(&name("jobs")).await.unwrap().unwrap().waiting == 1
    })
    .await;
    eventually("the waiter waits in the queue again", || async {
        two.inspect(&name("jobs")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    assert_eq!(renew(&one, &held).await, RenewOutcome::Renewed);
    give_back(&one, &held.key).await;
    grow(&[held.fence, granted(waiter).await.fence]);
    let WriteOutcome::Written(version) = written else { panic!("{written:?}") };
    let record = two.read(&name("note")).await.unwrap().unwrap();
    assert_eq!((record.version, &record.value[..]), (version, &b"here"[..]));
}

/// Everything at once that could make a number go back: the clock, and the loss of the counter. A client that has seen
/// a fence takes none below it; not even one that a server gave to it while it waited in the queue.
#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_for_a_client_that_was_there_over_a_flush_and_a_clock_set_back() {
    let Some((server, clock)) = server_on_a_clock() else { return };
    let survivor = client_of(&server).await;
    let mut fences = vec![take(&survivor, &request("jobs/0")).await.fence];
    for round in 1..=3 {
        tell(server.addr(), &["FLUSHALL"]);
        clock.jump(-HOUR);
        let newcomer = client_of(&server).await;
        let low = take(&newcomer, &request("jobs")).await;
        assert!(low.fence < fences[0], "nothing is shown: the server did not forget");
        // The release lets the survivor in with the server's own number, which is not good enough.
        let waiter = join_queue(&survivor, &request("jobs"), 1).await;
        give_back(&newcomer, &low.key).await;
        fences.push(granted(waiter).await.fence);
        fences.push(take(&survivor, &request(&format!("jobs/{round}"))).await.fence);
        fences.push(take(&newcomer, &request(&format!("later/{round}"))).await.fence);
        // Only the survivor's floor counts in the next round.
        fences.push(take(&survivor, &request(&format!("more/{round}"))).await.fence);
    }
    grow(&fences);
}
