//! Three workers share eight partitions of a list of orders. One of them leaves in the middle, and every order is packed once, by the
//! owner of its partition: the database refuses an owner that is late, by the fence (the fencing token).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper::partitions::{Partition, PartitionChange, partition_of};
use lockkeeper_examples::{database, store_url};
use lockkeeper_fenced::sqlite::{self, rusqlite};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PARTITIONS: u32 = 8;
const ORDERS: u64 = 200;
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS packed (number INTEGER PRIMARY KEY, worker TEXT NOT NULL)";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    database("orders.db", SCHEMA)?.execute("DELETE FROM packed", [])?;
    let keeper = Lockkeeper::open(&store_url()).await?;
    let packed = Arc::new(AtomicU64::new(0));
    let workers = ["ada", "ben", "cleo"].map(|name| tokio::spawn(work(keeper.clone(), name, packed.clone())));
    for worker in workers {
        worker.await??;
    }
    let db = database("orders.db", SCHEMA)?;
    let count: i64 = db.query_row("SELECT count(*) FROM packed", [], |row| row.get(0))?;
    let by: i64 = db.query_row("SELECT count(DISTINCT worker) FROM packed", [], |row| row.get(0))?;
    println!("{count} of {ORDERS} orders are packed, by {by} workers");
    Ok(())
}

/// Joins the group, and packs the orders of the partitions that this worker owns, until all orders are packed.
async fn work(keeper: Lockkeeper, name: &'static str, packed: Arc<AtomicU64>) -> Result<(), Error> {
    let group = keeper.partitions("packing", PARTITIONS).member(name).poll(Duration::from_millis(100));
    let mut member = group.for_correctness().join().await?;
    // Ben goes home early.
    let enough = if name == "ben" { ORDERS / 3 } else { ORDERS };
    while packed.load(Ordering::Relaxed) < enough {
        // A timeout and not only a change: the orders may be packed by others.
        let change = tokio::time::timeout(Duration::from_millis(50), member.next()).await;
        if let Ok(Some(change)) = change
            && let PartitionChange::Owned(partition) = change?
        {
            tokio::spawn(pack_all(partition, name, packed.clone()));
        }
    }
    member.leave().await?;
    println!("{name} has left");
    Ok(())
}

/// Packs the orders of one partition. When the group wants the partition back, the order under way is finished, and no other begun.
async fn pack_all(partition: Partition, name: &'static str, packed: Arc<AtomicU64>) {
    let mine = |order: &u64| partition_of(order.to_string(), PARTITIONS) == partition.number();
    for order in (0..ORDERS).filter(mine) {
        if partition.is_revoked() {
            return;
        }
        match pack(&partition, order, name) {
            Ok(true) => _ = packed.fetch_add(1, Ordering::Relaxed),
            Ok(false) => {} // an earlier owner has packed it
            Err(error) => return eprintln!("{name} stops: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Keep the partition until the group wants it back; dropped at once, it would be owned again.
    partition.revoked().await;
}

/// Packs one order, unless it is packed. The fence goes to the database in the transaction that writes.
fn pack(partition: &Partition, order: u64, name: &str) -> Result<bool, Error> {
    let mut db = database("orders.db", SCHEMA)?;
    let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    sqlite::apply(&tx, &format!("packing/{}", partition.number()), partition.fence())?;
    let number = i64::try_from(order)?;
    let new = tx.execute("INSERT OR IGNORE INTO packed VALUES (?1, ?2)", rusqlite::params![number, name])?;
    tx.commit()?;
    Ok(new == 1)
}
