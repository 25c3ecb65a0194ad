//! How long the worker waits for those who will ask again within a moment.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::worker::{Job, Worker};

/// How long those who were just answered are waited for.
const LULL: Duration = Duration::from_micros(50);

impl Worker {
    /// Takes up what has come. Those who were answered together most likely ask again within a moment, and then travel
    /// together again; but who asked already is not kept waiting for long.
    pub fn gather(&mut self, jobs: &mpsc::Receiver<Job>) -> bool {
        let began = Instant::now();
        let mut last = began;
        loop {
            match jobs.try_recv() {
                Ok(job) => {
                    if self.take_up(job) {
                        return true;
                    }
                    last = Instant::now();
                }
                Err(_) if self.pending.len() >= self.answered => return false,
                Err(_) if last.elapsed() > LULL || began.elapsed() > LULL * 4 => return false,
                Err(_) => std::thread::yield_now(),
            }
        }
    }
}

/// The next job. Somebody who was just answered most likely asks again within a moment: to wake a thread that sleeps
/// takes longer than that.
pub(crate) fn next_job(jobs: &mpsc::Receiver<Job>, soon: bool) -> Option<Job> {
    let began = Instant::now();
    while soon && began.elapsed() < LULL {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(mpsc::TryRecvError::Disconnected) => return None,
            Err(mpsc::TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
    jobs.recv().ok()
}
