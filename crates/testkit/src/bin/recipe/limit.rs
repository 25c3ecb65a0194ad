//! Processes that take tokens of one rate limit at the same time.

use std::path::Path;
use std::time::Duration;

use lockkeeper::limit::{PER_SECOND, RateLimit};
use lockkeeper::{Clock, Error, SystemClock};

use crate::{RecipeFailure, RecipeProcess};

impl RecipeProcess {
    fn number(&self, key: &str) -> u64 {
        self.arg(key).parse().expect("a number")
    }

    fn rate_limit(&self) -> RateLimit {
        self.keeper.limit("hot").rate(self.number("rate"), PER_SECOND).burst(self.number("burst"))
    }

    /// Says that it is ready, and waits until all may go.
    async fn wait_to_go(&self) -> Result<(), RecipeFailure> {
        std::fs::write(self.arg("ready"), "")?;
        while !Path::new(self.arg("go")).exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Takes tokens one by one whenever the store may have one. Prints how many it got, and when its last request, which was refused, was sent and
    /// answered.
    pub async fn limit(&self) -> Result<(), RecipeFailure> {
        let (limit, clock) = (self.rate_limit(), SystemClock);
        limit.peek().await?;
        self.wait_to_go().await?;
        let end = clock.now() + Duration::from_millis(self.number("for_ms"));
        let mut taken = 0;
        loop {
            let sent = clock.now();
            let outcome = loop {
                match limit.take(1).await {
                    // Nothing was taken: other clients were faster.
                    Err(Error::Unavailable(_)) => {}
                    outcome => break outcome?,
                }
            };
            let answered = clock.now();
            if outcome.allowed() {
                taken += 1;
            } else if sent >= end {
                println!("{taken} {} {}", sent.as_nanos(), answered.as_nanos());
                return Ok(());
            } else {
                tokio::time::sleep(outcome.retry_after().min(end.since(answered))).await;
            }
        }
    }

    /// Takes one token, holds the rest of its batch until it may go, and then takes what it can get. Prints how many it took after that.
    pub async fn prefetch(&self) -> Result<(), RecipeFailure> {
        let limit = self.rate_limit().prefetch(self.number("batch"));
        assert!(limit.take(1).await?.allowed, "a full bucket has a batch for each");
        self.wait_to_go().await?;
        let mut taken = 0;
        let start = SystemClock.now();
        while limit.take(1).await?.allowed {
            taken += 1;
        }
        println!("{taken} {} {}", start.as_nanos(), SystemClock.now().as_nanos());
        Ok(())
    }
}
