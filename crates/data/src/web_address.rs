//! Web addresses by which rows name pictures (`data.allow_image_urls`).

/// Whether the name of a picture is an `http` or `https` address.
pub fn is_link(name: &str) -> bool {
    let begins = |scheme: &str| name.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
    begins("http://") || begins("https://")
}

/// The address as messages may show it: without user name and password, and without the query and the fragment, which
/// may hold a secret. At most 300 characters of host and path.
pub fn shown(link: &str) -> String {
    let end = link.find(['?', '#']).unwrap_or(link.len());
    let (scheme, rest) = link[..end].split_once("://").unwrap_or(("", &link[..end]));
    let host = rest.find('/').unwrap_or(rest.len());
    let start = rest[..host].rfind('@').map_or(0, |at| at + 1);
    let text: String = rest[start..].chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    format!("{}://{text}{}", scheme.to_lowercase(), if end < link.len() { "?…" } else { "" })
}

/// Where a picture of a web address came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// The cache on disk.
    Cached,
    /// The web, just now. The number is its size in bytes.
    Fetched(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_what_may_be_secret() {
        for (link, expected) in [
            ("https://example.org/a/b.png", "https://example.org/a/b.png"),
            ("HTTPS://me:word@example.org/a.png?sig=SECRET", "https://example.org/a.png?…"),
            ("http://example.org?key=SECRET@x", "http://example.org?…"),
            ("http://example.org/a@b.png#SECRET", "http://example.org/a@b.png?…"),
            ("http://word@\u{1b}x/", "http:// x/"),
        ] {
            assert!(is_link(link));
            assert_eq!(shown(link), expected);
        }
        assert!(!is_link("ftp://example.org/a.png") && !is_link("a.png") && !is_link("http:/") && !is_link("é"));
    }
}
