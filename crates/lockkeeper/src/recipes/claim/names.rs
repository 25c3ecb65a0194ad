//! The names of the two records of an item: its state, and the lease of the worker that has it.

use lockkeeper_core::{Error, LockName, Result};

/// The most bytes of a group's name.
pub const GROUP_BYTES: usize = 128;
/// The most bytes of an item's id.
pub const ITEM_BYTES: usize = 320;

/// The prefixes of a group's records. The length of the group stands in front of it, so that no two groups share a
/// name, whatever slashes they have.
#[derive(Clone, Debug)]
pub(super) struct GroupNames {
    pub states: String,
    pub leases: String,
}

impl GroupNames {
    pub fn new(group: &str) -> Result<GroupNames> {
        check("group", group, GROUP_BYTES)?;
        let own = format!("{:03}/{group}/", group.len());
        Ok(GroupNames { states: format!("claim/{own}"), leases: format!("claim-lease/{own}") })
    }

    /// The name of the record with the state of `id`.
    pub fn state(&self, id: &str) -> Result<LockName> {
        check("id of an item", id, ITEM_BYTES)?;
        LockName::new(format!("{}{id}", self.states))
    }

    /// The name of the record that exists while a worker has `id`, and while `id` waits for its next try.
    pub fn lease(&self, id: &str) -> Result<LockName> {
        check("id of an item", id, ITEM_BYTES)?;
        LockName::new(format!("{}{id}", self.leases))
    }
}

/// Checks what the name of a record is made of, with the same words for groups and for items.
fn check(what: &str, text: &str, most: usize) -> Result<()> {
    if text.is_empty() {
        return Err(Error::invalid(format!("the {what} is empty: give it 1 to {most} bytes of text")));
    }
    if text.len() > most {
        return Err(Error::invalid(format!(
            "the {what} has {} bytes, {most} are allowed: shorten it, or hash the long part",
            text.len()
        )));
    }
    LockName::new(text).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_items_share_a_record() {
        let name = |group: &str, id: &str| GroupNames::new(group).unwrap().state(id).unwrap();
        assert_ne!(name("a/b", "c"), name("a", "b/c"));
        assert_ne!(name("a", "1/a/c"), name("a/1", "a/c"));
        let longest = GroupNames::new(&"g".repeat(GROUP_BYTES)).unwrap();
        assert!(longest.lease(&"i".repeat(ITEM_BYTES)).is_ok(), "the longest names fit");
        for (group, id) in [("", "i"), ("g", ""), ("g\n", "i"), ("g", "i\0")] {
            let refused = GroupNames::new(group).and_then(|names| names.state(id));
            assert!(matches!(refused, Err(Error::Invalid(_))), "{group:?} {id:?}");
        }
        assert!(GroupNames::new(&"g".repeat(GROUP_BYTES + 1)).is_err());
        assert!(longest.state(&"i".repeat(ITEM_BYTES + 1)).is_err());
    }
}
