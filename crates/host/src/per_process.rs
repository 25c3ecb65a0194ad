//! A value that every process makes for itself: after a fork the child does not go on with its parent's.

use std::sync::{Mutex, OnceLock, PoisonError};

/// A static cell with one value per process. A fork copies the memory of a process and only one of its threads, so what names the process
/// (its pid) or needs a thread of it (its timers) is made anew in the child.
///
/// Reading takes no lock. A lock that another thread holds while the process forks is locked in the child for ever.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    first: OnceLock<Box<PerProcessEntry<T>>>,
    making: Mutex<()>,
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
        PerProcess { first: OnceLock::new(), making: Mutex::new(()) }
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
                    let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
                    if let (None, Some(make)) = (entry.get(), make.take()) {
                        let made = PerProcessEntry { pid, value: make()?, next: OnceLock::new() };
                        let _ = entry.set(Box::new(made));
                    }
                }
            }
        }
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
        let cell = PerProcess { first: OnceLock::from(Box::new(parent)), making: Mutex::new(()) };
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(2)), Ok(&2));
        assert_eq!(cell.get_or_try_init(|| Ok::<_, ()>(3)), Ok(&2));
    }
}
