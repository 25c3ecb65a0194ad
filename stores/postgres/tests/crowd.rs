//! Many who wait, and many who come and go. What is counted is what the server did, not the time.

mod common;

use std::process::{Child, Command};
use std::time::Duration;

use common::{Client, number, open, sql, url};
use futures_util::future::join_all;
use lockkeeper_core::{Acquired, Mode, Renewal, Wait};
use lockkeeper_testkit::laws::{SHORT, ask, eventually, give_back, is_free, name, stand_in_line, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// One process of the crowd: it waits many times over, and gives back at once what it gets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the other processes of the test below"]
async fn member() {
    let (url, count) = (std::env::var("CROWD_URL").unwrap(), std::env::var("CROWD_COUNT").unwrap());
    let store = open(&url).await;
    let tasks = (0..count.parse::<usize>().unwrap()).map(|_| {
        let store = store.clone();
        tokio::spawn(async move {
            let patient = with(ask("popular"), |ask| ask.wait = Wait::Forever);
            let Ok(Acquired::Granted(grant)) = store.acquire(&patient).await else { panic!("not served") };
            give_back(&store, &grant.claim).await;
            grant.fence
        })
    });
    let mut fences = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        fences.push(task.await.unwrap());
    }
    fences.sort();
    fences.dedup();
    assert_eq!(fences.len().to_string(), count, "everybody has a fence of its own");
}

fn start(url: &str, count: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "member", "--nocapture"]);
    command.env("CROWD_URL", url).env("CROWD_COUNT", count.to_string()).spawn().unwrap()
}

async fn in_line(store: &Client, count: usize) {
    eventually("all stand in line", || async {
        store.inspect(&name("popular")).await.unwrap().is_some_and(|view| view.waiting == count)
    })
    .await;
}

