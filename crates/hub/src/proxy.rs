//! Chooses the proxy for a host: that of `HTTPS_PROXY` or `HTTP_PROXY`, else of `ALL_PROXY`; none for hosts in
//! `NO_PROXY`. ureq itself uses one proxy for every scheme, and supports neither networks nor subdomains.
use std::net::IpAddr;

use ureq::Proxy;

use tunesmith_base::error::{Error, Result};

/// A variable and its value.
type Named = (&'static str, String);

pub(super) struct Proxies {
    https: Option<Named>,
    http: Option<Named>,
    /// Hosts that are reached without a proxy.
    direct: Vec<String>,
}

impl Proxies {
    pub fn from_env() -> Self {
        Self::from(&|name| std::env::var(name).ok())
    }

    fn from(get: &dyn Fn(&str) -> Option<String>) -> Self {
        let first = |names: [&'static str; 2]| {
            let (name, value) = names.into_iter().find_map(|name| Some((name, get(name)?.trim().to_owned())))?;
            (!value.is_empty()).then_some((name, value))
        };
        let all = first(["ALL_PROXY", "all_proxy"]);
        let direct = first(["NO_PROXY", "no_proxy"]).map_or_else(String::new, |(_, value)| value);
        Self {
            https: first(["HTTPS_PROXY", "https_proxy"]).or_else(|| all.clone()),
            http: first(["HTTP_PROXY", "http_proxy"]).or(all),
            direct: direct.split(',').map(|entry| entry.trim().to_owned()).filter(|entry| !entry.is_empty()).collect(),
        }
    }

    /// The proxy to `host`, if it needs one.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] the variable holds no address. Its value may contain a password and is not
    /// shown.
    pub fn to(&self, is_https: bool, host: &str) -> Result<Option<Proxy>> {
        let named = if is_https { &self.https } else { &self.http };
        let Some((name, value)) = named.as_ref().filter(|_| !self.is_direct(host)) else { return Ok(None) };
        let address = if value.contains("://") { value.clone() } else { format!("http://{value}") };
        Proxy::new(&address).map(Some).map_err(|_| {
            Error::config(format!("env {name}: not the address of a proxy")).hint("such as http://proxy.example:3128")
        })
    }

    fn is_direct(&self, host: &str) -> bool {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address: Option<IpAddr> = host.parse().ok();
        self.direct.iter().any(|entry| match address {
            _ if entry == "*" => true,
            Some(address) => holds(entry, address),
            None => is_below(entry.trim_start_matches(['*', '.']), host),
        })
    }
}

/// Whether `host` is the domain or one of its subdomains.
fn is_below(domain: &str, host: &str) -> bool {
    let Some((before, end)) = host.len().checked_sub(domain.len()).and_then(|at| host.split_at_checked(at)) else {
        return false;
    };
    end.eq_ignore_ascii_case(domain) && (before.is_empty() || before.ends_with('.'))
}

/// Whether `network`, such as `10.0.0.0/8` or a single address, contains `address`.
fn holds(network: &str, address: IpAddr) -> bool {
    let (base, bits) = network.split_once('/').map_or((network, None), |(base, bits)| (base, Some(bits)));
    let (width, base, address) = match (base.parse(), address) {
        (Ok(IpAddr::V4(base)), IpAddr::V4(address)) => (32, base.to_bits().into(), address.to_bits().into()),
        (Ok(IpAddr::V6(base)), IpAddr::V6(address)) => (128, base.to_bits(), address.to_bits()),
        _ => return false,
    };
    let differ: u128 = base ^ address;
    match bits.map_or(Ok(width), str::parse::<u32>) {
        Ok(0) => true,
        Ok(bits) if bits <= width => differ >> (width - bits) == 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        let found = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Proxies::from(&found)
    }

    fn host(proxies: &Proxies, is_https: bool) -> Option<(String, u16)> {
        proxies.to(is_https, "hub.example").unwrap().map(|proxy| (proxy.host().to_owned(), proxy.port()))
    }

    #[test]
    fn each_scheme_has_its_proxy() {
        let both = proxies(&[("HTTPS_PROXY", "http://s:1"), ("http_proxy", "p:2"), ("ALL_PROXY", "socks5://a:3")]);
        assert_eq!((host(&both, true), host(&both, false)), (Some(("s".into(), 1)), Some(("p".into(), 2))));
        let all = proxies(&[("HTTPS_PROXY", ""), ("https_proxy", "http://never:1"), ("all_proxy", "http://a:3/")]);
        assert_eq!((host(&all, true), host(&all, false)), (Some(("a".into(), 3)), Some(("a".into(), 3))));
        let one = proxies(&[("HTTP_PROXY", "http://p:2")]);
        assert_eq!((host(&one, true), host(&one, false)), (None, Some(("p".into(), 2))));
        let named = proxies(&[("HTTPS_PROXY", "http://me:w%40rd@s:1")]).to(true, "hub.example").unwrap().unwrap();
        assert_eq!((named.username(), named.password()), (Some("me"), Some("w@rd")));
    }

    #[test]
    fn an_address_that_is_none_is_refused_without_its_password() {
        let error = proxies(&[("HTTPS_PROXY", "gopher://me:word@s")]).to(true, "hub.example").unwrap_err().to_string();
        assert!(error.contains("env HTTPS_PROXY") && !error.contains("word"), "{error}");
    }

    #[test]
    fn hosts_of_no_proxy_are_reached_without() {
        let is_direct = |list: &str, host: &str| proxies(&[("NO_PROXY", list)]).is_direct(host);
        for (list, host) in [
            ("example.com", "example.com"),
            ("x, .example.com", "hub.Example.com"),
            ("example.com", "a.b.example.com"),
            ("*.example.com", "hub.example.com"),
            ("*", "hub.example.com"),
            ("*", "10.1.2.3"),
            ("10.0.0.0/8", "10.1.2.3"),
            ("127.0.0.1", "127.0.0.1"),
            ("0.0.0.0/0", "10.1.2.3"),
            ("fd00::/8", "[fd12::1]"),
            ("::1", "[::1]"),
        ] {
            assert!(is_direct(list, host), "{list} {host}");
        }
        for (list, host) in [
            ("", "example.com"),
            ("example.com", "notexample.com"),
            ("hub.example.com", "example.com"),
            ("10.0.0.0/8", "11.1.2.3"),
            ("10.0.0.0/33", "10.0.0.0"),
            ("10.0.0.0/x", "10.0.0.0"),
            ("::/0", "10.0.0.0"),
            (".", "example.com"),
        ] {
            assert!(!is_direct(list, host), "{list} {host}");
        }
    }
}
