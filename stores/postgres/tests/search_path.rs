//! Other roles' functions and operators in the search_path of a client (the class of CVE-2018-1058).

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{Client, ask_for, open, sql, sql_as, try_sql, url};
use futures_util::StreamExt;
use lockkeeper::Lockkeeper;
use lockkeeper_core::{AcquireOutcome, DeleteOutcome, EventKind, Expect, Mode, Page, RenewOutcome, Wait};
use lockkeeper_postgres::tokio_postgres::{self, NoTls};
use lockkeeper_testkit::laws::{eventually, give_back, name, owner, request, request_all, soon, take, with};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// Functions of PostgreSQL that take other types than those of the call, or any type: for each a trap that fits better.
const FUNCTIONS: [(&str, &str); 16] = [
    ("hashtextextended(text, int)", "bigint"),
    ("nextval(text)", "bigint"),
    ("setval(text, bigint)", "bigint"),
    ("unnest(text[])", "SETOF text"),
    ("unnest(bytea[])", "SETOF bytea"),
    ("unnest(int[])", "SETOF int"),
    ("unnest(bigint[])", "SETOF bigint"),
    ("cardinality(text[])", "int"),
    ("concat_ws(text, text, bigint, bigint, bigint)", "text"),
    ("jsonb_build_object(text, boolean, text, bigint, text, bigint)", "jsonb"),
    ("jsonb_build_object(text, text)", "jsonb"),
    ("jsonb_array_elements_text(text)", "SETOF text"),
    ("pg_notify(name, text)", "void"),
    ("pg_advisory_xact_lock(int)", "void"),
    ("pg_try_advisory_xact_lock_shared(int)", "boolean"),
    ("encode(bytea, name)", "text"),
];

/// Operators, likewise.
const OPERATORS: [(&str, &str, &str, &str); 6] = [
    ("*", "numeric", "int", "numeric"),
    ("<@", "text[]", "text[]", "boolean"),
    ("||", "text", "int", "text"),
    ("||", "text", "bigint", "text"),
    ("->>", "jsonb", "name", "text"),
    ("?", "jsonb", "name", "boolean"),
];

fn set_traps(server: &Server) {
    sql(server, "CREATE ROLE stranger LOGIN; GRANT CREATE ON SCHEMA public TO stranger");
    let body = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'a stranger''s code runs as %', current_user; END $$";
    for (call, returns) in FUNCTIONS {
        sql_as(server, "stranger", &format!("CREATE FUNCTION public.{call} RETURNS {returns} {body}"));
    }
    for (i, (operator, left, right, returns)) in OPERATORS.iter().enumerate() {
        sql_as(
            server,
            "stranger",
            &format!(
                "CREATE FUNCTION public.trap_{i}({left}, {right}) RETURNS {returns} {body}; \
                 CREATE OPERATOR public.{operator} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = public.trap_{i})"
            ),
        );
    }
}

/// Every kind of step, on a store that is made here, by a superuser whose search_path is the usual one.
async fn use_everything(server: &Server, url: &str) {
    let (here, there) = (open(url).await, open(url).await);
    hand_over(&here, &there).await;
    let both = request_all(&["a", "b"]);
    let grant = take(&here, &both).await;
    assert_eq!(there.renew(std::slice::from_ref(&grant)).await.unwrap().len(), 1);
    give_back(&here, &grant.key).await;
    let reader = with(request("shared"), |request| {
        (request.mode, request.owner) = (Mode::Shared, Some(owner()));
        request.lock_delay = Duration::from_millis(10);
    });
    let grant = take(&here, &reader).await;
    there.break_lock(&name("shared"), "a test").await.unwrap();
    drop(grant);
    let revoked = take(&here, &request("revoked")).await;
    there.revoke(&name("revoked"), "a test").await.unwrap();
    assert!(here.acquire(&with(request("revoked"), |r| r.key = revoked.key.clone())).await.is_err());
    let renewed = here.renew(std::slice::from_ref(&revoked)).await.unwrap();
    assert!(matches!(&renewed[..], [RenewOutcome::Revoked(_)]), "{renewed:?}");
    here.list("", &Page::FIRST).await.unwrap();
    there.write(&name("record"), b"1", Expect::Absent, None).await.unwrap();
    assert_eq!(here.scan("rec", &Page::FIRST).await.unwrap().records.len(), 1);
    assert_eq!(here.delete(&name("record"), Expect::Any).await.unwrap(), DeleteOutcome::Deleted);
    let mut events = there.watch("seen").await.unwrap();
    give_back(&here, &take(&here, &request("seen")).await.key).await;
    let event = soon("an event comes", events.next()).await.unwrap().unwrap();
    assert!(matches!(event.kind, EventKind::Granted { .. }), "{event:?}");
    for sweep in ["sweep_locks('', lockkeeper.now_us())", "sweep_records('')", "sweep_clients('', 0)"] {
        sql(server, &format!("SELECT lockkeeper.{sweep}"));
    }
    let keeper = Lockkeeper::open(url).await.unwrap();
    let register = keeper.register::<u32>("count");
    register.update(|value| value.unwrap_or(0) + 1).await.unwrap();
    // In the user's own session.
    let stream = tokio::net::TcpStream::connect(server.addr()).await.unwrap();
    let config: tokio_postgres::Config = "user=postgres dbname=postgres".parse().unwrap();
    let (mut client, connection) = config.connect_raw(stream, NoTls).await.unwrap();
    tokio::spawn(connection);
    let transaction = client.transaction().await.unwrap();
    keeper.in_transaction(&transaction, "in a transaction").await.unwrap();
    transaction.commit().await.unwrap();
}

