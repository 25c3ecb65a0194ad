//! Exchange rates from a slow source: fifty pages want them at once, one of them asks, and an outage leaves the old rates.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper::Lockkeeper;
use lockkeeper::cached::{Cached, ValueState};
use lockkeeper_examples::store_url;

/// How often the source was asked.
static ASKED: AtomicU32 = AtomicU32::new(0);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let keeper = Lockkeeper::open(&store_url()).await?;
    // A key of its own for each run of this program.
    let key = Arc::new(format!("rates/{}", std::process::id()));

    // Fifty pages at once. One asks the source, the others wait for its answer.
    let mut pages = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (keeper, key) = (keeper.clone(), key.clone());
        pages.spawn(async move { rates(&keeper, &key).get(|_| ask()).await });
    }
    let shown = pages.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
    assert!(shown.iter().all(|page| page.value == shown[0].value));
    println!(
        "{} pages show {} euros, and the source was asked {} time",
        shown.len(),
        shown[0].value,
        asked()
    );

    // Other rates get old, and then the source is down: the old ones are shown, and no other page asks for a while.
    let key = format!("{key}/old");
    let brief = rates(&keeper, &key).ttl(Duration::from_millis(200)).early_refresh(0.0);
    brief.get(|_| ask()).await?;
    while rates(&keeper, &key).current().await?.is_some_and(|found| found.state == ValueState::Fresh) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let down = async || {
        ASKED.fetch_add(1, Ordering::Relaxed);
        Err::<String, _>("the source is down")
    };
    for _ in 0..3 {
        let old = rates(&keeper, &key).get(|_| down()).await?;
        let why = old.refresh_error.unwrap_or_default();
        println!("{} euros from before, because {why}; asked {} times", old.value, asked());
    }
    Ok(())
}

fn rates(keeper: &Lockkeeper, key: &str) -> Cached {
    keeper
        .cached(key)
        .ttl(Duration::from_secs(60))
        .stale_while(Duration::from_secs(600))
        .back_off(Duration::from_secs(60))
}

/// The slow source.
async fn ask() -> Result<String, &'static str> {
    ASKED.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(100)).await;
    Ok("0.92".into())
}

fn asked() -> u32 {
    ASKED.load(Ordering::Relaxed)
}
