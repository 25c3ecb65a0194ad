//! A list of pictures that three workers share without a lock per picture, and a fourth worker that falls silent and comes back late.

use std::time::Duration;

use lockkeeper::claim::ClaimGroup;
use lockkeeper::{Error, Fence, Lockkeeper};
use lockkeeper_examples::{database, store_url};
use lockkeeper_fenced::sqlite::{self, rusqlite};

const THUMBNAILS: &str = "CREATE TABLE IF NOT EXISTS thumbnails (picture TEXT PRIMARY KEY, worker TEXT NOT NULL, fence INTEGER NOT NULL)";
const PICTURES: usize = 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    database("thumbnails.db", &format!("DROP TABLE IF EXISTS thumbnails; {THUMBNAILS}"))?;
    // A group of its own for each start of this program, because done pictures are recorded for a day.
    let group = keeper.claim(format!("thumbnails/{}", std::process::id()))?.lease(Duration::from_secs(1));

    // One worker takes a picture and falls silent. It is not the end of the picture.
    let silent = group.from(list())?.next().await?.expect("no worker has begun");

    // Three workers with the same list. They end when every picture is done.
    let mut workers = tokio::task::JoinSet::new();
    for n in 1..=3 {
        workers.spawn(work(group.clone(), format!("worker {n}")));
    }
    let done = workers.join_all().await.into_iter().collect::<Result<Vec<usize>, _>>()?;
    println!("3 workers have done {} of {PICTURES} pictures", done.iter().sum::<usize>());

    // The silent one goes on, and does not know how late it is. The database and the store do.
    match draw(silent.id(), "the silent worker", silent.fence()).await {
        Err(Error::Stale { presented, seen }) => {
            println!("its late write is refused: {presented} is older than {seen}")
        }
        other => panic!("the late write was not refused: {other:?}"),
    }
    match silent.complete().await {
        Err(Error::Stale { .. }) => println!("its late completion is refused"),
        other => panic!("the late completion was not refused: {other:?}"),
    }
    Ok(())
}

fn list() -> Vec<String> {
    (0..PICTURES).map(|n| format!("picture-{n:02}")).collect()
}

/// Takes pictures until there are no more, and returns how many it has done.
async fn work(group: ClaimGroup, worker: String) -> Result<usize, Error> {
    let (mut pictures, mut done) = (group.from(list())?, 0);
    while let Some(picture) = pictures.next().await? {
        // Ended before the lease is; the lease is extended for as long as it takes.
        match picture.run(draw(picture.id(), &worker, picture.fence())).await {
            Ok(Ok(())) => {
                picture.complete().await?;
                done += 1;
            }
            Ok(Err(why)) => drop(picture.fail(why.to_string()).await?),
            Err(lost) => println!("{worker}: {lost}"),
        }
    }
    Ok(done)
}

/// The work. The fence is checked in the transaction that writes.
async fn draw(picture: &str, worker: &str, fence: Fence) -> Result<(), Error> {
    let (picture, worker) = (picture.to_owned(), worker.to_owned());
    let write = move || {
        let failed = |e: rusqlite::Error| Error::Unavailable(e.to_string());
        let mut db = database("thumbnails.db", "").map_err(failed)?;
        let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(failed)?;
        sqlite::apply(&tx, &picture, fence)?;
        let number = i64::try_from(fence.get()).expect("fences are below 2^53");
        let draw = "INSERT OR REPLACE INTO thumbnails VALUES (?1, ?2, ?3)";
        tx.execute(draw, (picture, worker, number)).map_err(failed)?;
        tx.commit().map_err(failed)
    };
    tokio::task::spawn_blocking(write).await.unwrap_or_else(|e| Err(Error::Unknown(e.to_string())))
}
