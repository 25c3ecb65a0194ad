//! The errors of requests that failed after they were applied. No lock is held without a caller afterwards.

mod common;

use std::time::Duration;

use common::{Client, client_of, failed, keeper, open, says, tell, url};
use lockkeeper_core::{AcquireOutcome, Error, Grant, LockRequest, Mode, Outcome, ReleaseOutcome, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, queue_reaches, refused, request, soon, take,
    with,
};
use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Pick, Proxy};
use lockkeeper_testkit::servers::{self, RedisOptions, Server};

const HOUR: Duration = Duration::from_secs(3600);

/// A server, a proxy before it, a client that talks through the proxy, and one that talks past it.
async fn through_a_proxy(options: &str) -> Option<(Server, Proxy, Client, Client)> {
    let server = servers::redis(RedisOptions::default()).ok()?;
    let proxy = Proxy::start(server.addr(), Framing::Resp);
    let store = open(&format!("redis://{}?{options}", proxy.addr())).await;
    let other = open(&format!("redis://{}?{options}", server.addr())).await;
    Some((server, proxy, store, other))
}

async fn waiting(store: &Client, text: &str) -> usize {
    store.inspect(&name(text)).await.unwrap().map_or(0, |view| view.waiting)
}

/// Adds a user with the rights that the page names, for this prefix.
fn add_user(server: &Server, user: &str, prefix: &str, but: &[&str]) {
    let keys = format!("~{prefix}*");
    let mut words =
        vec!["ACL", "SETUSER", user, "reset", "on", ">pw", &keys, "~lockkeeper:*", "&lockkeeper:*"];
    words.extend(["+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "+info", "+time", "+role"]);
    words.extend(["+config|get", "+wait"]);
    words.extend(but);
    tell(server.addr(), &words);
}

/// Each team may touch only its own locks. No script of one team may touch a lock of the other.
#[tokio::test(flavor = "multi_thread")]
async fn two_teams_with_prefixes_of_their_own_do_not_fail_each_other() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let mut teams = Vec::new();
    for team in ["red", "blue"] {
        let prefix = format!("{team}:");
        add_user(&server, team, &prefix, &[]);
        teams.push(open(&format!("redis://{team}:pw@{}?prefix={prefix}", server.addr())).await);
    }
    for i in 0..20 {
        for team in &teams {
            take(team, &request(&format!("jobs/{i}"))).await;
        }
    }
    let denied = tell(server.addr(), &["ACL", "LOG"]);
    assert!(!denied.contains("jobs/"), "a script touched the other team's locks: {denied}");
}

/// The script granted the lock before the server refused to say how many replicas have it.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_wait_was_refused_is_given_back() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    add_user(&server, "worker", "lock:", &["-wait"]);
    let store = open(&format!("redis://worker:pw@{}?wait_replicas=1", server.addr())).await;
    for min_hold in [Duration::ZERO, HOUR] {
        let asked = with(request("jobs"), |request| request.min_hold = min_hold);
        says(&failed(&store, &asked).await, Outcome::Denied, &["NOPERM"]);
        assert_eq!(tell(server.addr(), &["EXISTS", "lock:jobs"]), "0", "held without a caller");
    }
}

/// An error raised inside a script says nothing about what the script wrote before.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_raised_inside_a_script_that_may_have_written_is_unknown() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = client_of(&server).await;
    // The queue of the lock is something else: the script notices when it is about to add an entry.
    tell(server.addr(), &["SET", "lockkeeper:{all}:queue:lock:jobs", "no queue"]);
    take(&store, &request("jobs")).await;
    let patient = with(request("jobs"), |request| request.wait = Wait::Forever);
    says(&failed(&store, &patient).await, Outcome::Unknown, &["WRONGTYPE", "a part of its work"]);
}

/// A look at a lock writes nothing, so its error is never an unknown outcome.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_without_the_right_to_it_is_denied() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    add_user(&server, "worker", "lock:", &["-zrange"]);
    let store = open(&format!("redis://worker:pw@{}", server.addr())).await;
    let error = store.inspect(&name("jobs")).await.unwrap_err();
    says(&error, Outcome::Denied, &["NOPERM"]);
}

