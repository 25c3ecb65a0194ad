//! Text for people. Other users wrote the names, labels and hosts, so characters that could manipulate a terminal are printed as
//! escapes. Widths are counted in terminal columns.

use std::borrow::Cow;
use std::time::Duration;

use lockkeeper::{Clock, SystemClock, WallTime};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::duration;

/// `text` with an escape for each character that is invisible or changes the writing direction.
pub fn plain(text: &str) -> Cow<'_, str> {
    if !text.chars().any(must_be_escaped) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if must_be_escaped(c) { c.escape_unicode().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Control characters, marks of direction, zero-width and tag characters, and the line breaks of Unicode.
fn must_be_escaped(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A name in quotes, as messages show it.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", plain(name))
}

/// A name as it can be typed into a shell.
pub fn shell(name: &str) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "_./:@%+=,-".contains(c);
    if name.chars().all(safe) && !name.starts_with('-') {
        return name.to_owned();
    }
    let dashes = if name.starts_with('-') { "-- " } else { "" };
    format!("{dashes}'{}'", plain(name).replace('\'', "'\\''"))
}

/// As much of `text` as fits into `width` columns.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut fits = String::new();
    for c in text.chars() {
        if fits.width() + c.width().unwrap_or(0) >= width {
            break;
        }
        fits.push(c);
    }
    fits + "…"
}

/// How long ago `then` was.
pub fn age(then: WallTime) -> Duration {
    Duration::from_micros(SystemClock.wall().as_micros().saturating_sub(then.as_micros()))
}

/// How long ago `then` was, for people.
pub fn ago(then: WallTime) -> String {
    duration::rough(age(then))
}

/// A time in RFC 3339, in UTC.
pub fn rfc3339(wall: WallTime) -> String {
    let micros = i64::try_from(wall.as_micros()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_microsecond(micros).map_or_else(|_| "?".into(), |t| format!("{t:.3}"))
}

/// Rows of text as columns that line up, two spaces apart. The last column is not padded.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|i| rows.iter().filter_map(|r| r.get(i)).map(|c| c.width()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            text += cell;
            text += &" ".repeat(width - cell.width() + 2);
        }
        text.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_invisible_gets_through() {
        assert_eq!(plain("orders/42 ключ"), "orders/42 ключ");
        assert_eq!(plain("a\u{202e}b\u{200b}\u{1b}[31m"), "a\\u{202e}b\\u{200b}\\u{1b}[31m");
    }

    #[test]
    fn names_can_be_typed_into_a_shell() {
        assert_eq!(shell("orders/42"), "orders/42");
        assert_eq!(shell("my lock"), "'my lock'");
        assert_eq!(shell("it's"), "'it'\\''s'");
        assert_eq!(shell("-x"), "-- '-x'");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let rows = [vec!["鍵".into(), "1".into()], vec!["abc".into(), "2".into()]];
        assert_eq!(columns(&rows), ["鍵   1", "abc  2"]);
    }

    #[test]
    fn times_are_rfc_3339() {
        assert_eq!(rfc3339(WallTime::from_micros(1_500)), "1970-01-01T00:00:00.001Z");
    }
}
