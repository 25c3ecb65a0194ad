//! The URL of a store, taken apart.

use std::time::Duration;

use crate::{Error, Result, Secret};

/// `scheme://user:password@host:port,host:port/path?option=value`, taken apart and percent-decoded.
///
/// Every part but the scheme may be missing. [`StoreUrl::option`] takes options out one by one;
/// [`StoreUrl::finish`] refuses options that no caller took: a mistyped option is never ignored.
///
/// ```
/// # use lockkeeper_core::StoreUrl;
/// let mut address = StoreUrl::parse("redis://:s%40fe@10.0.0.7,[::1]:7000/2?prefix=lock:")?;
/// assert_eq!(address.hosts, [("10.0.0.7".to_owned(), None), ("::1".to_owned(), Some(7000))]);
/// assert_eq!((address.password.as_ref().map(|password| password.expose()), address.path.as_str()), (Some("s@fe"), "2"));
/// assert_eq!(address.option("prefix").as_deref(), Some("lock:"));
/// address.finish(&["prefix"])?;
/// # Ok::<(), lockkeeper_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// The part before `://`.
    pub scheme: String,
    /// The user, if there is one.
    pub user: Option<String>,
    /// The password, if there is one.
    pub password: Option<Secret>,
    /// The hosts with their ports, in the order given.
    pub hosts: Vec<(String, Option<u16>)>,
    /// The part behind the hosts, without the slash in front.
    pub path: String,
    options: Vec<(String, String)>,
}

// Errors and logs show a URL, and must not show its password.
impl std::fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://", self.scheme)?;
        if self.user.is_some() || self.password.is_some() {
            write!(f, "{}:***@", self.user.as_deref().unwrap_or_default())?;
        }
        for (i, (host, port)) in self.hosts.iter().enumerate() {
            write!(f, "{}{host}", if i > 0 { "," } else { "" })?;
            port.map_or(Ok(()), |port| write!(f, ":{port}"))?;
        }
        write!(f, "/{}", self.path)
    }
}

impl StoreUrl {
    /// Takes a text apart.
    ///
    /// # Errors
    /// [`Error::Invalid`] with what is wrong. It repeats nothing of the text: a part of a password may be anywhere in a
    /// wrong URL, as the port of `redis://:sec/ret@host`.
    pub fn parse(text: &str) -> Result<Self> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(Error::invalid("the URL of a store is SCHEME://HOST[:PORT][/PATH][?OPTION=VALUE]"));
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if path.contains('@') || query.contains('@') {
            return Err(Error::invalid(
                "an @ stands only before the hosts: in a user or password write / as %2F and ? as %3F, and behind the hosts \
                 write @ as %40",
            ));
        }
        let (user, password, hosts) = match authority.rsplit_once('@') {
            None => (None, None, authority),
            Some((who, hosts)) => {
                let (user, password) = who.split_once(':').map_or((who, None), |(u, p)| (u, Some(p)));
                let user = decode(user)?;
                (
                    (!user.is_empty()).then_some(user),
                    password.map(decode).transpose()?.map(Secret::from),
                    hosts,
                )
            }
        };
        let hosts = hosts.split(',').filter(|host| !host.is_empty()).map(host).collect::<Result<_>>()?;
        let mut options = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let Some((key, value)) = option.split_once('=') else {
                return Err(Error::invalid("an option behind the ? has no value: OPTION=VALUE is needed"));
            };
            options.push((decode(key)?, decode(value)?));
        }
        let scheme = scheme.to_ascii_lowercase();
        Ok(StoreUrl { scheme, user, password, hosts, path: decode(path)?, options })
    }

    /// Takes an option out.
    pub fn option(&mut self, key: &str) -> Option<String> {
        let at = self.options.iter().position(|(known, _)| known == key)?;
        Some(self.options.remove(at).1)
    }

    /// Takes out an option that is a duration: `250ms`, `3s`, `2m`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is none.
    pub fn duration(&mut self, key: &str) -> Result<Option<Duration>> {
        let Some(text) = self.option(key) else { return Ok(None) };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[digits.len()..] {
            "ms" => Some(1),
            "s" => Some(1000),
            "m" => Some(60_000),
            _ => None,
        };
        let millis = unit.zip(digits.parse::<u64>().ok()).and_then(|(unit, n)| n.checked_mul(unit));
        match millis {
            Some(ms) => Ok(Some(Duration::from_millis(ms))),
            None => Err(Error::invalid(format!("{key}={text:?} is no duration such as 250ms, 3s or 2m"))),
        }
    }

    /// Takes out an option that is a number.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is none.
    pub fn number(&mut self, key: &str) -> Result<Option<u32>> {
        let Some(text) = self.option(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| Error::invalid(format!("{key}={text:?} is no number")))
    }

    /// Refuses options that no caller took out.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the first of them, and the ones that are known.
    pub fn finish(self, known: &[&str]) -> Result<()> {
        match self.options.first() {
            None => Ok(()),
            Some((key, _)) => Err(Error::invalid(format!(
                "{key:?} is not an option of {}:// (or is there twice). Known are {}",
                self.scheme,
                known.join(", ")
            ))),
        }
    }
}

