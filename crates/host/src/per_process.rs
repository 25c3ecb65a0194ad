//! A value that every process makes for itself: after a fork the child does not go on with its parent's.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How often a thread checks whether another one has made the value.
const POLL: Duration = Duration::from_micros(100);

/// A static cell with one value per process. A fork copies the memory of a process and only one of its threads, so what names the process
/// (its pid) or needs a thread of it (its timers) is made anew in the child.
///
/// Reading takes no lock. A mutex that another thread holds while the process forks is locked in the child for ever, so the lock under
/// which a thread makes the value has the pid of its process: the child takes over its parent's.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    first: OnceLock<Box<PerProcessEntry<T>>>,
    /// The process with a thread that makes a value; 0: none.
    maker: AtomicU32,
}

/// One process's value, then those of its descendants: a child finds the values of all its ancestors before its own.
#[derive(Debug)]
struct PerProcessEntry<T> {
    pid: u32,
    value: T,
    next: OnceLock<Box<PerProcessEntry<T>>>,
}

impl<T> PerProcess<T> {
    pub const fn new() -> Self {
        PerProcess { first: OnceLock::new(), maker: AtomicU32::new(0) }
    }

    /// This process's value. An error is returned and not kept: the next call tries again.
    pub fn get_or_try_init<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        let pid = std::process::id();
        let mut make = Some(make);
        let mut entry = &self.first;
        loop {
            match entry.get() {
                Some(found) if found.pid == pid => return Ok(&found.value),
                Some(found) => entry = &found.next,
                None => {
                    let _turn = MakerTurn::wait_for(&self.maker, pid);
                    if let (None, Some(make)) = (entry.get(), make.take()) {
                        let made = PerProcessEntry { pid, value: make()?, next: OnceLock::new() };
                        let _ = entry.set(Box::new(made));
                    }
                }
            }
        }
    }
}

/// The right of one thread of this process to make the value.
struct MakerTurn<'a> {
    maker: &'a AtomicU32,
    pid: u32,
}

impl<'a> MakerTurn<'a> {
    fn wait_for(maker: &'a AtomicU32, pid: u32) -> Self {
        loop {
            let found = maker.load(Ordering::Relaxed);
            // The threads of another process are not in this one, so none of them is making a value.
            if found != pid
                && maker.compare_exchange(found, pid, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return MakerTurn { maker, pid };
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for MakerTurn<'_> {
    fn drop(&mut self) {
        let _ = self.maker.compare_exchange(self.pid, 0, Ordering::Release, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_an_error_is_not_kept() {
        let cell = PerProcess::new();
        assert_eq!(cell.get_or_try_init(|| Err::<u8, _>("not now")), Err("not now"));
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(7)), Ok(&7));
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(8)), Ok(&7));
    }

    #[test]
    fn the_value_of_another_process_is_passed_over() {
        let parent = PerProcessEntry { pid: std::process::id() + 1, value: 1, next: OnceLock::new() };
        let cell = PerProcess { first: OnceLock::from(Box::new(parent)), maker: AtomicU32::new(0) };
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(2)), Ok(&2));
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(3)), Ok(&2));
    }

    #[test]
    fn a_fork_while_another_thread_makes_the_value_does_not_block_the_child() {
        let cell = PerProcess::new();
        cell.maker.store(std::process::id() + 1, Ordering::Relaxed);
        let (notify, notified) = std::sync::mpsc::channel();
        std::thread::spawn(move || notify.send(cell.get_or_try_init(|| Ok::<_, ()>(2)).copied()));
        assert_eq!(notified.recv_timeout(Duration::from_secs(10)), Ok(Ok(2)));
    }
}
