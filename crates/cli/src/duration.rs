//! Durations on the command line: how they are parsed and printed.

use std::time::Duration;

use jiff::SignedDuration;
use lockkeeper::limits;

/// The longest duration that any option takes: a longer one is a typing error.
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// `--ttl`
pub fn parse_ttl(text: &str) -> Result<Duration, String> {
    between(text, limits::TTL_MIN, limits::TTL_MAX)
}

/// `--min-hold`, `--lock-delay`, `--grace`: none at all is fine.
pub fn parse_up_to_a_day(text: &str) -> Result<Duration, String> {
    between(text, Duration::ZERO, limits::TTL_MAX)
}

/// `--wait`
pub fn parse_wait(text: &str) -> Result<Duration, String> {
    let least = Duration::from_millis(1);
    between(text, least, YEAR)
        .map_err(|e| if is_zero(text) { format!("{e}; not to wait is --skip") } else { e })
}

/// `--max-hold`, `--for`
pub fn parse_long(text: &str) -> Result<Duration, String> {
    between(text, limits::TTL_MIN, YEAR)
}

/// `--window`: days are fine here, as 24 hours each.
pub fn parse_window(text: &str) -> Result<Duration, String> {
    let days = text.trim().strip_suffix('d').and_then(|days| days.parse::<u64>().ok());
    let text = days.map_or(text.to_owned(), |days| format!("{}h", days.saturating_mul(24)));
    between(&text, Duration::from_secs(1), YEAR)
}

fn is_zero(text: &str) -> bool {
    text.parse::<SignedDuration>().is_ok_and(|d| d.is_zero())
}

fn between(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let range = || format!("{} to {} are possible", exact(least), exact(most));
    let trimmed = text.trim();
    if !trimmed.is_empty() && trimmed.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | '-' | '+')) {
        return Err(format!("add a unit, for instance {trimmed}s or {trimmed}ms"));
    }
    let given: SignedDuration = match trimmed.parse() {
        Ok(given) => given,
        // Numbers that fit into nothing are refused for what they are.
        Err(_) if trimmed.chars().filter(char::is_ascii_digit).count() > 15 => {
            return Err(format!("that is absurdly long: {}", range()));
        }
        Err(_) => return Err("not a span of time: write 500ms, 30s, 1m30s or 2h".into()),
    };
    match Duration::try_from(given) {
        Err(_) => Err(format!("a negative span of time: {}", range())),
        Ok(given) if given < least || given > most => Err(range()),
        Ok(given) => Ok(given),
    }
}

/// A duration as a user could have typed it: `1m30s`.
pub fn exact(span: Duration) -> String {
    let (ms, s) = (span.subsec_millis(), span.as_secs());
    let parts = [(s / 3600, "h"), (s / 60 % 60, "m"), (s % 60, "s"), (ms.into(), "ms")];
    let text: String = parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n}{unit}")).collect();
    if text.is_empty() { "0s".into() } else { text }
}

/// A duration rounded to its two largest units: `3m 12s`.
pub fn rough(span: Duration) -> String {
    let s = span.as_secs();
    match s {
        0 => format!("{}ms", span.as_millis()),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {}h", s / 86_400, s / 3600 % 24),
    }
}

/// A measured duration, with two or three digits: `0.3ms`, `12ms`, `1.9s`.
pub fn measured(span: Duration) -> String {
    match span.as_micros() {
        0..10_000 => format!("{:.1}ms", span.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{}ms", span.as_millis()),
        1_000_000..60_000_000 => format!("{:.1}s", span.as_secs_f64()),
        _ => rough(span),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_type_is_read() {
        for (text, ms) in
            [("30s", 30_000), ("500ms", 500), ("1m30s", 90_000), ("2h", 7_200_000), ("1m 30s", 90_000)]
        {
            assert_eq!(parse_ttl(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(parse_up_to_a_day("0s"), Ok(Duration::ZERO));
        assert_eq!(parse_window("1d"), Ok(Duration::from_secs(86_400)));
        assert_eq!(parse_window("15m"), Ok(Duration::from_secs(900)));
        assert!(parse_window("0d").is_err() && parse_window("400d").is_err() && parse_window("1").is_err());
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (text, why) in [
            ("30", "add a unit"),
            ("-3", "add a unit"),
            ("0s", "100ms to 24h"),
            ("99ms", "100ms to 24h"),
            ("-5s", "negative"),
            ("25h", "100ms to 24h"),
            ("99999999999999999999h", "absurdly long"),
            ("soon", "not a span of time"),
            ("", "not a span of time"),
        ] {
            let error = parse_ttl(text).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
        assert!(parse_wait("0s").unwrap_err().contains("--skip"));
    }

    #[test]
    fn spans_are_shown_as_they_are_typed() {
        for text in ["100ms", "24h", "1m30s", "1s500ms", "0s"] {
            assert_eq!(exact(parse_up_to_a_day(text).unwrap()), text);
        }
        assert_eq!(rough(Duration::from_secs(200)), "3m 20s");
        for (us, text) in [(340, "0.3ms"), (12_400, "12ms"), (1_940_000, "1.9s"), (200_000_000, "3m 20s")] {
            assert_eq!(measured(Duration::from_micros(us)), text);
        }
    }
}
