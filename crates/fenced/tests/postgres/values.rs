//! The laws for values with a mark, and writes that may have happened.

use std::sync::Arc;

use async_trait::async_trait;
use lockkeeper_core::Error;
use lockkeeper_fenced::postgres::{Fences, PostgresFenced};
use lockkeeper_fenced::{Fenced, GuardedValue};
use lockkeeper_testkit::fenced::FencedHarness;
use lockkeeper_testkit::proxy::{At, Fault, Framing, Proxy, every_point};

use crate::common::{Place, Plain, connect, fence};

#[async_trait]
impl FencedHarness for Place {
    async fn start() -> Option<Self> {
        let place = Place::start().await?;
        Fences::default().install(&place.client().await).await.unwrap();
        Some(place)
    }

    fn address(&self) -> String {
        self.address()
    }

    async fn client(address: &str) -> Arc<dyn Fenced> {
        Arc::new(PostgresFenced::new(connect(address).await, Fences::default()))
    }

    async fn twin(address: &str) -> Arc<dyn Fenced> {
        Plain::open(address).await
    }
}

mod laws {
    use super::*;
    lockkeeper_testkit::fenced_laws!(Place);
}

/// A client behind a proxy writes with 5, and the reply may get lost. Sent again, the write is done once; after a newer write it is refused.
async fn break_everywhere(fault: fn(At) -> Fault) {
    let Some(place) = <Place as FencedHarness>::start().await else { return };
    let other = <Place as FencedHarness>::client(&place.address()).await;
    let points = every_point(50, async |n| {
        let proxy = Proxy::start(place.server.addr(), Framing::Postgres);
        let injected = proxy.inject(fault(Fault::at_request(n)));
        let name = format!("r{n}");
        let address = format!("{} {} {}", proxy.addr().ip(), proxy.addr().port(), place.schema);
        let through = || PostgresFenced::new_for_test(&address);
        let mut tries = 0;
        loop {
            tries += 1;
            let Some(client) = through().await else { continue };
            match client.put(&name, fence(5), b"five").await {
                Ok(()) => break,
                Err(Error::Unknown(_) | Error::Unavailable(_)) if tries < 5 => {}
                Err(e) => panic!("{e}"),
            }
        }
        let seen = Some(GuardedValue { fence: fence(5), value: Some(b"five".to_vec()) });
        assert_eq!(other.read(&name).await.unwrap(), seen);
        other.put(&name, fence(6), b"six").await.unwrap();
        if let Some(client) = through().await {
            let late = client.put(&name, fence(5), b"five").await;
            assert!(
                matches!(late, Err(Error::Stale { .. } | Error::Unknown(_) | Error::Unavailable(_))),
                "{late:?}"
            );
        }
        assert_eq!(other.read(&name).await.unwrap().unwrap().value, Some(b"six".to_vec()));
        injected.fired()
    })
    .await;
    assert!(points >= 2, "only {points} points");
}

/// A connection that may fail to be made.
trait ForTest: Sized {
    async fn new_for_test(address: &str) -> Option<Self>;
}

impl ForTest for PostgresFenced {
    async fn new_for_test(address: &str) -> Option<Self> {
        let [host, port, schema] = address.split(' ').collect::<Vec<_>>()[..] else { panic!("{address}") };
        let config = format!(
            "host={host} port={port} user=postgres dbname=postgres options='-c search_path={schema}'"
        );
        let (client, connection) = tokio_postgres::connect(&config, tokio_postgres::NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(PostgresFenced::new(client, Fences::default()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_answer_is_lost_is_done_once_and_can_be_repeated() {
    break_everywhere(At::cut_before_reply).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_never_arrives_is_told_and_can_be_repeated() {
    break_everywhere(At::reset).await;
}
