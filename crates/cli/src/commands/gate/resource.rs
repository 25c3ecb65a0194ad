//! What a fence is for.

use http::HeaderName;
use http::request::Parts;

/// Which part of a request names the resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resource {
    /// The path, to the letter, without the query.
    Path,
    /// The first segments of the path.
    Segments(usize),
    /// A header.
    Header(HeaderName),
}

/// `--resource`
pub fn parse(text: &str) -> Result<Resource, String> {
    let known = "known are path, first-segments:N and header:NAME";
    match text.split_once(':') {
        None if text == "path" => Ok(Resource::Path),
        Some(("first-segments", n)) => match n.parse() {
            Ok(n @ 1..=64) => Ok(Resource::Segments(n)),
            _ => Err("first-segments takes a number from 1 to 64".into()),
        },
        Some(("header", name)) => {
            name.parse().map(Resource::Header).map_err(|_| format!("{name:?} cannot be the name of a header"))
        }
        _ => Err(known.into()),
    }
}

impl Resource {
    /// The resource of a request. `None`: it does not say, or says it twice.
    pub fn of(&self, request: &Parts) -> Option<String> {
        match self {
            Resource::Path => Some(request.uri.path().to_owned()),
            Resource::Segments(n) => {
                // What comes before the first slash is nothing.
                let segments: Vec<&str> = request.uri.path().split('/').take(n + 1).collect();
                Some(segments.join("/")).filter(|path| !path.is_empty())
            }
            Resource::Header(name) => {
                let mut values = request.headers.get_all(name).iter();
                let value = values.next()?.to_str().ok().filter(|value| !value.is_empty())?;
                values.next().is_none().then(|| value.to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(what: &str, path: &str, headers: &[(&str, &str)]) -> Option<String> {
        let request = headers.iter().fold(http::Request::builder().uri(path), |r, (k, v)| r.header(*k, *v));
        parse(what).unwrap().of(&request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn each_names_what_it_says() {
        assert_eq!(of("path", "/orders/42?x=1", &[]).unwrap(), "/orders/42");
        assert_eq!(of("first-segments:2", "/orders/42/lines/7", &[]).unwrap(), "/orders/42");
        assert_eq!(of("first-segments:2", "/orders", &[]).unwrap(), "/orders");
        assert_eq!(of("first-segments:2", "/", &[]).unwrap(), "/");
        assert_eq!(of("header:X-Account", "/", &[("x-account", "7")]).unwrap(), "7");
        for headers in [&[][..], &[("x-account", "")], &[("x-account", "7"), ("x-account", "8")]] {
            assert_eq!(of("header:x-account", "/", headers), None, "{headers:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_told() {
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
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
