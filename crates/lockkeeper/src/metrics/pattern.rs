//! From the name of a lock to the label of its metrics: patterns, and the bound on how many labels a process uses.

use std::collections::BTreeSet;
use std::sync::Mutex;

use lockkeeper_core::{Error, IgnorePoison, Result};

/// The label of a lock that no pattern matches, and of every pattern beyond [`PATTERNS_MAX`].
pub const OTHER: &str = "other";
/// How many patterns a process uses as labels.
pub const PATTERNS_MAX: usize = 100;
/// The longest pattern.
pub const PATTERN_BYTES: usize = 128;

/// The locks of the recipes, whose names begin with the recipe.
const RECIPES: [(&str, &str); 5] = [
    ("once/", "once/*"),
    ("cached/", "cached/*"),
    ("election/", "election/*"),
    ("partition/", "partition/*"),
    ("fence/", "fence/*"),
];

/// A pattern that stands for many names, and is their label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetricsPattern {
    text: Box<str>,
    /// The place of the first star.
    star: Option<usize>,
}

impl MetricsPattern {
    pub fn new(text: &str) -> Result<Self> {
        if text.is_empty() || text.len() > PATTERN_BYTES || text.chars().any(char::is_control) {
            return Err(Error::invalid(format!(
                "a pattern of metrics has 1 to {PATTERN_BYTES} bytes and no control characters"
            )));
        }
        Ok(MetricsPattern { text: text.into(), star: text.find('*') })
    }

    /// The label.
    pub fn label(&self) -> &str {
        &self.text
    }

    /// Whether the pattern matches the whole name: `*` stands for any text.
    fn matches(&self, name: &str) -> bool {
        let Some(star) = self.star else { return *self.text == *name };
        let Some(mut name) = name.strip_prefix(&self.text[..star]) else { return false };
        let rest = &self.text[star + 1..];
        if rest.is_empty() {
            return true;
        }
        let mut parts = rest.split('*');
        let last = parts.next_back().unwrap_or_default();
        // The earliest place of each part leaves the most room for the ones after it.
        for part in parts {
            let Some(at) = name.find(part) else { return false };
            name = &name[at + part.len()..];
        }
        name.ends_with(last)
    }
}

/// The rules from names to labels: patterns in which `*` stands for any text, of which the first that matches the whole name counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PatternRules(Vec<MetricsPattern>);

/// The rules of a keeper that was given none.
pub(crate) static NO_RULES: PatternRules = PatternRules(Vec::new());

impl PatternRules {
    /// Parses the patterns.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more than [`PATTERNS_MAX`] patterns, or if one is empty, longer than [`PATTERN_BYTES`], or
    /// has control characters.
    pub fn new<P: AsRef<str>>(patterns: impl IntoIterator<Item = P>) -> Result<Self> {
        let rules = patterns.into_iter().take(PATTERNS_MAX + 1);
        let rules: Result<Vec<_>> = rules.map(|pattern| MetricsPattern::new(pattern.as_ref())).collect();
        match rules? {
            rules if rules.len() > PATTERNS_MAX => {
                Err(Error::invalid(format!("there are more than {PATTERNS_MAX} patterns of metrics")))
            }
            rules => Ok(PatternRules(rules)),
        }
    }

    /// The label of a name by these rules, else by its recipe, else [`OTHER`].
    pub fn label_of(&self, name: &str) -> &str {
        if let Some(rule) = self.0.iter().find(|rule| rule.matches(name)) {
            return rule.label();
        }
        RECIPES.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or(OTHER, |(_, label)| label)
    }

    /// The labels of these rules.
    pub fn labels(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(MetricsPattern::label)
    }
}

/// The label itself if this process may use it, else [`OTHER`]: recorders belong to the process, so the bound does too.
pub(crate) fn admit(label: &str) -> &str {
    static USED: Mutex<BTreeSet<Box<str>>> = Mutex::new(BTreeSet::new());
    if label == OTHER || RECIPES.iter().any(|(_, recipe)| *recipe == label) {
        return label;
    }
    let mut used = USED.lock().ignore_poison();
    if used.contains(label) {
        return label;
    }
    if used.len() >= PATTERNS_MAX {
        return OTHER;
    }
    used.insert(label.into());
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        MetricsPattern::new(pattern).unwrap().matches(name)
    }

    #[test]
    fn a_star_stands_for_any_text() {
        assert!(matches("orders/*", "orders/42") && matches("orders/*", "orders/") && matches("*", "x"));
        assert!(!matches("orders/*", "order/42") && !matches("orders", "orders/42"));
        assert!(matches("a*b*c", "axxbyyc") && matches("a*b*c", "abcbc") && !matches("a*b*c", "acb"));
        assert!(matches("*/lock", "a/b/lock") && !matches("*/lock", "a/lock/b"));
        // The begin and the end of a pattern do not share a character of the name.
        assert!(!matches("aba*aba", "aba") && !matches("ab*ba", "aba") && matches("ab*ba", "abba"));
        assert!(matches("**", "") && matches("é*", "éa"));
    }

    #[test]
    fn the_first_rule_counts_then_the_recipe() {
        let rules = PatternRules::new(["once/invoice-*", "*-1"]).unwrap();
        assert_eq!(rules.label_of("once/invoice-1"), "once/invoice-*");
        assert_eq!(rules.label_of("once/refund"), "once/*");
        assert_eq!(rules.label_of("orders/42"), OTHER);
    }

    #[test]
    fn a_bad_pattern_is_refused() {
        let is_good = |patterns: &[&str]| PatternRules::new(patterns).is_ok();
        assert!(!is_good(&[""]) && !is_good(&["a\nb"]) && !is_good(&[&"x".repeat(129)]));
        assert!(is_good(&["x"; 100]) && !is_good(&["x"; 101]));
        assert!(PatternRules::new(std::iter::repeat("endless")).is_err());
    }
}
