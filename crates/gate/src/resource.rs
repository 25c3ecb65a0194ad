//! Which part of a request names the resource: the gate keeps one mark for each resource.

use std::str::FromStr;

use http::HeaderName;
use http::request::Parts;

/// Which part of a request names the resource: `path`, `first-segments:N` or `header:NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResourceSelector {
    /// The path without the query, in one spelling for all that a service may take for the same path.
    Path,
    /// The first segments of the path.
    Segments(usize),
    /// A header.
    Header(HeaderName),
}

impl FromStr for ResourceSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = "known are path, first-segments:N and header:NAME";
        match text.split_once(':') {
            None if text == "path" => Ok(ResourceSelector::Path),
            Some(("first-segments", n)) => match n.parse() {
                Ok(n @ 1..=64) => Ok(ResourceSelector::Segments(n)),
                _ => Err("first-segments takes a number from 1 to 64".into()),
            },
            Some(("header", name)) => name
                .parse()
                .map(ResourceSelector::Header)
                .map_err(|_| format!("{name:?} cannot be the name of a header")),
            _ => Err(known.into()),
        }
    }
}

impl ResourceSelector {
    /// The header that names the resource, if one does.
    pub fn header(&self) -> Option<&HeaderName> {
        match self {
            ResourceSelector::Header(name) => Some(name),
            _ => None,
        }
    }

    /// Why the service could take a request for one to another resource; `None` if it cannot.
    pub fn find_ambiguity(&self, request: &Parts) -> Option<&'static str> {
        let path = request.uri.path();
        // Most paths need no second look.
        let unclear = self.header().is_none()
            && (path.contains("..") || path.contains('%'))
            && normalize_path(path, usize::MAX).is_none();
        unclear.then_some("its path has a `..`, which not every service resolves")
    }

    /// The resource of a request. `None`: the request does not name it, names it twice, or in a path with a `..`.
    pub fn select(&self, request: &Parts) -> Option<String> {
        match self {
            ResourceSelector::Path => normalize_path(request.uri.path(), usize::MAX),
            ResourceSelector::Segments(n) => normalize_path(request.uri.path(), *n),
            ResourceSelector::Header(name) => {
                let mut values = request.headers.get_all(name).iter();
                let value = values.next()?.to_str().ok().filter(|value| !value.is_empty())?;
                values.next().is_none().then(|| value.to_owned())
            }
        }
    }
}

/// The first `most` segments of a path, in one spelling. Services decode `%2e`, skip empty segments and ignore the text after a
/// semicolon, each a little differently. Two paths that some service takes for one must share a mark, so this function
/// does all of it. If a service does less, two of its resources share a mark: the gate then refuses too much, never too little.
///
/// `None`: a segment is `..`. A service that resolves it and one that does not find different resources in the same path.
fn normalize_path(path: &str, most: usize) -> Option<String> {
    let decoded = decode(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split(['/', '\\']) {
        match segment.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." => return None,
            segment => segments.push(segment),
        }
    }
    segments.truncate(most);
    Some(format!("/{}", segments.join("/")))
}

/// `path`, percent-decoded once.
fn decode(path: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(path.len()), path.as_bytes());
    while let [first, tail @ ..] = rest {
        let hex = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        let escaped = tail.get(..2).filter(|_| *first == b'%').and_then(hex);
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(what: &str, path: &str, headers: &[(&str, &str)]) -> Option<String> {
        let request = headers.iter().fold(http::Request::builder().uri(path), |r, (k, v)| r.header(*k, *v));
        what.parse::<ResourceSelector>().unwrap().select(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn a_request_is_mapped_to_its_resource() {
        assert_eq!(of("path", "/orders/42?x=1", &[]).unwrap(), "/orders/42");
        assert_eq!(of("first-segments:2", "/orders/42/lines/7", &[]).unwrap(), "/orders/42");
        assert_eq!(of("first-segments:2", "/orders", &[]).unwrap(), "/orders");
        assert_eq!(of("first-segments:2", "/", &[]).unwrap(), "/");
        assert_eq!(of("first-segments:2", "/./orders//42/7", &[]).unwrap(), "/orders/42");
        assert_eq!(of("header:X-Account", "/", &[("x-account", "7")]).unwrap(), "7");
        for headers in [&[][..], &[("x-account", "")], &[("x-account", "7"), ("x-account", "8")]] {
            assert_eq!(of("header:x-account", "/", headers), None, "{headers:?}");
        }
    }

    #[test]
    fn every_spelling_of_a_path_is_one_resource() {
        for path in ["/a", "//a", "/./a", "/%2e/a", "/a/", "/%61", "/a;session=1", "/;x/a?q=1", "/.%5ca"] {
            assert_eq!(of("path", path, &[]).unwrap(), "/a", "{path}");
        }
        assert_eq!(of("path", "/A/b%20c%", &[]).unwrap(), "/A/b c%");
        assert_eq!(of("path", "/", &[]).unwrap(), "/");
    }

    /// With `first-segments:2` a write to `/orders/42/../43` was checked against the mark of order 43, and a service that does not
    /// resolve dots wrote order 42.
    #[test]
    fn a_path_that_goes_up_is_ambiguous() {
        for path in [
            "/orders/42/../43",
            "/b/../a",
            "/../a",
            "/a/..",
            "/b/%2e%2E/a",
            "/b/.%2e/a",
            "/b%2f..%2Fa",
            "/b;x/..;y/a?q=1",
            "/b/..%5ca",
        ] {
            for selector in ["path", "first-segments:2"] {
                assert_eq!(of(selector, path, &[]), None, "{path}");
                assert!(ambiguity(selector, path).is_some(), "{path}");
            }
            assert_eq!(ambiguity("header:x-account", path), None, "{path} names no resource");
        }
        for path in ["/a..b/..c/d../...", "/%61/%2e%2ea?b=/../c", "/"] {
            assert_eq!(ambiguity("path", path), None, "{path}");
        }
    }

    fn ambiguity(selector: &str, path: &str) -> Option<&'static str> {
        let request = http::Request::builder().uri(path).body(()).unwrap().into_parts().0;
        selector.parse::<ResourceSelector>().unwrap().find_ambiguity(&request)
    }

    #[test]
    fn an_unknown_selector_is_refused() {
        for bad in [
            "",
            "Path",
            "path:",
            "first-segments",
            "first-segments:0",
            "first-segments:x",
            "header:",
            "header:a b",
        ] {
            assert!(bad.parse::<ResourceSelector>().is_err(), "{bad}");
        }
    }
}
