//! Callers that abandon a request, and connections that the client closes: it notices a silent server, and leaves no server process behind.

mod common;

use std::time::{Duration, Instant};

use common::{migrate, number, open, sql, url};
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{eventually, name, request, soon, take};
use lockkeeper_testkit::proxy::{Direction, Fault, Framing, Proxy};
use lockkeeper_testkit::servers::{self, PostgresOptions};

/// A caller that gave up used to count as one that was answered: while callers kept coming and going, a silent server was not noticed,
/// and every guard of the process was lost though a new connection would have worked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_is_noticed_while_callers_come_and_go() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    migrate(&server).await;
    let store = open(&format!("{}?timeout=500ms", url(proxy.addr()))).await;
    let held = take(&store, &request("held")).await;
    proxy.hold(Direction::Replies);
    let impatient = store.clone();
    let impatient = tokio::spawn(async move {
        loop {
            _ = tokio::time::timeout(Duration::from_millis(50), impatient.inspect(&name("held"))).await;
        }
    });
    let begun = Instant::now();
    let renewed =
        tokio::time::timeout(Duration::from_secs(20), store.renew(std::slice::from_ref(&held))).await;
    let failed = renewed.expect("the silence is noticed").expect_err("no reply came");
    // Twice the timeout at most, and as long for a new connection; the rest is for a machine that is busy with other things.
    assert!(begun.elapsed() < Duration::from_secs(6), "after {:?}: {failed}", begun.elapsed());
    proxy.heal();
    impatient.abort();
    eventually("the store works again", || async { store.inspect(&name("held")).await.is_ok() }).await;
}

/// As long as the server replies, callers that abandon a request do not cost others the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_outlives_the_callers_that_gave_up() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    migrate(&server).await;
    let store = open(&format!("{}?timeout=500ms", url(proxy.addr()))).await;
    let before = proxy.count().connections;
    for _ in 0..300 {
        _ = tokio::time::timeout(Duration::from_micros(200), store.inspect(&name("x"))).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    store.inspect(&name("x")).await.unwrap();
    assert_eq!(proxy.count().connections, before);
}

/// PostgreSQL does not notice that a client is gone while a statement waits for a lock: every closed connection left a
/// server process behind, until there were as many as the server allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_connection_leaves_no_server_process_behind() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    migrate(&server).await;
    let store = open(&format!("{}?timeout=200ms", url(proxy.addr()))).await;
    let other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    other.batch_execute("BEGIN; LOCK TABLE lockkeeper.lock IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    let before = proxy.count().connections;
    eventually("many connections are closed", || async {
        store.inspect(&name("x")).await.expect_err("the table is locked");
        proxy.count().connections >= before + 6
    })
    .await;
    eventually("their server processes have ended", || async { number(&server, blocked) <= 2 }).await;
    other.batch_execute("COMMIT").await.unwrap();
    eventually("the store works again", || async { store.inspect(&name("x")).await.is_ok() }).await;
}

/// A statement that cannot be cancelled, because the network is down, ends by its statement_timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_cannot_be_cancelled_ends_by_itself() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let proxy = Proxy::start(server.addr(), Framing::Postgres);
    migrate(&server).await;
    let store = open(&format!("{}?timeout=300ms", url(proxy.addr()))).await;
    let other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    other.batch_execute("BEGIN; LOCK TABLE lockkeeper.lock IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let asking = tokio::spawn(async move { store.inspect(&name("x")).await });
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    eventually("it waits in the server", || async { number(&server, blocked) == 1 }).await;
    proxy.hold(Direction::Requests);
    eventually("it has ended", || async { number(&server, blocked) == 0 }).await;
    soon("the request fails", asking).await.unwrap().expect_err("no reply came");
    other.batch_execute("COMMIT").await.unwrap();
}

/// The client cancels the statement of a direct connection that it gives up. `statement_timeout` would hide a client that does not: so this statement
/// goes on after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_of_a_direct_connection_is_cancelled() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    migrate(&server).await;
    sql(
        &server,
        "CREATE FUNCTION lockkeeper.stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN LOOP \
           BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN NEW; \
           EXCEPTION WHEN query_canceled THEN IF SQLERRM NOT LIKE '%statement timeout%' THEN RAISE; END IF; END; \
         END LOOP; END $$; \
         CREATE TRIGGER stall BEFORE INSERT ON lockkeeper.lock FOR EACH ROW EXECUTE FUNCTION lockkeeper.stall(); \
         SELECT setval('lockkeeper.fence', lockkeeper.now_us() + 600000000)",
    );
    let blocker = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    blocker.batch_execute("SELECT pg_advisory_lock(77)").await.unwrap();
    let store = open(&format!("{}?timeout=300ms", url(server.addr()))).await;
    let asking = tokio::spawn(async move { store.acquire(&request("x")).await });
    let stalled = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted";
    eventually("it waits in the server", || async { number(&server, stalled) == 1 }).await;
    soon("its caller has an answer", asking).await.unwrap().expect_err("no reply came");
    eventually("it is cancelled", || async { number(&server, stalled) == 0 }).await;
}

/// Behind a pooler one statement at a time is in flight. A caller that gave up let the next statement go out behind its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_nothing_is_sent_behind_an_abandoned_statement() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    let proxy = Proxy::start(pooler.addr(), Framing::Postgres);
    let store = open(&format!("{}?timeout=20s", url(proxy.addr()))).await;
    sql(&server, "SELECT 1");
    let held = proxy.inject(Fault::at_reply(1).hold());
    let first = store.clone();
    let first = tokio::spawn(async move { first.inspect(&name("x")).await });
    soon("its reply is held up", held.until_fired()).await;
    let second = store.clone();
    let mut second = tokio::spawn(async move { second.inspect(&name("x")).await });
    assert!(
        tokio::time::timeout(Duration::from_millis(100), &mut second).await.is_err(),
        "it waits for its turn"
    );
    first.abort();
    soon("the next has another connection", second).await.unwrap().unwrap();
    assert!(held.fired());
}

/// A pooler knows the statement to cancel only while its client is connected. A client that closed a silent connection first left the
/// server process of each request behind, until there were as many as the server allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_pooler_a_closed_connection_leaves_no_server_process_behind() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    let proxy = Proxy::start(pooler.addr(), Framing::Postgres);
    migrate(&server).await;
    let store = open(&format!("{}?timeout=200ms", url(proxy.addr()))).await;
    let other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    other.batch_execute("BEGIN; LOCK TABLE lockkeeper.lock IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    let before = proxy.count().connections;
    eventually("many connections are closed", || async {
        store.inspect(&name("x")).await.expect_err("the table is locked");
        proxy.count().connections >= before + 12
    })
    .await;
    // A cancellation of the last request may be on its way.
    eventually("their server processes have ended", || async { number(&server, blocked) <= 1 }).await;
    other.batch_execute("COMMIT").await.unwrap();
    eventually("the store works again", || async { store.inspect(&name("x")).await.is_ok() }).await;
}
