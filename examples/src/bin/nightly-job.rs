//! A job that runs once per day, however many hosts start it: start it twice, and the second run finds the day settled.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockkeeper::windows::Window;

use lockkeeper::{Fence, Lockkeeper};
use lockkeeper_examples::{database, store_url};
use lockkeeper_fenced::sqlite::{self, rusqlite};

type Error = Box<dyn std::error::Error + Send + Sync>;

const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS ledger (day INTEGER PRIMARY KEY, amount INTEGER NOT NULL)";
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    let now_ms = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
    let day = now_ms / DAY_MS;

    let guard = keeper
        .lock("nightly-settlement")
        .label("nightly-job")
        .wait(Duration::from_secs(60)) // another host settles now: wait for its result
        .for_correctness() // settling twice is harm, so refuse a store that can forget a lock
        .acquire()
        .await?;
    match keeper.windows("nightly-settlement").begin(&guard, day * DAY_MS).await? {
        Window::Done(last) => {
            let host = last.host.unwrap_or_default();
            println!("day {day} is settled already, by {host} with fence {}", last.fence);
        }
        Window::Ours(run) => {
            // The lock is lost or the work fails: one `?` for both. The work is ended before the deadline.
            guard.try_run(settle(day, run.fence())).await?;
            println!("day {day} settled with fence {}", run.fence());
            run.finish(&guard, 0).await?;
        }
    }
    guard.release().await?;
    Ok(())
}

/// The work. The fence goes to the database in the transaction that writes: a host that was paused in the middle, and lost
/// the lock meanwhile, is refused with `Error::Stale`.
async fn settle(day: u64, fence: Fence) -> Result<(), Error> {
    let write = move || -> Result<(), Error> {
        let mut db = database("ledger.db", SCHEMA)?;
        let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        sqlite::apply(&tx, "nightly-settlement", fence)?;
        tx.execute("INSERT OR REPLACE INTO ledger VALUES (?1, 4711)", [i64::try_from(day)?])?;
        Ok(tx.commit()?)
    };
    tokio::task::spawn_blocking(write).await?
}
