//! Which laws a verification runs, which promise each of them is of, and how one of them is run.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use lockkeeper_core::Store;
use tokio::sync::watch;

use super::harness::OpenedStore;
use super::private_store::StoreLog;
use super::{LawOutcome, LawResult, VerifiedPromise, sweep};

/// How long a law may take: laws lose patience long before.
const LAW_TIME: Duration = Duration::from_secs(120);

/// One law.
#[derive(Clone, Copy)]
pub(super) struct ListedLaw {
    group: &'static str,
    pub name: &'static str,
    run: fn(OpenedStore) -> LocalBoxFuture<'static, ()>,
}

macro_rules! list_laws {
    ([] $($group:ident::$law:ident => $bug:ident: $text:literal,)*) => {
        /// Every law of the locks and records.
        pub(super) const ALL: &[ListedLaw] = &[$(ListedLaw {
            group: stringify!($group),
            name: stringify!($law),
            run: |store| Box::pin(crate::laws::$group::$law(store)),
        }),*];
    };
}
crate::every_law!(list_laws);

/// The laws that a verification leaves out, and why.
pub(super) const LEFT_OUT: [(&str, &str); 2] = [
    ("every_legal_name_is_a_lock_of_its_own", "the longest names leave no room for a private prefix"),
    ("correctness_is_refused_where_it_is_not_kept", "it needs to know what the store is meant for"),
];

impl ListedLaw {
    /// The promise that the law is of.
    pub fn promise(&self) -> VerifiedPromise {
        match self.group {
            "exclusion" | "modes" | "guard" => VerifiedPromise::Exclusion,
            "fence" => VerifiedPromise::Fence,
            "queue" | "wake" | "many_waiters" => VerifiedPromise::Waiting,
            "records" => VerifiedPromise::Records,
            _ => VerifiedPromise::Views,
        }
    }

    /// Why a verification leaves it out.
    pub fn left_out(&self) -> Option<&'static str> {
        LEFT_OUT.iter().find(|(name, _)| *name == self.name).map(|(_, why)| *why)
    }

    /// Runs the law, and once more if it fails: on a slow network a law may lose patience at a step that is not its own. A law that held
    /// the second time is unclear. `stop` ends it.
    pub async fn run(
        self,
        clients: Arc<[Arc<dyn Store>]>,
        prefix: String,
        stop: watch::Receiver<bool>,
    ) -> LawResult {
        let mut first: Option<String> = None;
        let mut grants = 0;
        for n in 0..2 {
            let log = Arc::new(StoreLog::default());
            let names: Arc<str> = format!("{prefix}{}/{n}/", self.name).into();
            let outcome = self.once(clients.clone(), names.clone(), log.clone(), stop.clone()).await;
            log.release_all().await;
            let swept = sweep(&clients[0], &names).await;
            grants += log.grants();
            let outcome = match (outcome, log.failure(), first.take()) {
                (None, ..) => LawOutcome::Stopped,
                (Some(Ok(())), _, None) => match swept {
                    Ok(()) => LawOutcome::Kept,
                    Err(error) => LawOutcome::Unclear(format!("what it left could not be removed: {error}")),
                },
                (Some(Ok(())), _, Some(failed)) => {
                    LawOutcome::Unclear(format!("it failed once, and held when it was run again: {failed}"))
                }
                (Some(Err(_)), Some(failure), _) if n > 0 => {
                    LawOutcome::Unclear(format!("the store failed meanwhile: {failure}"))
                }
                (Some(Err(failed)), ..) if n > 0 => LawOutcome::Broken(failed),
                (Some(Err(failed)), ..) => {
                    first = Some(failed);
                    continue;
                }
            };
            return LawResult { law: self.name.into(), promise: self.promise(), outcome, grants };
        }
        unreachable!("the second run has a result")
    }

    /// Runs the law once, on a runtime of its own: the waiters that a law leaves behind end with it. `None`: it was stopped.
    async fn once(
        self,
        clients: Arc<[Arc<dyn Store>]>,
        names: Arc<str>,
        log: Arc<StoreLog>,
        mut stop: watch::Receiver<bool>,
    ) -> Option<Result<(), String>> {
        let thread = move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
            let runtime = runtime.map_err(|e| format!("the operating system gives no event queue: {e}"));
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return Some(Err(error)),
            };
            let ended = runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => None,
                    ended = tokio::time::timeout(LAW_TIME, (self.run)(OpenedStore::new(clients, names, log))) => {
                        Some(ended.map_err(|_| format!("it did not end within {LAW_TIME:?}")))
                    }
                }
            });
            runtime.shutdown_background();
            ended
        };
        match tokio::task::spawn_blocking(thread).await {
            Ok(ended) => ended,
            Err(end) => {
                Some(Err(end.try_into_panic().map_or("it was cancelled".into(), |panic| text_of(&*panic))))
            }
        }
    }
}

/// The text of a panic: what the law says.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