async fn hand_over(here: &Client, there: &Client) {
    let held = take(here, &request("x")).await;
    let request = with(ask_for("x", Duration::from_secs(60)), |request| request.wait = Wait::Forever);
    let waiter = tokio::spawn({
        let there = there.clone();
        async move { there.acquire(&request).await }
    });
    eventually("the waiter is in the queue", || async {
        here.inspect(&name("x")).await.unwrap().is_some_and(|view| view.waiting == 1)
    })
    .await;
    give_back(here, &held.key).await;
    let Ok(AcquireOutcome::Granted(grant)) = soon("the waiter is granted the lock", waiter).await.unwrap()
    else {
        panic!("the waiter was not granted the lock")
    };
    give_back(there, &grant.key).await;
}

/// The helpers in SQL that have no search_path of their own: then PostgreSQL can inline them. Only functions that have one call them, but for the
/// first two, whose bodies name exact types.
const INLINED: [&str; 13] = [
    "advisory_key",
    "now_us",
    "active_holds",
    "bound_names",
    "changes_in",
    "covers",
    "delay_left",
    "holds",
    "lingering_terms",
    "lock_delay",
    "min_hold_end",
    "revocation",
    "revocation_of_fence",
];

/// A function without a search_path of its own runs with that of its caller. So no statement of a client calls one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_function_that_a_client_calls_has_a_search_path() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    drop(open(&url(server.addr())).await);
    let found = |filter: &str| -> BTreeSet<String> {
        let query = format!(
            "SELECT proname FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang \
             WHERE pronamespace = 'lockkeeper'::regnamespace AND {filter}"
        );
        sql(&server, &query).lines().map(str::to_owned).collect()
    };
    let without =
        found("NOT coalesce(array_to_string(proconfig, ' ') LIKE 'search_path=pg_catalog, pg_temp%', false)");
    assert_eq!(without, INLINED.iter().map(|name| (*name).to_owned()).collect());
    assert_eq!(found("prosecdef"), BTreeSet::new(), "no function runs with the rights of its owner");
    let statements = [
        include_str!("../src/statements.rs"),
        include_str!("../src/sql/acquire_fast.sql"),
        include_str!("../src/sql/release_fast.sql"),
    ];
    for helper in &INLINED[2..] {
        let call = format!("@S.{helper}(");
        assert!(!statements.iter().any(|text| text.contains(&call)), "a client calls {helper}");
    }
    let exact = found(
        "proname IN ('advisory_key', 'now_us') AND prosrc ~ '[a-z_]\\(' AND prosrc !~ '(^|[^a-z_.])[a-z_]+\\('",
    );
    assert_eq!(exact.len(), 2, "their bodies call functions of pg_catalog by their full names: {exact:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_code_of_another_role_runs_in_a_session_of_the_store() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    set_traps(&server);
    let url = url(server.addr());
    use_everything(&server, &url).await;
    // The traps do spring, for a call that is not exact.
    let sprung = try_sql(&server, "SELECT hashtextextended('x', 0)").unwrap_err();
    assert!(sprung.contains("a stranger's code runs as postgres"), "{sprung}");
}
