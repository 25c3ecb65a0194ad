//! Ten films that three transcoders of the fleet may work on at a time, and a catalogue that many read and one task writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::{Error, Lockkeeper};
use lockkeeper_examples::store_url;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let films = (0..10).map(|_| {
        let (transcoders, busy, most) = (keeper.semaphore("transcoders", 3), busy.clone(), most.clone());
        tokio::spawn(async move {
            let permit = transcoders.acquire().await?;
            most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
            busy.fetch_sub(1, Ordering::SeqCst);
            permit.release().await
        })
    });
    let films: Vec<_> = films.collect();
    let count = films.len();
    for film in films {
        film.await??;
    }
    let within = if most.load(Ordering::SeqCst) <= 3 { "at most 3" } else { "more than 3" };
    println!("{count} films are transcoded, {within} at a time");

    let catalogue = keeper.rw_lock("catalogue");
    let (one, other) = (catalogue.read().await?, catalogue.read().await?);
    println!("two read; a writer now: {}", if catalogue.try_write().await?.is_some() { "yes" } else { "no" });
    if let Err(Error::Unsupported(_)) = one.upgrade() {
        println!("a reader does not become the writer");
    }
    one.release().await?;
    other.release().await?;
    // The writer goes on as a reader, and no other writer comes in between.
    let reader = catalogue.write().await?.downgrade().await?;
    println!(
        "it is written, and read: {}",
        if catalogue.try_write().await?.is_some() { "changed" } else { "unchanged" }
    );
    reader.release().await?;
    Ok(())
}
