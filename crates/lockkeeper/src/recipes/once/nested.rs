//! Nested work: work under a key that requests the same key, and would wait for itself.

use std::future::Future;

use lockkeeper_core::{Error, LockName, Result};

use crate::keeper::Lockkeeper;
use crate::recipes::cas_record::CasRecord;

tokio::task_local! {
    /// The keys of the runs in this task, the outermost first: the store, by its address, and the name.
    static RUNNING: Vec<(usize, LockName)>;
}

fn store_of(keeper: &Lockkeeper) -> usize {
    std::sync::Arc::as_ptr(&keeper.0.store).cast::<()>() as usize
}

/// Runs `work` as the run of `cas_record`.
pub(crate) fn scope<F: Future>(cas_record: &CasRecord, work: F) -> impl Future<Output = F::Output> {
    let mut running = RUNNING.try_with(Vec::clone).unwrap_or_default();
    running.push((store_of(&cas_record.keeper), cas_record.key.clone()));
    RUNNING.scope(running, work)
}

/// [`Error::Deadlock`] if this task is inside a run of the same key.
pub(crate) fn check(keeper: &Lockkeeper, key: &LockName) -> Result<()> {
    let store = store_of(keeper);
    let runs = |running: &Vec<(usize, LockName)>| running.iter().any(|(s, k)| *s == store && k == key);
    match RUNNING.try_with(runs) {
        Ok(true) => Err(Error::Deadlock(vec![key.clone()])),
        _ => Ok(()),
    }
}
