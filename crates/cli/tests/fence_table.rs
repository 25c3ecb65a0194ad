//! A table of a real database that is guarded, looked at and let go from the command line.

mod common;
use std::process::{Command, Output};

use common::*;
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};
use serde_json::json;

fn fence(place: &Place, server: &Server, words: &[&str]) -> Output {
    let url = format!("postgres://postgres@{}/postgres", server.addr());
    place.lk([&["fence"], words].concat()).env("LOCKKEEPER_POSTGRES", url).output().unwrap()
}

fn psql(server: &Server, sql: &str) -> (bool, String) {
    let addr = server.addr();
    let done = Command::new("psql")
        .args([
            "-h",
            &addr.ip().to_string(),
            "-p",
            &addr.port().to_string(),
            "-U",
            "postgres",
            "-d",
            "postgres",
        ])
        .args(["-XqAt", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-c", sql])
        .output()
        .unwrap();
    (done.status.success(), format!("{}{}", text(&done), errors(&done)).trim().to_owned())
}

#[test]
fn a_table_is_guarded_looked_at_and_let_go() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("fence");
    let none = fence(&place, &server, &["status"]);
    assert_eq!(text(&none), "no table of this database checks fences\n", "{}", errors(&none));
    psql(&server, "CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY, state text)");
    let install = ["install", "--table", "shop.orders", "--column", "fence"];
    let bare = fence(&place, &server, &install);
    assert_eq!(code(bare.status), 64);
    assert!(
        errors(&bare).contains("ALTER TABLE shop.orders ADD COLUMN fence bigint NOT NULL DEFAULT 0;"),
        "{}",
        errors(&bare)
    );
    psql(
        &server,
        "ALTER TABLE shop.orders ADD COLUMN fence bigint NOT NULL DEFAULT 0; INSERT INTO shop.orders VALUES (42, 'open')",
    );

    // What it prints does the same as what it does.
    let sql = text(&fence(&place, &server, &[&install[..], &["--sql"]].concat()));
    assert!(psql(&server, "UPDATE shop.orders SET fence = 1").0);
    let (done, said) = psql(&server, &sql);
    assert!(done, "{said}");
    let again = fence(&place, &server, &install);
    assert_eq!(
        text(&again),
        "shop.orders refuses older fences, and writes without any\n",
        "{}",
        errors(&again)
    );

    assert!(psql(&server, "UPDATE shop.orders SET state = 'paid', fence = 7 WHERE id = 42").0);
    let (done, said) = psql(&server, "UPDATE shop.orders SET state = 'late', fence = 6 WHERE id = 42");
    assert!(
        !done && said.contains("LK065") && said.contains("fence 6 is stale: 7 was seen already"),
        "{said}"
    );
    assert!(!psql(&server, "UPDATE shop.orders SET state = 'unfenced'").0);
    let shown = json(&fence(&place, &server, &["status", "--json"]));
    let row = json!({ "table": "shop.orders", "state": "on", "column": "fence", "key": "id", "allow_unfenced": false, "marks": 0 });
    assert_eq!(shown, json!({ "tables": [row] }));
    let open =
        fence(&place, &server, &[&install[..], &["--key", "id", "--allow-unfenced", "--json"]].concat());
    assert_eq!(json(&open)["allow_unfenced"], true);
    assert!(psql(&server, "UPDATE shop.orders SET state = 'unfenced'").0);
    let shown = text(&fence(&place, &server, &["status"]));
    assert!(shown.contains("LET THROUGH"), "{shown}");

    let gone = fence(&place, &server, &["uninstall", "--table", "shop.orders"]);
    assert_eq!(code(gone.status), 0, "{}", errors(&gone));
    assert_eq!(code(fence(&place, &server, &["uninstall", "--table", "shop.orders"]).status), 66);
    assert!(psql(&server, "UPDATE shop.orders SET state = 'free', fence = 1").0);
    let (_, left) = psql(&server, "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'lockkeeper%'");
    assert_eq!(left, "0", "something is left");
}

#[test]
fn bad_calls_and_missing_rights_are_told() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("fence_bad");
    psql(
        &server,
        "CREATE TABLE orders (id int PRIMARY KEY, fence bigint); CREATE ROLE clerk LOGIN; GRANT ALL ON orders TO clerk",
    );
    let clerk = format!("postgres://clerk@{}/postgres", server.addr());
    let install = ["install", "--table", "orders", "--column", "fence", "--postgres", &clerk];
    let denied = fence(&place, &server, &install);
    assert_eq!(code(denied.status), 77, "{}", errors(&denied));
    assert!(errors(&denied).contains("--sql"), "{}", errors(&denied));
    let unreachable = ["status", "--postgres", "postgres://postgres@127.0.0.1:1/postgres", "--json"];
    let unreachable = fence(&place, &server, &unreachable);
    assert_eq!(code(unreachable.status), 69, "{}", errors(&unreachable));
    for (words, says) in [
        (&["install", "--table", "orders"][..], "--column"),
        (&["install", "--table", "nowhere", "--column", "fence"], "there is no table"),
        (&["install", "--table", "x'; DROP TABLE orders", "--column", "fence"], "invalid name"),
        (&["status", "--postgres", "redis://h"], "not the address"),
    ] {
        let bad = fence(&place, &server, words);
        assert_eq!(code(bad.status), 64, "{words:?}: {}", errors(&bad));
        assert!(errors(&bad).contains(says), "{words:?}: {}", errors(&bad));
    }
}
