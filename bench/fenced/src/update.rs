//! The updates that the benchmark compares: without a check, and with each kind of fence check.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockkeeper_core::Fence;
use lockkeeper_fenced::postgres::Fences;
use lockkeeper_testkit::ratio::{median, median_ratio};
use tokio_postgres::{Client, Statement};

const ROUND: Duration = Duration::from_millis(400);

/// Whose update it is.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// No process checks.
    Plain,
    /// `Fences::apply`, sent together with the update.
    Applied,
    /// The table checks by itself.
    Guarded,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Plain, Kind::Applied, Kind::Guarded];

    pub fn table(self) -> &'static str {
        match self {
            Kind::Plain => "plain_orders",
            Kind::Applied => "orders",
            Kind::Guarded => "guarded_orders",
        }
    }
}

/// One connection, with everything prepared.
pub struct Worker {
    client: Client,
    fences: Fences,
    updates: [Statement; 3],
    row: i32,
    turn: u64,
}

impl Worker {
    /// Its fences begin at `turn`, above those of the earlier run on these rows.
    pub async fn new(client: Client, task: i32, turn: u64) -> Worker {
        let fences = Fences::default().prepared(&client).await.expect("guard rows");
        let mut updates = Vec::new();
        for kind in Kind::ALL {
            // The same columns for all: a fence is written by every process who checks one.
            let sql = format!("UPDATE {} SET state = $1, fence = $2 WHERE id = $3", kind.table());
            updates.push(client.prepare(&sql).await.expect("a statement"));
        }
        Worker { client, fences, updates: updates.try_into().expect("three"), row: task * 1000, turn }
    }

    /// One transaction, on rows of its own, one after the other.
    async fn once(&mut self, kind: Kind) {
        self.turn += 1;
        self.row = self.row / 1000 * 1000 + (self.row + 1) % 1000;
        let (fence, row) = (Fence::new(self.turn).expect("a fence"), self.row);
        let tx = self.client.transaction().await.expect("a transaction");
        let number = i64::try_from(self.turn).expect("a small number");
        let update = async {
            tx.execute(&self.updates[kind as usize], &[&"paid", &number, &row]).await.expect("an answer")
        };
        if kind == Kind::Applied {
            let resource = format!("orders/{row}");
            let (checked, _) = tokio::join!(self.fences.apply(&tx, &resource, fence), update);
            checked.expect("never stale");
        } else {
            update.await;
        }
        tx.commit().await.expect("a commit");
    }
}

/// Microseconds per transaction of each, all workers together, in each round beside its neighbours.
pub async fn compare(workers: &mut [Worker], rounds: usize) {
    let mut times: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        // No process is always the first.
        for nth in 0..3 {
            let kind = Kind::ALL[(nth + round) % 3];
            times[kind as usize].push(measure(workers, kind).await);
        }
    }
    let [plain, applied, guarded] = &times;
    let ratio = |other: &[f64]| median_ratio(other, plain);
    println!("{} connections: plain {:.0} µs", workers.len(), median(plain.clone()));
    println!(
        "  with apply {:.0} µs, ratio {:.2} (goal: at most 1.25)",
        median(applied.clone()),
        ratio(applied)
    );
    println!("  guarded table {:.0} µs, ratio {:.2}", median(guarded.clone()), ratio(guarded));
}

async fn measure(workers: &mut [Worker], kind: Kind) -> f64 {
    let mut each = Vec::new();
    for worker in workers.iter_mut() {
        each.push(async {
            let (began, mut count) = (Instant::now(), 0u32);
            while began.elapsed() < ROUND {
                worker.once(kind).await;
                count += 1;
            }
            f64::from(count) / began.elapsed().as_secs_f64()
        });
    }
    // All on one task: the client is not what is measured.
    let rates = join_all(each).await;
    1e6 / rates.iter().sum::<f64>()
}
