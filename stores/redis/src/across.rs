//! Several names that are in several hash slots of a cluster. No script can see them all: they are taken one slot after
//! the other in the order of their names, all or nothing, and nothing is held while one of them is waited for.

use futures_util::future::join_all;
use lockkeeper_core::{
    Acquired, Ask, Claim, Error, Fence, Grant, LockName, Moment, Names, Release, Result, Wait,
};

use crate::entry::Stage;
use crate::hold::Answer;
use crate::layout::Group;
use crate::store::Shared;

/// The names of one group among those of an ask.
pub(crate) type Part = (Group, Names);

impl Shared {
    /// The group of all these names, if it is one.
    pub(crate) fn group_of(&self, names: &Names) -> Option<Group> {
        let group = self.layout.group(names.first());
        names.iter().skip(1).all(|name| self.layout.group(name) == group).then_some(group)
    }

    /// The names of a claim by group, in the order of the first name of each.
    pub(crate) fn parts(&self, names: &Names) -> Vec<Part> {
        let mut parts: Vec<(Group, Vec<_>)> = Vec::new();
        for name in names {
            let group = self.layout.group(name);
            match parts.iter_mut().find(|(other, _)| *other == group) {
                Some((_, list)) => list.push(name.clone()),
                None => parts.push((group, vec![name.clone()])),
            }
        }
        let names = |list| Names::new(list).expect("names that were good together are good apart");
        parts.into_iter().map(|(group, list)| (group, names(list))).collect()
    }

    pub(crate) async fn acquire_across(&self, parts: &[Part], ask: &Ask) -> Result<Acquired> {
        if ask.owner.is_some() {
            return Err(Error::Unsupported(
                "in a cluster an owner can ask for several names at once only if they share a hash tag, as {orders}/1 \
                 and {orders}/2 do"
                    .into(),
            ));
        }
        let mut begun = false;
        let answer = self.take_across(parts, ask, &mut begun).await;
        if matches!(answer, Ok(Acquired::Granted(_))) || !begun {
            return answer;
        }
        // Whatever of it is held or in line somewhere, known or not. What cannot be given back may be held.
        match self.release_across(parts, &ask.claim).await {
            Ok(_) => answer,
            Err(error) => Err(Error::Unknown(format!("some of {} may be held: {error}", ask.claim.names))),
        }
    }

    /// `begun`: whether a part of it may have happened.
    async fn take_across(&self, parts: &[Part], ask: &Ask, begun: &mut bool) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        loop {
            let sent_at = clock.now();
            let (blocked, busy) = match self.take_all(parts, ask, begun).await? {
                Ok(fence) => {
                    let (claim, mode, ttl) = (ask.claim.clone(), ask.mode, ask.ttl);
                    return Ok(Acquired::Granted(Grant { claim, fence, mode, ttl, sent_at, lease: ttl }));
                }
                Err(blocked) => blocked,
            };
            self.release_across(parts, &ask.claim).await?;
            let now = clock.now();
            let wait = match until {
                Moment::NEVER => Wait::Forever,
                until if now < until => Wait::For(until.since(now)),
                _ => return Ok(Acquired::Busy(busy)),
            };
            let (group, part) = self.part_of(&parts[blocked], ask, wait);
            *begun = true;
            if let busy @ Acquired::Busy(_) = self.acquire_in(group, &part, &others(ask, &part)).await? {
                return Ok(busy);
            }
        }
    }

    /// Takes every part without waiting and gives all of them the highest of their fences; or says which part is in
    /// the way.
    async fn take_all(
        &self,
        parts: &[Part],
        ask: &Ask,
        begun: &mut bool,
    ) -> Result<Result<Fence, (usize, lockkeeper_core::Busy)>> {
        let mut highest = Fence::MIN;
        // Twice at most: once to learn the highest fence, and once to give it to all.
        for raise in [false, true] {
            let mut same = true;
            for (i, part) in parts.iter().enumerate() {
                let (group, part) = self.part_of(part, ask, Wait::No);
                let keys: Vec<String> = part.claim.names.iter().map(|name| self.layout.key(name)).collect();
                let asked = self
                    .ask(group, &keys, (&part, &others(ask, &part)), Stage::Hasty, raise.then_some(highest))
                    .await;
                *begun |= !matches!(asked, Ok(Answer::Busy(_)) | Err(Error::Unavailable(_)));
                match asked? {
                    Answer::Granted(fence) => {
                        same &= i == 0 || fence == highest;
                        highest = highest.max(fence);
                    }
                    Answer::Busy(busy) => return Ok(Err((i, busy))),
                    Answer::Refused(error) => return Err(error),
                    Answer::InLine(..) => return Err(crate::hold::odd()),
                }
            }
            if same {
                return Ok(Ok(highest));
            }
        }
        Err(Error::Unavailable("the lease ended before all names were taken: ask with a longer ttl".into()))
    }

    fn part_of(&self, (group, names): &Part, ask: &Ask, wait: Wait) -> (Group, Ask) {
        let claim = Claim { attempt: ask.claim.attempt, names: names.clone() };
        (*group, Ask { claim, wait, ..ask.clone() })
    }

    pub(crate) async fn release_across(&self, parts: &[Part], claim: &Claim) -> Result<Release> {
        let releases = parts.iter().map(|(group, names)| {
            let claim = Claim { attempt: claim.attempt, names: names.clone() };
            async move { self.release_in(*group, &claim).await }
        });
        let released = join_all(releases).await;
        let any = released.iter().any(|one| matches!(one, Ok(Release::Released)));
        let unknown = released.iter().any(|one| matches!(one, Err(Error::Unknown(_))));
        match released.into_iter().find_map(Result::err) {
            None if any => Ok(Release::Released),
            None => Ok(Release::AlreadyGone),
            // Some of it has happened, or may have.
            Some(error) if any || unknown => Err(Error::Unknown(format!("released in part: {error}"))),
            Some(error) => Err(error),
        }
    }
}

/// The names of a request that are not in this part of it.
fn others(ask: &Ask, part: &Ask) -> Vec<LockName> {
    ask.claim.names.iter().filter(|name| !part.claim.names.iter().any(|own| own == *name)).cloned().collect()
}
