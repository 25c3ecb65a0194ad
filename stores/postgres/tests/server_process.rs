//! Whether one server process serves a connection: with a server and with a pooler that run.

use lockkeeper_postgres::{Options, connect_to, has_own_server_process};
use lockkeeper_testkit::servers::{self, PostgresOptions, TlsFiles};

async fn own_process(url: &str) -> bool {
    let client = connect_to(&Options::from_url(url).unwrap()).await.unwrap();
    has_own_server_process(&client).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_gives_a_connection_a_process_of_its_own_and_a_pooler_does_not() {
    let Ok(server) = servers::postgres(PostgresOptions::default()) else { return };
    let Ok(pooler) = servers::pgbouncer(server.addr()) else { return };
    for _ in 0..3 {
        assert!(own_process(&format!("postgres://postgres@{}/postgres", server.addr())).await);
        assert!(!own_process(&format!("postgres://postgres@{}/postgres", pooler.addr())).await);
    }
}

/// The driver shows the process id only in a request to cancel, which it would send with TLS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_tls_gives_a_connection_a_process_of_its_own() {
    let tls = TlsFiles::new();
    let options = PostgresOptions { tls: Some(tls.clone()), ..PostgresOptions::default() };
    let Ok(server) = servers::postgres(options) else { return };
    let ca = tls.ca_path().display().to_string();
    assert!(
        own_process(&format!("postgres://postgres@{}/postgres?sslmode=verify-full&ca={ca}", server.addr()))
            .await
    );
}
