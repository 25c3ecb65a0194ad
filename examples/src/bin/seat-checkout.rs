//! Seats that are sold once: twenty customers want three seats, a couple wants two seats or none, and one customer is late.

use std::time::Duration;

use lockkeeper::{Error, Fence, Lockkeeper};
use lockkeeper_examples::{database, store_url};
use lockkeeper_fenced::sqlite::{self, rusqlite};

const SEATS: &str = "DROP TABLE IF EXISTS seats; CREATE TABLE seats (name TEXT PRIMARY KEY, customer TEXT); \
    INSERT INTO seats (name) VALUES ('12A'), ('12B'), ('12C'), ('14E'), ('14F'), ('15A')";

/// How long the store waits for a checkout from which it hears nothing.
const TTL: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    database("seats.db", SEATS)?;

    // Twenty customers at once. A customer who finds a seat in another checkout tries the next seat.
    let mut customers = tokio::task::JoinSet::new();
    for n in 1..=20 {
        customers.spawn(any_seat(keeper.clone(), format!("customer {n}")));
    }
    let seats = customers.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
    println!("{} of 20 customers have one of 3 seats", seats.into_iter().flatten().count());

    // Two seats or none, in one step: two couples that name the seats in different order cannot block each other.
    let both = keeper.lock_all(["seat/14F", "seat/14E"]).ttl(TTL).acquire().await?;
    for seat in ["14E", "14F"] {
        both.try_run(sell(seat, "the couple", both.fence())).await?;
    }
    both.release().await?;
    println!("the couple has 14E and 14F");

    // A customer is late: an operator breaks the lock, the next customer pays, and the database refuses the late payment,
    // because it has seen a newer fence.
    let late = keeper.lock("seat/15A").ttl(TTL).acquire().await?;
    keeper.break_lock("seat/15A", "the checkout takes too long").await?;
    let next = keeper.lock("seat/15A").ttl(TTL).acquire().await?;
    sell("15A", "the next customer", next.fence()).await?;
    match sell("15A", "the late customer", late.fence()).await {
        Err(Error::Stale { presented, seen }) => {
            println!("the late customer is refused: fence {presented} is older than {seen}");
        }
        other => panic!("the late customer was not refused: {other:?}"),
    }
    next.release().await?;
    drop(late);
    keeper.settle().await; // releases of dropped guards go out in the background: wait for them
    Ok(())
}

/// The first of three seats that is neither sold nor in another checkout.
async fn any_seat(keeper: Lockkeeper, customer: String) -> Result<Option<&'static str>, Error> {
    for seat in ["12A", "12B", "12C"] {
        let request = keeper.lock(format!("seat/{seat}")).label(&customer).ttl(TTL);
        let Some(guard) = request.try_acquire().await? else { continue };
        let sold = guard.try_run(sell(seat, &customer, guard.fence())).await?;
        guard.release().await?;
        if sold {
            return Ok(Some(seat));
        }
    }
    Ok(None)
}

/// Sells the seat, and says whether it was free. The fence is checked in the transaction that writes.
async fn sell(seat: &'static str, customer: &str, fence: Fence) -> Result<bool, Error> {
    let customer = customer.to_owned();
    let write = move || {
        let failed = |e: rusqlite::Error| Error::Unavailable(e.to_string());
        let mut db = database("seats.db", "").map_err(failed)?;
        let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(failed)?;
        sqlite::apply(&tx, &format!("seat/{seat}"), fence)?;
        let sell = "UPDATE seats SET customer = ?1 WHERE name = ?2 AND customer IS NULL";
        let sold = tx.execute(sell, (customer, seat)).map_err(failed)?;
        tx.commit().map_err(failed)?;
        Ok(sold == 1)
    };
    tokio::task::spawn_blocking(write).await.unwrap_or_else(|e| Err(Error::Unknown(e.to_string())))
}
