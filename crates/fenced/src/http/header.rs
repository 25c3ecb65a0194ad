//! The header: one fence, in digits.

use http::{HeaderMap, HeaderName};
use lockkeeper_core::Fence;

/// The header that a fence travels in: `Lock-Fence: 1794775452413713`.
pub const LOCK_FENCE: HeaderName = HeaderName::from_static("lock-fence");

/// The fence that was sent, if one was; or what is wrong with it.
pub(super) fn of(headers: &HeaderMap) -> Result<Option<Fence>, &'static str> {
    let mut given = headers.get_all(LOCK_FENCE).iter();
    let Some(value) = given.next() else { return Ok(None) };
    // Two would be two opinions about who writes.
    if given.next().is_some() {
        return Err("it is given more than once");
    }
    let digits = value.as_bytes();
    // "+5" and " 5" are numbers to some readers and none to others.
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err("it is not a number in digits");
    }
    let number = std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok());
    match number.map(Fence::new) {
        Some(Ok(fence)) => Ok(Some(fence)),
        _ => Err("it is not between 1 and 2^53 - 1"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn parse(values: &[&[u8]]) -> Result<Option<u64>, &'static str> {
        let values = values.iter().map(|value| (LOCK_FENCE, HeaderValue::from_bytes(value).unwrap()));
        let mut headers = HeaderMap::new();
        values.for_each(|(name, value)| _ = headers.append(name, value));
        of(&headers).map(|fence| fence.map(Fence::get))
    }

    #[test]
    fn a_fence_is_digits_and_nothing_else() {
        assert_eq!(parse(&[]), Ok(None));
        assert_eq!(parse(&[b"1794775452413713"]), Ok(Some(1_794_775_452_413_713)));
        assert_eq!(parse(&[b"9007199254740991"]), Ok(Some(Fence::MAX.get())));
        for bad in [
            &b""[..],
            b"0",
            b"-1",
            b"+1",
            b"1.0",
            b"1e3",
            b"0x1",
            b"1 2",
            b"1, 2",
            b"\xff",
            b"9007199254740992",
            b"99999999999999999999999",
        ] {
            assert!(parse(&[bad]).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
        assert!(parse(&[b"5", b"5"]).is_err());
    }
}
