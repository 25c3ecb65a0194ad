//! Where the service is: the URL of `--upstream`, and the path of a request there.

use std::str::FromStr;

use http::uri::{Authority, PathAndQuery, Scheme, Uri};

/// The URL of the service: `http://HOST[:PORT][/PATH]`.
#[derive(Clone, Debug)]
pub struct UpstreamUrl {
    text: String,
    pub(crate) uri: Uri,
    pub(crate) authority: Authority,
    /// The path that the gate puts before the path of every request.
    base_path: String,
}

impl FromStr for UpstreamUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|_| "not a URL: write http://HOST:PORT".to_owned())?;
        let parts = uri.clone().into_parts();
        match (&parts.scheme, parts.authority, parts.path_and_query) {
            (Some(scheme), ..) if *scheme == Scheme::HTTPS => {
                Err("only http:// is possible: put the gate beside the service, where no TLS is needed"
                    .into())
            }
            (Some(scheme), Some(authority), path) if *scheme == Scheme::HTTP => {
                if authority.as_str().contains('@')
                    || path.as_ref().is_some_and(|path| path.query().is_some())
                {
                    return Err("the URL of a service has no user and no query".into());
                }
                let base_path =
                    path.map_or(String::new(), |path| path.path().trim_end_matches('/').to_owned());
                Ok(UpstreamUrl { text: text.to_owned(), uri, authority, base_path })
            }
            _ => Err("not a URL of a service: write http://HOST:PORT".into()),
        }
    }
}

impl UpstreamUrl {
    /// The URL as it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The URI of a request as the service gets it: path and query, without a host.
    pub(crate) fn rewrite(&self, uri: Uri) -> Option<Uri> {
        match uri.path_and_query() {
            Some(_) if self.base_path.is_empty() && uri.authority().is_none() => Some(uri),
            Some(path) if self.base_path.is_empty() => Some(path.clone().into()),
            Some(path) => PathAndQuery::try_from(format!("{}{path}", self.base_path)).ok().map(Uri::from),
            None => Some(Uri::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_rewritten_below_the_base_path() {
        let rewrite = |upstream: &str, uri: &str| {
            upstream.parse::<UpstreamUrl>().unwrap().rewrite(uri.parse().unwrap()).unwrap().to_string()
        };
        assert_eq!(rewrite("http://h:81", "/a/b?c=d"), "/a/b?c=d");
        assert_eq!(rewrite("http://h:81/", "/a"), "/a");
        assert_eq!(rewrite("http://h/base/", "/a?x"), "/base/a?x");
        assert_eq!(rewrite("http://h", "http://other/a"), "/a");
    }

    #[test]
    fn a_url_that_names_no_service_is_refused() {
        for bad in ["", "h:81", "/a", "https://h", "ftp://h", "http://u@h", "http://h/?q=1"] {
            assert!(bad.parse::<UpstreamUrl>().is_err(), "{bad}");
        }
    }
}
