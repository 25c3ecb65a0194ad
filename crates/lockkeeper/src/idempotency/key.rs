//! The `Idempotency-Key` header: a structured-field string (`"abc"`) as in the IETF draft, or bare (`abc`)
//! as most clients send it.

use http::HeaderMap;

/// The most bytes of a key, as at Stripe.
const LONGEST: usize = 255;

/// The key in the headers, if there is one; or what is wrong with it.
pub(super) fn of(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    let mut given = headers.get_all("idempotency-key").iter();
    let Some(value) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err("it is given more than once");
    }
    let key = match value.as_bytes() {
        [b'"', rest @ ..] => quoted(rest)?,
        bytes => bare(bytes)?,
    };
    match key.len() {
        0 => Err("it is empty"),
        1..=LONGEST => Ok(Some(key)),
        _ => Err("it has more than 255 characters"),
    }
}

/// The text between the quotes. Parameters after it are ignored.
fn quoted(bytes: &[u8]) -> Result<String, &'static str> {
    let (mut key, mut bytes) = (String::new(), bytes.iter());
    loop {
        match bytes.next() {
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(c @ (b'"' | b'\\')) => key.push(char::from(*c)),
                _ => return Err("after a backslash only a quote or a backslash may follow"),
            },
            Some(c @ 0x20..=0x7e) => key.push(char::from(*c)),
            Some(_) => return Err("it has characters that are not printable ASCII"),
            None => return Err("its closing quote is missing"),
        }
    }
    match bytes.as_slice().trim_ascii_start() {
        [] | [b';', ..] => Ok(key),
        _ => Err("something follows its closing quote"),
    }
}

/// A bare key. A comma or a space would mean that a proxy joined two headers.
fn bare(bytes: &[u8]) -> Result<String, &'static str> {
    let fine = |c: &u8| c.is_ascii_graphic() && !matches!(c, b'"' | b',');
    if !bytes.iter().all(fine) {
        return Err("without quotes it may have letters, digits and signs, but no space, comma or quote");
    }
    Ok(bytes.iter().copied().map(char::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn parse(value: &[u8]) -> Result<Option<String>, &'static str> {
        let value = HeaderValue::from_bytes(value).unwrap();
        of(&HeaderMap::from_iter([(http::HeaderName::from_static("idempotency-key"), value)]))
    }

    #[test]
    fn bare_and_quoted_keys_are_the_same_key() {
        let uuid = "8e03978e-40d5-43dd-bc93-6894a57f9324";
        for text in
            [uuid.to_owned(), format!("\"{uuid}\""), format!("\"{uuid}\";a=1"), format!("\"{uuid}\" ;a")]
        {
            assert_eq!(parse(text.as_bytes()), Ok(Some(uuid.to_owned())), "{text}");
        }
        assert_eq!(parse(br#""a \"b\" \\ c""#), Ok(Some(r#"a "b" \ c"#.to_owned())));
        assert_eq!(parse("x".repeat(255).as_bytes()), Ok(Some("x".repeat(255))));
        assert_eq!(of(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn a_malformed_key_is_refused() {
        let long = "x".repeat(256);
        let bad: [&[u8]; 13] = [
            b"",
            b"\"\"",
            b"\"a",
            b"\"a\\\"",
            b"\"a\\b\"",
            b"\"a\"b",
            b"\"a\", \"b\"",
            b"a b",
            b"a, b",
            b"a\"b",
            b"\xff",
            b"\"\xc3\xa4\"",
            long.as_bytes(),
        ];
        for bytes in bad {
            assert!(parse(bytes).is_err(), "{:?}", String::from_utf8_lossy(bytes));
        }
        let mut twice = HeaderMap::new();
        twice.append("idempotency-key", HeaderValue::from_static("a"));
        twice.append("idempotency-key", HeaderValue::from_static("a"));
        assert!(of(&twice).is_err());
    }
}
