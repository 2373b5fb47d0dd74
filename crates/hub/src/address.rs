//! Takes URLs apart, and resolves the target of a redirect.
use std::fmt::Write as _;

use ureq::http::Uri;

/// Whether a URL is HTTPS, its host, and its port; `None` if it is not a URL of HTTP or HTTPS.
pub(super) fn origin(url: &str) -> Option<(bool, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let is_https = match uri.scheme_str()? {
        "https" => true,
        "http" => false,
        _ => return None,
    };
    let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
    Some((is_https, host, uri.port_u16().unwrap_or(if is_https { 443 } else { 80 })))
}

/// Resolves `location` against the URL `base`, and escapes what a URL cannot have; `None` if `base` is not a URL.
pub(super) fn joined(base: &str, location: &[u8]) -> Option<String> {
    let mut to = String::new();
    for &byte in location.trim_ascii() {
        match byte {
            b'#' => break,
            b'!'..=b'~' if !b"\"<>\\^`{|}".contains(&byte) => to.push(char::from(byte)),
            byte => {
                let _ = write!(to, "%{byte:02X}"); // a String never fails
            }
        }
    }
    let (scheme, rest) = base.split_once("://")?;
    let host = &base[..base.len() - rest.len() + rest.find(['/', '?']).unwrap_or(rest.len())];
    let path = base[host.len()..].split('?').next()?;
    let folder = path.rfind('/').map_or("/", |slash| &path[..=slash]);
    Some(match to.as_str() {
        to if to.split_once("://").is_some_and(|(scheme, _)| scheme.bytes().all(|byte| byte.is_ascii_alphabetic())) => {
            to.to_owned()
        }
        to if to.starts_with("//") => format!("{scheme}:{to}"),
        to if to.starts_with('/') => format!("{host}{to}"),
        to if to.starts_with('?') => format!("{host}{path}{to}"),
        to => format!("{host}{folder}{to}"),
    })
}

/// The user name and password of a URL, joined by a colon; `None` if it has neither.
pub(super) fn login(url: &str) -> Option<Vec<u8>> {
    let (login, _) = url.split_once("://")?.1.split('/').next()?.rsplit_once('@')?;
    let (name, password) = login.split_once(':').unwrap_or((login, ""));
    let decoded = |text: &str| {
        let mut bytes = Vec::new();
        let mut rest = text.as_bytes();
        while let Some((&first, after)) = rest.split_first() {
            let hex = after.get(..2).filter(|_| first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
            let code = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
            bytes.push(code.unwrap_or(first));
            rest = if code.is_some() { &after[2..] } else { after };
        }
        bytes
    };
    Some([decoded(name), b":".to_vec(), decoded(password)].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_joined_as_browsers_do() {
        for (base, location, wanted) in [
            ("http://h:1/a/b?c", "https://o/x?y#z", "https://o/x?y"),
            ("http://h:1/a/b?c", "//o/x", "http://o/x"),
            ("http://h:1/a/b?c", "/x?u=https://o/", "http://h:1/x?u=https://o/"),
            ("http://h:1/a/b?c", "x", "http://h:1/a/x"),
            ("http://h:1/a/b?c", "?d", "http://h:1/a/b?d"),
            ("http://h", "x", "http://h/x"),
            ("https://h?q=/", "/x y\u{fc}", "https://h/x%20y%C3%BC"),
            ("https://h/", "https://o/?name=\"a|b\"", "https://o/?name=%22a%7Cb%22"),
        ] {
            assert_eq!(joined(base, location.as_bytes()).as_deref(), Some(wanted), "{base} {location}");
        }
    }

    #[test]
    fn hosts_differ_by_scheme_name_and_port() {
        assert_eq!(origin("https://Hub.example/x"), origin("https://hub.example:443"));
        for other in ["http://hub.example/", "https://hub.example:444/", "https://example/", "https://x.hub.example/"] {
            assert!(origin(other).is_some() && origin(other) != origin("https://hub.example/"), "{other}");
        }
        for none in ["ftp://h/", "h", "/x", "http://", "http://h/ x"] {
            assert_eq!(origin(none), None, "{none}");
        }
    }

    #[test]
    fn logins_of_addresses_are_decoded() {
        assert_eq!(login("http://me:w%40rd@h/x@y").unwrap(), b"me:w@rd");
        assert_eq!(login("http://me@h").unwrap(), b"me:");
        assert_eq!(login("http://m%zz%4:x@h").unwrap(), b"m%zz%4:x");
        assert_eq!(login("http://h/@"), None);
    }
}
