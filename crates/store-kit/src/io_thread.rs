//! The thread on which the sockets and timers of one store live.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};

use lockkeeper_host::{Clock, SystemClock, log_elsewhere};

/// A thread with its own runtime, for the sockets and timers of one store: the store reaches its server although the user's
/// runtime is busy, stopped or absent. Dropping this ends the thread and every task on it.
/// [`IoThread::on`] uses a runtime of the user's instead.
#[derive(Debug)]
pub struct IoThread {
    handle: Handle,
    // Dropping it ends the thread, if there is one.
    _stop: Option<oneshot::Sender<()>>,
}

impl IoThread {
    /// Starts the thread, and the timer thread of this process if it does not run yet, so that an open store starts nothing that may
    /// fail later. Tools show `name` for the thread.
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
        Ok(IoThread { handle, _stop: Some(stop) })
    }

    /// Uses an existing runtime with I/O and timers (`enable_all`) instead of a thread. A caller on that runtime gets its answers without
    /// a change of threads, and the store stops when that runtime stops. Each task ends with its [`Task`], not with this.
    pub fn on(handle: Handle) -> Self {
        IoThread { handle, _stop: None }
    }

    /// Runs `work` as a task on the thread. Dropping the [`Task`] ends it.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Task<T> {
        Task(self.handle.spawn(work))
    }

    /// Polls `work` in the caller's task, with the sockets and timers of this thread. This is much cheaper than a task on the thread,
    /// for work that mostly waits for tasks there. The caller needs no runtime.
    pub async fn lend<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|cx| {
            let _there = self.handle.enter();
            work.as_mut().poll(cx)
        })
        .await
    }

    /// A handle that can spawn tasks and does not keep the thread alive.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// A task on an [`IoThread`]. Await it from any runtime; drop it to end it.
#[derive(Debug)]
#[must_use = "dropping it ends the task"]
pub struct Task<T>(JoinHandle<T>);

impl<T> Future for Task<T> {
    /// `Err` if the task panicked, or the thread has ended.
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
    fn a_task_needs_no_runtime_of_the_caller_and_ends_with_the_thread() {
        let io = IoThread::start("io").unwrap();
        let alive = Arc::new(());
        let (kept, ended) = (alive.clone(), oneshot::channel());
        let task = io.spawn(async move {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            _ = ended.0.send(());
            std::future::pending::<()>().await;
            drop(kept);
        });
        ended.1.blocking_recv().unwrap();
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(io);
        // The thread drops its tasks when it ends.
        while Arc::strong_count(&alive) > 1 {
            std::thread::yield_now();
        }
        drop(task);
    }

    #[test]
    fn on_an_existing_runtime_a_task_ends_with_its_handle() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let io = IoThread::on(runtime.handle().clone());
        let alive = Arc::new(());
        let kept = alive.clone();
        runtime.block_on(async {
            let task = io.spawn(async move {
                std::future::pending::<()>().await;
                drop(kept);
            });
            tokio::task::yield_now().await;
            drop((io, task));
            while Arc::strong_count(&alive) > 1 {
                tokio::task::yield_now().await;
            }
        });
    }
}
