//! How long a client may be silent before it has said what it wants.
//!
//! One timer for each connection looks at a time that is written down. A timer for each request, set and taken back, costs more
//! than the check of its fence.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};

/// Until when the head of the next request of a connection must have come.
#[derive(Clone, Debug)]
pub struct Patience {
    began: Instant,
    most: Duration,
    /// In microseconds from the beginning.
    until: Arc<AtomicU64>,
}

/// Nobody waits: a request is under way.
const NEVER: u64 = u64::MAX;

impl Patience {
    pub fn new(most: Duration) -> Self {
        let patience = Patience { began: Instant::now(), most, until: Arc::default() };
        patience.ends(patience.began + most);
        patience
    }

    fn ends(&self, at: Instant) {
        let micros = at.saturating_duration_since(self.began).as_micros();
        self.until.store(u64::try_from(micros).unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// The head has come.
    pub fn heard(&self) {
        self.until.store(NEVER, Ordering::Relaxed);
    }

    /// Ends when the head has not come.
    pub async fn over(self) {
        loop {
            let (now, until) = (Instant::now(), self.until.load(Ordering::Relaxed));
            let next = match until {
                NEVER => now + self.most,
                until => self.began + Duration::from_micros(until),
            };
            if next <= now {
                return;
            }
            tokio::time::sleep_until(next.into()).await;
        }
    }
}

/// hyper says when it begins to wait for a head, and until when it would.
impl Timer for Patience {
    fn sleep(&self, most: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(Instant::now() + most)
    }

    fn sleep_until(&self, at: Instant) -> Pin<Box<dyn Sleep>> {
        self.ends(at);
        Box::pin(Written)
    }
}

/// It is written down, and somebody else looks.
struct Written;

impl Sleep for Written {}

impl Future for Written {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
