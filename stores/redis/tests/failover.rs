//! A primary dies and its replica takes over. Redis acknowledges a write before the replica has it, so a grant can be
//! forgotten and a second client be let in: the store says so, and the fence is what is left to protect the resource.

mod common;

use std::time::Duration;

use common::{Client, client_of, failed, grow, keeper, not_for_correctness, open, renew, says, tell, url};
use lockkeeper_core::{Error, Fence, Guarantee, Outcome, Owner, ReleaseOutcome, RenewOutcome};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, name, owner, refused, request, soon, take, with,
};
use lockkeeper_testkit::proxy::{Direction, Framing, Proxy};
use lockkeeper_testkit::resource::{CheckedFile, UncheckedFile};
use lockkeeper_testkit::servers::{self, AppendOnly, ClockShim, RedisOptions, RedisPair, TempDir};

/// The address of the dead primary leads to the replica from now on, as a virtual address does.
fn move_the_address(pair: &mut RedisPair) {
    let port = pair.primary().addr().port().to_string();
    pair.promote();
    tell(pair.replica().addr(), &["CONFIG", "SET", "port", &port]);
}

/// Right after it was loaded a replica may get nothing for up to a second, although its link is up: waits until a write
/// arrives.
fn wait_until_writes_arrive(pair: &RedisPair) {
    tell(pair.primary().addr(), &["SET", "anything", "at all"]);
    pair.wait_synced();
}

const HOUR: Duration = Duration::from_secs(3600);

async fn fence_of(store: &Client, name: &str) -> Fence {
    take(store, &request(name)).await.fence
}

/// The whole story of why a lock in Redis with replicas is not for correctness: both clients hold an acknowledged
/// grant of one name at once. Only the resource that checks the fence comes out of it unharmed.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_that_lost_a_grant_lets_a_second_holder_in_and_the_fence_saves_the_file() {
    let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
    let dir = TempDir::new("failover");
    let (fenced, unfenced) = (CheckedFile::new(dir.join("fenced")), UncheckedFile::new(dir.join("unfenced")));
    let one = client_of(pair.primary()).await;
    let profile = one.profile();
    assert_ne!(profile.exclusion, Guarantee::Kept);
    assert_ne!(profile.durable, Guarantee::Kept);
    assert!(
        profile.findings.iter().any(|finding| finding.text.contains("fail-over")),
        "{:?}",
        profile.findings
    );

    pair.wait_synced();
    pair.cut_replication();
    let old = take(&one, &request("orders/42")).await;
    pair.promote();
    let two = client_of(pair.replica()).await;
    let new = take(&two, &request("orders/42")).await;
    // No client has notified the first: by its own clock it holds the lock for another ten minutes.
    assert!(new.fence > old.fence);
    fenced.write(new.fence, "new").unwrap();
    unfenced.write(new.fence, "new").unwrap();
    assert!(matches!(fenced.write(old.fence, "late"), Err(Error::Stale { .. })));
    unfenced.write(old.fence, "late").unwrap();
    assert_eq!(fenced.read().unwrap().unwrap().value, "new");
    assert_eq!(unfenced.accepted().unwrap().last().unwrap().value, "late", "the twin shows the harm");
}

/// A server that syncs every grant to its disk is good enough, until it has a replica that may take over without them.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_a_reason_to_refuse_correctness() {
    let synced = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(pair) = servers::redis_pair(synced) else { return };
    let store = client_of(pair.primary()).await;
    not_for_correctness(&store, &["fail-over", "replica"]);
    let refusal = keeper(&store).lock("orders/42").for_correctness().acquire().await.unwrap_err();
    says(&refusal, Outcome::Unsupported, &["fail-over"]);
    let counted = open(&format!("{}?wait_replicas=1", url(pair.primary()))).await;
    not_for_correctness(&counted, &["fail-over", "1 replicas"]);
}

/// The replica's clock is an hour behind and it never heard of the last grants, so its fences go back. A client that
/// was there before does not take one of those: it says what it has seen, and the server goes on from there.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_before_keeps_fences_growing_on_a_replica_whose_clock_is_behind() {
    let Ok(clock) = ClockShim::build() else { return };
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    let Ok(mut pair) = servers::redis_pair(options) else { return };
    let survivor = client_of(pair.primary()).await;
    pair.wait_synced();
    pair.cut_replication();
    let before = fence_of(&survivor, "orders/1").await;
    move_the_address(&mut pair);
    clock.jump(-3600 * ClockShim::SECOND);

    let newcomer = client_of(pair.primary()).await;
    let low = fence_of(&newcomer, "orders/2").await;
    assert!(low < before, "nothing is shown: the new server is not behind");
    // Its connection died with the primary, and it may take one call to notice.
    eventually("the survivor finds the new server", || async {
        survivor.inspect(&lockkeeper_testkit::laws::name("x")).await.is_ok()
    })
    .await;
    let after = fence_of(&survivor, "orders/3").await;
    // And from here on every client's grow, the newcomer's too.
    grow(&[before, after, fence_of(&newcomer, "orders/4").await]);
}

