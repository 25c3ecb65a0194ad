//! The content of an object: one line with the mark, then the value as it is.

use lockkeeper_core::{Error, Fence, Result};

use crate::GuardedValue;

const WORD: &[u8] = b"lockkeeper-fence ";
const DELETED: &[u8] = b" deleted";
/// The word, twenty digits, the other word, and the end of the line.
pub(super) const LONGEST_LINE: usize = WORD.len() + 20 + DELETED.len() + 1;

/// An object with this mark and this value; without a value, what is left of one that was deleted.
pub(super) fn written(fence: Fence, value: Option<&[u8]>) -> Vec<u8> {
    let number = fence.to_string();
    let deleted = if value.is_none() { DELETED } else { b"" };
    [WORD, number.as_bytes(), deleted, b"\n", value.unwrap_or_default()].concat()
}

/// Reads an object that you have got in your own way. `None`: it has no mark, and all of it is the value.
///
/// # Errors
/// [`Error::Invalid`] if it begins like a mark and is none: nothing may be taken on the strength of it.
pub fn parse(object: &[u8]) -> Result<Option<GuardedValue>> {
    let Some((fence, deleted, from)) = line(object)? else { return Ok(None) };
    let value = (!deleted).then(|| object[from..].to_vec());
    Ok(Some(GuardedValue { fence, value }))
}

/// The mark alone; the first line is enough for it.
pub(super) fn mark(object: &[u8]) -> Result<Option<Fence>> {
    Ok(line(object)?.map(|(fence, ..)| fence))
}

/// The mark, whether there is no value, and where the value begins.
fn line(object: &[u8]) -> Result<Option<(Fence, bool, usize)>> {
    let Some(rest) = object.strip_prefix(WORD) else { return Ok(None) };
    let damaged =
        || Error::invalid("the mark in the first line of the object is damaged: mend it or remove the line");
    let end = rest.iter().take(LONGEST_LINE).position(|byte| *byte == b'\n').ok_or_else(damaged)?;
    let (number, deleted) = match rest[..end].strip_suffix(DELETED) {
        Some(number) => (number, true),
        None => (&rest[..end], false),
    };
    // Digits only: `parse` would take a plus too.
    let digits = number.iter().all(u8::is_ascii_digit).then_some(number).ok_or_else(damaged)?;
    let number =
        std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).ok_or_else(damaged)?;
    let fence = Fence::new(number).map_err(|_| damaged())?;
    Ok(Some((fence, deleted, WORD.len() + end + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for fence in [Fence::MIN, Fence::new(42).unwrap(), Fence::MAX] {
            for value in
                [None, Some(&b""[..]), Some(b"\n"), Some(b" deleted\n"), Some(b"lockkeeper-fence 9\n")]
            {
                let object = written(fence, value);
                let seen = GuardedValue { fence, value: value.map(<[u8]>::to_vec) };
                assert_eq!(parse(&object).unwrap(), Some(seen));
                assert_eq!(mark(&object[..object.len().min(LONGEST_LINE)]).unwrap(), Some(fence));
            }
        }
    }

    /// The stored format: the bytes that this version writes, and that every later version must read.
    #[test]
    fn the_golden_objects_are_read_and_written() {
        let fence = Fence::new(42).unwrap();
        let object = include_bytes!("../../tests/golden/object");
        let value = b"the value\n".as_slice();
        assert_eq!(parse(object).unwrap(), Some(GuardedValue { fence, value: Some(value.to_vec()) }));
        assert_eq!(written(fence, Some(value)), object);
        let deleted = include_bytes!("../../tests/golden/object-deleted");
        assert_eq!(parse(deleted).unwrap(), Some(GuardedValue { fence, value: None }));
        assert_eq!(written(fence, None), deleted);
    }

    #[test]
    fn an_object_without_a_mark_is_told_from_one_with_a_damaged_mark() {
        for plain in ["", "a", "lockkeeper-fence", "lockkeeper-fences 7\n", "x lockkeeper-fence 7\n"] {
            assert_eq!(parse(plain.as_bytes()).unwrap(), None, "{plain:?}");
        }
        let long = format!("{}\n", "1".repeat(40));
        for damaged in
            ["", "7", "\n", "x\n", "0\n", "+7\n", "-7\n", "7 gone\n", "7 deleted", " 7\n", "7\r\n", &long]
        {
            let parsed = parse(format!("lockkeeper-fence {damaged}").as_bytes());
            assert!(matches!(parsed, Err(Error::Invalid(_))), "{damaged:?}: {parsed:?}");
        }
    }
}
