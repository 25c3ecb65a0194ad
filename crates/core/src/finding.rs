//! The findings of a store or an examination: how grave each is, which promise it touches, and every setting to change. `show`, the refusals
//! of `--correctness` and `doctor` print findings with the same words, which stand where the finding is made.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How grave a finding is. The gravest sorts first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A promise is broken now, or will be in ordinary operation.
    Harm,
    /// A promise breaks when something fails that can fail: a crash, a fail-over, a full disk. An operator can change it.
    Risk,
    /// A property of the store that a user should know. Nothing has to change.
    Hint,
}

impl Severity {
    /// The word in JSON and in messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Severity::Harm => "harm",
            Severity::Risk => "risk",
            Severity::Hint => "hint",
        }
    }
}

/// A promise that a finding touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Promise {
    /// No two valid guards of one lock at once.
    Exclusion,
    /// Fences strictly grow.
    Fence,
    /// A grant that was reported survives a crash.
    Durability,
    /// The next waiter gets a free lock within the declared time.
    Waiting,
    /// The store answers, and lets this client do what a lock needs.
    Availability,
}

impl Promise {
    /// Every promise, in the order in which reports list them.
    pub const ALL: [Promise; 5] =
        [Promise::Exclusion, Promise::Fence, Promise::Durability, Promise::Waiting, Promise::Availability];

    /// The word in JSON and in messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Promise::Exclusion => "exclusion",
            Promise::Fence => "fence",
            Promise::Durability => "durability",
            Promise::Waiting => "waiting",
            Promise::Availability => "availability",
        }
    }
}

/// One setting to change: of a server, of the operating system, of the URL, or a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingChange {
    /// The setting, as its documentation calls it.
    pub what: String,
    /// Its value now, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The value that it should have.
    pub to: String,
    /// The command or step that changes it, if one is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<String>,
}

impl fmt::Display for SettingChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.from {
            Some(from) => write!(f, "{} from {from} to {}", self.what, self.to),
            None => write!(f, "{} to {}", self.what, self.to),
        }
    }
}

/// A fact about a store that a user should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How grave it is.
    pub severity: Severity,
    /// Which promise it touches.
    pub promise: Promise,
    /// The fact and its consequence.
    pub text: String,
    /// Every setting to change so that the finding goes away. Empty for most hints.
    pub changes: Vec<SettingChange>,
}

impl Finding {
    /// A promise is broken now, or will be in ordinary operation.
    pub fn harm(promise: Promise, text: impl Into<String>) -> Finding {
        Finding { severity: Severity::Harm, promise, text: text.into(), changes: Vec::new() }
    }

    /// A promise breaks when something fails that can fail.
    pub fn risk(promise: Promise, text: impl Into<String>) -> Finding {
        Finding { severity: Severity::Risk, ..Finding::harm(promise, text) }
    }

    /// A property of the store that a user should know.
    pub fn hint(promise: Promise, text: impl Into<String>) -> Finding {
        Finding { severity: Severity::Hint, ..Finding::harm(promise, text) }
    }

    /// Adds a setting to change, without its value now.
    #[must_use]
    pub fn set(self, what: impl Into<String>, to: impl Into<String>) -> Finding {
        self.with(SettingChange { what: what.into(), from: None, to: to.into(), how: None })
    }

    /// Adds a setting to change, with its value now.
    #[must_use]
    pub fn change(self, what: impl Into<String>, from: impl Into<String>, to: impl Into<String>) -> Finding {
        self.with(SettingChange { what: what.into(), from: Some(from.into()), to: to.into(), how: None })
    }

    /// Adds the command or step that makes the last change.
    #[must_use]
    pub fn how(mut self, how: impl Into<String>) -> Finding {
        if let Some(last) = self.changes.last_mut() {
            last.how = Some(how.into());
        }
        self
    }

    fn with(mut self, change: SettingChange) -> Finding {
        self.changes.push(change);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        for (n, change) in self.changes.iter().enumerate() {
            write!(f, "{} {change}", if n == 0 { ". Change" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_every_change_and_sorts_by_gravity() {
        let gap = Finding::risk(Promise::Durability, "a crash loses the last grants")
            .change("appendfsync", "everysec", "always")
            .how("CONFIG SET appendfsync always")
            .set("appendonly", "yes");
        assert_eq!(
            gap.to_string(),
            "a crash loses the last grants. Change appendfsync from everysec to always, appendonly to yes"
        );
        assert!(Severity::Harm < Severity::Risk && Severity::Risk < Severity::Hint);
        let json = serde_json::to_value(&gap).unwrap();
        assert_eq!(json["severity"], "risk");
        assert_eq!(json["promise"], "durability");
        assert_eq!(json["changes"][0]["from"], "everysec");
        assert!(json["changes"][1].get("from").is_none());
        assert_eq!(serde_json::from_value::<Finding>(json).unwrap(), gap);
    }

    #[test]
    fn words_are_those_of_the_json() {
        for promise in Promise::ALL {
            assert_eq!(serde_json::to_value(promise).unwrap(), promise.as_str());
        }
        for severity in [Severity::Harm, Severity::Risk, Severity::Hint] {
            assert_eq!(serde_json::to_value(severity).unwrap(), severity.as_str());
        }
    }
}