/// Requests that travel in one script: replicas that do not have the grant of one of them do not take the queue entry
/// of another away without a word.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_replication_does_not_fail_the_waiters_of_the_same_batch() {
    let Ok(pair) = servers::redis_pair(RedisOptions::default()) else { return };
    tell(pair.primary().addr(), &["SET", "anything", "at all"]);
    pair.wait_synced();
    let holder = client_of(pair.primary()).await;
    let held = take(&holder, &request("held")).await;
    pair.wait_synced();
    pair.cut_replication();
    let store = open(&format!("{}?wait_replicas=1&timeout=1s", url(pair.primary()))).await;
    let requests: Vec<LockRequest> = (0..40)
        .map(|i| {
            let text = if i % 2 == 0 { "held".to_owned() } else { format!("free/{i}") };
            with(request(&text), |request| request.wait = Wait::For(Duration::from_secs(600)))
        })
        .collect();
    let tasks: Vec<_> = requests
        .iter()
        .cloned()
        .map(|request| {
            let store = store.clone();
            tokio::spawn(async move { (request.clone(), store.acquire(&request).await) })
        })
        .collect();
    queue_reaches(&holder, &name("held"), 20).await;
    // Every request for a free lock is answered, with an error; no request in the queue is.
    eventually("the others are answered", || async {
        tasks.iter().filter(|task| task.is_finished()).count() >= 20
    })
    .await;
    assert_eq!(waiting(&holder, "held").await, 20);
    for task in tasks {
        if task.is_finished() {
            let (request, answer) = task.await.unwrap();
            assert_ne!(request.key.names.first().as_str(), "held", "a waiter was told: {answer:?}");
            assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
            assert_eq!(tell(pair.primary().addr(), &["EXISTS", &format!("lock:{}", request.key.names)]), "0");
        } else {
            task.abort();
        }
    }
    give_back(&holder, &held.key).await;
}

/// The queue entries of four waiters whose wait ended during an outage would cost the next waiter a claim each.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_ends_while_the_server_is_unreachable_leaves_no_queue_entry() {
    let Some((_server, proxy, store, other)) = through_a_proxy("timeout=300ms&poll=200ms&claim=60s").await
    else {
        return;
    };
    // The process lives on, and waits for something else.
    let elsewhere = take(&other, &request("elsewhere")).await;
    let waits = join_queue(&store, &request("elsewhere"), 1).await;
    let held = take(&other, &request("jobs")).await;
    // Long enough for a busy machine to see them in the queue.
    let wait = Duration::from_secs(6);
    let brief = || with(request("jobs"), |request| request.wait = Wait::For(wait));
    let requests: Vec<LockRequest> = (0..4).map(|_| brief()).collect();
    let tasks = requests.iter().cloned().map(|request| {
        let store = store.clone();
        tokio::spawn(async move { store.acquire(&request).await })
    });
    let tasks: Vec<_> = tasks.collect();
    let library = keeper(&store);
    let guarded = tokio::spawn(library.lock("jobs").ttl(Duration::from_secs(2)).wait(wait).acquire());
    queue_reaches(&other, &name("jobs"), 5).await;
    proxy.cut_all();
    for task in tasks {
        let answer = soon("a wait ends", task).await.unwrap();
        assert!(matches!(answer, Err(Error::Unknown(_))), "it stands in the queue, and is told: {answer:?}");
    }
    let answer = soon("a wait ends", guarded).await.unwrap();
    assert!(answer.is_err(), "no client gave it the lock");
    proxy.heal();
    for request in &requests {
        eventually("a release is answered", || async { store.release(&request.key).await.is_ok() }).await;
    }
    eventually("no queue entry is left", || async { waiting(&other, "jobs").await == 0 }).await;
    give_back(&other, &held.key).await;
    is_free(&other, "jobs").await;
    give_back(&other, &elsewhere.key).await;
    granted(waits).await;
}

