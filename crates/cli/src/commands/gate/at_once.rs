//! Work that wakes itself is gone on with at once.
//!
//! Both ends of a body are in one task here, and each wakes the other when it has taken something. For the runtime that is a task
//! to put into a queue, and a thread to wake that could take it from there: twice for each request, and for nothing.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};

/// How often in a row, before others have their turn.
const TIMES: usize = 4;

const RESTS: u8 = 0;
const RUNS: u8 = 1;
/// It runs, and was woken meanwhile.
const AGAIN: u8 = 2;

/// A task's whole work. It must stay in that task.
pub struct AtOnce<F> {
    work: Pin<Box<F>>,
    bell: Arc<Bell>,
    waker: Waker,
}

struct Bell {
    task: OnceLock<Waker>,
    state: AtomicU8,
}

impl<F> AtOnce<F> {
    pub fn new(work: F) -> Self {
        let bell = Arc::new(Bell { task: OnceLock::new(), state: AtomicU8::new(RESTS) });
        AtOnce { work: Box::pin(work), waker: Waker::from(bell.clone()), bell }
    }
}

impl<F: Future> Future for AtOnce<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let AtOnce { work, bell, waker } = &mut *self;
        bell.task.get_or_init(|| cx.waker().clone());
        for _ in 0..TIMES {
            bell.state.store(RUNS, Ordering::SeqCst);
            let done = work.as_mut().poll(&mut Context::from_waker(waker));
            let rests = bell.state.compare_exchange(RUNS, RESTS, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            if done.is_ready() || rests {
                return done;
            }
        }
        bell.state.store(RESTS, Ordering::SeqCst);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let woken = self.state.compare_exchange(RUNS, AGAIN, Ordering::SeqCst, Ordering::SeqCst);
        if let (Err(RESTS), Some(task)) = (woken, self.task.get()) {
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

    /// Wakes itself so many times.
    async fn restless(times: usize) {
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
    async fn who_wakes_itself_often_gets_there_and_lets_others_in_between() {
        let turns = Arc::<AtomicUsize>::default();
        let (its, work) = (turns.clone(), AtOnce::new(restless(100 * TIMES)));
        let mut work = Box::pin(work);
        let counted = poll_fn(move |cx| {
            its.fetch_add(1, Ordering::Relaxed);
            work.as_mut().poll(cx)
        });
        tokio::time::timeout(Duration::from_secs(60), counted).await.unwrap();
        assert_eq!(turns.load(Ordering::Relaxed), 101);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_call_from_another_thread_is_missed() {
        for _ in 0..20 {
            let (ask, mut asked) = tokio::sync::mpsc::channel::<u32>(1);
            let (answer, mut answered) = tokio::sync::mpsc::channel::<u32>(1);
            let echo = tokio::spawn(AtOnce::new(async move {
                while let Some(n) = asked.recv().await {
                    restless(1).await;
                    answer.send(n).await.unwrap();
                }
            }));
            for n in 0..2000 {
                ask.send(n).await.unwrap();
                let heard = tokio::time::timeout(Duration::from_secs(60), answered.recv()).await;
                assert_eq!(heard.expect("it sleeps"), Some(n));
            }
            drop(ask);
            echo.await.unwrap();
        }
    }
}
