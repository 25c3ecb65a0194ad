//! One broken rule, with the events that show it.

use std::fmt;

use super::HistoryEvent;

/// Which rule was broken. The numbers are those of the checkers in the reliability notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// C1: no two holders believe to hold what only one may.
    Exclusion,
    /// C2: fences grow from grant to grant.
    Fence,
    /// C3: a fenced resource takes writes in the order of their fences, and loses none.
    Resource,
    /// C4: a free lock goes to a waiter within the declared bound.
    Liveness,
    /// C5: nothing is left in the store.
    Residue,
    /// C6: a holder learns of the loss by its deadline.
    Signal,
    /// C7: only the owner renews and releases, and releases once.
    Owner,
    /// One order of all grants and releases explains what the clients saw: a second opinion on C1 and C2.
    Linearizability,
}

impl Rule {
    /// Its number.
    pub fn number(self) -> &'static str {
        match self {
            Rule::Exclusion => "C1",
            Rule::Fence => "C2",
            Rule::Resource => "C3",
            Rule::Liveness => "C4",
            Rule::Residue => "C5",
            Rule::Signal => "C6",
            Rule::Owner => "C7",
            Rule::Linearizability => "C1, C2",
        }
    }
}

/// A rule was broken: by what, in words, and the events that show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// A description.
    pub text: String,
    /// The events concerned, mostly two.
    pub events: Vec<HistoryEvent>,
}

impl Violation {
    pub(super) fn new<'e>(
        rule: Rule,
        text: impl Into<String>,
        events: impl IntoIterator<Item = Option<&'e HistoryEvent>>,
    ) -> Violation {
        Violation { rule, text: text.into(), events: events.into_iter().flatten().cloned().collect() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.rule.number(), self.rule, self.text)?;
        for event in &self.events {
            write!(f, "\n    {event}")?;
        }
        Ok(())
    }
}
