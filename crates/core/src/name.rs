//! Lock names: what is locked.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, limits};

/// The name of a lock: any UTF-8 text of 1 to 512 bytes without control characters. Checked once, here.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LockName(Arc<str>);

impl LockName {
    /// Checks a name. An empty or over-long name, or one with control characters, is [`Error::Invalid`].
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        if name.is_empty() {
            return Err(Error::invalid("the name is empty: give it 1 to 512 bytes of text"));
        }
        if name.len() > limits::NAME_BYTES {
            return Err(Error::invalid(format!(
                "the name has {} bytes, {} are allowed: shorten it, or hash the long part",
                name.len(),
                limits::NAME_BYTES
            )));
        }
        if let Some(c) = name.chars().find(|c| c.is_control()) {
            return Err(Error::invalid(format!(
                "the name {name:?} has the control character {c:?} in it: names are printable text"
            )));
        }
        Ok(LockName(name.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl AsRef<str> for LockName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for LockName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for LockName {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        LockName::new(s)
    }
}

impl TryFrom<String> for LockName {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        LockName::new(s)
    }
}

impl From<LockName> for String {
    fn from(name: LockName) -> String {
        name.as_str().to_owned()
    }
}

/// The names of one request: sorted, each once, at least one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Names(Inner);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Inner {
    // Nearly every request has one name: no second allocation for it.
    One(LockName),
    Many(Arc<[LockName]>),
}

impl Names {
    /// Sorts the names and drops repetitions; none or more than [`limits::NAMES`] is [`Error::Invalid`].
    pub fn new(names: impl IntoIterator<Item = LockName>) -> Result<Self> {
        let mut all: Vec<LockName> = names.into_iter().collect();
        all.sort();
        all.dedup();
        match all.len() {
            0 => Err(Error::invalid("a request needs at least one name")),
            1 => Ok(Names(Inner::One(all.remove(0)))),
            n if n > limits::NAMES => {
                Err(Error::invalid(format!("a request may have {} names, this one has {n}", limits::NAMES)))
            }
            _ => Ok(Names(Inner::Many(all.into()))),
        }
    }

    /// The names, sorted.
    pub fn as_slice(&self) -> &[LockName] {
        match &self.0 {
            Inner::One(name) => std::slice::from_ref(name),
            Inner::Many(names) => names,
        }
    }

    /// The names, sorted.
    pub fn iter(&self) -> std::slice::Iter<'_, LockName> {
        self.as_slice().iter()
    }

    /// The first name in order; every request has one.
    pub fn first(&self) -> &LockName {
        &self.as_slice()[0]
    }

    /// How many names there are: at least one.
    pub fn count(&self) -> usize {
        self.as_slice().len()
    }
}

impl From<LockName> for Names {
    fn from(name: LockName) -> Self {
        Names(Inner::One(name))
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.iter().enumerate() {
            write!(f, "{}{name}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

impl<'a> IntoIterator for &'a Names {
    type Item = &'a LockName;
    type IntoIter = std::slice::Iter<'a, LockName>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_when_they_are_made() {
        for good in ["a", "orders/42", "'; drop table", "a/../b", "..", "{x}*", "ключ", &"x".repeat(512)]
        {
            assert_eq!(LockName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a\nb", "\0", "tab\t", "\u{7f}", "\u{85}", &"x".repeat(513)] {
            assert!(matches!(LockName::new(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }

    #[test]
    fn names_are_sorted_and_deduplicated() {
        let n = |s: &str| LockName::new(s).unwrap();
        let names = Names::new([n("b"), n("a"), n("b")]).unwrap();
        assert_eq!(names.as_slice(), [n("a"), n("b")]);
        assert!(Names::new([]).is_err());
        assert!(Names::new((0..=limits::NAMES).map(|i| n(&i.to_string()))).is_err());
    }
}
