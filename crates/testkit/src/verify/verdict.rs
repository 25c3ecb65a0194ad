//! From the results of laws to a verdict for each promise.

use lockkeeper_core::{Guarantee, Profile};
use serde::Serialize;

/// A promise of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum VerifiedPromise {
    /// X: no two valid holders at once.
    Exclusion,
    /// F: fences grow from grant to grant.
    Fence,
    /// Grants and records are in the store, and not in a client.
    Durability,
    /// W: waiters are granted in order, and within the time that the store declares.
    Waiting,
    /// A record changes only as its writer expects.
    Records,
    /// Other clients are shown the truth.
    Views,
}

impl VerifiedPromise {
    /// Every promise, in the order of a report.
    pub const ALL: [VerifiedPromise; 6] = [
        VerifiedPromise::Exclusion,
        VerifiedPromise::Fence,
        VerifiedPromise::Durability,
        VerifiedPromise::Waiting,
        VerifiedPromise::Records,
        VerifiedPromise::Views,
    ];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            VerifiedPromise::Exclusion => "exclusion",
            VerifiedPromise::Fence => "fence",
            VerifiedPromise::Durability => "durability",
            VerifiedPromise::Waiting => "waiting",
            VerifiedPromise::Records => "records",
            VerifiedPromise::Views => "views",
        }
    }

    /// How far the store declares that it keeps the promise. `None`: it declares nothing about it.
    fn declared(self, profile: &Profile) -> Option<Guarantee> {
        match self {
            VerifiedPromise::Exclusion => Some(profile.exclusion),
            VerifiedPromise::Fence => Some(profile.fence),
            VerifiedPromise::Durability => Some(profile.durable),
            VerifiedPromise::Waiting | VerifiedPromise::Records | VerifiedPromise::Views => None,
        }
    }
}

/// How one law, or one check of the traffic, came out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", content = "why", rename_all = "kebab-case")]
pub enum LawOutcome {
    /// The store kept it.
    Kept,
    /// The verification does not run it, because.
    LeftOut(String),
    /// It was ended before it had a result.
    Stopped,
    /// It could not be decided, because.
    Unclear(String),
    /// The store broke it: what the law says.
    Broken(String),
}

/// The result of one law, or of one check of the traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LawResult {
    /// Its name.
    pub law: String,
    /// The promise that it is of.
    pub promise: VerifiedPromise,
    /// How it came out.
    #[serde(flatten)]
    pub outcome: LawOutcome,
    /// How many grants it saw.
    pub grants: u64,
}

impl LawResult {
    /// A result without grants.
    pub fn new(law: impl Into<String>, promise: VerifiedPromise, outcome: LawOutcome) -> Self {
        LawResult { law: law.into(), promise, outcome, grants: 0 }
    }
}

/// The verdict on a promise, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every law that was run was kept.
    Kept,
    /// A law could not be decided, or none was run.
    Unclear,
    /// The store broke the promise.
    Broken,
}

impl Verdict {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Kept => "kept",
            Verdict::Unclear => "unclear",
            Verdict::Broken => "broken",
        }
    }
}

/// The verdict on one promise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PromiseVerdict {
    /// The promise.
    pub promise: VerifiedPromise,
    /// The verdict: what was seen in this verification.
    pub verdict: Verdict,
    /// The declaration of the store, for the times that no verification sees: crashes, failovers, clocks that jump.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declared: Option<Guarantee>,
    /// How many laws were kept, and how many were run.
    pub kept: usize,
    /// How many were run.
    pub run: usize,
}

/// The verdict on each promise that has a law among the results.
pub fn judge(profile: &Profile, results: &[LawResult]) -> Vec<PromiseVerdict> {
    let of = |promise: VerifiedPromise| {
        let all: Vec<&LawOutcome> =
            results.iter().filter(|result| result.promise == promise).map(|result| &result.outcome).collect();
        let run: Vec<_> = all.iter().filter(|outcome| !matches!(outcome, LawOutcome::LeftOut(_))).collect();
        let kept = run.iter().filter(|outcome| matches!(outcome, LawOutcome::Kept)).count();
        let verdict = match run.iter().any(|outcome| matches!(outcome, LawOutcome::Broken(_))) {
            true => Verdict::Broken,
            false if kept == run.len() && kept > 0 => Verdict::Kept,
            false => Verdict::Unclear,
        };
        let judged =
            PromiseVerdict { promise, verdict, declared: promise.declared(profile), kept, run: run.len() };
        (!all.is_empty()).then_some(judged)
    };
    VerifiedPromise::ALL.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(outcome: LawOutcome) -> LawResult {
        LawResult::new("law", VerifiedPromise::Fence, outcome)
    }

    fn verdict(outcomes: impl IntoIterator<Item = LawOutcome>) -> Verdict {
        let results: Vec<LawResult> = outcomes.into_iter().map(result).collect();
        let judged = judge(&Profile::undeclared("test"), &results);
        assert_eq!(judged.len(), 1);
        judged[0].verdict
    }

    #[test]
    fn one_broken_law_breaks_its_promise_and_nothing_run_proves_nothing() {
        let (unclear, broken) = (|| LawOutcome::Unclear("slow".into()), || LawOutcome::Broken("two".into()));
        assert_eq!(verdict([LawOutcome::Kept, LawOutcome::LeftOut("long".into())]), Verdict::Kept);
        assert_eq!(verdict([LawOutcome::Kept, unclear()]), Verdict::Unclear);
        assert_eq!(verdict([LawOutcome::Kept, LawOutcome::Stopped]), Verdict::Unclear);
        assert_eq!(verdict([LawOutcome::LeftOut("long".into())]), Verdict::Unclear);
        assert_eq!(verdict([unclear(), broken(), LawOutcome::Kept]), Verdict::Broken);
    }
}
