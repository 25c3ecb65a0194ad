//! The stored record of an election: the last proclamations, oldest first.

use lockkeeper_core::{Error, Fence, Result};
use serde::{Deserialize, Serialize};

use crate::recipes::format;

/// The number of proclamations in a record.
const PROCLAMATIONS_KEPT: usize = 16;
/// The most bytes of a value. Sixteen values fit into a record, however they are escaped.
const VALUE_BYTES: usize = 8 << 10;

/// A value that a leader published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proclamation {
    /// The leader's term: grows from leader to leader.
    pub term: Fence,
    /// Its number in the term: 1, 2, 3 and so on.
    pub number: u64,
    /// The value; `None` for a resignation.
    pub value: Option<String>,
    /// Whether the observer missed proclamations before this one, because it polled too late.
    #[serde(skip)]
    pub missed: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ElectionRecord {
    proclaimed: Vec<Proclamation>,
    /// Term and number of the newest proclamation that is no longer kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dropped: Option<(Fence, u64)>,
}

pub(super) fn check(value: &str) -> Result<()> {
    if value.len() > VALUE_BYTES {
        return Err(super::too_long(value.len(), VALUE_BYTES));
    }
    Ok(())
}

impl ElectionRecord {
    pub fn parse(name: &str, bytes: &[u8]) -> Result<ElectionRecord> {
        format::decode(&format!("election/{name}"), bytes)
    }

    pub fn bytes(&self) -> Vec<u8> {
        format::encode(self)
    }

    pub fn newest(&self) -> Option<&Proclamation> {
        self.proclaimed.last()
    }

    /// Adds a proclamation of the leader of `term`. A late leader receives [`Error::Stale`]: its successor
    /// has published.
    pub fn publish(&mut self, term: Fence, value: Option<String>) -> Result<()> {
        let number = match self.newest() {
            Some(newest) if newest.term > term => {
                return Err(Error::Stale { presented: term, seen: newest.term });
            }
            Some(newest) if newest.term == term => newest.number + 1,
            _ => 1,
        };
        self.proclaimed.push(Proclamation { term, number, value, missed: false });
        if self.proclaimed.len() > PROCLAMATIONS_KEPT {
            let oldest = self.proclaimed.remove(0);
            self.dropped = Some((oldest.term, oldest.number));
        }
        Ok(())
    }

    /// The proclamations after `reported`, in order; without it only the newest.
    pub fn since(&self, reported: Option<&Proclamation>) -> Vec<Proclamation> {
        let Some(reported) = reported else { return self.newest().cloned().into_iter().collect() };
        let order = |p: &Proclamation| (p.term, p.number);
        let mut news: Vec<_> =
            self.proclaimed.iter().filter(|p| order(p) > order(reported)).cloned().collect();
        let known = self.proclaimed.iter().map(order).chain(self.dropped);
        let remembered = known.into_iter().any(|known| known == order(reported));
        if let (false, Some(first)) = (remembered, news.first_mut()) {
            first.missed = true;
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn term(n: u64) -> Fence {
        Fence::new(n).unwrap()
    }

    #[test]
    fn an_observer_gets_all_that_is_kept_and_learns_of_a_gap() {
        let mut record = ElectionRecord::default();
        record.publish(term(5), Some("a".into())).unwrap();
        let reported = record.newest().cloned();
        for n in 0..3 {
            record.publish(term(6 + n), Some("b".into())).unwrap();
        }
        let news = record.since(reported.as_ref());
        assert_eq!(news.iter().map(|p| p.term.get()).collect::<Vec<_>>(), [6, 7, 8]);
        assert!(news.iter().all(|p| !p.missed));
        for _ in 0..PROCLAMATIONS_KEPT - 3 {
            record.publish(term(9), None).unwrap();
        }
        let news = record.since(reported.as_ref());
        assert!(
            news.len() == PROCLAMATIONS_KEPT && news.iter().all(|p| !p.missed),
            "all after it are kept: nothing was missed"
        );
        for _ in 0..3 {
            record.publish(term(9), None).unwrap();
        }
        let news = record.since(reported.as_ref());
        assert!(news.len() == PROCLAMATIONS_KEPT && news[0].missed && !news[1].missed);
        assert_eq!(record.since(record.newest()), []);
        assert!(matches!(record.publish(term(8), None), Err(Error::Stale { .. })));
    }

    #[test]
    fn sixteen_of_the_worst_values_fit_into_a_record() {
        let mut record = ElectionRecord::default();
        for n in 0..PROCLAMATIONS_KEPT as u64 {
            record.publish(term(n + 1), Some("\u{1}".repeat(VALUE_BYTES))).unwrap();
        }
        assert!(record.bytes().len() <= crate::register::VALUE_BYTES);
    }
}
