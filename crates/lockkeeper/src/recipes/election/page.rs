//! What the record of an election says: the last few proclamations, oldest first.

use lockkeeper_core::{Error, Fence, Result};
use serde::{Deserialize, Serialize};

/// How many are kept.
const KEPT: usize = 16;
/// Bytes of a value. Sixteen of them fit into a record, however they have to be escaped.
const VALUE_BYTES: usize = 8 << 10;

/// Something that a leader said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proclamation {
    /// The leader's term: grows from leader to leader.
    pub term: Fence,
    /// The how-manieth of its term: 1, 2, 3 and so on.
    pub number: u64,
    /// What it said; `None`: that it resigns.
    pub value: Option<String>,
    /// There were others before this one that nobody remembers. Only an observer that looked away for long sees it.
    #[serde(skip)]
    pub missed: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    proclaimed: Vec<Proclamation>,
    /// Term and number of the newest one that is not kept any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dropped: Option<(Fence, u64)>,
}

pub(super) fn check(value: &str) -> Result<()> {
    if value.len() > VALUE_BYTES {
        return Err(super::too_long(value.len(), VALUE_BYTES));
    }
    Ok(())
}

impl Page {
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Page> {
        serde_json::from_slice(bytes).map_err(|e| {
            Error::invalid(format!(
                "the record election/{name} was not written by this program ({e}): use another name, or delete it"
            ))
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a page is plain data")
    }

    pub fn newest(&self) -> Option<&Proclamation> {
        self.proclaimed.last()
    }

    /// Adds what the leader of `term` says. A leader that is late is told so: its successor has spoken.
    pub fn say(&mut self, term: Fence, value: Option<String>) -> Result<()> {
        let number = match self.newest() {
            Some(newest) if newest.term > term => {
                return Err(Error::Stale { presented: term, seen: newest.term });
            }
            Some(newest) if newest.term == term => newest.number + 1,
            _ => 1,
        };
        self.proclaimed.push(Proclamation { term, number, value, missed: false });
        if self.proclaimed.len() > KEPT {
            let oldest = self.proclaimed.remove(0);
            self.dropped = Some((oldest.term, oldest.number));
        }
        Ok(())
    }

    /// What was said after `told`, in order; without it only the newest.
    pub fn since(&self, told: Option<&Proclamation>) -> Vec<Proclamation> {
        let Some(told) = told else { return self.newest().cloned().into_iter().collect() };
        let order = |p: &Proclamation| (p.term, p.number);
        let mut news: Vec<_> = self.proclaimed.iter().filter(|p| order(p) > order(told)).cloned().collect();
        let known = self.proclaimed.iter().map(order).chain(self.dropped);
        let remembered = known.into_iter().any(|known| known == order(told));
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
    fn an_observer_is_told_all_that_is_kept_and_whether_there_was_more() {
        let mut page = Page::default();
        page.say(term(5), Some("a".into())).unwrap();
        let told = page.newest().cloned();
        for n in 0..3 {
            page.say(term(6 + n), Some("b".into())).unwrap();
        }
        let news = page.since(told.as_ref());
        assert_eq!(news.iter().map(|p| p.term.get()).collect::<Vec<_>>(), [6, 7, 8]);
        assert!(news.iter().all(|p| !p.missed));
        for _ in 0..KEPT - 3 {
            page.say(term(9), None).unwrap();
        }
        let news = page.since(told.as_ref());
        assert!(
            news.len() == KEPT && news.iter().all(|p| !p.missed),
            "all after it are kept: nothing was missed"
        );
        for _ in 0..3 {
            page.say(term(9), None).unwrap();
        }
        let news = page.since(told.as_ref());
        assert!(news.len() == KEPT && news[0].missed && !news[1].missed);
        assert_eq!(page.since(page.newest()), []);
        assert!(matches!(page.say(term(8), None), Err(Error::Stale { .. })));
    }

    #[test]
    fn sixteen_of_the_worst_values_fit_into_a_record() {
        let mut page = Page::default();
        for n in 0..KEPT as u64 {
            page.say(term(n + 1), Some("\u{1}".repeat(VALUE_BYTES))).unwrap();
        }
        assert!(page.bytes().len() <= crate::VALUE_BYTES);
    }
}
