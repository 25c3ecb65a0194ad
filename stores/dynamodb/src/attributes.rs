//! The attributes of the table's items: their names, and their values as numbers and text.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;

/// An item as DynamoDB stores it.
pub type AttributeMap = HashMap<String, AttributeValue>;

/// The partition key, and the only key.
pub const KEY: &str = "k";
/// The number of the last write of the item. Every write has the condition that it is still the one that was read.
pub const REV: &str = "rev";
/// The version of the stored format.
pub const FORMAT: &str = "format";
/// The highest fence of a lock.
pub const FENCE: &str = "fence";
/// The holds of a lock, as JSON. (`state` alone is a reserved word of DynamoDB's expressions.)
pub const LOCK_STATE: &str = "lock_state";

pub fn number(n: u64) -> AttributeValue {
    AttributeValue::N(n.to_string())
}

/// The value of a numeric attribute.
pub fn number_of(item: &AttributeMap, name: &str) -> Option<u64> {
    item.get(name)?.as_n().ok()?.parse().ok()
}

/// The value of a text attribute.
pub fn text_of<'a>(item: &'a AttributeMap, name: &str) -> Option<&'a str> {
    item.get(name)?.as_s().ok().map(String::as_str)
}
