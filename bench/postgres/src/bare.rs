//! The same thing by hand: a row for each lock, one upsert to take it and one update to give it back.

use std::net::SocketAddr;

use tokio_postgres::{Client, NoTls, Statement};

pub async fn connect(addr: SocketAddr) -> Client {
    let config = format!("host={} port={} user=postgres dbname=postgres", addr.ip(), addr.port());
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client
}

pub async fn prepare(client: &Client) {
    let table = "CREATE TABLE bare(name text COLLATE \"C\" PRIMARY KEY, fence bigint NOT NULL, attempt bytea, expires timestamptz, \
                 holder text) WITH (fillfactor = 50)";
    client.batch_execute(table).await.expect("a table");
}

/// The statements that acquire and release.
#[derive(Clone)]
pub struct Words {
    pub take: Statement,
    pub give: Statement,
}

impl Words {
    /// `waits`: also what is given back waits for the disk, as everything does by default.
    pub async fn of(client: &Client, waits: bool) -> Words {
        let take = "INSERT INTO bare AS b VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $2, \
                    clock_timestamp() + $3 * interval '1 ms', $4) ON CONFLICT (name) DO UPDATE SET \
                    fence = greatest(b.fence + 1, excluded.fence), attempt = excluded.attempt, expires = excluded.expires, \
                    holder = excluded.holder WHERE b.attempt IS NULL OR b.expires < clock_timestamp() RETURNING fence";
        let give = "UPDATE bare SET attempt = NULL WHERE name = $1 AND attempt = $2";
        let in_time = " RETURNING set_config('synchronous_commit', 'off', true)";
        let give = if waits { give.to_owned() } else { format!("{give}{in_time}") };
        Words {
            take: client.prepare(take).await.expect("a statement"),
            give: client.prepare(&give).await.expect("a statement"),
        }
    }

    pub async fn take(&self, client: &Client, name: &str, attempt: &[u8]) -> i64 {
        let row = client.query_one(&self.take, &[&name, &attempt, &30_000f64, &HOLDER]).await;
        row.expect("it was free").get(0)
    }

    pub async fn give(&self, client: &Client, name: &str, attempt: &[u8]) {
        assert_eq!(client.execute(&self.give, &[&name, &attempt]).await.expect("an answer"), 1);
    }
}

const HOLDER: &str = r#"{"host":"bench","pid":1}"#;
