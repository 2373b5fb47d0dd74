//! Keys of PEFT's `rank_pattern` and `alpha_pattern`, of which a file may have one for each module of a large model.
use super::pattern::Pattern;
use tunesmith_base::error::Result;

/// A key that matches a module's name as the expression `^(?:.*\.)?(?:KEY)$` does. A key of letters and dots is compared by itself:
/// to compile an expression for each of many thousands would take seconds.
#[derive(Debug, Clone)]
pub struct ModuleKey(Form);

#[derive(Debug, Clone)]
enum Form {
    /// The end of a name, or with `whole` all of it. `None` stands for any character: an expression's dot.
    Plain {
        whole: bool,
        chars: Vec<Option<char>>,
    },
    Expression(Pattern),
}

impl ModuleKey {
    /// Reads the key `written` of `option`.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn new(option: &str, written: &str) -> Result<Self> {
        Ok(Self(match plain(written) {
            Some(form) => form,
            None => Form::Expression(Pattern::new(option, written, &format!(r"^(?:.*\.)?(?:{written})$"))?),
        }))
    }

    /// Whether it matches a module's name.
    pub fn is_match(&self, name: &str) -> bool {
        match &self.0 {
            Form::Plain { whole, chars } => {
                let mut left = name.chars();
                let ends = chars.iter().rev().all(|wanted| {
                    left.next_back().is_some_and(|found| wanted.map_or(found != '\n', |wanted| wanted == found))
                });
                let before = left.as_str();
                ends && (before.is_empty() || !whole && before.ends_with('.'))
            }
            Form::Expression(pattern) => pattern.is_match(name),
        }
    }
}

/// A key of letters, digits, dots, `_` and `-`, dots and others escaped or not, perhaps behind `^`; `None` for any other expression.
fn plain(key: &str) -> Option<Form> {
    let (whole, rest) = key.strip_prefix('^').map_or((false, key), |rest| (true, rest));
    let mut chars = Vec::with_capacity(rest.len());
    let mut left = rest.chars();
    while let Some(next) = left.next() {
        chars.push(match next {
            '.' => None,
            '\\' => Some(left.next().filter(|escaped| matches!(escaped, '.' | '-'))?),
            _ if next.is_ascii_alphanumeric() || matches!(next, '_' | '-') => Some(next),
            _ => return None,
        });
    }
    Some(Form::Plain { whole, chars })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_matches_what_its_expression_matches() {
        let names = [
            "",
            ".",
            "q_proj",
            "qxproj",
            "x.q_proj",
            "model.layers.0.self_attn.q_proj",
            "model.layers.10.self_attn.q_proj",
            "layers.0.self_attn.q_proj",
            "layersX0.self_attn.q_proj",
            "model.layers.0.self_attn.q_proj.q_proj",
            "big_q_proj",
            "model.layers.0.mlp-x",
            "modèle.q_proj",
        ];
        let keys = [
            "",
            ".",
            "q_proj",
            "q.proj",
            "^q_proj",
            "layers.0.self_attn.q_proj",
            r"layers\.0\.self_attn\.q_proj",
            r"^model\.layers\.0\.self_attn\.q_proj",
            "^layers.0.self_attn.q_proj",
            "mlp-x",
            r"mlp\-x",
            "......",
            r".*\.q_proj",
            "q_proj|x",
            r"layers\.\d+\.self_attn\.q_proj",
            "(q|k)_proj",
            "q_proj$",
            r"\w+",
        ];
        for key in keys {
            let whole = Pattern::new("x", key, &format!(r"^(?:.*\.)?(?:{key})$")).unwrap();
            let own = ModuleKey::new("x", key).unwrap();
            for name in names {
                assert_eq!(own.is_match(name), whole.is_match(name), "{key:?} on {name:?}");
            }
        }
        for wrong in ["q_proj)", "(", "[", r"q\", "*"] {
            assert!(
                ModuleKey::new("x", wrong).unwrap_err().message().contains("no valid regular expression"),
                "{wrong}"
            );
        }
    }
}
