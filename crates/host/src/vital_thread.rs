//! The threads that must not wait for a disk, because the leases of other locks depend on them.

use std::cell::Cell;

thread_local! {
    static MAY_BLOCK: Cell<bool> = const { Cell::new(true) };
}

/// From now on a store does no work on this thread that may block, such as a write to a disk: it uses a thread of its own.
pub fn forbid_blocking() {
    MAY_BLOCK.set(false);
}

/// Whether a store may do work on this thread that usually takes microseconds, and much longer if a disk hangs.
pub fn may_block() -> bool {
    MAY_BLOCK.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_forbids_only_itself_to_block() {
        std::thread::spawn(|| {
            assert!(may_block());
            forbid_blocking();
            assert!(!may_block());
        })
        .join()
        .unwrap();
        assert!(may_block());
    }
}