/// The library gives up a release after a ttl. The process lives on and its queue entries with it, so the store sends the
/// release again, and the waiter behind is served.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_was_given_up_leaves_no_queue_entry_before_a_waiter() {
    let Some((_server, proxy, store, other)) = through_a_proxy("timeout=300ms&poll=200ms&claim=60s").await
    else {
        return;
    };
    let elsewhere = take(&other, &request("elsewhere")).await;
    let waits = join_queue(&store, &request("elsewhere"), 1).await;
    let held = take(&other, &request("jobs")).await;
    let library = keeper(&store);
    let requests = tokio::spawn(library.lock("jobs").ttl(Duration::from_secs(1)).acquire());
    queue_reaches(&other, &name("jobs"), 1).await;
    let behind = join_queue(&other, &request("jobs"), 2).await;
    proxy.cut_all();
    requests.abort();
    assert!(requests.await.is_err());
    soon("the library gives up", library.settle()).await;
    proxy.heal();
    queue_reaches(&other, &name("jobs"), 1).await;
    give_back(&other, &held.key).await;
    granted(behind).await;
    give_back(&other, &elsewhere.key).await;
    granted(waits).await;
}

/// A request waits in a buffer on its way, the client gives it up and releases on another connection; then it arrives.
async fn arrives_late(asked: &LockRequest) -> Option<()> {
    let (server, proxy, store, other) = through_a_proxy("timeout=300ms&poll=200ms&claim=60s").await?;
    let held = match asked.wait {
        Wait::No => None,
        _ => Some(take(&other, &request("jobs")).await),
    };
    let fault = proxy.inject(Fault::at_request(1).hold());
    let answer = soon("the request ends", store.acquire(asked)).await;
    assert!(matches!(answer, Err(Error::Unknown(_))), "{answer:?}");
    assert!(fault.fired());
    eventually("a release is answered", || async { store.release(&asked.key).await.is_ok() }).await;
    let before = tell(server.addr(), &["INFO", "commandstats"]);
    proxy.heal();
    let calls =
        |stats: &str| stats.lines().find(|line| line.starts_with("cmdstat_evalsha")).map(str::to_owned);
    eventually("the request arrives", || async {
        calls(&tell(server.addr(), &["INFO", "commandstats"])) != calls(&before)
    })
    .await;
    if let Some(held) = held {
        assert_eq!(waiting(&other, "jobs").await, 0, "in the queue without a caller");
        give_back(&other, &held.key).await;
    }
    is_free(&other, "jobs").await;
    // The caller may use the attempt again: what it sends now is newer than its release.
    give_back(&store, &take(&store, asked).await.key).await;
    is_free(&other, "jobs").await;
    Some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_arrives_after_its_release_takes_no_lock() {
    arrives_late(&request("jobs")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_arrives_after_its_release_takes_no_queue_entry() {
    arrives_late(&with(request("jobs"), |request| request.wait = Wait::Forever)).await;
}

/// The caller is gone as well: the store releases for it, and what arrives then is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_caller_that_arrives_late_takes_no_lock() {
    let Some((server, proxy, store, other)) = through_a_proxy("timeout=300ms&poll=200ms&claim=60s").await
    else {
        return;
    };
    let fault = proxy.inject(Fault::at_request(1).hold());
    let (store2, asked) = (store.clone(), request("jobs"));
    let task = tokio::spawn(async move { store2.acquire(&asked).await });
    eventually("the request is on its way", || async { fault.fired() }).await;
    task.abort();
    assert!(task.await.is_err());
    eventually("the store releases", || async {
        tell(server.addr(), &["EXISTS", "lockkeeper:{all}:released"]) == "1"
    })
    .await;
    proxy.heal();
    let late = || tell(server.addr(), &["EXISTS", "lock:jobs"]) == "1";
    for _ in 0..20 {
        assert!(!late(), "held without a caller");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    is_free(&other, "jobs").await;
}

/// The store releases a request without a reply in the background, and has just read the newest ticket for it, when the caller sends the
/// request again. The release used to go on, to read the retry's ticket, and to remove its queue entry.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_in_the_background_spares_a_request_that_is_sent_again() {
    let Some((_server, proxy, store, other)) = through_a_proxy("timeout=30s&poll=100ms&claim=10m").await
    else {
        return;
    };
    let held = take(&other, &request("jobs")).await;
    let asked = with(request("jobs"), |request| request.wait = Wait::Forever);
    let lost = proxy.inject(Fault::at_request(1).reset());
    let answer = soon("the request ends", store.acquire(&asked)).await;
    assert!(matches!(answer, Err(Error::Unknown(_))) && lost.fired(), "{answer:?}");
    let newest = Pick::sent("GET\r\n$22\r\nlockkeeper:{all}:fence");
    let ticket = proxy.inject(Fault::at_reply(1).on(newest).hold());
    soon("the release reads the newest ticket", ticket.until_fired()).await;
    let again = store.clone();
    let waiter = tokio::spawn(async move { again.acquire(&asked).await });
    queue_reaches(&other, &name("jobs"), 1).await;
    let behind = join_queue(&other, &request("jobs"), 2).await;
    ticket.release();
    // Every round trip of the release has one of these beside it.
    for _ in 0..100 {
        store.inspect(&name("jobs")).await.unwrap();
    }
    give_back(&other, &held.key).await;
    let first = granted(waiter).await;
    assert!(!behind.is_finished(), "the request lost its position");
    give_back(&store, &first.key).await;
    give_back(&other, &granted(behind).await.key).await;
    is_free(&other, "jobs").await;
}

/// A waiter of `store` is let in by a message while nothing that it sends arrives.
async fn let_in_by_message(
    server: &Server,
    proxy: &Proxy,
    store: &Client,
    other: &Client,
    asked: &LockRequest,
) -> Grant {
    let held = take(other, &request("jobs")).await;
    let waiter = join_queue(store, asked, 1).await;
    // It does so once it knows that it is in the queue.
    eventually("it listens", || async {
        !tell(server.addr(), &["PUBSUB", "CHANNELS", "lockkeeper:wake:*"]).is_empty()
    })
    .await;
    proxy.hold(Direction::Requests);
    give_back(other, &held.key).await;
    let grant = granted(waiter).await;
    assert!(grant.lease < grant.ttl, "the server confirmed it: nothing is shown");
    // Requests and replies in flight are lost.
    proxy.cut_all();
    proxy.heal();
    grant
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_hold_counts_for_a_waiter_that_the_server_did_not_hear_confirm() {
    let Some((server, proxy, store, other)) = through_a_proxy("poll=1s&claim=60s").await else { return };
    let cron = with(request("jobs"), |request| request.min_hold = HOUR);
    let grant = let_in_by_message(&server, &proxy, &store, &other, &cron).await;
    eventually("it is released", || async {
        matches!(store.release(&grant.key).await, Ok(ReleaseOutcome::Released))
    })
    .await;
    let busy = refused(&other, &request("jobs")).await;
    assert!(busy.held[0].lingering, "the job can run twice: {busy:?}");
}

/// A waiter that gave up just when it was let in did no work: there is nothing to keep a minimum for.
#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_hold_does_not_count_for_a_waiter_that_gave_up() {
    let Some((_server, proxy, store, other)) = through_a_proxy("poll=1s&claim=60s").await else { return };
    let cron = with(request("jobs"), |request| request.min_hold = HOUR);
    let held = take(&other, &request("jobs")).await;
    let waiter = join_queue(&store, &cron, 1).await;
    proxy.cut_all();
    waiter.abort();
    assert!(waiter.await.is_err());
    give_back(&other, &held.key).await;
    proxy.heal();
    eventually("it leaves", || async { store.release(&cron.key).await.is_ok() }).await;
    is_free(&other, "jobs").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_delay_counts_for_a_waiter_that_the_server_did_not_hear_confirm() {
    let Some((server, proxy, store, other)) = through_a_proxy("poll=200ms&claim=4s").await else { return };
    for broken in [false, true] {
        let delayed = with(request("jobs"), |request| request.lock_delay = HOUR);
        let_in_by_message(&server, &proxy, &store, &other, &delayed).await;
        if broken {
            other.break_lock(&name("jobs"), "its host is gone").await.unwrap();
        }
        // Otherwise it never says anything again: the hold ends with the claim.
        eventually("no client is let in for a while", || async {
            let view = other.inspect(&name("jobs")).await.unwrap();
            view.expect("it is not free").delayed_ms.is_some()
        })
        .await;
        refused(&other, &request("jobs")).await;
        other.break_lock(&name("jobs"), "the next round").await.unwrap();
        is_free(&other, "jobs").await;
    }
}

/// A client with a short claim polls the same queue: the entries of a client with a long one stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_short_claim_does_not_shorten_the_queue_of_a_long_one() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let hasty = open(&format!("{}?poll=50ms&claim=100ms", url(&server))).await;
    let patient = open(&format!("{}?poll=5m&claim=10m", url(&server))).await;
    let held = take(&hasty, &request("jobs")).await;
    let waiter = join_queue(&patient, &request("jobs"), 1).await;
    let second = with(request("jobs"), |request| request.wait = Wait::For(Duration::from_millis(500)));
    assert!(matches!(hasty.acquire(&second).await, Ok(AcquireOutcome::Busy(_))));
    let left: i64 = tell(server.addr(), &["PTTL", "lockkeeper:{all}:queue:lock:jobs"]).parse().unwrap();
    assert!(left > 300_000, "the queue ends in {left} ms, and its waiters are never served");
    give_back(&hasty, &held.key).await;
    granted(waiter).await;
}

/// A hand-off lasts for the claim of the waiter's client. It used to last for that of the client that released: with a short one, a
/// waiter whose round trips took longer never confirmed in time, and went to the end of the queue each time.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_lasts_for_the_claim_of_the_waiter() {
    let Some((server, proxy, patient, _other)) = through_a_proxy("poll=5m&claim=10m").await else { return };
    let hasty = open(&format!("{}?poll=50ms&claim=100ms", url(&server))).await;
    let shared = with(request("shared"), |request| request.mode = Mode::Shared);
    for asked in [request("plain"), shared] {
        let text = asked.key.names.to_string();
        let held = take(&hasty, &request(&text)).await;
        let waiter = join_queue(&patient, &asked, 1).await;
        proxy.hold(Direction::Replies);
        give_back(&hasty, &held.key).await;
        let left = common::pttl(server.addr(), &format!("lock:{text}"));
        assert!(left > 60_000, "{text}: the hand-off ends in {left} ms");
        let note = tell(server.addr(), &["KEYS", "lockkeeper:{all}:unconfirmed:*"]);
        assert!(common::pttl(server.addr(), &note) > 60_000, "{text}: the note ends before the hand-off");
        proxy.heal();
        assert!(granted(waiter).await.fence > held.fence);
    }
}

/// Two scripts of the process are in flight at a silent server, so a third request waits in the process. Its release does not, and
/// arrives first: the queue entry that the request makes afterwards used to stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_overtakes_its_request_leaves_no_queue_entry() {
    let Some((server, proxy, store, other)) = through_a_proxy("claim=10m&timeout=5m").await else { return };
    take(&other, &request("jobs")).await;
    server.pause();
    let sent = async |count| eventually("it is sent", || async { proxy.count().requests >= count }).await;
    for asked in [request("a"), request("b")] {
        let (store, before) = (store.clone(), proxy.count().requests);
        tokio::spawn(async move { store.acquire(&asked).await });
        sent(before + 1).await;
    }
    let before = proxy.count().requests;
    let waits = with(request("jobs"), |request| request.wait = Wait::Forever);
    let mut answer = std::pin::pin!(store.acquire(&waits));
    assert!(futures_util::poll!(answer.as_mut()).is_pending());
    let (releasing, key) = (store.clone(), waits.key.clone());
    let release = tokio::spawn(async move { releasing.release(&key).await });
    sent(before + 1).await;
    server.resume();
    release.await.unwrap().unwrap();
    let answer = soon("the request ends", answer).await;
    assert!(answer.is_err(), "{answer:?}");
    eventually("the queue is empty", || async { waiting(&other, "jobs").await == 0 }).await;
}

