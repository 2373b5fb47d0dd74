//! Reads the hub's address, the cache folder and the token from the variables that every Hugging Face tool uses.
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tunesmith_base::error::shown::hide;
use tunesmith_base::error::{Error, Result};

/// A secret that gives access to repositories. It is only sent to the hub and never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken {
    secret: String,
    /// Whether users other than its owner can read the token's file.
    pub is_open: bool,
    /// The variable or file in which it was found.
    pub source: String,
}

impl HubToken {
    /// A token and its origin.
    pub fn new(secret: &str, source: impl Into<String>) -> Self {
        hide(secret.trim());
        Self { secret: secret.trim().to_owned(), is_open: false, source: source.into() }
    }

    #[cfg(feature = "hub")]
    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

/// Whether users other than its owner can read a file.
fn is_open(path: &Path) -> bool {
    #[cfg(unix)]
    return std::fs::metadata(path)
        .is_ok_and(|metadata| std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o044 != 0);
    #[cfg(not(unix))]
    false
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HubToken(from {})", self.source)
    }
}

/// How often, and after which pauses, a request is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The number of attempts before giving up; arriving bytes reset the count.
    pub attempts: u32,
    /// The pause after the first failure; it doubles each time.
    pub first_pause: Duration,
    /// The longest pause, including those that the hub asks for.
    pub longest_pause: Duration,
    /// How long to wait for a silent connection.
    pub silence: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: 5,
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(120),
            silence: Duration::from_secs(60),
        }
    }
}

/// Settings for the use of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// The folder of the cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// The token, if there is one.
    pub token: Option<HubToken>,
    /// Whether only the cache is used and nothing is asked of the hub: `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// How often, and after which pauses, to retry.
    pub pace: RetryPolicy,
}

impl HubSettings {
    /// From the environment: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`
    /// and their older names.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`] a variable has an invalid value.
    pub fn from_env() -> Result<Self> {
        Self::from(&|name| std::env::var(name).ok())
    }

    /// From variables that `get` looks up.
    ///
    /// # Errors
    /// As [`HubSettings::from_env`].
    pub fn from(get: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name: &str| get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let path = |name: &str| {
            set(name).map(|value| match (value.strip_prefix("~/"), set("HOME")) {
                (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
                _ => PathBuf::from(value),
            })
        };
        let is_on = |name: &str| set(name).is_some_and(|value| is_on(&value));
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(
                Error::config("env HF_ENDPOINT: not an address of the web").hint("such as https://huggingface.co")
            );
        }
        let home = path("HF_HOME").or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")));
        let home = home.or_else(|| path("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| home.as_ref().map(|home| home.join("hub"))).ok_or_else(|| {
            Error::config("there is no place for downloads: HOME is not set")
                .hint("set HF_HOME or HF_HUB_CACHE to a folder")
        })?;
        let mut token = None;
        if !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            let variable = |name: &str| set(name).map(|secret| HubToken::new(&secret, format!("env {name}")));
            let file = |path: PathBuf| {
                let secret = tunesmith_base::files::read_text(&path, tunesmith_base::files::SMALL)
                    .ok()
                    .filter(|text| !text.trim().is_empty())?;
                Some(HubToken { is_open: is_open(&path), ..HubToken::new(&secret, path.display().to_string()) })
            };
            token = variable("HF_TOKEN")
                .or_else(|| variable("HUGGING_FACE_HUB_TOKEN"))
                .or_else(|| variable("HUGGINGFACE_HUB_TOKEN"))
                .or_else(|| path("HF_TOKEN_PATH").and_then(file))
                .or_else(|| home.map(|home| home.join("token")).and_then(file));
        }
        if let Some(token) = token.as_ref().filter(|token| !token.secret.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(Error::config(format!(
                "the token of the hub from {} holds other than letters and digits",
                token.source
            ))
            .hint("it begins with hf_ and is one word"));
        }
        let offline = OFFLINE.into_iter().any(is_on);
        Ok(Self { endpoint, cache, token, offline, pace: RetryPolicy::default() })
    }

    /// The hub's address for messages, without a user name and password.
    pub fn shown_endpoint(&self) -> String {
        match self.endpoint.split_once("://").map(|(scheme, rest)| (scheme, rest.split_once('@'))) {
            Some((scheme, Some((_, host)))) => format!("{scheme}://{host}"),
            _ => self.endpoint.clone(),
        }
    }

    /// Makes text from outside fit for messages: one line without secrets, of at most 300 characters.
    #[cfg(feature = "hub")]
    pub(super) fn clean(&self, text: &str) -> String {
        let mut text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        if let Some(token) = &self.token {
            text = text.replace(&token.secret, "***");
        }
        text = text.replace(&self.endpoint, &self.shown_endpoint());
        text.trim().chars().take(300).collect()
    }
}

/// Variables that forbid all requests.
const OFFLINE: [&str; 2] = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];

fn is_on(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.trim().to_lowercase().as_str())
}

/// The variable that forbids all requests, if one does.
pub fn offline() -> Option<&'static str> {
    OFFLINE.into_iter().find(|name| std::env::var(name).is_ok_and(|value| is_on(&value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<HubSettings> {
        let found = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        HubSettings::from(&found)
    }

    #[test]
    fn variables_have_the_order_of_the_other_tools() {
        let plain = settings(&[("HOME", "/h")]).unwrap();
        assert_eq!((plain.endpoint.as_str(), plain.offline), ("https://huggingface.co", false));
        assert_eq!(plain.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        let cache = |variables: &[(&str, &str)]| settings(variables).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/hf")]), PathBuf::from("/h/hf/hub"));
        assert_eq!(cache(&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "/b")]), PathBuf::from("/b"));
        assert!(settings(&[]).unwrap_err().hint_text().unwrap().contains("HF_HOME"));
        assert!(settings(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "1")]).unwrap().offline);
        assert!(!settings(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
        assert_eq!(settings(&[("HOME", "/h"), ("HF_ENDPOINT", "http://m/")]).unwrap().endpoint, "http://m");
        assert!(settings(&[("HOME", "/h"), ("HF_ENDPOINT", "m")]).is_err());
    }

    #[test]
    fn tokens_are_found_in_order_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_home\n").unwrap();
        std::fs::write(folder.path().join("other"), "hf_path\n").unwrap();
        let (home, other) = (folder.path().to_str().unwrap(), folder.path().join("other"));
        let token = |more: &[(&str, &str)]| {
            let mut variables = more.to_vec();
            variables.push(("HF_HOME", home));
            settings(&variables).unwrap().token.map(|token| token.secret)
        };
        let other = other.to_str().unwrap();
        assert_eq!(token(&[]).as_deref(), Some("hf_home"));
        assert_eq!(token(&[("HF_TOKEN_PATH", other)]).as_deref(), Some("hf_path"));
        assert_eq!(token(&[("HUGGING_FACE_HUB_TOKEN", "hf_old"), ("HF_TOKEN_PATH", other)]).as_deref(), Some("hf_old"));
        assert_eq!(token(&[("HF_TOKEN", " hf_new "), ("HUGGINGFACE_HUB_TOKEN", "hf_old")]).as_deref(), Some("hf_new"));
        assert_eq!(token(&[("HF_TOKEN", "hf_new"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        let all = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_secret")]).unwrap();
        assert!(!format!("{all:?}").contains("hf_secret"));
        let bad = settings(&[("HF_HOME", home), ("HF_TOKEN", "hf_se cret")]).unwrap_err().to_string();
        assert!(bad.contains("env HF_TOKEN") && !bad.contains("cret"), "{bad}");
    }
}