/// A release gives the lock to one waiter, and tells it: with joining the line, two steps for each, however many wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_are_woken_one_by_one() {
    let settings = vec![("track_functions".into(), "pl".into())];
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    // Looking now and then is by the clock: rare enough not to hide what is counted here.
    let url = format!("{}?poll=10s&claim=60s&timeout=20s", url(server.addr()));
    let store = open(&url).await;
    let held = take(&store, &ask("popular")).await;
    let crowd: Vec<Child> = (0..2).map(|_| start(&url, 500)).collect();
    in_line(&store, 1000).await;
    give_back(&store, &held.claim).await;
    for mut one in crowd {
        assert!(tokio::task::spawn_blocking(move || one.wait()).await.unwrap().unwrap().success());
    }
    is_free(&store, "popular").await;
    // A server process says what it did when it ends, at the latest.
    drop(store);
    // A waiter enqueues (ask), the release before it hands the lock over (pass_on), and the waiter reads its grant (take_turn). A waiter
    // that is woken for nothing takes its turn, and asks again.
    let calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname IN ('ask', 'pass_on', 'take_turn', 'release')";
    eventually("all steps are counted", || async { number(&server, calls) >= 3000 }).await;
    let steps = number(&server, calls);
    println!("{steps} steps for 1000 who waited");
    // A slow machine has some look twice. A release that wakes everybody would be half a million.
    assert!(steps < 5000, "somebody is woken for nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_costs_its_claim_and_no_more() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=100ms&claim=3s&timeout=20s", url(server.addr()));
    let store = open(&url).await;
    let held = take(&store, &ask("popular")).await;
    let mut dead = start(&url, 3);
    in_line(&store, 3).await;
    let (store2, patient) = (store.clone(), with(ask("popular"), |ask| ask.wait = Wait::Forever));
    let waiter = tokio::spawn(async move { store2.acquire(&patient).await });
    in_line(&store, 4).await;
    dead.kill().unwrap();
    dead.wait().unwrap();
    give_back(&store, &held.claim).await;
    let served = tokio::time::timeout(Duration::from_secs(20), waiter).await.expect("it is let in").unwrap();
    assert!(matches!(served, Ok(Acquired::Granted(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_guards_are_renewed_in_one_statement() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(&format!("{}?timeout=20s", url(server.addr()))).await;
    let asks: Vec<_> = (0..10_000).map(|i| ask(&format!("guard/{i}"))).collect();
    let mut grants = Vec::new();
    for batch in asks.chunks(500) {
        grants.extend(join_all(batch.iter().map(|ask| take(&store, ask))).await);
    }
    assert!(store.renew(&grants).await.unwrap().iter().all(|answer| *answer == Renewal::Renewed));
    // One statement is one transaction: all rows have the same writer.
    let writers = number(&server, "SELECT count(DISTINCT xmin::text) FROM lockkeeper.lock");
    assert_eq!(writers, 1);
}

/// A day's churn leaves no trace: rows are updated in place, and what is dead is cleared away page by page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn churn_leaves_the_table_as_large_as_it_was() {
    let rounds = if std::env::var_os("LOCKKEEPER_FULL").is_some() { 200 } else { 20 };
    // Nobody vacuums: what stays small does so by itself.
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
    // Not many more than what one page may hold until the next one who comes by clears it.
    assert!(last.dead <= tenth.dead * 5 / 4 + 1000, "what is dead is not cleared away");
}

/// What a table of locks takes on the disk, and how many dead rows there are in it.
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
                    let held = take(&store, &ask(&format!("churn/{name}"))).await;
                    give_back(&store, &held.claim).await;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

/// Names that nobody uses any more are forgotten, and their fences are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_cleared_away_keeps_its_fence() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let store = open(&url(server.addr())).await;
    let once = take(&store, &ask("once")).await;
    give_back(&store, &once.claim).await;
    let held = take(&store, &ask("held")).await;
    sweep(&server, "");
    assert_eq!(sql(&server, "SELECT name FROM lockkeeper.lock"), "held", "what is held stays");
    let again = take(&store, &ask("once")).await;
    assert!(again.fence > held.fence && held.fence > once.fence);
    assert_eq!(store.renew(&[held]).await.unwrap(), [Renewal::Renewed]);
}

/// Clears away a portion of what nobody uses, as if an hour had passed. Returns the last name that was looked at.
fn sweep(server: &Server, after: &str) -> String {
    sql(server, &format!("SELECT lockkeeper.sweep_locks('{after}', lockkeeper.us() + 1000000)"))
}

/// Holders and waiters that died leave rows behind, which only the next one to come by would end; and nobody may come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ended_without_a_word_is_cleared_away() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let url = format!("{}?poll=100ms&claim=1s", url(server.addr()));
    let (store, gone) = (open(&url).await, open(&url).await);
    let short = |name, mode| with(ask(name), |ask| (ask.ttl, ask.mode) = (SHORT, mode));
    take(&gone, &short("alone", Mode::Exclusive)).await;
    take(&gone, &short("shared", Mode::Shared)).await;
    let held = take(&store, &ask("line")).await;
    let waiter = stand_in_line(&gone, &ask("line"), 1).await;
    waiter.abort();
    _ = waiter.await;
    drop(gone);
    let kept = take(&store, &ask("kept")).await;
    // Nobody holds it any more, and nobody has said so to the line.
    sql(&server, "UPDATE lockkeeper.lock SET attempt = NULL, expires = 0, free = 0 WHERE name = 'line'");
    let left = "SELECT string_agg(name, ' ') FROM (SELECT name FROM lockkeeper.lock UNION ALL SELECT name FROM lockkeeper.hold \
                UNION ALL SELECT name FROM lockkeeper.waiter) t";
    eventually("only what is held stays", || async {
        sweep(&server, "");
        sql(&server, left) == "kept"
    })
    .await;
    assert_eq!(store.renew(&[kept, held]).await.unwrap(), [Renewal::Renewed, Renewal::Lost]);
}

/// Others are not held up for longer than a portion takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_cleared_away_goes_in_portions() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let _store = open(&url(server.addr())).await;
    let many = "INSERT INTO lockkeeper.lock(name, fence, since, ttl, expires, free) SELECT 'idle/' || n, n, 0, 0, 0, 0 \
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