/// The hand-offs to the waiters of a process ended while it was cut off, and another client has the lock by the time the process is
/// back. A request of the process for another lock keeps its entries alive as a whole, so the process has
/// to find out that these ones are gone: else they starve.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_that_were_let_in_while_they_were_cut_off_wait_again() {
    let Some((server, proxy, patient, _other)) = through_a_proxy("poll=200ms&claim=60s").await else {
        return;
    };
    let hasty = open(&format!("{}?poll=50ms&claim=100ms", url(&server))).await;
    let elsewhere = take(&hasty, &request("elsewhere")).await;
    let waits = join_queue(&patient, &request("elsewhere"), 1).await;
    let held = take(&hasty, &request("jobs")).await;
    let first = join_queue(&patient, &request("jobs"), 1).await;
    let second = join_queue(&patient, &request("jobs"), 2).await;
    proxy.cut_all();
    // After a hand-off that was not confirmed, neither the hold nor the queue entry of the waiter is left.
    let queue = "lockkeeper:{all}:queue:lock:jobs";
    for member in tell(server.addr(), &["ZRANGE", queue, "0", "-1"]).lines() {
        let (attempt, client) = member.split_at(32);
        tell(server.addr(), &["HDEL", &format!("lockkeeper:{{all}}:client:{client}"), attempt]);
        tell(server.addr(), &["ZREM", queue, member]);
    }
    let behind = join_queue(&hasty, &request("jobs"), 1).await;
    give_back(&hasty, &held.key).await;
    let held = granted(behind).await;
    proxy.heal();
    queue_reaches(&hasty, &name("jobs"), 2).await;
    give_back(&hasty, &held.key).await;
    // They lost their positions, so either may be the first now.
    tokio::join!(async { give_back(&patient, &granted(first).await.key).await }, async {
        give_back(&patient, &granted(second).await.key).await
    },);
    give_back(&hasty, &elsewhere.key).await;
    granted(waits).await;
}

