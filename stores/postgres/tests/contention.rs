//! Many waiters, and many short holds. The tests count the work of the server, not the time.

mod common;

use std::process::{Child, Command};
use std::time::Duration;

use common::{Client, number, open, sql, url};
use futures_util::future::join_all;
use lockkeeper_core::{AcquireOutcome, Mode, RenewOutcome, Wait};
use lockkeeper_postgres::{Options, connect_to};
use lockkeeper_testkit::laws::{
    SHORT, eventually, give_back, is_free, join_queue, name, request, take, with,
};
use lockkeeper_testkit::scenarios::crowd;
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// One of several processes: it waits many times over, and releases each grant at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the test below"]
async fn member() {
    let (url, count) = (std::env::var("CROWD_URL").unwrap(), std::env::var("CROWD_COUNT").unwrap());
    let store = open(&url).await;
    crowd::all_granted(crowd::join(&store, count.parse().unwrap())).await;
}

fn start(url: &str, count: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "member", "--nocapture"]);
    command.env("CROWD_URL", url).env("CROWD_COUNT", count.to_string()).spawn().unwrap()
}

async fn wait_until_queued(store: &Client, count: usize) {
    eventually("all are in the queue", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == count)
    })
    .await;
}

/// A release hands the lock to one waiter and wakes it: with the enqueue, two calls for each waiter, however many wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_are_woken_one_by_one() {
    let settings = vec![("track_functions".into(), "pl".into())];
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    // Polls are rare enough not to hide the calls that are counted here.
    let url = format!("{}?poll=10s&claim=60s&timeout=20s", url(server.addr()));
    let store = open(&url).await;
    let held = take(&store, &request("popular")).await;
    let crowd: Vec<Child> = (0..2).map(|_| start(&url, 500)).collect();
    wait_until_queued(&store, 1000).await;
    give_back(&store, &held.key).await;
    for mut one in crowd {
        assert!(tokio::task::spawn_blocking(move || one.wait()).await.unwrap().unwrap().success());
    }
    is_free(&store, "popular").await;
    // A server process reports its counts when it ends, at the latest.
    drop(store);
    // A waiter enqueues (acquire), the release before it hands the lock over (hand_off), and the waiter reads its grant (acquire_woken). A waiter
    // that is woken in vain calls more of them.
    let calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname IN ('acquire', 'hand_off', 'acquire_woken', 'release')";
    eventually("all calls are counted", || async { number(&server, calls) >= 3000 }).await;
    let steps = number(&server, calls);
    println!("{steps} steps for 1000 who waited");
    // On a slow machine some waiters poll twice. A release that wakes all waiters would make it half a million.
    assert!(steps < 5000, "waiters are woken in vain");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_claim_and_no_more() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=100ms&claim=3s&timeout=20s", url(server.addr()));
    let store = open(&url).await;
    let held = take(&store, &request("popular")).await;
    let mut dead = start(&url, 3);
    wait_until_queued(&store, 3).await;
    let (store2, patient) = (store.clone(), with(request("popular"), |request| request.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { store2.acquire(&patient).await });
    wait_until_queued(&store, 4).await;
    dead.kill().unwrap();
    dead.wait().unwrap();
    give_back(&store, &held.key).await;
    let served = tokio::time::timeout(Duration::from_secs(20), waiter)
        .await
        .expect("the waiter is granted the lock")
        .unwrap();
    assert!(matches!(served, Ok(AcquireOutcome::Granted(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_guards_are_renewed_in_one_statement() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(&format!("{}?timeout=20s", url(server.addr()))).await;
    let requests: Vec<_> = (0..10_000).map(|i| request(&format!("guard/{i}"))).collect();
    let mut grants = Vec::new();
    for batch in requests.chunks(500) {
        grants.extend(join_all(batch.iter().map(|request| take(&store, request))).await);
    }
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == RenewOutcome::Renewed));
    // One statement is one transaction: all rows have the same writer.
    let writers = number(&server, "SELECT count(DISTINCT xmin::text) FROM lockkeeper.lock");
    assert_eq!(writers, 1);
}

/// A day's churn leaves no trace: rows are updated in place, and dead rows are removed page by page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn churn_leaves_the_table_as_large_as_it_was() {
    let rounds = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 200 } else { 20 };
    // No vacuum runs: the table stays small by itself.
    let settings = vec![("autovacuum".into(), "off".into())];
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    sql(&server, "CREATE EXTENSION pgstattuple");
    let store = open(&format!("{}?timeout=20s", url(server.addr()))).await;
    churn(&store, 1).await;
    let first = Size::of(&server, "1000 cycles");
    churn(&store, rounds / 10 - 1).await;
    let tenth = Size::of(&server, &format!("{} cycles", rounds * 100));
    let began = std::time::Instant::now();
    churn(&store, rounds - rounds / 10).await;
    let last =
        Size::of(&server, &format!("{} cycles, the last of them in {:.0?}", rounds * 1000, began.elapsed()));
    assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.lock"), 1000);
    assert!(last.table <= tenth.table * 11 / 10 && last.index <= tenth.index * 11 / 10, "it grows");
    assert!(last.table <= first.table * 2, "the room that each page has to spare is not enough");
    // Not many more than what one page may hold until the next statement prunes it.
    assert!(last.dead <= tenth.dead * 5 / 4 + 1000, "dead rows are not removed");
}

