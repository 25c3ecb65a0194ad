//! The versioned JSON of the recipes' records: an object whose first field is `"v"`, the version of the format.
//!
//! A process refuses a record of a newer format instead of reading it wrongly. A record without `"v"` has format 1.

use lockkeeper_core::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The version that this program writes and reads. Raise it with every change that older programs would read wrongly.
pub(crate) const FORMAT: u64 = 1;

/// The JSON object of `record`, with the version in front.
pub(crate) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    let fields = serde_json::to_vec(record).expect("a record is plain data");
    debug_assert!(fields.starts_with(b"{\""), "a record has at least one field");
    [format!("{{\"v\":{FORMAT},").as_bytes(), &fields[1..]].concat()
}

/// Reads what [`encode`] wrote. `what` names the record in errors.
pub(crate) fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T> {
    let foreign = |why: String| {
        Error::invalid(format!(
            "the record {what} was not written by this program ({why}): use another name, or delete the record"
        ))
    };
    let mut object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(bytes).map_err(|e| foreign(e.to_string()))?;
    match object.remove("v").map_or(Some(FORMAT), |version| version.as_u64()) {
        Some(FORMAT) => serde_json::from_value(object.into()).map_err(|e| foreign(e.to_string())),
        Some(version) if version > FORMAT => Err(Error::Unsupported(format!(
            "the record {what} has format {version}, and this program reads format {FORMAT}: upgrade this program"
        ))),
        _ => Err(foreign("its version is not known".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_newer_format_is_refused() {
        let read = |text: &str| decode::<std::collections::BTreeMap<String, u64>>("x/y", text.as_bytes());
        assert_eq!(read(r#"{"v":1,"a":7}"#).unwrap()["a"], 7);
        assert_eq!(read(r#"{"a":7}"#).unwrap()["a"], 7, "a record without a version has format 1");
        let newer = read(r#"{"v":2,"a":7}"#);
        assert!(matches!(&newer, Err(Error::Unsupported(why)) if why.contains("upgrade")), "{newer:?}");
        for foreign in ["", "7", "[]", r#"{"v":0}"#, r#"{"v":"1"}"#, r#"{"a":"b"}"#] {
            assert!(matches!(read(foreign), Err(Error::Invalid(_))), "{foreign}");
        }
    }
}
