//! A planted bug: statements that do not compare the fence. The law about late ends must notice it.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::common::{Database, SHORT, open_at};
use super::worker::late_ends_are_refused;

/// A condition on the fence, one of the same length that is always true, and the end that the law must find.
type PlantedBug = (&'static [u8], &'static [u8], &'static str);
const ALONE: PlantedBug = (b"AND t.lk_fence = $2 ", b"AND $2 IS NOT NULL  ", "complete");
const TOGETHER: PlantedBug =
    (b"AND t.lk_fence = ended.fence ", b"AND ended.fence IS NOT NULL  ", "complete all");

/// Takes the condition on the fence out of every statement that passes.
async fn without_the_fence(server: SocketAddr, (fenced, unfenced, _): PlantedBug) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.unwrap();
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                // A statement is far shorter than this, and the client writes it at once.
                let mut bytes = vec![0; 1 << 16];
                while let Ok(n @ 1..) = from_client.read(&mut bytes).await {
                    let sent = &mut bytes[..n];
                    for at in 0..n.saturating_sub(fenced.len() - 1) {
                        if sent[at..].starts_with(fenced) {
                            sent[at..at + fenced.len()].copy_from_slice(unfenced);
                        }
                    }
                    if to_server.write_all(sent).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    addr
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_without_the_fence_breaks_the_law_about_late_ends() {
    for bug in [ALONE, TOGETHER] {
        let Some(db) = Database::start().await else { return };
        drop(db.jobs(1, SHORT).await);
        let spoilt = without_the_fence(db.server.addr(), bug).await;
        let url = format!("postgres://postgres@{spoilt}/{}", db.name);
        let law = tokio::spawn(async move {
            let jobs = open_at(&url, "work", SHORT).await;
            late_ends_are_refused(&db, jobs).await;
        });
        let panic = law.await.expect_err("the law did not notice that no fence is compared").into_panic();
        let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(
            said.contains(&format!("{}: a late end was to be refused: Ok", bug.2)),
            "noticed at another assertion: {said}"
        );
    }
}
