//! The part of durability that a client can see, without a restart of the store.

use std::sync::Arc;

use lockkeeper_core::{AcquireOutcome, Error, Expect, Grant, Result, Store, WriteOutcome};

use super::private_store::{PrivateStore, StoreLog};
use super::{LawOutcome, LawResult, VerifiedPromise};
use crate::laws::{name, request};

const GRANTS: &str = "a_grant_is_in_the_store_for_a_client_that_was_opened_later";
const FENCES: &str = "the_fence_goes_on_for_a_client_that_was_opened_later";
const RECORDS: &str = "a_record_is_in_the_store_for_a_client_that_was_opened_later";

/// Takes a lock and writes a record with `store`, and looks for them with a client that is `opened` afterwards.
pub(super) async fn check(
    store: &Arc<dyn Store>,
    opened: impl AsyncFnOnce() -> Result<Arc<dyn Store>>,
    prefix: &Arc<str>,
) -> Vec<LawResult> {
    let log = Arc::new(StoreLog::default());
    let private = |store: Arc<dyn Store>| PrivateStore::new(store, prefix.clone(), log.clone());
    let first: Arc<dyn Store> = Arc::new(private(store.clone()));
    let outcomes = async {
        let held = acquire(&first).await?;
        let written = match first.profile().records {
            true => Some(first.write(&name("record"), b"kept", Expect::Absent, None).await?),
            false => None,
        };
        let later: Arc<dyn Store> = Arc::new(private(opened().await?));
        let view = later.inspect(&name("lock")).await?;
        let fences: Vec<_> = view.iter().flat_map(|view| view.held.iter().map(|held| held.fence)).collect();
        let grants = match fences == [held.fence] {
            true => LawOutcome::Kept,
            false => LawOutcome::Broken(format!("fence {} was granted, and {fences:?} is held", held.fence)),
        };
        let records = match written {
            None => None,
            Some(WriteOutcome::Written(version)) => Some(match later.read(&name("record")).await? {
                Some(found) if found.version == version && found.value == b"kept" => LawOutcome::Kept,
                found => {
                    LawOutcome::Broken(format!("version {version:?} was written, and there is {found:?}"))
                }
            }),
            Some(conflict) => {
                Some(LawOutcome::Broken(format!("there was no record, and then: {conflict:?}")))
            }
        };
        first.release(&held.key).await?;
        let next = acquire(&later).await?;
        later.release(&next.key).await?;
        let newer = match next.fence > held.fence {
            true => LawOutcome::Kept,
            false => LawOutcome::Broken(format!("fence {} was granted after {}", next.fence, held.fence)),
        };
        Ok::<_, Error>((grants, newer, records))
    };
    let outcomes = outcomes.await;
    log.release_all().await;
    let grants = log.grants();
    match outcomes {
        Ok((held, newer, record)) => {
            let all = [
                (GRANTS, VerifiedPromise::Durability, Some(held)),
                (FENCES, VerifiedPromise::Fence, Some(newer)),
                (RECORDS, VerifiedPromise::Durability, record),
            ];
            let result = |(law, promise, outcome): (&str, _, Option<LawOutcome>)| {
                Some(LawResult { grants, ..LawResult::new(law, promise, outcome?) })
            };
            all.into_iter().filter_map(result).collect()
        }
        Err(error) => {
            let unclear = LawOutcome::Unclear(format!("the store failed meanwhile: {error}"));
            vec![LawResult::new(GRANTS, VerifiedPromise::Durability, unclear)]
        }
    }
}

/// The lock of the check, which no other client uses.
async fn acquire(store: &Arc<dyn Store>) -> Result<Grant> {
    match store.acquire(&request("lock")).await? {
        AcquireOutcome::Granted(grant) => Ok(grant),
        AcquireOutcome::Busy(busy) => Err(Error::Busy(Box::new(busy))),
    }
}