/// A snapshot that stays open keeps all versions of a row that were written since: a name that is used often becomes slow, and nothing
/// else happens. When the snapshot ends they are removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_snapshot_costs_speed_and_no_more() {
    let settings = vec![("autovacuum".into(), "off".into())];
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    sql(&server, "CREATE EXTENSION pgstattuple");
    let store = open(&format!("{}?timeout=20s", url(server.addr()))).await;
    let cycles = async |count: usize| {
        let (began, mut last) = (std::time::Instant::now(), None);
        for _ in 0..count {
            let held = take(&store, &request("hot")).await;
            assert!(Some(held.fence) > last);
            last = Some(held.fence);
            give_back(&store, &held.key).await;
        }
        began.elapsed()
    };
    cycles(100).await;
    let without = cycles(500).await;
    let other = connect_to(&Options::from_url(&url(server.addr())).unwrap()).await.unwrap();
    other.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM lockkeeper.lock").await.unwrap();
    cycles(1500).await;
    let with = cycles(500).await;
    let kept = Size::of(&server, "2000 cycles and an open snapshot");
    println!("500 cycles: {without:.0?}, and {with:.0?} with an open snapshot");
    assert!(kept.dead >= 2000, "the page says that they stay");
    other.batch_execute("COMMIT").await.unwrap();
    cycles(100).await;
    sql(&server, "VACUUM lockkeeper.lock");
    assert!(Size::of(&server, "after it").dead < 100);
}

/// The size of the table of locks on the disk, and its number of dead rows.
struct Size {
    table: i64,
    index: i64,
    dead: i64,
}

impl Size {
    fn of(server: &Server, when: &str) -> Size {
        let of = |what| number(server, &format!("SELECT {what}"));
        let size = Size {
            table: of("pg_table_size('lockkeeper.lock')"),
            index: of("pg_indexes_size('lockkeeper.lock')"),
            dead: of("dead_tuple_count FROM pgstattuple('lockkeeper.lock')"),
        };
        println!("{when}: table {} bytes, index {} bytes, {} dead rows", size.table, size.index, size.dead);
        size
    }
}

