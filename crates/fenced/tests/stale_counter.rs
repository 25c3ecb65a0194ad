//! The counter of refused writes: every adapter counts a refusal once, and an accepted write not at all.
#![cfg(all(feature = "file", feature = "sqlite"))]

use lockkeeper_core::{Error, Fence};
use lockkeeper_fenced::file::FencedDir;
use lockkeeper_fenced::{Fenced, sql, sqlite};
use lockkeeper_testkit::servers::TempDir;
use metrics_exporter_prometheus::PrometheusBuilder;

#[tokio::test]
async fn a_stale_write_is_counted_by_its_adapter() {
    let prometheus = PrometheusBuilder::new().install_recorder().unwrap();
    let count = |adapter: &str| -> Option<u64> {
        let series = format!("lockkeeper_fenced_stale_writes_total{{adapter=\"{adapter}\"}} ");
        prometheus.render().lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
    };
    let (old, new) = (Fence::new(3).unwrap(), Fence::new(5).unwrap());
    let dir = TempDir::new("stale");
    let files = FencedDir::new(dir.path());
    let mut database = sqlite::rusqlite::Connection::open(dir.join("db")).unwrap();
    let transaction = database.transaction().unwrap();

    files.put("x", new, b"new").await.unwrap();
    sqlite::apply(&transaction, "x", new).unwrap();
    sql::check(new, 5).unwrap();
    // The counters are there before the first refusal: Prometheus sees no increase otherwise.
    assert_eq!(["file", "sqlite", "sql"].map(count), [Some(0); 3]);

    assert!(matches!(files.put("x", old, b"old").await, Err(Error::Stale { .. })));
    assert!(matches!(sqlite::apply(&transaction, "x", old), Err(Error::Stale { .. })));
    assert!(matches!(sql::check(old, 5), Err(Error::Stale { .. })));
    assert_eq!(["file", "sqlite", "sql"].map(count), [Some(1); 3]);
}
