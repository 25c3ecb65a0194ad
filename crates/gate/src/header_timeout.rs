//! The time-out for the head of a request: how long a client may be silent before it has sent one.
//!
//! hyper would set and cancel a timer for every request, which costs more than the check of the fence. Here the timer that
//! hyper asks for only stores its end, and one task per connection compares that end with the clock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};

/// Until when the client must have sent the head of the next request on a connection. Clones share the deadline.
#[derive(Clone, Debug)]
pub struct HeaderTimeout {
    started: Instant,
    limit: Duration,
    /// The deadline, in microseconds after `started`.
    deadline: Arc<AtomicU64>,
}

/// The deadline while a request is in flight.
const NEVER: u64 = u64::MAX;

impl HeaderTimeout {
    pub fn new(limit: Duration) -> Self {
        let timeout = HeaderTimeout { started: Instant::now(), limit, deadline: Arc::default() };
        timeout.set_deadline(timeout.started + limit);
        timeout
    }

    fn set_deadline(&self, at: Instant) {
        let micros = at.saturating_duration_since(self.started).as_micros();
        self.deadline.store(u64::try_from(micros).unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// The client has sent a head: no deadline until hyper waits for the next one.
    pub fn stop(&self) {
        self.deadline.store(NEVER, Ordering::Relaxed);
    }

    /// Completes when the deadline has passed without a head.
    pub async fn expired(self) {
        loop {
            let (now, deadline) = (Instant::now(), self.deadline.load(Ordering::Relaxed));
            let next = match deadline {
                NEVER => now + self.limit,
                deadline => self.started + Duration::from_micros(deadline),
            };
            if next <= now {
                return;
            }
            tokio::time::sleep_until(next.into()).await;
        }
    }
}

/// hyper asks for a sleep when it begins to wait for a head.
impl Timer for HeaderTimeout {
    fn sleep(&self, limit: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(Instant::now() + limit)
    }

    fn sleep_until(&self, at: Instant) -> Pin<Box<dyn Sleep>> {
        self.set_deadline(at);
        Box::pin(NeverReady)
    }
}

/// The sleep that hyper gets: it never completes, because [`HeaderTimeout::expired`] ends the connection instead.
struct NeverReady;

impl Sleep for NeverReady {}

impl Future for NeverReady {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
