//! Several names that are in several hash slots of a cluster. No script can see them all: they are taken one slot after
//! the other in the order of their names, all or nothing, and nothing is held while one of them is waited for.

use futures_util::future::join_all;
use lockkeeper_core::{Acquired, Ask, Claim, Error, Fence, Grant, Moment, Names, Release, Result, Wait};

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
        let answer = self.take_across(parts, ask).await;
        if !matches!(answer, Ok(Acquired::Granted(_))) {
            // Whatever of it is held or in line somewhere, known or not.
            self.release_across(parts, &ask.claim).await?;
        }
        answer
    }

    async fn take_across(&self, parts: &[Part], ask: &Ask) -> Result<Acquired> {
        let clock = &*self.options.clock;
        let until = match ask.wait {
            Wait::No => clock.now(),
            Wait::For(time) => clock.now() + time,
            Wait::Forever => Moment::NEVER,
        };
        loop {
            let sent_at = clock.now();
            let (blocked, busy) = match self.take_all(parts, ask).await? {
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
            if let busy @ Acquired::Busy(_) = self.acquire_in(group, &part).await? {
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
    ) -> Result<Result<Fence, (usize, lockkeeper_core::Busy)>> {
        let mut highest = Fence::MIN;
        // Twice at most: once to learn the highest fence, and once to give it to all.
        for raise in [false, true] {
            let mut same = true;
            for (i, part) in parts.iter().enumerate() {
                let (group, part) = self.part_of(part, ask, Wait::No);
                let keys: Vec<String> = part.claim.names.iter().map(|name| self.layout.key(name)).collect();
                match self.ask(group, &keys, &part, Stage::Hasty, raise.then_some(highest)).await? {
                    Answer::Granted(fence) => {
                        same &= i == 0 || fence == highest;
                        highest = highest.max(fence);
                    }
                    Answer::Busy(busy) => return Ok(Err((i, busy))),
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
        let mut answer = Release::AlreadyGone;
        for released in join_all(releases).await {
            if released? == Release::Released {
                answer = Release::Released;
            }
        }
        Ok(answer)
    }
}
