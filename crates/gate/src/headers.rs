//! The headers of a request: those that two servers could read differently, those of one connection, and those about the client.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Version};
use lockkeeper_fenced::http::LOCK_FENCE;

/// Hop-by-hop headers: they belong to a connection, not to a message (RFC 9110, 7.6.1). The gate has answered `Expect` itself.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::EXPECT,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Headers that `Connection` must not name: the gate checks them, and the service would not see them.
const CHECKED: [HeaderName; 6] = [
    header::HOST,
    header::CONTENT_LENGTH,
    LOCK_FENCE,
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
];

/// Why the service could understand a request differently than the gate; `None` if it cannot. `resource`: the header that names
/// the resource, if one does.
pub fn find_ambiguity(request: &Parts, resource: Option<&HeaderName>) -> Option<&'static str> {
    let mut hosts = request.headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next(), request.uri.authority()) {
        (_, Some(_), _) => return Some("it has more than one Host"),
        (None, _, None) if request.version == Version::HTTP_11 => return Some("it has no Host"),
        // CONNECT names another host in its URI by design; the forwarder refuses the method.
        (Some(host), _, Some(there))
            if request.method != Method::CONNECT
                && !host.as_bytes().eq_ignore_ascii_case(there.as_str().as_bytes()) =>
        {
            return Some("its Host is not the one of its URI");
        }
        _ => {}
    }
    let checked = |name: &HeaderName| CHECKED.contains(name) || Some(name) == resource;
    connection_headers(&request.headers)
        .any(|name| checked(&name))
        .then_some("Connection names a header that is checked")
}

/// The headers that `Connection` names.
fn connection_headers(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse().ok())
}

/// Removes the headers of the connection, also those that `Connection` names.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none of these.
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return;
    }
    let named: Vec<HeaderName> = connection_headers(headers).collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Whether a message asks for an upgrade to a websocket, or grants one. The gate forwards no other upgrade: it could not check the
/// requests of `h2c`.
pub fn is_websocket(headers: &HeaderMap) -> bool {
    let says = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|said| said.trim().eq_ignore_ascii_case(word))
    };
    headers.contains_key(header::UPGRADE)
        && says(header::CONNECTION, "upgrade")
        && says(header::UPGRADE, "websocket")
}

/// Sets the headers of an upgrade again, after [`strip_hop_by_hop`].
pub fn set_upgrade(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}

/// Adds `X-Forwarded-For`, `-Host` and `-Proto`. A proxy in front of the gate may have set them already.
pub fn add_forwarded(headers: &mut HeaderMap, peer: &HeaderValue) {
    let chain = match headers.contains_key(FOR) {
        true => append_peer(headers, peer),
        false => peer.clone(),
    };
    headers.insert(FOR, chain);
    if let (false, Some(host)) = (headers.contains_key(HOST), headers.get(header::HOST).cloned()) {
        headers.insert(HOST, host);
    }
    headers.entry(PROTO).or_insert(HeaderValue::from_static("http"));
}

/// The addresses of `X-Forwarded-For`, and the client's after them.
fn append_peer(headers: &HeaderMap, peer: &HeaderValue) -> HeaderValue {
    let all: Vec<&[u8]> = headers.get_all(FOR).iter().chain([peer]).map(HeaderValue::as_bytes).collect();
    HeaderValue::from_maybe_shared(Bytes::from(all.join(&b", "[..]))).unwrap_or_else(|_| peer.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn hop_by_hop_headers_are_not_forwarded() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Private"),
            ("keep-alive", "timeout=5"),
            ("x-private", "1"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("lock-fence", "5"),
            ("content-length", "3"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("lock-fence", "5"), ("content-length", "3")]));
    }

    #[test]
    fn a_request_that_can_be_read_in_two_ways_is_ambiguous() {
        let why = |uri: &str, version, pairs: &[(&'static str, &'static str)]| {
            let (mut parts, ()) =
                http::Request::builder().uri(uri).version(version).body(()).unwrap().into_parts();
            parts.headers = map(pairs);
            find_ambiguity(&parts, Some(&HeaderName::from_static("x-account")))
        };
        let (one, two) = (Version::HTTP_11, Version::HTTP_2);
        assert_eq!(why("/a", one, &[("host", "h"), ("connection", "close, x-private")]), None);
        assert_eq!(why("/a", Version::HTTP_10, &[]), None);
        assert_eq!(why("http://h/a", two, &[]), None);
        assert_eq!(why("http://h/a", one, &[("host", "H")]), None);
        for (uri, version, headers) in [
            ("/a", one, &[][..]),
            ("/a", one, &[("host", "h"), ("host", "h")]),
            ("http://h/a", two, &[("host", "i")]),
            ("/a", one, &[("host", "h"), ("connection", "host")]),
            ("/a", one, &[("host", "h"), ("connection", "close, Lock-Fence")]),
            ("/a", one, &[("host", "h"), ("connection", "close"), ("connection", "x-account")]),
        ] {
            assert!(why(uri, version, headers).is_some(), "{uri} {headers:?}");
        }
    }

    #[test]
    fn an_upgrade_needs_both_headers_and_is_to_a_websocket() {
        let wants =
            |protocol| is_websocket(&map(&[("connection", "Keep-Alive, Upgrade"), ("upgrade", protocol)]));
        assert!(wants("websocket") && wants("h2c, WebSocket"));
        assert!(!wants("h2c") && !wants("") && !wants("websocket/13"));
        assert!(!is_websocket(&map(&[("upgrade", "websocket")])));
        assert!(!is_websocket(&map(&[("connection", "upgrade")])));
    }

    #[test]
    fn the_client_is_appended_to_x_forwarded_for() {
        let mut headers =
            map(&[("host", "a.example"), ("x-forwarded-for", "10.0.0.1"), ("x-forwarded-for", "10.0.0.2")]);
        add_forwarded(&mut headers, &HeaderValue::from_static("127.0.0.1"));
        assert_eq!(headers["x-forwarded-for"], "10.0.0.1, 10.0.0.2, 127.0.0.1");
        assert_eq!(
            (&headers["x-forwarded-host"], &headers["x-forwarded-proto"]),
            (&"a.example".parse().unwrap(), &"http".parse().unwrap())
        );
        assert_eq!(headers["host"], "a.example");
    }
}