/// An outage outlasts the queue entries of a process, and afterwards a new request of the process arrives before its poll: what the
/// server keeps of the process is there, but the older waiters are not in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_entry_expired_waits_again_though_its_process_has_a_newer_one() {
    let Some((server, proxy, patient, other)) = through_a_proxy("poll=100ms&claim=400ms").await else {
        return;
    };
    let held = take(&other, &request("jobs")).await;
    let waiter = join_queue(&patient, &request("jobs"), 1).await;
    let entries = || tell(server.addr(), &["KEYS", "lockkeeper:*:client:*"]);
    let process = entries();
    proxy.cut_all();
    eventually("the entries of the process expire", || async { entries().is_empty() }).await;
    tell(server.addr(), &["HSET", &process, "the attempt of a newer request", "its terms"]);
    proxy.heal();
    // It is the only one in the queue, also after a look that counts entries without a process.
    eventually("it has an entry again", || async { tell(server.addr(), &["HLEN", &process]) == "2" }).await;
    give_back(&other, &held.key).await;
    granted(waiter).await;
}

/// A release that finds a waiter of another kind puts it back: the queue goes on having an end.
#[tokio::test(flavor = "multi_thread")]
async fn every_queue_has_an_end() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("{}?poll=5m&claim=10m", url(&server))).await;
    let (first, second) = (take(&store, &request("a")).await, take(&store, &request("b")).await);
    let both =
        with(lockkeeper_testkit::laws::request_all(&["a", "b"]), |request| request.wait = Wait::Forever);
    let waiter = join_queue(&store, &both, 1).await;
    give_back(&store, &first.key).await;
    for queue in ["a", "b"] {
        let left = tell(server.addr(), &["PTTL", &format!("lockkeeper:{{all}}:queue:lock:{queue}")]);
        assert!(left.parse::<i64>().unwrap() > 0, "the queue of {queue} never ends: {left}");
    }
    give_back(&store, &second.key).await;
    granted(waiter).await;
}

