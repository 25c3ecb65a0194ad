//! The result of a scenario: the halves with their counts, the checks that decide the verdict, and the conclusion.

use serde::Serialize;

use crate::half::LabHalf;
use crate::timeline::Timeline;

/// A number that the director counted in one half.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LabCount {
    /// Its key in JSON.
    pub key: &'static str,
    /// The number.
    pub number: f64,
    /// The words after the number. None: only the checks need the number.
    pub words: String,
    /// Whether any number above zero is harm.
    pub harm: bool,
}

impl LabCount {
    /// A count. `words` are those after the number: of `{write|writes}`, the first form for 1, and the second one for all others.
    pub fn new(key: &'static str, number: f64, words: &str, harm: bool) -> LabCount {
        // An empty sum is a negative zero.
        let number = number + 0.0;
        LabCount { key, number, words: choose(number, words), harm }
    }

    /// The number as a person reads it.
    pub fn shown(&self) -> String {
        let whole = self.number.fract() == 0.0;
        if whole { format!("{:.0}", self.number) } else { format!("{:.2}", self.number) }
    }

    /// Whether it is harm, and there is some.
    pub fn hurts(&self) -> bool {
        self.harm && self.number > 0.0
    }
}

/// The words for a number: of `{write|writes}`, the first form for 1, and the second one for all others.
pub fn choose(number: f64, words: &str) -> String {
    let mut text = String::new();
    for (i, part) in words.split(['{', '}']).enumerate() {
        // Every second part stands in braces.
        text += match part.split_once('|').filter(|_| i % 2 == 1) {
            Some((one, many)) => {
                if number == 1.0 {
                    one
                } else {
                    many
                }
            }
            None => part,
        };
    }
    text
}

/// A number with its words, as in "1 stale write". `words`: see [`choose`].
pub fn amount(number: f64, words: &str) -> String {
    format!("{number} {}", choose(number, words))
}

/// One half of a scenario, after its end.
#[derive(Clone, Debug, Serialize)]
pub struct HalfReport {
    /// The name of the way, for instance "naive".
    pub way: String,
    /// How it works, in a sentence.
    pub how: String,
    /// The counts.
    pub counts: Vec<LabCount>,
    /// The events, as tracks of the processes.
    pub timeline: Timeline,
}

impl HalfReport {
    /// The number of a count.
    ///
    /// # Panics
    /// If the half has no such count.
    pub fn number(&self, key: &str) -> f64 {
        let count = self.counts.iter().find(|count| count.key == key);
        count.unwrap_or_else(|| panic!("the half {} counts no {key}", self.way)).number
    }
}

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckSubject {
    /// The fault fired. If not, the run proves nothing.
    Fault,
    /// The naive way broke.
    Naive,
    /// The safe way did not.
    Safe,
}

/// One check of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct LabCheck {
    /// Its subject.
    pub subject: CheckSubject,
    /// The expectation.
    pub expected: String,
    /// Whether it was so.
    pub holds: bool,
}

/// A curve of a chart.
#[derive(Clone, Debug, Serialize)]
pub struct ChartSeries {
    /// Its name.
    pub name: String,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

/// A chart beside the timelines.
#[derive(Clone, Debug, Serialize)]
pub struct LabChart {
    /// Its title.
    pub title: String,
    /// The words at the x axis.
    pub x: String,
    /// The words at the y axis.
    pub y: String,
    /// The curves.
    pub series: Vec<ChartSeries>,
}

/// Whether the scenario came out as its page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LabVerdict {
    /// Each half came out as the page says.
    Expected,
    /// A half came out otherwise.
    Otherwise,
    /// The fault did not fire: the run proves nothing.
    Invalid,
}

/// The result of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioOutcome {
    /// The halves; the naive one first.
    pub halves: Vec<HalfReport>,
    /// The checks.
    pub checks: Vec<LabCheck>,
    /// Curves, if the scenario measures something.
    pub charts: Vec<LabChart>,
    /// The conclusion in one sentence, with the numbers of this run.
    pub conclusion: String,
}

impl ScenarioOutcome {
    /// The outcome of these halves, without checks: it is invalid until the fault is known to have fired.
    pub fn new(halves: impl IntoIterator<Item = LabHalf>) -> ScenarioOutcome {
        let halves = halves.into_iter().map(LabHalf::report).collect();
        ScenarioOutcome { halves, checks: Vec::new(), charts: Vec::new(), conclusion: String::new() }
    }

    /// The number of a count of one half.
    ///
    /// # Panics
    /// If the half has no such count.
    pub fn number(&self, half: usize, key: &str) -> f64 {
        self.halves[half].number(key)
    }

    fn check(mut self, subject: CheckSubject, expected: &str, holds: bool) -> Self {
        self.checks.push(LabCheck { subject, expected: expected.to_owned(), holds });
        self
    }

    /// The fault fired.
    #[must_use]
    pub fn fault(self, expected: &str, holds: bool) -> Self {
        self.check(CheckSubject::Fault, expected, holds)
    }

    /// The naive way broke.
    #[must_use]
    pub fn naive(self, expected: &str, holds: bool) -> Self {
        self.check(CheckSubject::Naive, expected, holds)
    }

    /// The safe way held.
    #[must_use]
    pub fn safe(self, expected: &str, holds: bool) -> Self {
        self.check(CheckSubject::Safe, expected, holds)
    }

    /// The conclusion, in one sentence.
    #[must_use]
    pub fn conclude(self, conclusion: impl Into<String>) -> Self {
        ScenarioOutcome { conclusion: conclusion.into(), ..self }
    }

    /// The verdict. A run without a fault that fired, or without a check of each side, is invalid.
    pub fn verdict(&self) -> LabVerdict {
        let of = |subject| self.checks.iter().filter(move |check| check.subject == subject);
        let none = [CheckSubject::Fault, CheckSubject::Naive, CheckSubject::Safe]
            .iter()
            .any(|subject| of(*subject).next().is_none());
        if none || !of(CheckSubject::Fault).all(|check| check.holds) {
            LabVerdict::Invalid
        } else if self.checks.iter().all(|check| check.holds) {
            LabVerdict::Expected
        } else {
            LabVerdict::Otherwise
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_follow_the_number() {
        assert_eq!(amount(1.0, "stale {write|writes} kept"), "1 stale write kept");
        assert_eq!(amount(0.0, "{query|queries}"), "0 queries");
    }

    fn outcome() -> ScenarioOutcome {
        ScenarioOutcome::new([])
    }

    #[test]
    fn a_run_without_a_fault_is_invalid() {
        assert_eq!(outcome().verdict(), LabVerdict::Invalid);
        assert_eq!(outcome().naive("broke", true).safe("held", true).verdict(), LabVerdict::Invalid);
        let not_fired = outcome().fault("fired", false).naive("broke", true).safe("held", true);
        assert_eq!(not_fired.verdict(), LabVerdict::Invalid);
        assert_eq!(outcome().fault("fired", true).safe("held", true).verdict(), LabVerdict::Invalid);
    }

    #[test]
    fn each_half_must_come_out_as_expected() {
        let fired = || outcome().fault("fired", true);
        assert_eq!(fired().naive("broke", true).safe("held", true).verdict(), LabVerdict::Expected);
        assert_eq!(fired().naive("broke", false).safe("held", true).verdict(), LabVerdict::Otherwise);
        assert_eq!(fired().naive("broke", true).safe("held", false).verdict(), LabVerdict::Otherwise);
    }
}
