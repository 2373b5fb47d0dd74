//! Makes text safe to show: hides secrets, and escapes control characters, which a terminal would obey. Every message
//! goes through [`brief`] when its [`super::Error`] is made, and all output through [`shown`] when it is printed.
use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::{LazyLock, PoisonError, RwLock};

use regex::Regex;

/// Replaces a secret.
const HIDDEN: &str = "***";
/// The fewest bytes of a secret; shorter values are words such as `1` or `true`.
const MIN_SECRET: usize = 8;

/// The secrets of this process: values of environment variables with names such as `HF_TOKEN`, and what [`hide`] was
/// given. They are hidden wherever they appear.
static SECRETS: LazyLock<RwLock<Vec<String>>> = LazyLock::new(|| {
    let is_secret = |name: &str| {
        let name = name.to_uppercase();
        ["TOKEN", "API_KEY", "SECRET", "PASSWORD", "PASSWD"].iter().any(|word| name.ends_with(word))
    };
    let values =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let values = values.filter(|(name, _)| is_secret(name)).map(|(_, value)| value.trim().to_owned());
    RwLock::new(values.filter(|value| value.len() >= MIN_SECRET).collect())
});

/// Hides `secret` in all text from now on, if it has at least 8 bytes.
pub fn hide(secret: &str) {
    let mut secrets = SECRETS.write().unwrap_or_else(PoisonError::into_inner);
    if secret.len() >= MIN_SECRET && !secrets.iter().any(|known| known == secret) {
        secrets.push(secret.to_owned());
    }
}

/// Patterns of secrets, with the replacement of each match.
static FORMS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let forms = [
        // scheme://user:password@host, hf://TOKEN@owner/name
        (r#"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s"'<>]*@"#, "${1}***@"),
        // ?token=…, &X-Amz-Signature=…
        (
            r#"(?i)([?&;][\w.-]*(?:token|key|secret|password|passwd|signature|credential|auth|sig)[\w.-]*=)[^&;\s"'<>#]+"#,
            "${1}***",
        ),
        (r#"(?i)\b((?:proxy-)?authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+)?)[^\s"',}]+"#, "${1}***"),
        (r"(?i)\b(bearer\s+)[a-z0-9._~+/=-]{8,}", "${1}***"),
        // Settings of other toolkits, in a line or a table.
        (
            r#"(?i)\b([\w.]*(?:hub_token|hf_token|auth_token|access_token|api_key|apikey|password)["']?(?:[ \t]*[:=][ \t]*| {2,})["']?)[^\s"',{}\[]+"#,
            "${1}***",
        ),
        (r"\b(hf_|api_org_|ghp_|gho_|github_pat_|glpat-|sk-)[A-Za-z0-9_-]{10,}", "${1}***"),
    ];
    forms.into_iter().filter_map(|(form, shown)| Some((Regex::new(form).ok()?, shown))).collect()
});

/// Whether a terminal may obey a character instead of printing it: control characters, and those of Unicode that turn
/// the direction of writing or break lines.
fn acts(letter: char) -> bool {
    match letter {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}' => true,
        letter => letter.is_control(),
    }
}

/// Escapes control characters, such as `\u{1b}`, except for line breaks and tabs.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if acts(letter) {
            let _ = write!(out, "{}", letter.escape_default()); // a String never fails
        } else {
            out.push(letter);
        }
    }
    Cow::Owned(out)
}

/// Replaces secrets by `***`: those that are known, and anything in the form of a token, a key or a password.
fn without_secrets(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    for secret in SECRETS.read().unwrap_or_else(PoisonError::into_inner).iter() {
        if text.contains(secret.as_str()) {
            text = Cow::Owned(text.replace(secret.as_str(), HIDDEN));
        }
    }
    for (form, shown) in FORMS.iter() {
        if let Cow::Owned(replaced) = form.replace_all(&text, *shown) {
            text = Cow::Owned(replaced);
        }
    }
    text
}

/// Makes a text safe to show: `without_secrets` and [`escaped`].
pub fn shown(text: &str) -> Cow<'_, str> {
    match without_secrets(text) {
        Cow::Borrowed(text) => escaped(text),
        Cow::Owned(text) => Cow::Owned(escaped(&text).into_owned()),
    }
}

/// The most characters of a message. A longer one keeps its beginning and its end.
const LONGEST: usize = 2000;
/// Characters of the end that a shortened message keeps.
const END: usize = 500;

/// The text as [`shown`], shortened, because a message may quote a file's content, however long that is.
pub fn brief(text: &str) -> String {
    let text = shown(text);
    let characters = text.chars().count();
    if characters <= LONGEST {
        return text.into_owned();
    }
    let at = |character: usize| text.char_indices().nth(character).map_or(text.len(), |(at, _)| at);
    let (begin, end) = (&text[..at(LONGEST - END)], &text[at(characters - END)..]);
    format!("{begin}… ({} characters left out) …{end}", characters - LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_in_every_form() {
        for (text, clean) in [
            ("cannot read https://user:CANARY@host/x", "cannot read https://***@host/x"),
            ("\"hf://CANARY@datasets/o/n/rows.jsonl\"", "\"hf://***@datasets/o/n/rows.jsonl\""),
            ("http://CANARY@h:80/a", "http://***@h:80/a"),
            ("https://h/x?token=CANARY&a=1", "https://h/x?token=***&a=1"),
            ("https://h/x?a=1&X-Amz-Signature=CANARY", "https://h/x?a=1&X-Amz-Signature=***"),
            ("Authorization: Bearer CANARY", "Authorization: Bearer ***"),
            ("{\"authorization\": \"Basic CANARY\"}", "{\"authorization\": \"Basic ***\"}"),
            ("train.hub_token: CANARY is unknown", "train.hub_token: *** is unknown"),
            ("train.hub_token=CANARY", "train.hub_token=***"),
            ("hf_CANARYCANARY is no repository", "hf_*** is no repository"),
        ] {
            assert_eq!(shown(text), clean);
        }
        hide("CANARY of this process");
        assert_eq!(shown("a CANARY of this process b"), "a *** b");
    }

    #[test]
    fn what_is_no_secret_stays() {
        for text in [
            "hf://datasets/owner/name@v1/data/rows.jsonl",
            "https://huggingface.co/owner/name",
            "eos_token: \"</s>\", new_tokens: [\"<a>\"]",
            "max_new_tokens=5, hf_transfer, a@b.c",
            "unknown key model.api_key\n  hint: `tunesmith config --docs`",
            "\"hub_token\": {\n  \"type\": \"string\"",
            "line\n\ttab \u{e9} \u{4f60}",
        ] {
            assert_eq!(shown(text), text);
        }
    }

    #[test]
    fn a_long_message_keeps_its_beginning_and_its_end() {
        let name = "é".repeat(3_000_000);
        let error = crate::Error::model(format!("a.safetensors: tensor {name}: expected F32")).context("merge");
        let message = error.message();
        assert!(message.chars().count() < 2100, "{}", message.chars().count());
        assert!(message.starts_with("merge: a.safetensors: tensor é") && message.ends_with(": expected F32"));
        assert!(message.contains("characters left out"));
        let short = "é".repeat(2000);
        assert_eq!(brief(&short), short);
    }

    #[test]
    fn what_a_terminal_obeys_is_written_out() {
        assert_eq!(shown("a\u{1b}[31mb\rc\u{7}\u{9b}1m\u{202e}"), "a\\u{1b}[31mb\\rc\\u{7}\\u{9b}1m\\u{202e}");
    }
}