/// One lock is overwritten with something else while a process waits for it. Its other waiters are served all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_type_does_not_fail_the_poll_of_the_others() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("{}?poll=100ms&claim=2s", url(&server))).await;
    let held = with(request("jobs"), |request| request.ttl = Duration::from_secs(3));
    take(&store, &held).await;
    take(&store, &request("odd")).await;
    let odd = join_queue(&store, &request("odd"), 1).await;
    let waiter = join_queue(&store, &request("jobs"), 1).await;
    tell(server.addr(), &["DEL", "lock:odd"]);
    tell(server.addr(), &["RPUSH", "lock:odd", "dear", "data"]);
    // Only a poll finds out that its holder is gone.
    granted(waiter).await;
    let answer = soon("the other is told", odd).await.unwrap();
    says(&answer.expect_err("it is no lock"), Outcome::Invalid, &["WRONGTYPE"]);
}

/// While a slot moves to another node, or after a deletion by hand, the holds of a lock may be missing though its key is
/// there: then it is not known who holds it, no holder hears that it lost the lock, and no other client gets it.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_whose_holds_are_missing_is_neither_free_nor_lost() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("{}?timeout=300ms", url(&server))).await;
    let held = take(&store, &with(request("jobs"), |request| request.mode = Mode::Shared)).await;
    tell(server.addr(), &["DEL", "lockkeeper:{all}:holds:lock:jobs"]);
    let renewed = soon("a renewal ends", store.renew(std::slice::from_ref(&held))).await;
    assert!(matches!(&renewed, Err(Error::Unavailable(_) | Error::Unknown(_))), "{renewed:?}");
    says(&failed(&store, &request("jobs")).await, Outcome::Unavailable, &["TRYAGAIN"]);
    store.break_lock(&name("jobs"), "its holds are gone").await.unwrap();
    is_free(&store, "jobs").await;
}

