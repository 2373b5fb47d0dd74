//! HTML from untrusted text: everything that comes from data, models or configuration passes through [`escape`].
use std::fmt::Write as _;

/// Escapes `text` for an element or a quoted attribute, and makes control characters visible.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(character),
            control if control.is_control() => out.push('\u{fffd}'),
            other => out.push(other),
        }
    }
    out
}

/// A table of two columns, label and value, both escaped.
pub fn pairs(rows: &[(String, String)]) -> String {
    let mut out = String::from("<table class=\"pairs\">");
    for (label, value) in rows {
        let _ = write!(out, "<tr><th>{}</th><td>{}</td></tr>", escape(label), escape(value));
    }
    out + "</table>"
}

/// Cuts `text` to at most `limit` characters, and says how many are missing.
pub fn clipped(text: &str, limit: usize) -> String {
    let count = text.chars().count();
    if count <= limit {
        return text.to_owned();
    }
    let head: String = text.chars().take(limit).collect();
    format!("{head} … ({} more characters)", count - limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_its_element() {
        assert_eq!(escape("<b a='1' c=\"2\">&\u{7}\n"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;\u{fffd}\n");
        assert!(pairs(&[("<".into(), "&".into())]).contains("<th>&lt;</th><td>&amp;</td>"));
        assert_eq!(clipped("äbc", 2), "äb … (1 more characters)");
    }
}
