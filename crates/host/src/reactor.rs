use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};

use crate::{Clock, SystemClock, log_elsewhere};

/// A thread with a runtime of its own, for the sockets and timers of one store: a busy, stopped or absent runtime of the
/// user's does not keep a store from talking to its server. It ends when this is dropped, and what ran on it with it.
/// Or a runtime of the user's, if that is wanted ([`Reactor::on`]).
#[derive(Debug)]
pub struct Reactor {
    handle: Handle,
    // Dropping it ends the thread, if there is one.
    _stop: Option<oneshot::Sender<()>>,
}

impl Reactor {
    /// Starts the thread, and the timers of this process if they are not there yet: a store that is open needs nothing that may fail
    /// later. `name` is what tools show for it.
    ///
    /// # Errors
    /// If the operating system gives no thread or no file descriptors.
    pub fn start(name: &str) -> io::Result<Self> {
        SystemClock.start()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            let _log = log_elsewhere();
            let _ = runtime.block_on(stopped);
        };
        std::thread::Builder::new().name(name.into()).spawn(run)?;
        Ok(Reactor { handle, _stop: Some(stop) })
    }

    /// No thread of its own: everything runs on a runtime that is there, which must have I/O and timers (`enable_all`). Whoever asks
    /// from there hears an answer without another thread in between, and depends on it to go on. What runs there ends with the
    /// [`Task`]s, not with this.
    pub fn on(handle: Handle) -> Self {
        Reactor { handle, _stop: None }
    }

    /// Runs `work` there. Dropping the task ends it.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Task<T> {
        Task(self.handle.spawn(work))
    }

    /// Does `work` in the task that awaits this, with the sockets and timers of the reactor: much cheaper than a task of its
    /// own there, for what mostly waits for others that run there. It needs no runtime of the caller's.
    pub async fn lend<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|cx| {
            let _there = self.handle.enter();
            work.as_mut().poll(cx)
        })
        .await
    }

    /// What may spawn there without keeping the thread alive.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// Work on a [`Reactor`]. Await it from any runtime; drop it to end it.
#[derive(Debug)]
#[must_use = "dropping it ends the work"]
pub struct Task<T>(JoinHandle<T>);

impl<T> Future for Task<T> {
    /// `Err` if the work panicked, or the reactor is gone.
    type Output = Result<T, JoinError>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn work_runs_without_a_runtime_of_the_callers_and_ends_with_the_reactor() {
        let reactor = Reactor::start("reactor").unwrap();
        let alive = Arc::new(());
        let (kept, told) = (alive.clone(), oneshot::channel());
        let task = reactor.spawn(async move {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            _ = told.0.send(());
            std::future::pending::<()>().await;
            drop(kept);
        });
        told.1.blocking_recv().unwrap();
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(reactor);
        // The thread drops what it had when it ends.
        while Arc::strong_count(&alive) > 1 {
            std::thread::yield_now();
        }
        drop(task);
    }

    #[test]
    fn work_on_a_runtime_that_is_there_ends_with_its_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reactor = Reactor::on(runtime.handle().clone());
        let alive = Arc::new(());
        let kept = alive.clone();
        runtime.block_on(async {
            let task = reactor.spawn(async move {
                std::future::pending::<()>().await;
                drop(kept);
            });
            tokio::task::yield_now().await;
            drop((reactor, task));
            while Arc::strong_count(&alive) > 1 {
                tokio::task::yield_now().await;
            }
        });
    }
}
