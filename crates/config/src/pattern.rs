//! Regular expressions on the names of modules and tensors, with look-around and back references as Python's `re` has
//! them: PEFT's users write `^(?!.*vision).*_proj$`.
use fancy_regex::{Captures, Regex};

use tunesmith_base::error::{Error, Result};

/// A long module name that every expression is tried on: one that backtracks too much is refused.
const LONG_NAME: &str = "base_model.model.model.language_model.layers.127.mlp.experts.gate_up_proj.lora_A.weight";

/// A compiled regular expression in Python's syntax, with a limit of steps.
#[derive(Debug, Clone)]
pub struct Pattern(Regex);

impl Pattern {
    /// Compiles `expression`. `written` is the part of it that the user wrote at `option`, for errors.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it is no regular expression, or takes too many steps on a name.
    pub fn new(option: &str, written: &str, expression: &str) -> Result<Self> {
        Self::compile(expression)
            .map_err(|error| error.context(format!("{option}: {written:?} is no valid regular expression")))
    }

    /// As [`Pattern::new`]; the error is the reason without the key.
    pub(super) fn compile(expression: &str) -> Result<Self> {
        let regex = Regex::new(expression).map_err(|error| {
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
            Error::config(reason).with_source(error)
        })?;
        let steps = regex.is_match(LONG_NAME);
        steps.map(|_| Self(regex)).map_err(|error| Error::config("it takes too many steps").with_source(error))
    }

    /// Whether the expression matches anywhere in a name, as Python's `re.search`.
    pub fn is_match(&self, name: &str) -> bool {
        self.0.is_match(name).unwrap_or(false)
    }

    /// The text that the named group matches; `None` without a match.
    pub fn capture<'t>(&self, name: &'t str, group: &str) -> Option<&'t str> {
        let captures: Captures<'t> = self.0.captures(name).ok()??;
        captures.name(group).map(|found| found.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn expressions_of_python_match_or_are_refused_with_the_reason() {
        let language = Pattern::new("x", "x", r"^(?!.*vision).*_proj$").unwrap();
        assert!(language.is_match("model.layers.0.self_attn.q_proj"));
        assert!(!language.is_match("vision_tower.layers.0.self_attn.q_proj"));
        let block = Pattern::new("x", "x", r"layers\.(?P<idx>\d+)\.(?=mlp)").unwrap();
        assert_eq!(block.capture("model.layers.12.mlp.up_proj", "idx"), Some("12"));
        assert_eq!(block.capture("model.layers.12.self_attn.q_proj", "idx"), None);
        for wrong in ["(q", "q_proj)", "*", r"(?=b)(?:(?:\w|\w\w|\.)+)+(?<=!)$"] {
            let error = Pattern::new("tuning.lora.target_modules", wrong, wrong).unwrap_err();
            assert!(error.message().contains("is no valid regular expression: "), "{wrong}: {error}");
        }
    }
}
