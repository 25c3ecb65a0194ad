//! The settings of a server, and the profile that follows from them.

use lockkeeper_core::{
    AcquireOutcome, Error, Guarantee, Mode, Outcome, Purpose, ReleaseOutcome, RenewOutcome,
};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, AppendOnly, RedisOptions, Server};

use crate::common::{Client, client_of, failed, keeper, not_for_correctness, open, renew, says, tell, url};

fn server_with(append_only: AppendOnly, extra: &[(&str, &str)]) -> Option<Server> {
    let extra = extra.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    servers::redis(RedisOptions { append_only, extra, ..RedisOptions::default() }).ok()
}

/// A cache throws away what was not used for long: locks too, in the middle of being held. However durable it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_evicts_keys_is_not_for_correctness_and_the_error_names_the_policy() {
    for policy in ["allkeys-lru", "volatile-ttl"] {
        let cache = [("maxmemory", "100mb"), ("maxmemory-policy", policy)];
        let Some(server) = server_with(AppendOnly::Always, &cache) else { return };
        let store = client_of(&server).await;
        let profile = store.profile();
        assert_eq!(profile.durable, Guarantee::No);
        assert!(profile.findings[0].text.contains(policy), "the gravest comes first: {:?}", profile.findings);
        not_for_correctness(&store, &[policy, "noeviction"]);
        let refusal = keeper(&store).lock("jobs").for_correctness().acquire().await.unwrap_err();
        says(&refusal, Outcome::Unsupported, &[policy]);
        // Twice would be a waste, no more: then it will do.
        take(&store, &request("jobs")).await;
    }
}

