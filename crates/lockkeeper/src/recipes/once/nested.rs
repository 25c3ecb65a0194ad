//! A thing that asks for itself: work under a key that asks for the same key, and would wait for ever.

use std::future::Future;

use lockkeeper_core::{Error, LockName, Result};

use crate::keeper::Lockkeeper;
use crate::recipes::cell::Cell;

tokio::task_local! {
    /// What this task is doing once, the outermost first: the store, by its address, and the name.
    static RUNNING: Vec<(usize, LockName)>;
}

fn store_of(keeper: &Lockkeeper) -> usize {
    std::sync::Arc::as_ptr(&keeper.0.store).cast::<()>() as usize
}

/// Does `work` as what is done once in `cell`.
pub(crate) fn scope<F: Future>(cell: &Cell, work: F) -> impl Future<Output = F::Output> {
    let mut running = RUNNING.try_with(Vec::clone).unwrap_or_default();
    running.push((store_of(&cell.keeper), cell.key.clone()));
    RUNNING.scope(running, work)
}

/// [`Error::Deadlock`] if this task is doing it already.
pub(super) fn check(keeper: &Lockkeeper, key: &LockName) -> Result<()> {
    let store = store_of(keeper);
    let runs = |running: &Vec<(usize, LockName)>| running.iter().any(|(s, k)| *s == store && k == key);
    match RUNNING.try_with(runs) {
        Ok(true) => Err(Error::Deadlock(vec![key.clone()])),
        _ => Ok(()),
    }
}