fn host(text: &str) -> Result<(String, Option<u16>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(host, port)| (host, port.strip_prefix(':'))),
        None => Some(text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)))),
    }
    .ok_or_else(|| Error::invalid("the bracket around a host is not closed"))?;
    let port = port.map(|port| {
        port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(|| {
            Error::invalid(
                "what follows the colon of a host is no port: 1 to 65535 (an IPv6 address needs brackets around it; after a \
                 password comes @HOST, and in a password write / as %2F and ? as %3F)",
            )
        })
    });
    Ok((decode(host)?, port.transpose()?))
}

fn decode(text: &str) -> Result<String> {
    let bad = || Error::invalid("a % in the address is not followed by two hexadecimal digits of UTF-8");
    if !text.contains('%') {
        return Ok(text.to_owned());
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes().iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit =
                    || rest.next().and_then(|d| char::from(*d).to_digit(16)).ok_or_else(bad).map(|d| d as u8);
                digit()? << 4 | digit()?
            }
            other => *other,
        });
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_given_and_mistyped_addresses_are_refused() {
        for bad in [
            "redis:x",
            "redis://h:0",
            "redis://h:70000",
            "redis://::1:7",
            "redis://[::1",
            "redis://%zz",
            "r://h?x",
        ] {
            assert!(matches!(StoreUrl::parse(bad), Err(Error::Invalid(_))), "{bad}");
        }
        let mut address = StoreUrl::parse("redis://h?wait=3s&wiat=4s&n=x").unwrap();
        assert_eq!(address.duration("wait").unwrap(), Some(Duration::from_secs(3)));
        assert!(address.number("n").is_err());
        let error = address.finish(&["wait", "n"]).unwrap_err().to_string();
        assert!(error.contains("wiat") && error.contains("wait, n"), "{error}");
    }

    #[test]
    fn a_password_is_never_shown() {
        let address = StoreUrl::parse("redis://me:secret@h:1,i/0?ca=x").unwrap();
        assert_eq!(format!("{address:?}"), "redis://me:***@h:1,i/0");
        let canary = "c4n4ry";
        for bad in [
            "redis://:c4n4ry",
            "redis://me:c4n4ry/0",
            "redis://:c4n4ry/ret@h",
            "redis://:sec/c4n4ry@h",
            "redis://:12/c4n4ry@h",
            "redis://:12?c4n4ry@h",
            "redis://:12?c4n4ry",
            "redis://:12?a=b&c4n4ry",
            "redis://:p@ss?c4n4ry@h",
            "redis://:c4n4ry%@h",
            "redis://:c4n4ry@[h",
            "redis://[c4n4ry",
            "redis://:x@h:c4n4ry",
            ":c4n4ry@h",
        ] {
            let error = StoreUrl::parse(bad).expect_err(bad).to_string();
            assert!(!error.contains(canary), "{bad}: {error}");
        }
    }
}
