//! A schema that another role has prepared: its triggers and functions would run with the privileges of each client of the store.

mod common;

use common::{number, open, refused_at_open, says, sql, sql_as, url};
use lockkeeper_core::Outcome;
use lockkeeper_testkit::laws::{give_back, request, take};
use lockkeeper_testkit::servers::{self, PostgresOptions, Server};

/// A role that may create schemas, and wants to be a superuser.
fn attacker(server: &Server) {
    sql(server, "CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE postgres TO mallory");
    let code = "CREATE SCHEMA mine; CREATE FUNCTION mine.code() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                IF current_user <> 'mallory' THEN ALTER ROLE mallory SUPERUSER; END IF; RETURN NEW; END $$; GRANT USAGE ON SCHEMA mine TO PUBLIC";
    sql_as(server, "mallory", code);
}

fn is_superuser(server: &Server) -> bool {
    number(server, "SELECT count(*) FROM pg_roles WHERE rolname = 'mallory' AND rolsuper") == 1
}

const TRAP: &str = "CREATE TABLE lockkeeper.migration(version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now()); \
                    CREATE TRIGGER t BEFORE INSERT ON lockkeeper.migration FOR EACH ROW EXECUTE FUNCTION mine.code(); \
                    GRANT ALL ON lockkeeper.migration TO PUBLIC";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepared_schema_is_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    attacker(&server);
    sql_as(
        &server,
        "mallory",
        &format!("CREATE SCHEMA lockkeeper; {TRAP}; GRANT ALL ON SCHEMA lockkeeper TO PUBLIC"),
    );
    let told = refused_at_open(&url(server.addr())).await;
    assert!(!is_superuser(&server), "a trigger ran with the rights of the client");
    says(&told, Outcome::Denied, &["schema lockkeeper belongs to mallory", "?schema="]);
    // An ordinary role refuses it too.
    sql(&server, "CREATE ROLE app LOGIN");
    let app = format!("postgres://app@{}/postgres", server.addr());
    says(&refused_at_open(&app).await, Outcome::Denied, &["schema lockkeeper belongs to mallory"]);
}

/// The owner of the schema has lent it, and the other role has put a table there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepared_table_in_a_good_schema_is_refused() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    attacker(&server);
    sql(&server, "CREATE SCHEMA lockkeeper; GRANT ALL ON SCHEMA lockkeeper TO mallory");
    sql_as(&server, "mallory", TRAP);
    let told = refused_at_open(&url(server.addr())).await;
    assert!(!is_superuser(&server), "a trigger ran with the rights of the client");
    says(&told, Outcome::Denied, &["lockkeeper.migration belongs to mallory"]);
}

/// A superuser, the owner of the database or a role that the client is a member of may have created it; the client itself, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_of_a_trusted_role_is_used() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    sql(
        &server,
        "CREATE ROLE team; CREATE ROLE app LOGIN IN ROLE team; CREATE ROLE owner LOGIN; \
                  GRANT CREATE ON DATABASE postgres TO app, team",
    );
    sql(&server, "CREATE DATABASE shop OWNER owner");
    let app = format!("postgres://app@{}/postgres", server.addr());
    let team = "CREATE SCHEMA ours AUTHORIZATION team";
    sql(&server, team);
    for url in [format!("{app}?schema=own"), format!("{app}?schema=ours")] {
        let store = open(&url).await;
        let grant = take(&store, &request("x")).await;
        give_back(&store, &grant.key).await;
    }
    // The tables of a role that is no superuser are not for a superuser to use.
    says(
        &refused_at_open(&format!("{}?schema=own", url(server.addr()))).await,
        Outcome::Denied,
        &["belongs to app"],
    );
    let owner = format!("postgres://owner@{}/shop", server.addr());
    open(&owner).await;
    let rights = "GRANT USAGE ON SCHEMA lockkeeper TO app; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA lockkeeper TO app; \
                  GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA lockkeeper TO app";
    common::sql_in(&server, "shop", rights);
    let store = open(&format!("postgres://app@{}/shop", server.addr())).await;
    let grant = take(&store, &request("x")).await;
    give_back(&store, &grant.key).await;
}
