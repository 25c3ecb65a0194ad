//! Servers that are killed, set to another time, or taken over by a standby.

mod common;

use std::time::Duration;

use common::{
    Client, ask_for, client_of, keeper, on_a_clock, set_standbys, sql, sql_in, try_open, url,
    wait_for_missing_standby,
};
use futures_util::future::{join, join_all};
use lockkeeper_core::{AcquireOutcome, Error, Grant, Guarantee, RenewOutcome, Wait};
use lockkeeper_testkit::laws::{
    eventually, give_back, granted, is_free, join_queue, name, refused, request, soon, take, with,
};
use lockkeeper_testkit::servers::{self, ClockShim, PostgresOptions};

const TTL: Duration = Duration::from_secs(60);

async fn renewed(store: &Client, grant: &Grant) -> RenewOutcome {
    soon("a renewal is answered", async {
        loop {
            match store.renew(std::slice::from_ref(grant)).await {
                Ok(mut answers) => break answers.remove(0),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_outlives_the_server_being_killed() {
    let Ok(mut server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    assert_eq!((a.profile().fence, a.profile().durable), (Guarantee::Kept, Guarantee::Kept));
    let mut last = None;
    for _ in 0..3 {
        let held = take(&a, &ask_for("x", TTL)).await;
        assert!(Some(held.fence) > last, "{} after {last:?}", held.fence);
        let waiter = join_queue(&b, &request("x"), 1).await;
        tokio::task::block_in_place(|| {
            server.kill9();
            server.restart();
        });
        assert_eq!(renewed(&a, &held).await, RenewOutcome::Renewed, "a confirmed grant is forgotten");
        assert!(!waiter.is_finished(), "two hold it");
        give_back(&a, &held.key).await;
        let next = granted(waiter).await;
        assert!(next.fence > held.fence);
        give_back(&b, &next.key).await;
        last = Some(next.fence);
    }
    is_free(&a, "x").await;
}

/// A grant is on the disk before it is confirmed. A release need not be: if it is forgotten, the lock is free when its ttl is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_forgets_a_release_at_worst_and_never_a_grant() {
    let Ok(mut server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let mut crash = || {
        tokio::task::block_in_place(|| {
            server.kill9();
            server.restart();
        })
    };
    let mut forgotten = 0;
    for _ in 0..3 {
        // No other commit flushes it to the disk.
        let held = take(&a, &ask_for("x", TTL)).await;
        crash();
        assert_eq!(renewed(&a, &held).await, RenewOutcome::Renewed, "a confirmed grant is forgotten");
        give_back(&a, &held.key).await;

        let short = ask_for("y", Duration::from_secs(2));
        let held = take(&a, &short).await;
        give_back(&a, &held.key).await;
        crash();
        let found = soon("an inspect is answered", async {
            loop {
                match b.inspect(&name("y")).await {
                    Ok(found) => break found,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        });
        forgotten += u32::from(found.await.is_some());
        let next = with(request("y"), |request| request.wait = Wait::Forever);
        let next = take(&b, &next).await;
        assert!(next.fence > held.fence);
        assert_eq!(renewed(&a, &held).await, RenewOutcome::Lost);
        give_back(&b, &next.key).await;
    }
    println!("{forgotten} of 3 releases were forgotten");
}

/// The setting of a release applied to all that was committed with it: grants in the same statement were confirmed before they
/// were on the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_in_a_batch_with_releases_is_on_the_disk_too() {
    let Ok(mut server) = servers::postgres(PostgresOptions::default()) else { return };
    // No background writer flushes what does not flush itself.
    sql(&server, "ALTER SYSTEM SET wal_writer_delay = '10s'");
    sql(&server, "SELECT pg_reload_conf()");
    let store = client_of(&server).await;
    for round in 0..3 {
        let held = (0..20).map(async |i| take(&store, &ask_for(&format!("{round}/old/{i}"), TTL)).await);
        let held = join_all(held).await;
        // All of them are submitted before the first reply.
        let turns = held.iter().enumerate().map(async |(i, old)| {
            let next = ask_for(&format!("{round}/new/{i}"), TTL);
            join(give_back(&store, &old.key), take(&store, &next)).await.1
        });
        let told = join_all(turns).await;
        tokio::task::block_in_place(|| {
            server.kill9();
            server.restart();
        });
        for grant in &told {
            assert_eq!(renewed(&store, grant).await, RenewOutcome::Renewed, "a confirmed grant is forgotten");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_and_a_waiter_live_through_a_restart() {
    let Ok(mut server) = servers::postgres(PostgresOptions::default()) else { return };
    let (a, b) = (client_of(&server).await, client_of(&server).await);
    let (a, b) = (keeper(&a), keeper(&b));
    let guard = a.lock("x").ttl(TTL).acquire().await.unwrap();
    let waiter = tokio::spawn(async move { b.lock("x").ttl(TTL).acquire().await });
    eventually("it waits", || async { a.inspect("x").await.unwrap().is_some_and(|view| view.waiting == 1) })
        .await;
    tokio::task::block_in_place(|| server.restart());
    assert!(guard.is_held());
    // This may be the first request to notice that the connection has ended: then it is sent again in the background.
    match guard.release().await {
        Ok(_) | Err(Error::Unknown(_) | Error::Unavailable(_)) => {}
        Err(error) => panic!("{error}"),
    }
    let next = soon("the waiter is granted the lock", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
}

/// An asynchronous standby may have missed the last grants: two clients hold the lock. The profile declares it, and the
/// fence tells them apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_missed_the_last_grant_grants_it_again() {
    let Ok(mut primary) = servers::postgres(PostgresOptions::default()) else { return };
    let a = client_of(&primary).await;
    let early = take(&a, &ask_for("early", TTL)).await;
    let Ok(mut standby) = servers::postgres_standby(&primary, PostgresOptions::default()) else { return };
    let says = try_open(&url(standby.addr())).await.map(|_| ()).unwrap_err();
    assert!(matches!(&says, Error::Unavailable(text) if text.contains("standby")), "{says:?}");
    // A client that opens the store now is warned.
    let profile = client_of(&primary).await.profile();
    assert_eq!((profile.fence, profile.durable), (Guarantee::Likely, Guarantee::Likely));
    assert!(profile.findings[0].text.contains("standby"), "{:?}", profile.findings);
    // The settings are checked when the store is opened: a client from before is not.
    assert_eq!((a.profile().fence, a.profile().durable), (Guarantee::Kept, Guarantee::Kept));
    // The standby is down for a moment, in which the primary goes on, and dies.
    tokio::task::block_in_place(|| standby.stop());
    let late = take(&a, &ask_for("late", TTL)).await;
    tokio::task::block_in_place(|| {
        primary.kill9();
        standby.restart();
    });
    sql(&standby, "SELECT pg_promote()");
    let b = client_of(&standby).await;
    refused(&b, &request("early")).await;
    assert_eq!(renewed(&b, &early).await, RenewOutcome::Renewed);
    let again = take(&b, &ask_for("late", TTL)).await;
    assert!(again.fence > late.fence, "two hold it, and the resource cannot tell the older from the newer");
}

/// With a synchronous standby a grant counts once the standby has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_synchronous_standby_misses_nothing() {
    let Ok(mut primary) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(standby) = servers::postgres_standby(&primary, PostgresOptions::default()) else { return };
    wait_for_missing_standby(&primary);
    set_standbys(&primary, "*");
    eventually("the standby is synchronous", || async {
        sql(&primary, "SELECT sync_state FROM pg_stat_replication") == "sync"
    })
    .await;
    let a = client_of(&primary).await;
    assert_eq!((a.profile().fence, a.profile().durable), (Guarantee::Kept, Guarantee::Kept));
    let held = take(&a, &ask_for("x", TTL)).await;
    primary.kill9();
    sql(&standby, "SELECT pg_promote()");
    let b = client_of(&standby).await;
    refused(&b, &request("x")).await;
    assert_eq!(renewed(&b, &held).await, RenewOutcome::Renewed);
}

/// A synchronous standby has every grant, and a clock of its own. If that is ahead, it ends leases early; the fence tells the two holders apart, also
/// once the clock is right again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_synchronous_standby_whose_clock_is_ahead_ends_leases_early_and_the_fence_tells() {
    let (Ok(mut primary), Ok(clock)) = (servers::postgres(PostgresOptions::default()), ClockShim::build())
    else {
        return;
    };
    clock.jump(3600 * ClockShim::SECOND);
    let options = PostgresOptions { clock: Some(clock.clone()), ..PostgresOptions::default() };
    let Ok(standby) = servers::postgres_standby(&primary, options) else { return };
    wait_for_missing_standby(&primary);
    set_standbys(&primary, "*");
    eventually("the standby is synchronous", || async {
        sql(&primary, "SELECT sync_state FROM pg_stat_replication") == "sync"
    })
    .await;
    let a = client_of(&primary).await;
    assert_eq!(a.profile().exclusion, Guarantee::Likely, "the standby's clock is another machine's");
    let held = take(&a, &ask_for("x", TTL)).await;
    primary.kill9();
    sql(&standby, "SELECT pg_promote()");
    let b = client_of(&standby).await;
    let next = take(&b, &ask_for("x", TTL)).await;
    assert!(next.fence > held.fence, "the resource cannot tell the older from the newer");
    assert_eq!(renewed(&b, &held).await, RenewOutcome::Lost);
    give_back(&b, &next.key).await;
    clock.jump(-3600 * ClockShim::SECOND);
    let last = take(&b, &ask_for("x", TTL)).await;
    assert!(last.fence > next.fence, "the fence went back with the clock");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_back_keeps_no_lock_for_longer_than_a_ttl() {
    let Some((server, clock, store)) = on_a_clock().await else { return };
    let ttl = Duration::from_secs(2);
    let held = take(&store, &ask_for("x", ttl)).await;
    let shared = with(ask_for("s", ttl), |request| request.mode = lockkeeper_core::Mode::Shared);
    take(&store, &shared).await;
    clock.jump(-3600 * ClockShim::SECOND);
    for lock in ["x", "s"] {
        let patient = with(request(lock), |request| request.wait = Wait::For(Duration::from_secs(20)));
        match soon("the lock comes free", store.acquire(&patient)).await {
            Ok(AcquireOutcome::Granted(next)) => {
                assert!(next.fence > held.fence, "the fence went back with the clock")
            }
            other => panic!("an hour is not a ttl: {other:?}"),
        }
    }
    drop(server);
}

/// A process that died in the queue was considered alive until the clock had caught up: an hour, or a year.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_back_keeps_no_dead_process_in_the_queue() {
    let Some((server, clock, store)) = on_a_clock().await else { return };
    let held = take(&store, &ask_for("x", TTL)).await;
    let dead = client_of(&server).await;
    let first = join_queue(&dead, &request("x"), 1).await;
    let second = join_queue(&store, &request("x"), 2).await;
    first.abort();
    assert!(first.await.is_err_and(|end| end.is_cancelled()), "it was not granted the lock");
    drop(dead);
    clock.jump(-3600 * ClockShim::SECOND);
    let limited = async || {
        eventually("no process is considered alive for longer than ten minutes", || async {
            sql(&server, "SELECT max(alive_until) <= lockkeeper.now_us() + 600000000 FROM lockkeeper.client")
                == "t"
        })
        .await;
    };
    limited().await;
    // A heartbeat of the dead process that read the clock before it was set back, and is written after that.
    sql(
        &server,
        "UPDATE lockkeeper.client SET alive_until = lockkeeper.now_us() + 3600000000
         WHERE id NOT IN (SELECT client FROM lockkeeper.waiter WHERE position = (SELECT max(position) FROM lockkeeper.waiter))",
    );
    limited().await;
    give_back(&store, &held.key).await;
    clock.jump(600 * ClockShim::SECOND);
    give_back(&store, &granted(second).await.key).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_set_forward_ends_leases_early_and_the_fence_tells() {
    let Some((_server, clock, store)) = on_a_clock().await else { return };
    let held = take(&store, &ask_for("x", TTL)).await;
    clock.jump(3600 * ClockShim::SECOND);
    let next = take(&store, &request("x")).await;
    assert!(next.fence > held.fence);
    assert_eq!(renewed(&store, &held).await, RenewOutcome::Lost);
    clock.jump(-3600 * ClockShim::SECOND);
    give_back(&store, &next.key).await;
    let last = take(&store, &request("x")).await;
    assert!(last.fence > next.fence);
}

/// An archiver takes the log and is no standby: nothing takes over from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archiver_is_no_standby() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let (port, dir) = (server.addr().port().to_string(), server.place().join("archive"));
    std::fs::create_dir(&dir).unwrap();
    let mut archiver = std::process::Command::new("pg_receivewal");
    archiver.args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-s", "1", "-D"]).arg(&dir);
    let mut archiver = archiver.stderr(std::process::Stdio::null()).spawn().unwrap();
    eventually("it takes the log", || async {
        sql(&server, "SELECT count(reply_time) FROM pg_stat_replication") == "1"
    })
    .await;
    let profile = client_of(&server).await.profile();
    archiver.kill().unwrap();
    archiver.wait().unwrap();
    assert_eq!(profile.fence, Guarantee::Kept, "{:?}", profile.findings);
}

/// A subscriber of logical replication applies changes, and is no standby either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_logical_subscriber_is_no_standby() {
    let settings = vec![("wal_level".into(), "logical".into())];
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    sql(&server, "CREATE TABLE work(id int PRIMARY KEY); CREATE PUBLICATION changes FOR TABLE work");
    sql(&server, "CREATE DATABASE copy");
    sql_in(&server, "copy", "CREATE TABLE work(id int PRIMARY KEY)");
    sql(&server, "SELECT pg_create_logical_replication_slot('changes', 'pgoutput')");
    let subscribe = format!(
        "CREATE SUBSCRIPTION changes CONNECTION 'host=127.0.0.1 port={} dbname=postgres user=postgres' PUBLICATION changes \
         WITH (create_slot = false, slot_name = 'changes')",
        server.addr().port()
    );
    sql_in(&server, "copy", &subscribe);
    eventually("it applies the changes", || async {
        sql(&server, "SELECT count(replay_lsn) FROM pg_stat_replication WHERE reply_time IS NOT NULL") == "1"
    })
    .await;
    let profile = client_of(&server).await.profile();
    assert_eq!(profile.fence, Guarantee::Kept, "{:?}", profile.findings);
}