/// The policy of a server without a limit is never used.
#[tokio::test(flavor = "multi_thread")]
async fn one_server_that_syncs_and_keeps_everything_is_for_correctness() {
    let unlimited = [("maxmemory-policy", "allkeys-lru")];
    let limited = [("maxmemory", "100mb"), ("maxmemory-policy", "noeviction")];
    for settings in [&unlimited[..], &limited[..]] {
        let Some(server) = server_with(AppendOnly::Always, settings) else { return };
        let store = client_of(&server).await;
        let profile = store.profile();
        assert_eq!((profile.fence, profile.durable), (Guarantee::Kept, Guarantee::Kept));
        profile.allows(Purpose::Correctness).unwrap();
        let guard = keeper(&store).lock("jobs").for_correctness().acquire().await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_may_forget_after_a_crash_is_not_for_correctness() {
    for (append_only, words) in
        [(AppendOnly::Off, "no append-only file"), (AppendOnly::EverySecond, "appendfsync everysec")]
    {
        let Some(server) = server_with(append_only, &[]) else { return };
        not_for_correctness(&client_of(&server).await, &[words]);
    }
}

/// Each setting used to be reported only when the one before was changed.
#[tokio::test(flavor = "multi_thread")]
async fn all_settings_to_change_are_reported_at_once() {
    let bad =
        [("no-appendfsync-on-rewrite", "yes"), ("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")];
    let Some(server) = server_with(AppendOnly::Off, &bad) else { return };
    let all = [
        "appendonly from no to yes",
        "appendfsync from everysec to always",
        "no-appendfsync-on-rewrite from yes to no",
        "maxmemory-policy from allkeys-lru to noeviction",
    ];
    not_for_correctness(&client_of(&server).await, &all);
}

/// The server suspends `appendfsync always` while it saves or rewrites, if this setting is on.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_sync_while_it_rewrites_is_not_for_correctness() {
    let Some(server) = server_with(AppendOnly::Always, &[("no-appendfsync-on-rewrite", "yes")]) else {
        return;
    };
    not_for_correctness(&client_of(&server).await, &["no-appendfsync-on-rewrite"]);
}

/// The settings of a server are those of now, not those of the moment at which the store was opened.
#[tokio::test(flavor = "multi_thread")]
async fn settings_that_change_while_the_store_is_open_change_its_profile() {
    let Some(server) = server_with(AppendOnly::Always, &[]) else { return };
    let store = open(&format!("{}?poll=50ms", url(&server))).await;
    // One keeper for the whole of the test: a service opens its store once.
    let keeper = keeper(&store);
    let kept = || keeper.profile().allows(Purpose::Correctness).is_ok();
    assert!(kept());
    for (setting, bad, good) in
        [("appendfsync", "everysec", "always"), ("no-appendfsync-on-rewrite", "yes", "no")]
    {
        tell(server.addr(), &["CONFIG", "SET", setting, bad]);
        eventually("the change is noticed", || async { !kept() }).await;
        let refusal = keeper.lock("jobs").for_correctness().acquire().await.unwrap_err();
        says(&refusal, Outcome::Unsupported, &[setting]);
        tell(server.addr(), &["CONFIG", "SET", setting, good]);
        eventually("it is as good as before", || async { kept() }).await;
        keeper.lock("jobs").for_correctness().acquire().await.unwrap().release().await.unwrap();
    }
    // A replica comes: from now on there may be a fail-over.
    let options = RedisOptions { replica_of: Some(server.addr()), ..RedisOptions::default() };
    let Ok(replica) = servers::redis(options) else { return };
    eventually("the replica is noticed", || async { !kept() }).await;
    not_for_correctness(&store, &["fail-over"]);
    let refusal = keeper.lock("jobs").for_correctness().acquire().await.unwrap_err();
    says(&refusal, Outcome::Unsupported, &["fail-over"]);
    // Its link is cut: it may be promoted at any time, and has no grant from now on.
    drop(replica);
    let replication = || tell(server.addr(), &["INFO", "replication"]);
    eventually("the server notices", || async { replication().contains("connected_slaves:0") }).await;
    let looks = || looks_at(&server);
    let before = looks();
    eventually("the store looks again, twice", || async { looks() >= before + 2 }).await;
    not_for_correctness(&store, &["fail-over"]);
    not_for_correctness(&client_of(&server).await, &["fail-over"]);
    // The server forgets in the end that it had a replica; a store that is open does not.
    tell(server.addr(), &["CONFIG", "SET", "repl-backlog-ttl", "1"]);
    eventually("the server forgets", || async { replication().contains("repl_backlog_active:0") }).await;
    let before = looks();
    eventually("the store looks again, twice", || async { looks() >= before + 2 }).await;
    not_for_correctness(&store, &["fail-over"]);
    client_of(&server).await.profile().allows(Purpose::Correctness).unwrap();
}

/// How often clients have looked at the settings of a server.
fn looks_at(server: &Server) -> u64 {
    let stats = tell(server.addr(), &["INFO", "commandstats"]);
    let looks = stats.lines().find_map(|line| line.strip_prefix("cmdstat_config|get:calls="));
    looks.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// Every new connection reads the settings of the server before any request is sent on it: no poll is due here.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_connection_looks_at_the_settings_first() {
    let Some(mut server) = server_with(AppendOnly::Always, &[]) else { return };
    let store = open(&format!("{}?poll=5m&claim=10m", url(&server))).await;
    store.profile().allows(Purpose::Correctness).unwrap();
    tell(server.addr(), &["CONFIG", "SET", "no-appendfsync-on-rewrite", "yes"]);
    drop(servers::redis_call(server.addr(), &["CLIENT", "KILL", "TYPE", "normal"]));
    eventually("the store works again", || async { store.inspect(&name("jobs")).await.is_ok() }).await;
    not_for_correctness(&store, &["no-appendfsync-on-rewrite"]);
    server.restart();
    eventually("the store works again", || async { store.inspect(&name("jobs")).await.is_ok() }).await;
    store.profile().allows(Purpose::Correctness).unwrap();
}

/// Fills the server to the brim.
fn fill(server: &Server) {
    let addr = server.addr();
    let used = tell(addr, &["INFO", "memory"]);
    let used = used.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("it says so");
    // Below what it uses already: it cannot come back under the limit by itself.
    let less = used.parse::<u64>().expect("a number") / 2;
    tell(addr, &["CONFIG", "SET", "maxmemory", &less.to_string()]);
    let refused = servers::redis_call(addr, &["SET", "more", "more"]).expect_err("it is full");
    assert!(refused.to_string().starts_with("OOM"), "{refused}");
}

async fn shared(store: &Client, name: &str) -> lockkeeper_core::Grant {
    take(store, &with(request(name), |request| request.mode = Mode::Shared)).await
}

/// A full server grants no new lock. Locks that are held are renewed, released and handed off: the client that has a lock must not lose it
/// because others have filled the memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_takes_no_new_locks_and_goes_on_with_those_that_are_held() {
    let Some(server) = server_with(AppendOnly::Off, &[("maxmemory-policy", "noeviction")]) else { return };
    let (one, two) = (client_of(&server).await, client_of(&server).await);
    let held = take(&one, &request("held")).await;
    let (reader, other) = (shared(&one, "read").await, shared(&two, "read").await);
    let lingering =
        take(&one, &with(request("brief"), |request| request.min_hold = std::time::Duration::from_secs(600)))
            .await;
    let waiter = join_queue(&two, &request("held"), 1).await;
    fill(&server);

    let asked = request("new");
    says(&failed(&two, &asked).await, Outcome::Limited, &["out of memory", "maxmemory"]);
    assert_eq!(give_back(&two, &asked.key).await, ReleaseOutcome::AlreadyGone);
    assert_eq!(renew(&one, &held).await, RenewOutcome::Renewed);
    assert_eq!(renew(&one, &reader).await, RenewOutcome::Renewed);
    assert_eq!(give_back(&one, &reader.key).await, ReleaseOutcome::Released, "one of two readers");
    assert_eq!(renew(&two, &other).await, RenewOutcome::Renewed);
    assert_eq!(give_back(&one, &lingering.key).await, ReleaseOutcome::Released, "one that lingers");
    refused(&two, &request("brief")).await;
    assert_eq!(give_back(&one, &held.key).await, ReleaseOutcome::Released);
    let next = granted(waiter).await;
    assert!(next.fence > held.fence);
    one.break_lock(&lockkeeper_testkit::laws::name("read"), "it is in the way").await.unwrap();
    assert_eq!(renew(&two, &other).await, RenewOutcome::Lost);

    tell(server.addr(), &["CONFIG", "SET", "maxmemory", "0"]);
    take(&two, &asked).await;
}

