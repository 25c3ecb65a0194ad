//! An HTTP service with many instances: it charges an order once, ships under a lock with fenced rows, and elects one instance
//! that sends reminders. The store is a SQLite file here, and `LOCKKEEPER_STORE=postgres://…` in production.

mod problem;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::{get, post};
use lockkeeper::{Error, Fence, Lockkeeper};
use lockkeeper_examples::{database, store_url};
use lockkeeper_fenced::sqlite::{self, rusqlite};
use tokio::sync::Notify;

use problem::Problem;

const ORDERS: &str = "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL); \
    INSERT OR IGNORE INTO orders VALUES (42, 'open'), (43, 'open')";

#[derive(Clone)]
struct App {
    keeper: Lockkeeper,
    orders: Arc<Mutex<rusqlite::Connection>>,
    shutdown: Arc<Notify>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let app = App {
        keeper: Lockkeeper::open(&store_url()).await?,
        orders: Arc::new(Mutex::new(database("orders.db", ORDERS)?)),
        shutdown: Arc::default(),
    };
    let routes = Router::new()
        .route("/orders/{id}", get(order))
        .route("/orders/{id}/pay", post(pay))
        .route("/orders/{id}/ship", post(ship))
        .route("/leader", get(leader))
        .route("/shutdown", post(shutdown))
        .with_state(app.clone());
    let listen = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = tokio::net::TcpListener::bind(listen).await?;
    let address = listener.local_addr()?.to_string();
    println!("listening on {address}");

    let reminders = tokio::spawn(lead(app.clone(), address));
    let stop = app.clone();
    axum::serve(listener, routes)
        .with_graceful_shutdown(async move { stop.shutdown.notified().await })
        .await?;
    reminders.abort();
    let _ = reminders.await;
    app.keeper.settle().await; // the guard that the task dropped is released before the process ends
    println!("ended");
    Ok(())
}

async fn order(State(app): State<App>, Path(id): Path<u32>) -> Result<String, Problem> {
    let read = "SELECT state FROM orders WHERE id = ?1";
    let state = app.on_orders(move |db| db.query_row(read, [id], |row| row.get::<_, String>(0))).await?;
    state.map(|state| format!("order {id} is {state}\n")).map_err(|e| Problem::Rejected(e.to_string()))
}

/// Once: the first request pays, every other request for the order gets the stored answer of the first.
async fn pay(State(app): State<App>, Path(id): Path<u32>) -> Result<String, Problem> {
    let key = format!("pay/{id}");
    let paid = app
        .keeper
        .once(&key)
        .for_correctness()
        .wait(Duration::from_secs(5)) // another instance pays now: wait for its result
        .run(|fence| async move {
            // A mark belongs to one lock. `ship` has another lock, so it has another mark for the same row.
            match app.set_state(id, "paid", key, fence).await {
                Ok(true) => Ok(format!("order {id} is paid, with fence {fence}")),
                Ok(false) => Err(format!("there is no order {id}")),
                Err(error) => Err(error.to_string()),
            }
        })
        .await?;
    let answer = paid.result.map_err(Problem::Rejected)?;
    Ok(format!("{answer}{}\n", if paid.replayed { " (stored answer)" } else { "" }))
}

/// A lock for the work, and the fence in the transaction: an instance that was paused and lost the lock is refused.
async fn ship(State(app): State<App>, Path(id): Path<u32>) -> Result<String, Problem> {
    let name = format!("ship/{id}");
    let guard = app.keeper.lock(&name).wait(Duration::from_secs(2)).for_correctness().acquire().await?;
    let fence = guard.fence();
    let shipped = guard.try_run(app.set_state(id, "shipped", name, fence)).await?;
    guard.release().await?;
    if !shipped {
        return Err(Problem::Rejected(format!("there is no order {id}")));
    }
    Ok(format!("order {id} is shipped, with fence {fence}\n"))
}

async fn leader(State(app): State<App>) -> Result<String, Problem> {
    let leader = app.keeper.election("reminders").leader().await?;
    Ok(match leader {
        Some(leader) => format!("{} leads in term {}\n", leader.value.unwrap_or_default(), leader.term),
        None => "no instance leads\n".into(),
    })
}

async fn shutdown(State(app): State<App>) -> &'static str {
    app.shutdown.notify_one();
    "ending\n"
}

/// One instance leads, the others wait in the queue of the election. Runs until the task is aborted.
async fn lead(app: App, address: String) {
    let election = app.keeper.election("reminders").ttl(Duration::from_secs(10));
    loop {
        let ended = match election.campaign(&address).await {
            Ok(leader) => {
                println!("leading in term {}", leader.term());
                leader.guard().run(send_reminders(leader.term())).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            eprintln!("not leading any more: {error}");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The work of the leader. The library ends it before the deadline if the term is lost; every message that it sends carries the term.
async fn send_reminders(_term: Fence) {
    loop {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

impl App {
    /// Changes an order if no newer fence was seen under `mark`; `false` if there is no such order.
    async fn set_state(
        &self,
        id: u32,
        state: &'static str,
        mark: String,
        fence: Fence,
    ) -> Result<bool, Error> {
        let failed = |e: rusqlite::Error| Error::Unavailable(e.to_string());
        self.on_orders(move |db| {
            let tx =
                db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(failed)?;
            sqlite::apply(&tx, &mark, fence)?;
            let changed =
                tx.execute("UPDATE orders SET state = ?1 WHERE id = ?2", (state, id)).map_err(failed)?;
            tx.commit().map_err(failed)?;
            Ok(changed == 1)
        })
        .await?
    }

    /// Runs `work` on a thread that may block.
    async fn on_orders<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut rusqlite::Connection) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let orders = self.orders.clone();
        let work = move || work(&mut orders.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        tokio::task::spawn_blocking(work).await.map_err(|e| Error::Unknown(e.to_string()))
    }
}