/// The same lock in one script with others: they are granted and handed over, and no caller hears that nothing has happened
/// while its lock is held.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_whose_holds_are_missing_does_not_fail_the_others() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let store = open(&format!("{}?poll=100ms&claim=2s", url(&server))).await;
    let shared = with(request("jobs"), |request| request.mode = Mode::Shared);
    take(&store, &shared).await;
    let held = with(request("dead"), |request| request.ttl = Duration::from_secs(3));
    take(&store, &held).await;
    let (stuck, waiter) =
        (join_queue(&store, &request("jobs"), 1).await, join_queue(&store, &request("dead"), 1).await);
    tell(server.addr(), &["DEL", "lockkeeper:{all}:holds:lock:jobs"]);
    let tasks: Vec<_> = (0..200)
        .map(|i| {
            let text = if i % 2 == 0 { "jobs".to_owned() } else { format!("free/{i}") };
            let (store, asked) = (store.clone(), request(&text));
            tokio::spawn(async move { (text, store.acquire(&asked).await) })
        })
        .collect();
    for task in tasks {
        let (text, answer) = soon("an answer", task).await.unwrap();
        match text.as_str() {
            "jobs" => says(&answer.expect_err("its holds are missing"), Outcome::Unavailable, &["TRYAGAIN"]),
            _ => assert!(matches!(answer, Ok(AcquireOutcome::Granted(_))), "{text}: {answer:?}"),
        }
    }
    // Only a poll finds out that its holder is gone.
    granted(waiter).await;
    assert!(!stuck.is_finished(), "it is neither free nor lost");
    stuck.abort();
}

/// Releases that share a script: the one whose holds are missing does not make the others return that there was no hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_whose_holds_are_missing_does_not_fail_the_others() {
    let Ok(server) = servers::redis(RedisOptions::default()) else { return };
    let (store, other) = (client_of(&server).await, client_of(&server).await);
    for round in 0..5 {
        let lost = take(&store, &with(request("jobs"), |request| request.mode = Mode::Shared)).await;
        let mut grants = Vec::new();
        for i in 0..63 {
            grants.push(take(&store, &request(&format!("orders/{i}"))).await);
        }
        // Handed over or free, a plain lock or not.
        let waiter = join_queue(&other, &request("orders/0"), 1).await;
        let shared = with(request("shared"), |request| request.mode = Mode::Shared);
        grants.push(take(&store, &shared).await);
        tell(server.addr(), &["DEL", "lockkeeper:{all}:holds:lock:jobs"]);
        let tasks: Vec<_> = [&[lost], &grants[..]]
            .concat()
            .into_iter()
            .map(|grant| {
                let store = store.clone();
                tokio::spawn(async move { (grant.key.names.to_string(), store.release(&grant.key).await) })
            })
            .collect();
        for task in tasks {
            let (text, answer) = soon("a release ends", task).await.unwrap();
            let released = matches!(answer, Ok(ReleaseOutcome::Released));
            assert!(released || text == "jobs", "round {round}: {text}: {answer:?}");
        }
        give_back(&other, &granted(waiter).await.key).await;
        other.break_lock(&name("jobs"), "its holds are gone").await.unwrap();
    }
}
