//! The keys of `config.json` as Transformers' configuration classes declare them: their types, and their other names.
//!
//! Transformers refuses a value of another type, null included, also of a key that this program has no use for.
use serde_json::Value;

use super::hf_json::{SPECIAL, Source};
use tunesmith_base::error::Result;

/// Lines `key: types: model types`, and `other name: = key: model types`. `scripts/golden/key_types.py` writes it.
static LINES: &str = include_str!("key_types.txt");

/// The lines about a class: a key, and its types or the key that it is another name of.
fn lines(model_type: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    LINES.lines().filter_map(move |line| {
        let (key, rest) = line.split_once(": ")?;
        let (types, models) = rest.rsplit_once(": ")?;
        models.split(' ').any(|model| model == model_type).then_some((key, types))
    })
}

/// Whether the class declares the key and allows null.
pub(super) fn allows_null(model_type: &str, key: &str) -> bool {
    lines(model_type).any(|(found, types)| found == key && types.split(" | ").any(|kind| kind == "null"))
}

impl Source<'_> {
    /// The same object with the declared names of keys that stand under another name. As in Transformers, they take precedence over
    /// those under the declared name, and no type is declared for them.
    pub(super) fn renamed(&self, model_type: &str) -> Self {
        let mut renamed = self.clone();
        for (other, types) in lines(model_type) {
            let Some(key) = types.strip_prefix("= ") else { continue };
            if let Some(value) = renamed.map.remove(other) {
                renamed.map.insert(key.to_owned(), value);
            }
        }
        renamed
    }

    /// Refuses a value of another type than the class of `model_type` declares.
    pub(super) fn check_types(&self, model_type: &str) -> Result<()> {
        for (key, types) in lines(model_type).filter(|(_, types)| !types.starts_with('=')) {
            let Some(value) = self.map.get(key) else { continue };
            if !types.split(" | ").any(|kind| is_of(value, kind)) {
                return Err(self.mismatch(key, &expected(types)));
            }
        }
        Ok(())
    }
}

/// Whether the value is of the type, in the words of Python.
fn is_of(value: &Value, kind: &str) -> bool {
    let special = value.get(SPECIAL).is_some();
    match kind {
        "null" => value.is_null(),
        "bool" => value.is_boolean(),
        "int" => value.is_i64() || value.is_u64(),
        "float" => value.is_f64() || special,
        "str" => value.is_string(),
        "list" => value.is_array(),
        "dict" => value.is_object() && !special,
        _ => match (value, kind.strip_prefix("list[").and_then(|kind| kind.strip_suffix(']'))) {
            (Value::Array(items), Some(kinds)) => {
                items.iter().all(|item| kinds.split(", ").any(|kind| is_of(item, kind)))
            }
            // A word in quotation marks.
            _ => value
                .as_str()
                .is_some_and(|word| kind.strip_prefix('"').and_then(|kind| kind.strip_suffix('"')) == Some(word)),
        },
    }
}

/// What a message says of the types.
fn expected(types: &str) -> String {
    let both = types.contains("float") && types.contains("int");
    let word = |kind: &str| match kind {
        "bool" => "true or false".to_owned(),
        "float" if both => "a number".to_owned(),
        "float" => "a number with a decimal point, such as 1.0".to_owned(),
        "int" => "a whole number".to_owned(),
        "str" => "a string".to_owned(),
        "list" => "a list".to_owned(),
        "dict" => "an object".to_owned(),
        kind => kind.replace("list[", "a list of [").replace("str]", "strings]"),
    };
    let words: Vec<String> = types.split(" | ").filter(|kind| !(both && *kind == "int")).map(word).collect();
    format!("{}, as its class in Transformers declares", words.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use serde_json::json;
    use std::path::Path;

    fn read(model_type: &str, key: &str, value: &Value) -> Result<Arch> {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8,
            "vocab_size": 10, "head_dim": 4, "num_key_value_heads": 2, "layer_types": ["full_attention", "full_attention"],
        });
        config[key] = value.clone();
        Arch::from_json(&config.to_string(), Path::new("config.json"))
    }

    #[test]
    fn values_of_other_types_are_refused_also_of_keys_that_nothing_here_reads() {
        for (key, value) in [
            ("use_cache", json!(null)),
            ("use_cache", json!(1)),
            ("attention_dropout", json!("0")),
            ("pretraining_tp", json!(1.5)),
            ("rms_norm_eps", json!(1)),
            ("eos_token_id", json!([1, "2"])),
        ] {
            let error = read("llama", key, &value).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} is {value}, expected ")), "{error}");
        }
        for (key, value) in
            [("pretraining_tp", json!(null)), ("eos_token_id", json!([1, 2])), ("eos_token_id", json!(null))]
        {
            read("llama", key, &value).unwrap();
        }
    }

    #[test]
    fn only_keys_of_the_class_have_types() {
        read("mistral", "pretraining_tp", &json!("1")).unwrap();
        assert!(read("gemma4_text", "use_bidirectional_attention", &json!("some")).is_err());
    }

    #[test]
    fn another_name_of_a_key_takes_precedence() {
        let text = r#"{"norm_eps": 1e-5, "rms_norm_eps": 1e-3}"#;
        let source = Source::parse(text, Path::new("config.json")).unwrap().renamed("lfm3");
        assert_eq!(Value::Object(source.map), json!({"norm_eps": 1e-3}));
    }

    #[test]
    fn numbers_that_json_does_not_know_are_floats() {
        let infinite = json!([0.0, {SPECIAL: "Infinity"}]);
        assert!(is_of(&infinite, "list[float]") && !is_of(&infinite, "list[int]"));
        assert!(is_of(&json!([1, 2.5]), "list[float, int]") && !is_of(&json!({SPECIAL: "NaN"}), "dict"));
    }
}
