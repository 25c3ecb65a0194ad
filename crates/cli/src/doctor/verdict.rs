//! One verdict for each promise: what the store declares, and what the findings do to it.

use lockkeeper::{Finding, Guarantee, Profile, Promise, Severity};

use crate::duration;

/// How a promise stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Kept.
    Kept,
    /// Kept unless a fault happens that the store does not survive by its nature; nothing can be changed about it.
    Likely,
    /// Kept until a fault happens that a change would make harmless.
    AtRisk,
    /// Not kept: this store does not promise it.
    NotKept,
    /// Broken: it does not even do what it promises.
    Broken,
    /// The store could not be asked.
    Unknown,
}

impl Standing {
    /// The word in JSON and in messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Standing::Kept => "kept",
            Standing::Likely => "likely",
            Standing::AtRisk => "at risk",
            Standing::NotKept => "not kept",
            Standing::Broken => "broken",
            Standing::Unknown => "unknown",
        }
    }
}

/// The verdict about one promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoctorVerdict {
    pub promise: Promise,
    pub standing: Standing,
    /// The meaning, in plain words.
    pub text: String,
}

/// The verdicts in the order of [`Promise::ALL`]. `profile`: none if the store could not be opened.
pub fn verdicts(profile: Option<&Profile>, findings: &[Finding]) -> Vec<DoctorVerdict> {
    Promise::ALL.into_iter().map(|promise| judge(promise, profile, findings)).collect()
}

fn judge(promise: Promise, profile: Option<&Profile>, findings: &[Finding]) -> DoctorVerdict {
    let worst =
        findings.iter().filter(|finding| finding.promise == promise).map(|finding| finding.severity).min();
    let standing = match (profile, worst) {
        (_, Some(Severity::Harm)) => Standing::Broken,
        (None, _) => Standing::Unknown,
        (Some(_), Some(Severity::Risk)) => Standing::AtRisk,
        (Some(profile), _) => declared(promise, profile),
    };
    DoctorVerdict { promise, standing, text: meaning(promise, standing, profile) }
}

fn declared(promise: Promise, profile: &Profile) -> Standing {
    let guarantee = match promise {
        Promise::Exclusion => profile.exclusion,
        Promise::Fence => profile.fence,
        Promise::Durability => profile.durable,
        Promise::Waiting | Promise::Availability => Guarantee::Kept,
    };
    match guarantee {
        Guarantee::Kept => Standing::Kept,
        Guarantee::Likely => Standing::Likely,
        Guarantee::No => Standing::NotKept,
    }
}

fn meaning(promise: Promise, standing: Standing, profile: Option<&Profile>) -> String {
    let good = matches!(standing, Standing::Kept);
    let text = match (promise, standing) {
        (_, Standing::Unknown) => "the store could not be asked",
        (Promise::Exclusion, _) if good => {
            "no two processes hold one lock at once, unless one is paused past its ttl"
        }
        (Promise::Exclusion, Standing::Likely) => {
            "two processes hold one lock at once only after a fault that this store does not survive"
        }
        (Promise::Exclusion, Standing::AtRisk) => {
            "two processes can hold one lock at once if the fault below happens"
        }
        (Promise::Exclusion, _) => "two processes can hold one lock at once",
        (Promise::Fence, _) if good => {
            "each grant has a higher fence than every grant before it, also after a crash"
        }
        (Promise::Fence, Standing::Likely) => {
            "fences can go back after a crash or a fail-over that loses grants"
        }
        (Promise::Fence, Standing::AtRisk) => "fences can go back if the fault below happens",
        (Promise::Fence, _) => {
            "fences can go back: a resource that checks them may refuse every writer, or take a late write"
        }
        (Promise::Durability, _) if good => "a grant that was reported survives a crash of the store",
        (Promise::Durability, Standing::Likely) => "a crash or a fail-over can lose the last grants",
        (Promise::Durability, Standing::AtRisk) => "a crash can lose grants, for the reason below",
        (Promise::Durability, Standing::NotKept) => "the store does not promise to keep grants over a crash",
        (Promise::Durability, _) => "the store forgets grants",
        (Promise::Waiting, Standing::Broken) => "a waiter does not get a free lock in time",
        (Promise::Waiting, _) => {
            let wake = profile.map_or_else(String::new, |profile| duration::measured(profile.wake));
            let poll = if good { "" } else { ", with the restriction below" };
            return format!("the next waiter gets a free lock within {wake}{poll}");
        }
        (Promise::Availability, _) if good => "the store answers, and lets this user do what a lock needs",
        (Promise::Availability, Standing::AtRisk) => {
            "the store answers now, and will not if the fault below happens"
        }
        (Promise::Availability, _) => "the store does not do what a lock needs",
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(profile: Option<&Profile>, findings: &[Finding], promise: Promise) -> Standing {
        let all = verdicts(profile, findings);
        all.iter()
            .find(|verdict| verdict.promise == promise)
            .map(|verdict| verdict.standing)
            .expect("each promise")
    }

    #[test]
    fn a_finding_lowers_the_promise_that_it_touches_and_no_other() {
        let kept = Profile {
            exclusion: Guarantee::Kept,
            fence: Guarantee::Kept,
            durable: Guarantee::Likely,
            ..Profile::undeclared("test")
        };
        let risk = [Finding::risk(Promise::Exclusion, "a fault")];
        let harm = [Finding::hint(Promise::Fence, "a hint"), Finding::harm(Promise::Fence, "a break")];
        for promise in Promise::ALL {
            let healthy = standing(Some(&kept), &[], promise);
            let likely = promise == Promise::Durability;
            assert_eq!(healthy, if likely { Standing::Likely } else { Standing::Kept }, "{promise:?}");
            if promise != Promise::Exclusion {
                assert_eq!(standing(Some(&kept), &risk, promise), healthy);
            }
        }
        assert_eq!(standing(Some(&kept), &risk, Promise::Exclusion), Standing::AtRisk);
        assert_eq!(standing(Some(&kept), &harm, Promise::Fence), Standing::Broken);
        assert_eq!(standing(None, &risk, Promise::Exclusion), Standing::Unknown);
        let hint = [Finding::hint(Promise::Fence, "a hint")];
        assert_eq!(standing(Some(&kept), &hint, Promise::Fence), Standing::Kept, "a hint lowers nothing");
    }
}
