//! Several names that are in several hash slots of a cluster. No script can see them all: they are taken one slot after
//! the other in the order of their names, all or nothing, and nothing is held while one of them is waited for.

use futures_util::future::join_all;
use lockkeeper_core::{
    AcquireOutcome, BootInstant, Error, Fence, Grant, LockName, LockRequest, Names, ReleaseOutcome,
    RequestKey, Result, Wait,
};
use lockkeeper_store_kit::PendingRequest;

use crate::acquire::{AcquireCall, AcquireReply, Acquirer, released};
use crate::codec::AcquireStage;
use crate::keys::KeyGroup;
use crate::release::Releaser;
use crate::runner::ScriptRunner;

/// The names of a request that are in one group.
pub(crate) type GroupPart = (KeyGroup, Names);

impl ScriptRunner {
    /// The group of all these names, if it is one.
    pub(crate) fn group_of(&self, names: &Names) -> Option<KeyGroup> {
        let group = self.keys.group(names.first());
        names.iter().skip(1).all(|name| self.keys.group(name) == group).then_some(group)
    }

    /// The names of a claim by group, in the order of the first name of each.
    pub(crate) fn parts(&self, names: &Names) -> Vec<GroupPart> {
        let mut parts: Vec<(KeyGroup, Vec<_>)> = Vec::new();
        for name in names {
            let group = self.keys.group(name);
            match parts.iter_mut().find(|(other, _)| *other == group) {
                Some((_, list)) => list.push(name.clone()),
                None => parts.push((group, vec![name.clone()])),
            }
        }
        let names = |list| Names::new(list).expect("names that were good together are good apart");
        parts.into_iter().map(|(group, list)| (group, names(list))).collect()
    }
}

/// Acquires and releases grants whose names are in several slots.
#[derive(Clone, Copy)]
pub(crate) struct MultiSlot<'a> {
    pub acquirer: &'a Acquirer,
    pub releaser: &'a Releaser,
}

impl MultiSlot<'_> {
    pub(crate) async fn acquire_multi_slot(
        &self,
        parts: &[GroupPart],
        request: &LockRequest,
        pending: &PendingRequest,
    ) -> Result<AcquireOutcome> {
        if request.owner.is_some() {
            return Err(Error::Unsupported(
                "in a cluster an owner can request several names at once only if they share a hash tag, as {orders}/1 \
                 and {orders}/2 do"
                    .into(),
            ));
        }
        let mut begun = false;
        let answer = self.wait_for_all_parts(parts, request, pending, &mut begun).await;
        // The release that cancelled the call ends all parts. The caller may have acquired again since.
        if matches!(answer, Ok(AcquireOutcome::Granted(_))) || !begun || pending.is_cancelled() {
            return answer;
        }
        // Release every part that may be held or queued. If a release fails, the part may still be held.
        match self.release_multi_slot(parts, &request.key).await {
            Ok(_) => answer,
            Err(error) => Err(Error::Unknown(format!("some of {} may be held: {error}", request.key.names))),
        }
    }

    /// `begun`: whether a part of it may have happened.
    async fn wait_for_all_parts(
        &self,
        parts: &[GroupPart],
        request: &LockRequest,
        pending: &PendingRequest,
        begun: &mut bool,
    ) -> Result<AcquireOutcome> {
        let clock = &*self.acquirer.runner.options.clock;
        let until = request.wait.deadline(clock.now());
        loop {
            let sent_at = clock.now();
            let (blocked, busy) = match self.try_all_parts(parts, request, pending, begun).await? {
                Ok(fence) => {
                    let (key, mode, ttl) = (request.key.clone(), request.mode, request.ttl);
                    return Ok(AcquireOutcome::Granted(Grant { key, fence, mode, ttl, sent_at, lease: ttl }));
                }
                Err(blocked) => blocked,
            };
            if pending.is_cancelled() {
                return Err(released());
            }
            self.release_multi_slot(parts, &request.key).await?;
            let now = clock.now();
            let wait = match until {
                BootInstant::NEVER => Wait::Forever,
                until if now < until => Wait::For(until.since(now)),
                _ => return Ok(AcquireOutcome::Busy(busy)),
            };
            let (group, part) = self.part_of(&parts[blocked], request, wait);
            *begun = true;
            let call = AcquireCall { request: &part, others: &others(request, &part), pending };
            if let busy @ AcquireOutcome::Busy(_) = self.acquirer.acquire_in_group(group, call).await? {
                return Ok(busy);
            }
        }
    }

    /// Takes every part without waiting and gives all of them the highest of their fences; or says which part is in
    /// the way.
    async fn try_all_parts(
        &self,
        parts: &[GroupPart],
        request: &LockRequest,
        pending: &PendingRequest,
        begun: &mut bool,
    ) -> Result<Result<Fence, (usize, lockkeeper_core::Busy)>> {
        let mut highest = Fence::MIN;
        // Twice at most: once to learn the highest fence, and once to give it to all.
        for raise in [false, true] {
            let mut same = true;
            for (i, part) in parts.iter().enumerate() {
                let (group, part) = self.part_of(part, request, Wait::No);
                let keys: Vec<String> =
                    part.key.names.iter().map(|name| self.acquirer.runner.keys.lock_key(name)).collect();
                let call = AcquireCall { request: &part, others: &others(request, &part), pending };
                let raise = raise.then_some(highest);
                let asked =
                    self.acquirer.send_request(group, &keys, call, AcquireStage::TryOnce, raise).await;
                *begun |= !matches!(asked, Ok(AcquireReply::Busy(_)) | Err(Error::Unavailable(_)));
                match asked? {
                    AcquireReply::Granted(fence) => {
                        same &= i == 0 || fence == highest;
                        highest = highest.max(fence);
                    }
                    AcquireReply::Busy(busy) => return Ok(Err((i, busy))),
                    AcquireReply::Rejected(error) => return Err(error),
                    AcquireReply::Queued(..) => return Err(crate::error::unexpected_reply()),
                }
            }
            if same {
                return Ok(Ok(highest));
            }
        }
        Err(Error::Unavailable("the lease ended before all names were taken: ask with a longer ttl".into()))
    }

    fn part_of(
        &self,
        (group, names): &GroupPart,
        request: &LockRequest,
        wait: Wait,
    ) -> (KeyGroup, LockRequest) {
        let key = RequestKey { attempt: request.key.attempt, names: names.clone() };
        (*group, LockRequest { key, wait, ..request.clone() })
    }

    pub(crate) async fn release_multi_slot(
        &self,
        parts: &[GroupPart],
        key: &RequestKey,
    ) -> Result<ReleaseOutcome> {
        let releases = parts.iter().map(|(group, names)| {
            let key = RequestKey { attempt: key.attempt, names: names.clone() };
            async move { self.releaser.release(*group, &key).await }
        });
        let released = join_all(releases).await;
        let any = released.iter().any(|one| matches!(one, Ok(ReleaseOutcome::Released)));
        let unknown = released.iter().any(|one| matches!(one, Err(Error::Unknown(_))));
        match released.into_iter().find_map(Result::err) {
            None if any => Ok(ReleaseOutcome::Released),
            None => Ok(ReleaseOutcome::AlreadyGone),
            // Some of it has happened, or may have.
            Some(error) if any || unknown => Err(Error::Unknown(format!("released in part: {error}"))),
            Some(error) => Err(error),
        }
    }
}

/// The names of a request that are not in this part of it.
fn others(request: &LockRequest, part: &LockRequest) -> Vec<LockName> {
    request.key.names.iter().filter(|name| !part.key.names.iter().any(|own| own == *name)).cloned().collect()
}
