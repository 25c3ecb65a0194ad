//! The requests in flight on one connection, and whether its server still replies.
//!
//! The server decides when a request is answered, not the caller: a caller that drops its future has *abandoned* the
//! request, and the reply is still owed. Counting an abandoned request as answered would hide a silent server for as long
//! as impatient callers keep coming. So the connection sends a probe of its own behind abandoned requests. A server
//! replies in order, so the reply to the probe settles every request that was abandoned before the probe was sent.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The accounting of one connection, shared by its callers and by the task that runs the connection.
#[derive(Debug, Default)]
pub struct InFlight {
    sent: AtomicU64,
    /// Requests that have a reply, and abandoned ones that a probe has settled.
    answered: AtomicU64,
    /// All requests whose caller went away.
    abandoned: AtomicU64,
    closed: AtomicBool,
    /// Whether the watcher waits for a request. Callers wake it only then, so a request usually costs no wake-up.
    idle: AtomicBool,
    changed: Notify,
}

/// One request in flight. Dropping it without [`Request::answered`] abandons it.
#[derive(Debug)]
#[must_use = "dropping a request abandons it"]
pub struct Request<'a> {
    in_flight: &'a InFlight,
    answered: bool,
}

impl Request<'_> {
    /// The reply is here, or the connection has reported its end to the caller.
    pub fn answered(mut self) {
        self.answered = true;
        self.in_flight.answered.fetch_add(1, SeqCst);
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.in_flight.abandoned.fetch_add(1, SeqCst);
            self.in_flight.changed.notify_one();
        }
    }
}

impl InFlight {
    /// Counts a request that is about to be sent.
    pub fn begin(&self) -> Request<'_> {
        self.sent.fetch_add(1, SeqCst);
        if self.idle.load(SeqCst) && self.idle.swap(false, SeqCst) {
            self.changed.notify_one();
        }
        Request { in_flight: self, answered: false }
    }

    /// The connection has ended: no request may be sent on it any more.
    pub fn close(&self) {
        self.closed.store(true, SeqCst);
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    /// Ends once a request has been in flight for `timeout` and not one reply came meanwhile: after `timeout` at the
    /// earliest, after twice that at the latest. One timer serves all requests: if one reply is late, all behind it are.
    ///
    /// `probe` sends any cheap request behind all others and ends with its reply: `true` for any reply, `false` if the
    /// connection broke, which ends this at once. One probe at a time is in flight, and only after callers went away.
    pub async fn silence<P: Future<Output = bool>>(&self, timeout: Duration, probe: impl Fn() -> P) {
        let mut probes = Probes { settled: 0, current: None };
        loop {
            let before = self.wait_for_request().await;
            let tick = Instant::now() + timeout;
            while Instant::now() < tick {
                probes.start(self, &probe);
                tokio::select! {
                    () = sleep_until(tick) => {}
                    alive = probes.reply() => match alive {
                        true => probes.settle(self),
                        false => return,
                    },
                    () = self.changed.notified() => {}
                }
            }
            if self.answered.load(SeqCst) == before && !self.is_settled() {
                return;
            }
        }
    }

    fn is_settled(&self) -> bool {
        self.sent.load(SeqCst) == self.answered.load(SeqCst)
    }

    /// Waits until a request is in flight. Returns how many requests were answered in the same look that found one: a count that
    /// is read later may have the reply to that request, and the next request would be called silent though it is young.
    async fn wait_for_request(&self) -> u64 {
        loop {
            self.idle.store(true, SeqCst);
            let answered = self.answered.load(SeqCst);
            if self.sent.load(SeqCst) != answered {
                self.idle.store(false, SeqCst);
                return answered;
            }
            self.changed.notified().await;
        }
    }
}

/// The probe in flight, and what the ones before it have settled.
struct Probes<P> {
    /// How many abandoned requests are settled.
    settled: u64,
    /// How many requests were abandoned before the current probe was sent, and its reply.
    current: Option<(u64, Pin<Box<P>>)>,
}

impl<P: Future<Output = bool>> Probes<P> {
    fn start(&mut self, in_flight: &InFlight, probe: impl Fn() -> P) {
        let abandoned = in_flight.abandoned.load(SeqCst);
        if self.current.is_none() && abandoned > self.settled {
            self.current = Some((abandoned, Box::pin(probe())));
        }
    }

    /// Never ends if no probe is in flight.
    async fn reply(&mut self) -> bool {
        match &mut self.current {
            Some((_, probe)) => probe.as_mut().await,
            None => std::future::pending().await,
        }
    }

    fn settle(&mut self, in_flight: &InFlight) {
        if let Some((abandoned, _)) = self.current.take() {
            in_flight.answered.fetch_add(abandoned - self.settled, SeqCst);
            self.settled = abandoned;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;

    use tokio::time::{sleep, timeout};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    async fn never() -> bool {
        pending().await
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_reply_is_silence_and_an_idle_connection_is_not() {
        let in_flight = InFlight::default();
        let mut silence = pin!(in_flight.silence(TIMEOUT, never));
        assert!(timeout(TIMEOUT * 100, &mut silence).await.is_err(), "nothing was sent");
        for _ in 0..100 {
            let request = in_flight.begin();
            assert!(timeout(TIMEOUT / 2, &mut silence).await.is_err());
            request.answered();
        }
        assert!(timeout(TIMEOUT * 100, &mut silence).await.is_err(), "all is answered");
        let _request = in_flight.begin();
        timeout(TIMEOUT * 2, silence).await.expect("the server does not reply");
    }

    /// Callers that give up faster than the timeout used to keep a dead connection alive for ever.
    #[tokio::test(start_paused = true)]
    async fn impatient_callers_do_not_hide_silence() {
        let in_flight = InFlight::default();
        let impatient = async {
            loop {
                let request = in_flight.begin();
                sleep(millis(50)).await;
                drop(request);
            }
        };
        tokio::select! {
            () = impatient => {}
            () = in_flight.silence(TIMEOUT, never) => {}
            () = sleep(TIMEOUT * 2) => panic!("the silence was not noticed"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_probes_is_not_silent_however_many_callers_go_away() {
        let in_flight = InFlight::default();
        let probes = AtomicU64::new(0);
        let probe = || async {
            probes.fetch_add(1, SeqCst);
            sleep(millis(20)).await;
            true
        };
        let impatient = async {
            for _ in 0..1000 {
                drop(in_flight.begin());
                sleep(millis(5)).await;
            }
            sleep(TIMEOUT * 100).await;
        };
        tokio::select! {
            () = impatient => {}
            () = in_flight.silence(TIMEOUT, probe) => panic!("it replies"),
        }
        assert!(in_flight.is_settled());
        assert!((1..=260).contains(&probes.load(SeqCst)), "one probe at a time: {probes:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_behind_slow_replies_has_time_while_replies_come() {
        let in_flight = InFlight::default();
        let slow = async {
            let queue: Vec<_> = (0..10).map(|_| in_flight.begin()).collect();
            drop(in_flight.begin());
            for request in queue {
                sleep(TIMEOUT / 2).await;
                request.answered();
            }
        };
        let probe = || async {
            sleep(TIMEOUT * 5).await;
            true
        };
        tokio::select! {
            () = slow => {}
            () = in_flight.silence(TIMEOUT, probe) => panic!("replies came all the time"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_finds_the_connection_broken_ends_the_watch() {
        let in_flight = InFlight::default();
        drop(in_flight.begin());
        timeout(millis(1), in_flight.silence(TIMEOUT, || async { false })).await.expect("it is broken");
    }
}
