//! A future that handles its own wake-ups: when its task wakes itself during a poll, it is polled again at once.
//!
//! The task of a connection holds both ends of each body, and each end wakes the other when it has taken a chunk. The runtime
//! would put the task into a queue and wake another thread that could take it from there, twice for each request.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};

/// How many polls in a row, before the task yields to other tasks.
const MAX_POLLS: usize = 4;

const IDLE: u8 = 0;
const POLLING: u8 = 1;
/// It is being polled, and was woken meanwhile.
const WOKEN: u8 = 2;

/// The whole future of one task. It must stay in that task, because it keeps the task's first waker.
pub struct InlineWake<F> {
    future: Pin<Box<F>>,
    state: Arc<InlineWakeState>,
    waker: Waker,
}

struct InlineWakeState {
    task: OnceLock<Waker>,
    phase: AtomicU8,
}

impl<F> InlineWake<F> {
    pub fn new(future: F) -> Self {
        let state = Arc::new(InlineWakeState { task: OnceLock::new(), phase: AtomicU8::new(IDLE) });
        InlineWake { future: Box::pin(future), waker: Waker::from(state.clone()), state }
    }
}

impl<F: Future> Future for InlineWake<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let InlineWake { future, state, waker } = &mut *self;
        state.task.get_or_init(|| cx.waker().clone());
        for _ in 0..MAX_POLLS {
            state.phase.store(POLLING, Ordering::SeqCst);
            let polled = future.as_mut().poll(&mut Context::from_waker(waker));
            let idle =
                state.phase.compare_exchange(POLLING, IDLE, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            if polled.is_ready() || idle {
                return polled;
            }
        }
        state.phase.store(IDLE, Ordering::SeqCst);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for InlineWakeState {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let swapped = self.phase.compare_exchange(POLLING, WOKEN, Ordering::SeqCst, Ordering::SeqCst);
        if let (Err(IDLE), Some(task)) = (swapped, self.task.get()) {
            task.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    /// Wakes itself `times` times before it completes.
    async fn wake_self(times: usize) {
        let mut left = times;
        poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    #[tokio::test]
    async fn a_task_that_wakes_itself_often_completes_and_yields_in_between() {
        let polls = Arc::<AtomicUsize>::default();
        let (counter, work) = (polls.clone(), InlineWake::new(wake_self(100 * MAX_POLLS)));
        let mut work = Box::pin(work);
        let counted = poll_fn(move |cx| {
            counter.fetch_add(1, Ordering::Relaxed);
            work.as_mut().poll(cx)
        });
        tokio::time::timeout(Duration::from_secs(60), counted).await.unwrap();
        assert_eq!(polls.load(Ordering::Relaxed), 101);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_wake_up_from_another_thread_is_missed() {
        for _ in 0..20 {
            let (request, mut requests) = tokio::sync::mpsc::channel::<u32>(1);
            let (reply, mut replies) = tokio::sync::mpsc::channel::<u32>(1);
            let echo = tokio::spawn(InlineWake::new(async move {
                while let Some(n) = requests.recv().await {
                    wake_self(1).await;
                    reply.send(n).await.unwrap();
                }
            }));
            for n in 0..2000 {
                request.send(n).await.unwrap();
                let received = tokio::time::timeout(Duration::from_secs(60), replies.recv()).await;
                assert_eq!(received.expect("the task missed a wake-up"), Some(n));
            }
            drop(request);
            echo.await.unwrap();
        }
    }
}
