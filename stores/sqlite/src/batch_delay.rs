//! The adaptive batching delay: how long the worker waits for callers that it has just answered, because they most likely
//! send their next request within microseconds.

use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long the worker waits after the last message.
const BATCH_DELAY: Duration = Duration::from_micros(50);
/// How long the worker waits at most for one batch.
const BATCH_DELAY_LIMIT: Duration = BATCH_DELAY.saturating_mul(4);
/// How often an idle worker runs its `idle` function.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// Handles messages until a batch is complete: `handle` returns whether the worker has to stop, and `is_complete` whether
/// the batch has as many requests as the worker has just answered. Returns whether the worker has to stop.
pub(crate) fn collect_batch<W, M>(
    worker: &mut W,
    messages: &mpsc::Receiver<M>,
    handle: impl Fn(&mut W, M) -> bool,
    is_complete: impl Fn(&W) -> bool,
) -> bool {
    let began = Instant::now();
    let mut last = began;
    loop {
        match messages.try_recv() {
            Ok(message) => {
                if handle(worker, message) {
                    return true;
                }
                last = Instant::now();
            }
            Err(_) if is_complete(worker) => return false,
            Err(_) if last.elapsed() > BATCH_DELAY || began.elapsed() > BATCH_DELAY_LIMIT => return false,
            Err(_) => std::thread::yield_now(),
        }
    }
}

/// Waits for the next message. With `soon` the thread first spins for the batching delay, because waking a sleeping thread
/// takes longer than that. `idle` runs about once a second while no message comes.
pub(crate) fn next_message<M>(messages: &mpsc::Receiver<M>, soon: bool, mut idle: impl FnMut()) -> Option<M> {
    let began = Instant::now();
    while soon && began.elapsed() < BATCH_DELAY {
        match messages.try_recv() {
            Ok(message) => return Some(message),
            Err(mpsc::TryRecvError::Disconnected) => return None,
            Err(mpsc::TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
    loop {
        match messages.recv_timeout(IDLE_INTERVAL) {
            Ok(message) => return Some(message),
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
            Err(mpsc::RecvTimeoutError::Timeout) => idle(),
        }
    }
}
