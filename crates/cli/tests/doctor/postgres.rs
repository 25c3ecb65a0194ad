//! The doctor on PostgreSQL.
#![cfg(feature = "postgres")]

use std::process::Command;

use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

use crate::common::*;
use crate::tools::examine;

fn url(user: &str, server: &Server) -> String {
    format!("postgres://{user}@{}/postgres", server.addr())
}

fn psql(server: &Server, sql: &str) {
    let (host, port) = (server.addr().ip().to_string(), server.addr().port().to_string());
    let done = Command::new("psql")
        .args([
            "-h",
            &host,
            "-p",
            &port,
            "-U",
            "postgres",
            "-d",
            "postgres",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            sql,
        ])
        .output()
        .unwrap();
    assert!(done.status.success(), "{sql}: {}", errors(&done));
}

#[test]
fn a_healthy_server_a_pooler_and_a_missing_right() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let place = Place::new("doctor_postgres");
    let report = examine(&place, &url("postgres", &server));
    report.is_healthy_but(&[]);
    assert_eq!((report.exit_code(), report.standing("durability").as_str()), (0, "kept"));
    assert_eq!(report.0["servers"][0]["role"], "primary");
    assert_eq!(report.0["correctness"]["good"], true);

    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    let pooled = examine(&place, &url("postgres", &pooler));
    pooled.is_healthy_but(&["PgBouncer"]).advises("the URL of the store");
    assert_eq!((pooled.exit_code(), pooled.standing("waiting").as_str()), (1, "at risk"));

    psql(&server, "CREATE ROLE weak LOGIN");
    let refused = examine(&place, &url("weak", &server));
    assert_eq!((refused.exit_code(), refused.standing("availability").as_str()), (2, "broken"));
    refused.has("harm", "not allowed");
}

#[test]
fn commits_that_do_not_wait_for_the_disk_are_a_risk() {
    let settings = vec![("synchronous_commit".to_owned(), "off".to_owned())];
    let Ok(server) = servers::postgres(PostgresOptions { settings, ..PostgresOptions::default() }) else {
        return;
    };
    let report = examine(&Place::new("doctor_commit"), &url("postgres", &server));
    report.is_healthy_but(&["synchronous_commit is off"]).advises("synchronous_commit to on");
    assert_eq!((report.exit_code(), report.standing("durability").as_str()), (1, "at risk"));
    assert_eq!(report.0["correctness"]["good"], false);
}