/// So many times a cycle of each of 1000 names, by 64 tasks that share them out.
async fn churn(store: &Client, rounds: usize) {
    let tasks = (0..64).map(|task| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..rounds {
                for name in (task..1000).step_by(64) {
                    let held = take(&store, &request(&format!("churn/{name}"))).await;
                    give_back(&store, &held.key).await;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

/// Rows of idle names are removed, and their fences still grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swept_name_keeps_its_fence() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(&url(server.addr())).await;
    let once = take(&store, &request("once")).await;
    give_back(&store, &once.key).await;
    let held = take(&store, &request("held")).await;
    sweep(&server, "");
    assert_eq!(sql(&server, "SELECT name FROM lockkeeper.lock"), "held", "a held lock stays");
    let again = take(&store, &request("once")).await;
    assert!(again.fence > held.fence && held.fence > once.fence);
    assert_eq!(store.renew(&[held]).await.unwrap(), [RenewOutcome::Renewed]);
}

/// Sweeps one portion, as if an hour had passed. Returns the last name of the portion.
fn sweep(server: &Server, after: &str) -> String {
    sql(server, &format!("SELECT lockkeeper.sweep_locks('{after}', lockkeeper.now_us() + 1000000)"))
}

/// Holders and waiters that died leave rows behind, which only the next request for the name would end; and none may come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_dead_processes_are_swept() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=100ms&claim=1s", url(server.addr()));
    let (store, gone) = (open(&url).await, open(&url).await);
    let short = |name, mode| with(request(name), |request| (request.ttl, request.mode) = (SHORT, mode));
    take(&gone, &short("alone", Mode::Exclusive)).await;
    take(&gone, &short("shared", Mode::Shared)).await;
    let held = take(&store, &request("queued")).await;
    let waiter = join_queue(&gone, &request("queued"), 1).await;
    waiter.abort();
    _ = waiter.await;
    drop(gone);
    let kept = take(&store, &request("kept")).await;
    // The lock has no holder any more, and its waiters were not woken.
    sql(&server, "UPDATE lockkeeper.lock SET attempt = NULL, expires = 0, free_at = 0 WHERE name = 'queued'");
    let left = "SELECT string_agg(name, ' ') FROM (SELECT name FROM lockkeeper.lock UNION ALL SELECT name FROM lockkeeper.hold \
                UNION ALL SELECT name FROM lockkeeper.waiter) t";
    eventually("only a held lock stays", || async {
        sweep(&server, "");
        sql(&server, left) == "kept"
    })
    .await;
    assert_eq!(store.renew(&[kept, held]).await.unwrap(), [RenewOutcome::Renewed, RenewOutcome::Lost]);
}

/// A process that lives for seconds never came to its first sweep, ten minutes after it was opened: in a fleet of such
/// processes none swept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lived_process_sweeps_if_it_is_overdue() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    drop(open(&url(server.addr())).await);
    let many = "INSERT INTO lockkeeper.lock(name, fence, since, ttl, expires, free_at) SELECT 'idle/' || n, n, 0, 0, 0, 0 \
                FROM generate_series(1000, 3499) n";
    sql(&server, many);
    sql(&server, "UPDATE lockkeeper.state SET swept_at = 0");
    let _short = open(&url(server.addr())).await;
    let left = || number(&server, "SELECT count(*) FROM lockkeeper.lock WHERE name LIKE 'idle/%'");
    eventually("the idle rows are gone", || async { left() == 0 }).await;
    let noted = "SELECT count(*) FROM lockkeeper.state WHERE swept_at > lockkeeper.now_us() - 500000000";
    eventually("the sweep is noted as done", || async { number(&server, noted) == 1 }).await;
}

/// Other requests wait no longer than one portion takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sweep_goes_in_portions() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let _store = open(&url(server.addr())).await;
    let many = "INSERT INTO lockkeeper.lock(name, fence, since, ttl, expires, free_at) SELECT 'idle/' || n, n, 0, 0, 0, 0 \
                FROM generate_series(1000, 3499) n";
    sql(&server, many);
    let (mut after, mut left) = (String::new(), 2500);
    for portion in [1000, 1000, 500] {
        after = sweep(&server, &after);
        left -= portion;
        assert_eq!(number(&server, "SELECT count(*) FROM lockkeeper.lock"), left);
    }
    assert_eq!(sweep(&server, &after), "", "that was all");
}