/// With replicas to wait for, a waiter confirms its hand-off by a lock request. A full server used to refuse that request, and the waiter lost
/// the lock that it had been granted.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_lets_a_waiter_confirm_its_hand_off() {
    let extra = vec![("maxmemory-policy".to_owned(), "noeviction".to_owned())];
    let Ok(pair) = servers::redis_pair(RedisOptions { extra, ..RedisOptions::default() }) else { return };
    let store = open(&format!("{}?wait_replicas=1", url(pair.primary()))).await;
    let held = take(&store, &request("held")).await;
    let waiter = join_queue(&store, &request("held"), 1).await;
    fill(pair.primary());
    assert_eq!(give_back(&store, &held.key).await, ReleaseOutcome::Released);
    assert!(granted(waiter).await.fence > held.fence);
}

/// A server may run out of memory in the middle of a wait, too: the waiter gets an error or the lock, and is never
/// left hanging with a lock that no client knows of.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_would_wait_fails_on_a_full_server() {
    let Some(server) = server_with(AppendOnly::Off, &[("maxmemory-policy", "noeviction")]) else { return };
    let store = client_of(&server).await;
    take(&store, &request("held")).await;
    fill(&server);
    let waiting = with(request("held"), |request| request.wait = lockkeeper_core::Wait::Forever);
    match soon("the request ends", store.acquire(&waiting)).await {
        Err(Error::Limited(_)) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(store.inspect(waiting.key.names.first()).await.unwrap().unwrap().waiting, 0);
}

/// Redis 7 rejects writes while fewer replicas are connected than `min-replicas-to-write` says.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_misses_its_replicas_says_so_and_recovers() {
    let Some(server) = server_with(AppendOnly::Off, &[]) else { return };
    let store = open(&url(&server)).await;
    tell(server.addr(), &["CONFIG", "SET", "min-replicas-to-write", "1"]);
    says(&failed(&store, &request("jobs")).await, Outcome::Unavailable, &["NOREPLICAS"]);
    tell(server.addr(), &["CONFIG", "SET", "min-replicas-to-write", "0"]);
    let asked = request("jobs");
    eventually("the store works again", || async {
        matches!(store.acquire(&asked).await, Ok(AcquireOutcome::Granted(_)))
    })
    .await;
}