/// The queue came over to the replica, the last fences did not. A waiter that a release lets in from that queue gets a
/// number of the new server first, and may have seen a higher one meanwhile.
async fn let_in_by_the_new_server(owner: Option<Owner>) {
    let Ok(clock) = ClockShim::build() else { return };
    let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
    let Ok(mut pair) = servers::redis_pair(options) else { return };
    wait_until_writes_arrive(&pair);
    let (holder, survivor) = (client_of(pair.primary()).await, client_of(pair.primary()).await);
    let held = take(&holder, &request("orders/1")).await;
    let waiter = join_queue(&survivor, &with(request("orders/1"), |request| request.owner = owner), 1).await;
    pair.wait_synced();
    pair.cut_replication();
    let seen = fence_of(&survivor, "orders/2").await;
    move_the_address(&mut pair);
    clock.jump(-3600 * ClockShim::SECOND);
    eventually("the holder finds the new server", || async { holder.release(&held.key).await.is_ok() }).await;
    grow(&[held.fence, seen, granted(waiter).await.fence]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_the_new_server_lets_in_has_a_fence_above_all_that_it_has_seen() {
    let_in_by_the_new_server(None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_with_an_owner_has_a_fence_above_all_that_it_has_seen_as_well() {
    let_in_by_the_new_server(Some(owner())).await;
}

/// The same, and another client that was there before raises the counter of the new server before the waiter confirms: the
/// counter is as high as it should be then, the fence of the waiter is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_confirms_after_the_counter_was_raised_has_a_fence_above_all_that_it_has_seen() {
    for owner in [None, Some(owner())] {
        let Ok(clock) = ClockShim::build() else { return };
        let options = RedisOptions { clock: Some(clock.clone()), ..RedisOptions::default() };
        let Ok(mut pair) = servers::redis_pair(options) else { return };
        wait_until_writes_arrive(&pair);
        let proxy = Proxy::start(pair.primary().addr(), Framing::Resp);
        // No claim ends within the test.
        let options = "claim=10m&poll=100ms&timeout=1s";
        let direct = format!("{}?{options}", url(pair.primary()));
        let (holder, raiser) = (open(&direct).await, open(&direct).await);
        let survivor = open(&format!("redis://{}?{options}", proxy.addr())).await;
        let held = take(&holder, &request("orders/1")).await;
        let waiter =
            join_queue(&survivor, &with(request("orders/1"), |request| request.owner = owner), 1).await;
        pair.wait_synced();
        pair.cut_replication();
        let seen = fence_of(&survivor, "orders/2").await;
        let higher = fence_of(&raiser, "orders/3").await;
        proxy.cut_all();
        move_the_address(&mut pair);
        clock.jump(-3600 * ClockShim::SECOND);
        eventually("the holder finds the new server", || async { holder.release(&held.key).await.is_ok() })
            .await;
        let let_in = holder.inspect(&name("orders/1")).await.unwrap().expect("the waiter was let in");
        assert!(let_in.held[0].fence < seen, "nothing is shown: {let_in:?}");
        eventually("the raiser finds the new server", || async { raiser.inspect(&name("x")).await.is_ok() })
            .await;
        grow(&[seen, higher, fence_of(&raiser, "orders/4").await]);
        proxy.heal();
        grow(&[held.fence, seen, granted(waiter).await.fence]);
    }
}

/// `wait_replicas=1`: a grant that the replica did not get is not a grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_no_replica_has_is_given_back() {
    let Ok(pair) = servers::redis_pair(RedisOptions::default()) else { return };
    wait_until_writes_arrive(&pair);
    let (primary, replica) = (pair.primary().addr(), pair.replica().addr());
    let store = open(&format!("redis://{primary}?wait_replicas=1&timeout=1s")).await;
    let first = take(&store, &request("orders/1")).await;
    assert_eq!(tell(replica, &["EXISTS", "lock:orders/1"]), "1", "granted, and the replica does not know");

    pair.wait_synced();
    pair.cut_replication();
    let asked = request("orders/2");
    says(&failed(&store, &asked).await, Outcome::Unavailable, &["0 of 1 replicas"]);
    assert_eq!(tell(primary, &["EXISTS", "lock:orders/2"]), "0", "it was not given back");
    assert_eq!(give_back(&store, &asked.key).await, ReleaseOutcome::AlreadyGone);
    // A renewal that the replica does not have does not count either: promoted, the replica would end the lease earlier
    // than the holder believes, and let another one in.
    assert_eq!(renew(&store, &first).await, RenewOutcome::Unknown);

    pair.heal_replication();
    pair.wait_synced();
    let second = take(&store, &request("orders/2")).await;
    assert_eq!(renew(&store, &first).await, RenewOutcome::Renewed);
    grow(&[first.fence, second.fence]);
}

/// A process resumes the attempt of its life before, which has a hold that the replica knows. The new lease is not replicated: the hold
/// used to be released, although the process may be at work under it, and the caller got *unavailable*.
#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_hold_stays_when_its_new_lease_is_not_replicated() {
    let Ok(pair) = servers::redis_pair(RedisOptions::default()) else { return };
    wait_until_writes_arrive(&pair);
    let primary = pair.primary().addr();
    let options = format!("{}?wait_replicas=1&timeout=600ms", url(pair.primary()));
    let asked = [request("plain"), with(request("kept"), |request| request.min_hold = HOUR)];
    let before = open(&options).await;
    let held = [take(&before, &asked[0]).await, take(&before, &asked[1]).await];
    pair.wait_synced();
    pair.cut_replication();
    let store = open(&options).await;
    for asked in &asked {
        says(&failed(&store, asked).await, Outcome::Unknown, &["0 of 1 replicas"]);
        let key = format!("lock:{}", asked.key.names);
        assert_eq!(tell(primary, &["EXISTS", &key]), "1", "{key} was released");
    }
    pair.heal_replication();
    pair.wait_synced();
    for (asked, held) in asked.iter().zip(held) {
        assert_eq!(take(&store, asked).await.fence, held.fence, "it is the same hold");
    }
}

/// The grant that no replica has cannot be released either: it may be there, so its outcome is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_could_not_be_given_back_is_unknown() {
    let Ok(pair) = servers::redis_pair(RedisOptions::default()) else { return };
    wait_until_writes_arrive(&pair);
    let primary = pair.primary().addr();
    let proxy = Proxy::start(primary, Framing::Resp);
    let store = open(&format!("redis://{}?wait_replicas=1&timeout=2s", proxy.addr())).await;
    pair.cut_replication();
    let (asking, asked) = (store.clone(), request("orders/1"));
    let key = asked.key.clone();
    let answer = tokio::spawn(async move { asking.acquire(&asked).await });
    eventually("it is granted", || async { tell(primary, &["EXISTS", "lock:orders/1"]) == "1" }).await;
    proxy.hold(Direction::Requests);
    let answer = soon("the request ends", answer).await.unwrap();
    assert!(matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    assert_eq!(tell(primary, &["EXISTS", "lock:orders/1"]), "1", "nothing is shown: it was given back");
    proxy.cut_all();
    proxy.heal();
    eventually("it is released", || async { store.release(&key).await.is_ok() }).await;
    assert_eq!(tell(primary, &["EXISTS", "lock:orders/1"]), "0");
}

/// The replica had the grant and none of the renewals. It is promoted when the lease is over there: by then no guard may
/// believe in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_guard_whose_renewals_reach_no_replica_is_lost_before_the_replica_lets_another_in() {
    let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
    wait_until_writes_arrive(&pair);
    let store = open(&format!("{}?wait_replicas=1&timeout=1s", url(pair.primary()))).await;
    let guard = keeper(&store).lock("orders/42").ttl(Duration::from_secs(4)).acquire().await.unwrap();
    pair.wait_synced();
    pair.cut_replication();
    eventually("the grant is over at the replica", || async {
        tell(pair.replica().addr(), &["PTTL", "lock:orders/42"]).starts_with('-')
            || tell(pair.replica().addr(), &["EXISTS", "lock:orders/42"]) == "0"
    })
    .await;
    pair.promote();
    let two = client_of(pair.replica()).await;
    let new = take(&two, &request("orders/42")).await;
    assert!(!guard.is_held(), "two guards of one lock");
    assert!(new.fence > guard.fence());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_the_replica_has_survives_its_promotion() {
    let Ok(mut pair) = servers::redis_pair(RedisOptions::default()) else { return };
    wait_until_writes_arrive(&pair);
    let store = open(&format!("{}?wait_replicas=1", url(pair.primary()))).await;
    let held = take(&store, &request("orders/42")).await;
    pair.cut_replication();
    pair.promote();
    let two = client_of(pair.replica()).await;
    let busy = refused(&two, &request("orders/42")).await;
    assert_eq!(busy.held[0].fence, held.fence);
    // The holder may go on there as well: the proof of ownership came with the grant.
    assert_eq!(renew(&two, &held).await, RenewOutcome::Renewed);
    give_back(&two, &held.key).await;
    grow(&[held.fence, fence_of(&two, "orders/42").await]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_was_synced_survives_a_kill() {
    let options = RedisOptions { append_only: AppendOnly::Always, ..RedisOptions::default() };
    let Ok(mut server) = servers::redis(options) else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    assert_eq!((one.profile().durable, one.profile().fence), (Guarantee::Kept, Guarantee::Kept));
    let mut fences = Vec::new();
    for round in 0..5 {
        let held = take(&one, &request("orders/42")).await;
        fences.push(held.fence);
        server.kill9();
        server.restart();
        eventually("the second client finds the server again", || async {
            two.inspect(&held.key.names.first().clone()).await.is_ok()
        })
        .await;
        let busy = refused(&two, &request("orders/42")).await;
        assert_eq!(busy.held[0].fence, held.fence, "round {round}");
        assert_eq!(renew(&two, &held).await, RenewOutcome::Renewed);
        give_back(&two, &held.key).await;
        eventually("the first client finds it too", || async {
            one.inspect(&held.key.names.first().clone()).await.is_ok()
        })
        .await;
    }
    grow(&fences);
}
