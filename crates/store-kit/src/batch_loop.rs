//! The loop of a sender of batches: which requests leave when. The store decides which of them leave together, and sends them.

use std::collections::VecDeque;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::batch_delay::BatchDelay;

/// How many batches are in flight: one that the servers process, and one on its way to them.
const MAX_IN_FLIGHT: usize = 2;
/// How many requests the loop takes from the channel at a time.
const RECEIVED: usize = 128;

/// Decides which requests leave together.
pub trait BatchRule {
    /// A request of one task.
    type Request;
    /// The result of sending a batch, for [`BatchRule::finished`].
    type Sent;

    /// Removes from `waiting` the requests that may leave together now, and those whose callers have gone.
    fn next_batch(&mut self, waiting: &mut VecDeque<Self::Request>) -> Vec<Self::Request>;

    /// A batch has all its replies.
    fn finished(&mut self, _sent: Self::Sent) {}
}

/// Sends the requests of many tasks until the channel is closed. The first request leaves at once; the requests that arrive while it is
/// in flight leave together.
///
/// A second batch leaves only if it is no smaller than the requests in flight. So callers that got their replies together send together
/// again, instead of one by one, and no caller waits for longer than one batch takes. When the channel is closed, the batches in flight
/// are dropped.
pub async fn run_batches<R, F>(
    mut incoming: UnboundedReceiver<R::Request>,
    mut rule: R,
    send: impl Fn(Vec<R::Request>) -> F,
) where
    R: BatchRule,
    F: Future<Output = R::Sent>,
{
    let mut in_flight = FuturesUnordered::new();
    let mut waiting = VecDeque::new();
    let (mut requests_in_flight, mut received, mut delay) = (0, Vec::new(), BatchDelay::default());
    loop {
        if in_flight.is_empty() && !waiting.is_empty() {
            delay.wait(&mut incoming, &mut waiting).await;
        }
        while in_flight.len() < MAX_IN_FLIGHT && waiting.len() >= requests_in_flight {
            let batch = rule.next_batch(&mut waiting);
            if batch.is_empty() {
                break;
            }
            requests_in_flight += batch.len();
            in_flight.push(timed(batch.len(), send(batch)));
        }
        tokio::select! {
            Some((count, took, sent)) = in_flight.next(), if !in_flight.is_empty() => {
                requests_in_flight -= count;
                delay = BatchDelay::after(count + waiting.len(), took);
                rule.finished(sent);
            }
            count = incoming.recv_many(&mut received, RECEIVED) => {
                if count == 0 {
                    return;
                }
                waiting.extend(received.drain(..));
            }
        }
    }
}

async fn timed<S>(count: usize, sending: impl Future<Output = S>) -> (usize, Duration, S) {
    let started = Instant::now();
    let sent = sending.await;
    (count, started.elapsed(), sent)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// Requests are letters. One letter is in one batch at a time, `x` is a request whose caller has gone.
    #[derive(Default)]
    struct OfDifferentLetters(HashSet<char>);

    impl BatchRule for OfDifferentLetters {
        type Request = char;
        type Sent = Vec<char>;

        fn next_batch(&mut self, waiting: &mut VecDeque<char>) -> Vec<char> {
            let (mut batch, mut later) = (Vec::new(), VecDeque::new());
            for letter in waiting.drain(..).filter(|letter| *letter != 'x') {
                if self.0.insert(letter) { batch.push(letter) } else { later.push_back(letter) }
            }
            *waiting = later;
            batch
        }

        fn finished(&mut self, sent: Vec<char>) {
            sent.iter().for_each(|letter| assert!(self.0.remove(letter)));
        }
    }

    /// The batches that have left, each with the sender of its reply.
    type Left = mpsc::UnboundedReceiver<(String, oneshot::Sender<()>)>;

    fn start() -> (mpsc::UnboundedSender<char>, Left, tokio::task::JoinHandle<()>) {
        let ((requests, incoming), (left, batches)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let send = move |batch: Vec<char>| {
            let (reply, replied) = oneshot::channel();
            left.send((batch.iter().collect(), reply)).unwrap();
            async move {
                _ = replied.await;
                batch
            }
        };
        (requests, batches, tokio::spawn(run_batches(incoming, OfDifferentLetters::default(), send)))
    }

    fn request(requests: &mpsc::UnboundedSender<char>, letters: &str) {
        letters.chars().for_each(|letter| requests.send(letter).unwrap());
    }

    async fn next(left: &mut Left) -> (String, oneshot::Sender<()>) {
        let left = tokio::time::timeout(Duration::from_secs(60), left.recv()).await;
        left.expect("a batch leaves in time").expect("the loop runs")
    }

    /// Lets the loop do all that it can do without a reply.
    async fn none_leaves(left: &mut Left) {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert!(left.try_recv().is_err(), "a batch left too early");
    }

    #[tokio::test]
    async fn requests_that_arrive_meanwhile_leave_together() {
        let (requests, mut left, _task) = start();
        request(&requests, "a");
        let (batch, first) = next(&mut left).await;
        assert_eq!(batch, "a");
        request(&requests, "bc");
        let (batch, second) = next(&mut left).await;
        assert_eq!(batch, "bc");
        request(&requests, "defg");
        none_leaves(&mut left).await; // two batches are in flight
        first.send(()).unwrap();
        assert_eq!(next(&mut left).await.0, "defg");
        drop(second);
    }

    #[tokio::test]
    async fn a_second_batch_is_no_smaller_than_the_first() {
        let (requests, mut left, _task) = start();
        request(&requests, "abc");
        let (batch, first) = next(&mut left).await;
        assert_eq!(batch, "abc");
        request(&requests, "de");
        none_leaves(&mut left).await;
        request(&requests, "f");
        assert_eq!(next(&mut left).await.0, "def");
        drop(first);
    }

    #[tokio::test]
    async fn a_blocked_request_leaves_when_the_batch_before_it_has_its_replies() {
        let (requests, mut left, _task) = start();
        request(&requests, "a");
        let (_, first) = next(&mut left).await;
        request(&requests, "axa");
        none_leaves(&mut left).await;
        first.send(()).unwrap();
        let (batch, second) = next(&mut left).await;
        assert_eq!(batch, "a");
        none_leaves(&mut left).await;
        second.send(()).unwrap();
        assert_eq!(next(&mut left).await.0, "a");
    }

    #[tokio::test]
    async fn a_closed_channel_ends_the_loop_and_drops_the_batches_in_flight() {
        let (requests, mut left, task) = start();
        request(&requests, "a");
        let (_, reply) = next(&mut left).await;
        drop(requests);
        task.await.unwrap();
        assert!(reply.is_closed());
    }
}
