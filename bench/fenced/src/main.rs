//! A fenced PostgreSQL update against the plain one in the same transaction shape, in one run on one server: only ratios count.
//!
//!     cargo run --release -p bench-fenced [ROUNDS]

mod update;

use lockkeeper_fenced::postgres::Fences;
use lockkeeper_fenced::postgres::table::{self, TableGuardSpec};
use lockkeeper_testkit::ratio::rounds;
use lockkeeper_testkit::servers::{self, PostgresOptions};
use tokio_postgres::{Client, NoTls};
use update::{Kind, Worker};

#[tokio::main]
async fn main() {
    let rounds = rounds(15);
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let config =
        format!("host={} port={} user=postgres dbname=postgres", server.addr().ip(), server.addr().port());
    let mut client = connect(&config).await;
    let version: String = client.query_one("SHOW server_version", &[]).await.expect("an answer").get(0);
    println!(
        "PostgreSQL {version}, fsync on, {rounds} rounds, medians; a transaction: BEGIN, UPDATE by its key, COMMIT"
    );
    prepare(&mut client).await;
    for tasks in [1, 8] {
        let mut workers = Vec::new();
        for task in 0..tasks {
            workers.push(Worker::new(connect(&config).await, task, tasks as u64 * 1_000_000_000).await);
        }
        update::compare(&mut workers, rounds).await;
    }
}

async fn connect(config: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(config, NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client
}

/// The same rows three times: plain, for guard rows, and guarded by itself.
async fn prepare(client: &mut Client) {
    for name in Kind::ALL.map(Kind::table) {
        let table = format!(
            "CREATE TABLE {name} (id int PRIMARY KEY, state text, fence bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50); \
             INSERT INTO {name} SELECT n, 'open' FROM generate_series(0, 9999) n"
        );
        client.batch_execute(&table).await.expect("a table");
    }
    Fences::default().install(client).await.expect("guard rows");
    let spec = TableGuardSpec {
        table: Kind::Guarded.table().into(),
        column: "fence".into(),
        key: vec![],
        allow_unfenced: false,
    };
    let found = table::find(client, &spec).await.expect("a table");
    table::install(client, &found).await.expect("triggers");
    // Every row has its mark before anything is measured.
    let marks = "INSERT INTO lockkeeper_fence SELECT 'orders/' || n, 1 FROM generate_series(0, 9999) n; VACUUM ANALYZE";
    for statement in marks.split("; ") {
        client.batch_execute(statement).await.expect("marks");
    }
}
