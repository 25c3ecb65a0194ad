//! Options that the URLs of several stores share: the servers, the login, the certificates.

use lockkeeper_core::{Error, Result, Secret, StoreUrl};

/// The servers of a URL as `host:port`, an IPv6 address in brackets.
pub fn server_list(url: &StoreUrl, default_port: u16) -> Vec<String> {
    let server = |(host, port): &(String, Option<u16>)| {
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        format!("{host}:{}", port.unwrap_or(default_port))
    };
    url.hosts.iter().map(server).collect()
}

/// User and password, for a server that needs both or neither.
///
/// # Errors
/// [`Error::Invalid`] if one of them is missing.
pub fn login(url: &mut StoreUrl) -> Result<Option<(String, Secret)>> {
    match (url.user.take(), url.password.take()) {
        (None, None) => Ok(None),
        (Some(user), Some(password)) => Ok(Some((user, password))),
        _ => Err(Error::invalid(format!(
            "user and password go together, as {}://USER:PASSWORD@HOST",
            url.scheme
        ))),
    }
}

/// The PEM files of a TLS connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsPaths {
    /// The certificate authorities to trust. `None`: those of the machine.
    pub ca: Option<String>,
    /// The client's own certificate and its key.
    pub identity: Option<(String, String)>,
}

impl TlsPaths {
    /// Takes `?ca=`, `?cert=` and `?key=` from a URL. `None`: the connection is not encrypted. `plain` is the scheme without TLS; the
    /// scheme with TLS is the same with an `s` behind it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if half of the identity is missing, or if there are files without TLS.
    pub fn take(url: &mut StoreUrl, encrypted: bool, plain: &str) -> Result<Option<TlsPaths>> {
        let ca = url.option("ca");
        let identity = match (url.option("cert"), url.option("key")) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            _ => return Err(Error::invalid("?cert= and ?key= go together, and one of them is missing")),
        };
        match encrypted {
            true => Ok(Some(TlsPaths { ca, identity })),
            false if ca.is_some() || identity.is_some() => Err(Error::invalid(format!(
                "?ca=, ?cert= and ?key= are for TLS, and {plain}:// has none: use {plain}s://"
            ))),
            false => Ok(None),
        }
    }

    /// The certificate and the key.
    pub fn identity(&self) -> Option<(&str, &str)> {
        self.identity.as_ref().map(|(cert, key)| (cert.as_str(), key.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> StoreUrl {
        StoreUrl::parse(text).unwrap()
    }

    #[test]
    fn servers_have_a_port_and_ipv6_brackets() {
        assert_eq!(server_list(&url("etcd://a,[::1]:7"), 2379), ["a:2379", "[::1]:7"]);
    }

    #[test]
    fn half_a_login_is_rejected() {
        assert!(login(&mut url("etcd://h")).unwrap().is_none());
        assert_eq!(login(&mut url("etcd://me:x@h")).unwrap().unwrap().0, "me");
        let error = login(&mut url("etcd://me@h")).unwrap_err();
        assert!(error.to_string().contains("etcd://USER:PASSWORD@HOST"), "{error}");
    }

    #[test]
    fn certificates_without_tls_are_rejected() {
        let take = |text, encrypted| TlsPaths::take(&mut url(text), encrypted, "etcd");
        assert_eq!(take("etcd://h", false).unwrap(), None);
        assert_eq!(take("etcds://h", true).unwrap(), Some(TlsPaths::default()));
        let all = take("etcds://h?ca=/a&cert=/c&key=/k", true).unwrap().unwrap();
        assert_eq!((all.ca.as_deref(), all.identity()), (Some("/a"), Some(("/c", "/k"))));
        assert!(take("etcds://h?cert=/c", true).is_err());
        let error = take("etcd://h?ca=/a", false).unwrap_err();
        assert!(error.to_string().contains("etcd:// has none: use etcds://"), "{error}");
    }
}
